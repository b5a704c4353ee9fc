"""The formulas of K-means against scikit-learn, explicit loops and cases solved by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster._k_means_common import _relocate_empty_clusters_dense
from sklearn.metrics.pairwise import euclidean_distances
from torch import Tensor

from quire.errors import InputError
from quire.functional import screen
from quire.functional.clusters import (
    centre_distances,
    centre_update,
    farthest_rows,
    inertia,
    inertia_from_sums,
    kmeans_plusplus,
    random_rows,
    relocate_empty,
    seeding_probabilities,
)
from quire.functional.nearest import cluster_sums


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_four_points_by_hand() -> None:
    x = torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.5, 1.0], [1.0, 1.0]])
    centres = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    found = cluster_sums(x, centres)
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert found.sums.tolist() == [[0.5, 0.0], [1.5, 2.0]]
    new = centre_update(found.sums, found.counts)
    assert new.tolist() == [[0.25, 0.0], [0.75, 1.0]]
    assert float(inertia(x, centres, found.labels)) == 0.5
    assert float(inertia(x, new, found.labels)) == 0.25


def test_inertia_in_parts_with_weights_and_from_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "PIECE_NUMBERS", {"cpu": 40})
    x, centres, weights = normal(57, 4), normal(5, 4, seed=1), torch.rand(57, dtype=torch.float64)
    found = cluster_sums(x, centres, weights=weights)
    wanted = sum(
        float(w) * float((row - centres[k]).square().sum())
        for row, w, k in zip(x, weights, found.labels.tolist(), strict=True)
    )
    assert float(inertia(x, centres, found.labels, weights=weights)) == pytest.approx(wanted, rel=1e-13)
    squares = weights @ x.square().sum(1)
    assert float(inertia_from_sums(centres, found.sums, found.counts, squares)) == pytest.approx(wanted)


def test_an_empty_cluster_joins_the_largest() -> None:
    sums, counts = torch.tensor([[3.0], [0.0], [8.0]]), torch.tensor([1.0, 0.0, 4.0])
    assert centre_update(sums, counts).tolist() == [[3.0], [2.0], [2.0]]
    both = centre_update(torch.stack([sums, sums]), torch.stack([counts, counts]))
    assert both.tolist() == [[[3.0], [2.0], [2.0]]] * 2


def test_distances_to_all_centres() -> None:
    x, centres = normal(70, 5) + 100, normal(9, 5, seed=1) + 100
    np.testing.assert_allclose(centre_distances(x, centres), euclidean_distances(x, centres), rtol=1e-10)
    assert centre_distances(x.float(), centres).dtype == torch.float32
    assert centre_distances(centres, centres).diagonal().tolist() == [0.0] * 9


@pytest.mark.parametrize("empty", [0, 1])
def test_empty_clusters_are_filled_as_by_scikit_learn(empty: int) -> None:
    x, centres = normal(40, 3), normal(6, 3, seed=1)
    centres[:empty] = 1e3
    weights = torch.rand(40, dtype=torch.float64)
    found = cluster_sums(x, centres, weights=weights)
    sums, counts = found.sums.numpy().copy(), found.counts.numpy().copy()
    _relocate_empty_clusters_dense(
        x.numpy(), weights.numpy(), centres.numpy(), sums, counts, found.labels.numpy().astype(np.int32)
    )
    assert (counts > 0).all()
    missing = int((found.counts == 0).sum())
    assert missing == empty + 1
    far = farthest_rows(x, centres, found.labels, missing, weights=weights)
    mine = relocate_empty(found.sums, found.counts, far)
    np.testing.assert_allclose(mine[0], sums, rtol=1e-13)
    np.testing.assert_allclose(mine[1], counts, rtol=1e-13)
    assert int((found.counts == 0).sum()) == missing, "what was given has changed"


def test_nothing_is_moved_where_all_rows_lie_on_their_centres() -> None:
    x, centres = torch.ones(5, 2), torch.ones(3, 2)
    found = cluster_sums(x, centres)
    far = farthest_rows(x, centres, found.labels, 2)
    assert relocate_empty(found.sums, found.counts, far)[1].tolist() == [5.0, 0.0, 0.0]


# -- Seeds -------------------------------------------------------------------------------------


def chi_square(drawn: Tensor, probabilities: Tensor) -> float:
    expected = len(drawn) * probabilities
    seen = torch.bincount(drawn, minlength=len(probabilities)).double()
    assert seen[expected == 0].sum() == 0
    used = expected > 0
    return float(((seen - expected)[used].square() / expected[used]).sum())


def test_seeds_are_drawn_with_probability_proportional_to_squared_distance() -> None:
    x = torch.tensor([[0.0], [1.0], [3.0], [7.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0])
    generator = torch.Generator().manual_seed(0)
    drawn = kmeans_plusplus(x, 2, generator, weights=weights, starts=20_000, trials=1)
    assert chi_square(drawn[:, 0], weights.double() / 4) < 20  # 4 values: beyond 16.3 once in 1,000
    for first, wanted in {0: [0, 2, 0, 49], 1: [1, 0, 0, 36], 3: [49, 72, 0, 0]}.items():
        p = torch.tensor(wanted, dtype=torch.float64)
        after = drawn[drawn[:, 0] == first, 1]
        assert chi_square(after, p / p.sum()) < 20
        torch.testing.assert_close(seeding_probabilities(x, x[[first]], weights=weights), p / p.sum())


def test_more_trials_lower_the_potential() -> None:
    x = normal(400, 2)

    def potential(trials: int | None) -> float:
        chosen = kmeans_plusplus(x, 12, torch.Generator().manual_seed(1), starts=50, trials=trials)
        squared = (x[:, None, None] - x[chosen]).square().sum(-1)  # (N, R, K)
        return float(squared.min(2).values.sum(0).mean())

    assert potential(None) < 0.9 * potential(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_seeds_depend_on_the_rows_alone(dtype: torch.dtype) -> None:
    """Neither their order nor whether a row comes twice or with weight two changes what is drawn."""
    x = normal(50, 3).to(dtype) + 10
    times = torch.randint(0, 4, (50,), generator=torch.Generator().manual_seed(3))
    repeated = x.repeat_interleave(times, 0)
    order = torch.randperm(len(repeated), generator=torch.Generator().manual_seed(4))

    def seeds(rows: Tensor, weights: Tensor | None = None) -> Tensor:
        return rows[kmeans_plusplus(rows, 6, torch.Generator().manual_seed(5), weights=weights, starts=3)]

    assert torch.equal(seeds(repeated), seeds(repeated[order]))
    assert torch.equal(seeds(repeated), seeds(x, times))


def test_seeds_are_different_rows_while_there_are_any() -> None:
    x = torch.arange(5.0).repeat(30)[:, None] + 1000
    for chosen in kmeans_plusplus(x, 5, torch.Generator().manual_seed(0), starts=20):
        assert sorted(x[chosen, 0].tolist()) == [1000.0, 1001.0, 1002.0, 1003.0, 1004.0]
    assert kmeans_plusplus(torch.ones(4, 2), 3, starts=2).shape == (2, 3)  # none left: any row will do


def test_random_rows_are_different_and_weighted() -> None:
    weights = torch.tensor([1.0, 2.0, 0.0, 5.0])
    generator = torch.Generator().manual_seed(0)
    drawn = random_rows(4, 2, generator, weights=weights, starts=20_000)
    assert bool((drawn[:, 0] != drawn[:, 1]).all())
    assert chi_square(drawn[:, 0], weights.double() / 8) < 20
    after = drawn[drawn[:, 0] == 3, 1]
    assert chi_square(after, torch.tensor([1.0, 2.0, 0.0, 0.0]).double() / 3) < 20


def test_more_clusters_than_rows() -> None:
    for choose in (lambda: kmeans_plusplus(torch.ones(3, 2), 4), lambda: random_rows(3, 4)):
        with pytest.raises(InputError, match=r"4 clusters of 3 rows\n  expected: .*\n  fix: ask for fewer"):
            choose()
