"""Triton kernel of the scatter Σ zzᵀ of float32 rows, on the tensor cores at nearly float32's accuracy.

N rows, D features; z = (x − s)·c with a shift s and a power of two c for each column.

A number of about 1 is the sum of two halves, z = h + l, of eleven bits each. Of the four products that zzᵀ
then consists of, hhᵀ, hlᵀ and lhᵀ are taken and llᵀ, 2⁻²² of the whole, is left out. Only tiles on and above
the diagonal are computed. Tensor cores cut digits off when they add, so each step starts from zero and is
added by ordinary arithmetic; the sums of all programs are added in float64. `one` is 1: being unknown to the
compiler, it keeps it from making one long sum of the steps again. On Hopper GPUs, `quire.kernels.gram` takes
the same sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from quire.kernels import gram as hopper

    HOPPER = True
except ImportError:  # a Triton without Gluon, or one that has it elsewhere
    HOPPER = False


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
BLOCK = 8
"""Columns and rows that a program adds up over all parts."""


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
        x, shift, factor, total, gram, rows, features, 1.0,
        ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.step, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return total, gram


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]
    totals_ptr, grams_ptr, i, j, parts, step, few, features, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    MIRRORED: tl.constexpr,
):  # fmt: skip
    """Σ over all parts, over every `step`-th of the first, and of the totals. MIRRORED: means of the first
    two with their transposes."""
    inside = (i < features)[:, None] & (j < features)[None, :]
    place = i[:, None] * features + j[None, :]
    turned = j[:, None] * features + i[None, :]
    gram, some = tl.zeros((BLOCK, BLOCK), tl.float64), tl.zeros((BLOCK, BLOCK), tl.float64)
    other, others = tl.zeros((BLOCK, BLOCK), tl.float64), tl.zeros((BLOCK, BLOCK), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, parts, PARTS):
        for number in tl.static_range(PARTS):
            p = start + number
            chosen = (p % step == 0) & (p < few * step)
            base = grams_ptr + p.to(tl.int64) * features * features
            value = tl.load(base + place, mask=inside & (p < parts), other=0.0).to(tl.float64)
            gram += value
            some += tl.where(chosen, value, 0.0)
            if MIRRORED:
                mirror = tl.load(base + turned, mask=tl.trans(inside) & (p < parts), other=0.0).to(tl.float64)
                other += mirror
                others += tl.where(chosen, mirror, 0.0)
                column = tl.load(totals_ptr + p * features + j, mask=(j < features) & (p < parts), other=0.0)
                total += column.to(tl.float64)
    if MIRRORED:
        gram, some = (gram + tl.trans(other)) * 0.5, (some + tl.trans(others)) * 0.5
    return gram, some, total


@triton.jit
def _add_up(  # type: ignore[no-untyped-def]
    totals_ptr, grams_ptr, factor_ptr, total_ptr, gram_ptr, part_ptr, parts, step, few, features, columns,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """total ← Σ z, gram ← Σ zzᵀ, and part ← that of each `step`-th of the first parts, `few` of them; in
    float64, and as if all factors were 1. Of tiles of `columns` below the diagonal nothing is read; one on it
    is meant to be the mean with its transpose."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, second = tl.program_id(0) * BLOCK // columns, tl.program_id(1) * BLOCK // columns
    if first > second:
        return
    inside = (i < features)[:, None] & (j < features)[None, :]
    place = i[:, None] * features + j[None, :]
    left = tl.load(factor_ptr + i, mask=i < features, other=1.0).to(tl.float64)
    right = tl.load(factor_ptr + j, mask=j < features, other=1.0).to(tl.float64)
    whole = left[:, None] * right[None, :]
    if first == second:
        gram, some, total = _add_parts(
            totals_ptr, grams_ptr, i, j, parts, step, few, features, BLOCK, PARTS, True
        )
        tl.store(gram_ptr + place, gram / whole, mask=inside)
        tl.store(part_ptr + place, some / whole, mask=inside)
        tl.store(total_ptr + j, total / right, mask=j < features)
    else:
        gram, some, total = _add_parts(
            totals_ptr, grams_ptr, i, j, parts, step, few, features, BLOCK, PARTS, False
        )
        turned = j[:, None] * features + i[None, :]
        tl.store(gram_ptr + place, gram / whole, mask=inside)
        tl.store(part_ptr + place, some / whole, mask=inside)
        tl.store(gram_ptr + turned, tl.trans(gram / whole), mask=tl.trans(inside))
        tl.store(part_ptr + turned, tl.trans(some / whole), mask=tl.trans(inside))


def scatter_sums(
    x: Tensor, shift: Tensor, checked: int, columns: slice, tile: Tile | None = None
) -> dict[str, Tensor]:
    """What `quire.functional.scatter.moments` gives for z = x − s; one product of `checked` is taken twice,
    with some of its columns."""
    x, features = x.contiguous(), x.shape[1]
    hops = tile is None and HOPPER and hopper.takes(x)
    tile = TILE if tile is None else tile
    span, width = (hopper.span_of(x), hopper.COLUMNS) if hops else (tile.rows, tile.columns)
    # Columns of about 1 keep both halves within the range of half precision.
    factor = torch.empty(features, device=x.device)
    _measure[(triton.cdiv(features, 32),)](
        x, shift, factor, min(len(x), HEAD), features, BLOCK=32, num_warps=1
    )
    found: dict[str, Tensor] = {}
    blocks = triton.cdiv(features, BLOCK)
    for rows in x.split(span * max(1, PARTIAL_NUMBERS // features**2)):
        if hops:
            totals, grams = hopper.partial_sums(rows, shift, factor, span)
        else:
            totals, grams = partial_sums(rows, shift, factor, tile)
        step = max(checked, len(rows) // (span * MOST_CHECKED))
        sample = rows[: len(rows) // span * span].view(-1, span, features)[::step]
        if not len(sample):
            sample = rows[None]
        gram, part = shift.new_empty(2, features, features).unbind(0)
        total = torch.empty_like(shift)
        _add_up[(blocks, blocks)](
            totals, grams, factor, total, gram, part, len(grams), step, len(sample), features, width,
            BLOCK=BLOCK, PARTS=16, num_warps=1,
        )  # fmt: skip
        z = torch.sub(sample, shift).flatten(0, 1)
        squares = part.diagonal()
        sums = {
            "total": total,
            "gram": gram,
            "error": part[:, columns] - z.mT @ z[:, columns],
            "checked": squares.sum(),
            "checked_columns": squares[columns].sum(),
        }
        found = {name: found[name] + value for name, value in sums.items()} if found else sums
    return found
