"""Judging a task on a split: losses and measures from sums that add up over batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.data.batch import Batch, Data
from quire.errors import InputError, nearest
from quire.train.gradients import add_weights
from quire.train.task import Task

EVALUATION_BATCH = 1024


@torch.no_grad()
def evaluate(task: Task, data: Data, batch_size: int = EVALUATION_BATCH) -> dict[str, float]:
    """``loss`` (Σ scale·sum/weight), each term where there are several, and the task's measures.

    `task` is judged in evaluation mode and left in the mode it was in.
    """
    training = task.training
    task.eval()
    sums: dict[str, Tensor] = {}
    tallies: dict[str, Tensor] = {}
    weights = []
    for batch in data.batches(torch.arange(len(data)), batch_size):
        part, tally = task.judge(batch)
        weights.append(task.weigh(batch))
        for total, new in ((sums, part), (tallies, tally)):
            for name, value in new.items():
                value = value.double() if value.is_floating_point() else value
                total[name] = total[name] + value if name in total else value
    task.train(training)
    weight = {name: float(value) for name, value in add_weights(weights).items()}
    return losses(task, {name: float(value) for name, value in sums.items()}, weight) | task.measures(tallies)


def check_monitor(task: Task, data: Data, monitor: str) -> None:
    """Refuse to watch a measure that the task does not have, before any step is taken."""
    if monitor == "loss":
        return
    known = evaluate(task, FirstRows(data))
    if monitor not in known:
        raise InputError(
            f"--train.monitor {monitor}",
            expected=f"one of {', '.join(sorted(known))}",
            fix=nearest(monitor, known) or "choose a measure that this task has",
        )


class FirstRows:
    """A glance at a data set."""

    def __init__(self, data: Data, rows: int = 8) -> None:
        self.data, self.rows = data, rows

    def __len__(self) -> int:
        return min(self.rows, len(self.data))

    def batches(self, rows: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        return self.data.batches(rows, batch_size, start)


def losses(task: Task, sums: dict[str, float], weights: dict[str, float]) -> dict[str, float]:
    """The loss and its terms from summed sums and weights."""
    terms = {name: value / weights[name] if weights[name] else 0.0 for name, value in sums.items()}
    loss = sum(task.scales.get(name, 1.0) * value for name, value in terms.items())
    return {"loss": loss, **(terms if len(terms) > 1 else {})}
