"""The quadratic model of a minimum, and what it predicts of gradient descent.

Near a minimum w* with Hessian H = Σ λ_i u_i u_iᵀ, in the coordinates α_i = u_iᵀ(w − w*):

    E ≈ E* + ½ Σ λ_i α_i²        ∇E = Σ α_i λ_i u_i        α_i ← (1 − ηλ_i) α_i

λ eigenvalues (n,), U eigenvectors as columns (n, n), α coordinates (…, n), η step size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.errors import InputError


def quadratic_energy(alpha: Tensor, eigenvalues: Tensor, minimum: float | Tensor = 0.0) -> Tensor:
    """E = E* + ½ Σ λ_i α_i²."""
    return minimum + (eigenvalues * alpha.square()).sum(-1) / 2


def quadratic_gradient(alpha: Tensor, eigenvalues: Tensor, eigenvectors: Tensor) -> Tensor:
    """∇E = Σ α_i λ_i u_i, in the coordinates of w."""
    return (alpha * eigenvalues) @ eigenvectors.mT


def descent_rates(eigenvalues: Tensor, step_size: float) -> Tensor:
    """1 − ηλ_i: the factor by which a step of gradient descent multiplies α_i."""
    return 1 - step_size * eigenvalues


def is_stable(eigenvalues: Tensor, step_size: float) -> bool:
    """Whether every α_i shrinks: 0 < ηλ_i < 2 for all i."""
    products = step_size * eigenvalues
    return bool(((products > 0) & (products < 2)).all())


def stable_step_size(eigenvalues: Tensor) -> float:
    """2/λmax: gradient descent converges for step sizes below it, and for no others."""
    return 2 / _extremes(eigenvalues)[1]


def steepest_step_size(eigenvalues: Tensor) -> float:
    """1/λmax: the step size that removes the steepest direction in one step."""
    return 1 / _extremes(eigenvalues)[1]


def best_step_size(eigenvalues: Tensor) -> float:
    """2/(λmin + λmax): equal rates ±(κ−1)/(κ+1) at both ends of the spectrum, the fastest there is."""
    return 2 / sum(_extremes(eigenvalues))


def slowest_rate(eigenvalues: Tensor) -> float:
    """1 − λmin/λmax: the rate of the flattest direction under η = 1/λmax."""
    smallest, largest = _extremes(eigenvalues)
    return 1 - smallest / largest


def condition_number(eigenvalues: Tensor) -> float:
    """κ = λmax/λmin of a positive definite H."""
    smallest, largest = _extremes(eigenvalues)
    return largest / smallest


def predicted_coordinates(alpha: Tensor, eigenvalues: Tensor, step_size: float, steps: int) -> Tensor:
    """(1 − ηλ_i)^t α_i for t = 0 … steps, as (steps + 1, n)."""
    time = torch.arange(steps + 1, device=alpha.device).unsqueeze(1)
    return descent_rates(eigenvalues, step_size) ** time * alpha


def descend(gradient: Callable[[Tensor], Tensor], start: Tensor, step_size: float, steps: int) -> Tensor:
    """w ← w − η∇E(w) as it is, step by step: all points, as (steps + 1, n)."""
    points = [start]
    for _ in range(steps):
        points.append(points[-1] - step_size * gradient(points[-1]))
    return torch.stack(points)


@dataclass(frozen=True)
class QuadraticModel:
    """E(w) = E* + ½ (w − w*)ᵀ H (w − w*), with predicted and simulated paths of gradient descent."""

    hessian: Tensor
    """H (n, n), symmetric."""
    minimiser: Tensor
    """w* (n,)."""
    minimum: float = 0.0
    """E*."""

    def __post_init__(self) -> None:
        n = self.minimiser.shape[-1]
        if self.hessian.shape != (n, n) or not torch.allclose(self.hessian, self.hessian.mT):
            raise InputError(
                f"a Hessian of shape {tuple(self.hessian.shape)} for {n} parameters",
                expected=f"a symmetric matrix of shape ({n}, {n})",
                fix="use (H + Hᵀ)/2 if it is symmetric up to rounding",
            )

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        eigenvalues, eigenvectors = torch.linalg.eigh(self.hessian)
        return eigenvalues, eigenvectors

    @property
    def eigenvalues(self) -> Tensor:
        """λ, ascending."""
        return self._eigen[0]

    @property
    def eigenvectors(self) -> Tensor:
        """u_i, as columns."""
        return self._eigen[1]

    def coordinates(self, w: Tensor) -> Tensor:
        """α_i = u_iᵀ(w − w*)."""
        return (w - self.minimiser) @ self.eigenvectors

    def point(self, alpha: Tensor) -> Tensor:
        """w = w* + Σ α_i u_i."""
        return self.minimiser + alpha @ self.eigenvectors.mT

    def value(self, w: Tensor) -> Tensor:
        return quadratic_energy(self.coordinates(w), self.eigenvalues, self.minimum)

    def gradient(self, w: Tensor) -> Tensor:
        return quadratic_gradient(self.coordinates(w), self.eigenvalues, self.eigenvectors)

    def predict(self, start: Tensor, step_size: float, steps: int) -> Tensor:
        """The path of gradient descent in closed form, (steps + 1, n)."""
        alpha = self.coordinates(start)
        return self.point(predicted_coordinates(alpha, self.eigenvalues, step_size, steps))

    def simulate(self, start: Tensor, step_size: float, steps: int) -> Tensor:
        """The path of gradient descent step by step, with the gradient H(w − w*), (steps + 1, n)."""
        return descend(lambda w: self.hessian @ (w - self.minimiser), start, step_size, steps)


def _extremes(eigenvalues: Tensor) -> tuple[float, float]:
    smallest, largest = eigenvalues.min().item(), eigenvalues.max().item()
    if smallest <= 0:
        raise InputError(
            f"an eigenvalue of {smallest:g}",
            expected="positive eigenvalues only: elsewhere there is no minimum to converge to",
            fix="drop the directions with λ <= 0",
        )
    return smallest, largest
