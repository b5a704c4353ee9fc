"""Numbers in NormalFloat4, with scales in 8 bits or in float32, made full again in one kernel.

N numbers in blocks of B that share a scale, G scales that share a step: w = code[i]·(level[s]·step + mean).

A thread loads words of 4 bytes of codes and makes 8 numbers of each, which in half precision are one word of
16 bytes. The 16 values of the code book lie on one line of the first cache; kept in registers and exchanged
among threads they were no faster. Scales are made once a block.

Floor: N/2 + N/B bytes in and N of the result's type out. For 4096 × 14336 in bfloat16 that is 30 MB and
117 MB, 0.035 ms at 4.2 TB/s; it takes 0.042 ms on an H200.

Arithmetic is that of the plain form, each operation rounded to float32 by itself: without the contraction of
level·step + mean the results are the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.tuning import traced

ROWS, WARPS = 64, 4
"""Blocks of numbers in a program: a part of a group of scales."""


@triton.jit
def _dequantise(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, steps_ptr, mean_ptr, pairs_ptr, levels_ptr, out_ptr, count,
    DOUBLE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    # In words of 4 bytes, so that a thread's numbers are one word in the result.
    place = tl.max_contiguous(row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :], [1, 4])
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes_ptr += first * (BLOCK // 2)
    out_ptr += first * BLOCK
    left = count - first * BLOCK
    # Only the last program needs masks, which would break its neighbours' words into numbers.
    whole = left >= ROWS * BLOCK
    if whole:
        code = tl.load(codes_ptr + place)
        scale = tl.load(scales_ptr + first + row)
    else:
        code = tl.load(codes_ptr + place, mask=2 * place < left, other=0)
        scale = tl.load(scales_ptr + first + row, mask=row * BLOCK < left, other=0)
    if DOUBLE:
        # A program's blocks are all of one group.
        step = tl.load(steps_ptr + first // GROUP)
        scale = tl.load(levels_ptr + scale.to(tl.int32)) * step + tl.load(mean_ptr)
        scale = tl.maximum(scale, 0.0)
    # Each of the first 16 pairs has a value of the code book in its second place.
    code = code.to(tl.int32)
    high = tl.load(pairs_ptr + 2 * (code >> 4) + 1) * scale[:, None]
    low = tl.load(pairs_ptr + 2 * (code & 15) + 1) * scale[:, None]
    value = tl.reshape(tl.join(high, low), (ROWS, BLOCK)).to(out_ptr.dtype.element_ty)
    if whole:
        tl.store(out_ptr + at, value)
    else:
        tl.store(out_ptr + at, value, mask=at < left)


def dequantise(codes: Tensor, *arguments: Any) -> Tensor:
    """`_launch`, as an operator where it is traced; otherwise that would take longer than a small kernel."""
    found: Tensor = (_operator if traced(codes) else _launch)(codes, *arguments)
    return found


def _launch(
    codes: Tensor,
    scales: Tensor,
    steps: Tensor | None,
    mean: Tensor | None,
    pairs: Tensor,
    levels: Tensor,
    count: int,
    dtype: torch.dtype,
    block: int,
    group: int,
    again: bool,
) -> Tensor:
    """(count,) in float32, bfloat16 or float16, of what `quire.functional.nf4.NF4` holds.

    `block` and `group` are powers of two, `group` at least 64. `again` does nothing: a compiler takes two
    calls with the same arguments for one, and would keep a weight from forward to backward that is to be made
    twice.
    """
    out = torch.empty(count, dtype=dtype, device=codes.device)
    if count:
        codes, scales, pairs, levels = (t.contiguous() for t in (codes, scales, pairs, levels))
        with torch.cuda.device_of(codes):
            _dequantise[(triton.cdiv(count, ROWS * block),)](
                codes, scales, scales if steps is None else steps.contiguous(),
                scales if mean is None else mean, pairs, levels, out, count,
                DOUBLE=steps is not None, BLOCK=block, GROUP=group, ROWS=ROWS,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def _empty(codes: Tensor, *arguments: Any) -> Tensor:
    _, _, _, _, _, count, dtype, *_ = arguments
    return torch.empty(count, dtype=dtype, device=codes.device)


_operator = torch.library.custom_op("quire::dequantise_nf4", _launch, mutates_args=())
_operator.register_fake(_empty)
