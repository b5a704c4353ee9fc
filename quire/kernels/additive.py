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

What must be computed: N·M·h reciprocals forward, and twice that backward (∂q, ∂k; three times where scores do
not fit into one block and are computed again). At 16 special functions a clock on each of 132 multiprocessors
at 1.98 GHz, 8·1024·1024·128 of them take 0.26 ms, or 0.13 ms where two share an instruction. With 4
instructions each (as compiled) at 128 lanes, scores take 0.13 ms, and ∂k and ∂q with 5.8 and 6.6 take 0.19 ms
and 0.22 ms: 0.54 ms forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.once import differentiable_once
from quire.kernels.rows import softmax_, through_
from quire.kernels.tuning import bucket, has_ptx, reciprocal, round_up, tuned

Limit = Callable[[Tensor, slice], None]
"""Lays masks over the scores (L, n, M) of some queries, in place: −∞ forbids a key."""

BLOCK = 1 << 23
"""Scores held at once; the backward holds twice as many. No more than this is kept for it."""
STEP = 128
"""Queries and keys are padded to a multiple of this, the largest side of a tile."""
SIDE = 64
"""The largest side of a tile of slopes."""
PARTS = 256
"""Programs that look for the largest input."""
HIGHEST, LOWEST = 21.0, -40.0
"""(1 + e^{2·21})² and e^{−2·40} are within float32's range."""

SCORE_TILES = [
    ({"ROWS": 32, "COLUMNS": 128}, 4, 1),
    ({"ROWS": 16, "COLUMNS": 128}, 4, 1),
    ({"ROWS": 32, "COLUMNS": 64}, 2, 1),
]
SLOPE_TILES = [
    ({"ROWS": 32, "WIDTH": 64}, 4, 1),
    ({"ROWS": 64, "WIDTH": 64}, 4, 1),
    ({"ROWS": 32, "WIDTH": 32}, 4, 1),
]
# A row of a tile must be shorter than the tile has threads, or it would pass through shared memory each time.


@triton.jit
def _extent(x_ptr, numbers, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """max x and max −x of this program's share; what is not a number counts as infinite."""
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    low = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(tl.program_id(0) * BLOCK, numbers, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < numbers, other=0.0)
        broken = x != x
        high = tl.maximum(high, tl.where(i < numbers, tl.where(broken, float("inf"), x), float("-inf")))
        low = tl.maximum(low, tl.where(i < numbers, tl.where(broken, float("inf"), -x), float("-inf")))
    return tl.max(high, 0), tl.max(low, 0)


@triton.jit
def _bound(query_ptr, key_ptr, bounds_ptr, queries, keys, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """bounds (3, programs) ← max q, max k, and max −x of both."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    high_query, low_query = _extent(query_ptr, queries, BLOCK)
    high_key, low_key = _extent(key_ptr, keys, BLOCK)
    tl.store(bounds_ptr + part, high_query)
    tl.store(bounds_ptr + parts + part, high_key)
    tl.store(bounds_ptr + 2 * parts + part, tl.maximum(low_query, low_key))


@triton.jit
def _scale(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, bounds_ptr, out_query_ptr, out_key_ptr, turned_query_ptr, turned_key_ptr, flag_ptr,
    queries, keys, hidden, full_queries, full_keys, full_hidden, parts,
    HIGHEST: tl.constexpr, LOWEST: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """e^{2x}, or x itself where that could overflow, padded by zeros; and the same turned."""
    batch = tl.program_id(2).to(tl.int64)
    tile = tl.program_id(0)
    x_ptr, out_ptr, turned_ptr = query_ptr, out_query_ptr, turned_query_ptr
    rows, full_rows = queries, full_queries
    if tile >= full_queries // SIZE:
        tile -= full_queries // SIZE
        x_ptr, out_ptr, turned_ptr, rows, full_rows = key_ptr, out_key_ptr, turned_key_ptr, keys, full_keys
    n = tile * SIZE + tl.arange(0, SIZE)
    h = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    part = tl.arange(0, PARTS)
    there = part < parts
    high_query = tl.max(tl.load(bounds_ptr + part, mask=there, other=float("-inf")), 0)
    high_key = tl.max(tl.load(bounds_ptr + parts + part, mask=there, other=float("-inf")), 0)
    low = tl.max(tl.load(bounds_ptr + 2 * parts + part, mask=there, other=float("-inf")), 0)
    fits = (high_query + high_key <= HIGHEST) & (low <= -LOWEST)
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


@tuned(SLOPE_TILES, key=["size", "SECOND", "EVEN"])
@triton.jit(do_not_specialize=["size"])
def _slope(  # type: ignore[no-untyped-def]
    own_ptr, other_ptr, slope_ptr, vector_ptr, wide_ptr, out_ptr, second_ptr,
    rows, others, hidden, width, own_batch, other_batch, out_batch, slope_batch, slope_row, slope_other, size,
    SECOND: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[i, h] = 4w Σ_j ∂s[i, j]·(r − r²), and second[i / 16, h] = −2 Σ_ij ∂s[i, j]·r where it is asked for.

    Rows i are queries and j keys, or the other way round; own (L, rows, h) and other (L, others, h), padded.
    EVEN: whole tiles and an even number of others, so that nothing needs a mask.
    """
    across = tl.cdiv(hidden, WIDTH)
    down = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    batch = (tile // (across * down)).to(tl.int64)
    block = tile // across % down
    i = block * ROWS + tl.arange(0, ROWS)
    h = tile % across * WIDTH + tl.arange(0, WIDTH)
    inside = (i < rows)[:, None] & (h < hidden)[None, :]
    own = tl.load(own_ptr + batch * own_batch + i[:, None] * hidden + h[None, :], mask=inside, other=0.0)
    other_ptr += batch * other_batch + h
    slope_ptr += batch * slope_batch + i * slope_row
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    second = tl.zeros((ROWS, WIDTH), tl.float32)
    if tl.load(wide_ptr) == 0:
        for j in tl.range(0, others, 2, loop_unroll_factor=2):
            if EVEN:
                d = tl.load(slope_ptr + j * slope_other)[:, None]
                e = tl.load(slope_ptr + (j + 1) * slope_other)[:, None]
                b = tl.load(other_ptr + j * hidden)[None, :]
                c = tl.load(other_ptr + (j + 1) * hidden)[None, :]
            else:
                d = tl.load(slope_ptr + j * slope_other, mask=i < rows, other=0.0)[:, None]
                more = (i < rows) & (j + 1 < others)
                e = tl.load(slope_ptr + (j + 1) * slope_other, mask=more, other=0.0)[:, None]
                b = tl.load(other_ptr + j * hidden, mask=h < hidden, other=0.0)[None, :]
                c = tl.load(other_ptr + (j + 1) * hidden, mask=h < hidden, other=0.0)[None, :]
            x = 1.0 + own * b
            y = 1.0 + own * c
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
    there = h < width
    vector = tl.load(vector_ptr + h, mask=there, other=0.0)
    place = batch * out_batch + i[:, None] * width + h[None, :]
    tl.store(out_ptr + place, out * (4.0 * vector)[None, :], mask=(i < rows)[:, None] & there[None, :])
    if SECOND:
        parts = tl.sum(tl.reshape(second, (ROWS // 16, 16, WIDTH)), 1)
        part = block * (ROWS // 16) + tl.arange(0, ROWS // 16)
        count = tl.cdiv(rows, 16)
        second_ptr += (batch * count + part[:, None]) * width + h[None, :]
        tl.store(second_ptr, -2.0 * parts, mask=(part < count)[:, None] & there[None, :])


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
        batch, rows, width = query.shape
        self.keys = key.shape[-2]
        self.hidden = round_up(width, 8)
        more = self.hidden - width
        self.vector = torch.nn.functional.pad(vector, (0, more)) if more else vector.contiguous()
        self.ptx = has_ptx(query)
        parts = min(PARTS, -(-max(query.numel(), key.numel()) // 4096))
        bounds = query.new_empty(3, parts)
        _bound[(parts,)](query, key, bounds, query.numel(), key.numel(), BLOCK=4096)
        self.flag = torch.empty((), dtype=torch.int32, device=query.device)
        full, full_keys = round_up(rows, STEP), round_up(self.keys, STEP)
        self.query, self.key = (query.new_empty(batch, n, self.hidden) for n in (full, full_keys))
        across_query, across_key = (query.new_empty(batch, self.hidden, n) for n in (full, full_keys))
        self.across = [across_query, across_key]
        _scale[((full + full_keys) // 32, -(-self.hidden // 32), batch)](
            query, key, bounds, self.query, self.key, *self.across, self.flag,
            rows, self.keys, width, full, full_keys, self.hidden, parts,
            HIGHEST=HIGHEST, LOWEST=LOWEST, PARTS=1 << (parts - 1).bit_length(), SIZE=32,
        )  # fmt: skip
        size = max(STEP, BLOCK // (batch * self.keys) // STEP * STEP)
        self.blocks = [slice(first, min(first + size, rows)) for first in range(0, rows, size)]

    def weights(self, some: slice, limit: Limit | None) -> Tensor:
        """p (L, n, M)"""
        query, key = self.across[0][..., some.start :], self.across[1]
        batch, rows, columns = len(query), some.stop - some.start, self.keys
        out = query.new_empty(batch, rows, columns)

        def grid(tile: dict[str, int]) -> tuple[int]:
            return (-(-rows // tile["ROWS"]) * -(-columns // tile["COLUMNS"]) * batch,)

        _score[grid](
            query, key, self.vector, self.flag, out, rows, columns, self.hidden,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            bucket(batch, rows, columns, self.hidden), PTX=self.ptx,
        )  # fmt: skip
        if limit is not None:
            limit(out, some)
        return softmax_(out)

    def slopes(
        self, own: Tensor, other: Tensor, slope: Tensor, out: Tensor, *, second: bool = False
    ) -> Tensor | None:
        """out (L, rows, h) ← 4w Σ_j ∂s (r − r²) of ∂s (L, rows, others); −2 Σ_ij ∂s r (h,) if asked for."""
        batch, rows, others = slope.shape
        width = out.shape[-1]
        more = own.new_empty(batch, -(-rows // 16), width) if second else out
        even = rows % SIDE == 0 and others % 2 == 0 and self.hidden % SIDE == 0

        def grid(tile: dict[str, int]) -> tuple[int]:
            return (-(-rows // tile["ROWS"]) * -(-self.hidden // tile["WIDTH"]) * batch,)

        _slope[grid](
            own, other, slope, self.vector, self.flag, out, more, rows, others, self.hidden, width,
            own.stride(0), other.stride(0), out.stride(0), *slope.stride(),
            bucket(batch, rows, others, self.hidden), SECOND=second, EVEN=even, PTX=self.ptx,
        )  # fmt: skip
        return more.sum((0, 1)) if second else None


class _Additive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, vector: Tensor, limit: Limit | None
    ) -> Tensor:
        inputs = _Inputs(query, key, vector)
        ctx.limit, ctx.inputs = limit, inputs
        kept: Tensor | None = None
        with torch.autocast(query.device.type, enabled=False):
            if len(inputs.blocks) == 1:
                # A block of weights is kept for the backward: half of what that holds anyway.
                kept = inputs.weights(inputs.blocks[0], limit)
                inputs.across = []
                pooled = kept @ value
            else:
                pooled = value.new_empty(*query.shape[:-1], value.shape[-1])
                for some in inputs.blocks:
                    pooled[:, some] = inputs.weights(some, limit) @ value
        ctx.save_for_backward(value, kept)
        ctx.shapes = query.shape, key.shape
        return pooled

    @staticmethod
    @differentiable_once("additive attention by its kernel", "attention_pooling, which holds all scores")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, kept = ctx.saved_tensors
        inputs, (query_shape, key_shape) = ctx.inputs, ctx.shapes
        of_query, of_key, of_value, of_vector = ctx.needs_input_grad[:4]
        found: list[Tensor | None] = [None] * 4
        if of_query or of_vector:
            found[0] = value.new_empty(query_shape)

        def add(place: int, more: Tensor | None) -> None:
            before = found[place]
            found[place] = more if before is None or more is None else before.add_(more)

        with torch.autocast(gradient.device.type, enabled=False):
            for some in inputs.blocks:
                p = inputs.weights(some, ctx.limit) if kept is None else kept
                if of_value:
                    add(2, p.mT @ gradient[:, some])
                slope = gradient[:, some] @ value.mT
                through_(p, slope)
                del p
                rows = inputs.query[:, some.start :]
                if (out := found[0]) is not None:
                    add(3, inputs.slopes(rows, inputs.key, slope, out[:, some], second=of_vector))
                if of_key:
                    out = value.new_empty(key_shape)
                    inputs.slopes(inputs.key, rows, slope.mT, out)
                    add(1, out)
        wanted = zip(found, ctx.needs_input_grad, strict=False)
        return *(grad if needed else None for grad, needed in wanted), None
