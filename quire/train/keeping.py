"""What both ways of learning leave behind and stop by: records, checkpoints, an outcome, an interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from quire.data.batch import Data, TensorData
from quire.errors import InputError, QuireError
from quire.files import json_number
from quire.train.checkpoints import Checkpoint
from quire.train.task import Task

Record = dict[str, Any]
State = dict[str, Tensor]


class Store(Protocol):
    """Where a run keeps its metrics and checkpoints; see `quire.train.folder`."""

    def record(self, record: Record) -> None: ...

    def save(self, checkpoint: Checkpoint, *, keep: int) -> None: ...

    def resume(self) -> Checkpoint | None:
        """The checkpoint to go on from, with the metrics cut back to it; None for a new run."""


class Interrupted(QuireError):
    """Training was asked to stop and did so at a step's end, with everything saved."""

    exit_code = 130

    def __init__(self, got: str, *, expected: str = "", fix: str = "", number: int = signal.SIGINT) -> None:
        super().__init__(got, expected=expected, fix=fix)
        self.number = number
        self.exit_code = 128 + number


@dataclass
class Fit:
    """What came out of training; the task holds the best weights where there was validation."""

    steps: int
    epochs: float
    seconds: float
    stopped: Literal["finished", "early", "converged"]
    best_step: int
    best: float | None
    history: list[Record] = field(repr=False)
    samples_per_second: float = 0.0


class Interrupt:
    """Whether somebody has asked to stop. The first request waits for the end of the step, so that
    everything can be saved; a second one does not wait."""

    def __init__(self) -> None:
        self.number = 0
        """The signal, once there was one."""

    @property
    def asked(self) -> bool:
        return self.number != 0

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.number = number

    @contextmanager
    def listening(self, keeps: bool) -> Iterator[None]:
        """Within the with-block, for runs that have somewhere to save."""
        if not keeps or threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def make_record(step: int, epoch: float, split: str, values: Mapping[str, float], seconds: float) -> Record:
    """A line of the metrics."""
    return {
        "format": 1,
        "step": step,
        "epoch": epoch,
        "split": split,
        "values": {name: json_number(value) for name, value in values.items()},
        "seconds": seconds,
    }


def check_plan(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume as another run than the one that was begun."""
    if then != now:
        raise InputError(
            f"resuming with {dict(now)}",
            expected=f"the data, batch size and seed of the run: {dict(then)}",
            fix="leave these options out when resuming, and pass the same data",
        )


def snapshot(task: Task) -> State:
    return {name: value.detach().clone() for name, value in task.state_dict().items()}


def place_task(task: Task, device: torch.device, *, shard: bool = False) -> Task:
    """The task on the device; on a GPU filters lie channels last, as tensor cores want them, unless they are
    to be split."""
    task = task.to(device)
    filters = any(isinstance(module, nn.Conv2d) for module in task.modules())
    if device.type == "cuda" and filters and not shard:
        task = task.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return task


def place(data: Data, device: torch.device) -> Data:
    """Data on the device when it fits there with room to work in, batch by batch otherwise."""
    if not isinstance(data, TensorData):
        return data.to(device)
    if data.device == device:
        return data
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if sum(value.nbytes for value in data.fields.values()) > free // 2:
            return data
    return data.to(device)


def in_streams(task: Task, data: Data, batch_size: int) -> Data:
    """The text of `data` in as many parallel streams as a batch has rows."""
    streams = getattr(data, "streams", None)
    if not task.carries_state or streams is None:
        raise InputError(
            f"--train.carry with {type(task).__name__} on {type(data).__name__}",
            expected="a recurrent model that reads a text",
            fix="leave --train.carry out",
        )
    carried: Data = streams(batch_size)
    return carried
