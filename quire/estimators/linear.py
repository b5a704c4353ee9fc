"""Least squares in closed form.

N rows, D features, O outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from quire.estimators.base import (
    Array,
    Regressor,
    in_form_of,
    read_features,
    read_targets,
    read_weights,
    to_numpy,
    to_tensor,
)


class LeastSquares(NamedTuple):
    """The minimum-norm solution of a weighted least-squares problem, in float64."""

    coefficients: Tensor
    """(D, O)"""
    intercept: Tensor
    """(O,)"""
    rank: int
    singular_values: Tensor


def least_squares(
    inputs: Tensor, targets: Tensor, weights: Tensor, *, intercept: bool = True
) -> LeastSquares:
    """Minimise Σ s_n ‖y_n − Wᵀx_n − b‖²; of all minimisers, the one with the smallest ‖W‖.

    (N, D), (N, O), (N,). Rows are scaled by √s after the weighted means are taken off, which
    eliminates b. A thin QR makes the problem small, and singular values below
    ε·max(N, D)·(the largest) count as zero, so columns that depend on each other do no harm.
    """
    inputs, targets, weights = inputs.double(), targets.double(), weights.double()
    share = (weights / weights.sum())[:, None]
    mean_x = (share * inputs).sum(0) if intercept else inputs.new_zeros(inputs.shape[1])
    mean_y = (share * targets).sum(0) if intercept else targets.new_zeros(targets.shape[1])
    root = weights.sqrt()[:, None]
    left, right = root * (inputs - mean_x), root * (targets - mean_y)
    orthogonal, triangular = torch.linalg.qr(left)
    u, singular_values, vh = torch.linalg.svd(triangular, full_matrices=False)
    cutoff = torch.finfo(torch.float64).eps * max(left.shape) * singular_values.max()
    kept = singular_values > cutoff
    inverse = torch.where(kept, 1 / torch.where(kept, singular_values, 1.0), 0.0)
    coefficients = vh.mT @ (inverse[:, None] * (u.mT @ (orthogonal.mT @ right)))
    return LeastSquares(coefficients, mean_y - mean_x @ coefficients, int(kept.sum()), singular_values)


class LinearRegression(Regressor):
    """Ordinary least squares: minimise Σ sₙ (yₙ − w·xₙ − b)², solved in float64 without iteration.

    Where columns of X depend on each other, the solution of smallest norm is taken, as
    scikit-learn's `LinearRegression` does. Computed on the device of X if X is a tensor.

    Attributes: `coef_` (D,) or (O, D), `intercept_`, `rank_`, `singular_`, `n_features_in_`,
    `feature_names_in_`.
    """

    coef_: Array
    intercept_: Any
    rank_: int
    singular_: Array

    def __init__(self, *, fit_intercept: bool = True) -> None:
        self.fit_intercept = fit_intercept

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        targets = read_targets(self, X, y)
        inputs = read_features(self, X, reset=True)
        weights = read_weights(sample_weight, inputs).to(inputs.device)
        outputs = targets.reshape(len(targets), -1).to(inputs.device)
        solution = least_squares(inputs, outputs, weights, intercept=bool(self.fit_intercept))
        coefficients, intercept = to_numpy(solution.coefficients.mT), to_numpy(solution.intercept)
        single = targets.ndim == 1
        self.coef_ = coefficients[0] if single else coefficients
        self.intercept_ = float(intercept[0]) if single else intercept
        self.rank_, self.singular_ = solution.rank, to_numpy(solution.singular_values)
        return self

    def predict(self, X: Any) -> Any:
        """w·x + b for each row of X, shaped like the y of `fit`."""
        inputs = read_features(self, X)
        coefficients = to_tensor(self.coef_.T).to(inputs)
        intercept = torch.as_tensor(self.intercept_, dtype=inputs.dtype, device=inputs.device)
        return in_form_of(X, inputs @ coefficients + intercept)
