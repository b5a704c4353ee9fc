"""The largest batch that fits into a memory, from predicted steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from quire.doctor.costs.account import Make, explain
from quire.doctor.costs.table import as_bytes
from quire.errors import InputError


@dataclass(frozen=True)
class Fit:
    """The answer to a budget question."""

    batch: int
    """0 where not even one sample fits."""
    memory: int
    peak_bytes: int
    """Predicted at `batch`."""
    next_batch: int
    """One sample more, or the first batch that the model takes at all; it does not fit."""
    next_bytes: int

    def __str__(self) -> str:
        peak = f"peak {as_bytes(self.peak_bytes)}; " if self.batch else ""
        return (
            f"largest batch in {as_bytes(self.memory)}: {self.batch} "
            f"({peak}{self.next_batch} would need {as_bytes(self.next_bytes)})"
        )


def largest_batch(
    model: nn.Module,
    inputs: Any,
    memory: int,
    *,
    loss: Callable[[Any], Tensor] | str | None = None,
    optimiser: str | Make = "adam",
    device: torch.device | str | None = None,
    limit: int = 2**24,
) -> Fit:
    """The most samples whose training step is predicted to stay within `memory` bytes.

    `inputs` is an example as `explain` takes it, whose tensors begin with the same number of samples, or a
    function that makes one for a number of samples. Both sides of the answer are predictions of a step.
    """
    make = inputs if callable(inputs) else partial(resized, inputs)
    peaks: dict[int, int] = {}

    def peak(batch: int) -> int:
        if batch not in peaks:
            costs = explain(model, make(batch), loss=loss, optimiser=optimiser, device=device)
            peaks[batch] = costs.peak_bytes
        return peaks[batch]

    low, high = 0, 1
    try:
        peak(1)
    except InputError:  # batch norm has nothing to compare one sample with
        high = 2
    while peak(high) <= memory:
        low, high = high, min(max(_guess(peaks, memory), 2 * high), limit)
        if low == limit:
            raise InputError(
                f"{low:,} samples fit into {as_bytes(memory)}",
                expected=f"an answer below {limit:,}",
                fix="check that the inputs begin with the number of samples",
            )
    turn = 0
    while high - low > 1 and low:
        turn += 1
        ends = {batch: peaks[batch] for batch in (low, high)}
        middle = _guess(ends, memory) if turn % 3 else (low + high) // 2
        middle = min(max(middle, low + 1), high - 1)
        low, high = (middle, high) if peak(middle) <= memory else (low, middle)
    return Fit(low, memory, peaks.get(low, 0), high, peaks[high])


def _guess(peaks: Mapping[int, int], memory: int) -> int:
    """The last batch that should fit, from the line through the two whose peaks are nearest to `memory`."""
    nearest = sorted(peaks.items(), key=lambda item: abs(item[1] - memory))[:2]
    if len(nearest) < 2:
        return 0
    (a, first), (b, second) = nearest
    slope = (second - first) / (b - a)
    return int(a + (memory - first) / slope) if slope > 0 else 0


def resized(example: Any, batch: int) -> Any:
    """The example with that many samples, without numbers."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        raise InputError("an example without tensors", expected="a tensor that begins with the samples")
    rows = tensors[0].shape[0]

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != rows:
            return tensor
        return torch.empty((batch, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    return tree_map_only(Tensor, resize, example)
