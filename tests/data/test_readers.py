"""Every reader, and every complaint about a file with its full text and place."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.data import from_dataframe, load_table, read_table, table_from_arrays
from quire.errors import DataError
from quire.options import Table as Options

ROWS = "".join(f"{i},{2 * i},{'ab'[i % 2]}\n" for i in range(20))
HEADER = "x,y,c\n"


def write(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def complaint(path: Path, options: Options | None = None, **arguments: object) -> str:
    with pytest.raises(DataError) as caught:
        load_table(path, options, **arguments)
    return str(caught.value)


FAULTS = {
    "ragged, too short": (
        HEADER + ROWS + "1,2\n",
        "{}:22:c: a row of 2 cells where the first has 3\n  expected: 3 cells\n  fix: add the missing cell",
    ),
    "ragged, too long": (
        HEADER + ROWS + "1,2,a,9\n",
        "{}:22:4: a row of 4 cells where the first has 3 (value '9')\n  expected: 3 cells\n"
        "  fix: put a cell that contains the delimiter in quotes",
    ),
    "text among numbers": (
        HEADER + ROWS + "1,abc,a\n",
        "{}:22:y: text in a numeric column (value 'abc')\n"
        "  expected: a number, or an empty cell for a missing value\n"
        "  fix: correct the cell; or read the column as categories with --table.categories 'y'",
    ),
    "text among few numbers": (
        "x,y,c\n1,2,a\n3,4,b\n5,abc,a\n6,7,b\n8,9,a\n",
        "{}:4:y: text in a numeric column (value 'abc')\n"
        "  expected: a number, or an empty cell for a missing value\n"
        "  fix: correct the cell; or read the column as categories with --table.categories 'y'",
    ),
    "text in the first line without header": (
        "q,2,a\n" + ROWS,
        "{}:1:column 1: text in a numeric column (value 'q')\n"
        "  expected: a number, or an empty cell for a missing value\n"
        "  fix: correct the cell; if the first line holds names, use --table.header yes",
    ),
    "a date that does not exist": (
        "d,c\n" + "".join(f"2024-02-{i:02d},{'ab'[i % 2]}\n" for i in range(11, 31)),
        "{}:21:d: not a date in a column of dates (value '2024-02-30')\n"
        "  expected: a date such as 2024-02-29 or 2024-02-29T13:45:00, or an empty cell for a missing value\n"
        "  fix: correct the cell",
    ),
    "decimal commas": (
        "x;y\n" + "".join(f"{i};{i},5\n" for i in range(20)),
        "{}:2:y: a number with a comma (value '0,5')\n"
        "  expected: decimals after a point, and no mark between thousands\n"
        "  fix: write 3.5 for 3,5 and 1000 for 1,000; where commas stand before decimals, "
        "--table.decimal comma",
    ),
    "bad UTF-8": (
        (HEADER + ROWS).encode() + b"1,\xe9,a\n",
        "{}:22: bytes that are not UTF-8, at byte 3 of the line (value b'\\xe9')\n  expected: text in UTF-8\n"
        "  fix: save the file as UTF-8 (it may be Latin-1 or Windows-1252)",
    ),
    "UTF-16": (
        (HEADER + ROWS).encode("utf-16"),
        "{}:1: the file is UTF-16\n  expected: text in UTF-8\n  fix: save it again as UTF-8",
    ),
    "duplicate column": (
        "x,x,c\n" + ROWS,
        "{}:1:2: columns 1 and 2 have the same name (value 'x')\n"
        "  expected: a name of its own for each column\n"
        "  fix: rename one of them; if the first line holds no names, use --table.header no",
    ),
    "one class only": (
        "x,c\n1,a\n2,a\n3,a\n4,a\n",
        "{}:c: the target has one class only (value 'a')\n  expected: at least two classes\n"
        "  fix: choose another target, or add rows of another class",
    ),
    "empty file": ("", "{}: the file is empty\n  expected: a table with at least one row"),
    "blank file": (" \n\n", "{}: the file is empty\n  expected: a table with at least one row"),
    "header alone": (
        HEADER,
        "{}:1: a header but no rows below it\n  expected: at least one row\n"
        "  fix: if the first line is a row, use --table.header no",
    ),
    "infinity": (
        HEADER + ROWS + "-inf,2,a\n",
        "{}:22:x: an infinite number (value '-inf')\n"
        "  expected: a finite number, or an empty cell for a missing value\n  fix: correct the cell",
    ),
    "a number beyond float64": (
        HEADER + ROWS + "1e999,2,a\n",
        "{}:22:x: an infinite number (value '1e999')\n"
        "  expected: a finite number, or an empty cell for a missing value\n  fix: correct the cell",
    ),
    "an open quote": (
        HEADER + ROWS + '"1,2,a\n',
        "{}:22: a quoted cell that cannot be read (unexpected end of data)\n"
        '  expected: quotes that close, and "" for a quote inside them',
    ),
    "too few rows": (
        "x,y\n1,2\n2,3\n",
        "{}: 2 rows for 3 parts (validation 0.15, test 0.15)\n"
        "  expected: at least 3 rows, and one left to train on\n"
        "  fix: give more rows, or set --table.validation or --table.test to 0",
    ),
    "one column": (
        "x\n1\n2\n3\n4\n",
        "{}: no column beside the target 'x'\n  expected: at least one column to predict from\n"
        "  fix: separate columns by commas, tabs or semicolons, or name the one with --table.delimiter",
    ),
    "a title above the table": (
        "my data\n\nx,y\n1,2\n3,4\n",
        "{}:3:2: a row of 2 cells where the first has 1 (value 'y')\n  expected: 1 cell\n"
        "  fix: remove lines above the table, such as a title; or name the delimiter with --table.delimiter",
    ),
    "prices": (
        "x;y\n" + "".join(f"€{i};{i % 2}\n" for i in range(20)),
        "{}:2:x: a number with a mark or a unit (value '€0')\n"
        "  expected: digits, with a point before decimals\n"
        "  fix: write 5 for 5 % or €5, and 1000.5 for 1.000,5 (or use --table.decimal comma); "
        "or leave the column out with --table.drop 'x'",
    ),
    "days first": (
        "when,y\n" + "".join(f"{i}.02.2024,{i % 2}\n" for i in range(1, 21)),
        "{}:2:when: a date in another form (value '1.02.2024')\n"
        "  expected: a date such as 2024-02-29 or 2024-02-29T13:45:00\n"
        "  fix: write year, month, day; or leave the column out with --table.drop 'when'; "
        "or read it as categories with --table.categories",
    ),
    "a target without values": (
        "x,y\n" + "".join(f"{i},\n" for i in range(9)),
        "{}:y: the target has no values\n  expected: numbers or classes\n"
        "  fix: choose another column with --target",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, tmp_path: Path) -> None:
    content, expected = FAULTS[name]
    path = write(tmp_path, content)
    assert complaint(path) == expected.format(path)


def test_faults_of_the_target(tmp_path: Path) -> None:
    path = write(tmp_path, "price,size,town\n1.5,2,a\n2.5,3,b\n3.5,4,a\n")
    assert complaint(path, targets="prize") == (
        f"{path}: missing column 'prize', named by the target\n  expected: one of price, size, town\n"
        "  fix: did you mean 'price'?"
    )
    assert complaint(path, targets=4) == (
        f"{path}: target position 4 in a table of 3 columns\n"
        "  expected: 1 to 3 from the left, or -1 to -3 from the right"
    )
    assert complaint(path, Options(drop=("sise",))).startswith(
        f"{path}: missing column 'sise', named by --table.drop"
    )
    assert complaint(path, targets="town", kind="regression").startswith(
        f"{path}:town: the target holds text"
    )


def test_missing_values_can_be_refused(tmp_path: Path) -> None:
    fix = "\n  expected: a value in each cell\n  fix: fill the cell in or remove the row"
    path = write(tmp_path, HEADER + ROWS + "NA,2,a\n")
    assert complaint(path, Options(missing="refuse")) == f"{path}:22:x: a missing value (value 'NA'){fix}"
    path = write(tmp_path, HEADER + ROWS + "1,2,\n")
    assert complaint(path, Options(missing="refuse")) == f"{path}:22:c: the target is missing (value ''){fix}"
    kept = load_table(path)
    assert len(kept.table) == 20
    assert kept.warnings[1:] == ("1 of 21 rows have no target and are left out, the first in line 22",)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    assert complaint(write(tmp_path, "1,2\n", "t.xlsx")).startswith(
        f"{tmp_path / 't.xlsx'}: a file of kind '.xlsx'"
    )
    assert "a compressed file" in complaint(write(tmp_path, b"PK\x03\x04 and so on"))
    assert "not a readable Parquet file" in complaint(write(tmp_path, b"PAR1", "t.parquet"))
    assert "does not begin with b'PK'" in complaint(write(tmp_path, b"nothing", "t.npz"))
    assert complaint(tmp_path).startswith(f"{tmp_path}: a folder")
    write(tmp_path, ROWS, "house.csv")
    assert complaint(tmp_path / "hose.csv").endswith("fix: did you mean 'house.csv'?")
    with pytest.raises(DataError, match="did you mean 'iris'"):
        load_table("irsi")


def test_places_count_lines_not_rows(tmp_path: Path) -> None:
    """A quoted newline and blank lines move what follows; the place must move with them."""
    path = write(tmp_path, 'x,note\n1,"two\nlines"\n\n' + "2,b\n2,b\n" * 10 + "\nzz,b\n")
    # 1 header, 2-3 first row, 4 blank, 5-24 rows, 25 blank, 26 the fault
    assert complaint(path).startswith(f"{path}:26:x: text in a numeric column (value 'zz')")
    assert read_table(path).lines[:3].tolist() == [2, 5, 6]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("name", "delimiter"), [("t.csv", ","), ("t.csv", ";"), ("t.csv", "\t"), ("t.tsv", "\t")]
)
def test_delimiters_newlines_and_byte_order_mark(
    tmp_path: Path, name: str, delimiter: str, newline: str
) -> None:
    text = (HEADER + ROWS + "\n\n").replace(",", delimiter).replace("\n", newline)
    table = read_table(write(tmp_path, b"\xef\xbb\xbf" + text.encode(), name))
    assert table.names == ["x", "y", "c"]
    assert table.row(3) == {"x": "3", "y": "6", "c": "b"}
    assert table.lines.tolist() == list(range(2, 22))


LONG = "0,1,2,3,4,5,6,7,8,9"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b\n1,2\n", True),
        ("1,2\n3,4\n", False),
        ("2024-01-01,a\n2024-01-02,b\n", False),
        ("name,town\nbob,rome\n", True),
        ("bob,rome\nann,rome\n", False),
        (",a\n1,u\n2,v\n", True),
        (",u,v\n1,u,v\n", False),
        ("x,y\n,?\n3,4\n", True),
        ("0,1,2\n0.5,1.5,3\n", True),
        (",0,1,2\n0,7,8,9\n", True),
        ("0,1,2\n0,1,2\n", False),
        ("1,2,3\n4,5,6\n", False),
        ("0,1\n5,6\n", False),
        (",0,1\n0,7,8\n1,5,6\n", True),
        (",0,1\n,7,8\n", False),
        ("0,1,2\n0,2,1\n1,0,2\n", False),
        ("0,1,2\n0,2,3\n3,2,7\n", False),
        ("0,1,2\n7,8,x\n", True),
        (f"{LONG}\n{LONG.replace('0', '255')}\n", True),
        (f"{LONG}\n{LONG[::-1]}\n", False),
    ],
)
def test_header_is_recognised(tmp_path: Path, text: str, named: bool) -> None:
    table = read_table(write(tmp_path, text))
    assert table.named == named
    assert len(table) == text.count("\n") - named
    assert read_table(write(tmp_path, text), Options(header="yes")).named
    unnamed = read_table(write(tmp_path, text), Options(header="no"))
    assert unnamed.names == [f"column {i + 1}" for i in range(text.split("\n")[0].count(",") + 1)]
    assert unnamed.lines[0] == 1


def test_a_header_before_lines_that_are_longer_than_a_sample(tmp_path: Path) -> None:
    columns = 9_000
    first, other = ",".join(map(str, range(columns))), ",".join(["0.1234567"] * columns)
    table = read_table(write(tmp_path, f"{first}\n{other}\n{other}\n"))
    assert table.named
    assert table.names[-1] == str(columns - 1)
    assert len(table) == 2


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=6)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), width=st.integers(2, 4), delimiter=st.sampled_from(",;\t"))
def test_what_csv_writes_is_read(tmp_path: Path, data: st.DataObject, width: int, delimiter: str) -> None:
    """Any cells survive a round trip through Python's csv writer, and each row knows its line."""
    rows = data.draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=6))
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writerow([f"name {i}" for i in range(width)])
    expected_lines = []
    for row in rows:
        expected_lines.append(1 + len(io.StringIO(buffer.getvalue(), newline="").readlines()))
        writer.writerow(row)
    option = {",": "comma", ";": "semicolon", "\t": "tab"}[delimiter]
    table = read_table(write(tmp_path, buffer.getvalue()), Options(header="yes", delimiter=option))
    assert [list(table.row(i).values()) for i in range(len(table))] == rows
    assert table.lines.tolist() == expected_lines


def test_parquet_keeps_types(tmp_path: Path) -> None:
    columns = {
        "n": pa.array([1, None, 3], pa.int32()),
        "b": pa.array([True, False, None]),
        "c": pa.array(["NA", "u", None]).dictionary_encode(),
        "zip": pa.array(["01", "02", "01"]),
        "__index_level_0__": pa.array([7, 8, 9]),
    }
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table(columns), path)
    table = read_table(path)
    assert table.names == ["n", "b", "c", "zip"]
    assert table.row(0) == {"n": 1, "b": True, "c": "NA", "zip": "01"}
    data = load_table(table, Options(validation=0, test=0), targets="zip")
    # In a typed file "NA" is a label, and digits that were saved as text stay text.
    assert "c=NA" in data.preparation.feature_names
    assert data.preparation.target.classes == ["01", "02"]
    bad = tmp_path / "bad.parquet"
    parquet.write_table(pa.table({"x": [[1], [2], [3]], "y": [0.5, 1.5, 2.5]}), bad)
    assert complaint(bad).startswith(f"{bad}:x: values of type list")


NESTED = {
    "some lists": pa.array([[1.0, 2.0]] * 9),
    "record": pa.array([{"part": 1}] * 9),
    "pairs": pa.array([[("key", 1)]] * 9, pa.map_(pa.string(), pa.int64())),
    "fixed": pa.array([[1, 2]] * 9, pa.list_(pa.int32(), 2)),
}


def test_lists_in_parquet_can_be_dropped_and_are_ignored_afterwards(tmp_path: Path) -> None:
    plain = {"n": [float(i) for i in range(9)], "y": ["a", "b", "c"] * 3}
    path, flat = tmp_path / "t.parquet", tmp_path / "flat.parquet"
    parquet.write_table(pa.table({"n": plain["n"], **NESTED, "y": plain["y"]}), path)
    parquet.write_table(pa.table(plain), flat)
    assert read_table(path).names == ["n", *NESTED, "y"]
    assert complaint(path) == (
        f"{path}:some lists: values of type list<element: double>\n"
        "  expected: one number, boolean, date or text in each cell\n"
        "  fix: leave the column out with --table.drop 'some lists'"
    )
    for name in NESTED:
        rest = tuple(other for other in NESTED if other != name)
        assert f"{path}:{name}: values of type" in complaint(path, Options(drop=rest))
        assert f"{path}:{name}: values of type" in complaint(path, Options(drop=rest), targets=name)
    data = load_table(path, Options(drop=tuple(NESTED)))
    same = load_table(flat)
    assert data.preparation.feature_names == same.preparation.feature_names == ["n"]
    np.testing.assert_array_equal(data.train.inputs, same.train.inputs)
    # A file to predict on may have such columns too, and a column of training must not be one of them.
    prepared = same.preparation.transform(same.preparation.read(path))
    np.testing.assert_array_equal(prepared.data.inputs, same.preparation.transform(same.table).data.inputs)
    parquet.write_table(pa.table({"n": NESTED["fixed"]}), path)
    with pytest.raises(DataError, match="n: values of type list"):
        same.preparation.transform(same.preparation.read(path))


def test_the_last_column_is_the_target_unless_told_and_it_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + ROWS)
    assert load_table(path).warnings == ("the target is 'c', the last column; --target names another",)
    assert load_table(path, Options(drop=("c",))).warnings[0].startswith("the target is 'y', the last column")
    assert not load_table(path, targets="c").warnings
    assert not load_table("iris").warnings


def test_text_is_no_target_of_a_regression(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + ROWS)
    assert complaint(path, targets="c", kind="regression") == (
        f"{path}:c: the target holds text\n  expected: numbers\n"
        "  fix: choose another target, or a recipe for classes such as mlp"
    )
    stray = write(tmp_path, HEADER + ROWS.replace("3,6,b", "3,six,b"))
    assert f"{stray}:5:y: text in a numeric" in complaint(stray, targets="y", kind="regression")


def test_a_delimiter_at_the_end_of_each_line_is_no_target(tmp_path: Path) -> None:
    rows = "".join(f"{i},{'ab'[i % 2]},\n" for i in range(20))
    data = load_table(write(tmp_path, "x,c,\n" + rows))
    assert data.preparation.target.name == "c"
    assert data.warnings[1] == "column 'column 3' is left out: it has no values"
    # Named, it is what it is called.
    with pytest.raises(DataError, match="the target has no values"):
        load_table(write(tmp_path, "x,c,note\n" + rows))


def test_an_index_without_a_name_is_left_out(tmp_path: Path) -> None:
    """As pandas writes it; predicting takes files with and without it."""
    rows = [f"{7 * i},{i * i % 5},{'ab'[i % 2]}" for i in range(20)]
    data = load_table(write(tmp_path, ",x,c\n" + "\n".join(rows) + "\n"))
    assert data.preparation.feature_names == ["x"]
    assert "column 'column 1' is left out: it has no name and numbers the rows" in data.warnings
    without = write(tmp_path, "x\n3\n", "new.csv")
    assert data.preparation.transform(data.preparation.read(without)).data.inputs.shape == (1, 1)
    # Not one that has a name, nor numbers that come again, nor fractions.
    rest = [row.partition(",")[2] for row in rows]
    for head, first in (("id", range(20)), ("", [1] * 20), ("", [i + 0.5 for i in range(20)])):
        several = [f"{number},{row}" for number, row in zip(first, rest, strict=True)]
        kept = load_table(write(tmp_path, f"{head},x,c\n" + "\n".join(several) + "\n", "kept.csv"))
        assert kept.preparation.feature_names == [head or "column 1", "x"]


def test_decimal_commas(tmp_path: Path) -> None:
    """The numbers of both ways of writing, also in a file without names and at predict."""
    numbers = [1234.5, -0.25, 12.0, 1e6, 7.125] * 4
    german = ["1.234,5", "-0,25", "12", "1.000.000", "7,125"] * 4
    labels = ["1,2 l", "3.4"] * 10
    rows = [f"{text};{label};{i % 2}" for i, (text, label) in enumerate(zip(german, labels, strict=True))]
    comma = Options(decimal="comma")
    for head, names in (
        ("preis;sorte;y\n", ["preis", "sorte", "y"]),
        ("", ["column 1", "column 2", "column 3"]),
    ):
        path = write(tmp_path, head + "\n".join(rows) + "\n")
        table = read_table(path, comma)
        assert table.names == names
        data = load_table(path, comma)
        values = data.preparation.inputs[0].encode(data.table, names[0])
        assert values.tolist() == numbers
        assert table.row(0)[names[1]] == "1,2 l"  # text is left alone
        again = data.preparation.read(path, comma)
        np.testing.assert_array_equal(
            data.preparation.encode(again)[0], data.preparation.encode(data.table)[0]
        )
    mixed = write(tmp_path, "x;y\n" + "1,5;0\n1.5;1\n" * 9)
    assert "1,5" in complaint(mixed, comma)  # 1.5 would be no number there


def test_numpy_files(tmp_path: Path) -> None:
    X, y = np.arange(24.0).reshape(6, 2, 2), np.array([0, 1, 2, 0, 1, 2])
    np.savez(tmp_path / "t.npz", y=y, X=X)
    table = read_table(tmp_path / "t.npz")
    assert table.names == ["X 1", "X 2", "X 3", "X 4", "y"]
    assert table.row(1) == {"X 1": 4.0, "X 2": 5.0, "X 3": 6.0, "X 4": 7.0, "y": 1}
    np.save(tmp_path / "t.npy", X.reshape(6, 4))
    assert not read_table(tmp_path / "t.npy").named
    records = np.array([(1, "a"), (2, "b")], dtype=[("n", int), ("s", "U1")])
    np.save(tmp_path / "r.npy", records)
    assert read_table(tmp_path / "r.npy").row(1) == {"n": 2, "s": "b"}
    np.savez(tmp_path / "uneven.npz", a=np.arange(3), b=np.arange(4))
    assert "4 values beside 3 in the first column" in complaint(tmp_path / "uneven.npz")
    np.savez(tmp_path / "complex.npz", a=np.arange(3) * 1j, b=np.arange(3))
    assert ":a: values of type complex128" in complaint(tmp_path / "complex.npz")


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "exploded",)

    np.savez(tmp_path / "t.npz", X=np.array([Bomb(), 2], dtype=object), y=np.arange(2))
    np.save(tmp_path / "t.npy", np.array([Bomb(), 2], dtype=object), allow_pickle=True)
    for name in ("t.npz", "t.npy"):
        assert complaint(tmp_path / name) == (
            f"{tmp_path / name}: arrays of Python objects\n"
            "  expected: arrays of numbers, booleans, text or dates\n"
            "  fix: save with a plain type, such as array.astype(float)"
        )
    assert not (tmp_path / "exploded").exists()


def test_arrays_and_frames_become_tables() -> None:
    import torch

    table = table_from_arrays(torch.arange(6.0).reshape(3, 2), ["u", "v"], target=["p", "q", "p"])
    assert table.row(2) == {"u": 4.0, "v": 5.0, "target": "p"}
    with pytest.raises(DataError, match="3 names for 2 columns"):
        table_from_arrays(np.zeros((4, 2)), ["a", "b", "c"])
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": [1.5, np.nan], 7: ["a", "b"]}, index=[5, 6])
    frame["k"] = pandas.Categorical(["x", "y"])
    table = from_dataframe(frame)
    assert table.names == ["n", "7", "k"]
    assert table.row(1) == {"n": None, "7": "b", "k": "y"}
    with pytest.raises(DataError, match="columns 1 and 2 have the same name"):
        from_dataframe(pandas.DataFrame(np.zeros((2, 2)), columns=["a", "a"]))
    with pytest.raises(DataError, match="a column that has no single type"):
        from_dataframe(pandas.DataFrame({"a": [1, "x", object()]}))
