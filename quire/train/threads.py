"""How many threads a step is worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ONE_THREAD = 25_000_000
"""Floating-point operations of a step below which a second thread waits longer than it works: a
64-128-10 net at batch 64 (4 million) takes as long on two quiet cores as on one, and several times as
long when another process wants one of them."""


def threads_worth(operations: int) -> int:
    """One thread for small steps, all of them otherwise."""
    return torch.get_num_threads() if operations >= ONE_THREAD else 1


@contextmanager
def threads_for(operations: int) -> Iterator[None]:
    """As many threads inside the with-block as its steps are worth."""
    before, worth = torch.get_num_threads(), threads_worth(operations)
    if worth == before:
        yield
        return
    torch.set_num_threads(worth)
    try:
        yield
    finally:
        torch.set_num_threads(before)
