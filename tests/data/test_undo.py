"""Features back to columns: a prepared table gives its own cells again."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from quire.data.load import load_table
from quire.data.preparation import Preparation
from quire.data.readers import read_table
from quire.data.undo import rows_in_units
from quire.errors import InputError
from tests.recipes.examples import write_csv


def test_the_cells_of_a_file_come_back_from_its_features(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "mine.csv")
    data = load_table(path, targets=())
    whole = data.preparation.transform(read_table(path))
    back = rows_in_units(data.preparation, whole.data.inputs)
    with path.open() as file:
        cells = list(csv.DictReader(file))
    assert back.column_names == list(cells[0])
    for ours, theirs in zip(back.to_pylist(), cells, strict=True):
        for number in ("size", "value"):
            wanted = float(theirs[number]) if theirs[number] else None
            assert ours[number] == (None if wanted is None else pytest.approx(wanted, rel=1e-5))
        assert str(ours["day"]) == theirs["day"]
        for text in ("colour", "kind", "label"):
            assert ours[text] == theirs[text]
        assert str(ours["fast"]).lower() in (theirs["fast"], {"yes": "true", "no": "false"}[theirs["fast"]])


def test_what_is_nearest_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("size,colour,ok\n2,red,true\n4,,false\n6,blue,true\n,red,true\n")
    preparation = Preparation.fit(read_table(path), ())
    names = preparation.feature_names
    assert names == ["size", "size is missing", "colour=blue", "colour=red", "colour is missing", "ok"]
    features = torch.tensor(
        [
            [0.0, 0.49, 0.4, 0.3, 0.39, 0.51],
            [1.0, 0.51, 0.1, 0.2, 0.15, 0.49],
            [1.0, 0.00, 0.1, 0.2, 0.25, -3.0],
        ]
    )
    deviation = (8 / 3) ** 0.5  # of 2, 4, 6
    assert rows_in_units(preparation, features).to_pylist() == [
        {"size": pytest.approx(4.0), "colour": "blue", "ok": True},
        {"size": None, "colour": "red", "ok": False},
        {"size": pytest.approx(4.0 + deviation), "colour": None, "ok": False},
    ]
    with pytest.raises(InputError, match=r"features of shape \(3, 5\)\n  expected: \(N, 6\)"):
        rows_in_units(preparation, features[:, :5])


def test_a_date_that_no_calendar_has_is_the_last_that_one_has(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("day\n2024-01-01\n2024-01-03\n")
    preparation = Preparation.fit(read_table(path), ())
    days = rows_in_units(preparation, torch.tensor([[0.0], [1e9], [-1e9]]))["day"].to_pylist()
    assert str(days[0]) == "2024-01-02"
    assert days[1].year > 9000
    assert days[2].year < 100
