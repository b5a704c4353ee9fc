"""Logistic regression for two or more classes.

N rows, D features, K classes.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn import functional as F

from quire.errors import InputError
from quire.estimators.base import (
    Array,
    Classifier,
    in_form_of,
    read_features,
    read_labels,
    read_weights,
    to_numpy,
    to_tensor,
)
from quire.estimators.network import is_number
from quire.estimators.newton import Problem, minimise
from quire.options import check


class LogisticRegression(Classifier):
    """Minimise C·Σ sₙ·ℓ(yₙ, xₙ) + ½‖w‖², with ℓ the cross-entropy; the intercept is not penalised.

    Two classes use one logit, more classes the multinomial (softmax) model, as in scikit-learn. The
    optimum is found by Newton's method in float64, so it is scikit-learn's to rounding, on the
    device of X if X is a tensor.

    C: inverse strength of the penalty, ``math.inf`` for none.
    tol: stop when the mean objective can fall by no more than this (Newton's own estimate).
    max_iter: Newton steps; a `ConvergenceWarning` says when they were not enough.
    class_weight: a dictionary from labels to factors, or "balanced".

    Attributes: `classes_`, `coef_` (1, D) or (K, D), `intercept_`, `n_iter_`, `n_features_in_`,
    `feature_names_in_`.
    """

    coef_: Array
    intercept_: Array
    n_iter_: int

    def __init__(
        self,
        *,
        C: float = 1.0,
        fit_intercept: bool = True,
        tol: float = 1e-12,
        max_iter: int = 100,
        class_weight: dict[Any, float] | Literal["balanced"] | None = None,
    ) -> None:
        self.C = C
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        tiny = float(np.finfo(np.float64).tiny)
        good = is_number(self.C, tiny, np.inf) or (isinstance(self.C, float) and np.inf == self.C)
        check(good, "C", self.C, "a number > 0")
        check(is_number(self.tol, tiny, np.inf), "tol", self.tol, "a number > 0")
        good = is_number(self.max_iter, 1, np.inf, whole=True)
        check(good, "max_iter", self.max_iter, "an integer >= 1")
        self.classes_, codes = read_labels(self, X, y)
        inputs = read_features(self, X, reset=True).double()
        weights = self._row_weights(codes, read_weights(sample_weight, inputs)).to(inputs.device)
        codes = codes.to(inputs.device)

        total = weights.sum()
        shares = (weights / total)[:, None]
        # Taking the mean off is exact with a free intercept, and spares the Hessian its worst condition.
        centre = (shares * inputs).sum(0) if self.fit_intercept else inputs.new_zeros(inputs.shape[1])
        columns = inputs - centre
        penalty = inputs.new_full((inputs.shape[1], 1), 1.0) / (self.C * total)
        if self.fit_intercept:
            columns = torch.cat([columns, columns.new_ones(len(columns), 1)], 1)
            penalty = torch.cat([penalty, penalty.new_zeros(1, 1)])
        targets = F.one_hot(codes, len(self.classes_)).double()
        targets = targets[:, 1:] if len(self.classes_) == 2 else targets

        problem = Problem(columns, targets, shares, penalty)
        solution = minimise(problem, tolerance=self.tol, max_iterations=self.max_iter)
        if not solution.converged:
            warnings.warn(
                f"LogisticRegression did not converge in {self.max_iter} Newton steps. Raise max_iter, or "
                "lower C: without a penalty, classes that can be separated have no optimum.",
                ConvergenceWarning,
                stacklevel=2,
            )
        coefficients = solution.weights[: inputs.shape[1]]
        logits = coefficients.shape[1]
        intercept = solution.weights[-1] if self.fit_intercept else coefficients.new_zeros(logits)
        self.coef_ = to_numpy(coefficients.mT.contiguous())
        self.intercept_ = to_numpy(intercept - centre @ coefficients)
        self.n_iter_ = solution.iterations
        return self

    def _row_weights(self, codes: Tensor, weights: Tensor) -> Tensor:
        labels = self.classes_[codes.numpy()]
        totals = torch.bincount(codes, weights, len(self.classes_))
        if (totals == 0).any():
            missing = [str(label) for label in self.classes_[(totals == 0).numpy()]]
            raise InputError(
                f"sample_weight is zero for every row of class {', '.join(missing)}",
                expected="a positive weight in each class",
                fix="leave the rows of these classes out",
            )
        if self.class_weight is None:
            return weights
        if isinstance(self.class_weight, str):
            good = self.class_weight == "balanced"
            check(good, "class_weight", self.class_weight, "a dictionary or 'balanced'")
            factors = totals.sum() / (len(totals) * totals)
        else:
            factors = to_tensor(
                np.asarray(compute_class_weight(self.class_weight, classes=self.classes_, y=labels), float)
            )
        return weights * factors[codes]

    def _logits(self, inputs: Tensor) -> Tensor:
        return inputs @ to_tensor(self.coef_.T).to(inputs) + to_tensor(self.intercept_).to(inputs)

    def _log_probabilities(self, X: Tensor) -> Tensor:
        logits = self._logits(X)
        if logits.shape[1] == 1:
            return F.logsigmoid(torch.cat([-logits, logits], 1))
        return logits.log_softmax(1)

    def decision_function(self, X: Any) -> Any:
        """w·x + b: (N,) for two classes, where positive means `classes_[1]`, otherwise (N, K)."""
        logits = self._logits(read_features(self, X))
        return in_form_of(X, logits[:, 0] if logits.shape[1] == 1 else logits)
