"""The nearest centre, against float64 differences of every row to every centre."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional import screen as searching
from quire.functional import tally as on_host
from quire.functional.nearest import cluster_sums, nearest_centres
from quire.functional.tally import Tally
from quire.kernels import Backend
from tests.kernels.widths import WIDTHS, limited


def by_differences(rows: Tensor, centres: Tensor) -> Tensor:
    """The lowest number among the nearest centres."""
    squared = (rows.double()[:, None] - centres.double()).square().sum(2)
    return (squared == squared.min(1, keepdim=True).values).double().argmax(1)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(params=["torch", *WIDTHS])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """PyTorch's operations, and the loops in C++ as each kind of processor runs them."""
    if request.param == "torch":
        yield "torch"
        return
    with limited(request.param):
        yield "auto"


SHAPES = [(1, 1, 1), (7, 3, 2), (1000, 5, 7), (3000, 1, 129), (2500, 40, 300), (500, 200, 8), (4000, 2, 1024)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "features", "clusters"), SHAPES)
@pytest.mark.parametrize("origin", [0.0, 3000.0])
def test_labels_and_sums_are_those_of_float64(
    rows: int, features: int, clusters: int, origin: float, dtype: torch.dtype, backend: Backend
) -> None:
    x = (normal(rows, features) + origin).to(dtype)
    centres = normal(clusters, features, seed=1) + origin
    weights = torch.rand(rows, dtype=torch.float64)
    wanted = by_differences(x, centres)
    found = cluster_sums(x, centres, backend=backend)
    assert torch.equal(found.labels, wanted)
    one_hot = torch.nn.functional.one_hot(wanted, clusters).double()
    torch.testing.assert_close(found.sums, one_hot.T @ x.double(), rtol=1e-12, atol=1e-9)
    assert torch.equal(found.counts, one_hot.sum(0))
    found = cluster_sums(x, centres, weights=weights, shift=x.mean(0), backend=backend)
    assert torch.equal(found.labels, wanted)
    torch.testing.assert_close(found.sums, (one_hot.T * weights) @ x.double(), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(found.counts, weights @ one_hot, rtol=1e-12, atol=1e-12)
    assert torch.equal(nearest_centres(x, centres, backend=backend), wanted)


@pytest.mark.parametrize("step", [1e-5, 1e-6, 3e-7, 1e-7, 3e-8, 1e-10])
def test_rows_that_float32_cannot_tell_apart(step: float, backend: Backend) -> None:
    """Rows a hair's breadth from the plane between two centres, on either side of it."""
    centres = normal(60, 100)
    pairs = torch.combinations(torch.arange(60))
    middle = (centres[pairs[:, 0]] + centres[pairs[:, 1]]) / 2
    away = (centres[pairs[:, 1]] - centres[pairs[:, 0]]) * step
    x = torch.cat([middle + away, middle - away])
    wanted = by_differences(x, centres)
    shift = centres.mean(0)
    near, moved = (x - shift).float(), (centres - shift).float()
    scores = moved.square().sum(1) - 2 * near @ moved.T
    assert step > 1e-7 or (scores.argmin(1) != wanted).sum() > 20, "float32 alone would do"
    assert torch.equal(nearest_centres(x, centres, backend=backend), wanted)


def test_doubt_is_not_cast_on_everybody(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    """Otherwise the test above would be passed by deciding all rows in float64."""
    x, centres = normal(20_000, 32, dtype=torch.float32), normal(64, 32, seed=1)
    x[0] *= 1000  # a row far out does not make others unsure
    wanted, asked, decide = by_differences(x, centres), [], searching.decide
    if backend == "torch":

        def counted(rows: Tensor, *rest: Tensor) -> Tensor:
            asked.append(len(rows))
            return decide(rows, *rest)

        monkeypatch.setattr(searching, "decide", counted)
        labels = nearest_centres(x, centres, backend=backend)
    else:
        tally = Tally(x, 64, centres.mean(0).float(), collect=False)
        tally.sweep(centres)
        labels, asked = tally.labels, [tally.decided]
    assert 0 < sum(asked) < 50
    assert torch.equal(labels, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lowest_number_wins_an_exact_tie(dtype: torch.dtype, backend: Backend) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 4, (2000, 3), generator=generator).to(dtype)
    centres = torch.randint(0, 7, (60, 3), generator=generator).double() / 2
    assert torch.equal(nearest_centres(x, centres, backend=backend), by_differences(x, centres))
    same = torch.ones(50, 3, dtype=dtype)
    assert nearest_centres(same, torch.ones(9, 3), backend=backend).tolist() == [0] * 50


@pytest.mark.parametrize("scale", [1e-100, 1e-30, 1e30, 1e150])
def test_values_that_float32_does_not_have(scale: float, backend: Backend) -> None:
    x, centres = normal(300, 4) * scale, normal(9, 4, seed=1) * scale
    found = nearest_centres(x, centres, backend=backend)
    assert torch.equal(found, by_differences(x / scale, centres / scale))


@pytest.mark.parametrize("rows", [300, 5000])
def test_a_place_without_a_centre_is_nobodys(rows: int, backend: Backend) -> None:
    """All scores are infinite in float32, and centres are searched in whole groups."""
    x, centres = normal(rows, 4), normal(19, 4, seed=1) * 1e20
    found = nearest_centres(x, centres, shift=torch.zeros(4), backend=backend)
    assert torch.equal(found, by_differences(x, centres))


@pytest.mark.parametrize("odd", ["columns first", "every other", "one row again and again", "not aligned"])
def test_rows_that_lie_otherwise(odd: str, backend: Backend) -> None:
    x, centres = normal(501, 20, dtype=torch.float32), normal(13, 20, seed=1)
    ways = {
        "columns first": x.T.contiguous().T,
        "every other": torch.stack([x, -x], 2).flatten(1)[:, ::2],
        "one row again and again": x[:1].expand(501, 20),
        "not aligned": torch.cat([x.new_zeros(1), x.flatten()])[1:].view(501, 20),
    }
    rows = ways[odd]
    found = cluster_sums(rows, centres, backend=backend)
    assert torch.equal(found.labels, by_differences(rows, centres))
    wanted = torch.zeros_like(centres).index_add_(0, found.labels, rows.double())
    torch.testing.assert_close(found.sums, wanted, rtol=1e-12, atol=1e-12)


def test_no_rows_and_rows_of_half_precision(backend: Backend) -> None:
    centres = normal(5, 3)
    found = cluster_sums(torch.zeros(0, 3), centres, backend=backend)
    assert found.labels.shape == (0,)
    assert not found.sums.any()
    x = normal(200, 3).to(torch.bfloat16)
    assert torch.equal(nearest_centres(x, centres, backend=backend), by_differences(x, centres))


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_and_threads_change_nothing(
    threads: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, centres = normal(1003, 6, dtype=torch.float32), normal(11, 6, seed=1)
    whole = cluster_sums(x, centres, backend=backend)
    monkeypatch.setattr(searching, "CHUNK_NUMBERS", {"cpu": 200})
    monkeypatch.setattr(on_host, "THREAD_TIME", 1000.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts = cluster_sums(x, centres, backend=backend)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(parts.labels, whole.labels)
    assert torch.equal(parts.counts, whole.counts)
    torch.testing.assert_close(parts.sums, whole.sums, rtol=1e-13, atol=1e-13)


def test_centres_that_are_being_learned(backend: Backend) -> None:
    x, centres = normal(50, 3), normal(4, 3, seed=1).requires_grad_()
    wanted = by_differences(x, centres.detach())
    assert torch.equal(nearest_centres(x.requires_grad_(), centres, backend=backend), wanted)
    assert torch.equal(nearest_centres(x, centres, shift=centres[0], backend=backend), wanted)


def test_a_thread_that_fails_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tally, "_share", lambda self, thread: int(thread == 2))  # as where memory is short
    monkeypatch.setattr(on_host, "THREAD_TIME", 1000.0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with limited("widest"), pytest.raises(MemoryError, match="no room for 3 times 16 rows of 2 features"):
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
