"""Closed forms against scikit-learn, NumPy and cases solved by hand."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.linear_model
from sklearn.preprocessing import PolynomialFeatures

from quire.errors import InputError
from quire.estimators import LinearRegression, PolynomialRegression
from quire.estimators import polynomial as polynomial_module


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_three_points_by_hand() -> None:
    # y = 1, 2, 4 at x = 0, 1, 2: slope (Σxy − n·x̄ȳ)/(Σx² − n·x̄²) = (10 − 7)/(5 − 3) = 3/2.
    model = LinearRegression().fit([[0.0], [1.0], [2.0]], [1.0, 2.0, 4.0])
    assert model.coef_ == pytest.approx([1.5])
    assert model.intercept_ == pytest.approx(7 / 3 - 1.5)
    assert model.predict([[4.0]]) == pytest.approx([7 / 3 - 1.5 + 6])


@pytest.mark.parametrize("outputs", [None, 1, 3])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_equals_scikit_learn(
    rng: np.random.Generator, outputs: int | None, intercept: bool, weighted: bool
) -> None:
    X = rng.normal(size=(40, 5)) * [1, 10, 100, 0.1, 1] + 50
    y = rng.normal(size=40 if outputs is None else (40, outputs))
    weight = rng.uniform(0, 3, 40) if weighted else None
    ours = LinearRegression(fit_intercept=intercept).fit(X, y, sample_weight=weight)
    theirs = sklearn.linear_model.LinearRegression(fit_intercept=intercept).fit(X, y, sample_weight=weight)
    assert np.shape(ours.coef_) == np.shape(theirs.coef_)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), rtol=1e-9, atol=1e-10)
    assert ours.score(X, y, weight) == pytest.approx(theirs.score(X, y, weight))


@pytest.mark.parametrize("rows", [30, 6])
def test_rank_deficient_gives_the_shortest_solution(rng: np.random.Generator, rows: int) -> None:
    X = rng.normal(size=(rows, 8))
    X[:, 3] = X[:, 0] + 2 * X[:, 1]
    X[:, 7] = X[:, 2]
    y = rng.normal(size=rows)
    model = LinearRegression().fit(X, y)
    centred = X - X.mean(0)
    shortest = np.linalg.pinv(centred, rcond=1e-12) @ (y - y.mean())
    np.testing.assert_allclose(model.coef_, shortest, atol=1e-10)
    assert model.rank_ == min(6, rows - 1)


@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("degree", [1, 3])
def test_polynomial_equals_least_squares_on_monomials(
    rng: np.random.Generator, features: int, degree: int
) -> None:
    X = rng.uniform(2, 5, size=(80, features))
    y = rng.normal(size=(80, 2))
    weight = rng.integers(0, 3, 80)
    ours = PolynomialRegression(degree).fit(X, y, sample_weight=weight)
    columns = PolynomialFeatures(degree, include_bias=False)
    design = columns.fit_transform(X)
    theirs = sklearn.linear_model.LinearRegression().fit(design, y, sample_weight=weight)
    np.testing.assert_array_equal(ours.powers_, columns.powers_)
    assert ours.terms_ == columns.get_feature_names_out().tolist()
    np.testing.assert_allclose(ours.predict(X), theirs.predict(design), rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-5, atol=1e-5)


def test_polynomial_coefficients_by_hand() -> None:
    x = np.linspace(10, 14, 9)
    model = PolynomialRegression(3).fit(x[:, None], 2 - 3 * x + 0.5 * x**3)
    assert model.coef_ == pytest.approx([-3, 0, 0.5], abs=1e-7)
    assert model.intercept_ == pytest.approx(2, abs=1e-6)


def test_high_degree_far_from_the_origin_is_solved_accurately(rng: np.random.Generator) -> None:
    x = np.sort(rng.uniform(1000, 1010, 200))
    y = np.sin(x) + 0.1 * rng.normal(size=200)
    best = np.polynomial.Chebyshev.fit(x, y, 18)(x)
    np.testing.assert_allclose(
        PolynomialRegression(18).fit(x[:, None], y).predict(x[:, None]), best, atol=1e-8
    )


def test_degree_by_cross_validation(rng: np.random.Generator) -> None:
    x = rng.uniform(-2, 2, 150)
    y = x**3 - 2 * x + 0.2 * rng.normal(size=150)
    model = PolynomialRegression("cv", max_degree=9, random_state=0).fit(x[:, None], y)
    assert model.degree_ == 3
    assert model.validation_errors_.shape == (9,)
    assert model.validation_errors_[2] == pytest.approx(0.04, rel=0.3)
    # A fixed degree leaves no trace of an earlier search.
    assert not hasattr(model.set_params(degree=2).fit(x[:, None], y), "validation_errors_")


def test_messages(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = rng.normal(size=(6, 3)), rng.normal(size=6)
    with pytest.raises(InputError, match=r"degree is 0\n  expected: an integer >= 1 or \"cv\""):
        PolynomialRegression(0).fit(X, y)
    with pytest.raises(InputError, match=r"max_degree is 2.5\n  expected: an integer >= 1"):
        PolynomialRegression("cv", max_degree=2.5).fit(X, y)
    with pytest.raises(InputError, match=r"cv is 7 for n_samples=6"):
        PolynomialRegression("cv", cv=7).fit(X, y)
    monkeypatch.setattr(polynomial_module, "MAX_TERMS", 10)
    with pytest.raises(InputError, match=r"3 features to degree 3 make 19 terms\n  expected: at most 10"):
        PolynomialRegression(3).fit(X, y)
