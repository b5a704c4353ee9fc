"""Work by threads, a bounded number of items ahead. Pillow decodes without holding Python's lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def count_workers(workers: int) -> int:
    """`workers` threads, or one for each core that this process may use."""
    if workers:
        return workers
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int
) -> Generator[Result, None, None]:
    """The function of each item, in the order of the items, begun at most `ahead` items before it is asked
    for. An exception comes in its turn; the threads end with the iterator, also when it is dropped."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="quire-decode")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
