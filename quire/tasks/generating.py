"""What tasks that make something new have in common.

B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.data.batch import Batch
from quire.models.conditional import Labels, missing_label
from quire.options import check
from quire.train.task import Task

LABEL = "target"
AT_ONCE = 1024
"""Samples that are made together."""


@runtime_checkable
class Generates(Protocol):
    """A task from whose distribution new rows or images can be drawn."""

    def sample(self, count: int, label: Labels = None, temperature: float = 1.0, seed: int = 0) -> Tensor:
        """`count` new rows (B, D), or images (B, C, H, W) in bytes; the same for the same seed.

        `label` is one class number for all or one for each; without it the classes of a conditional model
        come in turn. `temperature` is a factor of the noise that samples are made from.
        """


def check_asked(count: int, temperature: float) -> None:
    check(count >= 1, "count", count, "a whole number >= 1")
    check(0 <= temperature < torch.inf, "temperature", temperature, "a number >= 0")


def label_of(batch: Batch, classes: int) -> Tensor | None:
    """The class numbers of a batch where a model has classes, None where it has none."""
    if not classes:
        return None
    if LABEL not in batch.fields:
        raise missing_label(classes)
    return batch.fields[LABEL]


@torch.no_grad()
def in_parts(
    task: Task, make: Callable[[Tensor, Tensor | None], Tensor], codes: Tensor, label: Tensor | None
) -> Tensor:
    """`make` of all codes and their classes, on the task's device and in its evaluation mode, a part of them
    at a time."""
    training, device = task.training, task.device
    task.eval()
    made = []
    for start in range(0, len(codes), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        made.append(make(codes[part].to(device), None if label is None else label[part].to(device)))
    task.train(training)
    return torch.cat(made)
