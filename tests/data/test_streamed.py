"""Files that are read in pieces give what they give as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from quire.data.batch import in_order, ordered
from quire.data.load import load_table
from quire.data.streamed import (
    NumpyRows,
    ParquetRows,
    Rows,
    StreamedRows,
    is_large,
    load_streamed,
    open_rows,
    scaled_rows,
)
from quire.errors import DataError
from quire.options import Rows as RowOptions


def numbers(rows: int = 1000, columns: int = 3) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.normal([1e4, -3.0, 0.0][:columns], [2.0, 1.0, 5.0][:columns], (rows, columns))


def files(folder: Path, values: np.ndarray) -> list[Path]:
    np.save(folder / "a.npy", values)
    table = pa.table({f"c{i}": values[:, i] for i in range(values.shape[1])})
    pq.write_table(table, folder / "a.parquet", row_group_size=77)
    return [folder / "a.npy", folder / "a.parquet"]


@pytest.mark.parametrize("which", [0, 1])
def test_any_rows_can_be_read(tmp_path: Path, which: int) -> None:
    values = numbers()
    rows: Rows = open_rows(files(tmp_path, values)[which])
    assert len(rows) == 1000
    for start, stop in ((0, 1), (70, 90), (153, 400), (999, 1000)):
        assert np.array_equal(rows.read(start, stop), values[start:stop])


def test_a_file_without_rows_has_none_to_read(tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", np.empty((0, 2)))
    pq.write_table(pa.table({"a": pa.array([], pa.float64())}), tmp_path / "none.parquet")
    for name, width in (("none.npy", 2), ("none.parquet", 1)):
        rows = open_rows(tmp_path / name)
        assert len(rows) == 0
        assert rows.read(0, 0).shape == (0, width)


@pytest.mark.parametrize("which", [0, 1])
def test_parts_together_are_the_file_scaled_by_the_training_rows(tmp_path: Path, which: int) -> None:
    values = numbers()
    data = load_streamed(files(tmp_path, values)[which], RowOptions(), seed=3)
    assert data.validation is not None
    assert data.test is not None
    lines = [data.lines(split) for split in ("train", "validation", "test")]
    assert sorted(np.concatenate(lines).tolist()) == list(range(1, 1001))
    assert abs(len(data.test) - 150) <= 10
    train = values[lines[0] - 1]
    for part, places in zip((data.train, data.validation, data.test), lines, strict=True):
        expected = (values[places - 1] - train.mean(0)) / train.std(0)
        found = torch.cat([batch.inputs for batch in in_order(part, 3 * 64)])
        assert np.allclose(found.numpy(), expected, atol=2e-6)


def test_batches_and_single_rows_agree(tmp_path: Path) -> None:
    data = load_streamed(files(tmp_path, numbers())[0], RowOptions(), seed=1).train
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    whole = torch.cat([batch.inputs for batch in in_order(data)])
    shuffled = torch.cat([batch.inputs for batch in data.batches(order, 50)])
    assert torch.equal(shuffled, whole[order])
    assert torch.equal(data.take(order[:9]).inputs, whole[order[:9]])
    later = torch.cat([batch.inputs for batch in data.batches(order, 50, start=3)])
    assert torch.equal(later, whole[order[150:]])
    assert torch.equal(data.subset(order[:5]).inputs, whole[order[:5]])


def test_the_preparation_is_that_of_a_table(tmp_path: Path) -> None:
    path = files(tmp_path, numbers())[0]
    data = load_streamed(path, RowOptions(), seed=1)
    whole = scaled_rows(path, data.preparation).data
    table = data.preparation.transform(data.preparation.read(path)).data
    streamed = torch.cat([batch.inputs for batch in in_order(whole, 300)])
    assert torch.allclose(streamed, table.inputs, atol=2e-6)
    assert load_table(path, targets=()).preparation.feature_names == data.preparation.feature_names


def test_only_large_files_of_known_kinds_are_read_in_pieces(tmp_path: Path) -> None:
    path, other = files(tmp_path, numbers())
    tiny = RowOptions(memory=1e-6)
    assert is_large(path, tiny)
    assert is_large(other, tiny)
    assert not is_large(path, RowOptions())
    (tmp_path / "a.csv").write_text("a,b\n1,2\n" * 1000)
    assert not is_large(tmp_path / "a.csv", tiny)


@pytest.mark.parametrize("which", [0, 1])
def test_columns_that_are_dropped_are_not_learned_from(tmp_path: Path, which: int) -> None:
    """As from the same file read whole; a file to predict on may have them or, with names, not."""
    path, dropped = files(tmp_path, numbers())[which], ("column 2", "c1")[which]
    options = RowOptions(drop=(dropped,))
    data = load_streamed(path, options, seed=3)
    whole = load_table(path, options, targets=())
    names = whole.preparation.feature_names
    assert data.preparation.feature_names == names
    assert dropped not in names
    train = numbers()[data.lines("train") - 1][:, [0, 2]]
    found = torch.cat([batch.inputs for batch in in_order(data.train)])
    expected = (train - train.mean(0)) / train.std(0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    again = scaled_rows(path, data.preparation).data
    in_memory = data.preparation.transform(data.preparation.read(path)).data.inputs
    pieces = torch.cat([batch.inputs for batch in in_order(again)])
    np.testing.assert_allclose(pieces, in_memory, rtol=1e-4, atol=1e-4)
    for drop, message in ((("c9",), "missing column 'c9'"), ((*names, dropped), "are dropped")):
        with pytest.raises(DataError, match=message):
            load_streamed(path, RowOptions(drop=drop))
    with pytest.raises(DataError, match=r"--table.categories .* in pieces"):
        load_streamed(path, RowOptions(categories=(names[0],)))
    if which:
        less = pa.table({"c2": numbers()[:, 2], "c0": numbers()[:, 0]})
        pq.write_table(less, tmp_path / "less.parquet")
        other = scaled_rows(tmp_path / "less.parquet", data.preparation).data
        assert torch.equal(torch.cat([batch.inputs for batch in in_order(other)]), pieces)


def test_a_constant_column_is_said_and_does_no_harm(tmp_path: Path) -> None:
    values = numbers()
    values[:, 1] = 0.1
    data = load_streamed(files(tmp_path, values)[0], RowOptions())
    assert any("column2" in note or "column 2" in note for note in data.warnings), data.warnings
    assert torch.cat([batch.inputs for batch in in_order(data.train)]).isfinite().all()


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    values = numbers()
    values[700, 2] = np.nan
    data = load_streamed(files(tmp_path, values)[0], RowOptions(validation=0, test=0))
    with pytest.raises(DataError, match="701"):
        list(in_order(data.train, 300))
    np.save(tmp_path / "b.npy", np.asfortranarray(numbers()))
    with pytest.raises(DataError, match="columns first"):
        NumpyRows(tmp_path / "b.npy")
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "c.npy").write_bytes(content[:-100])
    with pytest.raises(DataError, match="cut off"):
        NumpyRows(tmp_path / "c.npy")
    pq.write_table(pa.table({"name": ["x", "y"]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="no column of numbers"):
        ParquetRows(tmp_path / "d.parquet")
    good = load_streamed(files(tmp_path, numbers())[0], RowOptions())
    np.save(tmp_path / "e.npy", numbers(20, 2))
    with pytest.raises(DataError, match="the 3 of training"):
        scaled_rows(tmp_path / "e.npy", good.preparation)


def test_the_order_is_made_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_streamed(files(tmp_path, numbers())[0], RowOptions(), seed=1).train
    whole = torch.cat([batch.inputs for batch in data.batches(torch.arange(len(data)), 50)])
    monkeypatch.setattr("quire.data.batch.ORDER_NUMBERS", 120)  # two batches of 50
    parts = list(ordered(data, 50, rows=333))
    assert torch.equal(torch.cat([batch.inputs for batch in parts]), whole[:333])
    assert torch.equal(torch.cat([batch.rows for batch in parts]), torch.arange(333))
    assert [len(batch) for batch in parts] == [50] * 6 + [33]


def test_stretches_are_found_in_the_file(tmp_path: Path) -> None:
    rows = open_rows(files(tmp_path, numbers())[0])
    part = StreamedRows(rows, [(10, 20), (50, 55), (90, 100)], np.zeros(3), np.ones(3))
    assert len(part) == 25
    assert list(part.places(8, 17)) == [(18, 20), (50, 55), (90, 92)]
