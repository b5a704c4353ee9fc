"""Numbers of a task's buffers, where the host can decide by them.

To read a buffer on a GPU is to wait for all that was asked of it before. So a sweep gathers what the course
of the next one depends on in one tensor (`StatisticsTask.advance`), and that is waited for, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

import torch
from torch import Tensor

Numbers = TypeVar("Numbers")


@final
class OnHost(Generic[Numbers]):
    """What `gather` puts into one tensor, as `read` understands it: asked for where nobody has told it."""

    def __init__(self, gather: Callable[[], Tensor], read: Callable[[list[float]], Numbers]) -> None:
        self.gather, self.read = gather, read
        self.known: Numbers | None = None

    def __call__(self) -> Numbers:
        return self.tell(self.gather().tolist()) if self.known is None else self.known

    def tell(self, numbers: list[float]) -> Numbers:
        """The buffers hold these now: what `gather` gave."""
        self.known = self.read(numbers)
        return self.known

    def forget(self) -> None:
        """Somebody else has written to the buffers."""
        self.known = None


def gathered(*buffers: Tensor) -> Tensor:
    """All numbers of the buffers in one row of float64."""
    return torch.cat([buffer.reshape(-1).double() for buffer in buffers])
