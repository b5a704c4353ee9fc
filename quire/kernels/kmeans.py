"""Triton kernels of K-means: nearest centres, exact though searched in half precision.

N rows, D features, K centres in tiles of CENTRES. Rows are float32, centres float64.

The nearest centre minimises ‖c‖² − 2x·c. It is searched for with half-precision products on the tensor cores,
with everything moved to a common origin and scaled by powers of two: a row by a, the centres by g. What
rounding can do is bounded from what was in fact rounded away (Cauchy-Schwarz), row by row:

    |error| ≤ ‖ax − half(ax)‖·max‖2gc‖ + ‖ax‖·max‖2gc − half(2gc)‖ + float32's share

Only two minima touch all scores: that of each column over the tiles, and that of each tile over its columns.
A centre within twice the bound of the best stands in one of the columns and in one of the tiles that come so
close. If that leaves one centre, it is the best in exact arithmetic too. If it leaves up to four, these are
compared by float64 differences, otherwise all that stand in these columns; the lower number wins an exact
tie. So labels are those of float64. Where all centres fit into a multiprocessor, `quire.kernels.resident`
searches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.tuning import round_up

try:
    from quire.kernels import resident

    RESIDENT = True
except ImportError:  # a Triton without Gluon, or one that has it elsewhere
    RESIDENT = False

SPAN, FEW, SOME, SETTLERS = 512, 32, 4, 8
"""A program of so many warps settles the doubtful ones of so many rows, so many at a time if there are four
candidates, otherwise one by one, so many columns at a time."""
WIDEST = 128
"""Features of a row held at once; wider rows are read in parts for each tile of centres."""
MOST_TILE_BITS = 12
NOBODY = tl.constexpr(2147483647)
FAR = tl.constexpr(3e38)


class Tile(NamedTuple):
    """Shape of a program's work, and how it is run."""

    rows: int
    centres: int
    """At most 64: a row's near columns are bits of two words."""
    warps: int
    stages: int


TILE = Tile(64, 64, 4, 3)


@triton.jit
def _power(exponent):  # type: ignore[no-untyped-def]
    """2^(exponent − 127) of a biased exponent, put together from its bits."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(value):  # type: ignore[no-untyped-def]
    return (value.to(tl.int32, bitcast=True) >> 23) & 255


@triton.jit
def _measure(centres_ptr, shift_ptr, limits_ptr, numbers, features, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """limits[3] ← max |c − shift|."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    centre = tl.load(centres_ptr + i, mask=i < numbers, other=0.0)
    shift = tl.load(shift_ptr + i % features, mask=i < numbers, other=0.0)
    moved = tl.where(i < numbers, tl.abs(centre - shift.to(tl.float64)), 0.0)
    tl.atomic_max(limits_ptr + 3, tl.max(moved, 0).to(tl.float32))


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    centres_ptr, shift_ptr, codes_ptr, biases_ptr, limits_ptr, centres, features, stride,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """codes ← rounded −2g(c − shift), biases ← g‖c − shift‖²; limits ← max ‖2gc‖, max ‖2gc − code‖, max bias.
    Codes are filled up with zeros to whole tiles as wide as `stride`; infinite biases keep rows off these."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < centres
    largest = tl.load(limits_ptr + 3)
    scale = _power(tl.minimum(tl.maximum(254 - _exponent(largest), 64), 190)).to(tl.float64)
    size = tl.zeros((BLOCK,), tl.float64)
    lost = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, stride, WIDTH):
        d = first + tl.arange(0, WIDTH)
        here = inside[:, None] & (d < features)[None, :]
        centre = tl.load(centres_ptr + k[:, None] * features + d[None, :], mask=here, other=0.0)
        shift = tl.load(shift_ptr + d, mask=d < features, other=0.0).to(tl.float64)
        moved = tl.where(here, centre - shift[None, :], 0.0) * scale * -2.0
        code = moved.to(tl.float32).to(tl.float16)
        tl.store(codes_ptr + k[:, None] * stride + d[None, :], code)
        rest = moved - code.to(tl.float64)
        size += tl.sum(moved * moved, 1)
        lost += tl.sum(rest * rest, 1)
    bias = (size / (4.0 * scale)).to(tl.float32)
    tl.store(biases_ptr + k, tl.where(inside, bias, float("inf")))
    # Limits are rounded up. Where centres are beyond any sensible size, all is left to float64.
    sane = largest < 1e12
    size = tl.where(sane, tl.sqrt(size) * 1.000001, float("inf"))
    tl.atomic_max(limits_ptr, tl.max(size, 0).to(tl.float32))
    tl.atomic_max(limits_ptr + 1, tl.max(tl.sqrt(lost) * 1.000001, 0).to(tl.float32))
    tl.atomic_max(limits_ptr + 2, tl.max(bias, 0) * 1.000001)


@triton.jit
def _moved(x_ptr, shift_ptr, n, d, rows, features, FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """x − shift of a tile, zero beyond the features. FULL: there is nothing beyond them."""
    place = x_ptr + n.to(tl.int64)[:, None] * features + d[None, :]
    if FULL:
        return tl.load(place, mask=(n < rows)[:, None], other=0.0) - tl.load(shift_ptr + d)[None, :]
    else:
        here = (n < rows)[:, None] & (d < features)[None, :]
        shift = tl.load(shift_ptr + d, mask=d < features, other=0.0)
        return tl.load(place, mask=here, other=0.0) - shift[None, :]


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    x_ptr, shift_ptr, codes_ptr, biases_ptr, limits_ptr, labels_ptr, notes_ptr, details_ptr,
    rows, centres, features, stride,
    ROWS: tl.constexpr, CENTRES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
    WHOLE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """labels ← the nearest centre where half precision can tell, notes ← 0 there. Elsewhere

        notes ← 1 + 4·(lowest near column) + 256·(highest),   + 2 if more than two tiles or columns are near
        details ← near tiles, 2¹⁶·upper + lower; near columns as bits, in two words

    TILES is a power of two, at least the number of tiles; a tile's number lies in the lowest bits of its
    minimum."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, CENTRES)
    d = tl.arange(0, WIDTH)

    largest = tl.zeros((ROWS,), tl.float32)
    size = tl.zeros((ROWS,), tl.float32)
    lost = tl.zeros((ROWS,), tl.float32)
    x = _moved(x_ptr, shift_ptr, n, d, rows, features, FULL)
    if WHOLE:
        largest = tl.max(tl.abs(x), 1)
    else:
        for first in range(0, features, WIDTH):
            part = _moved(x_ptr, shift_ptr, n, first + d, rows, features, FULL)
            largest = tl.maximum(largest, tl.max(tl.abs(part), 1))
    # The product of this scale with the largest bias must stay finite, also for a row of zeros.
    scale = _power(tl.minimum(tl.maximum(254 - _exponent(largest), 1), 190))
    x *= scale[:, None]
    coded = x.to(tl.float16)
    if WHOLE:
        size = tl.sum(x * x, 1)
        rest = x - coded.to(tl.float32)
        lost = tl.sum(rest * rest, 1)
    else:
        for first in range(0, features, WIDTH):
            part = _moved(x_ptr, shift_ptr, n, first + d, rows, features, FULL) * scale[:, None]
            rest = part - part.to(tl.float16).to(tl.float32)
            size += tl.sum(part * part, 1)
            lost += tl.sum(rest * rest, 1)
    size, lost = tl.sqrt(size) * 1.0001, tl.sqrt(lost) * 1.0001
    centre_size, centre_lost = tl.load(limits_ptr), tl.load(limits_ptr + 1)
    reach = scale * tl.load(limits_ptr + 2) + size * centre_size
    # Sums of `features` products round at 2⁻²² each at worst; a tile's number takes log₂ TILES bits.
    doubt = lost * centre_size + size * centre_lost + size * centre_size * (features + 4) * 2.4e-7
    doubt = 2.0 * (doubt + reach * (TILES + 3) * 1.2e-7)

    best = tl.full((ROWS, CENTRES), FAR, tl.float32)
    first = tl.full((ROWS,), FAR, tl.float32)
    second = tl.full((ROWS,), FAR, tl.float32)
    third = tl.full((ROWS,), FAR, tl.float32)
    for start in range(0, centres, CENTRES):
        k = start + lane
        if WHOLE:
            score = tl.dot(coded, tl.load(codes_ptr + k[None, :] * stride + d[:, None]))
        else:
            score = tl.zeros((ROWS, CENTRES), tl.float32)
            for offset in range(0, features, WIDTH):
                code = tl.load(codes_ptr + k[None, :] * stride + offset + d[:, None])
                part = _moved(x_ptr, shift_ptr, n, offset + d, rows, features, FULL) * scale[:, None]
                score = tl.dot(part.to(tl.float16), code, score)
        score += scale[:, None] * tl.load(biases_ptr + k)[None, :]
        best = tl.minimum(best, score)
        least = tl.minimum(tl.min(score, 1), FAR)
        least = ((least.to(tl.int32, bitcast=True) & -TILES) | (start // CENTRES)).to(
            tl.float32, bitcast=True
        )
        loser = tl.maximum(first, least)
        first = tl.minimum(first, least)
        third = tl.minimum(third, tl.maximum(second, loser))
        second = tl.minimum(second, loser)

    limit = tl.min(best, 1) + doubt
    near = best <= limit[:, None]
    columns = tl.sum(near.to(tl.int32), 1)
    low = tl.min(tl.where(near, lane[None, :], NOBODY), 1)
    high = tl.max(tl.where(near, lane[None, :], 0), 1)
    tile = first.to(tl.int32, bitcast=True) & (TILES - 1)
    rival = tl.where(second <= limit, second.to(tl.int32, bitcast=True) & (TILES - 1), tile)
    inside = n < rows
    tl.store(labels_ptr + n, tile * CENTRES + tl.minimum(low, CENTRES - 1), mask=inside)
    # A comparison with what is not a number fails, which leaves the row open.
    narrow = inside & (columns >= 1) & (columns <= 2) & (third > limit)
    settled = narrow & (columns == 1) & (rival == tile)
    note = 1 + tl.where(narrow, 0, 2) + (tl.minimum(low, CENTRES - 1) << 2) + (high << 8)
    tl.store(notes_ptr + n, tl.where(settled, 0, note), mask=inside)
    unsure = inside & (settled == 0)
    if tl.max(unsure.to(tl.int32), 0) > 0:
        bit = (1 << (lane & 31))[None, :]
        left = tl.sum(tl.where(near & (lane < 32)[None, :], bit, 0), 1)
        right = tl.sum(tl.where(near & (lane >= 32)[None, :], bit, 0), 1)
        tiles = tl.minimum(tile, rival) | (tl.maximum(tile, rival) << 16)
        tl.store(details_ptr + n, tiles, mask=unsure)
        tl.store(details_ptr + rows + n, left, mask=unsure)
        tl.store(details_ptr + 2 * rows + n, right, mask=unsure)


@triton.jit
def _compare(x, centres_ptr, k, d, here, centres, features):  # type: ignore[no-untyped-def]
    """Σ_d (x − c_k)² over a part of the features, of a candidate for each row; float64."""
    real = here & (k < centres)[:, None]
    c = tl.load(centres_ptr + k.to(tl.int64)[:, None] * features + d[None, :], mask=real, other=0.0)
    difference = tl.where(here, x - c, 0.0)
    return tl.sum(difference * difference, 1)


@triton.jit
def _next(left, right, column):  # type: ignore[no-untyped-def]
    """The lowest place of a bit in two words, and the words without it; `column` if there is none."""
    word = tl.where(left != 0, left, right)
    lowest = word & -word
    place = _exponent(lowest.to(tl.float32)) - 127 + tl.where(left != 0, 0, 32)
    column = tl.where(word != 0, place, column)
    return column, tl.where(left != 0, left ^ lowest, left), tl.where(left != 0, right, right ^ lowest)


@triton.jit
def _settle(  # type: ignore[no-untyped-def]
    x_ptr, centres_ptr, labels_ptr, notes_ptr, details_ptr, list_ptr, rows, centres, features,
    SPAN: tl.constexpr, FEW: tl.constexpr, SOME: tl.constexpr, WIDTH: tl.constexpr, CENTRES: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """labels ← the nearest by float64 differences of the rows with notes, of four candidates or of all in
    some columns, SOME of them and TILES tiles at a time. A program's rows are listed first: those of four
    candidates from the front of its part of the list, others from its end."""
    start = tl.program_id(0) * SPAN
    every = start + tl.arange(0, SPAN)
    note = tl.load(notes_ptr + every, mask=every < rows, other=0)
    some, wide = ((note & 3) == 1).to(tl.int32), ((note & 3) == 3).to(tl.int32)
    tl.store(list_ptr + start + tl.cumsum(some, 0) - 1, every, mask=some > 0)
    tl.store(list_ptr + start + SPAN - tl.cumsum(wide, 0), every, mask=wide > 0)
    tl.debug_barrier()
    total = tl.sum(some, 0)
    for first in range(0, total, FEW):
        i = first + tl.arange(0, FEW)
        ok = i < total
        n = tl.load(list_ptr + start + i, mask=ok, other=0)
        word = tl.load(notes_ptr + n, mask=ok, other=0)
        tiles = tl.load(details_ptr + n, mask=ok, other=0)
        tile, rival = (tiles & 65535) * CENTRES, (tiles >> 16) * CENTRES
        low, high = (word >> 2) & 63, (word >> 8) & 63
        squared_a = tl.zeros((FEW,), tl.float64)
        squared_b = tl.zeros((FEW,), tl.float64)
        squared_c = tl.zeros((FEW,), tl.float64)
        squared_d = tl.zeros((FEW,), tl.float64)
        for offset in range(0, features, WIDTH):
            d = offset + tl.arange(0, WIDTH)
            here = ok[:, None] & (d < features)[None, :]
            x = tl.load(x_ptr + n.to(tl.int64)[:, None] * features + d[None, :], mask=here, other=0.0)
            x = x.to(tl.float64)
            squared_a += _compare(x, centres_ptr, tile + low, d, here, centres, features)
            squared_b += _compare(x, centres_ptr, tile + high, d, here, centres, features)
            squared_c += _compare(x, centres_ptr, rival + low, d, here, centres, features)
            squared_d += _compare(x, centres_ptr, rival + high, d, here, centres, features)
        # From the highest number down, so that the lowest wins a tie; beyond the last there is no centre.
        label, squared = rival + high, tl.where(rival + high < centres, squared_d, float("inf"))
        closer = (squared_c <= squared) & (rival + low < centres)
        label, squared = tl.where(closer, rival + low, label), tl.where(closer, squared_c, squared)
        closer = (squared_b <= squared) & (tile + high < centres)
        label, squared = tl.where(closer, tile + high, label), tl.where(closer, squared_b, squared)
        closer = squared_a <= squared
        tl.store(labels_ptr + n, tl.where(closer, tile + low, label), mask=ok)
    for i in range(tl.sum(wide, 0)):
        n = tl.load(list_ptr + start + SPAN - 1 - i).to(tl.int64)
        left, right = tl.load(details_ptr + rows + n), tl.load(details_ptr + 2 * rows + n)
        # Where nothing compares, as with what is not a number, all are looked at.
        none = (left | right) == 0
        left, right = tl.where(none, -1, left), tl.where(none, -1, right)
        nearest = tl.full((), float("inf"), tl.float64)
        label = NOBODY + tl.zeros((), tl.int32)
        j = tl.arange(0, SOME * TILES)
        while (left | right) != 0:
            # The next near columns, the last of them again where they are fewer.
            column, left, right = _next(left, right, 0)
            columns = tl.where(j < TILES, column, 0)
            for part in tl.static_range(1, SOME):
                column, left, right = _next(left, right, column)
                columns = tl.where(j // TILES == part, column, columns)
            for first in range(0, tl.cdiv(centres, CENTRES), TILES):
                k = (first + j % TILES) * CENTRES + columns
                real = k < centres
                squared = tl.zeros((SOME * TILES,), tl.float64)
                for offset in range(0, features, WIDTH):
                    d = offset + tl.arange(0, WIDTH)
                    x = tl.load(x_ptr + n * features + d, mask=d < features, other=0.0).to(tl.float64)
                    here = real[:, None] & (d < features)[None, :]
                    squared += _compare(x[None, :], centres_ptr, k, d, here, centres, features)
                squared = tl.where(real, squared, float("inf"))
                smallest = tl.min(squared, 0)
                number = tl.min(tl.where(real & (squared == smallest), k, NOBODY), 0)
                closer = (smallest < nearest) | ((smallest == nearest) & (number < label))
                label = tl.where(closer, number, label)
                nearest = tl.where(closer, smallest, nearest)
        tl.store(labels_ptr + n, tl.where(label == NOBODY, 0, label))


def supports(rows: Tensor, centres: Tensor) -> bool:
    """Whether the kernels can take these: contiguous float32 rows on a GPU, sizes that indices can hold."""
    return (
        rows.is_cuda
        and rows.dtype == torch.float32
        and rows.is_contiguous()
        and 0 < len(rows) < 2**31 // 4
        and (centres.shape[0] + TILE.centres) * (centres.shape[1] + WIDEST) < 2**31
        and centres.shape[0] <= TILE.centres << MOST_TILE_BITS
    )


def nearest_labels(rows: Tensor, centres: Tensor, shift: Tensor, *, tile: Tile = TILE) -> Tensor:
    """The number of the nearest centre of each row, (N,) int32, as in float64.

    rows (N, D) float32, centres (K, D) float64; `shift` (D,) float32 is a point amid the rows.
    """
    (n, features), k = rows.shape, centres.shape[0]
    centres, device = centres.contiguous(), rows.device
    width = min(max(triton.next_power_of_2(features), 16), WIDEST)
    stride, tiles = round_up(features, width), triton.cdiv(k, tile.centres)
    codes = torch.empty(tiles * tile.centres, stride, dtype=torch.float16, device=device)
    biases = torch.empty(len(codes), dtype=torch.float32, device=device)
    limits = torch.zeros(4, dtype=torch.float32, device=device)
    labels, notes = (torch.empty(n, dtype=torch.int32, device=device) for _ in range(2))
    details = torch.empty(3, n, dtype=torch.int32, device=device)
    _measure[(triton.cdiv(k * features, 4096),)](centres, shift, limits, k * features, features, BLOCK=4096)
    _encode[(len(codes) // 16,)](
        centres, shift, codes, biases, limits, k, features, stride, BLOCK=16, WIDTH=width
    )
    if RESIDENT and tile == TILE and resident.takes(rows, tiles, stride):
        resident.search(rows, shift, codes, biases, limits, labels, notes, details)
    else:
        _search[(triton.cdiv(n, tile.rows),)](
            rows, shift, codes, biases, limits, labels, notes, details, n, k, features, stride,
            ROWS=tile.rows, CENTRES=tile.centres, WIDTH=width, TILES=triton.next_power_of_2(tiles),
            WHOLE=features <= width, FULL=features % width == 0, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    spans = triton.cdiv(n, SPAN)
    _settle[(spans,)](
        rows, centres, labels, notes, details, torch.empty(spans * SPAN, dtype=torch.int32, device=device),
        n, k, features, SPAN=SPAN, FEW=FEW, SOME=SOME, WIDTH=min(width, 64), CENTRES=tile.centres, TILES=16,
        num_warps=SETTLERS,
    )  # fmt: skip
    return labels
