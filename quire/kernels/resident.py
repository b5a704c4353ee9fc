"""A Hopper kernel of K-means: the search for nearest centres, with all centres held in shared memory.

N rows, D features, K centres in tiles of 64.

The search is that of `quire.kernels.kmeans`, which says how its answer is made exact; this is how it is run
where the coded centres fit into a multiprocessor. One program stays on each, copies them once, and takes rows
from then on. Rows go from memory into the registers that the tensor cores read, and no warp waits for
another: groups of four warps multiply and search by turns.

A search of 1,000,000 rows of 64 among 1,024 centres is 131·10⁹ operations, 0.17 ms at 790·10¹² a second, and
two minima a score, 0.14 ms at half of an instruction a lane and cycle; reading the rows takes 0.06 ms.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# What is experimental may be called otherwise in another version; who imports this does without it then.
if not triton.__version__.startswith("3.6."):
    raise ImportError("this kernel was tried with Triton 3.6 alone")

CENTRES = 64
MOST_BYTES = 200 * 1024
"""Of shared memory that the centres may take."""
WIDEST = 128


@gluon.jit
def _power(exponent):  # type: ignore[no-untyped-def]
    return (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _last_bit(word):  # type: ignore[no-untyped-def]
    """The place of the highest bit, −1 of none."""
    return gl.inline_asm_elementwise(
        "bfind.u32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _search(  # type: ignore[no-untyped-def]
    x_ptr, shift_ptr, codes_ptr, biases_ptr, limits_ptr, labels_ptr, notes_ptr, details_ptr, rows, features,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, CENTRES: gl.constexpr, TILES: gl.constexpr, BITS: gl.constexpr,
    FULL: gl.constexpr,
):  # fmt: skip
    """What `quire.kernels.kmeans._search` writes, for TILES tiles. BITS is a power of two, at least TILES."""
    WARPS: gl.constexpr = gl.num_warps()
    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, CENTRES, 16]
    )
    factor: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores, k_width=2)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CENTRES, WIDTH], gl.float16)
    codes = gl.allocate_shared_memory(gl.float16, [TILES, CENTRES, WIDTH], shared)
    for number in range(TILES):
        k = number * CENTRES + gl.arange(0, CENTRES, gl.SliceLayout(1, copied))
        w = gl.arange(0, WIDTH, gl.SliceLayout(0, copied))
        codes.index(number).store(gl.load(codes_ptr + k[:, None] * WIDTH + w[None, :]))
    fence_async_shared()
    gl.thread_barrier()

    centre_size, centre_lost = gl.load(limits_ptr), gl.load(limits_ptr + 1)
    largest_bias = gl.load(limits_ptr + 2)
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, factor))
    lane = gl.arange(0, CENTRES, gl.SliceLayout(0, scores))
    zero = gl.zeros((ROWS, CENTRES), gl.float32, scores)
    for block in range(gl.program_id(0), gl.cdiv(rows, ROWS), gl.num_programs(0)):
        i = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, factor))
        place = x_ptr + i.to(gl.int64)[:, None] * features + d[None, :]
        if FULL:
            x = gl.load(place, mask=(i < rows)[:, None], other=0.0) - gl.load(shift_ptr + d)[None, :]
        else:
            x = gl.load(place, mask=(i < rows)[:, None] & (d < features)[None, :], other=0.0)
            x -= gl.load(shift_ptr + d, mask=d < features, other=0.0)[None, :]
        exponent = (gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23) & 255
        scale = _power(gl.minimum(gl.maximum(254 - exponent, 1), 190))
        x *= scale[:, None]
        coded = x.to(gl.float16)
        rest = x - coded.to(gl.float32)
        size = gl.sqrt(gl.sum(x * x, 1)) * 1.0001
        lost = gl.sqrt(gl.sum(rest * rest, 1)) * 1.0001
        reach = scale * largest_bias + size * centre_size
        doubt = lost * centre_size + size * centre_lost + size * centre_size * (features + 4) * 2.4e-7
        doubt = 2.0 * (doubt + reach * (BITS + 3) * 1.2e-7)
        scale = gl.convert_layout(scale, gl.SliceLayout(1, scores))
        doubt = gl.convert_layout(doubt, gl.SliceLayout(1, scores))

        # A thread has 16 of a row's 64 scores, so a tile has four minima, which are never brought together.
        best = gl.full((ROWS, CENTRES), 3e38, gl.float32, scores)
        first = gl.min(gl.min(best.reshape([ROWS, CENTRES // 8, 4, 2]), 3), 1)
        second, third = first, first
        for tile in range(TILES):
            bias = gl.load(biases_ptr + tile * CENTRES + lane)
            score = warpgroup_mma(
                coded, codes.index(tile).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            score = warpgroup_mma_wait(0, deps=(score,)) + scale[:, None] * bias[None, :]
            best = gl.minimum(best, score)
            least = gl.minimum(gl.min(gl.min(score.reshape([ROWS, CENTRES // 8, 4, 2]), 3), 1), 3e38)
            least = ((least.to(gl.int32, bitcast=True) & -BITS) | tile).to(gl.float32, bitcast=True)
            loser = gl.maximum(first, least)
            first = gl.minimum(first, least)
            third = gl.minimum(third, gl.maximum(second, loser))
            second = gl.minimum(second, loser)

        limit = gl.min(best, 1) + doubt
        near = best <= limit[:, None]
        bit = (1 << (lane & 31))[None, :]
        left = gl.sum(gl.where(near & (lane < 32)[None, :], bit, 0), 1)
        right = gl.sum(gl.where(near & (lane >= 32)[None, :], bit, 0), 1)
        close = gl.convert_layout(limit, gl.SliceLayout(1, first.type.layout))[:, None]
        groups = (
            (first <= close).to(gl.int32) + (second <= close).to(gl.int32) + (third <= close).to(gl.int32)
        )
        groups = gl.sum(groups, 1)
        winner = gl.min(first, 1).to(gl.int32, bitcast=True) & (BITS - 1)
        one = gl.where(first <= close, first.to(gl.int32, bitcast=True) & (BITS - 1), winner[:, None])
        two = gl.where(second <= close, second.to(gl.int32, bitcast=True) & (BITS - 1), one)
        lower, upper = gl.min(gl.minimum(one, two), 1), gl.max(gl.maximum(one, two), 1)
        groups = gl.convert_layout(groups, gl.SliceLayout(1, scores))
        winner = gl.convert_layout(winner, gl.SliceLayout(1, scores))
        lower = gl.convert_layout(lower, gl.SliceLayout(1, scores))
        upper = gl.convert_layout(upper, gl.SliceLayout(1, scores))

        low = gl.where(left != 0, _last_bit(left & -left), 32 + _last_bit(right & -right))
        high = gl.where(right != 0, 32 + _last_bit(right), _last_bit(left))
        # Nothing is left of the bits without the lowest and the highest.
        left_rest = left & (left - 1) & gl.where(right == 0, ~_one(high), -1)
        right_rest = right & gl.where(left == 0, right - 1, -1) & ~_one(high - 32)
        narrow = (groups >= 1) & (groups <= 2) & ((left | right) != 0) & ((left_rest | right_rest) == 0)
        settled = narrow & (groups == 1) & (low == high)
        note = 1 + gl.where(narrow, 0, 2) + (low << 2) + (high << 8)
        n = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, scores))
        inside = n < rows
        gl.store(labels_ptr + n, winner * CENTRES + low, mask=inside)
        gl.store(notes_ptr + n, gl.where(settled, 0, note), mask=inside)
        unsure = inside & (settled == 0)
        gl.store(details_ptr + n, lower | (upper << 16), mask=unsure)
        gl.store(details_ptr + rows + n, left, mask=unsure)
        gl.store(details_ptr + 2 * rows + n, right, mask=unsure)


@gluon.jit
def _one(place):  # type: ignore[no-untyped-def]
    """The bit at a place, 0 for places outside a word."""
    return gl.where((place >= 0) & (place < 32), 1 << (place & 31), 0)


def takes(rows: Tensor, tiles: int, width: int) -> bool:
    """Whether a multiprocessor holds so many tiles of centres as wide as that."""
    if not rows.is_cuda or torch.version.hip is not None:
        return False
    fits = width <= WIDEST and tiles * CENTRES * width * 2 <= MOST_BYTES
    return fits and torch.cuda.get_device_capability(rows.device)[0] == 9


def search(
    rows: Tensor, shift: Tensor, codes: Tensor, biases: Tensor, limits: Tensor,
    labels: Tensor, notes: Tensor, details: Tensor,
) -> None:  # fmt: skip
    """Write labels, notes (N,) and details (3, N) of rows (N, D); codes (K, width) and biases (K,) in whole
    tiles."""
    (n, features), (centres, width) = rows.shape, codes.shape
    tiles, programs = centres // CENTRES, torch.cuda.get_device_properties(rows.device).multi_processor_count
    # Four warps take 64 rows. Sixteen have 128 registers each, too few for wider rows.
    warps = 16 if n > 64 * programs and width <= 64 else 8 if n > 64 * programs else 4
    _search[(min(programs, triton.cdiv(n, 16 * warps)),)](
        rows, shift, codes, biases, limits, labels, notes, details, n, features,
        ROWS=16 * warps, WIDTH=width, CENTRES=CENTRES, TILES=tiles, BITS=triton.next_power_of_2(tiles),
        FULL=features == width, num_warps=warps,
    )  # fmt: skip
