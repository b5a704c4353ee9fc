"""Triton kernels of K-means: new centres from sums, and whether they have come to rest, in two launches.

R starts, K clusters, D features; s a shift, S sums, n counts, c centres.

The same as `KMeansTask.advance` does where no empty cluster waits for a row. Some sixty short operations take
longer to be begun one by one than to be done; what they move is 5 times the centres, which stay in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16
"""Clusters of a program."""


@triton.jit
def _assess(  # type: ignore[no-untyped-def]
    sums_ptr, counts_ptr, centres_ptr, shift_ptr, active_ptr, parts_ptr, clusters, features,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """parts ← of BLOCK clusters Σ (c − s)·(S − ns), Σ n‖c − s‖², Σ ‖S/n − c‖², Σ ‖c‖², how many are empty,
    and whether their start is active, which the next kernel changes."""
    start, block = tl.program_id(1), tl.program_id(0)
    k = block * BLOCK + tl.arange(0, BLOCK)
    inside = k < clusters
    row = start.to(tl.int64) * clusters + k
    count = tl.load(counts_ptr + row, mask=inside, other=1.0)
    cross, square = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    moved, size = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for first in range(0, features, WIDTH):
        d = first + tl.arange(0, WIDTH)
        here = inside[:, None] & (d < features)[None, :]
        place = row[:, None] * features + d[None, :]
        total = tl.load(sums_ptr + place, mask=here, other=0.0)
        centre = tl.load(centres_ptr + place, mask=here, other=0.0)
        shift = tl.load(shift_ptr + d, mask=d < features, other=0.0)[None, :]
        near = tl.where(here, centre - shift, 0.0)
        step = tl.where(here, total / count[:, None] - centre, 0.0)
        cross += tl.sum(near * (total - count[:, None] * shift), 1)
        square += tl.sum(near * near, 1)
        moved += tl.sum(step * step, 1)
        size += tl.sum(centre * centre, 1)
    part = parts_ptr + (start * tl.num_programs(0) + block) * 6
    tl.store(part, tl.sum(cross, 0))
    tl.store(part + 1, tl.sum(tl.where(inside, count * square, 0.0), 0))
    tl.store(part + 2, tl.sum(moved, 0))
    tl.store(part + 3, tl.sum(size, 0))
    tl.store(part + 4, tl.sum((inside & (count == 0.0)).to(tl.float64), 0))
    tl.store(part + 5, tl.load(active_ptr + start).to(tl.float64))


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    sums_ptr, counts_ptr, centres_ptr, parts_ptr, inertia_ptr, active_ptr, iterations_ptr, wanted_ptr,
    squares_ptr, limit_ptr, radius_ptr, mass_ptr, layout_ptr, result_ptr, exact, most, clusters, features,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """centres ← S/n of a start that is active and has no empty cluster; the last program of a start changes
    its other buffers. result ← radius, mass, layout; active, wanted and inertia of all starts."""
    start, block, blocks = tl.program_id(1), tl.program_id(0), tl.num_programs(0) - 1
    i = tl.arange(0, PARTS)
    part = parts_ptr + (start * blocks + i) * 6
    empty = tl.sum(tl.load(part + 4, mask=i < blocks, other=0.0), 0)
    active = tl.load(parts_ptr + start * blocks * 6 + 5) > 0.0
    goes = active & (empty == 0.0)
    if block < blocks and goes:
        k = block * BLOCK + tl.arange(0, BLOCK)
        row = start.to(tl.int64) * clusters + k
        count = tl.load(counts_ptr + row, mask=k < clusters, other=1.0)
        for first in range(0, features, WIDTH):
            d = first + tl.arange(0, WIDTH)
            here = (k < clusters)[:, None] & (d < features)[None, :]
            place = row[:, None] * features + d[None, :]
            total = tl.load(sums_ptr + place, mask=here, other=0.0)
            tl.store(centres_ptr + place, total / count[:, None], mask=here)
    if block == blocks:
        cross = tl.sum(tl.load(part, mask=i < blocks, other=0.0), 0)
        square = tl.sum(tl.load(part + 1, mask=i < blocks, other=0.0), 0)
        moved = tl.sum(tl.load(part + 2, mask=i < blocks, other=0.0), 0)
        size = tl.sum(tl.load(part + 3, mask=i < blocks, other=0.0), 0)
        height = tl.load(squares_ptr) - 2.0 * cross + square
        # Not a maximum, which would make a number of what is none.
        height = tl.where(height < 0.0, 0.0, height)
        height = tl.where(active, height, tl.load(inertia_ptr + start))
        iterations = tl.load(iterations_ptr + start) + goes.to(tl.int64)
        limit = tl.maximum(tl.load(limit_ptr), size * exact)
        rests = goes & ((moved <= limit) | (iterations >= most))
        wanted = tl.where(active & (empty > 0.0), empty, 0.0)
        tl.store(inertia_ptr + start, height)
        tl.store(iterations_ptr + start, iterations)
        tl.store(active_ptr + start, (active & (rests == 0)).to(tl.uint8))
        tl.store(wanted_ptr + start, wanted.to(tl.int64))
        starts = tl.num_programs(1)
        tl.store(result_ptr + 4 + start, (active & (rests == 0)).to(tl.float64))
        tl.store(result_ptr + 4 + starts + start, wanted)
        tl.store(result_ptr + 4 + 2 * starts + start, height)
        if start == 0:
            tl.store(result_ptr, tl.load(radius_ptr))
            tl.store(result_ptr + 1, tl.load(mass_ptr))
            tl.store(result_ptr + 2, tl.load(layout_ptr).to(tl.float64))
            tl.store(result_ptr + 3, tl.load(layout_ptr + 1).to(tl.float64))


def advance(
    sums: Tensor, counts: Tensor, *, centres: Tensor, shift: Tensor, squares: Tensor, limit: Tensor,
    exact: float, most: int, inertia: Tensor, active: Tensor, iterations: Tensor, wanted: Tensor,
    radius: Tensor, mass: Tensor, layout: Tensor,
) -> Tensor:  # fmt: skip
    """Centres (R, K, D), inertia, active, iterations and wanted (R,) are changed in place; radius, mass,
    layout, active, wanted and inertia are given as one tensor. A start rests when Σ ‖c_new − c‖² is at most
    `limit` or exact·Σ ‖c‖², or after `most` iterations."""
    starts, clusters, features = centres.shape
    blocks, width = triton.cdiv(clusters, BLOCK), min(max(triton.next_power_of_2(features), 16), 64)
    sums, counts, flags = sums.contiguous(), counts.contiguous(), active.view(torch.uint8)
    parts, result = centres.new_empty(starts, blocks, 6), centres.new_empty(4 + 3 * starts)
    _assess[(blocks, starts)](
        sums, counts, centres, shift, flags, parts, clusters, features, BLOCK=BLOCK, WIDTH=width
    )
    _step[(blocks + 1, starts)](
        sums, counts, centres, parts, inertia, flags, iterations, wanted, squares, limit, radius, mass,
        layout, result, exact, most, clusters, features,
        BLOCK=BLOCK, WIDTH=width, PARTS=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return result
