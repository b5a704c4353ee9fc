from __future__ import annotations

import os
from pathlib import Path

import pytest

import quire.report
from quire.errors import CheckpointError, InputError
from tests.report import folders


def test_rows_and_differing_options(tmp_path: Path) -> None:
    one = folders.classifier(tmp_path / "one")
    two = folders.regressor(tmp_path / "two")
    three = folders.config(tmp_path / "three", lr=0.1)
    folders.metrics(three, folders.learning()[:4])
    config = (three / "config.toml").read_text(encoding="utf-8")
    (three / "config.toml").write_text(config + 'precision = "bfloat16"\n', encoding="utf-8")
    rows = quire.report.compare([one, two, three])
    assert [row.name for row in rows] == ["one", "two", "three"]
    assert [row.recipe for row in rows] == ["mlp", "heteroscedastic", "mlp"]
    assert [row.measure for row in rows] == ["accuracy", "coverage", "accuracy"]
    assert rows[0].values == {"train": 0.9992, "validation": 0.9741, "test": 0.9778}
    assert rows[2].values["test"] is None
    assert [row.stopped for row in rows] == ["finished", "finished", "unfinished"]
    assert (rows[0].seconds, rows[0].parameters) == (3.217, 9610)
    assert (rows[2].seconds, rows[2].parameters) == (None, None)
    # The folder's name differs too, but that is no choice about the computation.
    assert [row.options for row in rows] == [
        {"optim.lr": 0.001, "train.precision": None},
        {"optim.lr": 0.001, "train.precision": None},
        {"optim.lr": 0.1, "train.precision": "bfloat16"},
    ]


def test_table(tmp_path: Path) -> None:
    one = folders.classifier(tmp_path / "one")
    two = folders.config(tmp_path / "two", lr=0.1)
    os.utime(two / "config.toml", (1_700_000_000, 1_700_000_000))
    head, cells = quire.report.comparison_table(quire.report.compare([one, two]))
    assert head == [
        *("run", "recipe", "date", "measure", "train", "validation", "test", "time", "parameters", "end"),
        "--optim.lr",
    ]
    assert cells[0][:2] + cells[0][3:] == [
        *("one", "mlp", "accuracy", "0.9992", "0.9741", "0.9778", "3.22 s", "9,610", "finished", "0.001"),
    ]
    assert cells[1][2].startswith("2023-11-1")
    assert cells[1][3:] == ["–", "–", "–", "–", "–", "–", "unfinished", "0.1"]


def test_the_configuration_names_the_date(tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "one")
    config = (folder / "config.toml").read_text(encoding="utf-8")
    (folder / "config.toml").write_text("date = 2026-02-03T04:05:06\n" + config, encoding="utf-8")
    assert quire.report.compare([folder])[0].date == "2026-02-03 04:05:06"


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no run folder"):
        quire.report.compare([folders.config(tmp_path / "one"), tmp_path])
    with pytest.raises(InputError, match="no run to compare"):
        quire.report.compare([])
