"""Layers that normalise. The formulas are in `quire.functional.normalise`; these call PyTorch's kernels.

N rows, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from quire.errors import InputError
from quire.functional.normalise import Share, batch_share, standardisation, standardise, unstandardise


class BatchNorm(_BatchNorm):
    """y = γ_c (x − μ_c) / √(σ²_c + ε) + β_c on (N, C) or (N, C, …): 2C parameters, the shape is kept.

    While training, μ and σ² are those of the batch, over rows and positions; in evaluation they are moving
    averages. `momentum` is the batch's share in each update, as in PyTorch; with momentum_of="average"
    it is the share of the old average instead, so momentum=0.9 then does what 0.1 does otherwise. The
    moving variance divides by n − 1, the batch's own by n, as in PyTorch, whose state dicts fit.

    It is PyTorch's layer with the check for a fixed number of dimensions taken off; what looks for
    PyTorch's batch norms (synchronisation, fusing, freezing) finds it.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, *, momentum_of: Share = "batch"
    ) -> None:
        super().__init__(num_features, eps, batch_share(momentum, momentum_of))

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise InputError(
                f"batch norm of shape {tuple(input.shape)}",
                expected=f"(N, {self.num_features}, …)",
                fix=f"move the channels to dimension 1, or build it with num_features={input.shape[-1]}",
            )
        if self.training and input.numel() == self.num_features:
            raise InputError(
                "batch norm of a single value for each channel, whose variance is zero",
                expected="at least two rows or positions while training",
                fix="use a larger batch, drop the last incomplete one, or call eval()",
            )


class LayerNorm(nn.Module):
    """y = γ (x − μ) / √(σ² + ε) + β with μ and σ² of each row over its last dimensions."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps = shape, eps
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-len(self.normalized_shape) :] != self.normalized_shape:
            raise InputError(
                f"layer norm of shape {tuple(x.shape)}",
                expected=f"last dimensions {self.normalized_shape}",
                fix=f"build it with normalized_shape={tuple(x.shape[-len(self.normalized_shape) :])}",
            )
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class PreNorm(nn.Module):
    """x + f(norm(x)): the way through is free of norms, so gradients pass unchanged."""

    def __init__(self, norm: nn.Module, function: nn.Module) -> None:
        super().__init__()
        self.norm, self.function = norm, function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.norm(x))


class PostNorm(nn.Module):
    """norm(x + f(x)): the output of every block has the same size."""

    def __init__(self, norm: nn.Module, function: nn.Module) -> None:
        super().__init__()
        self.norm, self.function = norm, function

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.function(x))


class Standardise(nn.Module):
    """(x − μ) / σ with μ and σ of the training data, which `fit` takes once; they travel with the weights."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("deviation", torch.ones(num_features))

    @torch.no_grad()
    def fit(self, values: Tensor) -> Standardise:
        """Take μ and σ from values (N, D); a constant column gets σ = 1."""
        mean, deviation = standardisation(values)
        if mean.shape != self.mean.shape:
            raise InputError(
                f"{mean.numel()} columns",
                expected=f"{self.mean.numel()}",
                fix="build it with num_features of the data",
            )
        self.mean.copy_(mean)
        self.deviation.copy_(deviation)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return standardise(x, self.mean, self.deviation)

    def inverse(self, z: Tensor) -> Tensor:
        """σ z + μ."""
        return unstandardise(z, self.mean, self.deviation)
