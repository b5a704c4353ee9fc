"""Additive attention, Σ_m softmax_m(w·tanh(q + k_m)) v_m, without the N·M·h numbers tanh(q + k).

L batch, N queries, M keys, h hidden width, V width of values; a, b stand for a query and a key.

tanh(q + k) = 1 − 2r with r = 1/(1 + e^{2q}·e^{2k}), so exponentials are taken of the N·h + M·h inputs only,
and each pair costs a reciprocal. Two reciprocals share one instruction, as 1/x = y·(1/xy), 1/y = x·(1/xy).
The 1 is common to all keys and drops out of the softmax. Where e^{2(q+k)} could overflow (max q + max k > 21,
or an input below −40; decided on the device), the kernels take e^{2(q+k)} of each pair instead. Either way r
is right to 4·10⁻⁷ of its size or better, and tanh to 10⁻⁶.

With g the gradient of the result, p = softmax(s), ∂s = p ⊙ (g vᵀ − Σ_m p ⊙ g vᵀ) and 1 − tanh² = 4(r − r²):

    ∂q = 4w Σ_m ∂s (r − r²),   ∂k = 4w Σ_n ∂s (r − r²),   ∂w = −2 Σ_nm ∂s r     (Σ_m ∂s = 0)

Scores are held for a block of queries at a time (`BLOCK` numbers), so that products with values are matrix
products and any mask can be laid over them. Sums have a fixed order: no atomics, the same bits each time.

What must be computed: N·M·h reciprocals forward, and three times that backward (scores again, ∂q, ∂k). At 16
special functions a clock on each of 132 multiprocessors at 1.98 GHz, 8·1024·1024·128 of them take 0.26 ms, or
0.13 ms where two share an instruction. With 4 instructions each (as compiled) at 128 lanes, scores take
0.13 ms, and ∂k and ∂q with 6.6 and 7.5 take 0.21 ms and 0.24 ms: 0.7 ms forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from quire.kernels.tuning import bucket, has_ptx, reciprocal, round_up, tuned

Limit = Callable[[Tensor, slice], None]
"""Lays masks over the scores (L, n, M) of some queries, in place: −∞ forbids a key."""

BLOCK = 1 << 23
"""Scores held at once; the backward holds twice as many."""
STEP = 128
"""Queries and keys are padded to a multiple of this, the largest side of a tile."""
HIGHEST, LOWEST = 21.0, -40.0
"""(1 + e^{2·21})² and e^{−2·40} are within float32's range."""

SCORE_TILES = [
    ({"ROWS": 32, "COLUMNS": 128}, 4, 1),
    ({"ROWS": 16, "COLUMNS": 128}, 4, 1),
    ({"ROWS": 32, "COLUMNS": 64}, 2, 1),
    ({"ROWS": 32, "COLUMNS": 64}, 4, 1),
]
SLOPE_TILES = [
    ({"ROWS": 32, "WIDTH": 64}, 4, 1),
    ({"ROWS": 16, "WIDTH": 64}, 4, 1),
    ({"ROWS": 16, "WIDTH": 128}, 8, 1),
    ({"ROWS": 32, "WIDTH": 128}, 8, 1),
    ({"ROWS": 32, "WIDTH": 32}, 4, 1),
]
# A row of a tile must be shorter than the tile has threads, or it would pass through shared memory each time.


@triton.jit
def _bound(x_ptr, bounds_ptr, place, numbers, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """bounds[place] ← max x, bounds[2] ← max −x of all that call; what is not a number counts as infinite."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < numbers, other=0.0)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    high = tl.max(tl.where(i < numbers, x, float("-inf")), 0)
    low = tl.max(tl.where(i < numbers, -x, float("-inf")), 0)
    tl.atomic_max(bounds_ptr + place, tl.where(broken, float("inf"), high))
    tl.atomic_max(bounds_ptr + 2, tl.where(broken, float("inf"), low))


@triton.jit
def _scale(  # type: ignore[no-untyped-def]
    x_ptr, bounds_ptr, out_ptr, turned_ptr, flag_ptr, rows, hidden, full_rows, full_hidden,
    HIGHEST: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """e^{2x}, or x itself where that could overflow, padded by zeros; and the same turned."""
    batch = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    fits = (tl.load(bounds_ptr) + tl.load(bounds_ptr + 1) <= HIGHEST) & (tl.load(bounds_ptr + 2) <= -LOWEST)
    inside = (n < rows)[:, None] & (h < hidden)[None, :]
    x = tl.load(x_ptr + (batch * rows + n[:, None]) * hidden + h[None, :], mask=inside, other=0.0)
    # In float64: the fast exponential would be wrong by a millionth where x is large.
    scaled = tl.where(fits, tl.exp(2.0 * x.to(tl.float64)).to(tl.float32), x)
    scaled = tl.where(inside, scaled, 0.0)
    here = h < full_hidden
    out_ptr += (batch * full_rows + n[:, None]) * full_hidden + h[None, :]
    turned_ptr += (batch * full_hidden + h[:, None]) * full_rows + n[None, :]
    tl.store(out_ptr, scaled, mask=here[None, :])
    tl.store(turned_ptr, tl.trans(scaled), mask=here[:, None])
    tl.store(flag_ptr, tl.where(fits, 0, 1))


@tuned(SCORE_TILES, key=["size"])
@triton.jit(do_not_specialize=["size"])
def _score(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, vector_ptr, wide_ptr, out_ptr,
    rows, columns, hidden, a_batch, a_hidden, b_batch, b_hidden, size,
    PTX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[n, m] = −2 Σ_h w[h]·r, of a (L, h, N) and b (L, h, M), padded."""
    across = tl.cdiv(columns, COLUMNS)
    down = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    batch = (tile // (across * down)).to(tl.int64)
    n = tile // across % down * ROWS + tl.arange(0, ROWS)
    m = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    a_ptr += batch * a_batch + n
    b_ptr += batch * b_batch + m
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if tl.load(wide_ptr) == 0:
        for h in tl.range(0, hidden, 2, loop_unroll_factor=4):
            v = tl.load(vector_ptr + h)
            w = tl.load(vector_ptr + h + 1)
            x = 1.0 + tl.load(a_ptr + h * a_hidden)[:, None] * tl.load(b_ptr + h * b_hidden)[None, :]
            y = 1.0 + (
                tl.load(a_ptr + (h + 1) * a_hidden)[:, None] * tl.load(b_ptr + (h + 1) * b_hidden)[None, :]
            )
            total += (v * y + w * x) * reciprocal(x * y, PTX)
    else:
        for h in range(0, hidden):
            x = tl.load(a_ptr + h * a_hidden)[:, None] + tl.load(b_ptr + h * b_hidden)[None, :]
            total += tl.load(vector_ptr + h) * reciprocal(1.0 + tl.exp2(x * 2.8853900817779268), PTX)
    place = (batch * rows + n[:, None]) * columns + m[None, :]
    tl.store(out_ptr + place, -2.0 * total, mask=(n < rows)[:, None] & (m < columns)[None, :])


@tuned(SLOPE_TILES, key=["size", "SECOND"])
@triton.jit(do_not_specialize=["size"])
def _slope(  # type: ignore[no-untyped-def]
    own_ptr, other_ptr, slope_ptr, wide_ptr, out_ptr, second_ptr,
    rows, others, hidden, own_batch, other_batch, out_batch, slope_batch, slope_row, slope_other, size,
    SECOND: tl.constexpr, PTX: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[i, h] = Σ_j ∂s[i, j]·(r − r²), and second[i, h] = Σ_j ∂s[i, j]·r where it is asked for.

    Rows i are queries and j keys, or the other way round; own (L, rows, h) and other (L, others, h), padded.
    """
    across = tl.cdiv(hidden, WIDTH)
    down = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    batch = (tile // (across * down)).to(tl.int64)
    i = tile // across % down * ROWS + tl.arange(0, ROWS)
    h = tile % across * WIDTH + tl.arange(0, WIDTH)
    inside = (i < rows)[:, None] & (h < hidden)[None, :]
    own = tl.load(own_ptr + batch * own_batch + i[:, None] * hidden + h[None, :], mask=inside, other=0.0)
    other_ptr += batch * other_batch + h
    slope_ptr += batch * slope_batch + i * slope_row
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    second = tl.zeros((ROWS, WIDTH), tl.float32)
    if tl.load(wide_ptr) == 0:
        for j in tl.range(0, others, 2, loop_unroll_factor=2):
            d = tl.load(slope_ptr + j * slope_other, mask=i < rows, other=0.0)[:, None]
            e = tl.load(slope_ptr + (j + 1) * slope_other, mask=(i < rows) & (j + 1 < others), other=0.0)[
                :, None
            ]
            x = 1.0 + own * tl.load(other_ptr + j * hidden, mask=h < hidden, other=0.0)[None, :]
            y = 1.0 + own * tl.load(other_ptr + (j + 1) * hidden, mask=h < hidden, other=0.0)[None, :]
            both = reciprocal(x * y, PTX)
            r = both * y
            s = both * x
            out += d * (r - r * r)
            out += e * (s - s * s)
            if SECOND:
                second += d * r
                second += e * s
    else:
        for j in range(0, others):
            d = tl.load(slope_ptr + j * slope_other, mask=i < rows, other=0.0)[:, None]
            x = own + tl.load(other_ptr + j * hidden, mask=h < hidden, other=0.0)[None, :]
            r = reciprocal(1.0 + tl.exp2(x * 2.8853900817779268), PTX)
            out += d * (r - r * r)
            if SECOND:
                second += d * r
    place = batch * out_batch + i[:, None] * hidden + h[None, :]
    tl.store(out_ptr + place, out, mask=inside)
    if SECOND:
        tl.store(second_ptr + place, second, mask=inside)


@triton.jit
def _softmax(score_ptr, slope_ptr, columns, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row: s → p in place; backward also g·v → ∂s = p ⊙ (g·v − Σ p ⊙ g·v). No key allowed: zeros."""
    row = tl.program_id(0).to(tl.int64)
    score_ptr += row * columns
    slope_ptr += row * columns
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        m = first + lane
        s = tl.load(score_ptr + m, mask=m < columns, other=float("-inf"))
        new = tl.maximum(top, s, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(new == float("-inf"), 0.0, new)
        fade = tl.exp(top - base)
        p = tl.exp(s - base)
        weight = weight * fade + p
        if BACKWARD:
            mean = mean * fade + p * tl.load(slope_ptr + m, mask=m < columns, other=0.0)
        top = new
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    fade = tl.exp(top - base)
    total = tl.sum(weight * fade, 0)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    average = tl.sum(mean * fade, 0) * share
    for first in range(0, columns, BLOCK):
        m = first + lane
        p = tl.exp(tl.load(score_ptr + m, mask=m < columns, other=float("-inf")) - base) * share
        tl.store(score_ptr + m, p, mask=m < columns)
        if BACKWARD:
            slope = tl.load(slope_ptr + m, mask=m < columns, other=0.0)
            tl.store(slope_ptr + m, p * (slope - average), mask=m < columns)


def additive_pooling(
    query: Tensor, key: Tensor, value: Tensor, vector: Tensor, limit: Limit | None = None
) -> Tensor:
    """Σ_m softmax_m(w·tanh(q + k_m)) v_m: (L, N, h), (L, M, h), (L, M, V), (h,) → (L, N, V) in float32.

    No size may be 0. Gradients go to all four; second derivatives are not provided.
    """
    with torch.cuda.device_of(query):
        pooled: Tensor = _Additive.apply(query.float(), key.float(), value.float(), vector.float(), limit)
    return pooled


class _Inputs:
    """Queries and keys as the kernels read them, and the scores of some queries."""

    def __init__(self, query: Tensor, key: Tensor, vector: Tensor) -> None:
        query, key = query.contiguous(), key.contiguous()
        self.hidden = round_up(query.shape[-1], 8)
        bounds = torch.full((3,), -torch.inf, device=query.device)
        for place, tensor in enumerate((query, key)):
            _bound[(triton.cdiv(tensor.numel(), 4096),)](tensor, bounds, place, tensor.numel(), BLOCK=4096)
        self.flag = torch.empty((), dtype=torch.int32, device=query.device)
        (self.query, across_query), (self.key, across_key) = (self._scaled(t, bounds) for t in (query, key))
        self.across = [across_query, across_key]
        self.vector = torch.nn.functional.pad(vector, (0, self.hidden - len(vector)))
        self.keys = key.shape[-2]
        self.rows = max(STEP, BLOCK // (len(query) * self.keys) // STEP * STEP)
        self.blocks = [
            slice(first, min(first + self.rows, query.shape[-2]))
            for first in range(0, query.shape[-2], self.rows)
        ]
        self.ptx = has_ptx(query)

    def _scaled(self, tensor: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """(L, rows padded, h padded), and turned."""
        batch, rows, hidden = tensor.shape
        full = round_up(rows, STEP)
        out = tensor.new_empty(batch, full, self.hidden)
        turned = tensor.new_empty(batch, self.hidden, full)
        _scale[(full // 32, triton.cdiv(self.hidden, 32), batch)](
            tensor, bounds, out, turned, self.flag, rows, hidden, full, self.hidden,
            HIGHEST=HIGHEST, LOWEST=LOWEST, ROWS=32, WIDTH=32,
        )  # fmt: skip
        return out, turned

    def scores(self, some: slice, limit: Limit | None) -> Tensor:
        """(L, n, M)"""
        query, key = self.across[0][..., some.start :], self.across[1]
        rows, columns = some.stop - some.start, self.keys
        out = query.new_empty(len(query), rows, columns)

        def grid(tile: dict[str, int]) -> tuple[int]:
            return (triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(columns, tile["COLUMNS"]) * len(query),)

        _score[grid](
            query, key, self.vector, self.flag, out, rows, columns, self.hidden,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            bucket(len(query), rows, columns, self.hidden), PTX=self.ptx,
        )  # fmt: skip
        if limit is not None:
            limit(out, some)
        return out

    def slopes(self, own: Tensor, other: Tensor, slope: Tensor, second: bool) -> tuple[Tensor, Tensor]:
        """Σ_j ∂s (r − r²) and, if asked for, Σ_j ∂s r, each (L, rows, h padded), of ∂s (L, rows, others)."""
        batch, rows, others = slope.shape
        out = own.new_empty(batch, rows, self.hidden)
        more = torch.empty_like(out) if second else out

        def grid(tile: dict[str, int]) -> tuple[int]:
            return (triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(self.hidden, tile["WIDTH"]) * batch,)

        _slope[grid](
            own, other, slope, self.flag, out, more, rows, others, self.hidden,
            own.stride(0), other.stride(0), out.stride(0), *slope.stride(),
            bucket(batch, rows, others, self.hidden), SECOND=second, PTX=self.ptx,
        )  # fmt: skip
        return out, more


class _Additive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, vector: Tensor, limit: Limit | None
    ) -> Tensor:
        inputs = _Inputs(query, key, vector)
        ctx.save_for_backward(query, key, value, vector)
        # What the kernels read is four times N·h numbers at most, and takes twenty launches to make.
        ctx.limit, ctx.inputs = limit, inputs
        pooled = value.new_empty(*query.shape[:-1], value.shape[-1])
        with torch.autocast(query.device.type, enabled=False):
            for some in inputs.blocks:
                p = inputs.scores(some, limit)
                _rows(p)
                pooled[:, some] = p @ value
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, vector = ctx.saved_tensors
        inputs = ctx.inputs
        hidden = query.shape[-1]
        of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        of_key = query.new_zeros(len(key), key.shape[-2], inputs.hidden)
        of_value = torch.zeros_like(value, memory_format=torch.contiguous_format)
        of_vector = torch.zeros_like(vector)
        with torch.autocast(query.device.type, enabled=False):
            for some in inputs.blocks:
                slope = gradient[:, some] @ value.mT
                p = inputs.scores(some, ctx.limit)
                _rows(p, slope)
                of_value += p.mT @ gradient[:, some]
                del p
                rows = inputs.query[:, some.start :]
                out, second = inputs.slopes(rows, inputs.key, slope, ctx.needs_input_grad[3])
                of_query[:, some] = out[..., :hidden] * (4 * vector)
                if ctx.needs_input_grad[3]:
                    of_vector -= 2 * second[..., :hidden].sum((0, 1))
                if ctx.needs_input_grad[1]:
                    of_key += inputs.slopes(inputs.key, rows, slope.mT, False)[0]
        of_key = of_key[..., :hidden] * (4 * vector)
        found = (of_query, of_key, of_value, of_vector)
        asked = zip(found, ctx.needs_input_grad, strict=False)
        return *(grad if needed else None for grad, needed in asked), None


def _rows(score: Tensor, slope: Tensor | None = None) -> None:
    columns = score.shape[-1]
    _softmax[(score.shape[:-1].numel(),)](
        score, score if slope is None else slope, columns, BACKWARD=slope is not None,
        BLOCK=min(4096, max(32, triton.next_power_of_2(columns))), num_warps=8 if columns > 2048 else 4,
    )  # fmt: skip
