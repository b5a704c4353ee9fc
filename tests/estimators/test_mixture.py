"""GaussianMixture against scikit-learn's on the same start, and in the forms that rows come in."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.mixture import GaussianMixture as Peer
from sklearn.model_selection import GridSearchCV

from quire.errors import InputError
from quire.estimators.mixture import GaussianMixture
from quire.functional.mixtures import COVARIANCE_TYPES

kinds = pytest.mark.parametrize("kind", COVARIANCE_TYPES)
LEARNED = ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_rows(rows: int = 600, features: int = 3, clusters: int = 4) -> np.ndarray:
    rng = np.random.default_rng(np.random.randint(2**31))
    parts = [
        rng.normal(size=(rows // clusters, features)) @ rng.normal(size=(features, features))
        + 3 * rng.normal(size=features)
        for _ in range(clusters)
    ]
    return rng.permutation(np.concatenate(parts)) + 20


def a_start(X: np.ndarray, kind: str, components: int) -> dict[str, Any]:
    features = X.shape[1]
    matrix = np.linalg.inv(np.cov(X.T))
    precisions = {
        "full": np.tile(matrix, (components, 1, 1)),
        "tied": matrix,
        "diag": np.tile(1 / X.var(0), (components, 1)),
        "spherical": np.full(components, 1 / X.var()),
    }[kind]
    assert precisions.shape[-1] in (features, components)
    weights = np.arange(1.0, components + 1)
    return {
        "weights_init": weights / weights.sum(),
        "means_init": X[:components],
        "precisions_init": precisions,
    }


def quietly(model: Any, X: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(X)


@kinds
@pytest.mark.parametrize("tol", [0.0, 1e-4])
def test_parameters_and_likelihoods_are_scikit_learn_s(kind: str, tol: float) -> None:
    X = make_rows()
    options = {"covariance_type": kind, "tol": tol, "max_iter": 40, **a_start(X, kind, 4)}
    mine, peer = quietly(GaussianMixture(4, **options), X), quietly(Peer(4, **options), X)
    assert (mine.n_iter_, mine.converged_) == (peer.n_iter_, peer.converged_)
    assert mine.lower_bound_ == pytest.approx(peer.lower_bound_, rel=1e-9)
    np.testing.assert_allclose(mine.lower_bounds_, peer.lower_bounds_, rtol=1e-9)
    for name in LEARNED:
        got, expected = getattr(mine, name), getattr(peer, name)
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7, err_msg=name)
    np.testing.assert_allclose(mine.score_samples(X), peer.score_samples(X), rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(mine.predict_proba(X), peer.predict_proba(X), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(mine.predict(X), peer.predict(X))
    for name in ("score", "bic", "aic"):
        assert getattr(mine, name)(X) == pytest.approx(getattr(peer, name)(X), rel=1e-8), name


@pytest.mark.parametrize("given", ["weights_init", "means_init", "precisions_init"])
def test_what_is_not_given_comes_from_the_centres(given: str) -> None:
    """Three clusters far apart: what K-means makes of them is known."""
    rng = np.random.default_rng(0)
    places = np.array([[0, 0], [100, 0], [0, 100]])
    own = [rng.normal(size=(50 * (k + 1), 2)) + place for k, place in enumerate(places)]
    X = np.concatenate(own)
    value = a_start(X, "full", 3)[given]
    model = GaussianMixture(3, max_iter=0, random_state=0, **{given: value}).fit(X)
    order = np.argsort(-model.weights_ if given == "means_init" else model.means_ @ [1.0, 2.0])
    order = order[::-1] if given == "means_init" else order
    expected = {
        "weights_init": np.array([1, 2, 3]) / 6,
        "means_init": np.array([part.mean(0) for part in own]),
        "precisions_init": np.array([np.linalg.inv(np.cov(p.T, bias=True) + 1e-6 * np.eye(2)) for p in own]),
    }
    for name, wanted in expected.items():
        learned = getattr(model, name.replace("init", ""))
        got, wanted = (learned, value) if name == given else (learned[order], wanted)
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-9, err_msg=name)


def test_no_worse_than_scikit_learn_from_its_own_start() -> None:
    X = load_iris().data
    mine = np.mean(
        [GaussianMixture(3, n_init=3, random_state=s, tol=1e-5).fit(X).lower_bound_ for s in range(5)]
    )
    peer = np.mean([Peer(3, n_init=3, random_state=s, tol=1e-5).fit(X).lower_bound_ for s in range(5)])
    assert mine > peer - 0.02


def test_the_best_of_many_starts_is_kept() -> None:
    X = make_rows(400)
    model = GaussianMixture(5, n_init=6, init_params="random_from_data", random_state=0, max_iter=300).fit(X)
    singles = model._task.bounds
    assert model.lower_bound_ == float(singles.max())
    assert float(singles.min()) < float(singles.max())
    assert model.score(X) == pytest.approx(model.lower_bound_, abs=2e-3)
    assert len(model.lower_bounds_) == model.n_iter_
    assert (np.diff(model.lower_bounds_) > -1e-9).all()


@pytest.mark.parametrize("device", DEVICES)
@kinds
def test_tensors_give_tensors(kind: str, device: str) -> None:
    X = make_rows()
    tensor = torch.tensor(X, device=device, requires_grad=True)
    options = {"covariance_type": kind, "max_iter": 5, **a_start(X, kind, 4)}
    mine, other = quietly(GaussianMixture(4, **options), tensor), quietly(GaussianMixture(4, **options), X)
    for name in ("predict", "predict_proba", "score_samples"):
        got = getattr(mine, name)(tensor)
        assert isinstance(got, torch.Tensor)
        assert got.device == tensor.device
        assert not got.requires_grad
        np.testing.assert_allclose(got.cpu(), getattr(other, name)(X), rtol=1e-7, atol=1e-7)
        assert isinstance(getattr(mine, name)(X), np.ndarray)
        assert getattr(mine, name)(tensor.float()).dtype == (
            torch.int64 if name == "predict" else torch.float32
        )
    assert isinstance(mine.means_, np.ndarray)
    assert mine.score(tensor) == pytest.approx(other.score(X))
    assert mine.bic(tensor) == pytest.approx(other.bic(X))


@pytest.mark.parametrize("device", DEVICES)
@kinds
def test_float32_is_exact_to_a_millionth(kind: str, device: str) -> None:
    """Of the same mixture, wherever a fit has come to; and whole fits stay beside each other. What a fit has
    lost on a GPU, later iterations lose again and more while its likelihood still rises."""
    X = torch.tensor(make_rows(4000), dtype=torch.float32, device=device)
    start = a_start(X.double().cpu().numpy(), kind, 4)

    def fitted(rows: torch.Tensor, iterations: int, **start: Any) -> GaussianMixture:
        options = {"covariance_type": kind, "tol": 0, "max_iter": iterations, **start}
        return quietly(GaussianMixture(4, **options), rows)

    for iterations in (1, 7, 19):
        then = fitted(X, iterations, **start)
        here = {f"{name}_init": getattr(then, f"{name}_") for name in ("weights", "means", "precisions")}
        mine, exact = fitted(X, 1, **here), fitted(X.double(), 1, **here)
        np.testing.assert_allclose(mine.lower_bounds_, exact.lower_bounds_, rtol=1e-6)
    mine, exact = fitted(X, 20, **start), fitted(X.double(), 20, **start)
    loss = 1e-5 if device == "cuda" else 1e-10
    np.testing.assert_allclose(mine.lower_bounds_, exact.lower_bounds_, rtol=loss)
    np.testing.assert_allclose(mine.means_, exact.means_, atol=1e-3)


def test_data_frames_pickles_and_searches() -> None:
    X = make_rows()
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = GaussianMixture(3, random_state=0).fit(frame)
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(frame), model.predict_proba(frame))
    np.testing.assert_array_equal(clone(model).fit(frame).means_, model.means_)
    np.testing.assert_array_equal(clone(model).fit_predict(frame), model.predict(frame))
    search = GridSearchCV(GaussianMixture(random_state=0, max_iter=200), {"n_components": [1, 4]}, cv=3).fit(
        X
    )
    assert search.best_params_ == {"n_components": 4}


def test_going_on_from_where_it_stopped() -> None:
    X = make_rows()
    start = a_start(X, "full", 4)
    whole = quietly(GaussianMixture(4, max_iter=9, tol=0, **start), X)
    parts = GaussianMixture(4, max_iter=4, tol=0, warm_start=True, **start)
    quietly(parts, X)
    parts.max_iter = 5
    quietly(parts, X)
    np.testing.assert_allclose(parts.means_, whole.means_, rtol=1e-8)
    assert parts.lower_bound_ == pytest.approx(whole.lower_bound_, rel=1e-10)
    parts.n_components = 3
    with pytest.raises(
        InputError, match=r"warm_start from 4 full components of 3 features\n  expected: 3 full"
    ):
        parts.set_params(weights_init=None, means_init=None, precisions_init=None).fit(X)


@kinds
def test_draws(kind: str) -> None:
    X = make_rows(2000)
    model = GaussianMixture(4, covariance_type=kind, random_state=0, max_iter=300, n_init=2).fit(X)
    drawn, component = model.sample(4000)
    assert drawn.shape == (4000, 3)
    assert set(component) <= set(range(4))
    assert model.score(drawn) == pytest.approx(model.score(X), abs=0.15)
    np.testing.assert_array_equal(model.sample(5)[0], model.sample(5)[0])
    with pytest.raises(NotFittedError):
        GaussianMixture().sample()
    with pytest.raises(InputError, match="n_samples"):
        model.sample(0)


def test_it_says_when_it_has_not_converged() -> None:
    X = make_rows()
    with pytest.warns(ConvergenceWarning, match="did not converge in 2 iterations: raise max_iter or tol"):
        model = GaussianMixture(4, max_iter=2, tol=0, random_state=0).fit(X)
    assert not model.converged_
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start = GaussianMixture(4, max_iter=0, random_state=0).fit(X)
    assert start.n_iter_ == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0}, "n_components"),
        ({"max_iter": -1}, "max_iter"),
        ({"n_init": 0}, "n_init"),
        ({"tol": -1}, "tol"),
        ({"reg_covar": -1e-6}, "reg_covar"),
        ({"covariance_type": "ful"}, "unknown covariance_type 'ful'"),
        ({"init_params": "kmean"}, "unknown init_params 'kmean'"),
        ({"weights_init": [0.5, 0.6]}, r"weights_init that sum to 1.1\n  expected: .* sum to 1"),
        (
            {"weights_init": [1.0]},
            r"weights_init of shape \(1,\)\n  expected: finite numbers of shape \(2,\)",
        ),
        ({"means_init": np.zeros((3, 2))}, r"means_init of shape \(3, 2\)"),
        ({"precisions_init": -np.ones((2, 3, 3))}, "precisions_init that are not positive definite"),
        ({"precisions_init": -np.ones(2), "covariance_type": "spherical"}, "not positive\n"),
        ({"n_components": 700}, r"600 samples for n_components=700"),
    ],
)
def test_wrong_parameters(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        GaussianMixture(**{"n_components": 2, **options}).fit(make_rows())


def test_a_collapsed_component_is_explained() -> None:
    X = np.concatenate([np.random.normal(size=(50, 2)), np.full((10, 2), 30.0)])
    with pytest.raises(InputError, match="not positive definite"):
        GaussianMixture(2, reg_covar=0).fit(X)
