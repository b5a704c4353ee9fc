"""Triton kernel of the scatter Σ zzᵀ of float32 rows, on the tensor cores at nearly float32's accuracy.

N rows, D features; z = (x − s)·c with a shift s and a power of two c for each column.

A number of about 1 is the sum of two halves, z = h + l, of eleven bits each. Of the four products that zzᵀ
then consists of, hhᵀ, hlᵀ and lhᵀ are taken and llᵀ, 2⁻²² of the whole, is left out. Only tiles on and above
the diagonal are computed. Tensor cores cut digits off when they add, so each step starts from zero and is
added by ordinary arithmetic; the sums of all programs are added in float64. `one` is 1: being unknown to the
compiler, it keeps it from making one long sum of the steps again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """Shape of a program's work, and how it is run."""

    rows: int
    """That one program adds up."""
    columns: int
    step: int
    """Rows of one product."""
    warps: int
    stages: int


TILE = Tile(4096, 64, 64, 4, 3)
PARTIAL_NUMBERS = 1 << 25
"""Of sums that are held before they are added in float64."""
HEAD = 128
"""Rows that say how large a column is."""
MOST_CHECKED = 4
"""Parts of such sums that are taken twice."""


@triton.jit
def _halves(x, first, columns, rows, features, shift_ptr, factor_ptr, START, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """z of STEP rows in some columns, as two halves, and itself."""
    n = START + tl.arange(0, STEP)
    inside = (first + n < rows)[:, None] & (columns < features)[None, :]
    shift = tl.load(shift_ptr + columns, mask=columns < features, other=0.0).to(tl.float32)
    factor = tl.load(factor_ptr + columns, mask=columns < features, other=0.0)
    value = tl.load(x + n[:, None] * features + columns[None, :], mask=inside, other=0.0)
    z = tl.where(inside, (value - shift[None, :]) * factor[None, :], 0.0)
    high = z.to(tl.float16)
    return z, high, (z - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _measure(x_ptr, shift_ptr, factor_ptr, rows, features, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """factor ← the power of two that brings each column to about 1."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = d < features
    shift = tl.load(shift_ptr + d, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float64)
    for n in range(rows):
        z = tl.load(x_ptr + n * features + d, mask=inside, other=0.0).to(tl.float64) - shift
        total += z * z
    size = tl.sqrt(total / rows)
    known = (size > 0.0) & (size < 1e38)
    exponent = tl.floor(tl.log2(tl.where(known, size, 1.0).to(tl.float32)) + 0.5)
    tl.store(factor_ptr + d, tl.exp2(-tl.maximum(tl.minimum(exponent, 120.0), -120.0)), mask=inside)


@triton.jit
def _scatter(  # type: ignore[no-untyped-def]
    x_ptr,
    shift_ptr,
    factor_ptr,
    total_ptr,
    gram_ptr,
    rows,
    features,
    one,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    tiles = tl.cdiv(features, COLUMNS)
    i, j, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    if j < i:
        return
    left, right = i * COLUMNS + tl.arange(0, COLUMNS), j * COLUMNS + tl.arange(0, COLUMNS)
    first = part.to(tl.int64) * ROWS
    x = x_ptr + first * features
    gram = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, ROWS, STEP):
        z, high, low = _halves(x, first, left, rows, features, shift_ptr, factor_ptr, start, STEP)
        _, right_high, right_low = _halves(
            x, first, right, rows, features, shift_ptr, factor_ptr, start, STEP
        )
        step = tl.dot(tl.trans(low), right_high)
        step = tl.dot(tl.trans(high), right_low, step)
        step = tl.dot(tl.trans(high), right_high, step)
        gram += one * step
        total += tl.sum(z, 0)
    inside = (left < features)[:, None] & (right < features)[None, :]
    place = part.to(tl.int64) * features * features + left[:, None] * features + right[None, :]
    tl.store(gram_ptr + place, gram, mask=inside)
    if i == j:
        tl.store(total_ptr + part.to(tl.int64) * features + left, total, mask=left < features)


def partial_sums(x: Tensor, shift: Tensor, factor: Tensor, tile: Tile = TILE) -> tuple[Tensor, Tensor]:
    """Σ z (P, D) and the upper tiles of Σ zzᵀ (P, D, D), in float32, of each `tile.rows` rows of x (N, D)."""
    rows, features = x.shape
    parts, tiles = triton.cdiv(rows, tile.rows), triton.cdiv(features, tile.columns)
    total = torch.empty(parts, features, device=x.device)
    gram = torch.empty(parts, features, features, device=x.device)
    _scatter[(tiles * tiles, parts)](
        x.contiguous(), shift, factor, total, gram, rows, features, 1.0,
        ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.step, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return total, gram


def scatter_sums(
    x: Tensor, shift: Tensor, checked: int, columns: slice, tile: Tile = TILE
) -> dict[str, Tensor]:
    """What `quire.functional.scatter.moments` gives for z = x − s; one product of `checked` is taken twice,
    with some of its columns."""
    x, features = x.contiguous(), x.shape[1]
    # Columns of about 1 keep both halves within the range of half precision.
    factor = torch.empty(features, device=x.device)
    _measure[(triton.cdiv(features, 32),)](
        x, shift, factor, min(len(x), HEAD), features, BLOCK=32, num_warps=1
    )
    found: dict[str, Tensor] = {}
    for part in x.split(tile.rows * max(1, PARTIAL_NUMBERS // features**2)):
        totals, grams = partial_sums(part, shift, factor, tile)
        step = max(checked, len(part) // (tile.rows * MOST_CHECKED))
        sample = part[: len(part) // tile.rows * tile.rows].view(-1, tile.rows, features)[::step]
        if not len(sample):
            sample, grams = part[None], grams[:1]
        z = (sample.double() - shift).flatten(0, 1)
        some = z[:, columns].contiguous()
        sums = {
            "total": totals.sum(0, dtype=torch.float64),
            "gram": grams.sum(0, dtype=torch.float64),
            "part": grams[: len(sample) * step : step].sum(0, dtype=torch.float64),
            "exact": z.mT @ some,
            "checked": z.norm().square(),
            "checked_columns": some.norm().square(),
        }
        found = {name: found[name] + value for name, value in sums.items()} if found else sums
    factor = factor.double()
    whole = torch.outer(factor, factor)
    part = symmetric(found.pop("part") / whole)
    error = part[:, columns] - found.pop("exact")
    gram = symmetric(found["gram"] / whole)
    return found | {"total": found["total"] / factor, "gram": gram, "error": error}


def symmetric(upper: Tensor) -> Tensor:
    return upper.triu() + upper.triu(1).mT
