"""The search for the nearest of K centres by PyTorch's operations.

N rows, D features, K centres; x a row, c a centre, s a shift.

The smallest of ‖c‖² − 2x·c is looked for in float32, with s taken off both. A row for which another centre
comes closer than rounding can tell apart is decided again in float64, in the end by differences, the lower
number winning an exact tie. So labels are those of float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Scores of a chunk, and numbers of float64 in a piece of what is computed beside them.
CHUNK_NUMBERS = {"cpu": 2**20, "other": 2**25}
PIECE_NUMBERS = {"cpu": 2**17, "other": 2**23}
# Relative error of one float32 operation.
ROUNDING = 2.0**-24
# Doubts below it come from scores that float32 has lost digits of, or all.
SMALLEST = 1e-30


def screen(
    rows: Tensor, centres: Tensor, shift: Tensor, weights: Tensor | None, *, collect: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Labels (N,), sums under them (K, D) and counts (K,); zeros unless they are collected. Centres and
    weights are float64, the shift is of the rows' type."""
    moved = centres - shift.double()
    squared = moved.square().sum(1)
    codes, biases = (-2 * moved).float(), squared.float()
    reach = squared.max().sqrt()
    # What two scores can be wrong by together, for a row of norm 1 and of norm 0.
    slope = (2.02 * ROUNDING * (rows.shape[1] + 8) * 2 * reach).float()
    offset = (2.02 * ROUNDING * 8 * reach**2).float()
    labels = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    sums, counts = torch.zeros_like(centres), torch.zeros_like(squared)
    for part in pieces(rows, max(centres.shape), CHUNK_NUMBERS):
        x = rows[part]
        near = (x - shift).float()
        scores = torch.addmm(biases, near, codes.T)
        best, label = scores.min(1)
        doubt = slope * torch.linalg.vector_norm(near, dim=1) + offset
        sure = ((scores <= (best + doubt)[:, None]).sum(1) == 1) & (doubt > SMALLEST)
        close = (~sure).nonzero()[:, 0]
        if len(close):
            label[close] = decide(x[close], centres, shift)
        labels[part] = label
        if collect:
            weight = torch.ones_like(best, dtype=centres.dtype) if weights is None else weights[part]
            sums.index_add_(0, label, x * weight[:, None])
            counts.index_add_(0, label, weight)
    return labels, sums, counts


def decide(rows: Tensor, centres: Tensor, shift: Tensor) -> Tensor:
    """Labels in float64: by scores where these can tell, by differences otherwise."""
    k, d = centres.shape
    labels = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    if k == 1:
        return labels
    moved = centres - shift.double()
    squared = moved.square().sum(1)
    largest = squared.max()
    for part in pieces(rows, max(k, d)):
        x = rows[part].double()
        near = x - shift.double()
        scores = torch.addmm(squared, near, moved.T, alpha=-2)
        best, label = scores.min(1)
        lead = scores.scatter_(1, label[:, None], torch.inf).amin(1) - best
        doubt = 4e-16 * (d + 8) * (2 * torch.linalg.vector_norm(near, dim=1) * largest.sqrt() + largest)
        close = (~(lead > doubt)).nonzero()[:, 0]
        for few in pieces(close, k * d):
            label[close[few]] = by_differences(x[close[few]], centres)
        labels[part] = label
    return labels


def by_differences(rows: Tensor, centres: Tensor) -> Tensor:
    """argmin_k ‖x − c_k‖², in float64 and without any cancellation."""
    return (rows[:, None] - centres).square_().sum(2).argmin(1)


def pieces(
    rows: Tensor, width: int | None = None, numbers: dict[str, int] = PIECE_NUMBERS
) -> Iterator[slice]:
    """Slices of the rows that are computed at once where each makes `width` numbers, D unless given."""
    most = numbers["cpu" if rows.device.type == "cpu" else "other"]
    size = max(1, most // (rows.shape[1] if width is None else width))
    return (slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size))
