"""Work on a GPU that is the same from sweep to sweep, recorded once and then replayed as a whole.

A sweep of K-means is dozens of short kernels. Launched one by one, they take longer to ask for than to run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

WARM = 2
"""So often work is done as it is written before it is recorded: kernels are compiled, memory is found."""


class Answer:
    """Numbers of a GPU that are on their way. To read them does not wait for what it was asked for since."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers = here.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._numbers = numbers.clone()

    def read(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()


class Replay:
    """Calls a function of no arguments that works on a GPU: it changes tensors in place, makes its result
    there, and never waits for it."""

    def __init__(self) -> None:
        self.course: Hashable = None
        self.seen = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None

    def __call__(self, course: Hashable, work: Callable[[], Tensor]) -> Tensor:
        """`course` stands for all that the work depends on besides tensors: another is recorded anew."""
        if course != self.course:
            self.course, self.seen, self.graph, self.result = course, 0, None, None
        self.seen += 1
        if self.seen <= WARM:
            return work()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = work()
        self.graph.replay()
        assert self.result is not None
        return self.result
