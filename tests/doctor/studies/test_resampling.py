"""Folds, and bias and variance, against scikit-learn and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.cluster import KMeans
from sklearn.datasets import load_iris, make_regression
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC
from torch import Tensor

import quire.estimators
from quire.doctor.studies import bias_variance, folds, from_estimator
from quire.doctor.studies.refit import Answers, draw_rows
from quire.doctor.studies.resampling import Folds, fold_interval
from quire.errors import InputError
from quire.functional import k_fold

pytestmark = pytest.mark.slow

IRIS = load_iris()


def splits(rows: int, k: int, seed: int, classes: np.ndarray | None = None) -> list[tuple[Any, Any]]:
    stratify = None if classes is None else torch.from_numpy(classes)
    found = k_fold(rows, k, torch.Generator().manual_seed(seed), stratify)
    return [(inside.numpy(), outside.numpy()) for inside, outside in found]


# Rows -------------------------------------------------------------------------------------------


def test_rows_are_drawn_with_the_shares_of_their_classes() -> None:
    classes = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    for count in (10, 20, 50, 100):
        rows = draw_rows(100, count, 3, classes)
        assert len(rows.unique()) == count
        shares = torch.bincount(classes[rows], minlength=3) / count
        assert torch.allclose(shares, torch.tensor([0.6, 0.3, 0.1]), atol=1 / count + 1e-6)
    assert draw_rows(100, 20, 3, classes).tolist() == draw_rows(100, 50, 3, classes)[:20].tolist()
    assert draw_rows(100, 100, 3).tolist() != draw_rows(100, 100, 4).tolist()


# Folds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [LinearRegression, quire.estimators.LinearRegression])
def test_folds_are_those_of_cross_val_score(make: Callable[[], Any]) -> None:
    x, y = make_regression(60, 4, noise=10.0, random_state=0)
    found = folds(from_estimator(make(), x, y), 5, seed=2)
    wanted = cross_val_score(LinearRegression(), x, y, cv=splits(60, 5, 2), scoring="r2")
    np.testing.assert_allclose(found.held["r2"], wanted, rtol=1e-8)
    errors = cross_val_score(LinearRegression(), x, y, cv=splits(60, 5, 2), scoring="neg_mean_squared_error")
    np.testing.assert_allclose(np.square(found.held["rmse"]), -errors, rtol=1e-8)


def test_folds_without_a_target_use_the_score() -> None:
    x = IRIS.data
    found = folds(from_estimator(PCA(2), x), 4, seed=1)
    np.testing.assert_allclose(
        found.held["score"], cross_val_score(PCA(2), x, cv=splits(150, 4, 1)), rtol=1e-10
    )


def test_folds_of_classes_are_stratified_and_repeated() -> None:
    x, y = IRIS.data, IRIS.target
    found = folds(from_estimator(LogisticRegression(max_iter=500), x, y), 3, repeats=2, seed=5)
    both = [*splits(150, 3, 5, y), *splits(150, 3, 6, y)]
    wanted = cross_val_score(LogisticRegression(max_iter=500), x, y, cv=both)
    np.testing.assert_allclose(found.held["accuracy"], wanted)
    model = LogisticRegression(max_iter=500)
    losses = [log_loss(y[o], model.fit(x[i], y[i]).predict_proba(x[o])) for i, o in both]
    np.testing.assert_allclose(found.held["log_loss"], losses, rtol=1e-6)
    assert "3 folds, 2 times" in str(found)
    assert found.table[0][0] == "measure"
    assert len(found.figure().axes) == 1


def test_the_interval_is_the_corrected_t_interval() -> None:
    values = [0.8, 0.9, 0.7, 0.85]
    found = fold_interval(values, 4)
    # By hand: t of 3 degrees at 97.5%, 3.182446; s² = Σ(v − 0.8125)²/3.
    reach = 3.182446 * np.std(values, ddof=1) * np.sqrt(1 / 4 + 1 / 3)
    assert found.mean == pytest.approx(0.8125)
    assert found.high - found.mean == pytest.approx(reach, rel=1e-6)
    plain = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert found.high - found.low > plain[1] - plain[0]


def test_an_interval_stays_within_what_its_measure_can_be() -> None:
    held = {
        "accuracy": [0.2, 0.9],
        "r2": [0.2, 0.9],
        "rmse": [0.2, 0.9],
        "kind.f1": [0.2, 0.9],
        "loss": [0.2, 0.9],
    }
    found = Folds("accuracy", 2, 1, held, held)
    free = fold_interval([0.2, 0.9], 2)
    assert (free.low < 0, free.high > 1) == (True, True)
    for name, low, high in (
        ("accuracy", 0, 1), ("kind.f1", 0, 1), ("r2", free.low, 1), ("rmse", 0, free.high),
        ("loss", free.low, free.high),
    ):  # fmt: skip
        assert (found.interval(name).low, found.interval(name).high) == (low, high)


def test_intervals_cover_the_true_error_about_as_often_as_they_say() -> None:
    """The error of least squares on new rows, known from very many of them."""
    rng = np.random.default_rng(0)
    weights = np.array([1.0, -2.0, 0.5])

    def draw(rows: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(rows, 3))
        return x, x @ weights + rng.normal(size=rows)

    big = draw(100_000)
    truths = [
        np.sqrt(np.mean((LinearRegression().fit(*draw(36)).predict(big[0]) - big[1]) ** 2)) for _ in range(50)
    ]
    truth, inside = float(np.mean(truths)), 0
    for seed in range(100):
        found = folds(from_estimator(LinearRegression(), *draw(40)), 10, seed=seed).interval("rmse")
        inside += found.low <= truth <= found.high
    assert inside >= 90


def test_a_measure_that_a_fold_lacks_is_left_out() -> None:
    class Judge:
        def measures(self, part: Tensor) -> dict[str, float]:
            return {"loss": 1.0} | ({"accuracy": 0.5} if 0 in part.tolist() else {})

    class Fits:
        rows, least, apart, measure, stratify = 10, 2, None, "accuracy", None
        higher = frozenset({"accuracy"})

        def __call__(self, rows: Tensor | None, seed: int) -> Judge:
            return Judge()

    assert list(folds(Fits(), 5).held) == ["loss"]  # type: ignore[arg-type]


def test_the_estimator_that_is_given_is_left_alone_and_each_fit_has_its_seed() -> None:
    given = quire.estimators.MLPRegressor(hidden_layer_sizes=(3,), max_iter=2, random_state=7)
    refit = from_estimator(given, IRIS.data, IRIS.data[:, 0])
    one, same, other = refit(None, 1), refit(None, 1), refit(None, 2)
    assert not hasattr(given, "n_features_in_")
    assert given.random_state == 7
    rows = torch.arange(20)
    assert one.measures(rows) == same.measures(rows) != other.measures(rows)


def test_too_many_folds_are_refused() -> None:
    with pytest.raises(InputError, match="200 folds of 150 rows"):
        folds(from_estimator(LinearRegression(), IRIS.data, IRIS.target), 200)


# Bias and variance --------------------------------------------------------------------------------


class Fresh:
    """Least squares on a fixed design, with new noise on the targets in each fit."""

    least, apart, measure, stratify, higher = 2, "validation", "loss", None, frozenset[str]()

    def __init__(self, x: np.ndarray, at: np.ndarray, truth: Callable[[Any], Any], sigma: float) -> None:
        self.x, self.at, self.truth, self.sigma, self.rows = x, at, truth, sigma, len(x)

    def draw(self, count: int, seed: int) -> Tensor:
        return draw_rows(self.rows, count, seed)

    def __call__(self, rows: Tensor | None, seed: int) -> Any:
        noise = np.random.default_rng(seed).normal(size=self.rows) * self.sigma
        said = LinearRegression().fit(self.x, self.truth(self.x) + noise).predict(self.at)
        target = torch.from_numpy(self.truth(self.at))

        class Judge:
            def answers(self, part: Any) -> Answers:
                return Answers(target, values=torch.from_numpy(said))

        return Judge()


def test_the_parts_of_linear_regression_are_those_of_its_closed_form() -> None:
    """Variance σ²·mean xᵀ(XᵀX)⁻¹x and bias² of the best line to x², at known points."""
    rng = np.random.default_rng(0)
    x, at, sigma = rng.uniform(-1, 1, (40, 1)), rng.uniform(-1, 1, (200, 1)), 0.5

    def truth(x: np.ndarray) -> np.ndarray:
        return x[:, 0] ** 2 + x[:, 0]

    design, points = (np.c_[np.ones(len(a)), a] for a in (x, at))
    hat = points @ np.linalg.inv(design.T @ design)
    variance = sigma**2 * np.mean(np.sum(hat * points, 1))
    bias2 = np.mean((hat @ design.T @ truth(x) - truth(at)) ** 2)
    found = bias_variance(Fresh(x, at, truth, sigma), resamples=400, noise_std=sigma)  # type: ignore[arg-type]
    assert found.loss == "squared error"
    assert found.variance.value == pytest.approx(variance, rel=0.15)
    assert found.bias2.value == pytest.approx(bias2, rel=0.05)
    assert found.noise == sigma**2
    assert found.total.value == pytest.approx(bias2 + variance + sigma**2, rel=0.05)


def test_classes_are_split_by_the_brier_score() -> None:
    x, y = IRIS.data[::2], IRIS.target[::2]
    refit = from_estimator(
        LogisticRegression(C=100, max_iter=2000), x, y, apart=(IRIS.data[1::2], IRIS.target[1::2])
    )
    found = bias_variance(refit, resamples=6, seed=3)
    # The same resamples by hand, in their order.
    generator = torch.Generator().manual_seed(3)
    said = []
    for _ in range(6):
        rows = torch.randint(75, (75,), generator=generator).numpy()
        model = LogisticRegression(C=100, max_iter=2000).fit(x[rows], y[rows])
        said.append(model.predict_proba(IRIS.data[1::2]))
    table, wanted = np.stack(said), np.eye(3)[IRIS.target[1::2]]
    assert found.loss == "Brier score"
    assert found.total.value == pytest.approx(np.mean(np.sum((table - wanted) ** 2, -1)), rel=1e-6)
    assert found.variance.value == pytest.approx(np.mean(np.sum(table.var(0, ddof=1), -1)), rel=1e-6)
    assert found.bias2.value + found.variance.value == pytest.approx(found.total.value, rel=1e-9)
    assert sum(found.parts.values()) == pytest.approx(found.total.value)
    assert len(found.figure().axes) == 1


def test_answers_without_probabilities_are_split_by_the_zero_one_loss() -> None:
    found = bias_variance(from_estimator(LinearSVC(), IRIS.data, IRIS.target), resamples=4, seed=0)
    assert found.loss == "0-1 loss"
    held = draw_rows(150, 30, 0, torch.from_numpy(IRIS.target)).numpy()
    generator, pool = torch.Generator().manual_seed(0), np.setdiff1d(np.arange(150), held)
    wrong = []
    for seed in range(4):
        rows = pool[torch.randint(120, (120,), generator=generator).numpy()]
        model = LinearSVC(random_state=seed).fit(IRIS.data[rows], IRIS.target[rows])
        wrong.append(np.mean(model.predict(IRIS.data[held]) != IRIS.target[held]))
    assert found.total.value == pytest.approx(np.mean(wrong))


def test_the_verdict_names_what_counts() -> None:
    class Deep(RegressorMixin, BaseEstimator):  # type: ignore[misc]
        """Remembers the last target it saw: all variance, no bias worth the name."""

        def fit(self, x: Any, y: Any) -> Deep:
            self.last_ = y[-1]
            return self

        def predict(self, x: Any) -> Any:
            return np.full(len(x), self.last_)

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 2)), rng.choice([-10.0, 10.0], 400)
    near = (x[:50], np.zeros(50))
    assert "more rows, weight decay or bagging help" in str(
        bias_variance(from_estimator(Deep(), x, y, apart=near), resamples=40)
    )
    wave = np.sin(6 * x[:, 0])
    stiff = bias_variance(from_estimator(LinearRegression(), x, wave, apart=(x, wave)), resamples=10)
    assert "all fits err alike" in str(stiff)
    assert "random halves" in str(
        bias_variance(from_estimator(LinearRegression(), x, wave), resamples=3, twice=False)
    )


def test_what_answers_nothing_has_no_bias() -> None:
    with pytest.raises(InputError, match="which was given no y"):
        bias_variance(from_estimator(KMeans(2, n_init=1), IRIS.data))
    with pytest.raises(InputError, match="at least 2: one fit has no variance"):
        bias_variance(from_estimator(LinearRegression(), IRIS.data, IRIS.target), resamples=1)
    with pytest.raises(InputError, match="fit and predict"):
        from_estimator(object(), IRIS.data)
