"""Positions added to embeddings: fixed waves or learned vectors.

B batch, T places, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional.position import frequencies, sinusoidal


class SinusoidalPosition(nn.Module):
    """x_n + r_n with the waves of `quire.functional.sinusoidal`: nothing to learn, any length.

    (B, T, E) → (B, T, E). `offset` is the place of the first token: the number of tokens in a cache. The
    waves are kept as far as they were needed, and are no part of the state dict.
    """

    table: Tensor

    def __init__(self, size: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequencies(size, base)  # refuses what has no waves
        self.size, self.base = size, base
        self.register_buffer("table", torch.empty(0, size), persistent=False)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        _check_width(x, self.size)
        _check_offset(offset)
        stop = offset + x.shape[-2]
        table = self.table
        if len(table) < stop or table.device != x.device or table.dtype != x.dtype:
            places = torch.arange(max(stop, 2 * len(table)), device=x.device)
            table = self.table = sinusoidal(places, self.size, self.base, dtype=x.dtype)
        return x + table[offset:stop]

    def extra_repr(self) -> str:
        return f"size={self.size}, base={self.base:g}"


class LearnedPosition(nn.Module):
    """x_n + R_n with a learned row for each of `max_length` places: (B, T, E) → (B, T, E).

    `weight` (max_length, E) is named as in `nn.Embedding`; its first values are normal with deviation 0.02.
    """

    def __init__(self, max_length: int, size: int) -> None:
        super().__init__()
        self.max_length, self.size = max_length, size
        self.weight = nn.Parameter(torch.empty(max_length, size))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        _check_width(x, self.size)
        _check_offset(offset)
        stop = offset + x.shape[-2]
        if stop > self.max_length:
            raise InputError(
                f"place {stop - 1}, the last of {x.shape[-2]} tokens after {offset}",
                expected=f"places 0 to {self.max_length - 1}, which is what was learned",
                fix="shorten the sequence, or build the layer with a larger max_length",
            )
        return x + self.weight[offset:stop]

    def extra_repr(self) -> str:
        return f"max_length={self.max_length}, size={self.size}"


def _check_width(x: Tensor, size: int) -> None:
    if x.dim() < 2 or x.shape[-1] != size:
        raise InputError(f"positions for a shape of {tuple(x.shape)}", expected=f"(…, T, {size})")


def _check_offset(offset: int) -> None:
    if offset < 0:
        raise InputError(f"an offset of {offset}", expected="0 or more tokens before the first")
