"""Data of which few labels are used: which rows keep theirs, and rows that never had any.

N rows, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.data.batch import Data, TensorData
from quire.data.images.stream import ImageStream
from quire.errors import InputError

NO_LABEL = -100
"""The target of a row whose class is not to be known, as losses ignore it."""


def choose_labelled(target: Tensor, classes: int, count: int | None, seed: int) -> Tensor:
    """`count` row numbers, ascending, in which each class has its share of the rows and at least one: all of
    them for None. The same for the same seed."""
    members = torch.bincount(target, minlength=classes)
    if count is None:
        return torch.arange(len(target))
    if count > len(target):
        raise InputError(
            f"--labels {count} of {len(target)} training rows",
            expected=f"at most {len(target)}",
            fix=f"set --labels to at most {len(target)}, or to None to use all of them",
        )
    present = int((members > 0).sum())
    if count < present:
        raise InputError(
            f"--labels {count} for {present} classes",
            expected=f"at least {present}: a class without a label cannot be learned",
            fix=f"set --labels to {present} or more",
        )
    quota = members.double() * count / len(target)
    taken = quota.floor().long().maximum((members > 0).long())
    while int(taken.sum()) != count:
        step = 1 if int(taken.sum()) < count else -1
        free = taken < members if step > 0 else taken > 1
        lacking = torch.where(free, step * (quota - taken), -torch.inf)
        taken[lacking.argmax()] += step
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(seed))
    rows = [order[target[order] == label][: int(taken[label])] for label in range(classes)]
    return torch.cat(rows).sort().values


def hide_labels(data: Data, labelled: Tensor) -> Data:
    """The same rows, of which only those numbered in `labelled` keep their class."""
    if not isinstance(data, TensorData | ImageStream):
        raise InputError(f"labels of {type(data).__name__}", expected="images, or a table in memory")
    target = torch.full_like(data.target, NO_LABEL)
    target[labelled] = data.target[labelled]
    if isinstance(data, TensorData):
        return TensorData({**data.fields, "target": target})
    return ImageStream(
        data.pixels, {**data.fields, "target": target}, data.shape, data.workers, pinned=data.pinned
    )


def with_unlabelled(data: Data, more: Data) -> Data:
    """The rows of `data`, then those of `more`, which have no label."""
    if not isinstance(data, TensorData) or not isinstance(more, TensorData):
        raise InputError(
            "--unlabelled with images that are decoded while training",
            expected="images that fit in memory",
            fix="raise --images.memory, or make the images smaller with --images.size",
        )
    target = torch.full((len(more),), NO_LABEL, dtype=data.target.dtype)
    return TensorData(
        {"inputs": torch.cat([data.inputs, more.inputs]), "target": torch.cat([data.target, target])}
    )
