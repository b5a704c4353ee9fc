"""Rows into training, validation and test parts."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import InputError


def split_rows(
    n: int, validation: float, test: float, seed: int, stratify: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers (train, validation, test), each ascending, the same for the same seed.

    `validation` and `test` are shares of the `n` rows; a share above 0 gets at least one row.
    `stratify` gives the class of each row (n,): each part then has each class in its share, to within
    one row, and the training part has every class.
    """
    wanted = [_count(n, test), _count(n, validation)]
    if n - sum(wanted) < 1:
        parts = 1 + (test > 0) + (validation > 0)
        raise InputError(
            f"{n} rows for {parts} parts (validation {validation:g}, test {test:g})",
            expected=f"at least {parts} rows, and one left to train on",
            fix="give more rows, or set --table.validation or --table.test to 0",
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    classes = torch.zeros(n, dtype=torch.int64) if stratify is None else stratify.cpu()[order]
    kinds, inverse, members = classes.unique(return_inverse=True, return_counts=True)
    # Rank of each row within its class, in the shuffled order.
    by_class = inverse.argsort(stable=True)
    starts = members.cumsum(0) - members
    rank = torch.empty(n, dtype=torch.int64)
    rank[by_class] = torch.arange(n) - starts[inverse[by_class]]

    free = members - 1  # one of each class stays for training
    parts_rows: list[Tensor] = []
    used = torch.zeros_like(members)
    for share, total in zip((test, validation), wanted, strict=True):
        taken = _allot(members.double() * share, total, free - used)
        if total and not taken.any():
            raise InputError(
                f"{n} rows in {len(kinds)} classes, none with a row to spare for each part",
                expected="several rows in a class: one to train on, and one for each part that is held out",
                fix="give more rows, or set --table.validation and --table.test to 0",
            )
        inside = (rank >= used[inverse]) & (rank < (used + taken)[inverse])
        parts_rows.append(order[inside].sort().values)
        used = used + taken
    train = order[rank >= used[inverse]].sort().values
    return train, parts_rows[1], parts_rows[0]


def _count(n: int, share: float) -> int:
    return max(1, round(n * share)) if share > 0 else 0


def _allot(quota: Tensor, total: int, most: Tensor) -> Tensor:
    """Whole numbers near `quota`, at most `most`, that add up to `total` where `most` allows it: the
    whole parts first, then one each in order of the remainders."""
    taken = torch.minimum(quota.floor().long(), most)
    while int(taken.sum()) < total and bool((taken < most).any()):
        left = torch.where(taken < most, quota - taken, -torch.inf)
        missing = min(total - int(taken.sum()), int((taken < most).sum()))
        taken[left.argsort(descending=True, stable=True)[:missing]] += 1
    return taken
