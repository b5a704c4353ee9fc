"""The softmax of rows of scores and its backward pass, in place.

A row is read twice and written once; the second time it is in the cache.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _softmax(score_ptr, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row: s → p in place. No key allowed: zeros."""
    score_ptr += tl.program_id(0).to(tl.int64) * columns
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        m = first + lane
        s = tl.load(score_ptr + m, mask=m < columns, other=float("-inf"))
        new = tl.maximum(top, s, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(new == float("-inf"), 0.0, new)
        weight = weight * tl.exp(top - base) + tl.exp(s - base)
        top = new
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(weight * tl.exp(top - base), 0)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    for first in range(0, columns, BLOCK):
        m = first + lane
        p = tl.exp(tl.load(score_ptr + m, mask=m < columns, other=float("-inf")) - base) * share
        tl.store(score_ptr + m, p, mask=m < columns)


@triton.jit
def _through(weight_ptr, slope_ptr, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row: g·v → ∂s = p ⊙ (g·v − Σ p ⊙ g·v) in place."""
    row = tl.program_id(0).to(tl.int64)
    weight_ptr += row * columns
    slope_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    mean = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        m = first + lane
        p = tl.load(weight_ptr + m, mask=m < columns, other=0.0)
        mean += p * tl.load(slope_ptr + m, mask=m < columns, other=0.0)
    average = tl.sum(mean, 0)
    for first in range(0, columns, BLOCK):
        m = first + lane
        p = tl.load(weight_ptr + m, mask=m < columns, other=0.0)
        slope = tl.load(slope_ptr + m, mask=m < columns, other=0.0)
        tl.store(slope_ptr + m, p * (slope - average), mask=m < columns)


def softmax_(score: Tensor) -> Tensor:
    """p of scores (…, M), contiguous, written over them; −∞ forbids a key."""
    columns = score.shape[-1]
    _softmax[(score.shape[:-1].numel(),)](score, columns, **_shared_out(columns))
    return score


def through_(weight: Tensor, slope: Tensor) -> Tensor:
    """The gradient of scores from p and the gradient of p, (…, M), written over the latter."""
    columns = slope.shape[-1]
    _through[(slope.shape[:-1].numel(),)](weight, slope, columns, **_shared_out(columns))
    return slope


def _shared_out(columns: int) -> dict[str, Any]:
    block = min(4096, max(32, 1 << (columns - 1).bit_length()))
    return {"BLOCK": block, "num_warps": 8 if columns > 2048 else 4}
