"""Times of contestants that take turns, peak memory, and whether bars hold."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quire.bench.case import Absent, Bar, Case, Clocked, Contestant, Place, Turns
from quire.bench.machine import describe, limit

WARM_UP = 3
ROUND_SECONDS = 0.3
"""A round repeats short calls for about this long."""
MOST_CALLS = 1000
NOISE = 1e-9
"""Seconds that stand for a difference of two runs that is not above 0: tiny work drowned in noise."""
MOST_SECONDS = 5.0
"""A contestant whose call takes longer than this is given no larger size."""
Say = Callable[[str], None]


@dataclass
class Figures:
    """What was seen of one contestant."""

    seconds: float = float("nan")
    """Of one unit of work; the median over rounds."""
    spread: float = 0.0
    """(largest − smallest)/median over rounds."""
    bytes: int | None = None
    """Peak above what was there before a call."""
    error: float | None = None
    result: float | None = None
    absent: str = ""
    """Why it did not run."""


@dataclass
class Outcome:
    """One case, measured; plain numbers and words, so that it can be written down."""

    title: str
    unit: str
    amount: float
    contestants: dict[str, Figures]
    limit: float | None = None
    """Seconds a unit takes at least."""
    limited_by: str = ""
    result_name: str = "result"
    bars: list[dict[str, Any]] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """With the contestants in a list, Quire's first: files sort names."""
        seen = [{"name": name, **asdict(figures)} for name, figures in self.contestants.items()]
        return {**asdict(self), "contestants": seen}


def run_case(case: Case, place: Place, *, rounds: int = 5, say: Say = lambda _: None) -> Outcome:
    """Warm every contestant up, then let them take turns."""
    figures = {name: Figures() for name in case.contestants}
    ready: dict[str, Contestant] = {}
    for name, run in case.contestants.items():
        if isinstance(run, Absent):
            figures[name].absent = run.reason
            continue
        say(f"{case.title}: {name}")
        try:
            _prepare(case, run, figures[name], place)
        except torch.OutOfMemoryError:
            figures[name].absent = "out of memory"
            torch.cuda.empty_cache()
            continue
        ready[name] = run
    times: dict[str, list[float]] = {name: [] for name in ready}
    if case.whole:
        times = {name: [figures[name].seconds] for name in ready}
    else:
        calls = {name: _calls(figures[name].seconds) for name in ready}
        for name, run in ready.items():
            if isinstance(run, Clocked):
                times[name].append(figures[name].seconds)
        for turn in range(case.rounds or rounds):
            order = list(ready) if turn % 2 == 0 else list(reversed(ready))
            for name in order:
                run = ready[name]
                if not isinstance(run, Clocked):
                    times[name].append(_time(run, calls[name], place) / case.amount)
                elif turn:  # the first time was taken beside the memory
                    times[name].append(run.run()[0])
    for name, values in times.items():
        middle = statistics.median(values)
        figures[name].seconds = middle
        figures[name].spread = (max(values) - min(values)) / middle if middle > 0 else 0.0
    found = limit(place.device, case.work)
    outcome = Outcome(
        case.title, case.unit, case.amount, figures, found[0] / case.amount if found else None,
        found[1] if found else "", case.result_name,
    )  # fmt: skip
    machine = describe(place.device)
    outcome.bars = [judge(bar, outcome, machine) for bar in case.bars]
    return outcome


def _prepare(case: Case, run: Contestant, seen: Figures, place: Place) -> None:
    """Warm-up, memory, result; `seconds` is a first guess, or the figure itself for whole runs."""
    assert not isinstance(run, Absent)
    own = isinstance(run, Clocked)
    if not case.whole and not own:
        for _ in range(WARM_UP if not isinstance(run, Turns) else 1):
            run()
    gc.collect()
    with _peak(place.device) as peak:
        began = time.perf_counter()
        clocked, result = run.run() if isinstance(run, Clocked) else (0.0, run())
        if place.on_gpu:
            torch.cuda.synchronize(place.device)
        taken = time.perf_counter() - began
    seen.bytes = peak.extra
    seen.seconds = clocked if own else taken / case.amount if case.whole else taken
    with torch.no_grad():
        seen.error = float(case.error(result)) if case.error else None
        seen.result = float(case.result(result)) if case.result else None


def _calls(seconds: float) -> int:
    return max(1, min(MOST_CALLS, round(ROUND_SECONDS / max(seconds, 1e-9))))


def _time(run: Contestant, calls: int, place: Place) -> float:
    """Seconds of a call, or of one of its turns."""
    assert not isinstance(run, Absent)
    if isinstance(run, Turns):
        short = _clock(lambda: run.run(run.short), 1, place)
        more = _clock(lambda: run.run(run.long), 1, place) - short
        return max(more, NOISE) / (run.long - run.short)
    return _clock(run, calls, place)


def _clock(run: Callable[[], object], calls: int, place: Place) -> float:
    if not place.on_gpu:
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - began) / calls
    torch.cuda.synchronize(place.device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    torch.cuda.synchronize(place.device)
    return start.elapsed_time(stop) / 1000 / calls


class _peak:
    """The most memory held at once inside the block, above what was held before; None where nobody can say.

    On a GPU from PyTorch's allocator. On Linux from the kernel's high-water mark of the process, which one
    may set back; that has the grain of what the C library keeps for itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.extra: int | None = None

    def __enter__(self) -> _peak:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before: int | None = torch.cuda.memory_allocated(self.device)
        else:
            self.before = _high_water() if _reset_high_water() else None
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            after: int | None = torch.cuda.max_memory_allocated(self.device)
        else:
            after = _high_water()
        if self.before is not None and after is not None:
            self.extra = max(0, after - self.before)


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


# Bars ---------------------------------------------------------------------------------------------


def value_of(figures: Figures, of: str) -> float | None:
    if figures.absent:
        return None
    rate = 1 / figures.seconds if figures.seconds > 0 else None
    known: dict[str, float | None] = {
        "time": figures.seconds,
        "rate": rate,
        "memory": None if figures.bytes is None else float(figures.bytes),
        "error": figures.error,
        "result": figures.result,
    }
    return known[of]


def judge(bar: Bar, outcome: Outcome, machine: str) -> dict[str, Any]:
    """The bar, what was found, and whether it holds; None where it could not be seen here."""
    own = next(iter(outcome.contestants.values()))
    found = value_of(own, bar.of)
    if bar.rival is not None and found is not None:
        other = value_of(outcome.contestants[bar.rival], bar.of)
        found = None if other is None else found / other
    if bar.machine and bar.machine not in machine:
        found = None
    if found is None:
        met = None
    elif bar.at_most is not None:
        met = found <= bar.at_most
    else:
        assert bar.at_least is not None
        met = found >= bar.at_least
    return {**asdict(bar), "found": found, "met": met}


def growth_figures(
    cases: Iterator[tuple[int, Case]], place: Place, *, say: Say = lambda _: None
) -> dict[str, list[dict[str, Any]]]:
    """Time and memory of each contestant at each size, until it runs out of memory or takes too long."""
    points: dict[str, list[dict[str, Any]]] = {}
    finished: set[str] = set()
    for size, case in cases:
        left = {name: run for name, run in case.contestants.items() if name not in finished}
        if not left:
            break
        differences = any(isinstance(run, Turns) for run in left.values())
        outcome = run_case(_only(case, left), place, rounds=3 if differences else 1, say=say)
        for name, figures in outcome.contestants.items():
            if figures.absent:
                finished.add(name)
                continue
            seconds = None if figures.seconds <= NOISE else figures.seconds
            points.setdefault(name, []).append({"size": size, "seconds": seconds, "bytes": figures.bytes})
            if figures.seconds * case.amount > MOST_SECONDS:
                finished.add(name)
    return points


def _only(case: Case, contestants: dict[str, Contestant]) -> Case:
    return replace(case, contestants=contestants, bars=(), error=None, result=None)
