"""What the kernels share: tiles by measurement, sizes rounded up, whether somebody traces, a reciprocal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional


def tuned(tiles: Sequence[tuple[dict[str, int], int, int]], key: Sequence[str]) -> Callable[[Any], Any]:
    """`triton.autotune` over (constants, warps, stages), once for each value of the arguments in `key`."""
    configs = [
        triton.Config(constants, num_warps=warps, num_stages=stages) for constants, warps, stages in tiles
    ]
    decorator: Callable[[Any], Any] = triton.autotune(configs, list(key), do_bench=_time)
    return decorator


def _time(call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
    if not torch.cuda.is_available():  # interpreted: every tile is tried, none is faster
        call()
        return [1.0] * len(quantiles)
    times: list[float] = triton.testing.do_bench(call, warmup=3, rep=15, quantiles=quantiles)
    return times


def bucket(*sizes: int) -> int:
    """Sizes rounded up to powers of two, as one number: tiles are chosen once for each."""
    number = 0
    for size in sizes:
        number = 64 * number + max(0, size - 1).bit_length()
    return number


def round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def padded(tensor: Tensor, rows: int, columns: int, value: float = 0.0) -> Tensor:
    """(…, r, c) → (…, rows, columns), contiguous."""
    more = (0, columns - tensor.shape[-1], 0, rows - tensor.shape[-2])
    return functional.pad(tensor, more, value=value).contiguous()


def traced(tensor: Tensor) -> bool:
    """Whether an operator must be called, which takes longer than a small kernel does."""
    return torch.compiler.is_compiling() or type(tensor) is not Tensor


def has_ptx(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.version.hip is None


@triton.jit
def reciprocal(x, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """1/x to 2⁻²³ in one instruction, where Triton's division takes six; 1/∞ = 0."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x
