"""Judging a task on a split: losses and measures from sums that add up over batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.data.batch import ORDER_NUMBERS, Batch, Data, ordered
from quire.errors import InputError, nearest
from quire.train.memory import free, shortage, too_little
from quire.train.processes import from_all, moved, processes
from quire.train.sums import add_to, add_up
from quire.train.task import Task, Weight


@torch.no_grad()
def evaluate(
    task: Task,
    data: Data,
    batch_size: int | None = None,
    *,
    rows: int | None = None,
    together: bool = False,
) -> dict[str, float]:
    """``loss`` (Σ scale·sum/weight), each term where there are several, and the task's measures, on all
    of `data` or its first `rows`. With `together` the batches are dealt out among the processes that train
    together, all of which call this, and each has the result.

    `task` is judged in evaluation mode and left in the mode it was in.
    """
    training = task.training
    task.eval()
    sums: dict[str, Tensor] = {}
    tallies: dict[str, Any] = {}
    weights: dict[str, Weight] = {}
    device = task.device
    size = batch_size or evaluation_batch(task, data)
    together = together and processes()[1] > 1
    judged = _Judge(task)
    for batch in own_batches(data, size) if together else ordered(data, size, rows):
        batch = batch.to(device)
        add_to(weights, task.weigh(batch))
        for part, tally in judged(batch):
            add_to(sums, _wide(part))
            add_to(tallies, _wide(tally))
    task.train(training)
    weight = {name: float(value) for name, value in weights.items()}
    summed = {name: float(value) for name, value in sums.items()}
    if together:
        shares = from_all((summed, weight, moved(tallies, "cpu")))
        summed, weight = add_up(share[0] for share in shares), add_up(share[1] for share in shares)
        tallies = moved(add_up(share[2] for share in shares), device)
    return losses(task, summed, weight) | task.measures(tallies)


class _Judge:
    """Judges batches, in parts once memory has run out."""

    def __init__(self, task: Task) -> None:
        self.task, self.parts = task, 1

    def __call__(self, batch: Batch) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
        while True:
            said, small = "", batch.split(self.parts)
            try:
                return [self.task.judge(part) for part in small]
            except Exception as error:
                said = shortage(error)
            free(self.task.device)
            if self.task.couples_samples or len(small) == len(batch):
                count = "all the rows that are compared" if self.task.couples_samples else "one row"
                raise too_little(
                    f"in judging with {count} at a time",
                    said,
                    expected="memory for as much",
                    fix="take a smaller model or shorter rows, or more memory",
                )
            self.parts *= 2


def own_batches(data: Data, batch_size: int) -> Iterator[Batch]:
    """This process's share of the batches in which one process would judge `data`: the same batches, so that
    what hangs on a batch as a whole is the same too. Shares are in the order of the processes."""
    number, count = processes()
    batches = -(-len(data) // batch_size)
    first, last = (batches * i // count * batch_size for i in (number, number + 1))
    last = min(last, len(data))
    step = batch_size * max(1, ORDER_NUMBERS // batch_size)
    for start in range(first, last, step):
        yield from data.batches(torch.arange(start, min(start + step, last)), batch_size)


def evaluation_batch(task: Task, data: Data) -> int:
    """Rows that are judged at once."""
    return max(1, min(task.evaluation_rows, task.evaluation_numbers // max(data.row_size, 1)))


def _wide(values: Mapping[str, Any]) -> dict[str, Any]:
    """In float64, so that a sum over many batches keeps its digits; counts stay whole."""
    return {
        name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for name, v in values.items()
    }


def check_monitor(task: Task, data: Data, monitor: str) -> None:
    """Refuse to watch a measure that the task does not have, before any step is taken."""
    if monitor == "loss":
        return
    known = evaluate(task, data, rows=8)
    if monitor not in known:
        raise InputError(
            f"--train.monitor {monitor}",
            expected=f"one of {', '.join(sorted(known))}",
            fix=nearest(monitor, known) or "choose a measure that this task has",
        )


def losses(task: Task, sums: dict[str, float], weights: dict[str, float]) -> dict[str, float]:
    """The loss and its terms from summed sums and weights."""
    terms = {name: value / weights[name] if weights[name] else 0.0 for name, value in sums.items()}
    loss = sum(task.scales.get(name, 1.0) * value for name, value in terms.items())
    return {"loss": loss, **(terms if len(terms) > 1 else {})}
