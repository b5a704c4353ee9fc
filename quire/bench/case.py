"""What a benchmark is: the same work done by Quire and by its peers, and what that work must cost at least.

A subject is a function in `quire/bench/subjects/`, registered by name. It yields cases for the device it is
given, and makes a case's inputs just before it, so that one case's memory is free before the next.

    @SUBJECTS.register("softmax")
    def softmax(place: Place) -> Iterator[Case]:
        "Softmax over the last axis."                       # what `quire bench --list` shows
        x = torch.randn(4096, 4096, device=place.device)
        yield Case(
            "softmax of 4096 × 4096, float32",
            {"quire": lambda: functional.softmax(x), "torch": lambda: x.softmax(-1)},
            work=Work(moved=2 * x.nbytes),
            error=lambda result: largest_difference(result, x.double().softmax(-1)),
            bars=(Bar("time", at_most=1.0, rival="torch"),),
        )
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quire.registry import Registry

MEGABYTE, GIGABYTE = 1 << 20, 1 << 30
Kind = Literal["float64", "float32", "tf32", "bfloat16", "special"]
"""Matrix products in a type (two operations a multiplication), or special functions (exp, 1/x, …)."""
Quantity = Literal["time", "memory", "rate", "error", "result"]


@dataclass(frozen=True)
class Place:
    """Where a subject runs, and on what."""

    device: torch.device
    small: bool = False
    """Tiny sizes, to see that everything runs; no figure of such a run means anything."""
    data: Path | None = None
    """A file of one's own, for subjects that take one."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def size(self, whole: int, small: int) -> int:
        return small if self.small else whole


@dataclass(frozen=True)
class Work:
    """What must be done whoever does it: bytes read and written, and operations of each kind."""

    moved: float = 0.0
    operations: Mapping[Kind, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bar:
    """A promise about Quire's figure, alone or divided by a rival's.

    "time" is of a call in seconds (divided by the case's `amount`), "memory" the extra bytes of a call,
    "rate" units a second, "error" what the case's `error` says, "result" what its `result` says.
    """

    of: Quantity
    at_most: float | None = None
    at_least: float | None = None
    rival: str | None = None
    machine: str = ""
    """A bar in seconds or bytes holds for machines whose description has this in it."""

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("a bar is either at most or at least something")


class Absent:
    """Stands for a peer that cannot run here, and says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


@dataclass(frozen=True)
class Turns:
    """A run of many alike turns (iterations, steps) whose set-up is not to count: the time of a turn is that
    of a long run less that of a short one, divided by the turns between them."""

    run: Callable[[int], object]
    short: int
    long: int

    def __call__(self) -> object:
        return self.run(self.long)


@dataclass(frozen=True)
class Clocked:
    """A run that takes its own time, as only it knows when its set-up is over: seconds of a unit, and what
    `error` and `result` look at."""

    run: Callable[[], tuple[float, object]]

    def __call__(self) -> object:
        return self.run()[1]


Contestant = Callable[[], object] | Absent


@dataclass(frozen=True)
class Case:
    title: str
    contestants: Mapping[str, Contestant]
    """Quire's first. A call does the work once and returns what `error` and `result` look at."""
    work: Work | None = None
    """None where no simple limit exists, or where nobody comes near it."""
    amount: float = 1.0
    """How many units of work a call does."""
    unit: str = "call"
    """One of them: "step", "token", "image", "iteration"."""
    error: Callable[[Any], float] | None = None
    """Of what a call returned; against an oracle."""
    result: Callable[[Any], float] | None = None
    """Of what a call returned: a loss, an accuracy."""
    result_name: str = "result"
    bars: tuple[Bar, ...] = ()
    whole: bool = False
    """A call is a whole run with its own set-up: it is not warmed up and not repeated within a round."""
    rounds: int | None = None


@dataclass(frozen=True)
class Growth:
    """One case at many sizes: time and memory should grow as some power of the size."""

    title: str
    variable: str
    """What grows, with its letter: "rows N"."""
    sizes: tuple[int, ...]
    make: Callable[[int], Case]
    order: float
    """Time is expected to grow as size^order where it is large."""
    memory_order: float


Subject = Callable[[Place], Iterator[Case]]
Growing = Callable[[Place], Iterator[Growth]]
SUBJECTS: Registry[Subject] = Registry("subject")
GROWTHS: Registry[Growing] = Registry("subject with a growth picture")


def peer(package: str, run: Callable[[], object]) -> Contestant:
    """`run`, or why it cannot."""
    if importlib.util.find_spec(package) is None:
        return Absent(f"{package} is not installed")
    return run


def largest_difference(result: Tensor, exact: Tensor) -> float:
    """max |result − exact| / max |exact|."""
    apart = (result.detach().double() - exact.double()).abs().max()
    return float(apart / exact.double().abs().max().clamp(min=1e-300))
