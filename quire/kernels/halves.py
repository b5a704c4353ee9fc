"""Numbers in two pieces of half precision, so that tensor cores multiply them at float32's accuracy.

L batch, n rows, w columns, padded to W; rows are padded to a multiple of `STEP`.

x = x₁ + x₂ with x₁ = half(x), x₂ = half(x − x₁) keeps 22 bits. Products of such pairs are products of widths
2W or 4W: (x₁, x₁, x₂, x₂)·(y₁, y₂, y₁, y₂) = (x₁ + x₂)(y₁ + y₂).

Coordinates are multiplied by √log₂e, so that −½‖q − k‖² is an exponent of 2, and split on a common grid
instead: into a whole number of units u, a power of two, and a rest. No coordinate has more than 2048 units
and no norm more than 2896, so that products of whole numbers add up to less than 2²³u² in steps of ½u², which
float32 holds exactly. The rest is rounded to 2⁻¹³u; where u is large (`COARSE`), what it lacks is a third
piece.
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
PARTS = 512
"""Programs that look for the largest coordinate."""
SAMPLE = 1024
"""Keys whose mean coordinates are taken from."""
COARSE = 2.0**-7
"""The largest u at which two pieces do: 2⁻²⁰ is an error of 10⁻⁶ in the weight of a neighbour."""
ROOT = math.sqrt(math.log2(math.e))


@triton.jit
def _scaled(x_ptr, centre_ptr, scale_ptr, batch, n, d, rows, width):  # type: ignore[no-untyped-def]
    """(x − centre)·scale in float64, and 0 outside."""
    inside = (n < rows)[:, None] & (d < width)[None, :]
    x = tl.load(x_ptr + (batch * rows + n[:, None]) * width + d[None, :], mask=inside, other=0.0)
    centre = tl.load(centre_ptr + batch * width + d, mask=d < width, other=0.0).to(tl.float64)
    scale = tl.load(scale_ptr + d, mask=d < width, other=0.0).to(tl.float64)
    return tl.where(inside, (x.to(tl.float64) - centre[None, :]) * scale[None, :], 0.0)


@triton.jit
def _largest(x):  # type: ignore[no-untyped-def]
    """The largest of numbers ≥ 0; NaN counts as infinite."""
    return tl.max(tl.where(x >= 0.0, x, float("inf")), 0)


@triton.jit
def _measure(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, weight_ptr, centre_ptr, scale_ptr, figure_ptr,
    batches, rows, keys, width, values,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """figure (4, programs) ← the largest ‖x‖², |x_d|, ‖v‖² and ln s of each program's share."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    d, v = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    norm = tl.full((), 0.0, tl.float32)
    extent = tl.full((), 0.0, tl.float32)
    size = tl.full((), 0.0, tl.float32)
    heaviest = tl.full((), float("-inf"), tl.float32)
    down = tl.cdiv(rows, ROWS)
    for tile in range(part, batches * down, parts):
        n = tile % down * ROWS + tl.arange(0, ROWS)
        y = _scaled(query_ptr, centre_ptr, scale_ptr, (tile // down).to(tl.int64), n, d, rows, width)
        norm = tl.maximum(norm, _largest(tl.sum(y * y, 1).to(tl.float32)))
        extent = tl.maximum(extent, _largest(tl.max(tl.abs(y), 1).to(tl.float32)))
    down = tl.cdiv(keys, ROWS)
    for tile in range(part, batches * down, parts):
        batch = (tile // down).to(tl.int64)
        n = tile % down * ROWS + tl.arange(0, ROWS)
        y = _scaled(key_ptr, centre_ptr, scale_ptr, batch, n, d, keys, width)
        norm = tl.maximum(norm, _largest(tl.sum(y * y, 1).to(tl.float32)))
        extent = tl.maximum(extent, _largest(tl.max(tl.abs(y), 1).to(tl.float32)))
        place = (batch * keys + n[:, None]) * values + v[None, :]
        inside = (n < keys)[:, None] & (v < values)[None, :]
        value = tl.load(value_ptr + place, mask=inside, other=0.0).to(tl.float64)
        size = tl.maximum(size, _largest(tl.sum(value * value, 1).to(tl.float32)))
        if WEIGHTED:
            weight = tl.load(weight_ptr + batch * keys + n, mask=n < keys, other=float("-inf"))
            heaviest = tl.maximum(heaviest, tl.max(weight, 0))
    tl.store(figure_ptr + part, norm)
    tl.store(figure_ptr + parts + part, extent)
    tl.store(figure_ptr + 2 * parts + part, size)
    tl.store(figure_ptr + 3 * parts + part, heaviest)


@triton.jit
def figure(figure_ptr, row, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(figure_ptr + row * parts + part, mask=part < parts, other=float("-inf")), 0)


@triton.jit
def unit(figure_ptr, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """u"""
    norm = 1.2011224 * tl.sqrt(figure(figure_ptr, 0, parts, PARTS)) / 2895.0
    extent = 1.2011224 * figure(figure_ptr, 1, parts, PARTS) / 2047.0
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.maximum(norm, extent), 1e-6))))


@triton.jit
def value_size(figure_ptr, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A power of two that no value is larger than."""
    size = tl.sqrt(figure(figure_ptr, 2, parts, PARTS))
    return tl.exp2(tl.ceil(tl.log2(tl.where(size > 1e-30, tl.minimum(size, 1e38), 1.0))))


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    x_ptr, value_ptr, centre_ptr, scale_ptr, weight_ptr, figure_ptr,
    unit_ptr, out_ptr, fine_ptr, half_ptr, rest_ptr, share_ptr, rows, padded_rows, width, parts, batches,
    KEYS: tl.constexpr, WEIGHTED: tl.constexpr, FINE: tl.constexpr, ALONE: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(a, a, a', a') of queries or (b, b', b, b') of keys; −½‖a‖²; what −½‖x‖² (+ ln s) lacks then.

    FINE: (a, a', a', a) and (a, a''), or (b', b, b', b'') and (b, b). ALONE: share (2, L, M) ← 2^rest, and
    2^rest v of the single value, each by the largest.
    """
    tile = tl.program_id(0)
    batch = (tile // (padded_rows // ROWS)).to(tl.int64)
    n = tile % (padded_rows // ROWS) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    u = unit(figure_ptr, parts, PARTS)
    tl.store(unit_ptr, u)
    u = u.to(tl.float64)
    y = _scaled(x_ptr, centre_ptr, scale_ptr, batch, n, d, rows, width) * 1.2011224087864498
    whole = tl.floor(y / u + 0.5) * u
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
    lacking = -tl.sum((whole + 0.5 * low) * low, 1).to(tl.float32)
    heaviest = tl.full((), 0.0, tl.float32)
    if WEIGHTED:
        lacking += 1.4426950408889634 * tl.load(weight_ptr + batch * rows + n, mask=n < rows, other=0.0)
        heaviest = 1.4426950408889634 * figure(figure_ptr, 3, parts, PARTS)
    tl.store(rest_ptr + place, tl.where(n < rows, lacking, float("-inf") if KEYS else 0.0))
    if ALONE:
        share = tl.where(n < rows, tl.exp2(lacking - heaviest), 0.0)
        value = tl.load(value_ptr + batch * rows + n, mask=n < rows, other=0.0).to(tl.float32)
        tl.store(share_ptr + place, share)
        share_ptr += batches * padded_rows
        tl.store(share_ptr + place, share * (value / value_size(figure_ptr, parts, PARTS)))


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


class Known(NamedTuple):
    radius: float
    """R, the largest norm of a query or key from the middle"""
    unit: float
    """u, as the kernels compute it"""
    largest: float
    """The largest norm of a value"""


class Extent(NamedTuple):
    """Where coordinates are taken from and how large they are, on the device. None of it has a gradient."""

    centre: Tensor
    """The mean of some keys, (L, D)"""
    figures: Tensor
    """What `_measure` found"""

    def read(self) -> Known:
        """Waits for the device."""
        norm, extent, size, _ = self.figures.amax(1).tolist()
        units = max(ROOT * math.sqrt(norm) / 2895, ROOT * extent / 2047, 1e-6)
        grid = 2.0 ** math.ceil(math.log2(units)) if math.isfinite(units) else math.inf
        return Known(math.sqrt(norm), grid, math.sqrt(size))


def measure(query: Tensor, key: Tensor, value: Tensor, scale: Tensor, log_weight: Tensor | None) -> Extent:
    """Of (L, N, D), (L, M, D), (L, M, V), with coordinates multiplied by `scale` (D,), and ln s (L, M)."""
    (batch, rows, width), (_, keys, values) = query.shape, value.shape
    centre = key.detach()[:, :: max(1, keys // SAMPLE)].mean(-2, dtype=torch.float32)
    parts = min(PARTS, batch * -(-max(rows, keys) // STEP))
    figures = centre.new_empty(4, parts)
    with torch.cuda.device_of(query):
        _measure[(parts,)](
            query.detach().contiguous(), key.detach().contiguous(), value.detach().contiguous(),
            centre if log_weight is None else log_weight.detach(), centre, scale.detach(), figures,
            batch, rows, keys, width, values, WEIGHTED=log_weight is not None,
            ROWS=STEP, WIDTH=power(width, 1), VALUES=power(values, 1),
        )  # fmt: skip
    return Extent(centre, figures)


def power(width: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << (width - 1).bit_length())


class Places:
    """Queries and keys for the kernels: score = query·key + half_query + half_key + rest_query + rest.

    Where they are `fine`, fine_query·fine_key is part of the product. Of a single `value` there are `shares`.
    """

    def __init__(
        self, query: Tensor, key: Tensor, scale: Tensor, log_weight: Tensor | None, extent: Extent,
        *, fine: bool, value: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.width = power(query.shape[-1], 16)
        self.fine, self.extent, self.scale = fine, extent, scale
        self.unit = extent.figures.new_empty(())
        self.query, self.fine_query, self.half_query, self.rest_query = self._split(query)
        self.key, self.fine_key, self.half_key, self.rest, *self.shares = self._split(
            key, log_weight, value, keys=True
        )

    def _split(
        self, tensor: Tensor, weight: Tensor | None = None, value: Tensor | None = None, *, keys: bool = False
    ) -> tuple[Tensor, ...]:
        batch, rows, width = tensor.shape
        full = round_up(rows, STEP)
        out = tensor.new_empty(batch, full, 4 * self.width, dtype=torch.float16)
        fine = tensor.new_empty(batch, full, 2 * self.width, dtype=torch.float16) if self.fine else out
        half, rest, *shares = tensor.new_empty(2 if value is None else 4, batch, full, dtype=torch.float32)
        figures = self.extent.figures
        _place[(batch * full // ROWS,)](
            tensor.contiguous(), half if value is None else value.contiguous(),
            self.extent.centre, self.scale, half if weight is None else weight, figures,
            self.unit, out, fine, half, rest, shares[0] if shares else half,
            rows, full, width, figures.shape[1], batch,
            KEYS=keys, WEIGHTED=weight is not None, FINE=self.fine, ALONE=value is not None,
            PARTS=PARTS, ROWS=ROWS, WIDTH=self.width,
        )  # fmt: skip
        return out, fine, half, rest, *shares


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
