"""The task whose training rows do not answer for themselves."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from quire.data.batch import TensorData
from quire.errors import InputError
from quire.models.nadaraya_watson import NadarayaWatson, NadarayaWatsonConfig
from quire.nn.heads import Bernoulli, Categorical, Gaussian, Head
from quire.options import Optim, Train
from quire.tasks.kernel import OWN, LeaveOneOut
from quire.train import evaluate, fit
from quire.train.task import build_task


def classes(x: list[float], labels: list[int], width: float, count: int) -> tuple[LeaveOneOut, TensorData]:
    model = NadarayaWatson(NadarayaWatsonConfig(1, count, len(x), width=width))
    task = LeaveOneOut(model, Categorical(count))
    data = TensorData({"inputs": torch.tensor(x)[:, None], "target": torch.tensor(labels)})
    return task, task.remember(data)


def values(rows: int = 60, width: float = 0.3, seed: int = 0) -> tuple[LeaveOneOut, TensorData]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 1, generator=generator) * 4
    y = 100 + 20 * x[:, 0].sin() + 3 * torch.randn(rows, generator=generator)
    head = Gaussian(1)
    head.fit_target(y)
    task = LeaveOneOut(NadarayaWatson(NadarayaWatsonConfig(1, 1, rows, width=width)), head)
    return task, task.remember(TensorData({"inputs": x, "target": y}))


def left_out(x: np.ndarray, y: np.ndarray, width: float) -> np.ndarray:
    """Gaussian averages over all rows but one, all pairs at once."""
    weights = np.exp(-0.5 * ((x[:, None] - x[None]) / width) ** 2)
    np.fill_diagonal(weights, 0)
    return weights @ y / weights.sum(1)


def test_shares_of_classes_by_hand() -> None:
    """Three rows at 0, 0 and 1 of classes 0, 1 and 1, the kernel as wide as the gap: K = 1 and e^(−½)."""
    task, data = classes([0.0, 0.0, 1.0], [0, 1, 1], 1.0, 2)
    k, vote = math.exp(-0.5), {0: [2 / 3 + 1 / 9, 2 / 9], 1: [1 / 9, 2 / 3 + 2 / 9]}
    everything = [(vote[0][c] + vote[1][c] + k * vote[1][c]) / (2 + k) for c in (0, 1)]
    found = task.predict(torch.zeros(1, 1))
    assert found["probabilities"][0].tolist() == pytest.approx(everything, rel=1e-5)
    assert found["class"].tolist() == [1]
    others = [vote[1][0], (vote[0][1] + k * vote[1][1]) / (1 + k), (vote[0][1] + vote[1][1]) / 2]
    batch = data.take(torch.arange(3))
    assert task.loss_each(batch)["target"].tolist() == pytest.approx([-math.log(p) for p in others], rel=1e-5)
    assert task.terms(batch)["target"].item() == pytest.approx(-sum(map(math.log, others)), rel=1e-5)
    assert task.weigh(batch) == {"target": 3.0}


def test_a_row_among_strangers_has_a_finite_loss() -> None:
    """All rows in reach are of the other class; one vote in N goes by the shares of the classes."""
    task, data = classes([0.0, 0.001, 0.002, 50.0], [1, 0, 0, 1], 0.01, 2)
    loss = task.loss_each(data.take(torch.arange(1)))["target"]
    assert loss.item() == pytest.approx(-math.log(1 / 4 * 1 / 2), rel=1e-5)


def test_training_rows_are_left_out_and_new_rows_are_not() -> None:
    task, data = values()
    x, y = data.inputs[:, 0].double().numpy(), data.target.double().numpy()
    wanted = float(np.sqrt(np.mean((left_out(x, y, 0.3) - y) ** 2)))
    assert evaluate(task, data)["rmse"] == pytest.approx(wanted, rel=1e-4)
    some = torch.tensor([5, 40, 3])  # a part of the rows keeps their numbers
    error = left_out(x, y, 0.3)[some] - y[some]
    assert evaluate(task, data.subset(some))["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-4)
    new = TensorData({"inputs": data.inputs, "target": data.target})
    weights = np.exp(-0.5 * ((x[:, None] - x[None]) / 0.3) ** 2)
    error = weights @ y / weights.sum(1) - y
    assert evaluate(task, new)["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-4)


def test_micro_batches_add_up_to_the_whole() -> None:
    task, data = values()
    batch = data.take(torch.randperm(60))

    def gradient(parts: int) -> tuple[float, Tensor]:
        task.zero_grad()
        total = sum(task.terms(part)["target"] for part in batch.split(parts))
        assert isinstance(total, Tensor)
        total.backward()
        grad = task.model.log_width.grad
        assert grad is not None
        return total.item(), grad.clone()

    (one, whole), (two, split) = gradient(1), gradient(7)
    assert one == pytest.approx(two, rel=1e-5)
    torch.testing.assert_close(whole, split, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", [0, 16])
def test_descent_finds_the_width_of_the_smallest_loss(batch_size: int) -> None:
    task, data = values(width=2.0)
    x, y = data.inputs[:, 0].double().numpy(), data.target.double().numpy()
    grid = np.geomspace(0.02, 4, 2000)
    errors = [np.mean((left_out(x, y, h) - y) ** 2) for h in grid]
    fit(task, data, epochs=400 if batch_size == 0 else 120, optim=Optim(lr=0.05),
        train=Train(batch_size=batch_size, restore="last"))  # fmt: skip
    found, best = task.model.width.item(), grid[int(np.argmin(errors))]
    assert found == pytest.approx(best, rel=0.01 if batch_size == 0 else 0.15)


def test_noise_comes_from_rows_that_were_not_asked() -> None:
    task, data = values()
    assert isinstance(task.head, Gaussian)
    scale = task.head.scale.item()
    for rows in (40, 20):
        other = TensorData({"inputs": data.inputs[:rows] + 0.1, "target": data.target[:rows]})
        task.finish(data, other)
        source = other if rows >= 30 else data  # too few: the training rows, each left out
        noise = task.head.noise_variance.sqrt().item() * scale
        assert noise == pytest.approx(evaluate(task, source)["rmse"], rel=1e-4)
    found = task.predict(data.inputs[:2], "interval", level=0.9)
    reach = 1.6448536 * task.head.noise_variance.sqrt().item() * scale
    torch.testing.assert_close(found["high"] - found["value"], torch.full((2,), reach), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("make", [lambda: values(20), lambda: classes([0.0, 1.0, 3.0], [0, 2, 1], 0.5, 3)])
def test_a_task_is_rebuilt_with_its_rows(make: object) -> None:
    task, data = make()  # type: ignore[operator]
    again = build_task(json.loads(json.dumps(task.spec())))
    again.load_state_dict(load(save(task.state_dict())))
    assert evaluate(again, data) == evaluate(task, data)
    first, second = task.predict(data.inputs + 0.2), again.predict(data.inputs + 0.2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert OWN in data.fields


@pytest.mark.parametrize(
    ("head", "outputs", "text"),
    [(Bernoulli(1), 1, "a bernoulli head"), (Categorical(3), 2, "values of width 2 for a categorical head")],
)
def test_heads_that_do_not_fit_are_refused(head: Head, outputs: int, text: str) -> None:
    with pytest.raises(InputError, match=text):
        LeaveOneOut(NadarayaWatson(NadarayaWatsonConfig(1, outputs, 5)), head)


def test_another_model_is_refused() -> None:
    model = {"model": "mlp", "in_features": 1, "out_features": 1, "hidden": []}
    with pytest.raises(InputError, match="a MLP that leaves one out"):
        LeaveOneOut.from_spec({"model": model, "head": Gaussian(1).spec()})
