"""What the guard against numbers that are not finite takes of training: the check of the gradient, and copies
of what rows that are not finite would spoil, such as the moments of batch norms.

Its peer is the same run without it. A hundredth of a step is less than most machines vary by from one moment
to the next, so spans of a few milliseconds with the guard and without take turns within one run. Of each span
the median step counts, and of all pairs of neighbours the median difference. The share is that of the time
which training takes, and that is also judging, as often as the recipe does it.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch

import quire.recipes  # noqa: F401
from quire.bench.case import SUBJECTS, Bar, Case, Clocked, Place
from quire.data.batch import TensorData
from quire.recipes.base import RECIPES, DescentOptions
from quire.tasks.kmeans import KMeansTask
from quire.tasks.mixture import MixtureTask
from quire.train import Callback, StatisticsTask, fit, fit_statistics
from quire.train import step as steps
from quire.train.descent import Descent
from quire.train.memory import Before
from quire.train.step import Stepper

KINDS = (
    "linear", "softmax", "mlp", "multitask", "transfer", "bagging", "lenet", "googlenet", "resnet",
    "densenet", "ssd", "rnn", "lstm", "gpt", "seq2seq", "transformer", "autoencoder", "contrastive", "vae",
    "gan",
)  # fmt: skip
"""Recipes of every kind of task that learns by descent, and of every way to a gradient."""
FEW = ("mlp", "gan")
SHARE = 0.01
SPAN = 0.004
"""Seconds between two turns; a step at least."""
WARM_UP = 5
MOST_PAIRS = 1500


class Spans(NamedTuple):
    """Seconds of a step, span by span; neighbours in time stand at the same place."""

    guarded: list[float]
    unguarded: list[float]
    whole: list[float]
    """Of a step with all that there is around it."""

    def share(self) -> float:
        pairs = zip(self.guarded, self.unguarded, strict=True)
        return statistics.median(a - b for a, b in pairs) / statistics.mean(self.whole)


@SUBJECTS.register("guard")
def guard(place: Place) -> Iterator[Case]:
    """The guard against numbers that are not finite: its share of a step, for every kind of task."""
    if place.on_gpu:
        return
    seconds = place.size(12, 0)
    for name in FEW if place.small else KINDS:
        yield _case(f"{name}, built-in data and options", "step", partial(_stepped, name, seconds))
    rows = torch.randn(place.size(10_000, 50), 32, generator=torch.Generator().manual_seed(0))
    tasks: dict[str, StatisticsTask] = {
        "kmeans": KMeansTask(clusters=16, features=32),
        "gmm": MixtureTask(components=4, features=32),
    }
    for name, task in tasks.items():
        title = f"{name}, {len(rows):,} × 32"
        yield _case(title, "sweep", partial(_swept, task, TensorData({"inputs": rows}), seconds))


def _case(title: str, unit: str, measure: Callable[[], Spans]) -> Case:
    found: list[Spans] = []

    def guarded() -> tuple[float, object]:
        found.append(measure())
        return statistics.median(found[-1].guarded), found[-1]

    def unguarded() -> tuple[float, object]:
        return statistics.median(found[-1].unguarded), found[-1]

    return Case(
        title, {"guarded": Clocked(guarded), "without": Clocked(unguarded)}, unit=unit, result=Spans.share,
        result_name="share of the guard", bars=(Bar("result", at_most=SHARE),), rounds=1,
    )  # fmt: skip


class InTurns(Callback):
    """Spans of steps with the guard and without it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spans = Spans([], [], [])
        self.guarded = self.warm = False
        self.span, self.pairs = WARM_UP, 1
        self.taken: list[float] = []

    def on_start(self, descent: Descent) -> None:
        self.last = time.perf_counter()

    def on_step(self, descent: Descent, step: int) -> None:
        self.taken.append(time.perf_counter() - self.last)
        if len(self.taken) == self.span:
            self._end_span(descent)
        self.last = time.perf_counter()

    def _end_span(self, descent: Descent) -> None:
        middle = statistics.median(self.taken)
        self.taken.clear()
        if self.warm:
            (self.spans.guarded if self.guarded else self.spans.unguarded).append(middle)
        else:
            self._prepare(descent, middle)
        done = len(self.spans.guarded) + len(self.spans.unguarded)
        if done == 2 * self.pairs:
            descent.stop()
        # Each comes first in every other pair, so that what changes slowly favours neither.
        self._switch(descent.stepper, to=done % 4 in (0, 3))

    def _prepare(self, descent: Descent, step: float) -> None:
        stepper, self.warm = descent.stepper, True
        self.span = max(1, round(SPAN / step))
        if self.span > descent.steps_per_epoch:  # whole epochs, as their last batches are smaller
            self.span = -(-self.span // descent.steps_per_epoch) * descent.steps_per_epoch
        self.pairs = min(MOST_PAIRS, max(1, round(self.seconds / (2 * self.span * step))))
        # Random states are kept for the case that memory runs out, so they stay.
        unspoilt = {name: copy.copy(before) for name, before in stepper.before.items()}
        for before in unspoilt.values():
            before.places = []
        self.before = {True: stepper.before, False: unspoilt}
        threads = stepper.threads
        self.moves = {
            checked: [
                p.optimiser.at_once(threads=threads, checked=checked) if p.move else None
                for p in stepper.players
            ]
            for checked in (True, False)
        }
        self.norm = {True: steps.quick_norm, False: lambda player: 0.0}

    def _switch(self, stepper: Stepper, *, to: bool) -> None:
        self.guarded = to
        stepper.before = self.before[to]
        for player, move in zip(stepper.players, self.moves[to], strict=True):
            player.move = move
        steps.quick_norm = self.norm[to]


def _stepped(name: str, seconds: float) -> Spans:
    recipe = RECIPES[name]
    plan = recipe.build(recipe.options())
    options = plan.options
    assert isinstance(options, DescentOptions)
    turns = InTurns(seconds)
    with patch.object(steps, "quick_norm", steps.quick_norm):  # which is put back in any case
        done = fit(
            plan.task, plan.data.train, plan.data.validation, steps=10**9, optim=options.optim,
            train=replace(options.train, patience=None), callbacks=[turns],
        )  # fmt: skip
    turns.spans.whole.append(done.seconds / done.steps)
    return turns.spans


def _swept(task: StatisticsTask, data: TensorData, seconds: float) -> Spans:
    spans = Spans([], [], [])
    began = time.perf_counter()
    while not spans.guarded or time.perf_counter() - began < seconds:
        for guarded in (True, False) if len(spans.guarded) % 2 else (False, True):
            with patch.object(Before, "remember", Before.remember if guarded else lambda before: None):
                start = time.perf_counter()
                done = fit_statistics(task, data, sweeps=20)
                taken = (time.perf_counter() - start) / done.steps
            (spans.guarded if guarded else spans.unguarded).append(taken)
            spans.whole.append(taken)
    return spans
