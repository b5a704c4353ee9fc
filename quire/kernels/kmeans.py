"""Triton kernels of K-means: nearest centres, exact though searched in half precision, and their rows' sums.

N rows, D features, K centres in tiles of CENTRES. Rows are float32, centres float64.

The nearest centre minimises ‖c‖² − 2x·c. It is searched for with half-precision products on the tensor cores,
with everything moved to a common origin and scaled by powers of two: a row by a, the centres by g. What
rounding can do is bounded from what was in fact rounded away (Cauchy-Schwarz), row by row:

    |error| ≤ ‖ax − half(ax)‖·max‖2gc‖ + ‖ax‖·max‖2gc − half(2gc)‖ + float32's share

Only two minima touch all scores: that of each column over the tiles, and that of each tile over its columns.
A centre within twice the bound of the best stands in one of the columns and in one of the tiles that come so
close. If that leaves one centre, it is the best in exact arithmetic too. If it leaves up to four, these are
compared by float64 differences, otherwise all that stand in these columns; the lower number wins an exact
tie. So labels are those of float64.

Sums are taken in float64 over rows in the order of their labels, a run of equal labels at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SETTLERS = 1056
"""Programs that settle doubtful rows: eight on each multiprocessor of the largest GPUs."""
WIDEST = 128
"""Features of a row held at once; wider rows are read in parts for each tile of centres."""
MOST_TILE_BITS = 12
NOBODY = tl.constexpr(2147483647)


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
    centres_ptr, shift_ptr, codes_ptr, biases_ptr, limits_ptr, centres, features,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """codes ← rounded −2g(c − shift), biases ← g‖c − shift‖²;
    limits ← max ‖2gc‖, max ‖2gc − code‖, max bias."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < centres
    largest = tl.load(limits_ptr + 3)
    scale = _power(tl.minimum(tl.maximum(254 - _exponent(largest), 64), 190)).to(tl.float64)
    size = tl.zeros((BLOCK,), tl.float64)
    lost = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, features, WIDTH):
        d = first + tl.arange(0, WIDTH)
        here = inside[:, None] & (d < features)[None, :]
        place = k[:, None] * features + d[None, :]
        centre = tl.load(centres_ptr + place, mask=here, other=0.0)
        shift = tl.load(shift_ptr + d, mask=d < features, other=0.0).to(tl.float64)
        moved = tl.where(here, centre - shift[None, :], 0.0) * scale * -2.0
        code = moved.to(tl.float32).to(tl.float16)
        tl.store(codes_ptr + place, code, mask=here)
        rest = moved - code.to(tl.float64)
        size += tl.sum(moved * moved, 1)
        lost += tl.sum(rest * rest, 1)
    bias = (size / (4.0 * scale)).to(tl.float32)
    tl.store(biases_ptr + k, bias, mask=inside)
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
def _codes(codes_ptr, k, d, centres, features, FULL: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of the coded centres, turned: (WIDTH, CENTRES)."""
    place = codes_ptr + k[None, :] * features + d[:, None]
    if FULL and EVEN:
        return tl.load(place)
    else:
        here = (d < features)[:, None] & (k < centres)[None, :]
        return tl.load(place, mask=here, other=0.0)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    x_ptr, shift_ptr, codes_ptr, biases_ptr, limits_ptr, labels_ptr, few_ptr, open_ptr, counters_ptr,
    rows, centres, features,
    ROWS: tl.constexpr, CENTRES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
    WHOLE: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """labels ← the nearest centre where half precision can tell. Rows where at most two tiles and two columns
    come close go to `few` (row, tiles, columns), all others to `open` (row, near columns as bits). TILES is a
    power of two, at least the number of tiles; a tile's number lies in the lowest bits of its minimum."""
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
            code = _codes(codes_ptr, k, d, centres, features, FULL, EVEN)
            score = tl.dot(coded, code)
        else:
            score = tl.zeros((ROWS, CENTRES), tl.float32)
            for offset in range(0, features, WIDTH):
                code = _codes(codes_ptr, k, offset + d, centres, features, FULL, EVEN)
                part = _moved(x_ptr, shift_ptr, n, offset + d, rows, features, FULL) * scale[:, None]
                score = tl.dot(part.to(tl.float16), code, score)
        if EVEN:
            score += scale[:, None] * tl.load(biases_ptr + k)[None, :]
        else:
            bias = tl.load(biases_ptr + k, mask=k < centres, other=0.0)
            score = tl.where((k < centres)[None, :], score + scale[:, None] * bias[None, :], FAR)
        best = tl.minimum(best, score)
        least = tl.min(score, 1)
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
    some = narrow & (settled == 0)
    amount = tl.sum(some.to(tl.int32), 0)
    if amount > 0:
        place = 5 * (tl.atomic_add(counters_ptr, amount) + tl.cumsum(some.to(tl.int32), 0) - 1)
        tl.store(few_ptr + place, n, mask=some)
        tl.store(few_ptr + place + 1, tl.minimum(tile, rival) * CENTRES, mask=some)
        tl.store(few_ptr + place + 2, tl.maximum(tile, rival) * CENTRES, mask=some)
        tl.store(few_ptr + place + 3, low, mask=some)
        tl.store(few_ptr + place + 4, high, mask=some)
    unsettled = inside & (narrow == 0)
    amount = tl.sum(unsettled.to(tl.int32), 0)
    if amount > 0:
        place = 3 * (tl.atomic_add(counters_ptr + 1, amount) + tl.cumsum(unsettled.to(tl.int32), 0) - 1)
        bit = (1 << (lane & 31))[None, :]
        left = tl.sum(tl.where(near & (lane < 32)[None, :], bit, 0), 1)
        right = tl.sum(tl.where(near & (lane >= 32)[None, :], bit, 0), 1)
        none = columns == 0
        tl.store(open_ptr + place, n, mask=unsettled)
        tl.store(open_ptr + place + 1, tl.where(none, -1, left), mask=unsettled)
        tl.store(open_ptr + place + 2, tl.where(none, -1, right), mask=unsettled)


@triton.jit
def _compare(x, centres_ptr, k, d, here, centres, features):  # type: ignore[no-untyped-def]
    """Σ_d (x − c_k)² over a part of the features, of a candidate for each row; float64."""
    real = here & (k < centres)[:, None]
    c = tl.load(centres_ptr + k.to(tl.int64)[:, None] * features + d[None, :], mask=real, other=0.0)
    difference = tl.where(here, x - c, 0.0)
    return tl.sum(difference * difference, 1)


@triton.jit
def _settle(  # type: ignore[no-untyped-def]
    x_ptr, centres_ptr, labels_ptr, few_ptr, open_ptr, counters_ptr, centres, features,
    FEW: tl.constexpr, WIDTH: tl.constexpr, CENTRES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """labels ← the nearest by float64 differences, of four candidates or of all in some columns, TILES tiles
    at a time."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.load(counters_ptr)
    for first in range(program * FEW, total, programs * FEW):
        i = first + tl.arange(0, FEW)
        ok = i < total
        n = tl.load(few_ptr + 5 * i, mask=ok, other=0)
        tile = tl.load(few_ptr + 5 * i + 1, mask=ok, other=0)
        rival = tl.load(few_ptr + 5 * i + 2, mask=ok, other=0)
        low = tl.load(few_ptr + 5 * i + 3, mask=ok, other=0)
        high = tl.load(few_ptr + 5 * i + 4, mask=ok, other=0)
        squared_a = tl.zeros((FEW,), tl.float64)
        squared_b = tl.zeros((FEW,), tl.float64)
        squared_c = tl.zeros((FEW,), tl.float64)
        squared_d = tl.zeros((FEW,), tl.float64)
        for start in range(0, features, WIDTH):
            d = start + tl.arange(0, WIDTH)
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
    total = tl.load(counters_ptr + 1)
    for i in range(program, total, programs):
        n = tl.load(open_ptr + 3 * i).to(tl.int64)
        left, right = tl.load(open_ptr + 3 * i + 1), tl.load(open_ptr + 3 * i + 2)
        nearest = tl.full((), float("inf"), tl.float64)
        label = NOBODY + tl.zeros((), tl.int32)
        for column in range(0, CENTRES):
            word = tl.where(column < 32, left, right)
            if (word >> (column & 31)) & 1 != 0:
                for first in range(0, tl.cdiv(centres, CENTRES), TILES):
                    k = (first + tl.arange(0, TILES)) * CENTRES + column
                    real = k < centres
                    squared = tl.zeros((TILES,), tl.float64)
                    for start in range(0, features, WIDTH):
                        d = start + tl.arange(0, WIDTH)
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


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    x_ptr, weights_ptr, order_ptr, labels_ptr, sums_ptr, counts_ptr, rows, features,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """sums, counts += those of ROWS rows in the order of their labels, one run of equal labels at a time."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    ok, wide = i < rows, d < features
    n = tl.load(order_ptr + i, mask=ok, other=0).to(tl.int64)
    label = tl.load(labels_ptr + i, mask=ok, other=-1).to(tl.int32)
    x = tl.load(x_ptr + n[:, None] * features + d[None, :], mask=ok[:, None] & wide[None, :], other=0.0)
    weight = tl.load(weights_ptr + n, mask=ok, other=0.0) if WEIGHTED else ok.to(tl.float64)
    current = tl.min(tl.where(ok, label, NOBODY), 0)
    last = tl.max(label, 0)
    while current <= last:
        mine = label == current
        if WEIGHTED:
            share = tl.where(mine, weight, 0.0)
            total = tl.sum(share[:, None] * x.to(tl.float64), 0)
        else:
            share = mine.to(tl.float64)
            total = tl.sum(tl.where(mine[:, None], x, 0.0).to(tl.float64), 0)
        tl.atomic_add(sums_ptr + current.to(tl.int64) * features + d, total, mask=wide, sem="relaxed")
        if tl.program_id(1) == 0:
            tl.atomic_add(counts_ptr + current, tl.sum(share, 0), sem="relaxed")
        current = tl.min(tl.where(label > current, label, NOBODY), 0)


def supports(rows: Tensor, centres: Tensor) -> bool:
    """Whether the kernels can take these: contiguous float32 rows on a GPU, sizes that indices can hold."""
    return (
        rows.is_cuda
        and rows.dtype == torch.float32
        and rows.is_contiguous()
        and 0 < len(rows) < 2**31 // 5
        and centres.shape[0] * centres.shape[1] < 2**31
        and centres.shape[0] <= TILE.centres << MOST_TILE_BITS
    )


def nearest_labels(rows: Tensor, centres: Tensor, shift: Tensor, *, tile: Tile = TILE) -> Tensor:
    """The number of the nearest centre of each row, (N,) int32, as in float64.

    rows (N, D) float32, centres (K, D) float64; `shift` (D,) float32 is a point amid the rows.
    """
    (n, features), k = rows.shape, centres.shape[0]
    centres = centres.contiguous()
    device = rows.device
    codes = torch.empty(k, features, dtype=torch.float16, device=device)
    biases = torch.empty(k, dtype=torch.float32, device=device)
    small = torch.zeros(6, dtype=torch.float32, device=device)
    limits, counters = small[:4], small[4:].view(torch.int32)
    labels = torch.empty(n, dtype=torch.int32, device=device)
    few, unsettled = (torch.empty(n, words, dtype=torch.int32, device=device) for words in (5, 3))
    width = min(max(triton.next_power_of_2(features), 16), WIDEST)
    _measure[(triton.cdiv(k * features, 4096),)](centres, shift, limits, k * features, features, BLOCK=4096)
    _encode[(triton.cdiv(k, 16),)](centres, shift, codes, biases, limits, k, features, BLOCK=16, WIDTH=width)
    _search[(triton.cdiv(n, tile.rows),)](
        rows, shift, codes, biases, limits, labels, few, unsettled, counters, n, k, features,
        ROWS=tile.rows, CENTRES=tile.centres, WIDTH=width,
        TILES=triton.next_power_of_2(triton.cdiv(k, tile.centres)), WHOLE=features <= width,
        FULL=features % width == 0, EVEN=k % tile.centres == 0, FAR=3e38,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _settle[(min(SETTLERS, n),)](
        rows, centres, labels, few, unsettled, counters, k, features,
        FEW=16, WIDTH=min(width, 64), CENTRES=tile.centres, TILES=16,
    )  # fmt: skip
    return labels


def sums_by_label(
    rows: Tensor, labels: Tensor, clusters: int, weights: Tensor | None = None, *, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Σ w·x (K, D) and Σ w (K,) of each cluster, in float64; labels (N,), weights (N,) float64."""
    n, features = rows.shape
    # A narrow key makes a shorter sort; equal labels keep their order.
    ordered, order = (labels.to(torch.int16) if clusters <= 2**15 else labels).sort(stable=True)
    if block is None:
        # Few enough rows that most programs see one label, and that several fit on a multiprocessor.
        block = min(max(triton.next_power_of_2(triton.cdiv(n, clusters)) // 8, 16), 128)
    width = min(max(triton.next_power_of_2(features), 16), 64)
    flat = torch.zeros(clusters * (features + 1), dtype=torch.float64, device=rows.device)
    sums, counts = flat[: clusters * features].view(clusters, features), flat[clusters * features :]
    _collect[(triton.cdiv(n, block), triton.cdiv(features, width))](
        rows, rows if weights is None else weights, order, ordered, sums, counts, n, features,
        ROWS=block, WIDTH=width, WEIGHTED=weights is not None, num_warps=8 if block > 128 else 4,
    )  # fmt: skip
    return sums, counts
