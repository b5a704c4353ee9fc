"""The contract between a task and the trainer.

A task joins a model to an objective. It gives its loss as named *terms*, each a sum over samples
with a weight beside it, never a mean:

    loss of a step = Σ_terms scale · Σ_batches sum / Σ_batches weight

Weights depend on the batch alone, so all micro-batches of a step are weighed before the first
backward; accumulation, padding and ignored targets are exact by construction.

Measures are additive too: `tally` maps a batch to tensors that add up over batches, and `measures`
turns their sum into numbers, so a split of any size needs no more memory than one batch.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quire.data.batch import Batch, Data
from quire.errors import InputError, unknown_name
from quire.registry import Registry

Weight = float | Tensor


class Explicit(ABC):
    """A way to the gradients without autograd, for models so small that autograd's bookkeeping is what
    a step costs."""

    def stage(self, data: Data) -> Data:
        """The training data with whatever can be computed once instead of in each step."""
        return data

    @abstractmethod
    def gradients(self, batch: Batch, factors: Mapping[str, Weight]) -> dict[str, Tensor] | None:
        """Add the gradient of Σ factor·term to each parameter's ``.grad`` and return the sums; None
        where a batch is autograd's after all."""


TASKS: Registry[type[Task]] = Registry("task")


class Task(nn.Module, ABC):
    """A model with its objective, its measures and its predictions."""

    players: ClassVar[tuple[str, ...]] = ("model",)
    """Who takes steps, in this order, in each step. A classifier has one, a GAN two."""

    turns: Mapping[str, int] = {}
    """A player moves in every n-th step; in each where none is given."""

    couples_samples: ClassVar[bool] = False
    """True where the loss of a sample depends on the others of its batch (InfoNCE). Such a task
    implements `represent` and `coupled_terms`, or accumulation is refused."""

    scales: Mapping[str, float] = {}
    """Factors of the terms; 1 where none is given."""

    step_factors: Mapping[str, float] = {}
    """Factors of the step size by the beginning of a parameter's name; 1 where none is given."""

    frozen: Mapping[str, float] = {}
    """Epochs to wait, likewise; 0 where none is given."""

    answers_target: ClassVar[bool] = True
    """Whether `predict` gives values of the data's targets, in which case truth can stand beside them."""

    predict_options: ClassVar[frozenset[str]] = frozenset()
    """What `predict` takes besides inputs and mode; read from its signature, which alone says it."""

    higher_is_better: ClassVar[frozenset[str]] = frozenset({"accuracy", "precision", "recall", "f1", "r2"})

    evaluation_rows: ClassVar[int] = 1024
    """Rows that are judged at once; more where a row takes little work."""

    evaluation_numbers: ClassVar[int] = 2**24
    """Input numbers that are judged at once; fewer where a model makes many of each."""

    left: list[dict[str, Tensor]]
    """What `terms` leaves of each micro-batch for the batch that goes on from it, as fields of that batch;
    only where `carries_state`."""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "predict" not in cls.__dict__:
            return
        parameters = list(inspect.signature(cls.predict).parameters.values())[1:]
        names = [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
        if len(names) == len(parameters):
            cls.predict_options = frozenset(names[2:])
            cls.predict = _refusing(cls.predict, names)  # type: ignore[method-assign]
        else:  # passes on what it does not know, to a task that refuses
            cls.predict_options |= set(names[2:])

    @property
    def device(self) -> torch.device:
        """Where the task's numbers lie."""
        return next(itertools.chain(self.parameters(), self.buffers())).device

    @property
    def carries_state(self) -> bool:
        """Whether a batch can go on where the one before it stopped."""
        return False

    def player_parameters(self, player: str) -> dict[str, nn.Parameter]:
        """The parameters that `player` steps on, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def step_factor(self, name: str) -> float:
        """Factor of the step size of one parameter, for parts that should move more slowly."""
        return next((f for prefix, f in self.step_factors.items() if name.startswith(prefix)), 1.0)

    def frozen_epochs(self, name: str) -> float:
        """Epochs for which a parameter stays as it is before it joins the others."""
        return next((epochs for prefix, epochs in self.frozen.items() if name.startswith(prefix)), 0.0)

    def train(self, mode: bool = True) -> Self:
        """As every module's; but a batch norm that is frozen also keeps its statistics."""
        super().train(mode)
        for module in self.modules() if mode else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.weight is not None:
                module.train(module.weight.requires_grad)
        return self

    def is_bias(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether ``--no-optim.decay_biases`` leaves a parameter undecayed: biases and norms, which are
        the vectors of a model."""
        return parameter.ndim <= 1

    def augment(self, batch: Batch) -> Batch:
        """The batch of a training step, changed at random; called once a step, before it is weighed."""
        return batch

    @abstractmethod
    def weigh(self, batch: Batch) -> dict[str, Weight]:
        """The weight of each term in this batch, counted before anything is computed."""

    @abstractmethod
    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        """The differentiable sum of each term, under the names of `weigh`."""

    def represent(self, batch: Batch) -> Tensor:
        """What the samples of a coupled loss are compared by, (B, …)."""
        raise NotImplementedError

    def coupled_terms(self, representations: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The terms of a coupled loss from the representations of the whole batch."""
        raise NotImplementedError

    def explicit(self) -> Explicit | None:
        """The way around autograd, None to leave the gradients to it. Asked when training starts."""
        return None

    @torch.no_grad()
    def tally(self, batch: Batch) -> dict[str, Any]:
        """Statistics of the measures that add up over batches: tensors, or anything else with a `+`."""
        return {}

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Terms of every player and tallies of one batch; a task that can share work overrides it."""
        sums: dict[str, Tensor] = {}
        for player in self.players:
            sums |= self.terms(batch, player)
        return sums, self.tally(batch)

    def measures(self, tallies: Mapping[str, Any]) -> dict[str, float]:
        """The measures from the sum of the tallies."""
        return {}

    @property
    def needs_target(self) -> bool:
        """Whether judging takes targets."""
        return self.answers_target

    def warnings(self, history: Sequence[Mapping[str, Any]]) -> list[str]:
        """What the records of training say that a user should know: a collapse, a player that has won."""
        return []

    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        """The loss of each row, by which the largest mistakes are found; nothing where a loss has no rows."""
        return {}

    def finish(self, data: Data, validation: Data | None) -> None:
        """Called once after training, with the weights that are kept: estimate what descent does not."""

    @abstractmethod
    def predict(self, inputs: Tensor, mode: str = "mode") -> dict[str, Tensor]:
        """Predictions as named columns of B rows; which modes exist is the task's to say.

        A task's own options are further keywords of its `predict`. One that it does not have is refused
        by name, before anything is computed.
        """

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """Everything needed to build this task again, as plain JSON values (no weights)."""

    @classmethod
    @abstractmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Task:
        """Build the task that `spec` describes; weights are loaded afterwards."""


Predict = Callable[..., dict[str, Tensor]]


def _refusing(predict: Predict, names: Sequence[str]) -> Predict:
    """`predict`, with a message of ours about a keyword that is not among its `names`, inputs first."""

    @functools.wraps(predict)
    def checked(task: Task, /, *given: Any, **options: Any) -> dict[str, Tensor]:
        for name in options:
            if name not in names:
                raise unknown_name(f"prediction option of {type(task).__name__}", name, names[1:])
        return predict(task, *given, **options)

    return checked


def build_task(spec: Mapping[str, Any]) -> Task:
    """The task of a saved description; the name resolves in the closed registry of tasks."""
    if not isinstance(spec.get("task"), str):
        raise InputError("a task description without its name", expected='an entry "task": NAME')
    return TASKS[spec["task"]].from_spec(spec)
