"""The processes that take each step of descent together.

The batch of a step is the one that a single process would take, and each process has some of its rows.
Weights are added over the processes before the first backward, gradients and sums after it, so that

    gradient = Σ_processes Σ_own rows ∂(scale · sum / weight of the whole batch)

is the same sum in another order. Norm, clipping, penalties, guard and optimiser come after it and compute the
same numbers everywhere. Each process draws its own random numbers, for dropout and for what is changed in its
own rows.

A process that runs out of memory on the way to its gradient still comes to the next sum that all add up, and
says so there: nobody waits for it, and all take the step again in smaller parts.

A process has two rows at least where the batch has them, so that nothing that hangs on whether there is more
than one is decided differently; processes for which that leaves none borrow rows, and count them as nothing.
"""

from __future__ import annotations

import itertools
import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from quire.data.batch import Batch, Data
from quire.errors import InputError, NonFiniteError
from quire.train.batch_norm import separate, synchronise
from quire.train.memory import Elsewhere
from quire.train.processes import from_all, give_to_all, joined, processes, rows_of_all
from quire.train.replay import Answer
from quire.train.task import Task, Weight

if TYPE_CHECKING:
    from quire.train.groups import Group
    from quire.train.shard import Shards

LEAST = 2
"""Rows that a process has, where there are enough."""
LAG = 2
"""Steps after which a GPU's word on whether to stop is read: by then it has been said, and nothing waits."""


def make_peers(task: Task, device: torch.device, *, shard: bool = False) -> Peers | None:
    """None where this process is the only one."""
    if shard and not joined():
        raise InputError(
            "--parallel.shard in one process",
            expected="several to split the model among",
            fix="add --nproc 2, or start with torchrun",
        )
    return Peers(task, device) if shard or processes()[1] > 1 else None


class Peers:
    """This process among those that train together."""

    def __init__(self, task: Task, device: torch.device) -> None:
        if task.couples_samples and type(task).represent is Task.represent:
            raise InputError(
                f"{processes()[1]} processes with a loss that compares the samples of a batch",
                expected="`represent` and `coupled_terms` in the task, to compare the rows of all",
                fix="train in one process, or implement the two methods",
            )
        self.number, self.count = processes()
        self.device = device
        self.shards: Shards | None = None
        """Where parameters are split among the processes."""
        self.idle = False
        """Whether the rows of this step are borrowed."""
        self.fewest = 1
        """Rows of the process that has the fewest, and has any."""
        self.apart = False
        self.signal = 0
        """The signal that some process was sent, once all know of it."""
        self.early = False
        """Whether some process has asked for an end, likewise."""
        self._wishes = (0, False)
        self._waiting: deque[Answer] = deque()
        self.norms = synchronise(task, self._counting, self.meet)
        self.meets = bool(self.norms) or task.couples_samples
        """Whether processes add anything between the weights and the gradients of a step."""
        self._width = 1 + max((norm.num_features + 1 for norm in self.norms), default=0)
        self._names: list[str] = []

    def agree(self, task: Task, rows: int, batch_size: int, seed: int, *, carry: bool) -> None:
        """Processes that have just met train on the same, and begin with the weights of the first."""
        facts = set(from_all((rows, batch_size, seed)))
        if len(facts) > 1:
            raise InputError(
                f"processes with rows, batch size and seed of {' and '.join(map(str, sorted(facts)))}",
                expected="the same in each",
                fix="give every process the same data and options",
            )
        if carry and self.sizes(batch_size)[-1] == 0:
            raise InputError(
                f"--train.carry with {batch_size} streams for {self.count} processes",
                expected="two streams for each at least",
                fix=f"set --train.batch-size {2 * self.count} or more",
            )
        give_to_all(itertools.chain(task.parameters(), task.buffers()), task.device)

    def meet_before_sending(self) -> Shards | None:
        """What is split, if anything is: its parts are put together only where all processes still can."""
        if self.shards is not None:
            self.meets = True
            self.shards.meet_before_sending(self.meet)
        return self.shards

    def close(self) -> None:
        separate(self.norms)

    def _counting(self) -> float | None:
        return None if self.apart else 0.0 if self.idle else 1.0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Batch norms use this process's own rows: for what not all do alike."""
        self.apart = True
        try:
            yield
        finally:
            self.apart = False

    # -- Rows ----------------------------------------------------------------------------------

    def sizes(self, rows: int) -> list[int]:
        """How many of a batch's rows each process has."""
        sharing = max(1, min(self.count, rows // LEAST))
        return [rows // sharing + (i < rows % sharing) if i < sharing else 0 for i in range(self.count)]

    def share(self, rows: int) -> tuple[int, int]:
        """From and to which row of a batch this process has; (0, 0) for none."""
        sizes = self.sizes(rows)
        first = sum(sizes[: self.number])
        return (first, first + sizes[self.number]) if sizes[self.number] else (0, 0)

    def batches(self, data: Data, order: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of each batch of `order`; none is skipped, as all take part in each step."""
        full = len(order) // batch_size
        whole, rest = order[: full * batch_size].view(full, batch_size), order[full * batch_size :]
        if start < full:
            own = self._own(whole)
            for batch in data.batches(own.reshape(-1), own.shape[1], start=start):
                self._note(batch_size)
                yield batch
        if len(rest):
            own = self._own(rest[None])
            for batch in data.batches(own.reshape(-1), own.shape[1]):
                self._note(len(rest))
                yield batch

    def _own(self, whole: Tensor) -> Tensor:
        first, last = self.share(whole.shape[1])
        return whole[:, first:last] if last else whole[:, :LEAST]

    def _note(self, rows: int) -> None:
        sizes = self.sizes(rows)
        self.idle, self.fewest = sizes[self.number] == 0, min(size for size in sizes if size)

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Micro-batches. Where batch norms add over processes, or what is split is put together, each process
        has as many as the others."""
        if not (self.norms or self.shards):
            return batch.split(parts)
        parts = max(1, min(parts, self.fewest // (LEAST if self.norms else 1)))
        return [batch] * parts if self.idle else batch.split(parts)

    # -- Numbers -------------------------------------------------------------------------------

    def tell(self, number: int, early: bool) -> None:
        """What this process has been asked for: a signal, an end. The others learn of it in the next step."""
        self._wishes = number, early

    def add_weights(self, weights: Mapping[str, Weight]) -> dict[str, Weight]:
        """The weights of the whole batch."""
        self._names = list(weights)
        number, early = self._wishes
        wishes = [float(number == signal.SIGINT), float(number == signal.SIGTERM), float(early)]
        values = [0.0 if self.idle else weight for weight in weights.values()]
        if not any(isinstance(value, Tensor) for value in values):
            vector = torch.tensor([*values, *wishes], dtype=torch.float64, device=self.device)
        else:
            parts = [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in (*values, *wishes)]
            vector = torch.stack(parts)
        distributed.all_reduce(vector)
        if self.device.type != "cuda":
            *numbers, interrupt, end, stop = vector.tolist()
            self._take_in(interrupt, end, stop)
            return dict(zip(weights, numbers, strict=True))
        self._waiting.append(Answer(vector[-len(wishes) :]))
        if len(self._waiting) > LAG:
            self._take_in(*self._waiting.popleft().read())
        return dict(zip(weights, vector[: -len(wishes)].unbind(), strict=True))

    def _take_in(self, interrupt: float, end: float, stop: float) -> None:
        self.signal = signal.SIGTERM if end else signal.SIGINT if interrupt else 0
        self.early = stop > 0

    def meet(self, value: Tensor | None = None, *, short: bool = False) -> Tensor:
        """The sum of a vector over the processes. One that is `short` of memory comes without a vector to
        whichever meeting is the next, and all raise `Elsewhere`; so all meetings are of one size, and hosts
        wait for them."""
        device = self.device if self.norms else torch.device("cpu")
        vector = torch.zeros(self._width, dtype=torch.float64, device=device)
        own = vector[1:] if value is None else vector[1 : len(value) + 1]
        if value is not None:
            own.copy_(value)
        elif short:
            vector[:1] = 1.0
        distributed.all_reduce(vector)
        if vector[0].item():
            raise Elsewhere
        return own if value is None else own.to(value.dtype)

    def add_gradients(
        self, groups: Sequence[Group], sums: Mapping[str, Tensor], *, short: bool = False
    ) -> dict[str, Tensor]:
        """Add the buffers of gradients over the processes, in place, and the sums. Where a process is `short`
        of memory, and has neither, all raise `Elsewhere`."""
        if self.meets:
            self.meet(short=short)
        own, told = sums, torch.tensor([float(short)], dtype=torch.float64)
        if len(sums) < len(self._names):  # this player's are not all
            sums = {**dict.fromkeys(self._names, torch.zeros((), device=self.device)), **sums}
        vector = torch.stack([sums[name].double() for name in self._names])
        if self.idle:
            vector.zero_()
        on_host = vector.device.type == "cpu"
        if on_host:  # of a GPU the host would have to wait for it
            vector = torch.cat([vector, told])
        works = []
        for group in groups:
            if group.split:  # has been added already
                continue
            if self.idle or short:
                group.grad.zero_()
            if group.active:
                works.append(distributed.all_reduce(group.grad, async_op=True))
        works.append(distributed.all_reduce(vector, async_op=True))
        if not (on_host or self.meets):
            works.append(distributed.all_reduce(told, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        if vector[-1].item() if on_host else told.item():
            raise Elsewhere
        added = dict(zip(self._names, vector, strict=False))
        return {name: added[name].to(value.dtype) for name, value in own.items()}

    # -- Losses that compare rows --------------------------------------------------------------

    def compared(self, representations: Tensor, batch: Batch) -> tuple[Tensor, Batch, slice]:
        """The representations of all processes, their rows and targets, and where this process's are."""
        none = 0 if self.idle else len(representations)
        whole = rows_of_all(representations[:none])
        fields = {n: rows_of_all(v[:none]) for n, v in batch.fields.items() if n.startswith("target")}
        rows = rows_of_all(batch.rows[:none].to(self.device))
        sizes = from_all(none)
        first = sum(sizes[: self.number])
        return whole, Batch(fields, rows, batch.complete), slice(first, first + none)

    # -- When something is wrong ---------------------------------------------------------------

    def blame(self, own: NonFiniteError | None, step: int) -> NonFiniteError:
        """The error of the first process that has one, for all to raise."""
        errors = from_all(own)
        number = next((i for i, error in enumerate(errors) if error is not None), None)
        if number is None:
            return NonFiniteError(
                f"step {step}: the gradient overflowed when the shares of {self.count} processes were added. "
                "The step was not applied",
                expected="finite data, loss and gradients",
                fix="lower --optim.lr or set --optim.clip-norm 1",
            )
        found = errors[number]
        assert found is not None
        error = NonFiniteError(
            f"process {number} of {self.count}, {found.got}", expected=found.expected, fix=found.fix
        )
        error.step, error.rows = step, found.rows  # type: ignore[attr-defined]
        error.said_elsewhere = number != self.number  # type: ignore[attr-defined]
        return error
