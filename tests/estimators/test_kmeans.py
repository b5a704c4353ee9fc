"""KMeans against scikit-learn's, from the same start, in every form of input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans as Peer
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import ConvergenceWarning

from quire.errors import InputError
from quire.estimators.kmeans import KMeans

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def blobs() -> np.ndarray:
    random = np.random.RandomState(0)
    return 5 * random.randn(9, 4)[random.randint(9, size=1000)] + random.randn(1000, 4) + 50


def same(mine: KMeans, peer: Peer, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(mine.cluster_centers_, peer.cluster_centers_, rtol=tolerance)
    np.testing.assert_array_equal(mine.labels_, peer.labels_)
    assert mine.inertia_ == pytest.approx(peer.inertia_, rel=tolerance)
    assert mine.n_iter_ == peer.n_iter_


@pytest.mark.parametrize("clusters", [1, 2, 9, 60])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
def test_from_the_same_start_it_ends_where_scikit_learn_does(
    blobs: np.ndarray, clusters: int, weighted: bool, lost: int
) -> None:
    start = blobs[:clusters].copy()
    start[clusters - lost :] += 1e4  # a centre so far off that no row is nearest to it
    weights = np.random.RandomState(1).rand(len(blobs)) if weighted else None
    options = {"init": start, "n_init": 1}
    mine = KMeans(clusters, **options).fit(blobs, sample_weight=weights)
    peer = Peer(clusters, **options).fit(blobs, sample_weight=weights)
    same(mine, peer)
    np.testing.assert_array_equal(mine.predict(blobs + 1), peer.predict(blobs + 1))
    np.testing.assert_allclose(mine.transform(blobs + 1), peer.transform(blobs + 1), rtol=1e-10)
    wanted = peer.score(blobs + 1, sample_weight=weights)
    assert mine.score(blobs + 1, sample_weight=weights) == pytest.approx(wanted, rel=1e-10)


def test_digits() -> None:
    X = load_digits().data + np.random.RandomState(0).rand(1797, 64) / 100  # no two distances are the same
    start = X[:10]
    same(KMeans(10, init=start).fit(X), Peer(10, init=start, n_init=1).fit(X), 1e-9)


@pytest.mark.parametrize("options", [{"tol": 0.3}, {"tol": 0.0}, {"max_iter": 1}, {"max_iter": 4}])
def test_it_stops_where_scikit_learn_stops(blobs: np.ndarray, options: dict[str, Any]) -> None:
    start = blobs[:30]
    same(
        KMeans(30, init=start, **options).fit(blobs), Peer(30, init=start, n_init=1, **options).fit(blobs)
    )  # fmt: skip


def test_float32_rows_are_clustered_like_the_same_numbers_in_float64(blobs: np.ndarray) -> None:
    X = blobs.astype(np.float32)
    start = X[:30]
    narrow, wide = KMeans(30, init=start).fit(X), KMeans(30, init=start).fit(X.astype(np.float64))
    assert narrow.cluster_centers_.dtype == np.float32
    assert narrow.transform(X).dtype == np.float32
    np.testing.assert_array_equal(narrow.labels_, wide.labels_)
    np.testing.assert_array_equal(narrow.cluster_centers_, wide.cluster_centers_.astype(np.float32))
    assert narrow.n_iter_ == wide.n_iter_
    assert narrow.inertia_ == pytest.approx(wide.inertia_, rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_give_tensors(blobs: np.ndarray, device: str, dtype: torch.dtype) -> None:
    X = torch.tensor(blobs, device=device, dtype=dtype)
    before = X.clone()
    model = KMeans(9, random_state=0)
    labels = model.fit_predict(X)
    assert isinstance(model.cluster_centers_, np.ndarray)
    assert isinstance(model.labels_, np.ndarray)
    for answer in (labels, model.predict(X), model.transform(X), model.fit_transform(X)):
        assert isinstance(answer, torch.Tensor)
        assert answer.device == X.device
    assert model.transform(X).dtype == dtype
    assert torch.equal(labels, model.predict(X))
    assert labels.dtype == torch.int32
    assert torch.equal(X, before)
    np.testing.assert_array_equal(model.predict(X.cpu().numpy()), model.labels_)
    assert model.score(X) == pytest.approx(-model.inertia_)


@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_several_starts_find_what_scikit_learn_finds(init: str) -> None:
    X = load_iris().data
    mine = KMeans(3, init=init, n_init=20, random_state=0).fit(X)
    assert mine.inertia_ == pytest.approx(Peer(3, n_init=20, random_state=0).fit(X).inertia_, rel=1e-6)
    again = KMeans(3, init=init, n_init=20, random_state=0).fit(X)
    np.testing.assert_array_equal(again.cluster_centers_, mine.cluster_centers_)
    assert KMeans(8, init=init, n_init=1, random_state=1).fit(X).inertia_ > KMeans(
        8, init=init, n_init=20, random_state=1
    ).fit(X).inertia_ * (1 + 1e-9)


def test_kmeans_plusplus_is_a_good_start(blobs: np.ndarray) -> None:
    mine = np.median([KMeans(9, random_state=seed).fit(blobs).inertia_ for seed in range(9)])
    peer = np.median([Peer(9, random_state=seed).fit(blobs).inertia_ for seed in range(9)])
    assert mine < 1.1 * peer


def test_equal_rows() -> None:
    X = np.repeat([[0.0, 1.0], [2.0, 3.0]], 10, axis=0)
    with pytest.warns(ConvergenceWarning, match="2 distinct clusters found, fewer than n_clusters=4"):
        model = KMeans(4, random_state=0).fit(X)
    assert model.inertia_ == 0
    assert len(set(model.labels_)) == 2


def test_weights_are_repetitions(blobs: np.ndarray) -> None:
    X, start = blobs[:200], blobs[:5]
    times = np.random.RandomState(0).randint(0, 4, 200)
    weighted = KMeans(5, init=start, tol=0).fit(X, sample_weight=times)
    repeated = KMeans(5, init=start, tol=0).fit(X.repeat(times, axis=0))
    np.testing.assert_allclose(weighted.cluster_centers_, repeated.cluster_centers_, rtol=1e-12)
    assert weighted.inertia_ == pytest.approx(repeated.inertia_)


def test_mistakes(blobs: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"n_samples=5 for n_clusters=8\n  expected: .*\n  fix: give more"):
        KMeans().fit(blobs[:5])
    with pytest.raises(InputError, match=r"init of shape \(3, 4\)\n  expected: .* = \(9, 4\)"):
        KMeans(9, init=blobs[:3]).fit(blobs)
    with pytest.raises(InputError, match="init contains NaN"):
        KMeans(1, init=np.full((1, 4), np.nan)).fit(blobs)
    for options, name in (
        ({"n_clusters": 0}, "n_clusters"), ({"n_clusters": 2.5}, "n_clusters"), ({"max_iter": 0}, "max_iter"),
        ({"tol": -1}, "tol"), ({"n_init": "many"}, "n_init"), ({"init": "kmeans"}, "init"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=name):
            KMeans(**options).fit(blobs)
    with pytest.warns(RuntimeWarning, match="one start instead of n_init=5"):
        KMeans(3, init=blobs[:3], n_init=5).fit(blobs)
    with pytest.raises(ValueError, match="at least one non-zero"):
        KMeans(3).fit(blobs, sample_weight=np.zeros(len(blobs)))
