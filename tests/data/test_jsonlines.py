"""JSON lines: the same table as the CSV file of the same rows, and complaints that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from quire.data import jsonlines, load_table, read_table
from quire.errors import DataError
from quire.options import Table as Options


def write(folder: Path, *lines: object, name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def complaint(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_table(path)
    return str(caught.value)


@pytest.mark.parametrize("stretch", [1, 3, jsonlines.STRETCH])
def test_equals_the_csv_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretch: int) -> None:
    """Whatever part of the rows is held at once, also where a column's type is known late."""
    monkeypatch.setattr(jsonlines, "STRETCH", stretch)
    rows = [
        {"n": i if i % 4 else i / 8, "when": f"2024-01-{1 + i:02d}", "ok": i % 3 == 0, "c": "größe"[i % 5]}
        for i in range(20)
    ]
    rows[2]["n"] = None  # type: ignore[assignment]
    del rows[5]["ok"]
    names = ("n", "when", "ok", "c")
    cells = [["" if row.get(name) is None else str(row[name]) for name in names] for row in rows]
    text = "\n".join(",".join(row) for row in [list(names), *cells]) + "\n"
    other = tmp_path / "t.csv"
    other.write_text(text)
    mine, theirs = load_table(write(tmp_path, *rows)), load_table(other)
    assert mine.preparation.feature_names == theirs.preparation.feature_names
    assert mine.preparation.target.classes == theirs.preparation.target.classes
    np.testing.assert_array_equal(mine.train.inputs, theirs.train.inputs)
    np.testing.assert_array_equal(mine.test.inputs, theirs.test.inputs)  # type: ignore[union-attr]
    assert mine.table.lines.tolist() == list(range(1, 21))


@pytest.mark.parametrize("stretch", [1, jsonlines.STRETCH])
def test_cells_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretch: int) -> None:
    monkeypatch.setattr(jsonlines, "STRETCH", stretch)
    path = write(
        tmp_path, {"i": 1, "f": 1, "t": "x", "big": 2**70, "mixed": 1}, "",
        {"i": 2, "f": 2.5, "t": None, "big": 1, "mixed": "two", "late": True},
    )  # fmt: skip
    table = read_table(path)
    types = [str(table.column(name).type) for name in table.names]
    assert dict(zip(table.names, types, strict=True)) == {
        "i": "int64", "f": "double", "t": "string", "big": "double", "mixed": "string", "late": "bool",
    }  # fmt: skip
    assert table.row(0) == {"i": 1, "f": 1.0, "t": "x", "big": float(2**70), "mixed": "1", "late": None}
    assert table.lines.tolist() == [1, 3]


def test_lists_and_objects_can_be_dropped(tmp_path: Path) -> None:
    path = write(tmp_path, *({"x": i, "tags": ["a"], "more": {"k": i}, "y": i % 2} for i in range(20)))
    assert complaint(path).startswith(f"{path}:tags: values of type list")
    data = load_table(path, Options(drop=("tags", "more")))
    assert data.preparation.feature_names == ["x"]
    assert pa.types.is_nested(read_table(path).column("more").type)


def test_complaints_name_the_line(tmp_path: Path) -> None:
    good, path = {"x": 1, "y": 0}, tmp_path / "t.jsonl"
    assert complaint(write(tmp_path, good, '{"x": 1,, "y": 2}')).startswith(f"{path}:2:9: no JSON")
    assert complaint(write(tmp_path, good, [1, 2])).startswith(f"{path}:2: a list")
    assert "an object a line" in complaint(write(tmp_path, "[", '{"x": 1}', "]"))
    assert complaint(write(tmp_path, "", " ")).startswith(f"{path}: the file is empty")
    assert ":1: no JSON that can be read" in complaint(write(tmp_path, "[" * 100_000))
    assert ":1: no JSON that can be read" in complaint(write(tmp_path, '{"\\ud800": 1}'))
    assert ":x: values that cannot be read" in complaint(write(tmp_path, '{"x": "\\ud800", "y": 1}'))
    stray = [{"x": i, "y": i % 2} for i in range(20)]
    stray[7]["x"] = "seven"  # type: ignore[assignment]
    assert complaint(write(tmp_path, *stray)).startswith(f"{path}:8:x: text in a numeric column")


def test_names_that_never_come_again_are_refused_before_room_is_made(tmp_path: Path) -> None:
    path = write(tmp_path, *({f"k{i}": i} for i in range(20_000)))
    assert "different names in" in complaint(path)
