"""scikit-learn's own checks of an estimator, all of them, with no expected failure."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.base import BaseEstimator, is_classifier, is_regressor
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

from quire.estimators import (
    PCA,
    Autoencoder,
    BaggingEnsemble,
    GaussianMixture,
    KMeans,
    LinearRegression,
    LogisticRegression,
    MLPClassifier,
    MLPRegressor,
    NadarayaWatsonClassifier,
    NadarayaWatsonRegressor,
    PolynomialRegression,
)

# Few epochs are enough for the checks; that they are few is said by a warning, tested elsewhere.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

ESTIMATORS = [
    KMeans(),
    KMeans(n_clusters=3, n_init=3),
    PCA(),
    PCA(1),
    PCA(0.5, whiten=True),
    PCA(1, svd_solver="randomized", random_state=0),
    GaussianMixture(),
    GaussianMixture(2, covariance_type="tied", n_init=2),
    GaussianMixture(2, covariance_type="diag", init_params="k-means++"),
    GaussianMixture(2, covariance_type="spherical", init_params="random", warm_start=True),
    Autoencoder(max_iter=10),
    Autoencoder(3, "linear", max_iter=10, batch_size=16),
    Autoencoder(kind="sparse", max_iter=5, activation="tanh", early_stopping=True),
    Autoencoder(kind="denoising", noise="salt_and_pepper", max_iter=5),
    Autoencoder(kind="contractive", max_iter=5, standardize=False),
    LinearRegression(),
    LinearRegression(fit_intercept=False),
    PolynomialRegression(),
    PolynomialRegression("cv", max_degree=2),
    LogisticRegression(),
    LogisticRegression(class_weight="balanced"),
    MLPClassifier(),
    MLPClassifier(max_iter=20, early_stopping=True, activation="tanh", batch_size=16),
    MLPRegressor(max_iter=50),
    MLPRegressor(max_iter=50, noise="heteroscedastic"),
    BaggingEnsemble(n_estimators=5, max_iter=30),
    BaggingEnsemble("regression", n_estimators=5, max_iter=30),
    NadarayaWatsonRegressor(),
    NadarayaWatsonRegressor("epanechnikov", 3.0, empty="mean"),
    NadarayaWatsonClassifier(),
    NadarayaWatsonClassifier("boxcar"),
]


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_check(estimator: BaseEstimator, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("estimator", [MLPRegressor(), BaggingEnsemble()])
@pytest.mark.filterwarnings("ignore")
def test_the_largest_defaults_pass_too(estimator: BaseEstimator) -> None:
    results = check_estimator(estimator, on_skip=None)
    assert len(results) > 50
    assert not [r["check_name"] for r in results if r["status"] not in ("passed", "skipped")]


def test_bagging_says_what_it_is_before_it_is_fitted() -> None:
    assert is_classifier(BaggingEnsemble())
    assert not is_regressor(BaggingEnsemble())
    assert is_regressor(BaggingEnsemble("regression"))
    assert hasattr(BaggingEnsemble(), "predict_proba")
    assert not hasattr(BaggingEnsemble("regression"), "predict_proba")
