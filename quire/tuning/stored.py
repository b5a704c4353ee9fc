"""A frozen weight in NormalFloat4, and products with it that never keep it in full.

    y = x dequantise(W)ᵀ,   ∂L/∂x = ∂L/∂y dequantise(W)

Backward dequantises again: of the weight, only its 4.127 bits per number are kept between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from quire.functional.nf4 import NF4, Tables, dequantise_nf4, make_tables, quantise_nf4
from quire.functional.through_time import transformed

TABLE_BYTES = 4 * (256 * 2 + 256)
"""The code books, which each weight has at hand on its device."""


@final
class Stored(nn.Module):
    """The buffers of one weight. They keep their types when the model is cast; what is computed follows."""

    codes: Tensor
    scales: Tensor
    steps: Tensor | None
    mean: Tensor | None
    pairs: Tensor
    levels: Tensor

    def __init__(self, packed: NF4, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = packed.shape, dtype
        tables = make_tables(packed.codes.device)
        for name in ("codes", "scales", "steps", "mean"):
            self.register_buffer(name, getattr(packed, name))
        self.register_buffer("pairs", tables.pairs, persistent=False)
        self.register_buffer("levels", tables.levels, persistent=False)

    @classmethod
    def of(cls, weight: Tensor, *, double: bool = True) -> Self:
        return cls(quantise_nf4(weight, double=double), weight.dtype)

    @property
    def small_scales(self) -> bool:
        """Whether the scales are quantised too."""
        return self.steps is not None

    @property
    def packed(self) -> NF4:
        return NF4(self.codes, self.scales, self.steps, self.mean, self.shape)

    def dequantise(self, dtype: torch.dtype | None = None) -> Tensor:
        return dequantise_nf4(self.packed, dtype or self.dtype, Tables(self.pairs, self.levels))

    def product(self, inputs: Tensor, bias: Tensor | None = None, *, by_rows: bool) -> Tensor:
        """x Wᵀ + b, or x W + b for a weight of (in, out), in the type of the inputs or that of autocast."""
        kind = inputs.device.type
        if not torch.is_autocast_enabled(kind):
            return self._product(inputs, bias, by_rows)
        inputs = inputs.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            return self._product(inputs, bias, by_rows)

    def _product(self, inputs: Tensor, bias: Tensor | None, by_rows: bool) -> Tensor:
        bias = None if bias is None else bias.to(inputs.dtype)
        # What torch.func needs takes longer than a small product: PyTorch binds each argument by its name.
        result: Tensor = (_SeenProduct if transformed() else _Product).apply(
            inputs, bias, self.codes, self.scales, self.steps, self.mean, self.pairs, self.levels, self.shape,
            by_rows,
        )  # fmt: skip
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        for name, value in before.items():
            now = self._buffers[name]
            if value is not None and now is not None and now.dtype != value.dtype:
                self._buffers[name] = value.to(now.device)
        return self

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {self.packed.bits:.3f} bits per number"


def _forward(
    inputs: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    steps: Tensor | None,
    mean: Tensor | None,
    pairs: Tensor,
    levels: Tensor,
    shape: tuple[int, ...],
    by_rows: bool,
) -> Tensor:
    weight = dequantise_nf4(NF4(codes, scales, steps, mean, shape), inputs.dtype, Tables(pairs, levels))
    return nn.functional.linear(inputs, weight.T if by_rows else weight, bias)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: object = None) -> None:
    first, _, *tensors, ctx.shape, ctx.by_rows = inputs
    ctx.dtype = first.dtype
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    codes, scales, steps, mean, *tables = ctx.saved_tensors
    of_inputs, of_bias = None, None
    if ctx.needs_input_grad[0]:
        packed = NF4(codes, scales, steps, mean, ctx.shape)
        weight = dequantise_nf4(packed, ctx.dtype, Tables(*tables), again=True)
        of_inputs = gradient @ (weight.T if ctx.by_rows else weight)
    if ctx.needs_input_grad[1]:
        of_bias = gradient.flatten(0, -2).sum(0) if gradient.dim() > 1 else gradient
    return of_inputs, of_bias, *[None] * 8


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _keep(ctx, inputs)
        return _forward(*inputs)

    backward = staticmethod(_backward)


class _SeenProduct(torch.autograd.Function):
    """The same in the form that torch.func can look into."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_backward)
