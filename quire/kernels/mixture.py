"""Triton kernels of a Gaussian mixture with full covariances: one sweep of expectation-maximisation.

N rows, D features, K components, R starts at once, S parts of the rows, W the next power of two from D,
G = ⌈D/8⌉ groups of eight features, B = G(G+1)/2 pairs of groups.

`_expect` takes a tile of rows into the frame and multiplies it by the factors C of a few components at once:

    log₂ π_k N(x; μ_k, Σ_k) = constant_k − ½ log₂e ‖x C_k − μ_k C_k‖²

and makes responsibilities of that. `_collect` adds up Σ_n r_nk x_i x_j over pairs of groups as one matrix
product, rᵀφ; φ is made tile by tile and never reaches memory. Of the pairs i > j within a group, which say
nothing new, eight stand for x_i·1, and one for 1·1. `_unpack` adds the parts in float64, and `_renew` makes
the next mixture of them.

Numbers are multiplied in two pieces of half precision, 22 bits: low·high + high·low + high·high. A row
further out than 128 deviations is made smaller by a power of two, ρ, and its responsibility larger by 1/ρ²:
exact up to 4096 deviations, which only one of 16 million rows can be from their mean; one beyond that counts
less. Factors are scaled likewise. Tensor cores round sums towards zero, so each tile starts from zero and is
added by ordinary arithmetic; where there are many tiles, what rounding takes away is kept beside it. `one` is
1: being unknown to the compiler, it keeps it from making one long sum of the tiles again.

What must be computed: 3·2·N·K·(D² + 64·B) in half precision; for 200,000 × 32 and K = 64 that is 0.13 TFLOP,
0.17 ms at 740 TFLOP/s. Factors are read for each tile of rows, and responsibilities for each pair of groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_LOGS = 2**25
"""Log-densities held at once, 256 MiB of them with their responsibilities: more rows are taken in parts."""
COLUMNS = 64
"""Columns of y = xC − μC in a tile of `_expect`: as many components as fill them."""
ROWS_PADDED = 128
"""Rows are padded to a multiple of this, so that no tile needs a mask and loads are wide."""
TILES = 128
"""So many tiles are added up without keeping what rounding takes away."""
EXPECT_ROWS, EXPECT_STAGES = 128, 3
COLLECT_ROWS, COLLECT_STAGES = 64, 2
"""Rows of a tile of `_expect` and of `_collect`, and so many tiles are on their way at once."""
PROGRAMS = 528
"""Of `_collect`: four for each of 132 multiprocessors."""
WARPS = 4


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    weight_ptr, mean_ptr, factor_ptr, high_ptr, low_ptr, bias_ptr, constant_ptr, shrink_ptr,
    features, components, padded, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of one component: 2^e Cᵀ in two pieces, 2^e μC, log₂ π|C|/√(2π)ᴰ, ½ log₂e / 4^e; nothing beyond K."""
    start, k = tl.program_id(0), tl.program_id(1)
    limit = tl.where(k < components, features, 0)
    own = (start * components + k).to(tl.int64)
    out = (start * padded + k).to(tl.int64)
    o, i = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    used = (o < limit) & (i < limit)
    factor = tl.load(factor_ptr + (own * features + i) * features + o, mask=used, other=0.0)
    mean = tl.load(mean_ptr + own * features + i, mask=i < limit, other=0.0)
    largest = tl.max(tl.max(tl.abs(factor), 1), 0).to(tl.float32)
    grow = tl.exp2(13.0 - tl.ceil(tl.log2(tl.where(largest > 0, largest, 1.0))))
    scaled = (factor * grow).to(tl.float32)
    high = scaled.to(tl.float16)
    tl.store(high_ptr + (out * WIDTH + o) * WIDTH + i, high)
    tl.store(low_ptr + (out * WIDTH + o) * WIDTH + i, (scaled - high.to(tl.float32)).to(tl.float16))
    bias = tl.sum(factor * mean, 1) * grow
    tl.store(bias_ptr + out * WIDTH + tl.arange(0, WIDTH), bias.to(tl.float32))
    diagonal = tl.sum(tl.where(o == i, factor, 0.0), 1)
    logs = tl.where(tl.arange(0, WIDTH) < features, tl.log(tl.where(diagonal > 0, diagonal, 1.0)), 0.0)
    weight = tl.load(weight_ptr + own, mask=k < components, other=0.0)
    constant = tl.log(weight) + tl.sum(logs, 0) - 0.9189385332046727 * features  # ½ ln 2π
    tl.store(constant_ptr + out, (constant * 1.4426950408889634).to(tl.float32))
    tl.store(shrink_ptr + out, 0.7213475204444817 / (grow * grow))


@triton.jit
def _expect(  # type: ignore[no-untyped-def]
    x_ptr, shift_ptr, scale_ptr, high_ptr, low_ptr, bias_ptr, constant_ptr, shrink_ptr,
    moved_ptr, log_ptr, share_ptr, rest_ptr, sums_ptr, rows, stride, features, groups, components,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """moved_ptr (8G + 1, N) ← (ρx, ρ)ᵀ; log_ptr (R, K, N) ← log₂ π N; share_ptr and rest_ptr (R, K, N) ←
    32 r/ρ² in two pieces; sums_ptr (R, blocks) ← Σ ln p."""
    block, start = tl.program_id(0), tl.program_id(1)
    n = block * ROWS + tl.arange(0, ROWS)
    i, o = tl.arange(0, WIDTH), tl.arange(0, WIDTH)
    inside = n < rows
    whole = inside[:, None] & (i < features)[None, :]
    shift = tl.load(shift_ptr + i, mask=i < features, other=0.0)
    x = tl.load(x_ptr + n[:, None].to(tl.int64) * features + i[None, :], mask=whole, other=0.0)
    x = tl.where(whole, x - shift[None, :], 0.0)
    scale = tl.load(scale_ptr + i[:, None] * features + o[None, :],
                    mask=(i < features)[:, None] & (o < features)[None, :], other=0.0)  # fmt: skip
    x = tl.dot(x, scale, input_precision="tf32x3")
    places = tl.maximum(tl.ceil(tl.log2(tl.max(tl.abs(x), 1))) - 7.0, 0.0)
    shrunk = tl.exp2(-places)
    x *= shrunk[:, None]
    if start == 0:
        tl.store(moved_ptr + o[None, :] * stride + n[:, None], x, mask=(o < 8 * groups)[None, :])
        tl.store(moved_ptr + 8 * groups * stride + n, tl.where(inside, shrunk, 0.0))
    x_high = x.to(tl.float16)
    x_low = (x - x_high.to(tl.float32)).to(tl.float16)
    grown = tl.exp2(2.0 * places)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    column = tl.arange(0, GROUP * WIDTH)
    log_ptr += start.to(tl.int64) * components * stride
    padded = (components + GROUP - 1) // GROUP * GROUP
    high_ptr += start * padded * WIDTH * WIDTH
    low_ptr += start * padded * WIDTH * WIDTH
    for group in tl.range(0, padded, GROUP, num_stages=STAGES):
        place = (group * WIDTH + column)[:, None] * WIDTH + i[None, :]
        high, low = tl.trans(tl.load(high_ptr + place)), tl.trans(tl.load(low_ptr + place))
        y = tl.dot(x_low, high)
        y = tl.dot(x_high, low, y)
        y = tl.dot(x_high, high, y)
        bias = tl.load(bias_ptr + (start * padded + group) * WIDTH + column)
        y -= shrunk[:, None] * bias[None, :]
        k = group + tl.arange(0, GROUP)
        constant = tl.load(constant_ptr + start * padded + k)
        shrink = tl.load(shrink_ptr + start * padded + k)
        squares = tl.sum(tl.reshape(y * y, (ROWS, GROUP, WIDTH)), 2) * grown[:, None]
        logs = tl.where(inside[:, None], constant[None, :] - shrink[None, :] * squares, float("-inf"))
        tl.store(log_ptr + k[None, :] * stride + n[:, None], logs, mask=(k < components)[None, :])
        # A row outside has no likelihood: 0 instead of −∞ keeps NaN out of the sums.
        new = tl.maximum(largest, tl.max(logs, 1))
        kept = tl.where(inside, new, 0.0)
        total = total * tl.exp2(largest - kept) + tl.sum(tl.exp2(logs - kept[:, None]), 1)
        largest = new
    total = tl.where(inside, largest + tl.log2(total), 0.0)
    tl.store(sums_ptr + start * tl.num_programs(0) + block, tl.sum(total, 0) * 0.6931471805599453)
    less = total - 2.0 * places - 5.0
    share_ptr += start.to(tl.int64) * components * stride
    rest_ptr += start.to(tl.int64) * components * stride
    tl.debug_barrier()
    for group in range(0, components, 16):
        k = group + tl.arange(0, 16)
        place = k[:, None] * stride + n[None, :]
        logs = tl.load(log_ptr + place, mask=(k < components)[:, None], other=float("-inf"))
        share = tl.minimum(tl.exp2(logs - less[None, :]), 65504.0)
        high = share.to(tl.float16)
        tl.store(share_ptr + place, high, mask=(k < components)[:, None])
        tl.store(
            rest_ptr + place, (share - high.to(tl.float32)).to(tl.float16), mask=(k < components)[:, None]
        )


@triton.jit
def _groups(block, groups):  # type: ignore[no-untyped-def]
    """The groups I ≤ J of a pair, in the order of the rows of a triangle."""
    first, rest = 0, block
    for row in range(groups):
        more = (first == row) & (rest >= groups - row)
        rest -= tl.where(more, groups - row, 0)
        first += tl.where(more, 1, 0)
    return first, first + rest


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    x_ptr, share_ptr, rest_ptr, out_ptr, rows, stride, groups, components, part_rows, one,
    ROWS: tl.constexpr, COMPONENTS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out_ptr (S, R, K, 64·B) ← Σ over the rows of a part of 32 r φ, φ of one pair of groups."""
    block, start, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, second = _groups(block, groups)
    e, k = tl.arange(0, 8), tl.arange(0, COMPONENTS)
    i, j = e[:, None, None], e[None, :, None]
    below = (first == second) & (i == j + 1)
    # (2, 0) stands for 1·x_0, (3, 0) for 1·1.
    corner = (first == second) & (j == 0) & ((i == 2) | (i == 3))
    left_one = corner
    right_one = below | (corner & (i == 3))
    share_ptr += start.to(tl.int64) * components * stride
    rest_ptr += start.to(tl.int64) * components * stride
    moments = tl.zeros((64, COMPONENTS), tl.float32)
    lost = tl.zeros((64, COMPONENTS), tl.float32)
    for row in tl.range(part * part_rows, min(rows, (part + 1) * part_rows), ROWS, num_stages=STAGES):
        n = row + tl.arange(0, ROWS)
        left = tl.load(x_ptr + (8 * first + e)[:, None] * stride + n[None, :])
        right = tl.load(x_ptr + (8 * second + e)[:, None] * stride + n[None, :])
        unit = tl.load(x_ptr + 8 * groups * stride + n)[None, None, :]
        place = k[:, None] * stride + n[None, :]
        share = tl.trans(tl.load(share_ptr + place, mask=(k < components)[:, None], other=0.0))
        rest = tl.trans(tl.load(rest_ptr + place, mask=(k < components)[:, None], other=0.0))
        phi = tl.where(left_one, unit, left[:, None, :]) * tl.where(right_one, unit, right[None, :, :])
        phi = tl.reshape(phi, (64, ROWS))
        high = phi.to(tl.float16)
        low = (phi - high.to(tl.float32)).to(tl.float16)
        found = tl.dot(low, share)
        found = tl.dot(high, rest, found)
        found = one * tl.dot(high, share, found)
        if EXACT:
            # Kahan's sum: what `moments` cannot hold goes into the next tile.
            found -= lost
            new = moments + found
            lost = (new - moments) * one - found
            moments = new
        else:
            moments += found
    width = 64 * tl.num_programs(0)
    out_ptr += (part * tl.num_programs(1) + start).to(tl.int64) * components * width + 64 * block
    tl.store(
        out_ptr + k[None, :] * width + tl.arange(0, 64)[:, None], moments, mask=(k < components)[None, :]
    )


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    part_ptr, count_ptr, mean_ptr, square_ptr, parts, groups, features
):
    """The parts (S, R·K, 64·B) added up in float64, and put where they belong: N_k, Σ r x, Σ r xxᵀ."""
    k, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    components, width = tl.num_programs(0), 64 * tl.num_programs(1)
    first, second = _groups(block, groups)
    p = tl.arange(0, 64)
    total = tl.zeros((64,), tl.float64)
    for part in range(parts):
        total += tl.load(part_ptr + (part * components + k) * width + 64 * block + p).to(tl.float64)
    total /= 32.0
    i, j = p // 8, p % 8
    same = first == second
    a, b = 8 * first + i, 8 * second + j
    quadratic = (a < features) & (b < features) & ((i <= j) | (first < second))
    tl.store(square_ptr + (k * features + a) * features + b, total, mask=quadratic)
    tl.store(square_ptr + (k * features + b) * features + a, total, mask=quadratic)
    tl.store(mean_ptr + k * features + a, total, mask=same & (i == j + 1) & (a < features))
    tl.store(mean_ptr + k * features + b, total, mask=same & (i == 2) & (j == 0) & (b < features))
    tl.store(count_ptr + k + 0 * p, total, mask=same & (first == 0) & (i == 3) & (j == 0))


@triton.jit
def _renew(  # type: ignore[no-untyped-def]
    count_ptr, first_ptr, second_ptr, shift_ptr, floor_ptr, weight_ptr, mean_ptr, covariance_ptr, factor_ptr,
    features, components, WIDTH: tl.constexpr, COMPONENTS: tl.constexpr,
):  # fmt: skip
    """π, μ, Σ and C of one component, in float64. Σ = LDLᵀ is eliminated in place: what a step sets to zero
    in Σ is where L⁻¹ fills in."""
    start, k = tl.program_id(0), tl.program_id(1)
    own = (start * components + k).to(tl.int64)
    every = tl.arange(0, COMPONENTS)
    least = 2.220446049250313e-15  # as in `mixture_update`: an empty component stays at its shift
    counts = tl.load(count_ptr + start * components + every, mask=every < components, other=-least) + least
    count = tl.load(count_ptr + own) + least
    tl.store(weight_ptr + own, count / tl.sum(counts, 0))
    i, j = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (i < features) & (j < features)
    delta_i = tl.load(first_ptr + own * features + i, mask=i < features, other=0.0) / count
    delta_j = tl.load(first_ptr + own * features + j, mask=j < features, other=0.0) / count
    shift = tl.load(shift_ptr + own * features + i, mask=i < features, other=0.0)
    tl.store(mean_ptr + own * features + i, shift + delta_i, mask=i < features)
    place = (own * features + i) * features + j
    a = tl.load(second_ptr + place, mask=inside, other=0.0) / count - delta_i * delta_j
    a += tl.load(floor_ptr + i * features + j, mask=inside, other=0.0)
    tl.store(covariance_ptr + place, a, mask=inside)
    a = tl.where(inside, a, tl.where(i == j, 1.0, 0.0))
    for step in range(features):
        across = tl.sum(tl.where(i == step, a, 0.0), 0)[None, :]
        down = tl.sum(tl.where(j == step, a, 0.0), 1)[:, None]
        pivot = tl.sum(tl.where(j == step, across, 0.0))
        ratio = down / pivot
        below = tl.where(j == step, -ratio, a - ratio * across)
        a = tl.where(i > step, below, a)
    pivots = tl.sum(tl.where(i == j, a, 0.0), 1)[:, None]
    inverse = tl.where(i == j, 1.0, tl.where(i > j, a, 0.0)) / tl.sqrt(pivots)
    tl.store(factor_ptr + (own * features + j) * features + i, inverse, mask=inside)


def prepared(weights: Tensor, means: Tensor, factors: Tensor, *, group: int) -> tuple[Tensor, ...]:
    """What `_expect` reads of mixtures (R, K), (R, K, D), (R, K, D, D): Cᵀ in two pieces, μC, constants."""
    starts, components, features = means.shape
    width = max(16, triton.next_power_of_2(features))
    padded = triton.cdiv(components, group) * group

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(starts, padded, *shape, dtype=dtype, device=means.device)

    pieces = [empty(width, width, dtype=torch.float16) for _ in range(2)]
    out = (*pieces, empty(width), empty(), empty())
    _prepare[(starts, padded)](
        weights, means, factors, *out, features, components, padded, WIDTH=width, num_warps=WARPS
    )
    return out


def expectation(
    x: Tensor, shift: Tensor, scale: Tensor, mixture: tuple[Tensor, ...], components: int, *, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ρx, ρ)ᵀ (8G + 1, N), 32 r/ρ² (R, K, N) in two pieces and sums of ln p (R, blocks), of `prepared`
    mixtures; N is rounded up, with rows that are zero and belong to no component."""
    starts, width = mixture[0].shape[0], mixture[0].shape[-1]
    count, features = x.shape
    groups = triton.cdiv(features, 8)
    stride = triton.cdiv(count, ROWS_PADDED) * ROWS_PADDED
    blocks = stride // EXPECT_ROWS
    moved, logs = x.new_empty(8 * groups + 1, stride), x.new_empty(starts, components, stride)
    share, rest = (torch.empty_like(logs, dtype=torch.float16) for _ in range(2))
    sums = x.new_empty(starts, blocks)
    _expect[(blocks, starts)](
        x, shift, scale, *mixture, moved, logs, share, rest, sums,
        count, stride, features, groups, components,
        ROWS=EXPECT_ROWS, WIDTH=width, GROUP=group, STAGES=EXPECT_STAGES, num_warps=WARPS,
    )  # fmt: skip
    return moved, share, rest, sums


def collection(moved: Tensor, share: Tensor, rest: Tensor) -> Tensor:
    """Σ_n 32 r φ in parts of the rows, (S, R, K, 64·B), of what `expectation` gives."""
    starts, components, stride = share.shape
    groups, rows = len(moved) // 8, COLLECT_ROWS
    blocks = groups * (groups + 1) // 2
    parts = max(1, min(triton.cdiv(stride, rows), PROGRAMS // (blocks * starts)))
    part_rows = triton.cdiv(triton.cdiv(stride, parts), rows) * rows
    parts = triton.cdiv(stride, part_rows)
    out = moved.new_empty(parts, starts, components, 64 * blocks)
    _collect[(blocks, starts, parts)](
        moved, share, rest, out, stride, stride, groups, components, part_rows, 1.0,
        ROWS=rows, COMPONENTS=max(16, triton.next_power_of_2(components)), EXACT=part_rows > TILES * rows,
        STAGES=COLLECT_STAGES, num_warps=WARPS,
    )  # fmt: skip
    return out


def unpacked(parts: Tensor, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """N_k (R, K), Σ r x (R, K, D) and Σ r xxᵀ (R, K, D, D) in float64, of the parts of a `collection`."""
    count, starts, components, width = parts.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(starts, components, *shape, dtype=torch.float64, device=parts.device)

    sums = empty(), empty(features), empty(features, features)
    _unpack[(starts * components, width // 64)](
        parts, *sums, count, triton.cdiv(features, 8), features, num_warps=2
    )
    return sums


def sweep(
    x: Tensor, shift: Tensor, scale: Tensor, weights: Tensor, means: Tensor, factors: Tensor
) -> tuple[Tensor, ...]:
    """Σ_n ln p (R,), N_k, Σ r x̃ and Σ r x̃x̃ᵀ in float64, of the rows x̃ = (x − shift)·scale, float32 (N, D)."""
    starts, components, features = means.shape
    group = max(1, COLUMNS // max(16, triton.next_power_of_2(features)))
    mixture = prepared(weights, means, factors, group=group)
    found: list[Tensor] = []
    for part in x.split(max(1, LARGEST_LOGS // (starts * components))):
        moved, share, rest, sums = expectation(
            part.contiguous(), shift, scale, mixture, components, group=group
        )
        new = [sums.sum(1, dtype=torch.float64), *unpacked(collection(moved, share, rest), features)]
        found = [a + b for a, b in zip(found, new, strict=True)] if found else new
    return tuple(found)


def renewed(
    counts: Tensor, first: Tensor, second: Tensor, shift: Tensor, floor: Tensor
) -> tuple[Tensor, ...]:
    """π (R, K), μ (R, K, D), Σ and C (R, K, D, D) from sums about `shift` (R, K, D), all float64 and
    contiguous; `floor` (D, D) is added to Σ. C is NaN or infinite where Σ is not positive definite."""
    starts, components, features = first.shape
    out = (
        torch.empty_like(counts),
        torch.empty_like(first),
        torch.empty_like(second),
        torch.empty_like(second),
    )
    _renew[(starts, components)](
        counts, first, second, shift, floor, *out, features, components,
        WIDTH=max(2, triton.next_power_of_2(features)), COMPONENTS=triton.next_power_of_2(components),
        num_warps=WARPS,
    )  # fmt: skip
    return out
