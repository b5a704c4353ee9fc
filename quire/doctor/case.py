"""What is examined: a model of anybody's, its loss and some batches, and what one step through them shows.

Everything happens on a copy, and draws its random numbers apart: the model, the optimiser and the stream of
random numbers are left as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.data.batch import Batch
from quire.doctor.watch import leaves, watched
from quire.errors import InputError
from quire.train.task import Task

MOST_BATCHES = 8
NORMS = (nn.modules.batchnorm._BatchNorm,)
Loss = Callable[[Any, Any], Tensor]


@dataclass
class Layer:
    """What a module without children gave in one step."""

    name: str
    module: nn.Module
    outputs: list[Tensor] = field(default_factory=list)
    """Detached, of each call."""

    @property
    def output(self) -> Tensor:
        return self.outputs[-1]


@dataclass
class Step:
    """One forward and backward pass in training mode."""

    layers: dict[str, Layer]
    output: Any = None
    loss: Tensor | None = None
    problem: Exception | None = None
    """What stopped it."""
    stage: str = "forward"
    """Where: "forward", "loss" or "backward"; "done" where nothing did."""


@dataclass(frozen=True)
class Pair:
    """A batch."""

    inputs: tuple[Any, ...]
    target: Any
    whole: Batch | None = None
    """Where it is a batch of one of Quire's tasks."""

    def head(self, rows: int) -> Pair:
        """The first rows, where the parts of a batch have them in common; about as many of a task's batch."""
        if self.whole is not None:
            return Pair.of(self.whole.split(max(1, len(self.whole) // rows))[0])
        parts = [*self.inputs, self.target]
        if not all(isinstance(part, Tensor) and part.ndim for part in parts):
            return self
        if len({len(part) for part in parts}) != 1:
            return self
        return Pair(tuple(part[:rows] for part in self.inputs), self.target[:rows])

    @property
    def rows(self) -> int:
        """0 where the inputs are no tensor."""
        first = self.inputs[0] if self.inputs else None
        return len(first) if isinstance(first, Tensor) and first.ndim else 0

    @classmethod
    def of(cls, batch: Any) -> Pair:
        if isinstance(batch, Batch):
            return cls((batch.inputs,), batch.fields.get("target"), batch)
        if isinstance(batch, Mapping) and {"inputs", "target"} <= set(batch):
            return cls((batch["inputs"],), batch["target"])
        if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) >= 2:
            return cls(tuple(batch[:-1]), batch[-1])
        raise InputError(
            f"a batch of type {type(batch).__name__}",
            expected="(inputs, target), or a mapping with 'inputs' and 'target'",
            fix="wrap the loader: ((x, y) for x, y, *_ in loader)",
        )


class Case:
    """A model with its loss and batches; facts are found when they are asked for, once."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Any],
        optimisers: Sequence[torch.optim.Optimizer] = (),
        seed: int = 0,
        validation: Iterable[Any] = (),
    ) -> None:
        self.original, self.loss, self.optimisers, self.seed = model, loss, tuple(optimisers), seed
        self.batches = [Pair.of(batch) for batch in islice(iter(batches), MOST_BATCHES)]
        self.validation = [Pair.of(batch) for batch in islice(iter(validation), MOST_BATCHES)]
        self.source, self.validation_source = batches, validation
        self.rows = row_count(batches)
        if not self.batches:
            raise InputError("no batch", expected="at least one", fix="check the loader and its data set")
        first = next((p for p in model.parameters()), None)
        self.device = torch.device("cpu") if first is None else first.device

    @cached_property
    def first(self) -> Pair:
        """The first batch, where the model is."""
        return self.placed(self.batches[0])

    def placed(self, pair: Pair) -> Pair:
        def to(value: Any) -> Any:
            return value.to(self.device) if isinstance(value, Tensor | Batch) else value

        return Pair(tuple(to(value) for value in pair.inputs), to(pair.target), to(pair.whole))

    def call(self, model: nn.Module, pair: Pair) -> Any:
        """The output of the model, or of a copy of it."""
        return model(*pair.inputs)

    def loss_of(self, model: nn.Module, pair: Pair) -> Tensor:
        return self.loss(self.call(model, pair), pair.target)

    @cached_property
    def model(self) -> nn.Module:
        """The copy that `step` went through, in the mode that it was given in; its parameters carry
        gradients."""
        model = copy.deepcopy(self.original)
        model.zero_grad(set_to_none=True)
        return model

    @cached_property
    def step(self) -> Step:
        found = Step({name: Layer(name, module) for name, module in leaves(self.model).items()})
        pair = self.first
        with self.drawing(), watched(self.model, copy=True) as seen, torch.enable_grad():
            try:
                found.output = self.call(self.model, pair)
                found.stage = "loss"
                found.loss = self.loss(found.output, pair.target)
                found.stage = "backward"
                if isinstance(found.loss, Tensor) and found.loss.requires_grad and found.loss.numel() == 1:
                    found.loss.backward()
                found.stage = "done"
            except Exception as problem:
                found.problem = problem
        for call in seen:
            found.layers[call.name].outputs.append(call.output)
        return found

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Random numbers of their own, the same each time."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield

    @property
    def trains(self) -> bool:
        """Whether a step went through to a loss with a gradient."""
        loss = self.step.loss
        whole = self.step.stage == "done" and isinstance(loss, Tensor)
        return whole and loss.numel() == 1 and loss.requires_grad  # type: ignore[union-attr]

    @property
    def output(self) -> Tensor | None:
        return self.step.output.detach() if isinstance(self.step.output, Tensor) else None

    @cached_property
    def kind(self) -> str | None:
        """Which known loss this one is, told by its values, whatever it is called or wrapped in."""
        output, target, loss = self.output, self.first.target, self.step.loss
        if (
            output is None
            or not isinstance(target, Tensor)
            or not isinstance(loss, Tensor)
            or loss.numel() != 1
        ):
            return None
        value = float(loss.detach())
        for name, known in KNOWN.items():
            try:
                wanted = float(known(output, target))
            except Exception:  # does not apply to these shapes or types
                continue
            if abs(value - wanted) <= 1e-4 * max(1.0, abs(wanted)):
                return name
        return None

    @cached_property
    def classes(self) -> int | None:
        """C where the target is the number of a class and the output has a value for each."""
        output, target = self.output, self.first.target
        if output is None or not isinstance(target, Tensor) or target.is_floating_point() or output.ndim < 2:
            return None
        shape = (output.shape[0], *output.shape[2:])
        return int(output.shape[1]) if tuple(target.shape) == shape and output.shape[1] > 1 else None


class AsModule(nn.Module):
    """A case as a module from the number of a batch, (1,), to its loss; a copy has the same batches."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.model = case, case.model

    def __deepcopy__(self, memo: dict[int, Any]) -> AsModule:
        made = AsModule(self.case)
        made.model = copy.deepcopy(self.model, memo)
        return made

    def forward(self, number: Tensor) -> Tensor:
        return self.case.loss_of(self.model, self.case.placed(self.case.batches[int(number[0])]))

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.tensor([n]), torch.tensor([n])) for n in range(len(self.case.batches))]


def added(terms: Any, target: Any) -> Tensor:
    return torch.stack([term.reshape(()) for term in terms.values()]).sum()


def row_count(batches: Any) -> int | None:
    """Of the data set of a loader, where it says so."""
    try:
        return len(batches.dataset)
    except (AttributeError, TypeError):
        return None


class TaskCase(Case):
    """A task of Quire's with batches of its data, seen by one of its players."""

    def __init__(
        self,
        task: Task,
        batches: Iterable[Batch],
        player: str = "model",
        seed: int = 0,
        validation: Iterable[Batch] = (),
    ) -> None:
        self.player = player
        super().__init__(task, added, batches, seed=seed, validation=validation)

    @cached_property
    def model(self) -> nn.Module:
        task = super().model
        assert isinstance(task, Task)
        task.train()
        own = {id(p) for p in task.player_parameters(self.player).values()}
        for p in task.parameters():
            p.requires_grad_(id(p) in own)
        return task

    def call(self, model: nn.Module, pair: Pair) -> Any:
        """The terms of the loss, by name."""
        assert isinstance(model, Task)
        assert pair.whole is not None
        batch = model.augment(pair.whole)
        weights = model.weigh(batch)
        return {
            name: model.scales.get(name, 1.0) * total / weights[name]
            for name, total in model.terms(batch, self.player).items()
        }


KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda o, t: F.cross_entropy(o, t),
    "negative cross-entropy": lambda o, t: -F.cross_entropy(o, t),
    "negative log-likelihood": lambda o, t: F.nll_loss(o, t),
    "log-likelihood": lambda o, t: -F.nll_loss(o, t),
    "binary cross-entropy of logits": lambda o, t: F.binary_cross_entropy_with_logits(o, t.to(o.dtype)),
    "binary cross-entropy": lambda o, t: F.binary_cross_entropy(o, t.to(o.dtype)),
    "squared error": lambda o, t: (o - t).square().mean(),
    "absolute error": lambda o, t: (o - t).abs().mean(),
}


def finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())
