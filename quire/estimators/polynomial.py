"""Least squares on all monomials of the features up to a degree.

N rows, D features, O outputs, T terms (monomials without the constant).
"""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from math import comb
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from sklearn.model_selection import KFold, check_cv
from torch import Tensor

from quire.errors import InputError
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
from quire.estimators.linear import least_squares
from quire.estimators.network import RandomState, is_number
from quire.functional.generalise import polynomial_features
from quire.options import check

MAX_TERMS = 20_000
"""A design matrix of more columns than this is a mistake more often than a wish."""


class Polynomial(NamedTuple):
    """Σ_t c_t·φ_t(z) + b with φ the monomials of z = (x − centre)/half.

    z lies in [−1, 1] for the rows of the fit, where powers stay of one size; powers of raw x would
    lose all digits at a moderate degree.
    """

    degree: int
    centre: Tensor
    half: Tensor
    coefficients: Tensor
    """(T, O)"""
    intercept: Tensor
    """(O,)"""

    def to(self, device: torch.device | str) -> Polynomial:
        return Polynomial(self.degree, *(part.to(device) for part in self[1:]))

    def __call__(self, inputs: Tensor) -> Tensor:
        features = polynomial_features((inputs.double() - self.centre) / self.half, self.degree, bias=False)
        return features @ self.coefficients + self.intercept


def monomial_powers(features: int, degree: int) -> Array:
    """The exponents of the columns of `polynomial_features`, without the constant; (T, D)."""
    powers = np.zeros((comb(features + degree, degree) - 1, features), dtype=np.int64)
    choices = (c for d in range(1, degree + 1) for c in combinations_with_replacement(range(features), d))
    for row, chosen in enumerate(choices):
        np.add.at(powers[row], list(chosen), 1)
    return powers


def fit_polynomial(inputs: Tensor, targets: Tensor, weights: Tensor, degree: int) -> Polynomial:
    features = inputs.shape[1]
    terms = comb(features + degree, degree) - 1
    if terms > MAX_TERMS:
        raise InputError(
            f"{features} features to degree {degree} make {terms} terms",
            expected=f"at most {MAX_TERMS}",
            fix="lower the degree, or choose features first",
        )
    # Rows without weight must not move the interval that z is scaled to.
    counted = weights > 0
    inputs, targets, weights = inputs[counted].double(), targets[counted].double(), weights[counted]
    low, high = inputs.amin(0), inputs.amax(0)
    centre = (low + high) / 2
    half = torch.where(high > low, (high - low) / 2, 1.0)
    columns = polynomial_features((inputs - centre) / half, degree, bias=False)
    solution = least_squares(columns, targets, weights)
    return Polynomial(degree, centre, half, solution.coefficients, solution.intercept)


def original_units(fitted: Polynomial, powers: Array) -> tuple[Array, Array]:
    """The coefficients (T, O) of the monomials of raw x, and the constant (O,).

    ((x − c)/h)^p is expanded by the binomial theorem, feature by feature.
    """
    expanded = [
        [(np.polynomial.Polynomial([-centre / half, 1 / half]) ** p).coef for p in range(fitted.degree + 1)]
        for centre, half in zip(to_numpy(fitted.centre), to_numpy(fitted.half), strict=True)
    ]
    place = {tuple(row): t for t, row in enumerate(powers.tolist())}
    coefficients = to_numpy(fitted.coefficients)
    result = np.zeros_like(coefficients)
    constant = to_numpy(fitted.intercept).copy()
    for row, coefficient in zip(powers, coefficients, strict=True):
        features = np.flatnonzero(row)
        for lower in product(*(range(row[d] + 1) for d in features)):
            factor = np.prod([expanded[d][row[d]][k] for d, k in zip(features, lower, strict=True)])
            exponents = np.zeros_like(row)
            exponents[features] = lower
            if any(lower):
                result[place[tuple(exponents.tolist())]] += factor * coefficient
            else:
                constant += factor * coefficient
    return result, constant


class PolynomialRegression(Regressor):
    """Least squares on all products of powers of the features up to `degree`, interactions included.

    degree: an integer, or "cv" to take the degree in 1…max_degree with the smallest squared error in
        cross-validation.
    cv: number of (shuffled) folds, or a scikit-learn splitter or list of splits; only for "cv".
    random_state: the seed of the shuffling.

    Solved in float64 on features scaled to [−1, 1], on which predictions are computed too; `coef_` and
    `intercept_` are given in the units of X.

    Attributes: `coef_` (T,) or (O, T) beside `powers_` (T, D), the exponents of its terms, and
    `terms_`, their names; `intercept_`, `degree_`, `validation_errors_` (mean squared error for each
    degree, only for "cv"), `n_features_in_`, `feature_names_in_`.
    """

    coef_: Array
    intercept_: Any
    powers_: Array
    terms_: list[str]
    degree_: int
    validation_errors_: Array

    def __init__(
        self,
        degree: int | Literal["cv"] = 2,
        *,
        max_degree: int = 10,
        cv: Any = 5,
        random_state: RandomState = None,
    ) -> None:
        self.degree = degree
        self.max_degree = max_degree
        self.cv = cv
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        good = is_number(self.degree, 1, np.inf, whole=True) or self.degree == "cv"
        check(good, "degree", self.degree, 'an integer >= 1 or "cv"')
        good = is_number(self.max_degree, 1, np.inf, whole=True)
        check(good, "max_degree", self.max_degree, "an integer >= 1")
        targets = read_targets(self, X, y)
        inputs = read_features(self, X, reset=True)
        weights = read_weights(sample_weight, inputs).to(inputs.device)
        outputs = targets.reshape(len(targets), -1).to(inputs.device)
        if self.degree == "cv":
            self.validation_errors_ = self._cross_validate(inputs, outputs, weights)
            self.degree_ = int(self.validation_errors_.argmin()) + 1
        else:
            self.__dict__.pop("validation_errors_", None)
            self.degree_ = int(self.degree)
        fitted = fit_polynomial(inputs, outputs, weights, self.degree_)
        self.powers_ = monomial_powers(inputs.shape[1], self.degree_)
        coefficients, constant = original_units(fitted, self.powers_)
        single = targets.ndim == 1
        self._fitted = fitted.to("cpu")
        self._single = single
        self.coef_ = coefficients[:, 0] if single else coefficients.T
        self.intercept_ = float(constant[0]) if single else constant
        names = getattr(self, "feature_names_in_", [f"x{d}" for d in range(inputs.shape[1])])
        self.terms_ = [
            " ".join(f"{names[d]}^{row[d]}" if row[d] > 1 else f"{names[d]}" for d in np.flatnonzero(row))
            for row in self.powers_
        ]
        return self

    def _cross_validate(self, inputs: Tensor, outputs: Tensor, weights: Tensor) -> Array:
        """The weighted mean squared error on held-out rows, for each degree."""
        folds = self.cv
        if isinstance(folds, int):
            if not 2 <= folds <= len(inputs):
                raise InputError(
                    f"cv is {folds} for n_samples={len(inputs)}",
                    expected="between 2 folds and one for each sample",
                    fix='lower cv, add rows, or give the degree instead of "cv"',
                )
            folds = KFold(folds, shuffle=True, random_state=self.random_state)
        rows = np.empty((len(inputs), 1))
        errors = np.zeros(self.max_degree)
        total = 0.0
        for train, held_out in check_cv(folds).split(rows):
            train, held_out = (to_tensor(part).to(inputs.device) for part in (train, held_out))
            total += float(weights[held_out].sum())
            for d in range(self.max_degree):
                fitted = fit_polynomial(inputs[train], outputs[train], weights[train], d + 1)
                squared = (fitted(inputs[held_out]) - outputs[held_out]).square().mean(1)
                errors[d] += float((weights[held_out] * squared).sum())
        return errors / total

    def predict(self, X: Any) -> Any:
        """The value of the polynomial for each row of X, shaped like the y of `fit`."""
        inputs = read_features(self, X)
        values = self._fitted.to(inputs.device)(inputs).to(inputs.dtype)
        return in_form_of(X, values[:, 0] if self._single else values)
