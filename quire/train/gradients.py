"""The gradient of one step, exact over micro-batches.

    loss = Σ_terms scale · Σ_micro sum / Σ_micro weight

All micro-batches are weighed before the first backward, so each sum is scaled once by the weight of
the whole batch and the gradients simply add up in the parameters' `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from quire.data.batch import Batch, Data
from quire.errors import InputError
from quire.train.memory import generators, told_of_memory
from quire.train.peers import Peers
from quire.train.sums import add_to
from quire.train.task import Task, Weight

Sums = dict[str, Tensor]
Weights = dict[str, Weight]


def loss_factors(task: Task, weights: Mapping[str, Weight]) -> Weights:
    """scale/weight of each term; 0 for a term that nothing in the batch contributes to."""
    factors: Weights = {}
    for name, weight in weights.items():
        scale = task.scales.get(name, 1.0)
        if isinstance(weight, Tensor):
            # Counts are integers, whose quotient would be rounded to float32.
            weight = weight if weight.is_floating_point() else weight.double()
            factors[name] = torch.where(weight > 0, scale / weight, 0.0)
        else:
            factors[name] = scale / weight if weight else 0.0
    return factors


def combine(factors: Mapping[str, Weight], sums: Mapping[str, Tensor]) -> Tensor:
    """The loss: Σ factor · sum."""
    terms = iter(sums.items())
    name, value = next(terms)
    loss = value * factors[name]
    for name, value in terms:
        loss = loss + value * factors[name]
    return loss


def run_backward(
    values: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor] | None = None
) -> None:
    """`torch.autograd.backward` for seeds that are known to fit. That one compares sizes with the help of
    SymPy, and its import takes half a second of each training, or more where nothing is compiled yet."""
    _engine_run_backward(
        tuple(values), tuple(seeds), False, False, tuple(inputs or ()),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def _like(value: Tensor, factor: Weight) -> Tensor:
    return factor.to(value.dtype) if isinstance(factor, Tensor) else value.new_full(value.shape, factor)


def check_accumulation(task: Task, micro_batches: int) -> None:
    """Refuse, before any work, what could not be exact."""
    if micro_batches > 1 and task.couples_samples and type(task).represent is Task.represent:
        raise InputError(
            f"--train.micro_batches {micro_batches} with a loss that compares the samples of a batch",
            expected="a task with `represent` and `coupled_terms`, so that the whole batch can be compared",
            fix="set --train.micro_batches 1, or implement the two methods",
        )


class Gradients:
    """Fills `.grad` for one player and returns the sums that were differentiated."""

    def __init__(
        self,
        task: Task,
        *,
        autocast: Callable[[], AbstractContextManager[object]] | None = None,
        explicit: bool = True,
        compiled: bool = False,
        peers: Peers | None = None,
    ) -> None:
        self.task = task
        # Scaling of inputs, model and loss as one program, so that what lies between them is fused too.
        self.terms = torch.compile(task.terms) if compiled else task.terms
        self.autocast = autocast or nullcontext
        self.explicit = task.explicit() if explicit else None
        self.alone = len(task.players) == 1
        self.peers = peers

    def stage(self, data: Data) -> Data:
        return self.explicit.stage(data) if self.explicit else data

    def __call__(self, micro: list[Batch], factors: Mapping[str, Weight], player: str) -> Sums:
        task = self.task
        if task.couples_samples and (len(micro) > 1 or self.peers is not None):
            return self._coupled(micro, factors)
        total: Sums = {}
        for batch in micro:
            sums = self.explicit.gradients(batch, factors) if self.explicit else None
            if sums is None:
                with self.autocast():
                    sums = self.terms(batch, player)
                self._backward(factors, sums, player)
                sums = {name: value.detach() for name, value in sums.items()}
            add_to(total, sums)
        return total

    def _backward(self, factors: Mapping[str, Weight], sums: Sums, player: str) -> None:
        """∂/∂sum of the loss is the sum's factor, so the loss itself is not needed."""
        moving = {name: value for name, value in sums.items() if value.requires_grad} or sums
        seeds = [_like(value, factors[name]) for name, value in moving.items()]
        inputs = None
        # What is split has no other way than to all of it; whose turn it is forgets what is not its own.
        # Otherwise other players' parameters are constants of this player's loss.
        if not (self.alone or (self.peers is not None and self.peers.shards is not None)):
            inputs = list(self.task.player_parameters(player).values())
        run_backward(list(moving.values()), seeds, inputs)

    def _coupled(self, micro: list[Batch], factors: Mapping[str, Weight]) -> Sums:
        """Representations of all parts first, then the loss of the whole batch and its gradient with
        respect to them, then each part again with that gradient: memory of a part, gradient of the whole."""
        task = self.task
        sources = generators(task.device)
        states, parts = [], []
        for batch in micro:
            states.append([source.get() for source in sources])
            with torch.no_grad(), self.autocast():
                parts.append(task.represent(batch))
        representations, own = torch.cat(parts), slice(None)
        names = micro[0].fields
        whole = Batch(
            {name: torch.cat([b.fields[name] for b in micro]) for name in names},
            torch.cat([b.rows for b in micro]),
        )
        idle = False
        if self.peers is not None:
            self.peers.meet()  # nobody compares before all have represented
            with told_of_memory("in comparing the rows of all processes"):
                representations, whole, own = self.peers.compared(representations, whole)
            idle = self.peers.idle
        representations.requires_grad_()
        sums = task.coupled_terms(representations, whole)
        (gradient,) = torch.autograd.grad(combine(factors, sums), representations)
        after = [source.get() for source in sources]
        sizes = [len(part) for part in parts]
        pieces = [torch.zeros_like(p) for p in parts] if idle else gradient[own].split(sizes)
        for batch, drawn, piece in zip(micro, states, pieces, strict=True):
            for source, state in zip(sources, drawn, strict=True):
                source.set(state)  # the same dropout masks as in the first pass
            with self.autocast():
                again = task.represent(batch)
            run_backward([again], [piece])
        for source, state in zip(sources, after, strict=True):
            source.set(state)
        # Every process has computed the whole batch's sum, which is to be counted once.
        counted = self.peers is None or self.peers.number == 0
        return {name: value.detach() if counted else torch.zeros_like(value) for name, value in sums.items()}
