"""Batch norm over several processes: the moments are those of the whole batch, as if one process had it.

    n = Σ_processes rows,   μ = Σ x / n,   σ² = Σ (x − μ)² / n

PyTorch's SyncBatchNorm does the same between GPUs alone; this does it wherever sums can be added, and a
process without rows adds nothing but joins in. Two sums are added over the processes on the way forward (in
two passes, so that the variance keeps its digits), and two on the way back, where the gradient of a sum is
the sum of the gradients. Whoever has run out of memory says so in the next sum, whichever it is, so all of
these are sums of as many numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as not_compiled  # torch.compiler.disable takes a second to import
from torch.nn.modules.batchnorm import _BatchNorm

from quire.errors import InputError


class _Add(torch.autograd.Function):
    """The sum over processes, whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, meet: Meet) -> Tensor:
        ctx.meet = meet
        return meet(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Add.apply(gradient, ctx.meet), None


Counting = Callable[[], float | None]
"""What a row of this process counts for: 1, or 0 where its rows are borrowed; None where it computes for
itself."""
Meet = Callable[[Tensor], Tensor]
"""Adds a vector over the processes; see `Peers.meet`."""


@not_compiled
def whole_batch_norm(module: _BatchNorm, counting: Counting, meet: Meet, x: Tensor) -> Tensor:
    """What `module` computes of x (N, C, …), with the moments of all processes while training."""
    own_moments = not module.training and module.running_mean is not None
    if own_moments:
        return type(module).forward(module, x)
    if x.dim() < 2 or x.shape[1] != module.num_features:
        raise InputError(f"batch norm of shape {tuple(x.shape)}", expected=f"(N, {module.num_features}, …)")
    counts = counting()

    def add(value: Tensor) -> Tensor:
        return value if counts is None else _Add.apply(value * counts, meet)

    shape = [1, -1] + [1] * (x.dim() - 2)
    others = [0, *range(2, x.dim())]
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    number = wide.new_full((1,), x.numel() / module.num_features)
    total = add(torch.cat([wide.sum(others), number]))
    count = total[-1].detach()
    if counts is not None and x.device.type == "cpu" and count <= 1:
        raise InputError(
            "batch norm of a single value for each channel, whose variance is zero",
            expected="at least two rows or positions while training",
            fix="use a larger batch, or drop the last incomplete one",
        )
    mean = total[:-1] / count
    apart = wide - mean.view(shape)
    variance = add(apart.square().sum(others)) / count
    if counts is not None and module.training and module.running_mean is not None:
        _remember(module, mean.detach(), variance.detach() * (count / (count - 1)))
    out = apart * (variance + module.eps).rsqrt().view(shape)
    if module.weight is not None:
        out = out * module.weight.view(shape) + module.bias.view(shape)
    return out.to(x.dtype)


@torch.no_grad()
def _remember(module: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    share = 1 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    module.running_mean.lerp_(mean.to(module.running_mean), share)
    module.running_var.lerp_(variance.to(module.running_var), share)


def synchronise(task: nn.Module, counting: Counting, meet: Meet) -> list[_BatchNorm]:
    """Let every batch norm of `task` use the moments of all processes, until `separate` is called."""
    norms = [module for module in task.modules() if isinstance(module, _BatchNorm)]
    for module in norms:
        module.forward = partial(whole_batch_norm, module, counting, meet)  # type: ignore[method-assign]
    return norms


def separate(norms: list[_BatchNorm]) -> None:
    for module in norms:
        del module.forward
