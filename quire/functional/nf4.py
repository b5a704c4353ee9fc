"""NormalFloat4 with double quantisation (Dettmers et al. 2023, QLoRA), in the format of bitsandbytes.

    w ≈ code[i] · scale,   i = argmin |code − w / scale|,   scale = max |w| of a block of 64

The code book has 16 values, quantiles of N(0, 1) scaled to [−1, 1] with an exact zero. The scales themselves
are stored in 8 bits: their mean is taken away, and groups of 256 of them are quantised with a dynamic code
book. That is 4 + 8/64 + 32/(64·256) = 4.127 bits per number.

Letters: N numbers of a tensor, K = ⌈N/64⌉ blocks of them, G = ⌈K/256⌉ groups of blocks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import InputError
from quire.kernels import Backend, refusal, use_triton

BLOCK = 64
"""Numbers that share a scale."""
GROUP = 256
"""Scales that share a scale of their own."""
CHUNK = 2**22
"""Numbers that are dequantised at a time: indices and float32 values of so many, and not of a whole large
weight, are what it takes besides the result."""


class Tables(NamedTuple):
    """The two code books as tensors on the device where they are looked up."""

    pairs: Tensor
    """(256, 2): the two values that a byte of codes stands for."""
    levels: Tensor
    """(256,): the values of an 8-bit scale."""


@dataclass(frozen=True)
class NF4:
    """A tensor in NormalFloat4."""

    codes: Tensor
    """uint8 (⌈N/2⌉,): two codes a byte, the first in the upper half; the last half of an odd N is unused."""
    scales: Tensor
    """uint8 (K,), or float32 (K,) without double quantisation."""
    steps: Tensor | None
    """float32 (G,): the scale of each group of scales."""
    mean: Tensor | None
    """float32 (): the mean of the scales."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that are stored, without the two code books, which are constants of the format."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.steps, self.mean) if t is not None)

    @property
    def bits(self) -> float:
        """Bits per number."""
        return 8 * self.nbytes / self.numel

    def dequantise(self, dtype: torch.dtype = torch.float32, tables: Tables | None = None) -> Tensor:
        return dequantise_nf4(self, dtype, tables)


# Code books -----------------------------------------------------------------------------------


def normal_float(bits: int = 4) -> Tensor:
    """The code book of NormalFloat, (2^bits,) in float32, rising from −1 to 1.

    Half as many quantiles of N(0, 1) as there are codes lie evenly from δ to ½, and one more from ½ to 1 − δ,
    with δ = ½(1/(2·2^bits) + 1/(2·(2^bits − 1))). The zero that both have counts once; the largest becomes 1.
    """
    if bits < 2:
        raise InputError(f"a NormalFloat of {bits} bits", expected="at least 2", fix="use 4")
    half = 2 ** (bits - 1)
    # Seven digits, and float32 for probabilities and quantiles: so the published numbers were made, which are
    # met bit by bit.
    outermost = round(1 - (1 / (4 * half) + 1 / (4 * half - 2)) / 2, 7)
    above, below = (
        torch.special.ndtri(torch.linspace(outermost, 0.5, count)[:-1].double()).float().double()
        for count in (half + 1, half)
    )
    values = torch.cat([-below, above.new_zeros(1), above.flip(0)])
    return (values / values[-1]).float()


def dynamic_float(bits: int = 8) -> Tensor:
    """The signed dynamic code book of Dettmers (2015), (2^bits,) in float64, rising from −0.993 to 1.

    Decade e of the bits − 1 below 1 has 2^e values of either sign, the middles of equal parts of
    (0.1, 1)·10^(e − bits + 2): the smaller a number, the more bits its size takes from its fraction. Zero and
    one make the number of codes whole.
    """
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for exponent in range(bits - 1):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float64)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - bits + 2)
        values += [middles, -middles]
    return torch.cat(values).sort().values


@functools.cache
def _code_books() -> tuple[tuple[float, ...], tuple[float, ...]]:
    # Numbers and not tensors: what is made once must not belong to a device or to a traced graph.
    return tuple(normal_float().tolist()), tuple(dynamic_float().tolist())


def make_tables(device: torch.device | str | None = None) -> Tables:
    """The code books in float32, for repeated look-ups on one device."""
    code, levels = _code_books()
    pairs = [(high, low) for high in code for low in code]
    return Tables(torch.tensor(pairs, device=device), torch.tensor(levels, device=device))


def nearest_code(values: Tensor, code: Tensor) -> Tensor:
    """Index of the nearest value of a rising code book, int32; the lower where two are equally near."""
    return torch.bucketize(values, (code[1:] + code[:-1]) / 2, out_int32=True)


# Tensors --------------------------------------------------------------------------------------


def quantise_nf4(weight: Tensor, *, double: bool = True) -> NF4:
    """A tensor of any shape in NormalFloat4; `double` also quantises the scales."""
    if not weight.is_floating_point() or not weight.isfinite().all():
        found = (
            "values that are not finite" if weight.is_floating_point() else f"values of type {weight.dtype}"
        )
        raise InputError(f"{found} to quantise", expected="finite floating-point numbers")
    code, _ = (torch.tensor(book, device=weight.device) for book in _code_books())
    indices, scales = _quantise_blocks(weight.detach().reshape(-1).float(), code, BLOCK)
    indices = _pad(indices, 2)
    codes = indices[::2] << 4 | indices[1::2]
    if not double:
        return NF4(codes, scales, None, None, tuple(weight.shape))
    return NF4(codes, *quantise_scales(scales), tuple(weight.shape))


def quantise_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Double quantisation of the scales (K,): 8-bit codes (K,), the groups' own scales (G,) and the mean."""
    levels = torch.tensor(_code_books()[1], device=scales.device)
    mean = scales.mean() if len(scales) else scales.new_zeros(())
    codes, steps = _quantise_blocks(scales - mean, levels, GROUP)
    return codes, steps, mean


def dequantise_scales(codes: Tensor, steps: Tensor, mean: Tensor, levels: Tensor | None = None) -> Tensor:
    """The scales (K,) in float32. What rounding makes negative is zero: no scale is below it."""
    if levels is None:
        levels = torch.tensor(_code_books()[1], device=codes.device)
    values = _blocks(levels[codes.int()], GROUP) * steps[:, None]
    return (values.reshape(-1)[: len(codes)] + mean).clamp(min=0)


def dequantise_nf4(
    packed: NF4,
    dtype: torch.dtype = torch.float32,
    tables: Tables | None = None,
    *,
    again: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """code[i] · scale for each number, computed in float32 and rounded to `dtype` once.

    `again` says that the same tensor has been made before, and that a compiler must not keep it instead.
    """
    tables = tables or make_tables(packed.codes.device)
    scales = packed.scales
    if use_triton(backend, _reason(packed, dtype)):
        from quire.kernels.nf4 import dequantise

        flat: Tensor = dequantise(
            packed.codes, scales, packed.steps, packed.mean, *tables, packed.numel, dtype, BLOCK, GROUP, again
        )
        return flat.view(packed.shape)
    if packed.steps is not None and packed.mean is not None:
        scales = dequantise_scales(scales, packed.steps, packed.mean, tables.levels)
    result = torch.empty(packed.numel, dtype=dtype, device=packed.codes.device)
    pieces = zip(
        result.split(CHUNK), packed.codes.split(CHUNK // 2), scales.split(CHUNK // BLOCK), strict=True
    )
    for piece, codes, scale in pieces:
        values = torch.nn.functional.embedding(codes.int(), tables.pairs).view(-1)
        piece.copy_(_blocks(values, BLOCK).mul_(scale[:, None]).view(-1)[: len(piece)])
    return result.view(packed.shape)


def _reason(packed: NF4, dtype: torch.dtype) -> str:
    """Why no kernel can do it."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"a result of type {dtype}"
    return refusal(packed.scales if packed.steps is None else packed.steps)


def nf4_bytes(numel: int, *, double: bool = True) -> int:
    """Bytes that `numel` numbers take: codes, scales, scales of scales and their mean."""
    blocks = math.ceil(numel / BLOCK)
    codes = math.ceil(numel / 2)
    return codes + (blocks + 4 * math.ceil(blocks / GROUP) + 4 if double else 4 * blocks)


def _quantise_blocks(values: Tensor, code: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """uint8 indices of the values and the largest absolute value of each block of `size`."""
    blocks = _blocks(values, size)
    scales = blocks.abs().amax(1) if len(blocks) else values.new_zeros(0)
    # A block of zeros has no scale; any divisor makes zeros of it.
    divisors = torch.where(scales > 0, scales, 1.0)
    indices = nearest_code(blocks / divisors[:, None], code).to(torch.uint8)
    return indices.reshape(-1)[: len(values)], scales


def _blocks(values: Tensor, size: int) -> Tensor:
    """(⌈n/size⌉, size), the last one filled up with zeros."""
    return _pad(values, size).view(-1, size)


def _pad(values: Tensor, multiple: int) -> Tensor:
    missing = -len(values) % multiple
    return torch.nn.functional.pad(values, (0, missing)) if missing else values
