"""Whole steps on a GPU, recorded once and replayed: forward, backward, guard, clipping and optimiser as one
CUDA graph.

A step of a small network is some thirty kernels of two microseconds each, and asking for them one by one
takes ten times as long as they run. Replayed, they follow each other at once.

A replay does what was recorded, whatever the Python code would have done, so a step is recorded only if the
one before showed that Python decides nothing in it: it asked nothing of the device, drew no random number on
the host, and left no counter in any module changed. Batches of another shape are other recordings.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.functional.modes import has_hooks
from quire.train.gradients import Weights

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
        self.seen: dict[Hashable, int] = {}
        self.refused = ""
        """Why nothing more is recorded."""

    def __call__(
        self, course: Hashable, batch: Batch, factors: Weights, rate: float, constant: bool, work: Work
    ) -> Tensor:
        """`course` stands for all that the work depends on besides its arguments."""
        key = (
            course, batch.complete, rate if constant else None,
            *((name, value.shape, value.dtype) for name, value in batch.fields.items()),
            *((name, None if isinstance(value, Tensor) else value) for name, value in factors.items()),
        )  # fmt: skip
        found = self.recordings.get(key)
        if found is not None:
            return found.replay(batch, factors, rate)
        if self.refused or len(self.recordings) == MOST:
            return work(batch, factors, rate)
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] < REHEARSED:
            return work(batch, factors, rate)
        if self.seen[key] == REHEARSED:
            return self._rehearse(batch, factors, rate, work)
        try:
            self.recordings[key] = Recording(
                batch, factors, rate, work, constant=constant, compiled=self.compiled
            )
        except Exception as error:  # nothing of a recording runs, so the step is still to be taken
            self.refused = f"{type(error).__name__}: {str(error)[:200]}"
            return work(batch, factors, rate)
        return self.recordings[key].replay(batch, factors, rate)

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


class Recording:
    """One step as a graph, with the places its inputs are read from and its numbers are left in."""

    def __init__(
        self,
        batch: Batch,
        factors: Weights,
        rate: float,
        work: Work,
        *,
        constant: bool,
        compiled: bool,
    ) -> None:
        device = batch.inputs.device
        self.fields = {name: value.clone() for name, value in batch.fields.items()}
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
            self.numbers = work(Batch(self.fields, rows, batch.complete), self.factors, given)

    def replay(self, batch: Batch, factors: Mapping[str, Any], rate: float) -> Tensor:
        # Kernels all of them: PyTorch's plain copies ask the driver, which takes three times as long.
        for names, places in self.places:
            torch._foreach_copy_(places, [batch.fields[name] for name in names])
        for name, value in self.factors.items():
            if isinstance(value, Tensor):
                value.copy_(factors[name])
        if self.rate is not None:
            self.rate.fill_(rate)
        self.graph.replay()
        return self.numbers + 0.0


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
