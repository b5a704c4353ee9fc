"""Numbers in two pieces of half precision, so that tensor cores multiply them at float32's accuracy.

L batch, n rows, w columns, padded to W; rows are padded to a multiple of `STEP`.

x = x₁ + x₂ with x₁ = half(x), x₂ = half(x − x₁) keeps 22 bits. Products of such pairs are products of widths
2W or 4W: (x₁, x₁, x₂, x₂)·(y₁, y₂, y₁, y₂) = (x₁ + x₂)(y₁ + y₂).

Coordinates are split on a common grid instead, into a whole number of units u = R/2048 and a rest, where R is
the largest norm. Products of whole numbers then add up to less than 2²², which float32 holds exactly. The
rest is rounded to 2⁻¹³u; where R is large (`COARSE`), what it lacks is a third piece.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.tuning import round_up

STEP = 128
"""Rows are padded to a multiple of this, the largest side of a tile."""
ROWS = 32
WHOLE = 2048.0
"""Half precision has all whole numbers up to here."""
LOG2E = math.log2(math.e)
COARSE = 12.0
"""The largest R at which two pieces do: 12·2⁻²⁴ is an error of 10⁻⁶ in the weight of a neighbour."""


@triton.jit
def _scaled(x_ptr, centre_ptr, scale_ptr, batch, n, d, rows, width):  # type: ignore[no-untyped-def]
    """(x − centre)·scale in float64, and 0 outside."""
    inside = (n < rows)[:, None] & (d < width)[None, :]
    x = tl.load(x_ptr + (batch * rows + n[:, None]) * width + d[None, :], mask=inside, other=0.0)
    centre = tl.load(centre_ptr + batch * width + d, mask=d < width, other=0.0).to(tl.float64)
    scale = tl.load(scale_ptr + d, mask=d < width, other=0.0).to(tl.float64)
    return tl.where(inside, (x.to(tl.float64) - centre[None, :]) * scale[None, :], 0.0)


@triton.jit
def _measure(  # type: ignore[no-untyped-def]
    x_ptr, centre_ptr, scale_ptr, largest_ptr, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """largest ← max(largest, ‖(x − centre)·scale‖²) as the bits of a float, which sort like whole numbers."""
    tile = tl.program_id(0)
    batch = (tile // tl.cdiv(rows, ROWS)).to(tl.int64)
    n = tile % tl.cdiv(rows, ROWS) * ROWS + tl.arange(0, ROWS)
    y = _scaled(x_ptr, centre_ptr, scale_ptr, batch, n, tl.arange(0, WIDTH), rows, width)
    norm = tl.sum(y * y, 1).to(tl.float32)
    # NaN counts as infinite.
    norm = tl.max(tl.where(norm >= 0.0, norm, float("inf")), 0)
    tl.atomic_max(largest_ptr, norm.to(tl.int32, bitcast=True))


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    x_ptr, centre_ptr, scale_ptr, weight_ptr, out_ptr, fine_ptr, half_ptr, rest_ptr,
    rows, padded_rows, width, factor, square,
    KEYS: tl.constexpr, WEIGHTED: tl.constexpr, FINE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(a, a, a', a') of queries or (b, b', b, b') of keys; −½‖a‖²; for keys what −½‖k‖² + ln s lacks then.

    FINE: (a, a', a', a) and (a, a''), or (b', b, b', b'') and (b, b).
    """
    tile = tl.program_id(0)
    batch = (tile // (padded_rows // ROWS)).to(tl.int64)
    n = tile % (padded_rows // ROWS) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    y = _scaled(x_ptr, centre_ptr, scale_ptr, batch, n, d, rows, width) * factor
    whole = tl.floor(y + 0.5)
    rest = (y - whole).to(tl.float32).to(tl.float16)
    low = rest.to(tl.float64)
    place = batch * padded_rows + n
    out_ptr += place[:, None] * (4 * WIDTH) + d[None, :]
    high = whole.to(tl.float32).to(tl.float16)
    if FINE:
        least = (y - whole - low).to(tl.float32).to(tl.float16)
        low += least.to(tl.float64)
        fine_ptr += place[:, None] * (2 * WIDTH) + d[None, :]
        tl.store(out_ptr, rest if KEYS else high)
        tl.store(out_ptr + WIDTH, high if KEYS else rest)
        tl.store(out_ptr + 2 * WIDTH, rest)
        tl.store(out_ptr + 3 * WIDTH, least if KEYS else high)
        tl.store(fine_ptr, high)
        tl.store(fine_ptr + WIDTH, high if KEYS else least)
    else:
        tl.store(out_ptr, high)
        tl.store(out_ptr + WIDTH, rest if KEYS else high)
        tl.store(out_ptr + 2 * WIDTH, high if KEYS else rest)
        tl.store(out_ptr + 3 * WIDTH, rest)
    tl.store(half_ptr + place, (-0.5 * tl.sum(whole * whole, 1)).to(tl.float32))
    if KEYS:
        lacking = -square * tl.sum((whole + 0.5 * low) * low, 1).to(tl.float32)
        if WEIGHTED:
            lacking += 1.4426950408889634 * tl.load(weight_ptr + batch * rows + n, mask=n < rows, other=0.0)
        tl.store(rest_ptr + place, tl.where(n < rows, lacking, float("-inf")))


@triton.jit
def _halve(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, rows, padded_rows, width, factor,
    COUNTED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(x₁, x₂) of x·factor. COUNTED: column `width` is ones."""
    tile = tl.program_id(0)
    batch = (tile // (padded_rows // ROWS)).to(tl.int64)
    n = tile % (padded_rows // ROWS) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    inside = (n < rows)[:, None] & (d < width)[None, :]
    x = tl.load(x_ptr + (batch * rows + n[:, None]) * width + d[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32) * factor
    if COUNTED:
        x = tl.where((d == width)[None, :], 1.0, x)
    high = x.to(tl.float16)
    out_ptr += (batch * padded_rows + n[:, None]) * (2 * WIDTH) + d[None, :]
    tl.store(out_ptr, high)
    tl.store(out_ptr + WIDTH, (x - high.to(tl.float32)).to(tl.float16))


@triton.jit
def score(  # type: ignore[no-untyped-def]
    x, y, fine_x, least_x, fine_y_ptr, at_fine, start, WIDTH: tl.constexpr, FINE: tl.constexpr
):
    """start + x·y. The product of the whole numbers comes first: it cancels `start`, and no digit is lost."""
    if FINE:
        start = tl.dot(fine_x, tl.trans(tl.load(fine_y_ptr + at_fine)), start)
        start = tl.dot(least_x, tl.trans(tl.load(fine_y_ptr + WIDTH + at_fine)), start)
    return tl.dot(x, tl.trans(y), start)


@triton.jit
def product(weight, factor, one):  # type: ignore[no-untyped-def]
    """weight·factor, with the weights split in two.

    Tensor cores round sums towards zero, so that a long one must not be left to them: it is added up by
    ordinary arithmetic. `one` is 1, and unknown to the compiler, which would make one sum of all products.
    """
    high = weight.to(tl.float16)
    low = (weight - high.to(tl.float32)).to(tl.float16)
    return one * tl.dot(low, factor, tl.dot(high, factor))


@triton.jit
def joined(pair, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """x₁ + x₂ of (x₁, x₂)."""
    return tl.sum(tl.reshape(pair, (ROWS, 2, WIDTH)), 1)


class Plan(NamedTuple):
    """Where coordinates are taken from and how large they are. None of it has a gradient."""

    centre: Tensor
    """The keys' mean, (L, D)"""
    radius: float
    """R, the largest norm of a query or key"""
    largest: float
    """The largest norm of a value"""


def plan(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Plan:
    """Measure (L, N, D), (L, M, D), (L, M, V), with coordinates multiplied by `scale` (D,)."""
    centre = key.detach().mean(-2, dtype=torch.float32)
    scale = scale.detach().float()
    largest = torch.zeros(2, dtype=torch.int32, device=query.device)
    zeros = centre.new_zeros(len(value), value.shape[-1])
    ones = torch.ones_like(zeros[0])
    with torch.cuda.device_of(query):
        for tensor, middle, factor, place in (
            (query, centre, scale, 0),
            (key, centre, scale, 0),
            (value, zeros, ones, 1),
        ):
            batch, rows, width = tensor.shape
            _measure[(batch * triton.cdiv(rows, STEP),)](
                tensor.detach().contiguous(), middle, factor, largest[place:], rows, width,
                ROWS=STEP, WIDTH=power(width, 1),
            )  # fmt: skip
    radius, norm = largest.view(torch.float32).tolist()
    return Plan(centre, math.sqrt(radius), math.sqrt(norm))


def power(width: int, least: int) -> int:
    """The next power of two."""
    return max(least, int(triton.next_power_of_2(width)))


class Places:
    """Queries and keys for the kernels: score = (query·key + half_query + half_key)·square + rest.

    Where they are `fine`, fine_query·fine_key is part of the product.
    """

    def __init__(
        self, query: Tensor, key: Tensor, scale: Tensor, log_weight: Tensor | None, known: Plan
    ) -> None:
        self.width = power(query.shape[-1], 16)
        # A number that float32 has, as the kernels are given it.
        self.factor = torch.tensor(WHOLE / (known.radius or 1.0), dtype=torch.float32).item()
        self.square = LOG2E / self.factor**2
        self.fine = known.radius > COARSE
        self.known, self.scale, self.weight = known, scale.float(), log_weight
        self.query, self.fine_query, self.half_query, _ = self._split(query, keys=False)
        self.key, self.fine_key, self.half_key, self.rest = self._split(key, keys=True)

    def _split(self, tensor: Tensor, *, keys: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch, rows, width = tensor.shape
        full = round_up(rows, STEP)
        out = tensor.new_empty(batch, full, 4 * self.width, dtype=torch.float16)
        fine = tensor.new_empty(batch, full, 2 * self.width, dtype=torch.float16) if self.fine else out
        half, rest = (tensor.new_empty(batch, full, dtype=torch.float32) for _ in range(2))
        weighted = keys and self.weight is not None
        _place[(batch * full // ROWS,)](
            tensor.contiguous(), self.known.centre, self.scale, self.weight if weighted else half,
            out, fine, half, rest, rows, full, width, self.factor, self.square,
            KEYS=keys, WEIGHTED=weighted, FINE=self.fine, ROWS=ROWS, WIDTH=self.width,
        )  # fmt: skip
        return out, fine, half, rest


def halved(tensor: Tensor, width: int, factor: float = 1.0, *, counted: bool = False) -> Tensor:
    """(x₁, x₂) of x·factor: (L, n, w) → (L, n padded, 2·width). `counted`: column w is ones."""
    batch, rows, given = tensor.shape
    full = round_up(rows, STEP)
    out = tensor.new_empty(batch, full, 2 * width, dtype=torch.float16)
    _halve[(batch * full // ROWS,)](
        tensor.contiguous(), out, rows, full, given, factor, COUNTED=counted, ROWS=ROWS, WIDTH=width
    )
    return out


def quartered(halves: Tensor, *, keys: bool) -> Tensor:
    """(x₁, x₂) → (x₁, x₁, x₂, x₂), or (x₁, x₂, x₁, x₂) for the other side of a product."""
    high, low = halves.chunk(2, -1)
    return torch.cat([high, low, high, low] if keys else [high, high, low, low], -1)
