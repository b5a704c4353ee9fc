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
from quire.doctor.course import Course, number
from quire.doctor.curvature.sharpness import Sharpness
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
CURVATURE_SHARE = 0.4
"""Of the time for looking, what goes to the curvature."""
LOOK_STEPS = 3
"""Steps that a look takes about as long as."""
EVERY = 20
"""Steps between two looks at the curvature, at least."""
LEAST_STEPS = 10
"""Of `FirstSteps`, however long they take."""


class Beside:
    """Looks at a case now and then; λmax of its loss as well where it is asked for."""

    def __init__(
        self,
        case: Case,
        share: float,
        clock: Callable[[], float] = time.perf_counter,
        *,
        curvature: bool = True,
    ) -> None:
        if not 0 < share <= 1:
            raise InputError(f"share {share:g}", expected="a share of the time above 0, at most 1")
        self.case, self.clock = case, clock
        self.share = share * (1 - CURVATURE_SHARE if curvature else 1)
        self.pair = case.first.head(ROWS)
        self.course = Course()
        self.steps = 0
        self.began, self.spent, self.longest = clock(), 0.0, 0.0
        self.sharpness: Sharpness | None = None
        if curvature:
            self.sharpness = Sharpness(
                case.original, every=EVERY, budget=share * CURVATURE_SHARE, clock=clock
            )

    def step(self, loss: float | Tensor | None = None) -> None:
        """To be called after each step."""
        self.steps += 1
        if self.sharpness is not None and self.sharpness.due():
            self.look_at_curvature()
        now = self.clock()
        # The first look comes when one that takes as long as a few steps would keep to the share, each later
        # one when the longest so far would.
        early = not self.course.looks and self.steps < LOOK_STEPS / self.share
        if early or self.spent + self.longest > self.share * (now - self.began):
            return
        if loss is not None:
            value = loss.detach() if isinstance(loss, Tensor) else loss
            self.course.train.append((self.steps, float(value)))
        self.look()
        cost = self.clock() - now
        self.spent, self.longest = self.spent + cost, max(self.longest, cost)

    def look(self) -> None:
        """Look now, whatever it costs."""
        model = self.case.original
        with self.case.drawing(), evaluating(model):
            found, _ = look(model, self._loss, self.steps)
        self.course.looks.append(found)
        self.course.norms.append((self.steps, found.norm))
        if len(self.course.looks) > MOST_LOOKS:  # the first stays, and of the others each second
            self.course.looks = self.course.looks[:1] + self.course.looks[2::2]

    def look_at_curvature(self) -> None:
        assert self.sharpness is not None
        try:
            with evaluating(self.case.original):
                found = self.sharpness.look(self._loss)
            self.course.curvatures.append((self.steps, found.value))
        except (RuntimeError, NotImplementedError):  # an operation without a second derivative
            self.sharpness = None

    def _loss(self) -> Tensor:
        return self.case.loss_of(self.case.original, self.pair)

    def verdict(self, silence: Sequence[str] = ()) -> Verdict:
        return judge(self.course, silence=silence)


class Monitor(Beside):
    """Looks at a model while it is trained.

        monitor = Monitor(model, loss, batches)
        for x, y in loader:
            ...                          # your step
            monitor.step(value)          # the loss of that step, if you like
        print(monitor.verdict())

    share: of the time, at most, that looking may take. `course` holds what was seen: looks by layer, gradient
    norms and, with `curvature`, λmax.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Any],
        *,
        share: float = 0.02,
        curvature: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(Case(model, loss, batches), share, clock, curvature=curvature)


class Watching(Callback):
    """The monitor as a callback of `quire.fit`; `said` is called with each new finding above a note.

    quire.fit(task, data, epochs=20, callbacks=[Watching(print)])
    """

    def __init__(self, said: Callable[[Finding], None] | None = None, *, share: float = 0.02) -> None:
        self.said, self.share = said, share
        self.monitors: dict[str, Beside] = {}
        self._told: set[tuple[str, str]] = set()

    def on_start(self, descent: Descent) -> None:
        rows = epoch_order(len(descent.data), descent.seed, -2)[:ROWS]
        batch = next(iter(descent.data.batches(rows, len(rows)))).to(descent.device)
        players = descent.task.players
        for player in players:
            case = TaskCase(descent.task, [batch], player, descent.seed)
            monitor = Beside(case, self.share / len(players), curvature=len(players) == 1)
            monitor.course.players = len(players)
            self.monitors[player] = monitor

    def on_step(self, descent: Descent, step: int) -> None:
        for monitor in self.monitors.values():
            monitor.steps = step - 1
            monitor.step()

    def on_record(self, descent: Descent, record: Record) -> None:
        for monitor in self.monitors.values():
            if record["split"] == "train":
                monitor.course.train.append((record["step"], number(record["values"]["loss"])))
            for finding in monitor.verdict().findings:
                key = (finding.code, finding.where)
                if self.said is not None and finding.severity != "note" and key not in self._told:
                    self._told.add(key)
                    self.said(finding)


class FirstSteps(Watching):
    """Looks at the same rows before the first step and after each, and ends training after so many `steps` or
    when it is later than `until`."""

    def __init__(self, steps: int, until: float) -> None:
        super().__init__()
        self.steps, self.until = steps, until

    def on_start(self, descent: Descent) -> None:
        super().on_start(descent)
        self._look(0)

    def on_step(self, descent: Descent, step: int) -> None:
        self._look(step)
        if step >= self.steps or (step >= LEAST_STEPS and time.perf_counter() > self.until):
            descent.stop()

    def on_record(self, descent: Descent, record: Record) -> None:
        """Its loss is that of other rows."""

    def _look(self, step: int) -> None:
        for monitor in self.monitors.values():
            monitor.steps = step
            monitor.look()
            monitor.course.train.append((step, monitor.course.looks[-1].loss))

    @property
    def course(self) -> Course:
        """That of the first player whose numbers broke, or of the first."""
        courses = [monitor.course for monitor in self.monitors.values()]
        broken = (course for course in courses if any(seen.broken() for seen in course.looks))
        return next(broken, courses[0] if courses else Course())
