"""Nadaraya-Watson: predict by averaging the training rows near by, weighted by a kernel of the distance.

N rows, P distinct rows, D features, O outputs, K classes, h width of the kernel.

Nothing is trained but the width. Rows with equal features always act together, so they are kept as one point
with their total weight and their mean target: P points. Leave-one-out then leaves out a point, which makes
two equal rows the same as one row of weight 2, and keeps copies from vouching for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError, unknown_name
from quire.estimators.base import (
    Array,
    Classifier,
    Regressor,
    in_form_of,
    read_features,
    read_labels,
    read_targets,
    read_weights,
    to_numpy,
    to_tensor,
)
from quire.functional.kernel_pooling import EMPTY, KERNELS, Empty, Kernel, nadaraya_watson
from quire.options import check


class Points(NamedTuple):
    """Distinct training rows (P, D), the mean of their targets (P, O), and their total weights (P,)."""

    places: Tensor
    targets: Tensor
    weights: Tensor


def distinct_points(inputs: Tensor, outputs: Tensor, weights: Tensor) -> Points:
    """Rows of positive weight with equal features as one point; in float64."""
    kept = weights > 0
    inputs, outputs, weights = inputs[kept].double(), outputs[kept].double(), weights[kept].double()
    places, which = torch.unique(inputs, dim=0, return_inverse=True)
    total = weights.new_zeros(len(places)).index_add_(0, which, weights)
    sums = outputs.new_zeros(len(places), outputs.shape[1]).index_add_(0, which, outputs * weights[:, None])
    return Points(places, sums / total[:, None], total)


def candidate_widths(points: Points, count: int = 25) -> Array:
    """σ P^(−1/(D+4)) · 2^t for t from −4 to 4, with σ the typical deviation of a feature.

    The middle is the rule of thumb for smooth densities; σ is 1 where all points are one.
    """
    share = (points.weights / points.weights.sum())[:, None]
    centred = points.places - (share * points.places).sum(0)
    deviation = float((share * centred.square()).sum(0).mean().sqrt()) or 1.0
    rule_of_thumb = deviation * len(points.places) ** (-1 / (points.places.shape[1] + 4))
    return rule_of_thumb * 2.0 ** np.linspace(-4, 4, count)


def leave_one_out_errors(
    points: Points, kernel: Kernel, widths: Sequence[float] | Array, empty: Empty
) -> Array:
    """For each width the weighted mean of (ȳ_p − ŷ_p)² over outputs, ŷ_p from the other points."""
    share = points.weights / points.weights.sum()
    errors = []
    for width in widths:
        predicted = nadaraya_watson(
            points.places, points.places, points.targets, kernel, float(width),
            weights=points.weights, exclude_self=True, empty=empty,
        )  # fmt: skip
        errors.append(float((share * (predicted - points.targets).square().mean(1)).sum()))
    return np.array(errors)


def largest_of_best(widths: Array, errors: Array) -> float:
    """The width of the smallest error; of widths that differ by rounding alone, the largest."""
    best = errors <= errors.min() * (1 + 1e-9) + 1e-300
    return float(widths[best].max())


class _Fitted(NamedTuple):
    """What fit learns, as arrays: the points, the width, and how it was chosen."""

    points: Points
    width: float
    widths: Array | None
    errors: Array | None


def _fit(inputs: Tensor, outputs: Tensor, weights: Tensor, options: Any) -> _Fitted:
    """`options` is the estimator, whose parameters are checked here."""
    if options.kernel not in KERNELS:
        raise unknown_name("kernel", str(options.kernel), KERNELS)
    if options.empty not in EMPTY:
        raise unknown_name("answer where no row is in reach", str(options.empty), EMPTY)
    points = distinct_points(inputs, outputs, weights)
    if isinstance(options.width, str):
        check(options.width == "cv", "width", options.width, 'a number > 0 or "cv"')
        widths = candidate_widths(points) if options.widths is None else np.asarray(options.widths, float)
        if widths.ndim != 1 or not len(widths) or not (np.isfinite(widths) & (widths > 0)).all():
            raise InputError(
                f"widths {options.widths!r}", expected="numbers > 0 to choose from", fix="leave widths out"
            )
        if len(points.places) == 1:  # one point answers everything alike
            return _Fitted(points, float(widths[len(widths) // 2]), widths, np.zeros(len(widths)))
        errors = leave_one_out_errors(points, options.kernel, widths, options.empty)
        return _Fitted(points, largest_of_best(widths, errors), widths, errors)
    number = isinstance(options.width, int | float | np.number) and np.isfinite(options.width)
    check(bool(number) and options.width > 0, "width", options.width, 'a number > 0 or "cv"')
    return _Fitted(points, float(options.width), None, None)


def _store(estimator: Any, fitted: _Fitted) -> None:
    estimator.points_, estimator.targets_, estimator.weights_ = (to_numpy(part) for part in fitted.points)
    estimator.width_ = fitted.width
    for name, values in (("widths_", fitted.widths), ("validation_errors_", fitted.errors)):
        estimator.__dict__.pop(name, None)
        if values is not None:
            setattr(estimator, name, values)


def _pool(estimator: Any, inputs: Tensor) -> Tensor:
    points, targets = (to_tensor(part).to(inputs) for part in (estimator.points_, estimator.targets_))
    weights = to_tensor(estimator.weights_).to(inputs.device)
    return nadaraya_watson(
        inputs, points, targets, estimator.kernel, estimator.width_, weights=weights, empty=estimator.empty
    )


class KernelParameters:
    """What both estimators are made with and learn."""

    points_: Array
    targets_: Array
    weights_: Array
    width_: float
    widths_: Array
    validation_errors_: Array

    def __init__(
        self,
        kernel: Kernel = "gaussian",
        width: float | Literal["cv"] = "cv",
        *,
        widths: Sequence[float] | None = None,
        empty: Empty = "nearest",
    ) -> None:
        self.kernel = kernel
        self.width = width
        self.widths = widths
        self.empty = empty


class NadarayaWatsonRegressor(KernelParameters, Regressor):
    """ŷ(x) = Σ sₙ K(‖x − xₙ‖/h) yₙ / Σ sₙ K(‖x − xₙ‖/h), for one or several outputs in any dimension.

    kernel: "gaussian", "boxcar" or "epanechnikov".
    width: h, or "cv" to take the one with the smallest squared error in leave-one-out.
    widths: what "cv" chooses from; around a rule of thumb unless given. Leave-one-out costs O(P²) for
        each, O(P log P) for the compact kernels of one feature.
    empty: the answer where no row is in reach of a compact kernel: "nearest", "mean" or "zero".

    One width serves all features, so bring them to one scale first. Predictions take O(P) memory.

    Attributes: `width_`, `points_` (P, D), `targets_` (P, O), `weights_` (P,), `widths_` and
    `validation_errors_` (only for "cv"), `n_features_in_`, `feature_names_in_`.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        targets = read_targets(self, X, y)
        inputs = read_features(self, X, reset=True)
        weights = read_weights(sample_weight, inputs).to(inputs.device)
        outputs = targets.reshape(len(targets), -1).to(inputs.device)
        _store(self, _fit(inputs, outputs, weights, self))
        self._single = targets.ndim == 1
        return self

    def predict(self, X: Any) -> Any:
        """The weighted average of the targets near each row of X, shaped like the y of `fit`."""
        values = _pool(self, read_features(self, X))
        return in_form_of(X, values[:, 0] if self._single else values)


class NadarayaWatsonClassifier(KernelParameters, Classifier):
    """p(k | x) = Σ_{n: yₙ = k} sₙ K(‖x − xₙ‖/h) / Σ sₙ K(‖x − xₙ‖/h): each row near by votes for its class.

    Parameters and attributes are those of `NadarayaWatsonRegressor`, with `classes_`. "cv" takes the width
    with the smallest squared error of the probabilities (Brier score), which stays finite where a
    compact kernel gives a class none; ln 0 = −∞ is then its log-probability.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        self.classes_, codes = read_labels(self, X, y)
        inputs = read_features(self, X, reset=True)
        weights = read_weights(sample_weight, inputs).to(inputs.device)
        if self.empty == "zero":
            raise InputError(
                "empty is 'zero' in a classifier",
                expected="'nearest' or 'mean', whose probabilities sum to 1",
                fix="use empty='mean' for the shares of the classes in the training data",
            )
        votes = functional.one_hot(codes, len(self.classes_)).to(inputs.device, torch.float64)
        _store(self, _fit(inputs, votes, weights, self))
        return self

    def _log_probabilities(self, X: Tensor) -> Tensor:
        return _pool(self, X).log()
