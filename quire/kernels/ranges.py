"""Sums over ranges of sorted keys, from the nodes of a binary tree: `functional.sorted_keys` in one kernel.

B batch, N queries, M keys, W columns.

Each query climbs the tree once: where an end of its range is odd, that node is whole and its part is added.
What must move: two nodes of 8·(1 + 3W) bytes for each of log₂ M levels and query at worst. For a million
sorted queries these are mostly the same as the neighbour's, and come from the cache. With PyTorch's
operations each level writes all of its N·W numbers a dozen times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    node, chosen, query, square, centre_ptr, zeroth_ptr, first_ptr, second_ptr, w, width,
    MOMENTS: tl.constexpr,
):  # fmt: skip
    """What the chosen queries' nodes add, (BLOCK, W)."""
    here = chosen[:, None] & (w < width)[None, :]
    place = node[:, None] * width + w[None, :]
    zeroth = tl.load(zeroth_ptr + place, mask=here, other=0.0)
    if MOMENTS:
        distance = (query - tl.load(centre_ptr + node, mask=chosen, other=0.0))[:, None]
        first = tl.load(first_ptr + place, mask=here, other=0.0)
        second = tl.load(second_ptr + place, mask=here, other=0.0)
        zeroth = (1.0 - distance * distance / square) * zeroth + (2.0 * distance * first - second) / square
        zeroth = tl.where(here, zeroth, 0.0)
    return zeroth


@triton.jit
def _climb(  # type: ignore[no-untyped-def]
    query_ptr, start_ptr, stop_ptr, square_ptr, centre_ptr, zeroth_ptr, first_ptr, second_ptr, out_ptr,
    queries, keys, nodes, width, levels,
    MOMENTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < queries
    w = tl.arange(0, WIDTH)
    place = batch * queries + n
    query = tl.load(query_ptr + place, mask=inside, other=0.0)
    start = tl.load(start_ptr + place, mask=inside, other=0)
    stop = tl.load(stop_ptr + place, mask=inside, other=0)
    square = tl.load(square_ptr)
    centre_ptr += batch * nodes
    zeroth_ptr += batch * nodes * width
    first_ptr += batch * nodes * width
    second_ptr += batch * nodes * width
    total = tl.zeros((BLOCK, WIDTH), tl.float64)
    offset = tl.zeros((), tl.int64)
    size = keys + tl.zeros((), tl.int64)
    for _ in range(0, levels):
        at_start = (start < stop) & ((start & 1) == 1)
        total += _part(
            offset + start,
            at_start,
            query,
            square,
            centre_ptr,
            zeroth_ptr,
            first_ptr,
            second_ptr,
            w,
            width,
            MOMENTS,
        )
        start = (start + 1) >> 1
        at_stop = (2 * start < stop) & ((stop & 1) == 1)
        total += _part(
            offset + stop - 1,
            at_stop,
            query,
            square,
            centre_ptr,
            zeroth_ptr,
            first_ptr,
            second_ptr,
            w,
            width,
            MOMENTS,
        )
        stop = stop >> 1
        offset += size
        size = (size + 1) >> 1
    tl.store(
        out_ptr + place[:, None] * width + w[None, :], total, mask=inside[:, None] & (w < width)[None, :]
    )


def sum_ranges(
    query: Tensor, start: Tensor, stop: Tensor, square: Tensor, tree: Sequence[Tensor],
    keys: int, levels: int, *, moments: bool,
) -> Tensor:  # fmt: skip
    """Σ K v over the range of each query (B, N) → (B, N, W) in float64.

    The tree is all levels one after the other, from the keys up: points (B, nodes), and S_0, S_1, S_2
    (B, nodes, W).
    `square` is h². Without `moments` the sums are S_0's.
    """
    centre, zeroth, first, second = (part.contiguous() for part in tree)
    batch, queries = query.shape
    width = zeroth.shape[-1]
    out = torch.empty(batch, queries, width, dtype=torch.float64, device=query.device)
    with torch.cuda.device_of(query):
        _climb[(triton.cdiv(queries, BLOCK), batch)](
            query.contiguous(), start.contiguous(), stop.contiguous(), square, centre, zeroth, first, second,
            out, queries, keys, zeroth.shape[1], width, levels,
            MOMENTS=moments, BLOCK=BLOCK, WIDTH=int(triton.next_power_of_2(width)),
        )  # fmt: skip
    return out
