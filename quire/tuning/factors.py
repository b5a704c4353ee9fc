"""What an adapter knows of one weight W: a product of two thin matrices, or a value of its own.

    LowRank   ΔW = s · L R,  s = α / r,   y = x W₀ᵀ + s · x Rᵀ Lᵀ
    Full      ΔW = V − W₀

Letters: r rank, L (rows, r) and R (r, columns), where W is read as a matrix of its first dimension against
all others. A (r, fan-in) meets the input and B (fan-out, r) makes the output: L, R = B, A for most layers,
and Aᵀ, Bᵀ where the weight is stored as (in, out) or looked up by rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn


class Change(nn.Module, ABC):
    """ΔW of one weight."""

    @abstractmethod
    def delta(self, weight: Tensor) -> Tensor:
        """ΔW in the shape of W₀, which is given, in its type or that of the parameters if that is finer."""


@final
class LowRank(Change):
    """ΔW = s · L R."""

    def __init__(
        self, weight: Tensor, rank: int, scale: float, *, dropout: float = 0.0, by_rows: bool, lookup: bool
    ) -> None:
        """`by_rows`: the first dimension of W is that of the inputs. `lookup`: rows are looked up; then the
        factor that meets the input starts at zero, so that a row that is never seen keeps ΔW = 0."""
        super().__init__()
        self.scale, self.dropout, self.by_rows = scale, dropout, by_rows
        rows, *others = weight.shape
        # float32 at least, as small steps vanish in bfloat16; what is computed with follows the input's type.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if by_rows:
            first, second = [rank, rows], [math.prod(others), rank]
        else:  # as two convolutions, of which the first has the kernel of W and the second a kernel of 1
            first, second = [rank, *others], [rows, rank, *[1] * (len(others) - 1)]
        self.A = nn.Parameter(weight.new_empty(first, dtype=dtype))
        self.B = nn.Parameter(weight.new_empty(second, dtype=dtype))
        if lookup:
            nn.init.zeros_(self.A)
            nn.init.normal_(self.B)
        else:
            nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
            nn.init.zeros_(self.B)

    def sides(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """L (rows, r) and R (r, columns)."""
        first, second = self.A.flatten(1), self.B.flatten(1)
        if dtype is not None:
            first, second = first.to(dtype), second.to(dtype)
        return (first.T, second.T) if self.by_rows else (second, first)

    def delta(self, weight: Tensor) -> Tensor:
        left, right = self.sides(torch.promote_types(weight.dtype, self.A.dtype))
        return (left @ right).view(weight.shape) * self.scale

    def drop(self, inputs: Tensor) -> Tensor:
        """Dropout of the inputs of the low-rank path alone."""
        if not self.dropout:
            return inputs
        return nn.functional.dropout(inputs, self.dropout, self.training)


@final
class Full(Change):
    """ΔW = V − W₀: a weight that is learned as a whole, such as a new classifier, a bias or a norm."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.value = nn.Parameter(weight.detach().to(dtype, copy=True))

    def delta(self, weight: Tensor) -> Tensor:
        return self.value - weight
