"""K-means from sums: batches, starts, empty clusters, saving; against scikit-learn and explicit iteration."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from quire.data.batch import Batch, Data, TensorData, in_order
from quire.errors import InputError
from quire.functional.tally import Tally
from quire.tasks import kmeans as module
from quire.tasks.kmeans import KMeansTask
from quire.tasks.kmeans_rows import WEIGHT, farthest
from quire.train import evaluate
from quire.train.statistics import fit_statistics
from quire.train.task import build_task
from tests.kernels.widths import limited


def blobs(rows: int = 300, features: int = 3, centres: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    middle = 4 * torch.randn(centres, features, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    return middle[torch.randint(centres, (rows,), generator=generator)] + noise + 20


class Apart:
    """Rows that come in batches of seven, like those of a file that is not held in memory."""

    def __init__(self, **fields: Tensor) -> None:
        self.inner = TensorData(fields)
        self.row_size = 2**22 // 7

    def __len__(self) -> int:
        return len(self.inner)

    def take(self, rows: Tensor) -> Batch:
        return self.inner.take(rows)

    def subset(self, rows: Tensor) -> Data:
        return self.inner.subset(rows)

    def to(self, device: torch.device | str) -> Apart:
        return self

    def batches(self, rows: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        assert batch_size == 7
        return self.inner.batches(rows, batch_size, start)


def fitted(data: Data, centres: Tensor, **options: float) -> KMeansTask:
    """From given centres (K, D) or (R, K, D)."""
    centres = centres if centres.ndim == 3 else centres[None]
    task = KMeansTask(centres.shape[2], centres.shape[1], starts=len(centres), **options)  # type: ignore[arg-type]
    task.begin(data, centres)
    fit_statistics(task, data, sweeps=1000, started=True)
    return task


@pytest.mark.parametrize("far", [0, 1, 2])
def test_batches_give_scikit_learns_centres_also_where_clusters_come_out_empty(far: int) -> None:
    x = blobs()
    centres = x[:8].clone()
    centres[:far] = torch.tensor([[900.0], [-900.0]])[:far]
    weights = torch.rand(300, dtype=torch.float64) + 0.1
    peer = KMeans(8, init=centres.numpy(), n_init=1).fit(x.numpy(), sample_weight=weights.numpy())
    for data in (TensorData({"inputs": x, WEIGHT: weights}), Apart(inputs=x, weight=weights)):
        task = fitted(data, centres)
        np.testing.assert_allclose(task.centres[0], peer.cluster_centers_, rtol=1e-12)
        assert task.inertia.item() == pytest.approx(peer.inertia_, rel=1e-12)
        assert task.iterations.tolist() == [peer.n_iter_]
        assert not task.active.any()
        assert task.predict(x)["cluster"].tolist() == peer.labels_.tolist()


def test_candidates_of_batches_do_not_collide() -> None:
    """Each of the batches of seven (the last of six) has places of its own, however many are wanted."""
    x = blobs(300)
    data = Apart(inputs=x)
    task = KMeansTask(3, 4)
    task.begin(data, x[:4])
    task.wanted.fill_(9)
    task.layout.copy_(torch.tensor([300, 43]))
    total = torch.zeros(43, 9, 7, dtype=torch.float64)
    for batch in in_order(data):
        total += task.statistics(batch)["far"][0]
    assert total[..., 0].sum(1).tolist() == [7.0] * 42 + [6.0]
    assert total[..., 0].max() == 1
    found = total[total[..., 0] > 0][:, 4:]
    assert sorted(found.tolist()) == sorted(x.tolist())
    squared = (x[:, None] - x[:4]).square().sum(2).min(1).values
    best = farthest(total, 9)
    torch.testing.assert_close(best.squared, squared.sort(descending=True).values[:9])


def test_several_starts_are_what_each_of_them_is_alone() -> None:
    x = blobs(200, seed=1)
    generator = torch.Generator().manual_seed(1)
    starts = torch.stack([x[torch.randperm(200, generator=generator)[:6]] for _ in range(4)])
    starts[2, 0] = 1e4  # one of them has to fill an empty cluster
    together = fitted(TensorData({"inputs": x}), starts)
    alone = [fitted(TensorData({"inputs": x}), start) for start in starts]
    assert torch.equal(together.centres, torch.cat([task.centres for task in alone]))
    assert together.iterations.tolist() == [int(task.iterations) for task in alone]
    assert len(set(together.iterations.tolist())) > 1
    inertias = [task.inertia.item() for task in alone]
    assert together.inertia.tolist() == inertias
    assert together.best.item() == int(np.argmin(inertias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inertia_never_rises(dtype: torch.dtype) -> None:
    x = blobs(400, 6, 30).to(dtype)
    task = KMeansTask(6, 25, starts=5, init="random", tol=0.0)
    fit = fit_statistics(task, TensorData({"inputs": x}), sweeps=1000, seed=3)
    trace = torch.tensor(task.trace, dtype=torch.float64)
    assert fit.stopped == "converged"
    assert len(trace) > 10
    assert bool((trace.diff(dim=0) <= 1e-12 * trace[:-1]).all())
    assert bool((trace[0] > trace[-1] * 1.01).all())
    # What was added up is what differences give.
    exact = task.inertia.clone()
    torch.testing.assert_close(trace[-1], exact, rtol=1e-9, atol=0)
    losses = [record["values"]["loss"] for record in fit.history if record["split"] == "train"]
    assert losses[-1] == pytest.approx(exact.min().item() / 400, rel=1e-9)


def test_it_stops_where_scikit_learn_stops() -> None:
    x = blobs(500, 2, 3)
    for tol, most in ((1e-1, 300), (1e-4, 300), (0.0, 300), (0.0, 3)):
        peer = KMeans(7, init=x[:7].numpy(), n_init=1, tol=tol, max_iter=most).fit(x.numpy())
        task = fitted(TensorData({"inputs": x}), x[:7], tol=tol, max_iter=most)
        assert int(task.iterations) == peer.n_iter_
        np.testing.assert_allclose(task.centres[0], peer.cluster_centers_, rtol=1e-12)


def test_more_clusters_than_different_rows_end() -> None:
    x = torch.tensor([[0.0], [1.0], [1.0], [5.0]]).repeat(5, 1)
    task = fitted(TensorData({"inputs": x}), torch.linspace(0, 5, 6)[:, None].double())
    assert task.inertia.item() == 0
    assert sorted(set(task.centres.flatten().tolist())) == [0.0, 1.0, 5.0]


@pytest.mark.parametrize("init", ["k-means++", "random"])
def test_a_large_set_is_started_from_a_sample(init: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = blobs(5000, 2, 6)
    monkeypatch.setattr(module, "SAMPLE_ROWS", 200)
    monkeypatch.setattr(module, "ROWS_PER_CLUSTER", 50)
    asked = []

    class Counted(Apart):
        def take(self, rows: Tensor) -> Batch:
            asked.append(len(rows))
            return super().take(rows)

    task = KMeansTask(2, 6, init=init, starts=3)
    task.start(Counted(inputs=x), torch.Generator().manual_seed(0))
    assert 250 < asked[0] <= 300
    rows = set(map(tuple, x.tolist()))
    for start in task.centres.tolist():
        assert len(set(map(tuple, start))) == 6
        assert set(map(tuple, start)) <= rows
    assert torch.unique(task.centres, dim=0).shape[0] == 3


def test_the_survey_is_that_of_all_rows() -> None:
    x, weights = blobs(100) + 1e4, torch.rand(100, dtype=torch.float64)
    task = KMeansTask(3, 2)
    task.begin(Apart(inputs=x, weight=weights), x[:2])
    assert task.variance.item() == pytest.approx(x.var(0, correction=0).mean().item(), rel=1e-9)
    assert task.mass.item() == pytest.approx(weights.sum().item())
    squared = (x - task.shift).square().sum(1)
    assert task.squares.item() == pytest.approx((weights * squared).sum().item())
    assert task.radius.item() == pytest.approx(squared.max().sqrt().item())


def test_saved_and_loaded() -> None:
    x = blobs()
    task = fitted(TensorData({"inputs": x}), torch.stack([x[:4], x[4:8]]))
    again = build_task(task.spec())
    again.load_state_dict(task.state_dict())
    answer = again.predict(x.float()[:9])
    assert answer["cluster"].tolist() == task.predict(x[:9])["cluster"].tolist()
    assert answer["distance"].dtype == torch.float32
    centres = task.centres[task.best]
    wanted = torch.cdist(x[:9], centres).min(1).values
    torch.testing.assert_close(task.predict(x[:9])["distance"], wanted)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_run_that_goes_on_from_saved_state_ends_with_the_same_bits(cut: int) -> None:
    """After one sweep an empty cluster waits for its row."""
    x = blobs(200)
    start = torch.cat([x[:7], torch.full((1, 3), 1e3, dtype=torch.float64)])
    data = Apart(inputs=x)
    whole = fitted(data, start)
    task = KMeansTask(3, 8)
    task.begin(data, start)
    fit_statistics(task, data, sweeps=cut, started=True)
    assert task.wanted.tolist() == [1 if cut == 1 else 0]
    again = KMeansTask(3, 8)
    again._control()  # what it knows of itself is forgotten when it is loaded
    again.load_state_dict(task.state_dict())
    fit_statistics(again, data, sweeps=1000, started=True)
    assert torch.equal(again.centres, whole.centres)
    assert torch.equal(again.iterations, whole.iterations)


def test_judging() -> None:
    x, weights = blobs(), torch.rand(300, dtype=torch.float64)
    task = fitted(TensorData({"inputs": x}), torch.stack([x[:4], x[4:8]]))
    squared = torch.cdist(x, task.centres[task.best]).square().min(1).values
    assert evaluate(task, TensorData({"inputs": x}))["loss"] == pytest.approx(squared.mean().item())
    assert squared.sum().item() == pytest.approx(task.inertia.min().item())
    weighted = evaluate(task, TensorData({"inputs": x, WEIGHT: weights}))["loss"]
    assert weighted == pytest.approx((weights @ squared / weights.sum()).item())
    batch = TensorData({"inputs": x}).take(torch.arange(5))
    torch.testing.assert_close(task.loss_each(batch)["inertia"], squared[:5])


@pytest.mark.parametrize("kept", [False, True])
def test_a_sweep_goes_through_the_rows_once(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    sweep = Tally.sweep

    def counted(self: Tally, centres: Tensor) -> tuple[Tensor, Tensor]:
        found = sweep(self, centres)
        seen.append(self.searched)
        return found

    x = blobs()
    task = KMeansTask(3, 4)
    task.begin(TensorData({"inputs": x}) if kept else Apart(inputs=x), x[:4])
    monkeypatch.setattr(Tally, "sweep", counted)
    with limited("plain"):
        task.statistics(Batch({"inputs": x}, torch.arange(300)))
    assert bool(task._tallies._kept) == kept
    assert seen == [300]


def test_mistakes() -> None:
    with pytest.raises(
        InputError, match=r"3 rows for 4 clusters\n  expected: at least 4 rows\n  fix: ask for fewer"
    ):
        KMeansTask(2, 4).start(TensorData({"inputs": torch.ones(3, 2)}), torch.Generator())
    with pytest.raises(InputError, match="did you mean 'k-means\\+\\+'"):
        KMeansTask(2, 4, init="kmeans++")
    with pytest.raises(InputError, match="clusters is 0\n  expected: a number >= 1"):
        KMeansTask(2, 0)
    with pytest.raises(InputError, match="rows of 3 features\n  expected: 2 features"):
        KMeansTask(2, 2).predict(torch.ones(4, 3))
    with pytest.raises(InputError, match=r"rows of 3 features\n  expected: 2 features.*\n.*features=3"):
        fit_statistics(KMeansTask(2, 2), TensorData({"inputs": torch.ones(4, 3)}), sweeps=2)
    with pytest.raises(InputError, match="unknown mode 'mean'"):
        KMeansTask(2, 2).predict(torch.ones(4, 2), mode="mean")


def test_a_run_that_goes_on_is_the_same_to_the_last_bit() -> None:
    """Sums that rows have come to and gone from, and sums that are made anew."""
    x = torch.randn(20_000, 5, generator=torch.Generator().manual_seed(0))
    data = TensorData({"inputs": x})
    whole = KMeansTask(5, 9, tol=0.0)
    whole.begin(data, x[:9].double())
    fit_statistics(whole, data, sweeps=12, started=True)
    parts = KMeansTask(5, 9, tol=0.0)
    parts.begin(data, x[:9].double())
    (batch,) = in_order(data)
    with torch.no_grad():
        for _ in range(12):
            parts.update(parts.statistics(batch))
            again = KMeansTask(5, 9, tol=0.0)
            again.load_state_dict(parts.state_dict())
            parts = again
    assert torch.equal(parts.centres, whole.centres)
