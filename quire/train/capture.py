"""Whole steps on a GPU, recorded once and replayed: forward, backward, guard, clipping and optimiser as one
CUDA graph.

A step of a small network is some thirty kernels of two microseconds each, and asking for them one by one
takes ten times as long as they run. Replayed, they follow each other at once.

A replay does what was recorded, whatever the Python code would have done, so a step is recorded only if the
one before showed that Python decides nothing in it: it asked nothing of the device, drew no random number on
the host, and left no counter in any module changed. Batches of another shape are other recordings.

What is left for the host to do would take as long as the step itself. So a recording also cuts its batches
out of the tensors that they come from, by a count of its own, and writes its numbers where they can stay.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.data.batch import Batch, Whole
from quire.functional.modes import has_hooks
from quire.functional.small_layers import SmallLayers
from quire.train.gradients import Weights
from quire.train.pages import Page, alone

Rate = float | Tensor
Work = Callable[[Batch, Weights, Rate], Tensor]
"""A step on a batch with its factors and step size; returns the numbers to be shown, as one vector."""

REHEARSED = 3
"""The how manieth step of a kind is looked at; those before compile kernels and find memory."""
MOST = 4
"""Recordings that are kept: each has memory of its own."""
LAUNCH_BOUND = 0.5
"""Share of a step's time that its launches must take for a recording to be worth its memory."""


class Recorder:
    """Does the work of steps, by replaying it where that is possible and worthwhile."""

    def __init__(self, task: nn.Module, device: torch.device, *, compiled: bool = False) -> None:
        """A `compiled` step is recorded also where launches take little of its time."""
        self.task, self.device, self.compiled = task, device, compiled
        self.recordings: dict[Hashable, Recording] = {}
        self.sources: dict[Hashable, Source] = {}
        self.seen: dict[Hashable, int] = {}
        self.left: dict[Hashable, Tensor] = {}
        """The numbers that the rehearsal of a step left."""
        self.refused = ""
        """Why nothing more is recorded."""

    def __call__(
        self, course: Hashable, batch: Batch, factors: Weights, rate: float, constant: bool, work: Work
    ) -> tuple[Page, int]:
        """`course` stands for all that the work depends on besides its arguments. Returns where the numbers
        are: a page and a row of it."""
        whole = self._whole(batch)
        key = (
            course, batch.complete, rate if constant else None, len(batch), whole and whole.kind,
            *(() if whole else [(name, value.shape, value.dtype) for name, value in batch.fields.items()]),
            *[(name, None if isinstance(value, Tensor) else value) for name, value in factors.items()],
        )  # fmt: skip
        found = self.recordings.get(key)
        if found is not None:
            return found.replay(batch, factors, rate)
        if self.refused or len(self.recordings) == MOST:
            return alone(work(batch, factors, rate))
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] <= REHEARSED:
            with self.layers():  # compiles its kernels in the first of these steps
                if self.seen[key] < REHEARSED:
                    return alone(work(batch, factors, rate))
                self.left[key] = self._rehearse(batch, factors, rate, work)
                return alone(self.left[key])
        try:
            source = None
            if whole is not None:
                source = self.sources.get(whole.kind) or Source(whole)
                self.sources[whole.kind] = source
            with self.layers():
                self.recordings[key] = Recording(
                    batch, factors, rate, work, source, left=self.left[key], constant=constant,
                    compiled=self.compiled,
                )  # fmt: skip
        except Exception as error:  # nothing of a recording runs, so the step is still to be taken
            self.refused = f"{type(error).__name__}: {str(error)[:200]}"
            return alone(work(batch, factors, rate))
        return self.recordings[key].replay(batch, factors, rate)

    def layers(self) -> AbstractContextManager[object]:
        """How layers are computed in steps that are recorded, and in those before."""
        return nullcontext() if self.compiled else SmallLayers()

    def _whole(self, batch: Batch) -> Whole | None:
        """What the batch is to be cut out of by the recording, if it can be and there is more of it."""
        whole = batch.whole
        if whole is None or whole.size == len(batch):
            return None
        source = self.sources.get(whole.kind)
        return whole if source is None or whole.size <= source.size else None

    def _rehearse(self, batch: Batch, factors: Weights, rate: float, work: Work) -> Tensor:
        """A step as it is written, with an eye on what a replay would leave out."""
        before = host_state(self.task)
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        with _noting_waits() as waits:
            result = work(batch, factors, rate)
        launched = time.perf_counter() - began
        torch.cuda.synchronize(self.device)
        share = launched / (time.perf_counter() - began)
        if waits:
            self.refused = f"the step waits for the device: {waits[0]}"
        elif has_hooks(self.task):
            self.refused = "a module has hooks"
        elif host_state(self.task) != before:
            self.refused = "the step changes numbers on the host"
        elif share < LAUNCH_BOUND and not self.compiled:
            self.refused = f"launches take {share:.0%} of a step"
        return result


class Source:
    """The place that recordings cut their batches out of."""

    def __init__(self, whole: Whole) -> None:
        self.size = whole.size
        self.fields = {name: torch.empty_like(value) for name, value in whole.fields.items()}
        self.holds: Whole | None = None

    def hold(self, whole: Whole) -> None:
        for name, value in whole.fields.items():
            self.fields[name][: whole.size].copy_(value)
        self.holds = whole


class Recording:
    """One step as a graph, with the places its inputs are read from and its numbers are left in."""

    LONG = 256
    """Rows of a page."""

    def __init__(
        self,
        batch: Batch,
        factors: Weights,
        rate: float,
        work: Work,
        source: Source | None,
        *,
        left: Tensor,
        constant: bool,
        compiled: bool,
    ) -> None:
        device = batch.inputs.device
        self.source, self.size = source, len(batch)
        self.next = 0
        """The row of the source that the next replay begins at, unless it is told otherwise."""
        self.row = 0
        # Outside of the recording, whose own memory serves several of its tensors in turn.
        memory = left.new_empty(self.LONG, len(left))
        # Rows to be cut out, and the row of the page to be written, all of which go on by themselves.
        rows_of_source = torch.arange(len(batch) + 1, device=device)
        rows_of_source[-1] = 0
        self.counters, self.first_rows = rows_of_source, rows_of_source.clone()
        self.strides = torch.full_like(self.counters, len(batch))  # which the graph reads as long as it lives
        self.strides[-1] = 1
        self.fields = {} if source else {name: value.clone() for name, value in batch.fields.items()}
        names: dict[torch.dtype, list[str]] = {}
        for name, value in self.fields.items():
            names.setdefault(value.dtype, []).append(name)
        self.places = [(some, [self.fields[name] for name in some]) for some in names.values()]
        """Names and tensors of one type each, which one kernel can fill."""
        self.factors = {n: v.clone() if isinstance(v, Tensor) else v for n, v in factors.items()}
        self.rate = None if constant else torch.tensor(rate, device=device)
        # Row numbers lie on the host; on "meta" they cannot be read, so a step that does is not recorded. To
        # a compiled step they would be another kind of argument, for which it would be compiled again.
        rows = batch.rows if compiled else torch.empty(len(batch), dtype=torch.int64, device="meta")
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # a graph keeps memory of its own and cannot use what lies idle
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            given = rate if self.rate is None else self.rate
            fields = self.fields
            if source:
                chosen = self.counters[:-1]
                fields = {name: value.index_select(0, chosen) for name, value in source.fields.items()}
            numbers = work(Batch(fields, rows, batch.complete), self.factors, given)
            memory.index_copy_(0, self.counters[-1:], numbers.unsqueeze(0))
            self.counters.add_(self.strides)
        self.page = Page(memory)

    def replay(self, batch: Batch, factors: Mapping[str, Any], rate: float) -> tuple[Page, int]:
        if self.source is not None:
            assert batch.whole is not None
            if self.source.holds is not batch.whole:
                self.source.hold(batch.whole)
            if self.next != batch.first:
                torch.add(self.first_rows[:-1], batch.first, out=self.counters[:-1])
            self.next = batch.first + self.size
        # Kernels all of them: PyTorch's plain copies ask the driver, which takes three times as long.
        for names, places in self.places:
            torch._foreach_copy_(places, [batch.fields[name] for name in names])
        for name, value in self.factors.items():
            if isinstance(value, Tensor):
                value.copy_(factors[name])
        if self.rate is not None:
            self.rate.fill_(rate)
        if self.row == self.LONG:
            self._turn()
        self.graph.replay()
        self.row += 1
        return self.page, self.row - 1

    def _turn(self) -> None:
        """Go on with a new page; what has been written on this one is kept apart."""
        memory = self.page.values
        self.page.values = memory.clone()
        self.page, self.row = Page(memory), 0
        self.counters[-1:].zero_()


@contextmanager
def _noting_waits() -> Iterator[list[str]]:
    """Collects PyTorch's warnings about calls that wait for the device."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        text = str(warning.message)
        if "called a synchronizing" in text:
            found.append(text.splitlines()[0])
        elif "Synchronization debug mode" not in text:  # which PyTorch says whenever it is switched on
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def host_state(task: nn.Module) -> list[Any]:
    """What a step may have changed on the host: random states, and plain attributes of modules."""
    numbers = np.random.get_state()
    state: list[Any] = [random.getstate(), str(numbers), torch.get_rng_state().numpy().tobytes()]
    for module in task.modules():
        state.append({name: _plain(value) for name, value in vars(module).items()})
    return state


def _plain(value: Any) -> Any:
    """Numbers and words by value, tensors on the host by how often they were changed; of all else nothing."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value._version if value.device.type == "cpu" else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return None
