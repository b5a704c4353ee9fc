"""What subjects about training share: steps of the trainer and of a short loop, timed once they are even."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.bench.case import Clocked, Place
from quire.data.batch import Data
from quire.options import Optim, Train
from quire.train import Callback, fit
from quire.train.descent import Descent
from quire.train.task import Task


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock(Callback):
    """Seconds between two steps of a run, with the device's queue empty at both."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.began = self.seconds = float("nan")

    def on_step(self, descent: Descent, step: int) -> None:
        if step in (self.first, self.last):
            wait(descent.device)
            now = time.perf_counter()
            if step == self.last:
                self.seconds = now - self.began
            self.began = now


def trainer(
    make: Callable[[], Task], data: Data, place: Place, *, warm: int, steps: int, optim: Optim, train: Train,
    units: float = 1.0, **options: Any,
) -> Clocked:  # fmt: skip
    """`units` is how many of the case's units a step does; nothing is judged or saved in between."""

    def run() -> tuple[float, object]:
        clock = Clock(warm, warm + steps)
        task = make()
        fit(
            task, data, steps=warm + steps, optim=optim, train=train, device=str(place.device),
            callbacks=[clock], **options,
        )  # fmt: skip
        return clock.seconds / steps / units, task

    return Clocked(run)


def loop(
    step: Callable[[], Callable[[], object]], place: Place, *, warm: int, steps: int, units: float = 1.0
) -> Clocked:
    """`step` makes the loop's body, which is called again and again."""

    def run() -> tuple[float, object]:
        body = step()
        for _ in range(warm):
            body()
        wait(place.device)
        began = time.perf_counter()
        for _ in range(steps):
            body()
        wait(place.device)
        return (time.perf_counter() - began) / steps / units, None

    return Clocked(run)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """A body of a loop on a GPU as one graph, replayed on the batch it was recorded with."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()

    def replay() -> object:
        graph.replay()
        return found

    return replay


def plain_step(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batch: Callable[[], tuple[Tensor, Tensor]],
    optimiser: torch.optim.Optimizer, *, half: bool = False, clip: float | None = None,
) -> Callable[[], object]:  # fmt: skip
    """Forward, backward, clip, step: the loop that everybody writes."""
    device = next(model.parameters()).device

    def step() -> object:
        inputs, target = batch()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            value = loss(model(inputs), target)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return value

    return step
