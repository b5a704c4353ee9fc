"""What a recipe builds: everything that one run needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch

from quire.data.batch import Data, TensorData
from quire.data.columns import Target
from quire.data.load import TableData, load_table
from quire.data.loaded import LoadedData, Prepares
from quire.data.preparation import Preparation
from quire.data.table import Table
from quire.errors import InputError
from quire.nn.heads import Bernoulli, Categorical, Gaussian, Head, Heteroscedastic
from quire.recipes.base import DescentOptions, RunOptions, TableRunOptions
from quire.train.keeping import Record
from quire.train.progress import Progress
from quire.train.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quire.tuning import Adapters


Prepared = TypeVar("Prepared", bound=Prepares)


class Picture(NamedTuple):
    """A figure of the report that only this recipe has."""

    name: str
    title: str
    caption: str
    figure: Figure


class Sample(NamedTuple):
    """A text that the model made, and how."""

    name: str
    text: str


@dataclass
class Plan:
    """A task, its data and how long to train. `options` are those that the recipe settled on."""

    task: Task
    data: LoadedData
    options: RunOptions
    epochs: float = 0.0
    """Length of training by descent when neither --epochs nor --steps is given."""
    extra_measures: Callable[[], dict[str, float]] | None = None
    """Measures on the test part that are this recipe's own, computed after training."""
    pictures: Callable[[], Sequence[Picture]] | None = None
    samples: Callable[[], Sequence[Sample]] | None = None
    notes: list[str] = field(default_factory=list)
    fresh: tuple[str, ...] = ()
    """Parameters that were made anew on a network that was taken over, and are always trained in full."""
    adapters: Adapters | None = None
    """What lies over the network while it is tuned."""
    before: Callable[[torch.device, Progress], None] | None = None
    """What a new run does first, such as training a base to be tuned; not done again on resuming."""
    history: list[Record] = field(default_factory=list)
    """The records of training, once it is over; for pictures."""


def announce(plan: Plan) -> tuple[str, ...]:
    """Say what was done with the data while there is time to stop."""
    notes = (*plan.notes, *plan.data.warnings)
    for note in notes:
        print(f"note: {note}", file=sys.stderr, flush=True)
    return notes


def open_data(
    options: TableRunOptions,
    builtin: str | Table,
    *,
    kind: Literal["classification", "regression", "auto"] = "auto",
    targets: str | Sequence[str] | None = None,
) -> TableData:
    """The user's file, or the recipe's built-in set, read, split and prepared."""
    source: Path | str | Table = builtin if options.data is None else options.data
    wanted = options.target if options.data is not None else targets
    return load_table(
        source, options.table, targets=wanted, kind=kind, seed=options.seed,
        like=base_preparation(options, Preparation),
    )  # fmt: skip


def base_preparation(options: DescentOptions, kind: type[Prepared], of: str = "") -> Prepared | None:
    """The preparation of the run that is tuned, whose model reads nothing else; None without one. It must be
    of the given type, and of text also of the kind `of`."""
    if options.tune.base is None:
        return None
    from quire.tasks.loading import load_trained
    from quire.train.folder import read_config

    found = load_trained(options.tune.base).preparation
    if not isinstance(found, kind) or getattr(found, "kind", of) != of:
        recipe = read_config(options.tune.base)["recipe"]
        raise InputError(
            f"--tune.base {options.tune.base} is a run of '{recipe}'",
            expected="a run that learned from the same kind of data",
            fix=f"quire train {recipe} --tune.base {options.tune.base} …",
        )
    return found


def make_head(
    target: Target, train: torch.Tensor, *, heteroscedastic: bool = False, binary: bool = False
) -> Head:
    """The head for a target, with the units of its training values."""
    if target.kind == "classification":
        return Bernoulli(1) if binary else Categorical(len(target.classes))
    head = Heteroscedastic(1) if heteroscedastic else Gaussian(1)
    head.fit_target(train)
    return head


def several_targets_of(part: Data, preparation: Prepares) -> Data:
    """The columns of a target matrix as fields of their own, "target.NAME", for several heads."""
    if len(preparation.targets) < 2:
        return part
    assert isinstance(part, TensorData)
    fields = {"inputs": part.inputs}
    for i, target in enumerate(preparation.targets):
        column = part.target[:, i]
        classes = target.kind == "classification"
        fields[f"target.{target.name}"] = column.long() if classes else column.float()
    return TensorData(fields)


def several_targets(data: TableData) -> TableData:
    """`several_targets_of` each part."""
    parts = {
        name: part and several_targets_of(part, data.preparation)
        for name, part in (("train", data.train), ("validation", data.validation), ("test", data.test))
    }
    return replace(data, **parts)  # type: ignore[arg-type]


def largest_eigenvalue(inputs: torch.Tensor) -> float:
    """λmax of XᵀX/n with a column of ones: what bounds the step size of a linear model."""
    x = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1).double()
    return float(torch.linalg.eigvalsh(x.T @ x / len(x))[-1])


def with_step_size(options: Any, lr: float) -> Any:
    return replace(options, optim=replace(options.optim, lr=lr))


def need_classes(data: TableData, recipe: str, *, exactly: int | None = None) -> None:
    classes = data.preparation.target.classes
    if exactly is not None and len(classes) != exactly:
        raise InputError(
            f"'{data.preparation.target.name}' has {len(classes)} classes",
            expected=f"{exactly} classes for the recipe '{recipe}'",
            fix="use 'quire train softmax' or 'quire train mlp'",
        )
