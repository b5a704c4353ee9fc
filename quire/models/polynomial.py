"""A polynomial as a network: monomials of the inputs, whitened, and one linear layer.

    ŷ = W·T(φ(x) − m) + b,   φ all monomials of x up to the degree

The whitening T = Λ^{−½}Uᵀ of the training rows' features makes the Hessian of squared error the
identity, so gradient descent needs a few steps where powers of x would need millions.
B rows, D inputs, F monomials.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor, nn

from quire.functional.generalise import polynomial_features
from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model


@dataclass(frozen=True)
class PolynomialConfig:
    in_features: int
    out_features: int
    degree: int

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features", "degree"):
            check_positive_integer(name, getattr(self, name))

    @property
    def monomials(self) -> int:
        """Without the constant, which is the linear layer's bias."""
        return comb(self.in_features + self.degree, self.degree) - 1


@model(
    "polynomial",
    PolynomialConfig,
    example=Example({"in_features": 6, "out_features": 2, "degree": 2}, (6,)),
)
class PolynomialModel(nn.Module):
    """(B, D) → (B, out_features); `fit_basis` must see the training rows once before training."""

    center: Tensor
    whiten: Tensor

    def __init__(self, config: PolynomialConfig) -> None:
        super().__init__()
        self.config = config
        # float64: a degree of ten spans ten orders of magnitude, more than float32 has digits for.
        self.register_buffer("center", torch.zeros(config.monomials, dtype=torch.float64))
        self.register_buffer("whiten", torch.eye(config.monomials, dtype=torch.float64))
        self.head = nn.Linear(config.monomials, config.out_features)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @torch.no_grad()
    def fit_basis(self, inputs: Tensor) -> None:
        features = polynomial_features(inputs.double(), self.config.degree, bias=False)
        self.center.copy_(features.mean(0))
        covariance = (features - self.center).T @ (features - self.center) / len(features)
        values, vectors = torch.linalg.eigh(covariance)
        # Directions in which the rows do not vary have no scale to whiten to and carry nothing.
        kept = values > 1e-12 * values[-1].clamp(min=torch.finfo(torch.float64).tiny)
        scale = torch.where(kept, values.clamp(min=1e-300).rsqrt(), 0.0)
        self.whiten.copy_(scale.unsqueeze(1) * vectors.T)

    def features(self, x: Tensor) -> Tensor:
        """(B, F), uncorrelated with unit variance over the training rows."""
        powers = polynomial_features(x.double(), self.config.degree, bias=False)
        white = (powers - self.center.double()) @ self.whiten.double().T
        return white.to(self.head.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.flatten(1)))
