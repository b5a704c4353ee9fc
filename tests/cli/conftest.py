"""A small recipe of the tests' own, so that the command is tested apart from any real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import pytest

from quire.cli.main import main
from quire.options import check_range
from quire.recipes.base import RECIPES, Expectation, Recipe, TableRunOptions


@dataclass(frozen=True)
class Model:
    """The model."""

    hidden: tuple[int, ...] = (8,)
    """Widths of the hidden layers."""
    activation: Literal["relu", "tanh"] = "relu"
    dropout: float = 0.0
    sizes: tuple[int, ...] | None = None
    """A list that may be left out."""

    def __post_init__(self) -> None:
        check_range(self, "--model.", dropout="[0, 1)")


@dataclass(frozen=True, kw_only=True)
class TinyOptions(TableRunOptions):
    model: Model = field(default_factory=Model)


class Answer(NamedTuple):
    code: int
    out: str
    error: str


Quire = Callable[..., Answer]


@pytest.fixture
def quire(capsys: pytest.CaptureFixture[str]) -> Quire:
    """Run the command in this process: exit code, standard output, standard error."""

    def run(*words: str) -> Answer:
        code = main(words)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    def build(options: TinyOptions) -> None:
        raise AssertionError("the tests of the command build no model")

    recipe = Recipe(
        name="tiny",
        summary="A recipe of the tests.",
        expected=Expectation("accuracy", at_least=0.5),
        targets="any",
        options=TinyOptions,
        build=build,
    )
    monkeypatch.setitem(RECIPES._entries, "tiny", recipe)
    return recipe
