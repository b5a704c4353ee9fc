"""Nadaraya-Watson estimators against scikit-learn's neighbours, its kernels, and refitting without a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import RadiusNeighborsClassifier, RadiusNeighborsRegressor

from quire.errors import InputError
from quire.estimators import NadarayaWatsonClassifier, NadarayaWatsonRegressor

pytestmark = pytest.mark.slow

KERNELS = ["gaussian", "boxcar", "epanechnikov"]


def table(rows: int = 40, features: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    X = random.uniform(-2, 2, (rows, features))
    y = np.sin(3 * X[:, 0]) + 0.1 * random.normal(size=rows)
    return X, y, random.uniform(-2, 2, (15, features))


@pytest.mark.parametrize("features", [1, 3])
def test_a_gaussian_is_scikit_learns_kernel(features: int) -> None:
    X, y, fresh = table(features=features)
    weights = rbf_kernel(fresh, X, gamma=1 / (2 * 0.3**2))
    wanted = weights @ y / weights.sum(1)
    np.testing.assert_allclose(NadarayaWatsonRegressor(width=0.3).fit(X, y).predict(fresh), wanted)
    several = NadarayaWatsonRegressor(width=0.3).fit(X, np.stack([y, -2 * y], 1)).predict(fresh)
    np.testing.assert_allclose(several, np.stack([wanted, -2 * wanted], 1))


@pytest.mark.parametrize("features", [1, 2])
@pytest.mark.filterwarnings("ignore:One or more samples")
def test_a_boxcar_is_scikit_learns_radius(features: int) -> None:
    X, y, fresh = table(200, features)
    peer = RadiusNeighborsRegressor(radius=0.6).fit(X, y)
    own = NadarayaWatsonRegressor("boxcar", 0.6).fit(X, y)
    np.testing.assert_allclose(own.predict(fresh), peer.predict(fresh))
    labels = np.array(["low", "middle", "high"])[np.digitize(y, [-0.5, 0.5])]
    voters = RadiusNeighborsClassifier(radius=0.6).fit(X, labels)
    classifier = NadarayaWatsonClassifier("boxcar", 0.6).fit(X, labels)
    assert classifier.classes_.tolist() == voters.classes_.tolist()
    np.testing.assert_allclose(classifier.predict_proba(fresh), voters.predict_proba(fresh))
    assert (classifier.predict(fresh) == voters.predict(fresh)).mean() > 0.9  # ties may fall either way


def test_an_epanechnikov_by_hand() -> None:
    own = NadarayaWatsonRegressor("epanechnikov", 2.0).fit([[0.0], [1.0], [9.0]], [4.0, 8.0, 100.0])
    # At 0: weights 1 and 3/4. At 4: none, and 1 is nearest. At 10: 9 alone.
    np.testing.assert_allclose(own.predict([[0.0], [4.0], [10.0]]), [10 / 1.75, 8.0, 100.0])
    mean = NadarayaWatsonRegressor("epanechnikov", 2.0, empty="mean").fit([[0.0], [9.0]], [1.0, 3.0])
    assert mean.predict([[5.0]]).tolist() == [2.0]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("features", [1, 2])
def test_the_width_is_chosen_by_refitting_without_each_row(kernel: Any, features: int) -> None:
    X, y, _ = table(20, features)
    weights = np.random.default_rng(1).uniform(0.5, 2, 20)
    widths = [0.05, 0.2, 0.5, 2.0]
    own = NadarayaWatsonRegressor(kernel, widths=widths).fit(X, y, weights)
    errors = []
    for width in widths:
        squared = []
        for n in range(20):
            others = np.arange(20) != n
            rest = NadarayaWatsonRegressor(kernel, width).fit(X[others], y[others], weights[others])
            squared.append((rest.predict(X[n : n + 1])[0] - y[n]) ** 2)
        errors.append(np.average(squared, weights=weights))
    np.testing.assert_allclose(own.validation_errors_, errors)
    # Below the distance to the nearest row, all compact kernels are alike; the widest of them is taken.
    assert own.width_ == max(w for w, e in zip(widths, errors, strict=True) if e <= min(errors) * (1 + 1e-9))
    assert own.widths_.tolist() == widths


def test_the_grid_finds_a_good_width_at_any_scale() -> None:
    X, y, fresh = table(300, 1)
    truth = np.sin(3 * fresh[:, 0])
    for scale in (1e-3, 1.0, 1e4):
        own = NadarayaWatsonRegressor().fit(X * scale, y)
        assert own.widths_[0] < own.width_ < own.widths_[-1]
        assert np.abs(own.predict(fresh * scale) - truth).mean() < 0.08
        assert own.width_ / scale == pytest.approx(NadarayaWatsonRegressor().fit(X, y).width_)


def test_copies_are_weights_and_do_not_vouch_for_each_other() -> None:
    X, y, fresh = table(30, 1)
    counts = np.random.default_rng(2).integers(0, 4, 30)
    weighted = NadarayaWatsonRegressor().fit(X, y, counts)
    repeated = NadarayaWatsonRegressor().fit(X.repeat(counts, 0), y.repeat(counts))
    assert repeated.width_ == pytest.approx(weighted.width_)
    np.testing.assert_allclose(repeated.predict(fresh), weighted.predict(fresh))
    # Every row twice: a plain leave-one-out would see each copy and shrink the width to nothing.
    twice = NadarayaWatsonRegressor().fit(X.repeat(2, 0), y.repeat(2))
    assert twice.width_ == pytest.approx(NadarayaWatsonRegressor().fit(X, y).width_)
    assert len(twice.points_) == 30


def test_rows_with_the_same_features_are_averaged() -> None:
    own = NadarayaWatsonRegressor(width=0.1).fit([[0.0], [0.0], [5.0]], [1.0, 3.0, 7.0])
    assert own.predict([[0.0]]).tolist() == [2.0]
    assert own.weights_.tolist() == [2.0, 1.0]
    alone = NadarayaWatsonRegressor().fit([[1.0], [1.0]], [2.0, 4.0])
    assert alone.predict([[-8.0]]).tolist() == [3.0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_iris(kernel: Any) -> None:
    X, y = load_iris(return_X_y=True)
    own = NadarayaWatsonClassifier(kernel).fit(X[::2], y[::2])
    assert own.score(X[1::2], y[1::2]) > 0.93
    probabilities = own.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(own.predict_log_proba(X), np.log(probabilities), atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tensors_in_tensors_out(kernel: Any, device: str) -> None:
    X, y, fresh = table()
    tensors = torch.tensor(X, device=device), torch.tensor(y, device=device)
    own = NadarayaWatsonRegressor(kernel).fit(*tensors)
    there = own.predict(torch.tensor(fresh, device=device))
    assert there.device.type == device
    assert there.dtype == torch.float64
    np.testing.assert_allclose(own.predict(fresh), there.cpu(), rtol=1e-9)
    assert own.predict(torch.tensor(fresh, device=device).float()).dtype == torch.float32
    assert own.predict(fresh.astype(np.float32)).dtype == np.float32
    labels = (tensors[1] > 0).long()
    classifier = NadarayaWatsonClassifier(kernel).fit(tensors[0], labels)
    assert classifier.predict(tensors[0]).device.type == device
    assert classifier.predict_proba(tensors[0]).shape == (40, 2)


def test_it_can_be_cloned_and_searched() -> None:
    X, y, _ = table(60, 1)
    search = GridSearchCV(NadarayaWatsonRegressor(), {"width": [0.001, 0.15, 50.0]}, cv=3).fit(X, y)
    assert search.best_params_ == {"width": 0.15}
    again = clone(search.best_estimator_)
    assert again.get_params() == search.best_estimator_.get_params()
    fitted = NadarayaWatsonRegressor().fit(X, y)
    assert not hasattr(fitted.set_params(width=0.2).fit(X, y), "validation_errors_")


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (NadarayaWatsonRegressor("gausian"), "did you mean 'gaussian'"),
        (NadarayaWatsonRegressor(width=0), 'width is 0\n  expected: a number > 0 or "cv"'),
        (NadarayaWatsonRegressor(width="loo"), "width is 'loo'"),
        (NadarayaWatsonRegressor(width=float("nan")), "width is nan"),
        (NadarayaWatsonRegressor(widths=[1.0, -1.0]), "numbers > 0 to choose from"),
        (NadarayaWatsonRegressor(widths=[]), "leave widths out"),
        (NadarayaWatsonRegressor(empty="none"), "no row is in reach 'none'"),
        (NadarayaWatsonClassifier(empty="zero"), "whose probabilities sum to 1"),
    ],
)
def test_messages(estimator: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        estimator.fit([[0.0], [1.0], [2.0]], [0, 1, 1])
