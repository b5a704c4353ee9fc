"""NaN and infinity in a row, a loss, a gradient or a weight, in every kind of task, in one process or in one
of two: the step is not applied, and the message says where it came from."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable as Function
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn

from quire.data.batch import TensorData
from quire.errors import DataError, NonFiniteError, QuireError
from quire.options import Optim, Train
from quire.tasks import KMeansTask, LinearLeastSquares, MixtureTask, PrincipalComponents
from quire.train import Callback, StatisticsTask, Task, fit, fit_statistics
from quire.train.descent import Descent
from quire.train.processes import from_all, processes
from tests.train.examples import classes
from tests.train.test_memory import KINDS, dense, find
from tests.train.test_parallel import state, wide
from tests.train.together import once, together

KINDS = {**KINDS, "batch_norm": lambda: _normed()}
PLACES = ("row", "loss", "gradient", "weight")
SATURATED = ("one_player", "noisy_weights")
"""Kinds whose layers pass on nothing infinite of an infinite weight."""
STEP = 3
"""The step that goes wrong; a batch has 20 rows, or 10 streams."""
OPTIM = Optim("sgd", lr=0.05, momentum=0.5)


def _normed() -> Any:
    task = dense(norm=True)
    return task, wide(classes(100)), Train(batch_size=20), find(task)


def cases() -> list[tuple[str, str]]:
    """Tokens are whole numbers, which are always finite."""
    return [(kind, place) for kind in KINDS for place in PLACES if (kind, place) != ("carried", "row")]


class Trouble(Callback):
    """From the end of step STEP − 1 on, in this process, if it is the one."""

    def __init__(self, task: Task, layer: nn.Module, place: str, value: float, here: bool) -> None:
        self.task, self.place, self.value, self.here, self.on = task, place, value, here, False
        self.before: dict[str, Tensor] = {}
        layer.register_forward_hook(self._pass)

    def _pass(self, layer: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.on:
            return None
        if self.place == "loss":
            return output * self.value
        if self.place == "gradient" and output.requires_grad:
            output.register_hook(lambda gradient: gradient * self.value)
        return None

    def on_step(self, descent: Descent, step: int) -> None:
        if step != STEP:
            return
        self.on = self.here
        if self.here and self.place == "weight":
            moving = descent.stepper.players[0].groups[0].flat
            moving[1] = self.value
        self.before = state(self.task)


def learn(kind: str, place: str, value: float, who: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What was said, and the task before and after it."""
    task, data, train, layer = KINDS[kind]()
    data = _ten_batches(data)
    if place == "row":
        # In the fourth batch of 20; of two processes the second has its rows 70 … 79.
        data.fields["inputs"][75 if who else 63, 1] = value
    train = dataclasses.replace(train, shuffle=False)
    trouble = Trouble(task, layer, place, value, processes()[0] == who)
    try:
        fit(task, data, steps=9, optim=OPTIM, train=train, seed=3, callbacks=[trouble], train_measures=False)
    except NonFiniteError as error:
        after = {f"after {name}": value for name, value in state(task).items()}
        facts = {"error": str(error), "code": error.exit_code, "rows": error.rows}  # type: ignore[attr-defined]
        return trouble.before | after, facts
    raise AssertionError("went on")


def _ten_batches(data: Any) -> Any:
    if not isinstance(data, TensorData):
        return data
    fields = {name: torch.cat([value] * 5)[:100].clone() for name, value in data.fields.items()}
    return TensorData(fields)


def check(
    found: tuple[dict[str, Tensor], dict[str, Any]], kind: str, place: str, who: int, two: bool
) -> None:
    tensors, facts = found
    said = facts["error"]
    assert facts["code"] == 1
    if place == "weight" and "are not finite any more" in said:  # seen at the epoch's end
        assert kind in SATURATED
        assert said.startswith(
            f"process {who} of 2, step 5: the weights '" if two else "step 5: the weights '"
        )
        return
    assert said.startswith(f"process {who} of 2, step {STEP}: " if two else f"step {STEP}: ")
    assert "The step was not applied" in said
    if place == "row":
        row = 75 if who else 63
        assert "the data has non-finite values in 'inputs'" in said
        assert facts["rows"] == [row]
    elif place == "weight":
        assert "the weights '" in said
        assert "not finite already" in said
    elif place == "loss":
        assert "is not finite" in said
        assert "first layer with a non-finite output is '" in said
    else:
        assert "the gradient of '" in said
        assert "is not finite" in said
    before = {name: value for name, value in tensors.items() if not name.startswith("after ")}
    assert before
    for name, value in before.items():
        torch.testing.assert_close(tensors[f"after {name}"], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("kind", "place"), cases())
def test_one_process(kind: str, place: str, value: float) -> None:
    check(learn(kind, place, value, 0), kind, place, 0, two=False)


# -- Statistics ------------------------------------------------------------------------------------

STATISTICS: dict[str, Function[[], StatisticsTask]] = {
    "kmeans": lambda: KMeansTask(3, 4, starts=2, tol=0.0),
    "mixture": lambda: MixtureTask(3, 2, starts=2),
    "components": lambda: PrincipalComponents(3, 2),
    "least_squares": lambda: LinearLeastSquares(3),
}


def rows() -> TensorData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    return TensorData({"inputs": x, "target": x @ torch.ones(3, 1, dtype=torch.float64)})


def sweep(kind: str, value: float, *, started: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """With a row that is not finite; `started` has learned from good rows first, so that it is met in the
    middle."""
    task, good, bad = STATISTICS[kind](), rows(), rows()
    bad.fields["inputs"][47, 1] = value
    if started:
        fit_statistics(task, good, sweeps=2, seed=3)
        for name in ("active", "wanted"):
            if isinstance(getattr(task, name, None), Tensor):
                getattr(task, name).fill_(name == "active")
        task.load_state_dict(task.state_dict())
    before = state(task)
    try:
        fit_statistics(task, bad, sweeps=5, seed=3, started=started)
    except QuireError as error:
        after = {f"after {name}": tensor for name, tensor in state(task).items()}
        return before | after, {"error": str(error), "code": error.exit_code, "kind": type(error).__name__}
    raise AssertionError("went on")


def check_sweep(found: tuple[dict[str, Tensor], dict[str, Any]], started: bool) -> None:
    tensors, facts = found
    assert facts["kind"] == DataError.__name__
    assert "row 47 has a value that is not a finite number" in facts["error"]
    for name, value in tensors.items():
        if started and not name.startswith("after "):
            torch.testing.assert_close(tensors[f"after {name}"], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", STATISTICS)
def test_sweeps_of_one_process(kind: str, value: float, started: bool) -> None:
    check_sweep(sweep(kind, value, started=started), started)


# -- Two processes ---------------------------------------------------------------------------------

FAULTY = {0: math.inf, 1: math.nan}
"""What one of them has, by its number."""


def main(path: Path, number: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=number, world_size=2)
    for kind, place in cases():
        for who, value in FAULTY.items():
            _keep(path, f"{kind} {place} of {who}, {number}", learn(kind, place, value, who))
    for kind in STATISTICS:
        _keep(path, f"{kind} {number}", sweep(kind, math.nan, started=False))
    assert len(from_all(number)) == 2
    distributed.destroy_process_group()


def _keep(path: Path, name: str, found: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    save_file(found[0], path / f"{name}.safetensors")
    (path / f"{name}.json").write_text(json.dumps(found[1]))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "nonfinite", lambda path: together("tests.train.test_nonfinite", path, 2))


def read(path: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(path / f"{name}.safetensors"), json.loads((path / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("who", FAULTY)
@pytest.mark.parametrize(("kind", "place"), cases())
def test_one_of_two_processes(two: Path, kind: str, place: str, who: int) -> None:
    for number in range(2):
        check(read(two, f"{kind} {place} of {who}, {number}"), kind, place, who, two=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATISTICS)
def test_sweeps_of_two_processes(two: Path, kind: str) -> None:
    for number in range(2):
        check_sweep(read(two, f"{kind} {number}"), started=False)
