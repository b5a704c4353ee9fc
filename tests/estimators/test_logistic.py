"""The optimum is scikit-learn's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sklearn.linear_model
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.exceptions import ConvergenceWarning

from quire.errors import InputError
from quire.estimators import LogisticRegression, newton

Data = tuple[np.ndarray, np.ndarray]


def clouds(classes: int) -> Data:
    rng = np.random.default_rng(5)
    y = rng.integers(0, classes, 150)
    return rng.normal(size=(150, 4)) * [1, 5, 0.2, 1] + y[:, None] * [0.8, 1, 0.1, 0], y


def peer(**options: object) -> sklearn.linear_model.LogisticRegression:
    return sklearn.linear_model.LogisticRegression(tol=1e-12, max_iter=10_000, **options)


def assert_same_optimum(ours: LogisticRegression, theirs: object, X: np.ndarray) -> None:
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-7)
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), atol=1e-5)
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_equals_scikit_learn(
    classes: int, C: float, intercept: bool, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dense:  # the way for many unknowns, by conjugate gradients
        monkeypatch.setattr(newton, "DENSE_UNKNOWNS", 0)
    X, y = clouds(classes)
    ours = LogisticRegression(C=C, fit_intercept=intercept).fit(X, y)
    theirs = peer(C=C, fit_intercept=intercept, solver="newton-cholesky").fit(X, y)
    assert_same_optimum(ours, theirs, X)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("class_weight", [None, "balanced", {0: 5.0, 1: 0.5}])
def test_equals_scikit_learn_with_weights(classes: int, class_weight: object) -> None:
    X, y = clouds(classes)
    weight = np.random.default_rng(0).uniform(0, 2, len(y))
    if class_weight == "balanced":  # releases of scikit-learn differ in whether this counts weights
        weight = np.ones(len(y))
    elif isinstance(class_weight, dict) and classes == 3:
        class_weight = {**class_weight, 2: 1.0}
    ours = LogisticRegression(class_weight=class_weight).fit(X, y, sample_weight=weight)
    theirs = peer(class_weight=class_weight, solver="newton-cholesky").fit(X, y, sample_weight=weight)
    assert_same_optimum(ours, theirs, X)


@pytest.mark.parametrize("load", [load_iris, load_breast_cancer])
def test_raw_units_of_real_data(load: object) -> None:
    X, y = load(return_X_y=True)
    assert_same_optimum(LogisticRegression().fit(X, y), peer(solver="newton-cholesky").fit(X, y), X)


def test_without_penalty() -> None:
    X, y = clouds(3)
    ours = LogisticRegression(C=math.inf).fit(X, y)
    theirs = peer(C=1e12, solver="newton-cholesky").fit(X, y)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-6)
    doubled = np.hstack([X, X])  # no unique solution, but unique probabilities
    np.testing.assert_allclose(
        LogisticRegression(C=math.inf).fit(doubled, y).predict_proba(doubled),
        theirs.predict_proba(X),
        atol=1e-6,
    )


def test_intercept_alone_by_hand() -> None:
    # With a feature that is always 0 the model says the share of each class.
    model = LogisticRegression().fit(np.zeros((10, 1)), [0] * 3 + [1] * 7)
    assert model.predict_proba([[0.0]])[0] == pytest.approx([0.3, 0.7], abs=1e-12)
    assert model.intercept_ == pytest.approx([math.log(7 / 3)])


def test_labels_may_be_words() -> None:
    X, y = clouds(2)
    words = np.array(["no", "yes"])[y]
    model = LogisticRegression().fit(X, words)
    assert model.classes_.tolist() == ["no", "yes"]
    assert set(model.predict(X)) <= {"no", "yes"}
    np.testing.assert_array_equal(model.predict(X) == "yes", model.decision_function(X) > 0)


def test_separable_classes_without_penalty_are_flagged() -> None:
    X, y = [[-1.0], [1.0]], [0, 1]
    with pytest.warns(ConvergenceWarning, match="did not converge in 5 Newton steps"):
        LogisticRegression(C=math.inf, max_iter=5).fit(X, y)


def test_messages() -> None:
    X, y = clouds(2)
    with pytest.raises(InputError, match=r"C is 0\n  expected: a number > 0"):
        LogisticRegression(C=0).fit(X, y)
    with pytest.raises(InputError, match=r"C is 'one'\n  expected: a number > 0"):
        LogisticRegression(C="one").fit(X, y)
    with pytest.raises(InputError, match=r"max_iter is 2.5\n  expected: an integer >= 1"):
        LogisticRegression(max_iter=2.5).fit(X, y)
    with pytest.raises(InputError, match="y has one class only: 1"):
        LogisticRegression().fit(X, np.ones(len(X)))
    with pytest.raises(InputError, match="sample_weight is zero for every row of class 1"):
        LogisticRegression().fit(X, y, sample_weight=1 - y)
    with pytest.raises(InputError, match="class_weight is 'even'"):
        LogisticRegression(class_weight="even").fit(X, y)
