from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from quire.errors import CheckpointError
from quire.report.reading import Target, label, read_predictions, read_run
from tests.report import folders


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_run(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} is no run folder: there is no config.toml in it\n"
        "  expected: a folder that `quire train` made, with config.toml and metrics.jsonl\n"
        "  fix: give the folder of a run; `quire runs` lists them"
    )
    with pytest.raises(CheckpointError, match="there is no such folder"):
        read_run(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.toml", "format = ", "config.toml is damaged"),
        ("config.toml", "format = 2", "config.toml has format 2"),
        ("config.toml", "recipe = 'mlp'", "config.toml has format None"),
        ("result.json", "{", "result.json is damaged"),
        ("result.json", "[1]", "it holds a list, not an object"),
        ("result.json", '{"format": 7}', "result.json has format 7"),
        ("result.json", '{"format": 1, "rows": 3}', "'rows' has another shape"),
        ("result.json", '{"format": 1, "layers": ["a"]}', "'layers' has another shape"),
        ("result.json", '{"format": 1, "measures": {"test": 1}}', "'measures' has another shape"),
        ("metrics.jsonl", '{"step": 1}\n' + folders.line(2, "train", loss=1.0), "line 1 is not a record"),
        ("metrics.jsonl", "3\n" + folders.line(2, "train", loss=1.0), "line 1 is not a record"),
        ("predictions.parquet", "PAR1", "predictions.parquet is damaged"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = folders.classifier(tmp_path / "run")
    (folder / name).write_text(content, encoding="utf-8")
    target = Target("digit", "classification")
    with pytest.raises(CheckpointError, match=message) as caught:
        read_predictions(read_run(folder), target)
    assert caught.value.expected
    assert caught.value.fix


@pytest.mark.parametrize("rest", ['{"format":1,"st', '{"format":1,"step":60,"values":', "\x00\x00\x00"])
def test_a_cut_off_last_line_is_left_out(tmp_path: Path, rest: str) -> None:
    folder = folders.config(tmp_path / "run")
    whole = [folders.line(20, "train", loss=1.0), folders.line(40, "train", loss=0.5)]
    folders.metrics(folder, whole)
    assert not read_run(folder).cut_off
    folders.metrics(folder, [*whole, rest])
    run = read_run(folder)
    assert run.cut_off
    assert run.curves["loss"]["train"].values.tolist() == [1.0, 0.5]
    assert (run.last_step, run.last_epoch) == (40, 2.0)


def test_lines_of_a_resumed_run_count_once(tmp_path: Path) -> None:
    folder = folders.config(tmp_path / "run")
    steps = [(1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0), (3, 5.0), (4, 4.0)]
    folders.metrics(folder, [folders.line(step, "train", loss=loss) for step, loss in steps])
    curve = read_run(folder).curves["loss"]["train"]
    assert curve.steps.tolist() == [1, 2, 3, 4]
    assert curve.values.tolist() == [9.0, 6.0, 5.0, 4.0]


def test_values_that_are_not_finite_become_gaps(tmp_path: Path) -> None:
    folder = folders.config(tmp_path / "run")
    values = [1.0, math.nan, math.inf, None, 1e305, 2.0]
    folders.metrics(folder, [folders.line(i, "train", loss=value) for i, value in enumerate(values)])
    found = read_run(folder).curves["loss"]["train"].values
    assert np.isnan(found).tolist() == [False, True, True, True, True, False]


def test_the_last_measures_of_an_unfinished_run(tmp_path: Path) -> None:
    folder = folders.config(tmp_path / "run")
    folders.metrics(
        folder,
        [
            folders.line(1, "train", loss=2.0, lr=0.1, gradient_norm=1.0),
            folders.line(1, "validation", loss=3.0, accuracy=0.5),
            folders.line(2, "train", loss=1.0, lr=0.1, gradient_norm=1.0),
        ],
    )
    run = read_run(folder)
    assert run.result is None
    assert run.measures == {"train": {"loss": 1.0}, "validation": {"loss": 3.0, "accuracy": 0.5}}


def test_predictions_of_a_prefix(tmp_path: Path) -> None:
    run = read_run(folders.several(tmp_path / "run"))
    kind, price = (read_predictions(run, target) for target in run.targets)
    assert kind is not None
    assert price is not None
    assert set(kind.truth) == {"ash", "oak"}
    assert kind.low is None
    assert price.probability is None
    assert price.low is not None
    assert price.level == 0.9
    assert len(kind) == len(price) == 120


def test_rows_that_cannot_be_judged_are_counted(tmp_path: Path) -> None:
    folder = folders.config(tmp_path / "run")
    columns = {"row": [1, 2, 3, 4], "truth": [1.0, None, 3.0, 4.0], "prediction": [1.5, 2.0, math.inf, 4.0]}
    folders.predictions(folder, columns, b"high")
    found = read_predictions(read_run(folder), Target("price", "regression"))
    assert found is not None
    assert found.row.tolist() == [1, 4]
    assert found.left_out == 2
    assert found.level is None


def test_classes_are_the_same_text_in_every_format(tmp_path: Path) -> None:
    assert [label(value) for value in (3, 3.0, "3", True, 0.5)] == ["3", "3", "3", "True", "0.5"]
    folder = folders.config(tmp_path / "run")
    folders.result(folder, targets=[{"name": "n", "kind": "classification", "classes": [1, 2], "prefix": ""}])
    folders.predictions(folder, {"row": [1, 2], "truth": [1.0, None], "prediction": [2.0, 1.0]})
    run = read_run(folder)
    found = read_predictions(run, run.targets[0])
    assert found is not None
    assert (list(found.truth), list(found.prediction)) == (["1"], ["2"])
    assert set(found.truth) <= set(run.targets[0].classes)


def test_nan_in_the_result(tmp_path: Path) -> None:
    folder = folders.config(tmp_path / "run")
    content = folders.result(folder, measures={"test": {"loss": math.nan, "accuracy": None}})
    assert "NaN" in json.dumps(content)
    measures = read_run(folder).measures["test"]
    assert all(math.isnan(value) for value in measures.values())
