"""A body that is taken over is compared with one that learned for as long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quire.train
from quire.recipes.base import RECIPES
from quire.recipes.dense import MLPOptions
from quire.recipes.execute import execute
from quire.recipes.several import TransferOptions
from tests.recipes.examples import write_csv


@pytest.mark.parametrize(("given", "expected"), [({"steps": 3}, 3), ({"epochs": 2}, None), ({}, None)])
def test_scratch_trains_as_long_as_the_transfer(
    given: dict[str, int], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_csv(tmp_path / "mine.csv")
    source = execute(
        RECIPES["mlp"], MLPOptions(data=data, target="label", epochs=1, out=tmp_path / "source", quiet=True)
    ).run
    lengths: list[tuple[Any, Any]] = []
    real = quire.train.fit

    def noted(*parts: Any, **options: Any) -> Any:
        lengths.append((options.get("epochs"), options.get("steps")))
        return real(*parts, **{**options, "epochs": None, "steps": 1})

    monkeypatch.setattr("quire.train.fit", noted)
    options = TransferOptions(data=data, target="label", source=source, quiet=True, **given)
    plan = RECIPES["transfer"].build(options)
    assert plan.extra_measures is not None
    plan.extra_measures()
    epochs = None if expected else given.get("epochs", int(plan.epochs))
    assert lengths == [(epochs, expected)]
