"""Arrays, data frames and tensors in; scikit-learn's tools around the estimators."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from quire.errors import InputError
from quire.estimators import (
    BaggingEnsemble,
    LinearRegression,
    LogisticRegression,
    MLPClassifier,
    MLPRegressor,
    PolynomialRegression,
)

QUICK = {"max_iter": 3, "n_iter_no_change": 3, "random_state": 0, "hidden_layer_sizes": (8,)}
CLASSIFIERS = [
    LogisticRegression(),
    MLPClassifier(**QUICK),
    BaggingEnsemble(n_estimators=3, **QUICK),
]
REGRESSORS = [
    LinearRegression(),
    PolynomialRegression(2),
    MLPRegressor(**QUICK),
    BaggingEnsemble("regression", n_estimators=3, **QUICK),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def names(value: Any) -> str:
    return type(value).__name__ + (f"-{value.task}" if hasattr(value, "task") else "")


@pytest.fixture(scope="module")
def iris() -> tuple[np.ndarray, np.ndarray]:
    return load_iris(return_X_y=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("estimator", CLASSIFIERS, ids=names)
def test_classifiers_give_tensors_for_tensors(estimator: Any, device: str, iris: Any) -> None:
    X, y = iris
    tensor, labels = torch.tensor(X, device=device), torch.tensor(y, device=device)
    before = tensor.clone()
    model = clone(estimator).fit(tensor, labels)
    predicted, probabilities = model.predict(tensor), model.predict_proba(tensor)
    assert isinstance(predicted, torch.Tensor)
    assert predicted.device == probabilities.device == tensor.device
    assert predicted.dtype == torch.int64
    assert probabilities.dtype == torch.float64
    assert torch.equal(tensor, before)
    assert isinstance(model.classes_, np.ndarray)
    # The same model answers arrays with arrays, and the same thing.
    from_array = model.predict_proba(X)
    assert isinstance(from_array, np.ndarray)
    np.testing.assert_allclose(from_array, probabilities.cpu().numpy(), atol=1e-6)
    assert model.score(tensor, labels) == pytest.approx(model.score(X, y), abs=0.02)
    if device == "cpu":
        np.testing.assert_allclose(clone(estimator).fit(X, y).predict_proba(X), from_array, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("estimator", REGRESSORS, ids=names)
def test_regressors_give_tensors_for_tensors(estimator: Any, device: str, iris: Any) -> None:
    X, y = iris[0][:, :3], iris[0][:, 3]
    tensor = torch.tensor(X, device=device, requires_grad=True)
    model = clone(estimator).fit(tensor, torch.tensor(y, device=device))
    predicted = model.predict(tensor)
    assert isinstance(predicted, torch.Tensor)
    assert predicted.device == tensor.device
    assert predicted.dtype == torch.float64
    assert not predicted.requires_grad
    np.testing.assert_allclose(model.predict(X), predicted.cpu().numpy(), atol=1e-6)
    assert model.predict(tensor.float()).dtype == torch.float32
    assert model.predict(X.astype(np.float32)).dtype == np.float32
    if hasattr(model, "predict_std"):
        assert model.predict_std(tensor).device == tensor.device


@pytest.mark.parametrize("estimator", [*CLASSIFIERS, *REGRESSORS], ids=names)
def test_column_names_are_kept_and_compared(estimator: Any, iris: Any) -> None:
    X, y = iris
    frame = pd.DataFrame(X, columns=["a", "b", "c", "d"])
    model = clone(estimator).fit(frame, pd.Series(y))
    assert model.feature_names_in_.tolist() == ["a", "b", "c", "d"]
    assert model.n_features_in_ == 4
    assert isinstance(model.predict(frame), np.ndarray)
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["d", "c", "b", "a"]])
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        model.predict(X)
    assert not hasattr(clone(estimator).fit(X, y), "feature_names_in_")


def test_other_data_frames(iris: Any) -> None:
    X, y = iris
    table = pa.table({name: X[:, i] for i, name in enumerate("abcd")})
    model = LogisticRegression().fit(table.to_pandas(), y)
    np.testing.assert_array_equal(model.predict(table), model.predict(table.to_pandas()))


@pytest.mark.parametrize("estimator", [*CLASSIFIERS, *REGRESSORS], ids=names)
def test_pickled_model_predicts_the_same(estimator: Any, iris: Any) -> None:
    X, y = iris
    model = clone(estimator).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_pipeline_and_grid_search(iris: Any) -> None:
    X, y = iris
    search = GridSearchCV(
        make_pipeline(StandardScaler(), MLPClassifier(max_iter=5, n_iter_no_change=5, random_state=0)),
        {"mlpclassifier__learning_rate_init": [1e-5, 3e-2], "mlpclassifier__hidden_layer_sizes": [(16,)]},
        cv=3,
    ).fit(X, y)
    assert search.best_params_["mlpclassifier__learning_rate_init"] == 3e-2
    assert search.best_score_ > 0.8
    bagged = GridSearchCV(BaggingEnsemble("regression", **QUICK), {"n_estimators": [1, 3]}, cv=2).fit(X, y)
    assert set(bagged.cv_results_["param_n_estimators"]) == {1, 3}


def test_cross_validation_of_tensors(iris: Any) -> None:
    X, y = (torch.tensor(part) for part in iris)
    assert cross_val_score(LogisticRegression(), X, y, cv=3).mean() > 0.9


def test_words_for_tensors_are_an_array(iris: Any) -> None:
    X, y = torch.tensor(iris[0]), np.array(["x", "y", "z"])[iris[1]]
    predicted = LogisticRegression().fit(X, y).predict(X)
    assert isinstance(predicted, np.ndarray)
    assert set(predicted) == {"x", "y", "z"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(4), "shape \\(4,\\)"),
        (torch.ones(4, 2, dtype=torch.complex64), "complex tensor"),
        (torch.ones(4, 2).to_sparse(), "layout torch.sparse_coo"),
        (torch.full((4, 2), torch.nan), "Input X of LinearRegression contains NaN or infinity"),
        (torch.full((4, 2), torch.inf), "contains NaN or infinity"),
        (torch.ones(4, 0), "shape \\(4, 0\\)"),
    ],
)
def test_bad_tensors(bad: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LinearRegression().fit(bad, np.ones(len(bad)))


def test_wrong_shape_to_predict() -> None:
    model = LinearRegression().fit(torch.rand(5, 3), torch.rand(5))
    with pytest.raises(ValueError, match="X has 2 features, but LinearRegression is expecting 3 features"):
        model.predict(torch.rand(5, 2))
    with pytest.raises(InputError, match=r"shape \(0, 3\)\n  expected: at least one sample"):
        model.predict(torch.rand(0, 3))
