"""Triton kernels of a Gaussian mixture with full covariances: one sweep of expectation-maximisation.

N rows, D features, K components, R starts at once, A = D + 1, P = A(A+1)/2 pairs i ≤ j, S parts of the rows,
W the next power of two from D.

`_expect` takes a tile of rows into the frame and multiplies it by the factors C of a few components at once:

    ln π_k N(x; μ_k, Σ_k) = constant_k − ½ ‖x C_k − μ_k C_k‖²

`_collect` adds up Σ_n r_nk x̂_i x̂_j over all pairs of x̂ = (x, 1) as one matrix product, rᵀφ. The pairs φ are
made tile by tile and never reach memory. `_unpack` adds the parts in float64, and `_renew` makes the next
mixture of them.

Products are float32 in three TF32 parts (low·high + high·low + high·high). Tensor cores round sums towards
zero, so each tile starts from zero and is added by ordinary arithmetic, with what rounding takes away kept
beside it. `one` is 1: being unknown to the compiler, it keeps it from making one long sum of the tiles again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_LOGS = 2**26
"""Log-densities held at once, 256 MiB of them: more rows are taken in parts."""
COLUMNS = 128
"""Columns of y = xC − μC in a tile of `_expect`: as many components as fill them."""
ROWS_PADDED = 128
"""Rows are padded to a multiple of this, so that no tile needs a mask and loads are wide."""


@triton.jit
def _high(a):  # type: ignore[no-untyped-def]
    """a rounded to the 10 bits of mantissa that TF32 has, so that a − high is exact."""
    return ((a.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _product(a, b):  # type: ignore[no-untyped-def]
    """a·b of float32 tiles."""
    a_high, b_high = _high(a), _high(b)
    result = tl.dot(a - a_high, b_high, input_precision="tf32")
    result = tl.dot(a_high, b - b_high, result, input_precision="tf32")
    return tl.dot(a_high, b_high, result, input_precision="tf32")


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    weight_ptr, mean_ptr, factor_ptr, high_ptr, low_ptr, bias_ptr, constant_ptr, features, components, padded,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Of one component: Cᵀ in two parts, μC, and ln π + ln |C| − ½ D ln 2π; nothing for those beyond K."""
    start, k = tl.program_id(0), tl.program_id(1)
    limit = tl.where(k < components, features, 0)
    own = (start * components + k).to(tl.int64)
    out = (start * padded + k).to(tl.int64)
    o, i = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    used = (o < limit) & (i < limit)
    factor = tl.load(factor_ptr + (own * features + i) * features + o, mask=used, other=0.0)
    mean = tl.load(mean_ptr + own * features + i, mask=i < limit, other=0.0)
    narrow = factor.to(tl.float32)
    high = _high(narrow)
    tl.store(high_ptr + (out * WIDTH + o) * WIDTH + i, high)
    tl.store(low_ptr + (out * WIDTH + o) * WIDTH + i, narrow - high)
    bias = tl.sum(factor * mean, 1)
    tl.store(bias_ptr + out * WIDTH + tl.arange(0, WIDTH), bias.to(tl.float32))
    diagonal = tl.sum(tl.where(o == i, factor, 0.0), 1)
    logs = tl.where(tl.arange(0, WIDTH) < features, tl.log(tl.where(diagonal > 0, diagonal, 1.0)), 0.0)
    weight = tl.load(weight_ptr + own, mask=k < components, other=0.0)
    constant = tl.log(weight) + tl.sum(logs, 0) - 0.9189385332046727 * features  # ½ ln 2π
    tl.store(constant_ptr + out, constant.to(tl.float32))


@triton.jit
def _expect(  # type: ignore[no-untyped-def]
    x_ptr, shift_ptr, scale_ptr, high_ptr, low_ptr, bias_ptr, constant_ptr, moved_ptr, log_ptr, total_ptr,
    sums_ptr, rows, stride, features, components,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """moved_ptr (A, N) ← x̂ᵀ, log_ptr (R, K, N) ← ln π N, total_ptr (R, N) ← ln p, sums_ptr (R, blocks)."""
    block, start = tl.program_id(0), tl.program_id(1)
    n = block * ROWS + tl.arange(0, ROWS)
    i, o = tl.arange(0, WIDTH), tl.arange(0, WIDTH)
    inside = n < rows
    shift = tl.load(shift_ptr + i, mask=i < features, other=0.0)
    x = tl.load(x_ptr + n[:, None].to(tl.int64) * features + i[None, :],
                mask=inside[:, None] & (i < features)[None, :], other=0.0)  # fmt: skip
    x = tl.where(inside[:, None] & (i < features)[None, :], x - shift[None, :], 0.0)
    scale = tl.load(scale_ptr + i[:, None] * features + o[None, :],
                    mask=(i < features)[:, None] & (o < features)[None, :], other=0.0)  # fmt: skip
    x = _product(x, scale)
    if start == 0:
        tl.store(moved_ptr + o[None, :] * stride + n[:, None], x, mask=(o < features)[None, :])
        tl.store(moved_ptr + features * stride + n, tl.where(inside, 1.0, 0.0))
    x_high = _high(x)
    x_low = x - x_high
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    column = tl.arange(0, GROUP * WIDTH)
    log_ptr += start.to(tl.int64) * components * stride
    padded = (components + GROUP - 1) // GROUP * GROUP
    high_ptr += start * padded * WIDTH * WIDTH
    low_ptr += start * padded * WIDTH * WIDTH
    for group in range(0, padded, GROUP):
        place = (group * WIDTH + column)[None, :] * WIDTH + i[:, None]
        high, low = tl.load(high_ptr + place), tl.load(low_ptr + place)
        y = tl.dot(x_low, high, input_precision="tf32")
        y = tl.dot(x_high, low, y, input_precision="tf32")
        y = tl.dot(x_high, high, y, input_precision="tf32")
        y -= tl.load(bias_ptr + (start * padded + group) * WIDTH + column)[None, :]
        k = group + tl.arange(0, GROUP)
        constant = tl.load(constant_ptr + start * padded + k)
        logs = constant[None, :] - 0.5 * tl.sum(tl.reshape(y * y, (ROWS, GROUP, WIDTH)), 2)
        logs = tl.where(inside[:, None], logs, float("-inf"))
        tl.store(log_ptr + k[None, :] * stride + n[:, None], logs, mask=(k < components)[None, :])
        # A row outside has no likelihood: 0 instead of −∞ keeps NaN out of the sums.
        new = tl.maximum(largest, tl.max(logs, 1))
        kept = tl.where(inside, new, 0.0)
        total = total * tl.exp(largest - kept) + tl.sum(tl.exp(logs - kept[:, None]), 1)
        largest = new
    total = tl.where(inside, largest + tl.log(total), 0.0)
    tl.store(total_ptr + start.to(tl.int64) * stride + n, total)
    tl.store(sums_ptr + start * tl.num_programs(0) + block, tl.sum(total, 0))


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    x_ptr, first_ptr, second_ptr, log_ptr, total_ptr, out_ptr, rows, stride, pairs, components, part_rows,
    one, ROWS: tl.constexpr, PAIRS: tl.constexpr, COMPONENTS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """out_ptr (S, R, K, P) ← Σ over the rows of a part of exp(log − total) φ(x)."""
    start, part = tl.program_id(1), tl.program_id(2)
    p = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    k = tl.arange(0, COMPONENTS)
    first, second = tl.load(first_ptr + p), tl.load(second_ptr + p)
    log_ptr += start.to(tl.int64) * components * stride
    total_ptr += start.to(tl.int64) * stride
    moments = tl.zeros((PAIRS, COMPONENTS), tl.float32)
    lost = tl.zeros((PAIRS, COMPONENTS), tl.float32)
    for row in range(part * part_rows, min(rows, (part + 1) * part_rows), ROWS):
        n = row + tl.arange(0, ROWS)
        left = tl.load(x_ptr + first[:, None] * stride + n[None, :])
        right = tl.load(x_ptr + second[:, None] * stride + n[None, :])
        logs = tl.load(log_ptr + k[:, None] * stride + n[None, :], mask=(k < components)[:, None],
                       other=float("-inf"))  # fmt: skip
        share = tl.trans(tl.exp(logs - tl.load(total_ptr + n)[None, :]))
        found = one * _product(left * right, share)
        if EXACT:
            # Kahan's sum: what `moments` cannot hold goes into the next tile.
            found -= lost
            new = moments + found
            lost = (new - moments) * one - found
            moments = new
        else:
            moments += found
    out_ptr += (part * tl.num_programs(1) + start).to(tl.int64) * components * pairs
    tl.store(out_ptr + k[None, :] * pairs + p[:, None], moments, mask=(k < components)[None, :])


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    part_ptr, first_ptr, second_ptr, count_ptr, mean_ptr, square_ptr, parts, used, pairs, features,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """The parts (S, R·K, P) added up in float64, and put where they belong: N_k, Σ r x, Σ r xxᵀ."""
    k, p = tl.program_id(0).to(tl.int64), tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside = p < used
    components = tl.num_programs(0)
    total = tl.zeros((PAIRS,), tl.float64)
    for part in range(parts):
        total += tl.load(part_ptr + (part * components + k) * pairs + p, mask=inside, other=0.0).to(
            tl.float64
        )
    i, j = tl.load(first_ptr + p, mask=inside, other=0), tl.load(second_ptr + p, mask=inside, other=0)
    quadratic = inside & (j < features)
    tl.store(square_ptr + (k * features + i) * features + j, total, mask=quadratic)
    tl.store(square_ptr + (k * features + j) * features + i, total, mask=quadratic)
    tl.store(mean_ptr + k * features + i, total, mask=inside & (j == features) & (i < features))
    tl.store(count_ptr + k + 0 * p, total, mask=inside & (i == features))


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
    """What `_expect` reads of mixtures (R, K), (R, K, D), (R, K, D, D): Cᵀ in two parts, μC, constants."""
    starts, components, features = means.shape
    width = max(16, triton.next_power_of_2(features))
    padded = triton.cdiv(components, group) * group

    def empty(*shape: int) -> Tensor:
        return torch.empty(starts, padded, *shape, dtype=torch.float32, device=means.device)

    high, low, bias, constant = empty(width, width), empty(width, width), empty(width), empty()
    _prepare[(starts, padded)](
        weights, means, factors, high, low, bias, constant, features, components, padded,
        WIDTH=width, num_warps=4,
    )  # fmt: skip
    return high, low, bias, constant


def expectation(
    x: Tensor, shift: Tensor, scale: Tensor, mixture: tuple[Tensor, ...], components: int, *, rows: int = 64,
    group: int = 4, warps: int = 4, stages: int = 2,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x̂ᵀ (A, N), ln π_k N(x_n; μ_k, Σ_k) (R, K, N), ln p(x_n) (R, N) and sums of the latter, of `prepared`
    mixtures; N is rounded up, with rows that are zero and have no likelihood."""
    starts, width = mixture[0].shape[0], mixture[0].shape[-1]
    count, features = x.shape
    stride = triton.cdiv(count, ROWS_PADDED) * ROWS_PADDED
    blocks = stride // rows
    moved, logs = x.new_empty(features + 1, stride), x.new_empty(starts, components, stride)
    total, sums = x.new_empty(starts, stride), x.new_empty(starts, blocks)
    _expect[(blocks, starts)](
        x, shift, scale, *mixture, moved, logs, total, sums, count, stride, features, components,
        ROWS=rows, WIDTH=width, GROUP=group, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return moved, logs, total, sums


def pair_numbers(features: int, device: torch.device, *, multiple: int = 128) -> tuple[Tensor, Tensor]:
    """i and j of the pairs i ≤ j of D + 1 numbers, row by row, padded by pairs that nobody reads."""
    pairs = torch.triu_indices(features + 1, features + 1, dtype=torch.int32, device=device)
    first, second = torch.nn.functional.pad(pairs, (0, -pairs.shape[1] % multiple))
    return first, second


def collection(
    moved: Tensor, first: Tensor, second: Tensor, logs: Tensor, total: Tensor, *, rows: int = 64,
    pairs: int = 64, programs: int = 528, warps: int = 4, stages: int = 2, exact: bool = True,
) -> Tensor:  # fmt: skip
    """Σ_n exp(log_nk − total_n) x̂_i x̂_j in parts of the rows, (S, R, K, P), of what `expectation` gives."""
    starts, components, stride = logs.shape
    columns = triton.cdiv(len(moved) * (len(moved) + 1) // 2, pairs)
    parts = max(1, min(triton.cdiv(stride, rows), programs // (columns * starts)))
    part_rows = triton.cdiv(triton.cdiv(stride, parts), rows) * rows
    parts = triton.cdiv(stride, part_rows)
    out = moved.new_empty(parts, starts, components, len(first))
    _collect[(columns, starts, parts)](
        moved, first, second, logs, total, out, stride, stride, len(first), components, part_rows, 1.0,
        ROWS=rows, PAIRS=pairs, COMPONENTS=max(16, triton.next_power_of_2(components)), EXACT=exact,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def unpacked(parts: Tensor, first: Tensor, second: Tensor, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """N_k (R, K), Σ r x (R, K, D) and Σ r xxᵀ (R, K, D, D) in float64, of the parts of a `collection`."""
    count, starts, components, pairs = parts.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(starts, components, *shape, dtype=torch.float64, device=parts.device)

    sums = empty(), empty(features), empty(features, features)
    used = (features + 1) * (features + 2) // 2
    _unpack[(starts * components, triton.cdiv(used, 128))](
        parts, first, second, *sums, count, used, pairs, features, PAIRS=128, num_warps=4
    )
    return sums


def sweep(
    x: Tensor, shift: Tensor, scale: Tensor, weights: Tensor, means: Tensor, factors: Tensor
) -> tuple[Tensor, ...]:
    """Σ_n ln p (R,), N_k, Σ r x̃ and Σ r x̃x̃ᵀ in float64, of the rows x̃ = (x − shift)·scale, float32 (N, D)."""
    starts, components, features = means.shape
    group = COLUMNS // max(16, triton.next_power_of_2(features))
    mixture = prepared(weights, means, factors, group=group)
    first, second = pair_numbers(features, x.device)
    found: list[Tensor] = []
    for part in x.split(max(1, LARGEST_LOGS // (starts * components))):
        moved, logs, total, sums = expectation(
            part.contiguous(), shift, scale, mixture, components, group=group
        )
        likelihood = sums.sum(1, dtype=torch.float64)
        parts = collection(moved, first, second, logs, total)
        new = [likelihood, *unpacked(parts, first, second, features)]
        found = [a + b for a, b in zip(found, new, strict=True)] if found else new
    return tuple(found)


def renewed(
    counts: Tensor, first: Tensor, second: Tensor, shift: Tensor, floor: Tensor, *, warps: int = 4
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
        num_warps=warps,
    )  # fmt: skip
    return out
