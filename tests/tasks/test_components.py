"""The PCA task: sums in batches, several sweeps, saved between them, judged and used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from quire.data.batch import Batch, TensorData, in_order
from quire.errors import DataError, InputError
from quire.tasks.components import PrincipalComponents, choose_solver
from quire.train import build_task, evaluate, fit_statistics
from quire.train.sums import add_up

DOUBLE = torch.float64


class Apart:
    """Rows that come in batches of 17, like those of a file that is not held in memory."""

    def __init__(self, inputs: Tensor) -> None:
        self.whole = TensorData({"inputs": inputs})

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def row_size(self) -> int:
        return self.whole.row_size

    def take(self, rows: Tensor) -> Batch:
        return self.whole.take(rows)

    def subset(self, rows: Tensor) -> Apart:
        return Apart(self.whole.take(rows).inputs)

    def to(self, device: torch.device | str) -> Apart:
        return self

    def batches(self, rows: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        yield from self.whole.batches(rows, 17, start)


def rows(n: int, d: int, seed: int = 0, smallest: float = -1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=DOUBLE))[0]
    spread = torch.logspace(1, smallest, d, dtype=DOUBLE)
    return torch.randn(n, d, generator=generator, dtype=DOUBLE) * spread @ turn + 3


def fitted(inputs: Tensor, *arguments: Any, **options: Any) -> PrincipalComponents:
    task = PrincipalComponents(inputs[0].numel(), *arguments, **options)
    fit_statistics(task, TensorData({"inputs": inputs}), sweeps=50)
    return task


def same(task: PrincipalComponents, peer: PCA, tolerance: float = 1e-7) -> None:
    k = min(len(peer.components_), peer.n_samples_ - 1)
    np.testing.assert_allclose(task.components[:k], peer.components_[:k], atol=tolerance)
    np.testing.assert_allclose(task.variances, peer.explained_variance_, rtol=tolerance, atol=1e-12)
    ratios = task.explained_ratio, peer.explained_variance_ratio_
    np.testing.assert_allclose(*ratios, rtol=tolerance, atol=1e-12)
    np.testing.assert_allclose(task.mean, peer.mean_, rtol=1e-10)
    np.testing.assert_allclose(task.noise_variance, peer.noise_variance_, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("shape", [(400, 8), (12, 30), (30, 30), (31, 30)])
@pytest.mark.parametrize("components", [1, 5, None, 0.8])
def test_exact_components_are_scikit_learns(shape: tuple[int, int], components: int | float | None) -> None:
    x = rows(*shape)
    same(fitted(x, components, solver="exact"), PCA(components, svd_solver="full").fit(x.numpy()))


@pytest.mark.parametrize("shape", [(700, 60), (60, 700)])
def test_randomised_components(shape: tuple[int, int]) -> None:
    x = rows(*shape, smallest=-3.0)
    task = fitted(x, 3, solver="randomised", power_iterations=40)
    same(task, PCA(3, svd_solver="full").fit(x.numpy()), 1e-6)


def test_randomised_finds_small_components_too() -> None:
    x = rows(300, 30, smallest=-9.0)
    task = fitted(x, 25, solver="randomised", oversamples=5)
    same(task, PCA(25, svd_solver="full").fit(x.numpy()), 1e-5)


@pytest.mark.parametrize("solver", ["exact", "randomised"])
@pytest.mark.parametrize("shape", [(300, 9), (20, 40)])
def test_rows_in_batches_give_the_same(solver: Any, shape: tuple[int, int]) -> None:
    x = rows(*shape)
    whole = fitted(x, 4, solver=solver)
    parts = PrincipalComponents(shape[1], 4, solver=solver)
    fit_statistics(parts, Apart(x), sweeps=50)
    torch.testing.assert_close(parts.components, whole.components, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts.variances, whole.variances, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "shape", "smallest"),
    [({}, (300, 9), -9.0), ({"components": 0.9}, (300, 9), -1.0), ({}, (20, 40), -1.0)]
    + [({"components": 3, "solver": "randomised"}, shape, -1.0) for shape in ((300, 9), (20, 40))],
)
def test_saved_between_any_two_sweeps(options: Any, shape: tuple[int, int], smallest: float) -> None:
    x = rows(*shape, smallest=smallest)
    data = TensorData({"inputs": x})
    straight = PrincipalComponents(shape[1], **options)
    straight.start(data, torch.Generator().manual_seed(4))
    broken = build_task(straight.spec())
    assert isinstance(broken, PrincipalComponents)
    broken.load_state_dict(straight.state_dict())
    done = again = False
    while not done:
        done = straight.update(straight.statistics(next(iter(in_order(data))))).done
        again = broken.update(add_up(broken.statistics(batch) for batch in in_order(data))).done
        fresh = build_task(straight.spec())
        fresh.load_state_dict(broken.state_dict())
        assert isinstance(fresh, PrincipalComponents)
        broken = fresh
    assert again
    assert torch.equal(broken.components, straight.components)
    straight.finish(data, None)
    assert not len(straight.basis)


def test_a_trained_task_is_rebuilt() -> None:
    x = rows(200, 6)
    task = fitted(x, 0.9)
    again = build_task(task.spec())
    again.load_state_dict(task.state_dict())
    assert 1 < len(task.components) < 6
    assert torch.equal(again.predict(x)["scores"], task.predict(x)["scores"])


def test_predictions_and_measures() -> None:
    x = rows(200, 6)
    task, peer = fitted(x, 2), PCA(2).fit(x.numpy())
    predicted = task.predict(x)
    np.testing.assert_allclose(predicted["scores"], peer.transform(x.numpy()), atol=1e-9)
    nearest = peer.inverse_transform(peer.transform(x.numpy()))
    np.testing.assert_allclose(predicted["reconstruction"], nearest, atol=1e-9)
    squared = np.square(nearest - x.numpy()).sum(1)
    found = evaluate(task, TensorData({"inputs": x}), 64)
    assert found["loss"] == pytest.approx(squared.mean())
    assert found["reconstruction_error"] == pytest.approx(squared.mean() / 6)
    assert found["explained_share"] == pytest.approx(peer.explained_variance_ratio_.sum())
    batch = TensorData({"inputs": x}).take(torch.arange(5))
    np.testing.assert_allclose(task.loss_each(batch)["reconstruction"], squared[:5])
    with pytest.raises(InputError, match="unknown prediction mode 'interval'"):
        task.predict(x, "interval")


def test_the_loss_of_a_sweep_is_the_mean_squared_distance() -> None:
    x = rows(150, 5)
    task = PrincipalComponents(5, 2)
    fit = fit_statistics(task, TensorData({"inputs": x}), TensorData({"inputs": x}), sweeps=9)
    losses = [record["values"]["loss"] for record in fit.history]
    assert fit.steps == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_images_of_bytes() -> None:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (80, 1, 4, 5), dtype=torch.uint8, generator=generator)
    task = fitted(pixels, 3)
    peer = PCA(3).fit(pixels.flatten(1).numpy().astype(np.float64))
    np.testing.assert_allclose(task.components, peer.components_, atol=1e-4)
    predicted = task.predict(pixels)
    assert predicted["reconstruction"].shape == pixels.shape
    assert predicted["scores"].shape == (80, 3)
    assert predicted["scores"].dtype == torch.float32


def test_float32_rows_fall_back_to_float64_where_they_must() -> None:
    x = rows(2000, 12, smallest=-4.0).float()
    task = PrincipalComponents(12)
    fit = fit_statistics(task, TensorData({"inputs": x}), sweeps=9)
    assert fit.steps >= 2
    same(task, PCA(svd_solver="full").fit(x.double().numpy()), 1e-6)
    large = (rows(300, 4) * 1e25).float()
    same(fitted(large), PCA(svd_solver="full").fit(large.double().numpy()), 1e-6)


def test_rows_that_do_not_vary() -> None:
    task = fitted(torch.full((9, 3), 7.0), 2)
    assert task.variances.tolist() == [0.0, 0.0]
    assert task.explained_ratio.tolist() == [0.0, 0.0]
    assert task.components @ task.components.mT == pytest.approx(np.eye(2))
    assert task.predict(torch.full((1, 3), 7.0))["reconstruction"].tolist() == [[7.0, 7.0, 7.0]]


def test_which_solver() -> None:
    assert choose_solver(200_000, 32, 16) == "exact"
    assert choose_solver(5_000, 3_000, 16) == "randomised"
    assert choose_solver(5_000, 3_000, None) == "exact"
    assert choose_solver(5_000, 3_000, 0.9) == "exact"
    assert choose_solver(400, 450, 3) == "exact"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 0), "components is 0\n  expected: a number >= 1, a share between 0 and 1, or None"),
        ((3, 1.5), "components is 1.5"),
        ((3, True), "components is True"),
    ],
)
def test_options_that_make_no_sense(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrincipalComponents(*arguments)


def test_other_mistakes() -> None:
    with pytest.raises(InputError, match="unknown solver 'arpack'"):
        PrincipalComponents(3, 1, solver="arpack")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a number for the randomised solver"):
        PrincipalComponents(3, solver="randomised")
    with pytest.raises(InputError, match=r"4 components of rows of shape \(3, 9\)"):
        fitted(rows(3, 9), 4)
    with pytest.raises(InputError, match=r"rows of 4 features\n  expected: 3.*\n.*make it with features=4"):
        fit_statistics(PrincipalComponents(3), TensorData({"inputs": rows(5, 4)}), sweeps=1)
    broken = rows(50, 3)
    broken[31, 1] = torch.nan
    for dtype in (torch.float64, torch.float32):
        with pytest.raises(DataError, match="row 31 has a value that is not a finite number"):
            fitted(broken.to(dtype), 2)
