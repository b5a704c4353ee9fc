"""softmax(logits) − onehot(y) in place of the logits, and −log softmax(logits)_y, in one kernel.

N rows, V classes. A row is read twice and written once. Exponents are taken from the largest of its first
numbers, so that each is made once for the sum; where another is so much larger that the sum overflows, it is
made again from the largest of all.

Floor: 2·N·V numbers through memory, and 2·N·V exponentials. For 32,768 rows of 50,304 bfloat16 that is
6.6 GB, 1.6 ms at 4.2 TB/s (2.4 ms if the second reading misses the cache); the exponentials take 0.9 ms
beside it. Rows held in registers as a whole would be read once, but 64 numbers a thread are too many, which
took 17.6 ms. PyTorch's compiler takes 4.9 ms in two kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _numbers(place, at, width, classes):  # type: ignore[no-untyped-def]
    """Logits of a row, −∞ past the last class. What is loaded ends at the width: where that is a multiple of
    16 and the classes are not, eight numbers are still read at a time."""
    x = tl.load(place + at, at < width, float("-inf")).to(tl.float32)
    return tl.where(at < classes, x, float("-inf"))


@triton.jit
def _log_sum(place, width, classes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """log Σ exp of a row, whatever its numbers are: each lane keeps the largest it has seen."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        x = _numbers(place, start + tl.arange(0, BLOCK), width, classes)
        new = tl.maximum(top, x)
        # A lane that has seen −∞ alone: any finite number does.
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = new
    most = tl.max(top, 0)
    return most + tl.log(tl.sum(total * tl.exp(top - most), 0))


@triton.jit
def _surplus(  # type: ignore[no-untyped-def]
    logits, target, losses, stride, width, classes, ignored, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * stride
    label = tl.load(target + row)
    columns = tl.arange(0, BLOCK)
    if label == ignored:
        tl.store(losses + row, 0.0)
        for start in range(0, width, BLOCK):
            at = start + columns
            tl.store(place + at, tl.zeros((BLOCK,), logits.dtype.element_ty), at < width)
    else:
        base = tl.max(_numbers(place, columns, width, classes), 0)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, classes, BLOCK):
            total += tl.exp(_numbers(place, start + columns, width, classes) - base)
        log_total = base + tl.log(tl.sum(total, 0))
        # Infinite, or not a number where the first ones were all −∞.
        if (log_total - log_total) != 0.0:
            log_total = _log_sum(place, width, classes, BLOCK)
        tl.store(losses + row, log_total - tl.load(place + label).to(tl.float32))
        tl.debug_barrier()  # the label's logit is read before it is overwritten
        for start in range(0, width, BLOCK):
            at = start + columns
            x = _numbers(place, at, width, classes)
            found = tl.exp(x - log_total) - tl.where(at == label, 1.0, 0.0)
            tl.store(place + at, found.to(logits.dtype.element_ty), at < width)


@torch.library.custom_op("quire::surplus_", mutates_args=("logits",))
def surplus_(logits: Tensor, target: Tensor, classes: int, ignored: int) -> Tensor:
    """The first V = `classes` columns of (N, ≥ V) logits become softmax − onehot(target) in their own type,
    the others 0; −log p of the targets (N,) is returned in float32. Targets are classes 0 … V − 1, or
    `ignored`, for which all is 0."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(4096, triton.next_power_of_2(width))
        _surplus[(rows,)](
            logits, target, losses, logits.stride(0), width, classes, ignored, BLOCK=block,
            num_warps=max(4, block // 256),
        )  # fmt: skip
    return losses


@surplus_.register_fake
def _(logits: Tensor, target: Tensor, classes: int, ignored: int) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)
