"""The doctor's look at a run: its records, its network as it was at first and as it was left, its data."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.data.batch import Batch, Data, as_judged, epoch_order, ordered
from quire.doctor.case import TaskCase
from quire.doctor.course import Baseline, Course
from quire.doctor.examine import examine_case
from quire.doctor.findings import Finding
from quire.doctor.monitor import FirstSteps
from quire.doctor.probe import gradient_noise, recurrent_sizes, try_others
from quire.doctor.verdict import Verdict, check_silenced, judge
from quire.doctor.watch import Look, look
from quire.errors import NonFiniteError, QuireError
from quire.files import names_its_file, read_file
from quire.recipes.base import DescentOptions, SweepOptions
from quire.recipes.execute import check_descent
from quire.recipes.plan import Plan
from quire.recipes.tuned import attach
from quire.train import StatisticsTask, fit, fit_statistics
from quire.train.folder import LOG
from quire.train.keeping import Record
from quire.train.progress import Progress
from quire.train.task import Task

BATCHES, ROWS, LEAST_ROWS = 4, 64, 8
STEPS, SECONDS, SWEEPS = 30, 20.0, 5
"""What is taken again of a run that has left no weights: so many steps or as many as it took, for so long."""


def check_up(
    plan: Plan,
    trained: Task,
    records: Sequence[Record],
    result: Mapping[str, Any] | None,
    failed: str = "",
    *,
    silence: Sequence[str] = (),
) -> Verdict:
    """The verdict on a run. `plan` has its task as it was before the first step, and its data; `failed` is
    what `failure` says."""
    check_silenced(silence)
    options = plan.options
    course = Course.of_history(
        records,
        ended=result is not None,
        keeps_best=not isinstance(options, DescentOptions) or options.train.restore == "best",
        warnings=trained.warnings(list(records)),
        baseline=baseline(plan, result),
        players=0 if isinstance(trained, StatisticsTask) else len(trained.players),
        failed=failed,
    )
    before: list[Finding] = []
    if isinstance(options, DescentOptions) and not isinstance(trained, StatisticsTask):
        tell_optimiser(course, options)
        last = course.train[-1][0] if course.train else 0
        for player in trained.players:
            before += look_at_player(plan, trained, player, course, last, silence)
    return judge(course, silence=silence, before=before)


def check_up_again(
    plan: Plan,
    device: torch.device,
    records: Sequence[Record],
    failed: str = "",
    *,
    silence: Sequence[str] = (),
) -> Verdict:
    """The verdict on a run that has left no weights, as one that failed in its first steps: these are taken
    again as the run took them, and looked at. `plan` is what `begin` gives."""
    check_silenced(silence)
    task = plan.task
    before: list[Finding] = []
    if isinstance(task, StatisticsTask):
        course = sweep_again(plan, device)
    else:
        course = descend_again(plan, device, failed)
        for player in task.players:
            fresh = fresh_case(plan, device, player)
            before += [found for found in examine_case(fresh, silence) if found not in before]
            if player == task.players[0]:
                look_around(course, fresh)
    tell_recorded(course, records)
    course.failed = failed or course.failed
    return judge(course, silence=silence, before=before)


@names_its_file
def failure(run: Path) -> str:
    """What a run failed with, by the last entry of its log; nothing where that is another."""
    path = run / LOG
    text = read_file(path).decode(errors="replace") if path.exists() else ""
    last = re.split(r"^\d{4}-\S+ ", text, flags=re.MULTILINE)[-1].strip()
    return last.removeprefix("failed: ") if last.startswith("failed: ") else ""


def begin(plan: Plan, device: torch.device) -> Plan:
    """Make the task what the first step of its run found: the network of its base taken over, adapters laid
    over it, and done what comes before."""
    if isinstance(plan.options, DescentOptions):
        check_descent(plan, plan.options)
        if plan.before is not None:
            plan.before(device, Progress())
        attach(plan, plan.options)
    plan.task.to(device)
    return plan


def descend_again(plan: Plan, device: torch.device, failed: str) -> Course:
    """The first steps by the run's own trainer, up to the one that `failed` names; where they fail, also with
    other step sizes."""
    options, until = plan.options, time.perf_counter() + SECONDS
    assert isinstance(options, DescentOptions)
    named = re.match(r"step (\d{1,12}):", failed)
    steps = max(STEPS, int(named[1]) + 1 if named else 0)
    course = train_again(plan, device, 1.0, steps, until - SECONDS / 2)
    tell_optimiser(course, options)
    # In a warm-up nothing is learned yet, whatever the step size.
    if course.train and course.players == 1 and (course.failed or not options.optim.schedule.warmup):
        try_others(course, lambda factor: train_again(plan, device, factor, steps, until), until, BATCHES)
    return course


def train_again(plan: Plan, device: torch.device, factor: float, steps: int, until: float) -> Course:
    """A copy is trained with so many times the step size."""
    options, watching, failed = plan.options, FirstSteps(steps, until), None
    assert isinstance(options, DescentOptions)
    epochs = plan.epochs if options.epochs is None else options.epochs
    try:
        fit(
            copy.deepcopy(plan.task), plan.data.train, epochs=None if options.steps else epochs,
            steps=options.steps, optim=replace(options.optim, lr=factor * options.optim.lr),
            train=options.train, seed=options.seed, device=device, callbacks=[watching],
        )  # fmt: skip
    except QuireError as problem:
        failed = problem
    course = watching.course
    course.failed = failed.got if failed else ""
    if isinstance(failed, NonFiniteError) and course.train:
        course.train.append((course.train[-1][0], torch.nan))
    return course


def sweep_again(plan: Plan, device: torch.device) -> Course:
    """The first sweeps of what learns by statistics."""
    task, options = copy.deepcopy(plan.task), plan.options
    assert isinstance(task, StatisticsTask)
    assert isinstance(options, SweepOptions)
    sweeps = min(options.sweeps, SWEEPS)
    try:
        found = fit_statistics(
            task, plan.data.train, plan.data.validation, sweeps=sweeps, seed=options.seed, device=device
        )
    except QuireError as problem:
        return Course(players=0, failed=problem.got)
    return Course.of_history(found.history, players=0)


def tell_recorded(course: Course, records: Sequence[Record]) -> None:
    """Add what the run recorded, of training from where its steps were not taken again."""
    told = Course.of_history(records)
    last = course.train[-1][0] if course.train else 0
    course.train += [(step, value) for step, value in told.train if step > last]
    course.norms += [(step, value) for step, value in told.norms if step > last]
    course.validation, course.judged = told.validation, told.judged


def tell_optimiser(course: Course, options: DescentOptions) -> None:
    course.optimiser, course.step_size = options.optim.name.upper(), options.optim.lr
    course.momentum = options.optim.momentum


def fresh_case(plan: Plan, device: torch.device, player: str) -> TaskCase:
    """The first weights, beside all rows of both parts."""
    few, validation = batches(plan, device), batches(plan, device, "validation")
    case = TaskCase(plan.task.to(device), few, player, plan.options.seed, validation)
    case.source, case.validation_source = Whole(plan.data.train), Whole(plan.data.validation)
    return case


def look_at_player(
    plan: Plan, trained: Task, player: str, course: Course, last: int, silence: Sequence[str]
) -> list[Finding]:
    """Findings at the first weights; what both look like goes into the course."""
    fresh = fresh_case(plan, trained.device, player)
    found = list(examine_case(fresh, silence))
    kept = TaskCase(trained, batches(plan, trained.device), player, plan.options.seed)
    for case, step in ((fresh, 0), (kept, last)):
        seen = look_at(case, step)
        if seen is not None and (player == trained.players[0] or not course.looks):
            course.looks.append(seen)
    if player == trained.players[0]:
        look_around(course, kept)
    return found


def look_around(course: Course, case: TaskCase) -> None:
    """What is known of the weights of a case beside its activations and gradients."""
    if case.trains:
        course.recurrent = recurrent_sizes(case.model)
        course.noise = gradient_noise(case, case.model)


class Whole:
    """All rows of a part, batch by batch; as often as they are asked for."""

    def __init__(self, data: Data | None) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Batch]:
        return iter(()) if self.data is None else ordered(as_judged(self.data), 16 * ROWS)


def look_at(case: TaskCase, step: int) -> Look | None:
    """None where the task cannot be run through with a gradient, such as one that remembers its rows."""
    if not case.trains:
        return None
    with case.drawing():
        return look(case.model, lambda: case.loss_of(case.model, case.first), step)[0]


def batches(plan: Plan, device: torch.device, part: str = "train") -> list[Batch]:
    """A few of a part, of the run's own size unless that is large."""
    data: Data | None = getattr(plan.data, part)
    if data is None or not len(data):
        return []
    options: Any = plan.options
    own = options.train.batch_size if isinstance(options, DescentOptions) else 0
    size = max(LEAST_ROWS, min(ROWS, own or ROWS))
    rows = epoch_order(len(data), options.seed, -2)[: BATCHES * size]
    return [batch.to(device) for batch in data.batches(rows, min(size, len(rows)))]


def baseline(plan: Plan, result: Mapping[str, Any] | None) -> Baseline | None:
    """What the most frequent class, or the mean, would reach on the training part."""
    measures = ((result or {}).get("measures") or {}).get("train") or {}
    target = getattr(plan.data.train, "fields", {}).get("target")
    if target is None or not plan.data.preparation.targets or len(plan.data.preparation.targets) > 1:
        return None
    kind = plan.data.preparation.targets[0].kind
    if kind == "classification" and "accuracy" in measures and target.ndim == 1:
        known = target[target >= 0].long()
        most = int(known.bincount().max()) / max(len(known), 1)
        if most < 1:
            return Baseline("accuracy", most, float(measures["accuracy"]), "the most frequent class", True)
    if kind == "regression" and measures.get("r2") is not None:
        return Baseline("r2", 0.0, float(measures["r2"]), "the mean of the targets", True)
    return None
