"""A Hopper kernel of the scatter Σ zzᵀ of float32 rows, the same sums as `quire.kernels.scatter` takes.

N rows, D features; z = (x − s)·c with a shift s and a power of two c for each column, z = h + l in half
precision.

A program adds up one tile of 128 × 128 columns over a span of rows, 64 at a time: while the tensor cores
multiply one step, the next is read, split and put into the other half of shared memory. A tile apart from the
diagonal takes hlᵀ + lhᵀ + hhᵀ. One on it takes hhᵀ + 2hlᵀ, of which the mean with its transpose is the same.

1,000,000 rows of 256 are 7 products of 128 × 128 columns, 229·10⁹ operations, 0.29 ms at 790·10¹² a second,
and 4 readings of half of the rows, 0.5 ms if all came from memory.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# What is experimental may be called otherwise in another version; who imports this does without it then.
if not triton.__version__.startswith("3.6."):
    raise ImportError("this kernel was tried with Triton 3.6 alone")

COLUMNS, STEP, WARPS = 128, 64, 8
LEAST_FEATURES = 65
"""Of fewer, a tile would be empty for the most part."""
ROUNDS = 8
"""Programs that a multiprocessor takes one after the other: their lengths differ."""


@gluon.jit
def _read(x_ptr, n, columns, stop, features):  # type: ignore[no-untyped-def]
    inside = (n < stop)[:, None] & (columns < features)[None, :]
    place = x_ptr + n.to(gl.int64)[:, None] * features + columns[None, :]
    return gl.load(place, mask=inside, other=0.0), inside


@gluon.jit
def _split(x, inside, shift, factor, high, low, TIMES: gl.constexpr):  # type: ignore[no-untyped-def]
    """high ← h, low ← TIMES·l; z is given."""
    z = gl.where(inside, (x - shift[None, :]) * factor[None, :], 0.0)
    half = z.to(gl.float16)
    high.store(half)
    low.store(((z - half.to(gl.float32)) * TIMES).to(gl.float16))
    return z


@gluon.jit
def _on_diagonal(  # type: ignore[no-untyped-def]
    x_ptr, shift, factor, columns, n, start, stop, features, one, scores: gl.constexpr,
    COLUMNS: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Σ hhᵀ + 2hlᵀ and Σ z."""
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, COLUMNS], gl.float16)
    high = gl.allocate_shared_memory(gl.float16, [2, STEP, COLUMNS], shared)
    low = gl.allocate_shared_memory(gl.float16, [2, STEP, COLUMNS], shared)
    gram = gl.zeros((COLUMNS, COLUMNS), gl.float32, scores)
    step = gram
    x, inside = _read(x_ptr, start + n, columns, stop, features)
    total = _split(x, inside, shift, factor, high.index(0), low.index(0), 2.0)
    fence_async_shared()
    gl.thread_barrier()
    x, inside = _read(x_ptr, start + STEP + n, columns, stop, features)
    place = 0
    for first in range(start, stop, STEP):
        turned = high.index(place).permute((1, 0))
        product = warpgroup_mma(turned, low.index(place), step, use_acc=False, is_async=True)
        product = warpgroup_mma(turned, high.index(place), product, is_async=True)
        place = 1 - place
        total += _split(x, inside, shift, factor, high.index(place), low.index(place), 2.0)
        x, inside = _read(x_ptr, first + 2 * STEP + n, columns, stop, features)
        step = warpgroup_mma_wait(0, deps=(product,))
        gram += one * step
        fence_async_shared()
        gl.thread_barrier()
    return gram, gl.sum(total, 0)


@gluon.jit
def _off_diagonal(  # type: ignore[no-untyped-def]
    x_ptr, shift, factor, columns, other_shift, other_factor, others, n, start, stop, features, one,
    scores: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Σ hlᵀ + lhᵀ + hhᵀ of two sets of columns."""
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEP, COLUMNS], gl.float16)
    high = gl.allocate_shared_memory(gl.float16, [2, STEP, COLUMNS], shared)
    low = gl.allocate_shared_memory(gl.float16, [2, STEP, COLUMNS], shared)
    other_high = gl.allocate_shared_memory(gl.float16, [2, STEP, COLUMNS], shared)
    other_low = gl.allocate_shared_memory(gl.float16, [2, STEP, COLUMNS], shared)
    gram = gl.zeros((COLUMNS, COLUMNS), gl.float32, scores)
    step = gram
    x, inside = _read(x_ptr, start + n, columns, stop, features)
    y, here = _read(x_ptr, start + n, others, stop, features)
    _split(x, inside, shift, factor, high.index(0), low.index(0), 1.0)
    _split(y, here, other_shift, other_factor, other_high.index(0), other_low.index(0), 1.0)
    fence_async_shared()
    gl.thread_barrier()
    x, inside = _read(x_ptr, start + STEP + n, columns, stop, features)
    y, here = _read(x_ptr, start + STEP + n, others, stop, features)
    place = 0
    for first in range(start, stop, STEP):
        turned = high.index(place).permute((1, 0))
        product = warpgroup_mma(turned, other_low.index(place), step, use_acc=False, is_async=True)
        rest = low.index(place).permute((1, 0))
        product = warpgroup_mma(rest, other_high.index(place), product, is_async=True)
        product = warpgroup_mma(turned, other_high.index(place), product, is_async=True)
        place = 1 - place
        _split(x, inside, shift, factor, high.index(place), low.index(place), 1.0)
        x, inside = _read(x_ptr, first + 2 * STEP + n, columns, stop, features)
        _split(y, here, other_shift, other_factor, other_high.index(place), other_low.index(place), 1.0)
        y, here = _read(x_ptr, first + 2 * STEP + n, others, stop, features)
        step = warpgroup_mma_wait(0, deps=(product,))
        gram += one * step
        fence_async_shared()
        gl.thread_barrier()
    return gram


@gluon.jit
def _gram(  # type: ignore[no-untyped-def]
    x_ptr, shift_ptr, factor_ptr, total_ptr, gram_ptr, rows, features, span, one,
    TILES: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, COLUMNS, 16]
    )
    read: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    # Tiles above the diagonal are numbered row by row.
    i, j, part = gl.program_id(0) * 0, gl.program_id(0), gl.program_id(1)
    while j >= TILES - i:
        j -= TILES - i
        i += 1
    j += i
    n = gl.arange(0, STEP, gl.SliceLayout(1, read))
    lane = gl.arange(0, COLUMNS, gl.SliceLayout(0, read))
    columns, others = i * COLUMNS + lane, j * COLUMNS + lane
    shift = gl.load(shift_ptr + columns, mask=columns < features, other=0.0).to(gl.float32)
    factor = gl.load(factor_ptr + columns, mask=columns < features, other=0.0)
    start = part * span
    stop = gl.minimum(start + span, rows)
    left = i * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, scores))
    right = j * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, scores))
    inside = (left < features)[:, None] & (right < features)[None, :]
    place = gram_ptr + part.to(gl.int64) * features * features + left[:, None] * features + right[None, :]
    if i == j:
        gram, total = _on_diagonal(
            x_ptr, shift, factor, columns, n, start, stop, features, one, scores, COLUMNS, STEP
        )
        gl.store(total_ptr + part * features + columns, total, mask=columns < features)
        gl.store(place, gram, mask=inside)
    else:
        other_shift = gl.load(shift_ptr + others, mask=others < features, other=0.0).to(gl.float32)
        other_factor = gl.load(factor_ptr + others, mask=others < features, other=0.0)
        gram = _off_diagonal(
            x_ptr, shift, factor, columns, other_shift, other_factor, others, n, start, stop, features, one,
            scores, COLUMNS, STEP,
        )  # fmt: skip
        gl.store(place, gram, mask=inside)


def takes(x: Tensor) -> bool:
    """Whether this kernel is made for such rows and this GPU."""
    if not x.is_cuda or torch.version.hip is not None or x.shape[1] < LEAST_FEATURES:
        return False
    return torch.cuda.get_device_capability(x.device)[0] == 9


def span_of(x: Tensor) -> int:
    """Rows that a program adds up: few enough that all multiprocessors are busy to the end."""
    tiles = triton.cdiv(x.shape[1], COLUMNS)
    programs = ROUNDS * torch.cuda.get_device_properties(x.device).multi_processor_count
    parts = max(1, programs // (tiles * (tiles + 1) // 2))
    return int(triton.cdiv(triton.cdiv(len(x), parts), STEP) * STEP)


def partial_sums(x: Tensor, shift: Tensor, factor: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Σ z (P, D), and of Σ zzᵀ (P, D, D) the tiles above the diagonal and those on it, of which the mean with
    their transpose is meant; in float32, of each `span` rows of x (N, D)."""
    rows, features = x.shape
    parts, tiles = triton.cdiv(rows, span), triton.cdiv(features, COLUMNS)
    total = torch.empty(parts, features, device=x.device)
    gram = torch.empty(parts, features, features, device=x.device)
    _gram[(tiles * (tiles + 1) // 2, parts)](
        x, shift, factor, total, gram, rows, features, span, 1.0,
        TILES=tiles, COLUMNS=COLUMNS, STEP=STEP, num_warps=WARPS,
    )  # fmt: skip
    return total, gram
