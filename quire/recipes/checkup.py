"""The doctor's look at a run: its records, its network as it was at first and as it was left, its data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.data.batch import Batch, Data, as_judged, epoch_order, ordered
from quire.doctor.case import TaskCase
from quire.doctor.course import Baseline, Course
from quire.doctor.examine import examine_case
from quire.doctor.findings import Finding
from quire.doctor.probe import gradient_noise, recurrent_sizes
from quire.doctor.verdict import Verdict, check_silenced, diagnose_case, judge
from quire.doctor.watch import Look, look
from quire.options import Optim
from quire.recipes.base import DescentOptions
from quire.recipes.plan import Plan
from quire.train import StatisticsTask
from quire.train.keeping import Record
from quire.train.task import Task

BATCHES, ROWS, LEAST_ROWS = 4, 64, 8


def check_up(
    plan: Plan,
    trained: Task,
    records: Sequence[Record],
    result: Mapping[str, Any] | None,
    *,
    silence: Sequence[str] = (),
) -> Verdict:
    """The verdict on a run. `plan` has its task as it was before the first step, and its data."""
    check_silenced(silence)
    options = plan.options
    course = Course.of_history(
        records,
        ended=result is not None,
        keeps_best=not isinstance(options, DescentOptions) or options.train.restore == "best",
        warnings=trained.warnings(list(records)),
        baseline=baseline(plan, result),
        players=0 if isinstance(trained, StatisticsTask) else len(trained.players),
    )
    before: list[Finding] = []
    if isinstance(options, DescentOptions) and not isinstance(trained, StatisticsTask):
        course.optimiser, course.step_size = options.optim.name.upper(), options.optim.lr
        course.momentum = options.optim.momentum
        last = course.train[-1][0] if course.train else 0
        for player in trained.players:
            before += look_at_player(plan, trained, player, course, last, silence)
    return judge(course, silence=silence, before=before)


def check_up_again(plan: Plan, device: torch.device, *, silence: Sequence[str] = ()) -> Verdict:
    """The verdict on a run that has left no weights, as one that failed in its first steps: these are taken
    again, with its optimiser, and looked at."""
    check_silenced(silence)
    task, options = plan.task.to(device), plan.options
    if isinstance(task, StatisticsTask) or not isinstance(options, DescentOptions):
        return judge(Course(players=0), silence=silence)
    player = task.players[0]
    few, validation = batches(plan, device), batches(plan, device, "validation")
    case = TaskCase(task, few, player, options.seed, validation)
    case.optimisers = (optimiser_of(options.optim, task.player_parameters(player).values()),)
    return diagnose_case(case, silence=silence)


def optimiser_of(options: Optim, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    if options.name == "sgd":
        return torch.optim.SGD(parameters, options.lr, options.momentum)
    return torch.optim.Adam(parameters, options.lr, (options.beta1, options.beta2), options.eps)


def look_at_player(
    plan: Plan, trained: Task, player: str, course: Course, last: int, silence: Sequence[str]
) -> list[Finding]:
    """Findings at the first weights; what both look like goes into the course."""
    device = trained.device
    few, validation = batches(plan, device), batches(plan, device, "validation")
    fresh = TaskCase(plan.task.to(device), few, player, plan.options.seed, validation)
    fresh.source, fresh.validation_source = Whole(plan.data.train), Whole(plan.data.validation)
    found = list(examine_case(fresh, silence))
    kept = TaskCase(trained, few, player, plan.options.seed)
    for case, step in ((fresh, 0), (kept, last)):
        seen = look_at(case, step)
        if seen is not None and (player == trained.players[0] or not course.looks):
            course.looks.append(seen)
    if player == trained.players[0] and kept.trains:
        course.recurrent = recurrent_sizes(kept.model)
        course.noise = gradient_noise(kept, kept.model)
    return found


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
