"""What the estimators share: tables of numbers in, predictions out in the form the input had.

N rows, D features, O outputs, K classes.

NumPy arrays, data frames, lists and torch tensors are read. Tensors stay on their device, and what
is predicted from a tensor is a tensor on that device; everything else gives NumPy arrays. Learned
attributes are NumPy arrays in all cases, so that scikit-learn's tools can read them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from quire.errors import InputError

Array = np.ndarray[Any, np.dtype[Any]]


def to_numpy(values: Any) -> Any:
    """A tensor as an array; anything else unchanged."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def to_tensor(values: Any) -> Tensor:
    """An array as a tensor that may be written to; read-only memory is copied."""
    values = np.ascontiguousarray(values)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def in_form_of(X: Any, values: Tensor) -> Any:
    """`values` as a tensor on X's device if X is a tensor, as an array otherwise."""
    return values.to(X.device) if isinstance(X, Tensor) else to_numpy(values)


def labels_in_form_of(X: Any, classes: Array, codes: Tensor) -> Any:
    """The labels of numbered classes; those that are no numbers have no tensor form and stay an array."""
    labels = classes[to_numpy(codes)]
    numeric = np.issubdtype(classes.dtype, np.number) or classes.dtype == np.bool_
    return in_form_of(X, to_tensor(labels)) if isinstance(X, Tensor) and numeric else labels


def read_features(estimator: BaseEstimator, X: Any, *, reset: bool = False, finite: bool = True) -> Tensor:
    """X as a finite float tensor (N, D); its width and column names are noted (`reset`) or compared. Whether
    it is `finite` can be left to what is made of it, which saves a pass over X.

    float64 stays, every other floating type becomes float32 if it was a tensor or float32, and
    integers become float64.
    """
    if not reset:
        check_is_fitted(estimator)
    if not isinstance(X, Tensor):
        kinds = (np.float64, np.float32)
        X = validate_data(estimator, X, reset=reset, dtype=kinds, ensure_all_finite=finite)
        return to_tensor(X)
    name = type(estimator).__name__
    if X.layout != torch.strided or X.is_complex() or X.ndim != 2:
        raise InputError(
            f"{name} was given a {'complex ' * X.is_complex()}tensor of layout {X.layout} and shape "
            f"{tuple(X.shape)}",
            expected="a dense real tensor of shape (samples, features)",
            fix="use X.to_dense(), X.reshape(-1, 1) for one feature or X.reshape(1, -1) for one sample",
        )
    if 0 in X.shape:
        raise InputError(
            f"{name} was given a tensor of shape {tuple(X.shape)}",
            expected="at least one sample and one feature",
        )
    validate_data(estimator, X, reset=reset, skip_check_array=True)
    X = X.detach()
    if not X.is_floating_point():
        return X.to(torch.float64)
    if finite and not bool(torch.isfinite(X).all()):
        raise InputError(
            f"Input X of {name} contains NaN or infinity",
            expected="finite numbers",
            fix="impute or drop the rows: X[torch.isfinite(X).all(1)]",
        )
    return X if X.dtype == torch.float64 else X.to(torch.float32)


def read_labels(estimator: BaseEstimator, X: Any, y: Any) -> tuple[Array, Tensor]:
    """The sorted classes of y and, for each row, the number of its class (N,)."""
    y = validate_data(estimator, X="no_validation", y=to_numpy(y))
    check_consistent_length(X, y)
    y = column_or_1d(y, warn=True)
    check_classification_targets(y)
    classes, codes = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise InputError(
            f"y has one class only: {classes[0]}" if len(classes) else "y is empty: 0 samples",
            expected=f"at least two classes for {type(estimator).__name__}",
            fix="add rows of another class",
        )
    return classes, to_tensor(codes.astype(np.int64))


def read_targets(estimator: BaseEstimator, X: Any, y: Any) -> Tensor:
    """y as a finite float64 tensor, (N,) or (N, O)."""
    y = validate_data(estimator, X="no_validation", y=to_numpy(y), multi_output=True, y_numeric=True)
    check_consistent_length(X, y)
    if y.ndim > 2:
        raise InputError(f"y has shape {y.shape}", expected="(samples,) or (samples, outputs)")
    return to_tensor(y.astype(np.float64))


def read_weights(sample_weight: Any, X: Any) -> Tensor:
    """Non-negative weights of the rows (N,), ones where none are given."""
    rows = np.empty((len(X), 1))
    weights = _check_sample_weight(to_numpy(sample_weight), rows, dtype=np.float64, ensure_non_negative=True)
    if not weights.any():
        raise InputError("sample_weight is zero for every row", expected="at least one positive weight")
    return to_tensor(weights)


class Regressor(RegressorMixin, BaseEstimator):
    """A scikit-learn regressor of one or several outputs that also takes tensors."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @abstractmethod
    def predict(self, X: Any) -> Any:
        """The prediction for each row of X, shaped like the y of `fit`."""

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R² = 1 − Σ(y−ŷ)² / Σ(y−ȳ)², the mean over outputs."""
        return r2_score(to_numpy(y), to_numpy(self.predict(X)), sample_weight=to_numpy(sample_weight))


class Classifier(ClassifierMixin, BaseEstimator):
    """A scikit-learn classifier that also takes tensors. A subclass gives the log-probabilities."""

    classes_: Array

    @abstractmethod
    def _log_probabilities(self, X: Tensor) -> Tensor:
        """ln p(class | row), (N, K)."""

    def predict(self, X: Any) -> Any:
        """The most probable class of each row."""
        codes = self._log_probabilities(read_features(self, X)).argmax(1)
        return labels_in_form_of(X, self.classes_, codes)

    def predict_log_proba(self, X: Any) -> Any:
        """ln p(class | row), (N, K), columns in the order of `classes_`."""
        return in_form_of(X, self._log_probabilities(read_features(self, X)))

    def predict_proba(self, X: Any) -> Any:
        """p(class | row), (N, K), columns in the order of `classes_`."""
        return in_form_of(X, self._log_probabilities(read_features(self, X)).exp())

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of rows whose class is predicted right."""
        return accuracy_score(to_numpy(y), to_numpy(self.predict(X)), sample_weight=to_numpy(sample_weight))
