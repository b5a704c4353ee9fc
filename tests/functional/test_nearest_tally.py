"""Rows that keep their centre are not searched, and yet every label is that of float64 differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from quire.functional import tally
from quire.functional.clusters import centre_update
from quire.functional.nearest import ClusterSums, cluster_sums
from quire.functional.tally import Tally
from tests.kernels.widths import WIDTHS, limited

ROWS = 4000


def by_differences(rows: Tensor, centres: Tensor) -> Tensor:
    """The lowest number among the nearest centres."""
    squared = (rows.double()[:, None] - centres.double()).square().sum(2)
    return (squared == squared.min(1, keepdim=True).values).double().argmax(1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def groups(features: int, clusters: int) -> Tensor:
    which = torch.randint(clusters, (ROWS,), generator=torch.Generator().manual_seed(2))
    return normal(ROWS, features) + 5 * normal(clusters, features, seed=1)[which]


def steps(features: int, clusters: int) -> Tensor:
    """Whole numbers: rows that are alike, and rows in the middle between centres."""
    return torch.randint(0, 4, (ROWS, features), generator=torch.Generator().manual_seed(3)).double()


KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": lambda features, clusters: normal(ROWS, features),
    "far off": lambda features, clusters: normal(ROWS, features) + 500,
    "groups": groups,
    "whole numbers": steps,
    "columns first": lambda features, clusters: groups(features, clusters).T.contiguous().T,
    "every other": lambda features, clusters: groups(2 * features, clusters)[::2, ::2],
    "one far out": lambda features, k: torch.cat([groups(features, k), normal(1, features) * 1e4]),
}  # fmt: skip


@pytest.fixture(autouse=True, params=WIDTHS)
def _processor(request: pytest.FixtureRequest) -> Iterator[None]:
    """The loops as each kind of processor runs them."""
    with limited(request.param):
        yield


def new_tally(x: Tensor, clusters: int) -> Tally:
    shift = x.double().mean(0).to(x.dtype).double()
    return Tally(x, clusters, shift, float((x.double() - shift).norm(dim=1).max()))


def check(found: ClusterSums, x: Tensor, centres: Tensor) -> None:
    wanted = by_differences(x, centres)
    assert torch.equal(found.labels, wanted)
    assert torch.equal(found.counts, torch.bincount(wanted, minlength=len(centres)).double())
    new = cluster_sums(x, centres, tally=new_tally(x, len(centres)))
    assert torch.equal(found.sums, new.sums), "a sum depends on how it came about"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("features", "clusters"), [(2, 5), (3, 40), (30, 8), (1, 17)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sweep_has_the_labels_of_a_full_search(
    kind: str, features: int, clusters: int, dtype: torch.dtype
) -> None:
    x = KINDS[kind](features, clusters).to(dtype)
    kept = new_tally(x, clusters)
    centres, asked = x[:clusters].double(), []
    for _ in range(14):
        found = cluster_sums(x, centres, tally=kept)
        check(found, x, centres)
        asked.append(kept.searched)
        centres = centre_update(found.sums, found.counts)
    assert asked[0] == len(x)
    if kind == "groups" and features > 1:
        assert asked[-1] < len(x) / 3, "hardly any row was left alone"


def test_centres_that_jump_rest_or_creep() -> None:
    """Whatever the centres do: nothing is assumed but that they are known."""
    x = groups(3, 20).float()
    kept = new_tally(x, 20)
    centres = x[:20].double()
    for turn in range(30):
        check(cluster_sums(x, centres, tally=kept), x, centres)
        moved = centres + normal(20, 3, seed=turn) * 10.0 ** -(turn % 10)
        centres = torch.where((torch.arange(20) % 3 == turn % 3)[:, None], centres, moved)
        if turn == 20:
            centres = centres.flip(0) * 3  # much farther out than any row


def test_a_tie_is_looked_at_again_whenever_it_is_broken_and_made() -> None:
    x = torch.zeros(ROWS, 2)
    x[::2, 0] = torch.linspace(-3, 3, ROWS // 2)
    kept = new_tally(x, 3)
    for left in (1.0, 1 + 1e-13, 1.0, 1 - 1e-13, 1 - 1e-15, 1.0, 1.0):
        centres = torch.tensor([[1.0, 0], [-left, 0], [0, 9]], dtype=torch.float64)
        found = cluster_sums(x, centres, tally=kept)
        check(found, x, centres)
        assert int(found.labels[1]) == (1 if left < 1 else 0)


@pytest.mark.parametrize("scale", [1e-100, 1e-30, 1e-18, 1e18, 1e30, 1e100])
@pytest.mark.parametrize("clusters", [9, 19])
def test_values_that_float32_does_not_have(clusters: int, scale: float) -> None:
    x = groups(4, clusters)
    kept = new_tally(x * scale, clusters)
    centres = x[:clusters]
    for _ in range(8):
        found = cluster_sums(x * scale, centres * scale, tally=kept)
        assert torch.equal(found.labels, by_differences(x, centres))
        sums = torch.zeros_like(centres).index_add_(0, found.labels, x)
        centres = centre_update(sums, found.counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_a_tally_is_the_sum_of_the_rows_that_are_there(dtype: torch.dtype, far: float) -> None:
    """However rows have come and gone: bit by bit that of a new tally, and nearly that of float64."""
    x = (normal(40_000, 5) + far).to(dtype)
    kept = new_tally(x, 7)
    for seed in range(6):
        centres = normal(7, 5, seed=seed) + far
        found = cluster_sums(x, centres, tally=kept)
        new = cluster_sums(x, centres, tally=new_tally(x, 7))
        plain = cluster_sums(x, centres, backend="torch")
        assert torch.equal(found.labels, plain.labels)
        assert torch.equal(found.sums, new.sums)
        assert torch.equal(found.counts, plain.counts)
        torch.testing.assert_close(found.sums, plain.sums, rtol=1e-12, atol=1e-9 * (1 + far))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_kept_memory_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = groups(6, 20) + 3
    monkeypatch.setattr(tally, "THREAD_TIME", 1000.0)
    monkeypatch.setattr(tally, "KEPT_NUMBERS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kept, centres = new_tally(x, 20), x[:20]
        for _ in range(8):
            found = cluster_sums(x, centres, tally=kept)
            check(found, x, centres)
            centres = centre_update(found.sums, found.counts)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_rows_are_left_alone_when_centres_come_to_rest() -> None:
    """Rows without structure, and centres that jump about: all rows are doubtful each time, until then."""
    x = normal(ROWS, 40)
    kept = new_tally(x, 6)
    for turn in range(10):
        centres = normal(6, 40, seed=turn)
        assert torch.equal(cluster_sums(x, centres, tally=kept).labels, by_differences(x, centres))
        assert kept.searched == len(x)
    for _ in range(3):
        check(cluster_sums(x, centres, tally=kept), x, centres)
    assert kept.searched < 10


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_spoils_the_sums_and_nothing_else(value: float) -> None:
    """Who reads the sums says so; here, rows beside it keep their labels."""
    x, centres = groups(3, 5).float(), groups(3, 5)[:5]
    wanted, spoiled = by_differences(x, centres), x.clone()
    spoiled[7, 1] = value
    kept = Tally(spoiled, 5, x.mean(0), 100.0)
    for _ in range(2):
        found = cluster_sums(spoiled, centres, tally=kept)
        others = torch.arange(ROWS) != 7
        assert torch.equal(found.labels[others], wanted[others])
        assert not found.sums.isfinite().all()
