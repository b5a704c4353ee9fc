"""A look at training from beside it, now and then and at a bounded cost: in anybody's loop, and as a callback
of the trainer.

A look goes through a batch of its own, in evaluation mode and with random numbers of its own, so training is
the same with a monitor as without one. How often it looks follows from what a look has cost so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from quire.data.batch import epoch_order
from quire.doctor.case import Case, Loss, TaskCase
from quire.doctor.course import Course
from quire.doctor.findings import Finding
from quire.doctor.verdict import Verdict, judge
from quire.doctor.watch import look
from quire.errors import InputError
from quire.functional.modes import evaluating
from quire.train.descent import Callback, Descent
from quire.train.keeping import Record

ROWS = 64
"""Of the batch that is looked at, at most."""
MOST_LOOKS = 500


class Monitor:
    """Looks at a model while it is trained.

        monitor = Monitor(model, loss, batches)
        for x, y in loader:
            ...                          # your step
            monitor.step(value)          # the loss of that step, if you like
        print(monitor.verdict())

    share: of the time, at most, that looking may take.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Any],
        *,
        share: float = 0.02,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._begin(Case(model, loss, batches), share, clock)

    def _begin(self, case: Case, share: float, clock: Callable[[], float]) -> None:
        if not 0 < share <= 1:
            raise InputError(f"share {share:g}", expected="a share of the time above 0, at most 1")
        self.case, self.share, self.clock = case, share, clock
        self.pair = case.first.head(ROWS)
        self.course = Course()
        self.steps = 0
        self.began, self.spent, self.longest = clock(), 0.0, 0.0

    def step(self, loss: float | Tensor | None = None) -> None:
        """To be called after each step."""
        self.steps += 1
        now = self.clock()
        # The first look comes at once, and the next when the longest so far would still keep to the share.
        if self.course.looks and self.spent + self.longest > self.share * (now - self.began):
            return
        if loss is not None:
            self.course.train.append((self.steps, float(loss)))
        self.look()
        cost = self.clock() - now
        self.spent, self.longest = self.spent + cost, max(self.longest, cost)

    def look(self) -> None:
        """Look now, whatever it costs."""
        model = self.case.original
        with self.case.drawing(), evaluating(model):
            found, _ = look(model, lambda: self.case.loss_of(model, self.pair), self.steps)
        self.course.looks.append(found)
        self.course.norms.append((self.steps, found.norm))
        if len(self.course.looks) > MOST_LOOKS:  # the first stays, and of the others each second
            self.course.looks = self.course.looks[:1] + self.course.looks[2::2]

    def verdict(self, silence: Sequence[str] = ()) -> Verdict:
        return judge(self.course, silence=silence)


class Watching(Callback):
    """The monitor as a callback of `quire.fit`; `said` is called with each new finding above a note.

    quire.fit(task, data, epochs=20, callbacks=[Watching(print)])
    """

    def __init__(self, said: Callable[[Finding], None] | None = None, *, share: float = 0.02) -> None:
        self.said, self.share = said, share
        self.monitors: dict[str, Monitor] = {}
        self._told: set[tuple[str, str]] = set()

    def on_start(self, descent: Descent) -> None:
        rows = epoch_order(len(descent.data), descent.seed, -2)[:ROWS]
        batch = next(iter(descent.data.batches(rows, len(rows)))).to(descent.device)
        for player in descent.task.players:
            monitor = Monitor.__new__(Monitor)
            case = TaskCase(descent.task, [batch], player, descent.seed)
            monitor._begin(case, self.share / len(descent.task.players), time.perf_counter)
            self.monitors[player] = monitor

    def on_step(self, descent: Descent, step: int) -> None:
        for monitor in self.monitors.values():
            monitor.steps = step - 1
            monitor.step()

    def on_record(self, descent: Descent, record: Record) -> None:
        for monitor in self.monitors.values():
            if record["split"] == "train":
                monitor.course.train.append((record["step"], float(record["values"]["loss"] or "nan")))
            for finding in monitor.verdict().findings:
                key = (finding.code, finding.where)
                if self.said is not None and finding.severity != "note" and key not in self._told:
                    self._told.add(key)
                    self.said(finding)
