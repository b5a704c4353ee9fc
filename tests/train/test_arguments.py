"""What a person may give `fit` by mistake, and which weights a measure chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from quire.data import TensorData
from quire.errors import InputError
from quire.nn.heads import Categorical
from quire.options import Optim, Schedule, Train
from quire.tasks import Supervised
from quire.train import fit
from quire.train.arguments import resolve_device

ROWS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(30) % 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def task() -> Supervised:
    return Supervised(model(), Categorical(3))


def data() -> TensorData:
    return TensorData({"inputs": ROWS, "target": CLASSES})


@pytest.mark.parametrize(
    ("call", "got", "fix"),
    [
        (lambda: fit(model(), data(), epochs=1), "a Sequential as the task", "Supervised(model"),
        (lambda: fit(task(), (ROWS, CLASSES), epochs=1), "a tuple as the data", "TensorData({"),
        (lambda: fit(task(), DataLoader(TensorDataset(ROWS, CLASSES)), epochs=1), "a DataLoader as", "wrap"),
        (lambda: fit(task(), data(), (ROWS, CLASSES), epochs=1), "a tuple as the validation", "TensorData({"),
        (lambda: fit(task(), TensorData({"inputs": ROWS}), epochs=1), "the fields inputs", '"target": y'),
        (lambda: TensorData({"inputs": np.array(["a"])}), "no array of numbers", "load_table"),
        (lambda: fit(task(), data(), epochs=-1), "epochs -1", "at least 1"),
        (lambda: fit(task(), data(), steps=0), "steps 0", "at least 1"),
        (lambda: fit(task(), data(), epochs=1, optim="adam"), "optim is a str", "Optim(lr="),
        (lambda: fit(task(), data(), epochs=1, train={}), "train is a dict", "Train(batch_size="),
        (lambda: fit(task(), data(), epochs=1, callbacks=[print]), "callbacks that are no list", "on_step"),
        (lambda: fit(task(), data(), epochs=1, device="gpu"), "device 'gpu'", "leave it out"),
        (lambda: fit(task(), data(), epochs=1, device="cuda:99"), "device cuda:99 on a machine", "cpu"),
        (lambda: Schedule("cosin"), "--optim.schedule.name is 'cosin'", "cosine"),
    ],
)
def test_a_mistake_is_named_in_the_callers_words(call: Callable[[], Any], got: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert got in caught.value.got
    assert fix in caught.value.fix


def test_arrays_become_tensors() -> None:
    given, arrays = task(), task()
    fit(given, data(), epochs=2)
    fit(arrays, TensorData({"inputs": ROWS.numpy(), "target": CLASSES.numpy()}), epochs=2)
    for one, other in zip(given.parameters(), arrays.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_cpu_is_there() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("measure", ["accuracy", "precision", "recall", "f1"])
def test_the_weights_with_the_highest_share_are_kept(measure: str) -> None:
    options = Train(batch_size=10, monitor=measure)
    result = fit(task(), data(), data(), epochs=20, optim=Optim(lr=0.05), train=options)
    found = [r["values"][measure] for r in result.history if r["split"] == "validation"]
    assert min(found) < max(found)
    assert result.best == max(found)


def test_a_measure_of_one_of_several_targets_is_one_too() -> None:
    torch.manual_seed(0)
    several = Supervised(nn.Linear(4, 6), {"one": Categorical(3), "two": Categorical(3)})
    rows = TensorData({"inputs": ROWS, "target.one": CLASSES, "target.two": (CLASSES + 1) % 3})
    options = Train(batch_size=10, monitor="one.accuracy")
    result = fit(several, rows, rows, epochs=20, optim=Optim(lr=0.05), train=options)
    found = [r["values"]["one.accuracy"] for r in result.history if r["split"] == "validation"]
    assert min(found) < max(found) == result.best
