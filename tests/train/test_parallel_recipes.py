"""Every recipe in two processes: each ends with a whole run folder, and where nothing is left to chance with
the measures of one process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from quire.options import Noise
from quire.recipes.base import RECIPES, RunOptions, SweepOptions
from quire.recipes.execute import Outcome, execute
from quire.train.processes import first_does, processes
from tests.contracts.test_recipes import options_for
from tests.train.together import once, together

pytestmark = [pytest.mark.slow, pytest.mark.long]

CERTAIN = ("pca", "gru", "nadaraya-watson", "multitask")
"""These draw nothing while they train: sums, a state that is carried, a search before training, two heads."""
CHANCE = ("ssd", "cgan", "contrastive")
"""Lists that are judged, two players with batch norms, rows that are compared."""


def certain(options: RunOptions) -> RunOptions:
    """Without noise and dropout."""
    changed: dict[str, Any] = {}
    if hasattr(options, "train"):
        changed["train"] = dataclasses.replace(options.train, noise=Noise())
    if hasattr(getattr(options, "model", None), "dropout"):
        changed["model"] = dataclasses.replace(options.model, dropout=0.0)  # type: ignore[attr-defined]
    return dataclasses.replace(options, device="cpu", **changed)


def begin(name: str, path: Path) -> Outcome:
    """The first steps on built-in data."""
    recipe = RECIPES[name]
    short = {"sweeps": 2} if issubclass(recipe.options, SweepOptions) else {"steps": 2}
    return execute(recipe, recipe.options(out=path / "run", device="cpu", quiet=True, **short))


def train(name: str, path: Path) -> Outcome:
    def prepare() -> None:
        path.mkdir()
        options_for(name, path)

    first_does(prepare)  # writes the data, which the others find
    return execute(RECIPES[name], certain(options_for(name, path)))


def main(path: Path, number: int, names: list[str], built_in: bool = False) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=number, world_size=2)
    for name in names:
        outcome = (begin if built_in else train)(name, path / name)
        (path / f"{name}-{number}.json").write_text(json.dumps(outcome.measures))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(
        tmp_path_factory,
        "parallel_recipes",
        lambda path: together("tests.train.test_parallel_recipes", path, 2, [*CERTAIN, *CHANCE]),
    )


@pytest.fixture(scope="module")
def all_begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(
        tmp_path_factory,
        "parallel_built_in",
        lambda path: together("tests.train.test_parallel_recipes", path, 2, list(RECIPES), True),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_in_two_processes(all_begun: Path, name: str) -> None:
    first, second = (json.loads((all_begun / f"{name}-{i}.json").read_text()) for i in range(2))
    assert first == second
    assert json.loads((all_begun / name / "run" / "result.json").read_text())["processes"] == 2


@pytest.mark.parametrize("name", [*CERTAIN, *CHANCE])
def test_a_recipe_in_two_processes(two: Path, name: str, tmp_path: Path) -> None:
    first, second = (json.loads((two / f"{name}-{i}.json").read_text()) for i in range(2))
    assert first == second
    assert {"result.json", "report.html", "metrics.jsonl"} <= {p.name for p in (two / name / "run").iterdir()}
    assert json.loads((two / name / "run" / "result.json").read_text())["processes"] == 2
    if name in CERTAIN:
        assert processes() == (0, 1)
        alone = train(name, tmp_path / name).measures
        assert alone.keys() == first.keys()
        for part, values in alone.items():
            assert first[part] == pytest.approx(values, rel=1e-4, abs=1e-6), part
