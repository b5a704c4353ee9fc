"""What a recipe is, without PyTorch: name, one line, expected result and typed options.

`quire list` and `quire --help` import every recipe file, so those files keep heavy imports inside
their functions; a test checks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.errors import InputError
from quire.options import Optim, Table, Train, Tune, check, check_range
from quire.registry import Registry

if TYPE_CHECKING:
    from quire.recipes.plan import Plan


@dataclass(frozen=True)
class Expectation:
    """The result that a recipe reaches on its built-in data; tested, and shown by `quire list`."""

    measure: str
    at_least: float | None = None
    at_most: float | None = None
    split: Literal["train", "validation", "test"] = "test"

    def __str__(self) -> str:
        bounds = [f"≥ {self.at_least:g}"] if self.at_least is not None else []
        bounds += [f"≤ {self.at_most:g}"] if self.at_most is not None else []
        return f"{self.split} {self.measure} {' and '.join(bounds)}"

    def met(self, measures: dict[str, dict[str, float]]) -> bool:
        value = measures[self.split][self.measure]
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that every recipe has."""

    data: Path | None = None
    """Your own file or folder; without it the recipe trains on its built-in data."""
    out: Path | None = None
    """Folder of the run; the default is runs/RECIPE-DATE-TIME."""
    resume: Path | None = None
    """Run folder to go on with."""
    overwrite: bool = False
    """Replace the run folder if it exists."""
    seed: int = 0
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object on standard output and nothing else there."""
    quiet: bool = False
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        check(0 <= self.seed < 2**32, "--seed", self.seed, "a whole number from 0 to 4294967295")
        known = re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", self.device)
        check(known is not None, "--device", self.device, "auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class DescentOptions(RunOptions):
    """Options of the recipes that learn by descent."""

    epochs: int | None = None
    steps: int | None = None
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    tune: Tune = field(default_factory=Tune)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", epochs=">= 1", steps=">= 1")
        if self.epochs is not None and self.steps is not None:
            raise InputError("both --epochs and --steps", expected="one of them", fix="leave one out")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(RunOptions):
    """Options of the recipes that learn by statistics."""

    sweeps: int = 100
    """Most passes over the data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", sweeps=">= 1")


@dataclass(frozen=True, kw_only=True)
class TableRunOptions(DescentOptions):
    """Options of the recipes that learn from a table."""

    target: str | None = None
    """Column to predict, by name or by position (1 is the first, -1 the last)."""
    table: Table = field(default_factory=Table)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None and self.data is None:
            raise InputError(
                f"--target {self.target} without --data",
                expected="a target of your own file",
                fix="add --data FILE, or leave --target out to use the built-in data",
            )


def refuse_input_noise(train: Train, what: str, fix: str = "leave it out") -> None:
    """Noise is added to numbers; pixels and tokens are whole."""
    if train.noise.inputs:
        raise InputError(
            f"--train.noise.inputs {train.noise.inputs:g} with {what}",
            expected="noise on the numbers of a table",
            fix=fix,
        )


Learns = Literal[
    "classes",
    "two classes",
    "values",
    "any",
    "several",
    "images",
    "scenes",
    "text",
    "pairs",
    "labelled",
    "rows",
    "unlabelled",
]


@dataclass(frozen=True)
class Recipe:
    name: str
    summary: str
    expected: Expectation
    targets: Learns
    """What --target of a table may be; images have a class each, scenes have objects in boxes, and
    of a text the next token is learned, of pairs the second text, of labelled texts the label. Rows and
    unlabelled images are learned from without a target."""
    options: type[RunOptions]
    build: Callable[[Any], Plan]
    """From options to everything a run needs: task, data, preparation, training options."""


RECIPES: Registry[Recipe] = Registry("recipe")


def recipe(
    name: str,
    *,
    summary: str,
    expected: Expectation,
    targets: Learns,
    options: type[RunOptions],
) -> Callable[[Callable[[Any], Plan]], Callable[[Any], Plan]]:
    """Register the decorated function, which turns options into a `Plan`."""

    def add(build: Callable[[Any], Plan]) -> Callable[[Any], Plan]:
        RECIPES.register(name)(Recipe(name, summary, expected, targets, options, build))
        return build

    return add
