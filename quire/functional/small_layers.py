"""Dense layers that are small, by a kernel of their own wherever a step calls for them.

A model calls `torch.nn.functional.linear`, be it Quire's or anybody's. Within `with SmallLayers():` that
means the kernel of `quire.kernels.dense` where it is the faster one: float32 on a GPU, and at most `MOST`
rows, inputs and outputs. PyTorch's own function is what it is proven against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from quire.functional.through_time import transformed
from quire.kernels import refusal

MOST = 256


class SmallLayers(TorchFunctionMode):
    """Replaces small dense layers, as long as nothing transforms or traces them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not kwargs and len(args) == 3 and _is_plain() and is_small(*args):
            from quire.kernels.dense import Linear

            return Linear.apply(*args)
        return func(*args, **(kwargs or {}))


def is_small(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel takes a layer's arguments, and is worth it."""
    return (
        bias is not None
        and x.dim() == 2
        and max(*x.shape, len(weight)) <= MOST
        and x.dtype == weight.dtype == bias.dtype == torch.float32
        and bias.is_contiguous()
        and not refusal(x, weight, bias)
    )


def _is_plain() -> bool:
    return not (torch.is_autocast_enabled("cuda") or transformed() or forward_ad._current_level >= 0)
