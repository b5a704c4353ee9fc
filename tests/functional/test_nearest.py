"""The nearest centre, against float64 differences of every row to every centre."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional import nearest
from quire.functional import screen as searching
from quire.functional.nearest import cluster_sums, nearest_centres
from quire.functional.screen import Screen
from quire.functional.tally import Tally


def by_differences(rows: Tensor, centres: Tensor) -> Tensor:
    """The lowest number among the nearest centres."""
    squared = (rows.double()[:, None] - centres.double()).square().sum(2)
    return (squared == squared.min(1, keepdim=True).values).double().argmax(1)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def screened(rows: Tensor, centres: Tensor) -> Screen:
    """After float32's search, with no label where that is unsure."""
    screen = Screen(rows, centres, centres.mean(0).to(rows.dtype), None, None, collect=False)
    screen.over(slice(0, len(rows)), screen._room())
    return screen


SHAPES = [(1, 1, 1), (7, 3, 2), (1000, 5, 7), (3000, 1, 129), (2500, 40, 300), (500, 200, 8), (4000, 2, 1024)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "features", "clusters"), SHAPES)
@pytest.mark.parametrize("origin", [0.0, 3000.0])
def test_labels_and_sums_are_those_of_float64(
    rows: int, features: int, clusters: int, origin: float, dtype: torch.dtype
) -> None:
    x = (normal(rows, features) + origin).to(dtype)
    centres = normal(clusters, features, seed=1) + origin
    weights = torch.rand(rows, dtype=torch.float64)
    wanted = by_differences(x, centres)
    found = cluster_sums(x, centres)
    assert torch.equal(found.labels, wanted)
    one_hot = torch.nn.functional.one_hot(wanted, clusters).double()
    torch.testing.assert_close(found.sums, one_hot.T @ x.double(), rtol=1e-12, atol=1e-9)
    assert torch.equal(found.counts, one_hot.sum(0))
    found = cluster_sums(x, centres, weights=weights, shift=x.mean(0))
    assert torch.equal(found.labels, wanted)
    torch.testing.assert_close(found.sums, (one_hot.T * weights) @ x.double(), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(found.counts, weights @ one_hot, rtol=1e-12, atol=1e-12)
    assert torch.equal(nearest_centres(x, centres, radius=1e6), wanted)


@pytest.mark.parametrize("step", [1e-5, 1e-6, 3e-7, 1e-7, 3e-8, 1e-10])
def test_rows_that_float32_cannot_tell_apart(step: float) -> None:
    """Rows a hair's breadth from the plane between two centres, on either side of it."""
    centres = normal(60, 100)
    pairs = torch.combinations(torch.arange(60))
    middle = (centres[pairs[:, 0]] + centres[pairs[:, 1]]) / 2
    away = (centres[pairs[:, 1]] - centres[pairs[:, 0]]) * step
    x = torch.cat([middle + away, middle - away])
    wanted = by_differences(x, centres)
    screen = screened(x, centres)
    scores = screen.biases + screen.codes @ (x - screen.shift).float().T
    assert step > 1e-7 or (scores.argmin(0) != wanted).sum() > 20, "float32 alone would do"
    wrong = (screen.labels != wanted).nonzero()[:, 0]
    assert set(wrong.tolist()) <= set(screen.unsure(screen.labels).tolist())
    assert torch.equal(nearest_centres(x, centres), wanted)


def test_doubt_is_not_cast_on_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would be passed by deciding all rows in float64."""
    x, centres = normal(20_000, 32, dtype=torch.float32), normal(64, 32, seed=1)
    screen = screened(x, centres)
    assert len(screen.unsure(screen.labels)) < 50
    x[0] *= 1000  # a row far out makes others unsure, and they are asked about their own size
    screen = screened(x, centres)
    unsure, asked = screen.unsure(screen.labels), []
    assert len(unsure) > 50
    decide = searching.decide

    def counted(rows: Tensor, *rest: Tensor) -> Tensor:
        asked.append(len(rows))
        return decide(rows, *rest)

    monkeypatch.setattr(searching, "decide", counted)
    labels = screen.settled(unsure)
    assert sum(asked) < 50
    assert torch.equal(labels, by_differences(x, centres)[unsure])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lowest_number_wins_an_exact_tie(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 4, (2000, 3), generator=generator).to(dtype)
    centres = torch.randint(0, 7, (60, 3), generator=generator).double() / 2
    assert torch.equal(nearest_centres(x, centres), by_differences(x, centres))
    same = torch.ones(50, 3, dtype=dtype)
    assert nearest_centres(same, torch.ones(9, 3)).tolist() == [0] * 50


@pytest.mark.parametrize("scale", [1e-100, 1e-30, 1e30, 1e150])
def test_values_that_float32_does_not_have(scale: float) -> None:
    x, centres = normal(300, 4) * scale, normal(9, 4, seed=1) * scale
    assert torch.equal(nearest_centres(x, centres), by_differences(x / scale, centres / scale))


@pytest.mark.parametrize("rows", [300, 5000])
def test_a_cell_without_a_centre_is_nobodys(rows: int) -> None:
    """All scores are infinite in float32, and the grid of 19 centres has 20 cells."""
    x, centres = normal(rows, 4), normal(19, 4, seed=1) * 1e20
    found = nearest_centres(x, centres, shift=torch.zeros(4))
    assert torch.equal(found, by_differences(x, centres))


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_and_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, centres = normal(1003, 6, dtype=torch.float32), normal(11, 6, seed=1)
    whole = cluster_sums(x, centres)
    monkeypatch.setattr(searching, "CHUNK_ROWS", {"cpu": (16, 16)})
    monkeypatch.setattr(nearest, "THREAD_TIME", 1000.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts = cluster_sums(x, centres)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(parts.labels, whole.labels)
    assert torch.equal(parts.counts, whole.counts)
    torch.testing.assert_close(parts.sums, whole.sums, rtol=1e-13, atol=1e-13)


def test_a_thread_that_fails_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> Tensor:
        raise ZeroDivisionError("in a thread")

    monkeypatch.setattr(Screen, "over", fail)
    monkeypatch.setattr(nearest, "THREAD_TIME", 1000.0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ZeroDivisionError, match="in a thread"):
            cluster_sums(normal(1000, 2), normal(3, 2))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_mistakes() -> None:
    with pytest.raises(InputError, match=r"rows of shape \(3, 2\) and centres of shape \(4, 5\)"):
        nearest_centres(torch.ones(3, 2), torch.ones(4, 5))
    with pytest.raises(InputError, match="centres of shape \\(0, 2\\)"):
        nearest_centres(torch.ones(3, 2), torch.ones(0, 2))
    with pytest.raises(InputError, match="did you mean 'triton'"):
        nearest_centres(torch.ones(3, 2), torch.ones(4, 2), backend="tritn")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_a_tally_is_the_sum_of_the_rows_that_are_there(dtype: torch.dtype, far: float) -> None:
    """However rows have come and gone: bit by bit that of a new tally, and nearly that of float64."""
    x = normal(40_000, 5, dtype=dtype) + far
    shift = x.double().mean(0)
    radius = float((x.double() - shift).norm(dim=1).max())
    kept = Tally(x, 7, shift, radius)
    for seed in range(6):
        centres = normal(7, 5, seed=seed) + far
        found = nearest.cluster_sums(x, centres, shift=shift, tally=kept)
        new = nearest.cluster_sums(x, centres, shift=shift, tally=Tally(x, 7, shift, radius))
        plain = nearest.cluster_sums(x, centres, shift=shift)
        assert torch.equal(found.labels, plain.labels)
        assert torch.equal(found.sums, new.sums)
        assert torch.equal(found.counts, plain.counts)
        torch.testing.assert_close(found.sums, plain.sums, rtol=1e-12, atol=1e-9 * (1 + far))
