"""Rows divided among threads that each go through their own share.

PyTorch's own threads divide every single operation and wait for each other after it. Where an algorithm is
many short operations on chunks that stay in a core's cache, that waiting is most of the time, and all of it
on a machine that has something else to do as well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Keep PyTorch's own threads out of the with-block, or function: where others are started, or where the
    work is another library's. Threads that have nothing to do go on waiting for work for a while, on cores
    that others need."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if wanted:
            torch.set_num_threads(before)


def together(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """What the jobs return, each done in a thread of its own, which computes alone."""
    if len(jobs) < 2 or getattr(_here, "working", False):  # a worker that waits for workers may wait for ever
        return [job() for job in jobs]
    grad = torch.is_grad_enabled()

    def run(job: Callable[[], T]) -> T:
        with torch.set_grad_enabled(grad):
            return job()

    with one_thread():
        others = [workers(len(jobs) - 1).submit(run, job) for job in jobs[1:]]
        try:
            first = jobs[0]()
        finally:
            wait(others)  # whatever happened: what they write to must not be taken away from them
        return [first, *(other.result() for other in others)]


def workers(count: int) -> ThreadPoolExecutor:
    """Threads that stay: PyTorch's first operation in a new one takes longer than most jobs do."""
    key = os.getpid(), count  # a forked process has none of the threads of its parent
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(count, "quire", initializer=_begin)
    return _pools[key]


def _begin() -> None:
    _here.working = True
    torch.set_num_threads(1)  # as it is for whoever asked for workers


_here = threading.local()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def share_rows(work: Callable[[slice], T], rows: int, *, least: int) -> list[T]:
    """`work` of each thread's span of `rows`, in order; a thread is not started for fewer than `least` rows.

    As many threads as PyTorch uses; each computes alone, so that results depend on their number only.
    """
    count = max(1, min(torch.get_num_threads(), rows // least))
    size = -(-rows // count)
    return together([partial(work, slice(start, min(start + size, rows))) for start in range(0, rows, size)])
