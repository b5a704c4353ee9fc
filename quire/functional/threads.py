"""Rows divided among threads that each go through their own share.

PyTorch's own threads divide every single operation and wait for each other after it. Where an algorithm is
many short operations on chunks that stay in a core's cache, that waiting is most of the time, and all of it
on a machine that has something else to do as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
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
    results: dict[int, T] = {}
    problems: list[BaseException] = []
    grad = torch.is_grad_enabled()

    def run(number: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                results[number] = jobs[number]()
        except BaseException as problem:
            problems.append(problem)

    with one_thread(len(jobs) > 1):  # threads that are started now inherit it
        others = [threading.Thread(target=run, args=(number,)) for number in range(1, len(jobs))]
        for thread in others:
            thread.start()
        run(0)
        for thread in others:
            thread.join()
    if problems:
        raise problems[0]
    return [results[number] for number in range(len(jobs))]


def share_rows(work: Callable[[slice], T], rows: int, *, least: int) -> list[T]:
    """`work` of each thread's span of `rows`, in order; a thread is not started for fewer than `least` rows.

    As many threads as PyTorch uses; each computes alone, so that results depend on their number only.
    """
    count = max(1, min(torch.get_num_threads(), rows // least))
    size = -(-rows // count)
    return together([partial(work, slice(start, min(start + size, rows))) for start in range(0, rows, size)])
