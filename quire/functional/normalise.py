"""Normalisation as formulas: data, batch and layer.

N rows, C channels (dimension 1 of (N, C, …)), n the number of values that one statistic is taken over.

Two conventions of the moving average are in use, and one number means opposite things in them:

    average ← (1 − m)·average + m·batch      m is the batch's share (PyTorch; 0.1 by default there)
    average ← m·average + (1 − m)·batch      m is the average's share (the paper's followers; 0.9 or 0.99)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name

Share = Literal["batch", "average"]


def standardisation(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column over all other dimensions' rows: (N, D) → (D,), (D,).

    The deviation divides by N, and is 1 where a column is constant, so that dividing by it is safe.
    """
    if values.dim() != 2 or not len(values):
        raise InputError(
            f"values of shape {tuple(values.shape)}",
            expected="(N, D) with at least one row",
            fix="give a matrix",
        )
    wide = values.double()
    mean = wide.mean(dim=0)
    deviation = wide.std(dim=0, correction=0)
    # A constant column keeps rounding noise of its own size times machine epsilon, which is no scale.
    constant = deviation <= 1e-13 * wide.abs().amax(dim=0)
    kept = torch.promote_types(values.dtype, torch.float32)
    return mean.to(kept), torch.where(constant, 1.0, deviation).to(kept)


def standardise(values: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """(x − μ) / σ, column by column."""
    return (values - mean) / deviation


def unstandardise(values: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """σ x + μ, the inverse of `standardise`."""
    return values * deviation + mean


def channel_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (divided by n) of each channel over rows and positions: (N, C, …) → (C,), (C,)."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    mean = x.mean(dim=dims)
    return mean, (x - _along_channels(mean, x)).square().mean(dim=dims)


def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """γ_c (x − μ_c) / √(σ²_c + ε) + β_c for each channel c; the shape is kept.

    μ and σ² are `channel_statistics` of the batch while training, moving averages in evaluation.
    """
    out = (x - _along_channels(mean, x)) / torch.sqrt(_along_channels(variance, x) + eps)
    out = out if weight is None else out * _along_channels(weight, x)
    return out if bias is None else out + _along_channels(bias, x)


def moving_average(average: Tensor, batch: Tensor, momentum: float, share: Share = "batch") -> Tensor:
    """(1 − m)·average + m·batch where m is the share of the batch, m·average + (1 − m)·batch where it is
    the share of the average."""
    rate = batch_share(momentum, share)
    return (1 - rate) * average + rate * batch


def batch_share(momentum: float, share: Share = "batch") -> float:
    """The batch's part in the moving average under either convention."""
    if share not in ("batch", "average"):
        raise unknown_name("meaning of momentum", share, ("batch", "average"))
    if not 0 <= momentum <= 1:
        raise InputError(
            f"momentum is {momentum!r}",
            expected="a share in [0, 1]",
            fix="0.1 of the batch, or 0.9 of the average",
        )
    return momentum if share == "batch" else 1 - momentum


def layer_norm(
    x: Tensor, dims: int = 1, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """γ (x − μ) / √(σ² + ε) + β, with μ and σ² (divided by n) of each row over its last `dims` dimensions."""
    last = list(range(-dims, 0))
    centred = x - x.mean(dim=last, keepdim=True)
    out = centred / torch.sqrt(centred.square().mean(dim=last, keepdim=True) + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _along_channels(values: Tensor, x: Tensor) -> Tensor:
    """(C,) as (1, C, 1, …), to stand beside x."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))
