"""What a column is taken for, and the values of its cells."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.data.table import Table, make_table
from quire.data.types import infer, read_booleans, read_dates, read_numbers
from quire.errors import DataError


def text(*cells: str) -> Table:
    return make_table({"v": pa.array(cells, pa.string())}, "t", typed=False)


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (("1", " -2.5e3 ", "+.5", "", "7."), "number"),
        (("nan", "NA", "n/a", "null", "?", "-", " "), "empty"),
        (("True", "false", "?"), "boolean"),
        (("yes", "no"), "text"),
        (("2024-02-29", "1969-01-01T00:00:00Z", "2024-01-01 10:30+02:00"), "date"),
        (("1,5", "b"), "text"),
        (("1_000", "x"), "text"),
        (("٣", "x"), "text"),
    ],
)
def test_kinds(cells: tuple[str, ...], kind: str) -> None:
    assert infer(text(*cells), "v") == kind


def test_labels_that_mix_numbers_and_text_are_categories() -> None:
    """Classes 1, 2, 3 and crew are labels; one word among a hundred numbers is a mistake, and so is one
    word that stands for a missing value throughout."""
    assert infer(text(*["1", "2", "3", "crew"] * 10), "v") == "text"
    numbers = [str(i) for i in range(100)]
    for wrong in (["oops"], ["unknown"] * 40):
        with pytest.raises(DataError, match=f"^t:101:v: text in a numeric column .value '{wrong[0]}'."):
            infer(text(*numbers, *wrong), "v")
        assert infer(text(*numbers, *wrong), "v", strict=False) == "text"
    codes = [f"A{i}" for i in range(60)]
    assert infer(text(*numbers, *codes), "v") == "text"


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_survive_text_exactly(values: list[float | None]) -> None:
    cells = ["" if value is None else repr(value) for value in values]
    expected = np.array([np.nan if value is None else value for value in values])
    np.testing.assert_array_equal(read_numbers(text(*cells), "v"), expected)


@settings(deadline=None)
@given(st.lists(st.datetimes(datetime(1700, 1, 1), datetime(2200, 1, 1)), min_size=1), st.sampled_from("T "))
def test_dates_are_days_since_1970(moments: list[datetime], separator: str) -> None:
    expected = [moment.replace(tzinfo=UTC).timestamp() / 86400 for moment in moments]
    cells = [moment.isoformat(separator) for moment in moments]
    np.testing.assert_allclose(read_dates(text(*cells, "NA"), "v"), [*expected, np.nan], atol=1e-9)
    typed = make_table({"v": pa.array([*moments, None], pa.timestamp("us"))}, "t")
    np.testing.assert_allclose(read_dates(typed, "v"), [*expected, np.nan], atol=1e-9)


def test_dates_by_hand() -> None:
    cells = ("1970-01-02", "1970-01-01T12:00", "1970-01-01T12:00:00+06:00", "1969-12-31T18:00:00-06:00")
    assert read_dates(text(*cells), "v").tolist() == [1.0, 0.5, 0.25, 0.0]
    zone = pa.array([datetime(1970, 1, 1, 6, tzinfo=UTC)], pa.timestamp("ns", "Europe/Paris"))
    assert read_dates(make_table({"v": zone}, "t"), "v").tolist() == [0.25]
    assert read_dates(make_table({"v": pa.array([3], pa.date32())}, "t"), "v").tolist() == [3.0]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None], pa.uint64()),
        pa.array([1.0, float("nan")], pa.float32()),
        pa.array(np.array([1.0, np.nan], np.float16)),
        pa.array([1, None]).cast(pa.decimal128(21, 2)),
        pa.array([True, None]),
        pa.array([1, None]).dictionary_encode(),
        pa.array(["1", ""], pa.large_string()),
    ],
    ids=lambda column: str(column.type),
)
def test_numbers_of_every_arrow_type(column: pa.Array) -> None:
    np.testing.assert_array_equal(read_numbers(make_table({"v": column}, "t"), "v"), [1.0, np.nan])


def test_booleans() -> None:
    expected = [1.0, 0.0, np.nan, 1.0, 0.0]
    np.testing.assert_array_equal(read_booleans(text("TRUE", "false", "", "1", "0"), "v"), expected)
    with pytest.raises(DataError, match=r"t:2:v: not a boolean in a column of booleans \(value 'maybe'\)"):
        read_booleans(text("true", "maybe"), "v")
    with pytest.raises(DataError, match="t:1:v: not a boolean"):
        read_booleans(make_table({"v": pa.array([2.0])}, "t"), "v")


SHARED = Path(__file__).parents[3] / "shared" / "data" / "tables"


@pytest.mark.parametrize("source", ["here", *sorted(SHARED.glob("*.csv"))], ids=lambda s: Path(s).stem)
def test_numbers_agree_with_pandas(source: str | Path, tmp_path: Path) -> None:
    from quire.data import read_table

    if source == "here":
        source = tmp_path / "t.csv"
        source.write_text("a,b,c\n1,x,0.1\n,y,1e-3\n3,,-7\n")
    table, frame = read_table(source), pandas.read_csv(source)
    assert table.names == list(frame.columns)
    numeric = [name for name in table.names if infer(table, name) == "number"]
    assert numeric == list(frame.select_dtypes("number").columns)
    for name in numeric:
        np.testing.assert_allclose(read_numbers(table, name), frame[name].to_numpy(float), rtol=1e-15)
