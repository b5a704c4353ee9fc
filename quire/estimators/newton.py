"""Newton's method for penalised logistic and multinomial regression, in float64.

N rows, P = D + 1 columns (a last column of ones carries the intercept), M logits a row: 1 for two
classes, K otherwise.

    f(W) = (1/Σs) Σ_n s_n·ℓ(xₙᵀW, yₙ) + ½ Σ_p r_p ‖W_p‖²

    ∇f = Xᵀ(S(Q − Y)) + r·W,      ∇²f[V] = Xᵀ(S·(Q∘XV − Q(Q·XV))) + r·V

with Q the predicted probabilities and S = diag(s/Σs). Small problems solve with the whole Hessian;
large ones with conjugate gradients on Hessian-vector products, so memory stays O(P·M).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

DENSE_UNKNOWNS = 2000
"""With more unknowns than this, forming and factorising the Hessian costs more than products with it."""
CHUNK_BYTES = 64 * 2**20
"""Of the rows whose contributions to the Hessian are formed at once."""


class Solution(NamedTuple):
    weights: Tensor
    """(P, M)"""
    iterations: int
    converged: bool


class Problem(NamedTuple):
    inputs: Tensor
    """(N, P)"""
    targets: Tensor
    """One-hot rows (N, K), or (N, 1) with the probability of the second of two classes."""
    shares: Tensor
    """s/Σs as a column, (N, 1)."""
    penalty: Tensor
    """r as a column, (P, 1)."""

    @property
    def binary(self) -> bool:
        return self.targets.shape[1] == 1

    def value(self, weights: Tensor) -> Tensor:
        logits = self.inputs @ weights
        if self.binary:
            losses = F.binary_cross_entropy_with_logits(logits, self.targets, reduction="none")
        else:
            losses = torch.logsumexp(logits, 1, keepdim=True) - (logits * self.targets).sum(1, keepdim=True)
        return (self.shares * losses).sum() + 0.5 * (self.penalty * weights**2).sum()

    def probabilities(self, weights: Tensor) -> Tensor:
        logits = self.inputs @ weights
        return logits.sigmoid() if self.binary else logits.softmax(1)

    def gradient(self, weights: Tensor, predicted: Tensor) -> Tensor:
        residuals = self.shares * (predicted - self.targets)
        return self.inputs.mT @ residuals + self.penalty * weights

    def hessian_product(self, direction: Tensor, predicted: Tensor) -> Tensor:
        change = self.inputs @ direction
        mean = predicted * change if self.binary else (predicted * change).sum(1, keepdim=True)
        curved = self.shares * predicted * (change - mean)
        return self.inputs.mT @ curved + self.penalty * direction

    def hessian_diagonal(self, predicted: Tensor) -> Tensor:
        return (self.inputs**2).mT @ (self.shares * predicted * (1 - predicted)) + self.penalty

    def hessian(self, predicted: Tensor) -> Tensor:
        """(P·M, P·M), unknowns ordered like `weights.flatten()`."""
        columns, logits = self.inputs.shape[1], predicted.shape[1]
        size = columns * logits
        total = self.inputs.new_zeros(columns, logits, columns, logits)
        rows = max(1, CHUNK_BYTES // (8 * size))
        pieces = zip(self.inputs.split(rows), predicted.split(rows), self.shares.split(rows), strict=True)
        for x, q, s in pieces:
            for m in range(logits):
                total[:, m, :, m] += x.mT @ (s * q[:, m : m + 1] * x)
            mixed = (s.sqrt()[:, :, None] * x[:, :, None] * q[:, None, :]).flatten(1)
            total -= (mixed.mT @ mixed).view_as(total)
        total = total.view(size, size)
        total.diagonal().add_(self.penalty.expand(columns, logits).flatten())
        return total


def _dense_step(problem: Problem, predicted: Tensor, gradient: Tensor) -> Tensor:
    """H⁻¹∇f by Cholesky on the Hessian scaled to a unit diagonal."""
    hessian = problem.hessian(predicted)
    columns, logits = gradient.shape
    if logits > 1:
        # Adding the same number to all logits of a row changes no probability, so the unpenalised
        # intercepts leave a direction without curvature. The gradient has no part along it.
        size = hessian.diagonal().view(columns, logits).mean(1)
        blocks = hessian.view(columns, logits, columns, logits)
        index = torch.arange(columns, device=hessian.device)
        blocks[index, :, index, :] += size[:, None, None] / logits
    scale = hessian.diagonal().clamp_min(torch.finfo(hessian.dtype).tiny).rsqrt()
    scaled = scale[:, None] * hessian * scale
    damping = 0.0
    while True:
        factor, failed = torch.linalg.cholesky_ex(scaled)
        if not failed.any():
            break
        # Columns that depend on each other without a penalty: the damping picks one of the solutions.
        scaled.diagonal().add_(max(damping, 1e-12))
        damping = max(damping, 1e-12) * 10
    right = (scale * gradient.flatten())[:, None]
    return (scale * torch.cholesky_solve(right, factor)[:, 0]).view_as(gradient)


def _iterative_step(problem: Problem, predicted: Tensor, gradient: Tensor) -> Tensor:
    """H⁻¹∇f by conjugate gradients with the Hessian's diagonal as preconditioner."""
    diagonal = problem.hessian_diagonal(predicted).clamp_min(torch.finfo(gradient.dtype).tiny)
    step, residual = torch.zeros_like(gradient), gradient.clone()
    preconditioned = residual / diagonal
    direction = preconditioned.clone()
    energy = (residual * preconditioned).sum()
    # A loose solve far from the optimum, a tight one near it: the outer convergence is superlinear.
    enough = energy * torch.clamp(energy.sqrt(), max=0.25) ** 2
    for _ in range(min(10 * gradient.numel(), 1000)):
        product = problem.hessian_product(direction, predicted)
        curvature = (direction * product).sum()
        if not curvature > 0:
            break
        length = energy / curvature
        step += length * direction
        residual -= length * product
        preconditioned = residual / diagonal
        energy, previous = (residual * preconditioned).sum(), energy
        if energy <= enough:
            break
        direction = preconditioned + (energy / previous) * direction
    return step


def minimise(problem: Problem, *, tolerance: float, max_iterations: int) -> Solution:
    """Newton steps with backtracking until ½ ∇f·H⁻¹∇f, the decrease still to come, is below `tolerance`.

    The step that passes the test is still taken; near the optimum it squares the error.
    """
    weights = problem.inputs.new_zeros(problem.inputs.shape[1], problem.targets.shape[1])
    small = weights.numel() <= DENSE_UNKNOWNS
    value = problem.value(weights)
    for iteration in range(1, max_iterations + 1):
        predicted = problem.probabilities(weights)
        gradient = problem.gradient(weights, predicted)
        step = (_dense_step if small else _iterative_step)(problem, predicted, gradient)
        decrease = 0.5 * (gradient * step).sum()
        length = 1.0
        candidate = weights - step
        # Below the rounding of f no comparison of values means anything, and Newton's step is right.
        comparable = decrease > 1e-14 * value.abs()
        while comparable and problem.value(candidate) > value - 2e-4 * length * decrease and length > 1e-10:
            length /= 2
            candidate = weights - length * step
        weights = candidate if problem.binary else candidate - candidate.mean(1, keepdim=True)
        value = problem.value(weights)
        if bool(decrease <= tolerance):
            return Solution(weights, iteration, True)
    return Solution(weights, max_iterations, False)
