"""The mixture task: what a run must keep, against scikit-learn and against the same run in other forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sklearn.mixture import GaussianMixture as Peer
from torch import Tensor

from quire.data.batch import Batch, TensorData
from quire.errors import DataError, InputError
from quire.functional.mixtures import COVARIANCE_TYPES, make_mixture
from quire.tasks.mixture import MixtureTask
from quire.tasks.mixture_start import choose_centres
from quire.train.evaluate import evaluate
from quire.train.statistics import fit_statistics
from quire.train.task import build_task

kinds = pytest.mark.parametrize("kind", COVARIANCE_TYPES)


def make_rows(rows: int = 400, clusters: int = 4) -> Tensor:
    """Overlapping clusters of different shapes, so that EM has something to do."""
    parts = [
        torch.randn(rows // clusters, 3) @ torch.randn(3, 3) + 2 * torch.randn(3) for _ in range(clusters)
    ]
    return torch.cat(parts).double()[torch.randperm(rows)] + 10


def run(task: MixtureTask, x: Tensor, sweeps: int = 60, **options: Any) -> MixtureTask:
    fit_statistics(task, TensorData({"inputs": x}), sweeps=sweeps, **options)
    return task


@kinds
@pytest.mark.parametrize("init", ["kmeans", "k-means++", "random", "random_from_data"])
def test_the_log_likelihood_never_falls(kind: str, init: str) -> None:
    torch.manual_seed(1)  # without a floor some data let a component collapse, and rightly so
    x, seed = make_rows(), 0
    task = run(
        MixtureTask(3, 4, covariance_type=kind, init=init, tol=0, reg_covar=0, starts=2), x, 40, seed=seed
    )
    trace = torch.tensor(task.trace, dtype=torch.float64)
    assert trace.shape == (40, 2)
    assert trace.diff(dim=0).min() > -1e-10
    assert (trace[-1] > trace[0]).all()
    assert task.mixture().weights.sum().item() == pytest.approx(1)


def test_the_loss_of_a_sweep_is_that_of_the_rows_before_it() -> None:
    x = make_rows()
    task = MixtureTask(3, 2, tol=0)
    data = TensorData({"inputs": x})
    task.start(data, torch.Generator().manual_seed(0))
    before = evaluate(task, data)["loss"]
    fit = fit_statistics(task, data, sweeps=1, started=True)
    assert fit.history[-1]["values"]["loss"] == pytest.approx(before, rel=1e-12)
    assert evaluate(task, data)["loss"] < before


@kinds
def test_starts_at_once_are_starts_one_by_one(kind: str) -> None:
    x = make_rows()
    data = TensorData({"inputs": x})
    together = MixtureTask(3, 3, covariance_type=kind, starts=4, tol=1e-4, init="random_from_data")
    together.start(data, torch.Generator().manual_seed(3))
    begun = together.state_dict()
    begun = {name: value.clone() for name, value in begun.items()}
    fit_statistics(together, data, sweeps=200, started=True)
    assert not together.active.any()
    assert len(set(together.sweeps.tolist())) > 1 or kind == "tied"  # each stops by itself
    for r in range(4):
        alone = MixtureTask(3, 3, covariance_type=kind, tol=1e-4)
        own = {n: v[r : r + 1] if v.ndim and len(v) == 4 else v for n, v in begun.items()}
        alone.load_state_dict(own)
        fit_statistics(alone, data, sweeps=200, started=True)
        assert int(alone.sweeps[0]) == int(together.sweeps[r])
        torch.testing.assert_close(alone.bounds[0], together.bounds[r], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(alone.means[0], together.means[r], rtol=1e-6, atol=1e-6)
    assert int(together.best) == int(together.bounds.argmax())
    torch.testing.assert_close(
        together.mixture().means, together.frame.take(together._state()).means[together.best]
    )


class Streamed:
    """Rows that arrive in batches of 37 and never all at once."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    @property
    def row_size(self) -> int:
        return self.x.shape[1]

    def take(self, rows: Tensor) -> Batch:
        return Batch({"inputs": self.x[rows]}, rows)

    def subset(self, rows: Tensor) -> Streamed:
        return Streamed(self.x[rows])

    def to(self, device: torch.device | str) -> Streamed:
        return Streamed(self.x.to(device))

    def batches(self, rows: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        for part in rows.split(37)[start:]:
            yield self.take(part)


@kinds
def test_rows_in_batches_are_rows_at_once(kind: str) -> None:
    x = make_rows()
    whole = run(MixtureTask(3, 3, covariance_type=kind, tol=0), x, 10)
    parts = MixtureTask(3, 3, covariance_type=kind, tol=0)
    fit_statistics(parts, Streamed(x), sweeps=10)
    for a, b in zip(parts.mixture(), whole.mixture(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@kinds
def test_saved_and_opened_again(kind: str) -> None:
    x = make_rows()
    task = run(MixtureTask(3, 3, covariance_type=kind, starts=2), x, 5)
    again = build_task(json.loads(json.dumps(task.spec())))
    assert isinstance(again, MixtureTask)
    again.load_state_dict(task.state_dict())
    for name, value in task.predict(x).items():
        assert torch.equal(again.predict(x)[name], value), name
    run(task, x, 3, started=True)
    run(again, x, 3, started=True)
    assert torch.equal(task.means, again.means)


def test_predictions_are_those_of_scikit_learn() -> None:
    x = make_rows()
    task = run(MixtureTask(3, 3), x)
    mixture = task.mixture()
    peer = Peer(3)
    peer.weights_, peer.means_ = mixture.weights.numpy(), mixture.means.numpy()
    peer.covariances_, peer.precisions_cholesky_ = mixture.covariances.numpy(), mixture.factors.numpy()
    got = task.predict(x)
    assert (got["component"].numpy() == peer.predict(x.numpy())).all()
    torch.testing.assert_close(
        got["responsibility"], torch.tensor(peer.predict_proba(x.numpy())), rtol=1e-8, atol=1e-10
    )
    torch.testing.assert_close(
        got["log_density"], torch.tensor(peer.score_samples(x.numpy())), rtol=1e-9, atol=1e-9
    )
    judged = evaluate(task, TensorData({"inputs": x}))
    assert judged["loss"] == pytest.approx(-peer.score(x.numpy()))
    assert judged["bic"] == pytest.approx(peer.bic(x.numpy()))
    assert judged["aic"] == pytest.approx(peer.aic(x.numpy()))
    each = task.loss_each(Batch({"inputs": x}, torch.arange(len(x))))["negative_log_likelihood"]
    torch.testing.assert_close(each, -got["log_density"])
    assert task.predict(x.float())["log_density"].dtype == torch.float32


def test_tiny_clusters_far_apart_are_found_in_float32() -> None:
    """Their size is 1/20000 of their distance: products of float32 would leave nothing of it."""
    centres = torch.tensor([[0.0, 0.0], [200.0, 0.0], [0.0, 200.0]])
    label = torch.arange(600) % 3
    noise = torch.randn(600, 2)
    x = centres[label] + 0.01 * noise
    task = run(MixtureTask(2, 3, reg_covar=0, tol=1e-9), x)
    assert float(task.cancels) > 1e6
    mixture = task.mixture()
    for k in range(3):
        own = x[label == k].double()
        found = int((mixture.means - own.mean(0)).abs().sum(1).argmin())
        torch.testing.assert_close(mixture.means[found], own.mean(0), rtol=1e-7, atol=1e-7)
        expected = torch.cov(own.T, correction=0)
        torch.testing.assert_close(mixture.covariances[found], expected, rtol=1e-5, atol=1e-9)
    assert (task.predict(x)["responsibility"].amax(1) > 0.999).all()


def test_the_floor_keeps_a_component_from_collapsing() -> None:
    x = torch.cat([torch.randn(100, 2).double(), torch.full((20, 2), 50.0).double()])
    task = run(MixtureTask(2, 2, reg_covar=0.25, tol=1e-8), x)
    values = torch.linalg.eigvalsh(task.mixture().covariances)
    assert values.min().item() == pytest.approx(0.25, rel=1e-6)
    with pytest.raises(
        InputError, match=r"not positive definite\n  expected: .*\n  fix: .*raise reg_covar \(0\)"
    ):
        run(MixtureTask(2, 2, reg_covar=0), x)


@kinds
def test_components_that_are_flat_are_told_of(kind: str) -> None:
    """Where a category is a cluster's own, not where a column is constant or columns depend on each other."""
    generator = torch.Generator().manual_seed(0)
    which = torch.arange(300) % 3
    places = torch.randn(300, 2, generator=generator) + 8 * which[:, None] * torch.tensor([1.0, -1.0])
    category, constant = torch.nn.functional.one_hot(which).float(), torch.ones(300, 1)
    dependent = places.sum(1, keepdim=True)

    def told(*columns: Tensor) -> list[str]:
        rows = torch.cat(columns, 1)
        task = MixtureTask(rows.shape[1], 3, covariance_type=kind, reg_covar=1e-3)
        fit_statistics(task, TensorData({"inputs": rows}), sweeps=50)
        return task.warnings([])

    assert told(places) == told(places, constant) == told(places, dependent) == []
    found = told(places, category)
    if kind == "spherical":  # whose one variance is that of the places as well
        assert found == []
    else:
        # Of a category's three columns one depends on the others for all rows alike.
        directions = 3 if kind == "diag" else 2
        assert found[0].startswith(f"3 of 3 components are flat: in up to {directions} of 5 directions")
        assert found[0].endswith("; drop columns, or take a simpler shape or fewer components")


@kinds
def test_constant_columns_and_equal_rows(kind: str) -> None:
    x = make_rows()
    x[:, 1] = 4.0
    mixture = run(MixtureTask(3, 3, covariance_type=kind), x, 10).mixture()
    torch.testing.assert_close(mixture.means[:, 1], torch.full((3,), 4.0).double())
    assert mixture.covariances.isfinite().all()
    same = run(MixtureTask(2, 2, covariance_type=kind), torch.full((9, 2), 3.0).double(), 5).mixture()
    torch.testing.assert_close(same.means, torch.full((2, 2), 3.0).double())
    assert same.covariances.max().item() == pytest.approx(1e-6)


def test_draws_look_like_the_rows() -> None:
    x = make_rows(2000)
    task = run(MixtureTask(3, 4), x)
    rows, component = task.draw(20_000, torch.Generator().manual_seed(0))
    assert ((rows.mean(0) - x.mean(0)) / x.std(0)).abs().max() < 0.05
    assert (
        torch.cov(rows.T) / torch.cov(x.T).abs().max() - torch.cov(x.T) / torch.cov(x.T).abs().max()
    ).abs().max() < 0.1
    assert component.max() < 4
    again, _ = task.draw(20_000, torch.Generator().manual_seed(0))
    assert torch.equal(rows, again)
    assert torch.equal(task.sample(20_000, seed=0), rows)
    means = task.mixture().means
    cold = task.sample(500, temperature=0.0, seed=3)
    assert torch.cdist(cold, means).amin(1).max() < 1e-6
    half = task.sample(20_000, temperature=0.5, seed=0)
    torch.testing.assert_close(half - means[component], 0.5 * (rows - means[component]))
    with pytest.raises(InputError, match="made without classes"):
        task.sample(3, label=1)


@pytest.mark.parametrize("init", ["kmeans", "k-means++", "random_from_data"])
def test_centres_are_rows_or_means_of_rows(init: str) -> None:
    x = make_rows(60)
    centres = choose_centres(x, 4, 3, init, torch.Generator().manual_seed(1))
    assert centres.shape == (3, 4, 3)
    # Differences, which are exactly 0 for a row itself, where products are only about that.
    apart = torch.cdist(centres.flatten(0, 1), x, compute_mode="donot_use_mm_for_euclid_dist")
    distance = apart.amin(1)
    if init == "kmeans":
        nearest = torch.cdist(x, centres[0]).argmin(1)
        means = torch.stack([x[nearest == k].mean(0) for k in range(4)])
        torch.testing.assert_close(centres[0], means, rtol=0.05, atol=0.2)
        assert distance.max() > 1e-3
    else:
        assert distance.max() == 0
        assert all(len(torch.unique(own, dim=0)) == 4 for own in centres)


def test_bytes_and_images_are_rows() -> None:
    x = torch.randint(256, (50, 1, 2, 2), dtype=torch.uint8)
    task = run(MixtureTask(4, 2), x, 5)
    assert task.predict(x)["responsibility"].shape == (50, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "kmean"}, r"unknown start 'kmean'\n.*\n  fix: did you mean 'kmeans'"),
        ({"covariance_type": "diagonal"}, r"unknown covariance type 'diagonal'"),
        ({"tol": -1.0}, r"tol is -1.0\n  expected: a number >= 0"),
        ({"starts": 0}, r"starts is 0\n  expected: a number >= 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MixtureTask(3, 2, **options)


def test_wrong_rows() -> None:
    with pytest.raises(InputError, match=r"3 rows for 5 components\n  expected: at least 5 rows\n  fix"):
        run(MixtureTask(3, 5), make_rows(400)[:3])
    x = make_rows()
    x[7, 1] = torch.nan
    with pytest.raises(DataError, match="row 7 has a value that is not a finite number"):
        run(MixtureTask(3, 2), x)
    with pytest.raises(InputError, match=r"rows of 3 features\n  expected: 4 features.*\n.*features=3"):
        run(MixtureTask(4, 2), make_rows())
    task = run(MixtureTask(3, 2), make_rows(), 2)
    with pytest.raises(InputError, match=r"rows of 2 features\n  expected: 3 features"):
        task.predict(torch.ones(4, 2))
    with pytest.raises(InputError, match="unknown mode 'mean'"):
        task.predict(make_rows(), mode="mean")


def test_a_start_of_one_s_own() -> None:
    task = MixtureTask(1, 2, tol=0)
    x = torch.tensor([[0.0], [1.0], [10.0], [11.0]], dtype=torch.float64)
    task.fit_frame(TensorData({"inputs": x}))
    means = torch.tensor([[[0.0], [10.0]]], dtype=torch.float64)
    own = make_mixture(torch.full((1, 2), 0.5).double(), means, torch.ones(1, 2, 1, 1).double())
    task.begin(task.frame.put(own))
    run(task, x, 3, started=True)
    mixture = task.mixture()
    torch.testing.assert_close(mixture.means, torch.tensor([[0.5], [10.5]]).double(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mixture.covariances.flatten(), torch.full((2,), 0.250001).double())


@pytest.mark.gpu
@kinds
def test_a_gpu_learns_what_the_cpu_learns(kind: str) -> None:
    x = make_rows(4000)
    here = run(MixtureTask(3, 4, covariance_type=kind, starts=2, tol=0), x, 10)
    data = TensorData({"inputs": x.float().cuda()})
    there = MixtureTask(3, 4, covariance_type=kind, starts=2, tol=0)
    begun = MixtureTask(3, 4, covariance_type=kind, starts=2, tol=0)
    begun.start(TensorData({"inputs": x}), torch.Generator().manual_seed(0))
    there.load_state_dict(begun.state_dict())
    fit_statistics(there, data, sweeps=10, device="cuda", started=True)
    torch.testing.assert_close(there.bounds.cpu(), here.bounds, rtol=1e-5, atol=1e-5)
    # Two starts may end at one mixture, its components in another order, and rounding says which is best.
    means = [task.mixture().means.cpu() for task in (there, here)]
    found, wanted = (each[each[:, 0].argsort()] for each in means)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
