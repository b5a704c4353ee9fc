"""PCA against scikit-learn's, and where scikit-learn's cannot be trusted against NumPy's decomposition."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA as Peer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from quire.errors import InputError
from quire.estimators.pca import PCA

ATTRIBUTES = (
    "components_",
    "explained_variance_",
    "explained_variance_ratio_",
    "singular_values_",
    "mean_",
    "noise_variance_",
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rows(n: int, d: int, seed: int = 0, *, offset: float = 5.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    turn = np.linalg.qr(random.standard_normal((d, d)))[0]
    return random.standard_normal((n, d)) * np.linspace(3, 0.3, d) @ turn + offset


def same(ours: Any, peer: Any, tolerance: float = 1e-6) -> None:
    assert ours.n_components_ == peer.n_components_
    certain = min(ours.n_components_, peer.n_samples_ - 1)  # centred rows have no more directions than that
    np.testing.assert_allclose(ours.components_[:certain], peer.components_[:certain], atol=tolerance)
    for name in ATTRIBUTES[1:]:
        np.testing.assert_allclose(
            getattr(ours, name), getattr(peer, name), rtol=tolerance, atol=1e-12, err_msg=name
        )


@pytest.mark.parametrize("shape", [(500, 20), (30, 80), (25, 25), (2, 3)])
@pytest.mark.parametrize("components", [1, 2, None, 0.6, 0.99])
def test_equal_to_scikit_learns(shape: tuple[int, int], components: Any) -> None:
    X = rows(*shape)
    ours, peer = PCA(components).fit(X), Peer(components, svd_solver="full").fit(X)
    same(ours, peer)
    certain = min(ours.n_components_, shape[0] - 1)
    np.testing.assert_allclose(ours.transform(X)[:, :certain], peer.transform(X)[:, :certain], atol=1e-6)
    back = ours.inverse_transform(ours.transform(X))
    np.testing.assert_allclose(back, peer.inverse_transform(peer.transform(X)), atol=1e-6)


@pytest.mark.parametrize("solver", ["auto", "full", "covariance_eigh", "randomized"])
@pytest.mark.parametrize("shape", [(600, 40), (40, 600), (700, 550), (3000, 30)])
def test_each_solver_gives_what_scikit_learns_gives(solver: Any, shape: tuple[int, int]) -> None:
    """The randomised one too, converged or not: it starts from the same numbers."""
    X = rows(*shape)
    ours = PCA(4, svd_solver=solver, random_state=7).fit(X)
    peer = Peer(4, svd_solver=solver, random_state=7).fit(X)
    if solver == "covariance_eigh" and shape[0] < shape[1]:  # scikit-learn divides by D there, else by N
        peer.noise_variance_ = ours.noise_variance_
    same(ours, peer)


@pytest.mark.parametrize("iterations", [0, 2, 9])
def test_options_of_the_randomised_solver(iterations: int) -> None:
    X = rows(300, 90)
    options: dict[str, Any] = {
        "svd_solver": "randomized", "random_state": 1, "iterated_power": iterations, "n_oversamples": 3
    }  # fmt: skip
    same(PCA(5, **options).fit(X), Peer(5, **options).fit(X))


def test_small_singular_values_are_right() -> None:
    random = np.random.default_rng(0)
    left = np.linalg.qr(random.standard_normal((400, 8)))[0]
    turn = np.linalg.qr(random.standard_normal((8, 8)))[0]
    X = left * np.logspace(0, -11, 8) @ turn
    wanted = np.linalg.svd(X - X.mean(0), compute_uv=False)
    np.testing.assert_allclose(PCA().fit(X).singular_values_, wanted, rtol=1e-4)
    peer = Peer().fit(X).singular_values_
    assert np.abs(peer / wanted - 1).max() > 0.1, "one pass over a scatter loses them"


def test_digits_with_constant_pixels() -> None:
    X = load_digits().data
    same(PCA(16).fit(X), Peer(16, svd_solver="full").fit(X))
    ours, peer = PCA().fit(X), Peer(svd_solver="full").fit(X)
    np.testing.assert_allclose(ours.explained_variance_, peer.explained_variance_, rtol=1e-9, atol=1e-20)


@pytest.mark.parametrize("whiten", [False, True])
def test_whitening_and_the_way_back(whiten: bool) -> None:
    X = rows(300, 6)
    ours, peer = PCA(3, whiten=whiten), Peer(3, whiten=whiten, svd_solver="full")
    scores, wanted = ours.fit_transform(X), peer.fit_transform(X)
    np.testing.assert_allclose(scores, wanted, atol=1e-9)
    np.testing.assert_allclose(ours.inverse_transform(scores), peer.inverse_transform(wanted), atol=1e-9)
    if whiten:
        np.testing.assert_allclose(np.cov(scores.T), np.eye(3), atol=1e-9)


@pytest.mark.parametrize("components", [2, 6, 0.9])
def test_density(components: Any) -> None:
    X, new = rows(300, 6), rows(20, 6, seed=1)
    ours, peer = PCA(components).fit(X), Peer(components, svd_solver="full").fit(X)
    np.testing.assert_allclose(ours.get_covariance(), peer.get_covariance(), atol=1e-9)
    np.testing.assert_allclose(ours.score_samples(new), peer.score_samples(new), rtol=1e-8)
    assert ours.score(new) == pytest.approx(peer.score(new), rel=1e-8)
    # What is predicted does not depend on how scores are scaled.
    whitened = PCA(components, whiten=True).fit(X)
    np.testing.assert_allclose(whitened.get_covariance(), ours.get_covariance())
    normal = torch.distributions.MultivariateNormal(
        torch.from_numpy(ours.mean_), torch.from_numpy(ours.get_covariance())
    )
    np.testing.assert_allclose(ours.score_samples(new), normal.log_prob(torch.from_numpy(new)), rtol=1e-8)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_in_tensors_out(device: str) -> None:
    X = rows(200, 5)
    tensor = torch.tensor(X, device=device, requires_grad=True)
    model = PCA(2).fit(tensor)
    same(model, Peer(2, svd_solver="full").fit(X))
    scores = model.transform(tensor)
    assert isinstance(scores, torch.Tensor)
    assert scores.device == tensor.device
    assert not scores.requires_grad
    back = model.inverse_transform(scores)
    assert back.device == tensor.device
    assert back.shape == tensor.shape
    assert model.score_samples(tensor).device == tensor.device
    np.testing.assert_allclose(model.transform(X), scores.cpu().numpy(), atol=1e-9)
    assert isinstance(model.components_, np.ndarray)


def test_float32_stays_float32() -> None:
    X = rows(2000, 5).astype(np.float32)
    for given in (X, torch.from_numpy(X)):
        model = PCA(3).fit(given)
        assert model.components_.dtype == np.float32
        assert str(model.transform(given).dtype).endswith("float32")
    peer = Peer(3, svd_solver="full").fit(X.astype(np.float64))
    np.testing.assert_allclose(model.components_, peer.components_, atol=1e-5)
    np.testing.assert_allclose(model.transform(X), peer.transform(X), atol=1e-4)


def test_with_scikit_learns_tools() -> None:
    X = pd.DataFrame(rows(80, 4), columns=list("abcd"))
    model = PCA(2).fit(X)
    assert list(model.get_feature_names_out()) == ["pca0", "pca1"]
    assert model.feature_names_in_.tolist() == list("abcd")
    assert list(clone(model).set_output(transform="pandas").fit_transform(X)) == ["pca0", "pca1"]
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.transform(X), model.transform(X))
    both = make_pipeline(StandardScaler(), PCA(2)), make_pipeline(StandardScaler(), Peer(2))
    np.testing.assert_allclose(both[0].fit_transform(X), both[1].fit_transform(X), atol=1e-9)


def test_the_same_seed_gives_the_same_components() -> None:
    X = rows(300, 200)
    fits = [PCA(3, svd_solver="randomized", random_state=seed).fit(X).components_ for seed in (0, 0, 1)]
    np.testing.assert_array_equal(fits[0], fits[1])
    assert np.abs(fits[0] - fits[2]).max() > 0
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    PCA(3).fit(X)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 7}, r"n_components is 7\n  expected: a number from 1 to min\(n_samples, .*\) = 4"),
        ({"n_components": 0}, "n_components is 0"),
        ({"n_components": 1.0}, "n_components is 1.0"),
        ({"n_components": "mle"}, "n_components is 'mle'"),
        ({"n_components": 0.5, "svd_solver": "randomized"}, "n_components is 0.5"),
        ({"svd_solver": "arpack"}, "unknown svd_solver 'arpack'\n  expected: one of auto, covariance_eigh"),
        (
            {"svd_solver": "randomized", "iterated_power": -1},
            'iterated_power is -1\n  expected: "auto" or an integer',
        ),
        ({"iterated_power": "some"}, "iterated_power is 'some'"),
        ({"n_oversamples": 2.5}, "n_oversamples is 2.5\n  expected: an integer >= 0"),
    ],
)
def test_options_that_make_no_sense(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PCA(**options).fit(rows(9, 4))


def test_other_mistakes() -> None:
    with pytest.raises(InputError, match="n_samples = 1\n  expected: at least 2"):
        PCA().fit(rows(2, 4)[:1])
    model = PCA(2).fit(rows(9, 4))
    with pytest.raises(InputError, match=r"scores of shape \(3, 4\)\n  expected: \(samples, 2\)"):
        model.inverse_transform(np.ones((3, 4)))
    with pytest.raises(InputError, match="rows that do not vary in some direction"):
        PCA().fit(np.ones((5, 2))).score_samples(np.ones((1, 2)))
    with pytest.raises(ValueError, match="Input X of PCA contains NaN"):
        PCA().fit(torch.full((4, 2), torch.nan))
    for bad, message in ((np.nan, "Input X contains NaN"), (-np.inf, "Input X contains infinity")):
        for shape, options in (((900, 4), {}), ((4, 9), {}), ((90, 9), {"svd_solver": "randomized"})):
            X = rows(*shape)
            X[-1, 2] = bad
            with pytest.raises(ValueError, match=message):
                PCA(2, **options).fit(X)
