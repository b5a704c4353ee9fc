"""Gaussian pooling, Σ_m softmax_m(−½‖q − k_m‖² + ln s_m) v_m, on the tensor cores at float32's accuracy.

L batch, N queries, M keys, D dimensions, V width of values; R is the largest norm of a query or key, taken
from the mean of some keys in units of the kernel's width.

Coordinates are split into a whole number of units u and a rest (`quire.kernels.halves`): q = a + a',
k = b + b'. Then q·k = a·b + a·b' + a'·b + a'·b' is one half-precision product of width 4D. The digits of near
neighbours cancel in −½‖a‖² − ½‖b‖² + a·b, which is exact in float32; what is rounded afterwards is 2000 times
smaller.
The error of a coordinate is at most 2⁻¹⁴u; from u = 1/64 on the rest has a second piece, a'' and b'', whose
products with a and b add 2D to the width.

Weights (at most 1, times 2¹⁵) and values (by their largest norm) are multiplied in two pieces each. Backward,
gradients g are scaled row by row, γ = max‖v‖·Σ|g|, so that ∂s/γ is at most 2p:

    ∂q = Σ_m ∂s k − q Σ_m ∂s,   ∂k = Σ_n ∂s q − k Σ_n ∂s,   ∂v = Σ_n p g,   ∂ln s = Σ_n ∂s

in two passes, over keys for each query and over queries for each key. Σ_m ∂s would be 0 without rounding. No
atomics: the same bits each time with the same tiles, which are chosen by measurement once in a process.

What must be computed: N·M exponentials forward, 2·N·M backward. At 16 a clock on each of 132 multiprocessors
at 1.98 GHz, 32,768² of them take 0.26 ms; with 11.5 instructions a pair (D = 16, V = 8) at 128 lanes the
forward takes 0.38 ms; its products, 2·N·M·(64 + 2·16) = 0.2 TFLOP, 0.28 ms at 740 TFLOP/s, run beside. A
single value has a kernel of its own (`quire.kernels.gaussian_one`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gaussian_one import pooled_alone
from quire.kernels.halves import (
    COARSE,
    STEP,
    Extent,
    Known,
    Places,
    halved,
    joined,
    power,
    product,
    quartered,
    score,
)
from quire.kernels.once import differentiable_once
from quire.kernels.tuning import bucket, padded, round_up, tuned

LARGEST = 64.0
"""The largest R. Beyond it, float32's rounding of the scores of far queries shows."""

FORWARD_TILES = [
    ({"ROWS": 64, "COLUMNS": 64}, 4, 3),
    ({"ROWS": 64, "COLUMNS": 128}, 4, 3),
    ({"ROWS": 128, "COLUMNS": 64}, 4, 3),
    ({"ROWS": 128, "COLUMNS": 64}, 8, 3),
    ({"ROWS": 128, "COLUMNS": 128}, 8, 2),
    ({"ROWS": 64, "COLUMNS": 32}, 4, 2),  # what fits for the widest queries and values
]
BACKWARD_TILES = [
    ({"ROWS": 64, "COLUMNS": 64}, 4, 2),
    ({"ROWS": 64, "COLUMNS": 32}, 4, 2),
    ({"ROWS": 128, "COLUMNS": 64}, 8, 2),
    ({"ROWS": 128, "COLUMNS": 32}, 8, 2),
]


@triton.jit
def _seen(  # type: ignore[no-untyped-def]
    score, row, column, limit, LIMIT: tl.constexpr, EXCLUDE: tl.constexpr, QUERIES: tl.constexpr
):
    """Scores, −∞ where the query does not see the key; rows are queries, or keys."""
    if LIMIT:
        if QUERIES:
            score = tl.where(column[None, :] < limit[:, None], score, float("-inf"))
        else:
            score = tl.where(row[:, None] < limit[None, :], score, float("-inf"))
    if EXCLUDE:
        score = tl.where(row[:, None] != column[None, :], score, float("-inf"))
    return score


@tuned(FORWARD_TILES, key=["size", "WIDTH", "VALUES", "COUNTED", "FINE", "LIMIT", "EXCLUDE"])
@triton.jit(do_not_specialize=["size"])
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, fine_x_ptr, fine_y_ptr, half_x_ptr, half_y_ptr, rest_x_ptr, rest_ptr,
    value_ptr, limit_ptr, out_ptr, total_ptr,
    rows, keys, width, factor, one, size,
    COUNTED: tl.constexpr, FINE: tl.constexpr, LIMIT: tl.constexpr, EXCLUDE: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = Σ_m p v, and total = log₂ Σ_m 2^s.

    COUNTED: column `width` of the values is ones, so that the product sums the weights as well.
    """
    tile = tl.program_id(0)
    batch = (tile // tl.cdiv(rows, ROWS)).to(tl.int64)
    n = tile % tl.cdiv(rows, ROWS) * ROWS + tl.arange(0, ROWS)
    padded_rows = tl.cdiv(rows, 128) * 128
    padded_keys = tl.cdiv(keys, 128) * 128
    k = tl.arange(0, 4 * WIDTH)
    m = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + batch * padded_rows * (4 * WIDTH) + n[:, None] * (4 * WIDTH) + k[None, :])
    half_x = tl.load(half_x_ptr + batch * padded_rows + n)
    f = tl.arange(0, WIDTH)
    fine_x, least_x = x, x
    if FINE:
        fine_x_ptr += batch * padded_rows * (2 * WIDTH)
        fine_x = tl.load(fine_x_ptr + n[:, None] * (2 * WIDTH) + f[None, :])
        least_x = tl.load(fine_x_ptr + WIDTH + n[:, None] * (2 * WIDTH) + f[None, :])
    limit = n
    if LIMIT:
        limit = tl.load(limit_ptr + batch * rows + n, mask=n < rows, other=0)
    y_ptr += batch * padded_keys * (4 * WIDTH)
    fine_y_ptr += batch * padded_keys * (2 * WIDTH)
    value_ptr += batch * padded_keys * (2 * VALUES)
    half_y_ptr += batch * padded_keys
    rest_ptr += batch * padded_keys
    at_y = m[:, None] * (4 * WIDTH) + k[None, :]
    at_fine = m[:, None] * (2 * WIDTH) + f[None, :]
    at_value = m[:, None] * (2 * VALUES) + tl.arange(0, 2 * VALUES)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, 2 * VALUES), tl.float32)
    for first in range(0, padded_keys, COLUMNS):
        y = tl.load(y_ptr + first * (4 * WIDTH) + at_y)
        value = tl.load(value_ptr + first * (2 * VALUES) + at_value)
        start = half_x[:, None] + tl.load(half_y_ptr + first + m)[None, :]
        s = score(x, y, fine_x, least_x, fine_y_ptr + first * (2 * WIDTH), at_fine, start, WIDTH, FINE)
        s += tl.load(rest_ptr + first + m)[None, :]
        s = _seen(s, n, first + m, limit, LIMIT, EXCLUDE, True)
        new = tl.maximum(top, tl.max(s, 1))
        # Rows that have seen no key yet: any finite number does.
        base = tl.where(new == float("-inf"), 0.0, new)
        fade = tl.exp2(top - base)
        p = tl.exp2(s - (base - 15.0)[:, None])
        if not COUNTED:
            weight = weight * fade + tl.sum(p, 1)
        out = out * fade[:, None] + product(p, value, one)
        top = new
    v = tl.arange(0, VALUES)
    out = joined(out, ROWS, VALUES)
    if COUNTED:
        weight = tl.sum(tl.where((v == width)[None, :], out, 0.0), 1)
    out *= (factor / tl.where(weight == 0.0, 1.0, weight))[:, None]
    place = batch * rows + n
    tl.store(
        out_ptr + place[:, None] * width + v[None, :], out, mask=(n < rows)[:, None] & (v < width)[None, :]
    )
    top += tl.load(rest_x_ptr + batch * padded_rows + n) - 15.0
    tl.store(total_ptr + place, top + tl.log2(weight), mask=n < rows)


@tuned(BACKWARD_TILES, key=["size", "WIDTH", "VALUES", "FINE", "LIMIT", "EXCLUDE", "QUERIES"])
@triton.jit(do_not_specialize=["size"])
def _backward(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, fine_x_ptr, fine_y_ptr, half_x_ptr, half_y_ptr, add_x_ptr, add_y_ptr,
    slope_x_ptr, slope_y_ptr, mean_ptr, gamma_ptr,
    place_ptr, gradient_ptr, limit_ptr, out_ptr, value_ptr, sum_ptr,
    rows, columns, one, size,
    QUERIES: tl.constexpr, FINE: tl.constexpr, LIMIT: tl.constexpr, EXCLUDE: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows are queries: out = Σ_m ∂s k, sum = Σ_m ∂s. Rows are keys: out = Σ_n ∂s q, also value = Σ_n p g.

    Sizes are padded. p = 2^(s + add_x + add_y); ∂s = p ⊙ (slope_x·slope_y − mean), mean of the query.
    """
    tile = tl.program_id(0)
    batch = (tile // tl.cdiv(rows, ROWS)).to(tl.int64)
    i = tile % tl.cdiv(rows, ROWS) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    k = tl.arange(0, 4 * WIDTH)
    g = tl.arange(0, 4 * VALUES)
    own = batch * rows + i
    x = tl.load(x_ptr + own[:, None] * (4 * WIDTH) + k[None, :])
    slope_x = tl.load(slope_x_ptr + own[:, None] * (4 * VALUES) + g[None, :])
    f = tl.arange(0, WIDTH)
    fine_x, least_x = x, x
    if FINE:
        fine_x = tl.load(fine_x_ptr + own[:, None] * (2 * WIDTH) + f[None, :])
        least_x = tl.load(fine_x_ptr + WIDTH + own[:, None] * (2 * WIDTH) + f[None, :])
    half_x = tl.load(half_x_ptr + own)
    add_x = tl.load(add_x_ptr + own)
    other = batch * columns
    y_ptr += other * (4 * WIDTH)
    fine_y_ptr += other * (2 * WIDTH)
    slope_y_ptr += other * (4 * VALUES)
    place_ptr += other * (2 * WIDTH)
    gradient_ptr += other * (2 * VALUES)
    half_y_ptr += other
    add_y_ptr += other
    gamma_ptr += other
    mean = add_x
    limit = i if QUERIES else j
    if QUERIES:
        mean = tl.load(mean_ptr + own)
        if LIMIT:
            limit = tl.load(limit_ptr + own)
    else:
        mean_ptr += other
        limit_ptr += other
    at_y = j[:, None] * (4 * WIDTH) + k[None, :]
    at_slope = j[:, None] * (4 * VALUES) + g[None, :]
    at_fine = j[:, None] * (2 * WIDTH) + f[None, :]
    at_place = j[:, None] * (2 * WIDTH) + tl.arange(0, 2 * WIDTH)[None, :]
    at_gradient = j[:, None] * (2 * VALUES) + tl.arange(0, 2 * VALUES)[None, :]
    out = tl.zeros((ROWS, 2 * WIDTH), tl.float32)
    of_value = tl.zeros((ROWS, 2 * VALUES), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, columns, COLUMNS):
        y = tl.load(y_ptr + first * (4 * WIDTH) + at_y)
        slope_y = tl.load(slope_y_ptr + first * (4 * VALUES) + at_slope)
        place = tl.load(place_ptr + first * (2 * WIDTH) + at_place)
        start = half_x[:, None] + tl.load(half_y_ptr + first + j)[None, :]
        s = score(x, y, fine_x, least_x, fine_y_ptr + first * (2 * WIDTH), at_fine, start, WIDTH, FINE)
        s += add_x[:, None] + tl.load(add_y_ptr + first + j)[None, :]
        if not QUERIES and LIMIT:
            limit = tl.load(limit_ptr + first + j)
        s = _seen(s, i, first + j, limit, LIMIT, EXCLUDE, QUERIES)
        p = tl.exp2(s)
        slope = tl.dot(slope_x, tl.trans(slope_y))
        if QUERIES:
            slope = p * (slope - mean[:, None])
            total += tl.sum(slope, 1)
        else:
            slope = p * (slope - tl.load(mean_ptr + first + j)[None, :])
            total += tl.sum(slope * tl.load(gamma_ptr + first + j)[None, :], 1)
            gradient = tl.load(gradient_ptr + first * (2 * VALUES) + at_gradient)
            of_value += product(p * 32768.0, gradient, one)
        out += product(slope * 16384.0, place, one)
    c = tl.arange(0, WIDTH)
    tl.store(out_ptr + own[:, None] * WIDTH + c[None, :], joined(out, ROWS, WIDTH))
    if not QUERIES:
        v = tl.arange(0, VALUES)
        tl.store(value_ptr + own[:, None] * VALUES + v[None, :], joined(of_value, ROWS, VALUES))
    tl.store(sum_ptr + own, total)


def gaussian_pooling(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: Tensor,
    log_weight: Tensor | None,
    limit: Tensor | None,
    exclude_self: bool,
    extent: Extent,
    known: Known | None,
) -> Tensor:
    """Σ_m softmax_m(−½‖(q − k_m)·scale‖² + ln s_m) v_m: (L, N, D), (L, M, D), (L, M, V) → float32 (L, N, V).

    scale (D,) is 1/width, log_weight (L, M). Query n sees keys below limit (L, N), int32. No size may be 0.
    Gradients go to all but the limit; second derivatives are not provided. All that is `known` of the extent
    must be given unless V is 1 and nothing needs a gradient; R may be anything then, and is at most `LARGEST`
    otherwise.
    """
    with torch.cuda.device_of(query):
        pooled: Tensor = _Gaussian.apply(
            query, key, value, scale, log_weight, limit, exclude_self, extent, known
        )
    return pooled


class _Gaussian(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Tensor,
        log_weight: Tensor | None,
        limit: Tensor | None,
        exclude_self: bool,
        extent: Extent,
        known: Known | None,
    ) -> Tensor:
        weight = None if log_weight is None else log_weight.float().contiguous()
        ctx.exclude_self, ctx.extent, ctx.known = exclude_self, extent, known
        if value.shape[-1] == 1 and (known is None or known.unit <= COARSE):
            out, total = pooled_alone(query, key, value, scale, weight, limit, exclude_self, extent)
            ctx.save_for_backward(query, key, value, scale, weight, limit, out, total)
            return out
        assert known is not None
        places = Places(query, key, scale, weight, extent, fine=known.unit > COARSE)
        batch, rows, keys, width = len(query), query.shape[1], key.shape[1], value.shape[-1]
        values, factor = power(width, 8), known.largest or 1.0
        counted = width < values
        out = query.new_empty(batch, rows, width, dtype=torch.float32)
        total = query.new_empty(batch, rows, dtype=torch.float32)
        _forward[lambda tile: (batch * -(-rows // tile["ROWS"]),)](
            places.query, places.key, places.fine_query, places.fine_key,
            places.half_query, places.half_key, places.rest_query, places.rest,
            halved(value, values, 1 / factor, counted=counted), total if limit is None else limit, out, total,
            rows, keys, width, factor, 1.0, bucket(batch, rows, keys),
            COUNTED=counted, FINE=places.fine, LIMIT=limit is not None, EXCLUDE=exclude_self,
            WIDTH=places.width, VALUES=values,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, scale, weight, limit, out, total)
        return out

    @staticmethod
    @differentiable_once("Gaussian pooling by its kernel", "attention_pooling, which holds all scores")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, scale, weight, limit, out, total = ctx.saved_tensors
        known, wanted = ctx.known, ctx.needs_input_grad
        assert known is not None
        places = Places(query, key, scale, weight, ctx.extent, fine=known.unit > COARSE)
        batch, rows, keys, width = len(query), query.shape[1], key.shape[1], value.shape[-1]
        full, full_keys = round_up(rows, STEP), round_up(keys, STEP)
        values, largest, radius = power(width, 8), known.largest or 1.0, known.radius or 1.0
        # |g·v| ≤ γ, so that what is multiplied in half precision is at most 1.
        gamma = gradient.abs().sum(-1, keepdim=True) * largest
        gamma = torch.where(gamma > 0, gamma, 1.0)
        highest = gamma.amax()
        near, far = ((t.float() - ctx.extent.centre[:, None]) * places.scale for t in (query, key))
        # Queries that saw no key, and those that are not there: 2^(s − ∞) is 0 whatever s is.
        level = padded(torch.where(total == -torch.inf, torch.inf, total)[..., None], full, 1, torch.inf)
        level = places.rest_query[..., None] - level
        mean = padded((gradient * out).sum(-1, keepdim=True) / gamma, full, 1)
        share = padded(gamma / highest, full, 1)
        slope_query = quartered(halved(gradient * (largest / gamma), values), keys=False)
        slope_key = quartered(halved(value, values, 1 / largest), keys=True)
        limits = mean if limit is None else torch.nn.functional.pad(limit, (0, full - rows))
        size = bucket(batch, rows, keys)
        shared = {
            "FINE": places.fine, "LIMIT": limit is not None, "EXCLUDE": ctx.exclude_self,
            "WIDTH": places.width, "VALUES": values,
        }  # fmt: skip
        excess = gradient.new_empty(batch, full)
        of_query, of_key = (gradient.new_empty(batch, n, places.width) for n in (full, full_keys))
        if wanted[0] or wanted[3]:
            _backward[lambda tile: (batch * full // tile["ROWS"],)](
                places.query, places.key, places.fine_query, places.fine_key,
                places.half_query, places.half_key, level, places.rest,
                slope_query, slope_key, mean, share, halved(far, places.width, 1 / radius), slope_key, limits,
                of_query, of_query, excess, full, full_keys, 1.0, size, QUERIES=True, **shared,
            )  # fmt: skip
        of_value = gradient.new_empty(batch, full_keys, values)
        of_weight = gradient.new_empty(batch, full_keys)
        peak = gradient.abs().amax()
        peak = torch.where(peak > 0, peak, 1.0)
        if any(wanted[1:5]):
            _backward[lambda tile: (batch * full_keys // tile["ROWS"],)](
                places.key, places.query, places.fine_key, places.fine_query,
                places.half_key, places.half_query, places.rest, level,
                slope_key, slope_query, mean, share,
                halved(near * (gamma / highest), places.width, 1 / radius),
                halved(gradient / peak, values), limits, of_key, of_value, of_weight,
                full_keys, full, 1.0, size, QUERIES=False, **shared,
            )  # fmt: skip
        dimensions = query.shape[-1]
        of_query = of_query[:, :rows, :dimensions] * (radius / 16384) - near * excess[:, :rows, None]
        of_query *= gamma
        of_weight = of_weight[:, :keys] * highest
        of_key = of_key[:, :keys, :dimensions] * (highest * (radius / 16384)) - far * of_weight[..., None]
        of_scale = None
        if wanted[3]:
            of_scale = ((of_query * near).sum((0, 1)) + (of_key * far).sum((0, 1))) / places.scale
        return (
            (of_query * places.scale).to(query.dtype) if wanted[0] else None,
            (of_key * places.scale).to(key.dtype) if wanted[1] else None,
            (of_value[:, :keys, :width] * (peak / 32768)).to(value.dtype) if wanted[2] else None,
            None if of_scale is None else of_scale.to(scale.dtype),
            of_weight if wanted[4] else None,
            None,
            None,
            None,
            None,
        )
