"""Least squares from sums, against NumPy's and scikit-learn's solution of all rows at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import Tensor

from quire.data.batch import TensorData
from quire.errors import DataError, InputError
from quire.tasks.least_squares import LinearLeastSquares
from quire.train import build_task, evaluate, fit_statistics
from quire.train.sums import add_up

DOUBLE = torch.float64


def problem(
    n: int, d: int, outputs: int, *, smallest: float = -1.0, offset: float = 0.0, seed: int = 0
) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    left, turn = (torch.randn(size, d, generator=generator, dtype=DOUBLE) for size in (n, d))
    spread = 30 * torch.logspace(0, smallest, d, dtype=DOUBLE)
    x = torch.linalg.qr(left)[0] * spread @ torch.linalg.qr(turn)[0] + offset
    weights = torch.randn(d, outputs, generator=generator, dtype=DOUBLE)
    noise = torch.randn(n, outputs, generator=generator, dtype=DOUBLE)
    return TensorData({"inputs": x, "target": x @ weights + 5 + 0.01 * noise})


def fitted(data: TensorData, **options: Any) -> LinearLeastSquares:
    task = LinearLeastSquares(data.inputs.shape[1], data.target[0].numel(), **options)
    fit_statistics(task, data, sweeps=9)
    return task


def residuals(task: LinearLeastSquares, data: TensorData) -> Tensor:
    return data.target - data.inputs @ task.coefficients - task.intercept


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("smallest", [-1.0, -4.0])
def test_coefficients_are_scikit_learns(outputs: int, intercept: bool, smallest: float) -> None:
    data = problem(300, 6, outputs, smallest=smallest, offset=2)
    task = fitted(data, intercept=intercept)
    peer = LinearRegression(fit_intercept=intercept, tol=1e-14).fit(data.inputs.numpy(), data.target.numpy())
    np.testing.assert_allclose(task.coefficients.mT, peer.coef_, rtol=1e-6, atol=1e-8)
    wanted = np.broadcast_to(peer.intercept_, outputs)
    np.testing.assert_allclose(task.intercept, wanted, rtol=1e-6, atol=1e-8)
    assert int(task.rank) == 6


def test_features_that_nearly_depend_on_each_other() -> None:
    """The normal equations of one pass would keep no digit: their condition is 10¹⁶."""
    data = problem(500, 5, 1, smallest=-8.0, offset=1)
    task = fitted(data)
    x, y = (part.numpy() for part in (data.inputs, data.target))
    wanted = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)[0]
    np.testing.assert_allclose(task.coefficients, wanted, rtol=1e-5)
    spread = torch.cov(data.inputs.T)
    cross = (data.inputs - data.inputs.mean(0)).T @ (data.target - data.target.mean(0)) / 499
    naive = torch.linalg.solve(spread, cross)
    assert (naive - torch.from_numpy(wanted)).abs().max() > 1e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("intercept", [True, False])
def test_dependent_features_get_the_smallest_coefficients(intercept: bool) -> None:
    data = problem(200, 4, 2, offset=3)
    x = torch.cat([data.inputs, data.inputs[:, :1] - data.inputs[:, 1:2]], 1)
    task = fitted(TensorData({"inputs": x, "target": data.target}), intercept=intercept)
    peer = LinearRegression(fit_intercept=intercept, tol=1e-14).fit(x.numpy(), data.target.numpy())
    assert int(task.rank) == peer.rank_ == 4
    np.testing.assert_allclose(task.coefficients.mT, peer.coef_, rtol=1e-6, atol=1e-8)


def test_fewer_rows_than_features() -> None:
    data = problem(20, 5, 1)
    few = data.subset(torch.arange(4))
    task = fitted(few)
    assert residuals(task, few).abs().max() < 1e-9
    peer = LinearRegression(tol=1e-14).fit(few.inputs.numpy(), few.target.numpy())
    np.testing.assert_allclose(task.coefficients.mT, peer.coef_, rtol=1e-6, atol=1e-9)


def test_batches_and_a_stop_between_two_sweeps() -> None:
    data = problem(400, 6, 2, smallest=-8.0)
    straight = fitted(data)
    task: Any = LinearLeastSquares(6, 2)
    task.start(data, torch.Generator())
    done = False
    while not done:
        halves = [data.take(rows) for rows in torch.arange(400).split(150)]
        done = task.update(add_up(task.statistics(half) for half in halves)).done
        fresh = build_task(task.spec())
        fresh.load_state_dict(task.state_dict())
        task = fresh
    torch.testing.assert_close(task.coefficients, straight.coefficients, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(task.predict(data.inputs)["value"], straight.predict(data.inputs)["value"])


def test_measures_predictions_and_noise() -> None:
    data = problem(2000, 4, 1)
    data = TensorData({"inputs": data.inputs, "target": data.target[:, 0]})
    task = fitted(data)
    found = evaluate(task, data, 128)
    left = data.target - data.inputs @ task.coefficients[:, 0] - task.intercept
    assert found["rmse"] == pytest.approx(float(left.square().mean().sqrt()), rel=1e-6)
    assert found["r2"] == pytest.approx(float(1 - left.var() / data.target.var()), rel=1e-9)
    predicted = task.predict(data.inputs, "interval", level=0.9)
    torch.testing.assert_close(predicted["value"], data.target - left)
    inside = (predicted["low"] < data.target) & (data.target < predicted["high"])
    assert float(inside.double().mean()) == pytest.approx(0.9, abs=0.03)
    noise = task.head.noise_variance * task.head.scale**2
    assert float(noise) == pytest.approx(float(left.square().sum() / (2000 - 5)), rel=1e-6)


def test_the_loss_of_a_sweep_is_the_loss_of_the_rows() -> None:
    data = problem(300, 4, 2)
    fit = fit_statistics(LinearLeastSquares(4, 2), data, data, sweeps=5)
    train, validation = (record["values"]["loss"] for record in fit.history)
    assert train == pytest.approx(validation, rel=1e-6)


def test_float32_rows_are_added_in_float64() -> None:
    data = problem(5000, 4, 1, offset=1000)
    single = TensorData({name: value.float() for name, value in data.fields.items()})
    task = fitted(single)
    peer = LinearRegression(tol=1e-14).fit(single.inputs.double().numpy(), single.target.double().numpy())
    np.testing.assert_allclose(task.coefficients.mT, peer.coef_, rtol=1e-7, atol=1e-9)


def test_mistakes() -> None:
    data = problem(30, 3, 1)
    with pytest.raises(InputError, match=r"rows of 3 features and 1 outputs\n  expected: 4 features"):
        fit_statistics(LinearLeastSquares(4, 2), data, sweeps=1)
    with pytest.raises(InputError, match="outputs is 0"):
        LinearLeastSquares(4, 0)
    broken = data.inputs.clone()
    broken[7, 2] = torch.inf
    with pytest.raises(DataError, match="row 7 has a value"):
        fitted(TensorData({"inputs": broken, "target": data.target}))
