"""The one call that recipes use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pytest
import torch

import quire.data
from quire.data import load_table, table_from_arrays
from quire.data.builtin import builtin
from quire.data.types import read_numbers
from quire.options import Table as Options

SHARED = Path(__file__).parents[3] / "shared" / "data" / "tables"


def test_builtin_table_and_file_take_the_same_way(tmp_path: Path) -> None:
    table = builtin("iris")
    path = tmp_path / "iris.csv"
    arrow_csv.write_csv(table.data, path)
    ways = [load_table(source, seed=3) for source in ("iris", table, path, str(path))]
    for other in ways[1:]:
        for part in ("train", "validation", "test"):
            ours, theirs = getattr(ways[0], part), getattr(other, part)
            assert torch.equal(ours.inputs, theirs.inputs)
            assert torch.equal(ours.target, theirs.target)
    assert ways[0].train.inputs.dtype == torch.float32
    # a file's first row stands in line 2, a built-in set's in row 1
    assert (ways[2].lines("test") == ways[0].lines("test") + 1).all()


def test_parts_are_stratified_and_standardised_from_training() -> None:
    data = load_table("iris", Options(validation=0.2, test=0.2), seed=5)
    assert [part.target.bincount().tolist() for part in (data.train, data.validation, data.test)] == [
        [30] * 3, [10] * 3, [10] * 3,
    ]  # fmt: skip
    torch.testing.assert_close(data.train.inputs.mean(0), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(data.train.inputs.std(0, correction=0), torch.ones(4))
    raw = np.stack([read_numbers(data.table, name) for name in data.table.names[:4]], 1)
    train, test = raw[data.rows["train"]], raw[data.rows["test"]]
    np.testing.assert_allclose(data.test.inputs, (test - train.mean(0)) / train.std(0), rtol=1e-5, atol=1e-6)
    labels = data.preparation.decode_classes(data.test.target)
    assert labels == [data.table.row(int(row))["species"] for row in data.rows["test"]]


def test_seed_decides_the_split() -> None:
    first, again, other = (load_table("wave", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.rows["test"], again.rows["test"])
    assert not torch.equal(first.rows["test"], other.rows["test"])


def test_parts_can_be_left_out() -> None:
    data = load_table("wave", Options(validation=0, test=0))
    assert data.validation is None
    assert data.test is None
    assert len(data.train) == 200
    assert len(data.lines("test")) == 0


def test_constant_pixels_do_no_harm() -> None:
    data = load_table("digits")
    assert data.train.inputs.shape == (1257, 64)
    assert (data.train.inputs[:, 0] == 0).all()
    assert data.preparation.target.classes == list(range(10))
    assert data.warnings == (
        "target 'digit': its 10 whole numbers are taken as classes",
        "the same value in all training rows of pixel_0, pixel_32, pixel_39, pixel_56",
    )


def test_rare_class_is_trained_on() -> None:
    classes = np.array(["a", "b"] * 10 + ["rare"])
    data = load_table(table_from_arrays(np.arange(42.0).reshape(21, 2), ["u", "v"], target=classes))
    assert 2 in data.train.target
    assert data.warnings == ("target 'target': one row only of class 'rare'; it is used to train",)


def test_several_targets() -> None:
    data = load_table("iris", targets=["species", "petal width (cm)"])
    assert data.train.target.shape == (106, 2)
    assert data.train.target.dtype == torch.float32
    assert [target.kind for target in data.preparation.targets] == ["classification", "regression"]
    values = [data.table.row(int(row))["petal width (cm)"] for row in data.rows["train"]]
    np.testing.assert_allclose(data.train.target[:, 1], values, rtol=1e-6)
    assert load_table("iris", targets=()).train.fields.keys() == {"inputs"}


@pytest.mark.slow
def test_many_rows_and_columns_are_read(tmp_path: Path) -> None:
    """Wide and long tables through the whole way; the long one is no longer than a test may be."""
    random = np.random.default_rng(0)
    wide = {f"c{i}": random.normal(size=12) for i in range(1500)}
    arrow_csv.write_csv(pa.table(wide), tmp_path / "wide.csv")
    assert load_table(tmp_path / "wide.csv").train.inputs.shape == (8, 1499)
    long = {
        "a": random.normal(size=50_000),
        "b": random.choice(["u", "v"], 50_000),
        "y": random.normal(size=50_000),
    }
    arrow_csv.write_csv(pa.table(long), tmp_path / "long.csv")
    data = load_table(tmp_path / "long.csv")
    assert data.train.inputs.shape == (35_000, 3)
    np.testing.assert_allclose(data.test.target, long["y"][data.rows["test"]], rtol=1e-6)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared tables are not here")
def test_real_tables() -> None:
    titanic = load_table(SHARED / "titanic.csv", targets="survived")
    assert titanic.preparation.target.classes == [0, 1]
    assert {"age is missing", "deck is missing", "adult_male", "sex=female"} <= set(
        titanic.preparation.feature_names
    )
    assert any("'alive' tells 'survived'" in warning for warning in titanic.warnings)
    penguins = load_table(SHARED / "penguins.csv", targets="species")
    assert penguins.preparation.target.classes == ["Adelie", "Chinstrap", "Gentoo"]
    mpg = load_table(SHARED / "mpg.csv", targets="mpg")
    assert mpg.preparation.target.kind == "regression"
    assert "horsepower is missing" in mpg.preparation.feature_names
    diamonds = load_table(SHARED / "diamonds.csv", targets="price")
    assert len(diamonds.table) == 53940
    assert diamonds.preparation.target.kind == "regression"


def test_package_names_load() -> None:
    for name in quire.data.__all__:
        assert getattr(quire.data, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quire.data.nothing
