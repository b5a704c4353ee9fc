"""Gaussian pooling of a single value, the regression of Nadaraya and Watson, without waiting for the device.

L batch, N queries, M keys, D dimensions; u is the unit of the grid of `quire.kernels.halves`.

No score is above 0 (or the largest ln s), so weights are 2^s as they come, with no maximum to be found first,
and one instruction adds each to Σ p and one to Σ p v. Where float32's range does not do, because all keys are
more than ten widths away, or where u is too coarse, a second kernel takes differences q − k, and looks for
the maximum. Both sums are kept for each place of the tile and added up at the end: short, in a fixed order.

What must be computed: N·M exponentials. At 16 a clock on each of 132 multiprocessors at 1.98 GHz, 32,768² of
them take 0.26 ms; 6.7 instructions a pair (D = 16) at 128 lanes 0.22 ms; the products 0.19 ms at 740 TFLOP/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.halves import COARSE, PARTS, Extent, Places, figure, value_size
from quire.kernels.tuning import bucket, tuned

LEAST = 2.0**-70
"""A sum of weights below this has lost some of them."""

TILES = [
    ({"ROWS": 64, "COLUMNS": 64}, 4, 3),
    ({"ROWS": 64, "COLUMNS": 128}, 4, 3),
    ({"ROWS": 128, "COLUMNS": 64}, 8, 3),
    ({"ROWS": 64, "COLUMNS": 32}, 4, 2),  # what fits for the widest queries
]


@triton.jit
def _seen(s, row, column, limit, LIMIT: tl.constexpr, EXCLUDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores, −∞ where the query does not see the key; rows are keys."""
    if LIMIT:
        s = tl.where(row[:, None] < limit[None, :], s, float("-inf"))
    if EXCLUDE:
        s = tl.where(row[:, None] != column[None, :], s, float("-inf"))
    return s


@tuned(TILES, key=["size", "WIDTH", "WEIGHTED", "LIMIT", "EXCLUDE"])
@triton.jit(do_not_specialize=["size"])
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, half_x_ptr, half_y_ptr, rest_ptr, share_ptr, of_value_ptr, unit_ptr, figure_ptr,
    limit_ptr, out_ptr, total_ptr, rows, keys, parts, size,
    WEIGHTED: tl.constexpr, LIMIT: tl.constexpr, EXCLUDE: tl.constexpr, COARSE: tl.constexpr,
    LEAST: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (L, N) = Σ_m p v, and total (L, N) = log₂ Σ_m 2^s, of ROWS keys at a time and COLUMNS queries.

    `rows` and `keys` are padded; total is NaN where it has to be computed again.
    """
    tile = tl.program_id(0)
    down = tl.cdiv(rows, COLUMNS)
    batch = (tile // down).to(tl.int64)
    n = tile % down * COLUMNS + tl.arange(0, COLUMNS)
    k, m = tl.arange(0, 4 * WIDTH), tl.arange(0, ROWS)
    place = batch * rows + n
    # Loaded, so that the compiler sees that it is the same for all threads.
    used = tl.where(tl.load(unit_ptr) > COARSE, 0, keys)
    x = tl.load(x_ptr + place[:, None] * (4 * WIDTH) + k[None, :])
    half_x = tl.load(half_x_ptr + place)
    limit = n
    if LIMIT:
        limit = tl.load(limit_ptr + place)
    y_ptr += batch * keys * (4 * WIDTH)
    half_y_ptr += batch * keys
    share_ptr += batch * keys
    of_value_ptr += batch * keys
    every_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    every_out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, used, ROWS, num_stages=STAGES):
        y = tl.load(y_ptr + (first + m)[:, None] * (4 * WIDTH) + k[None, :])
        start = tl.load(half_y_ptr + first + m)[:, None] + half_x[None, :]
        s = _seen(tl.dot(y, tl.trans(x), start), first + m, n, limit, LIMIT, EXCLUDE)
        p = tl.exp2(s)
        every_total += p * tl.load(share_ptr + first + m)[:, None]
        every_out += p * tl.load(of_value_ptr + first + m)[:, None]
    total = tl.sum(every_total, 0)
    out = tl.sum(every_out, 0) * (value_size(figure_ptr, parts, PARTS) / tl.where(total == 0.0, 1.0, total))
    top = tl.load(rest_ptr + place)
    if WEIGHTED:
        top += 1.4426950408889634 * figure(figure_ptr, 3, parts, PARTS)
    lost = total < LEAST
    if LIMIT:
        lost = lost & (limit > 0)
    tl.store(out_ptr + place, out)
    tl.store(total_ptr + place, tl.where(lost, float("nan"), top + tl.log2(total)))


@triton.jit
def _apart(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, scale_ptr, weight_ptr, limit_ptr, out_ptr, total_ptr,
    rows, full, keys, width,
    WEIGHTED: tl.constexpr, LIMIT: tl.constexpr, EXCLUDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out and total where some total is not a number, from differences."""
    tile = tl.program_id(0)
    down = tl.cdiv(full, COLUMNS)
    batch = (tile // down).to(tl.int64)
    n = tile % down * COLUMNS + tl.arange(0, COLUMNS)
    place = batch * full + n
    given = tl.load(total_ptr + place, mask=n < rows, other=0.0)
    if tl.max((given != given).to(tl.int32), 0) > 0:
        limit = n
        if LIMIT:
            limit = tl.load(limit_ptr + place, mask=n < rows, other=0)
        query_ptr += batch * rows * width
        key_ptr += batch * keys * width
        value_ptr += batch * keys
        weight_ptr += batch * keys
        top = tl.full((COLUMNS,), float("-inf"), tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        out = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, keys, ROWS):
            m = first + tl.arange(0, ROWS)
            s = tl.zeros((ROWS, COLUMNS), tl.float32)
            for d in range(width):
                q = tl.load(query_ptr + n * width + d, mask=n < rows, other=0.0).to(tl.float32)
                k = tl.load(key_ptr + m * width + d, mask=m < keys, other=0.0).to(tl.float32)
                apart = (k[:, None] - q[None, :]) * tl.load(scale_ptr + d)
                s += apart * apart
            s *= -0.7213475204444817
            if WEIGHTED:
                s += 1.4426950408889634 * tl.load(weight_ptr + m, mask=m < keys, other=0.0)[:, None]
            s = tl.where((m < keys)[:, None], s, float("-inf"))
            s = _seen(s, m, n, limit, LIMIT, EXCLUDE)
            new = tl.maximum(top, tl.max(s, 0))
            # Queries that have seen no key yet: any finite number does.
            base = tl.where(new == float("-inf"), 0.0, new)
            fade = tl.exp2(top - base)
            p = tl.exp2(s - base[None, :])
            value = tl.load(value_ptr + m, mask=m < keys, other=0.0).to(tl.float32)
            total = total * fade + tl.sum(p, 0)
            out = out * fade + tl.sum(p * value[:, None], 0)
            top = new
        tl.store(out_ptr + place, out / tl.where(total == 0.0, 1.0, total), mask=n < rows)
        tl.store(total_ptr + place, top + tl.log2(total), mask=n < rows)


def pooled_alone(
    query: Tensor, key: Tensor, value: Tensor, scale: Tensor, weight: Tensor | None, limit: Tensor | None,
    exclude_self: bool, extent: Extent,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Σ_m p v (L, N, 1) and log₂ Σ_m 2^s (L, N), of inputs as `quire.kernels.gaussian` has them, V = 1."""
    places = Places(query, key, scale, weight, extent, fine=False, value=value)
    (batch, rows, width), keys = query.shape, key.shape[1]
    full, full_keys = places.query.shape[1], places.key.shape[1]
    out, total = query.new_empty(2, batch, full, dtype=torch.float32)
    figures = extent.figures
    shared = {"WEIGHTED": weight is not None, "LIMIT": limit is not None, "EXCLUDE": exclude_self}
    if limit is not None:
        limit = torch.nn.functional.pad(limit, (0, full - rows))
    _forward[lambda tile: (batch * -(-full // tile["COLUMNS"]),)](
        places.query, places.key, places.half_query, places.half_key, places.rest_query, *places.shares,
        places.unit, figures, total if limit is None else limit, out, total,
        full, full_keys, figures.shape[1], bucket(batch, rows, keys),
        COARSE=COARSE, LEAST=LEAST, PARTS=PARTS, WIDTH=places.width, STAGES=3, **shared,
    )  # fmt: skip
    _apart[(batch * (full // 64),)](
        query.contiguous(), key.contiguous(), value.contiguous(), scale, out if weight is None else weight,
        total if limit is None else limit, out, total, rows, full, keys, width,
        ROWS=64, COLUMNS=64, num_warps=4, **shared,
    )  # fmt: skip
    return out[:, :rows, None], total[:, :rows]
