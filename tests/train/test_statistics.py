"""Learning by statistics: sums over batches, one update a sweep, the same folder and resume as descent."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.data.batch import Batch, Data, TensorData
from quire.errors import InputError
from quire.train import Fit, Interrupted, StatisticsTask, Swept, fit_statistics
from quire.train.checkpoints import Checkpoint, newest_checkpoint
from quire.train.memory import Before, OutOfMemory
from tests.train.examples import folder


class Crash(Exception):
    """Stands for whatever ends a process."""


class RobustMean(StatisticsTask):
    """The minimiser of Σ √(1 + (x − m)²), found by reweighting: each sweep is a weighted mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros((), dtype=torch.float64))
        self.crash_in: int | None = None
        self.interrupt_in: int | None = None
        self.updates = 0

    @property
    def learned(self) -> int:
        return 1

    def start(self, data: Data, generator: torch.Generator) -> None:
        self.centre.copy_(torch.rand((), generator=generator, dtype=torch.float64))

    def weigh(self, batch: Batch) -> dict[str, float]:
        return {"distance": float(len(batch))}

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return {"distance": (1 + (batch.inputs - self.centre).square()).sqrt().sum()}

    def statistics(self, batch: Batch) -> dict[str, Tensor]:
        distance = (1 + (batch.inputs - self.centre).square()).sqrt()
        return {
            "weighted": (batch.inputs / distance).sum(),
            "weight": (1 / distance).sum(),
            "distance": distance.sum(),
            "rows": torch.tensor(len(batch)),
        }

    def update(self, totals: Mapping[str, Tensor]) -> Swept:
        self.updates += 1
        if self.updates == self.crash_in:
            raise Crash
        if self.updates == self.interrupt_in:
            os.kill(os.getpid(), signal.SIGTERM)
        new = totals["weighted"] / totals["weight"]
        moved = abs(float(new - self.centre))
        self.centre.copy_(new)
        return Swept(float(totals["distance"] / totals["rows"]), moved < 1e-10)

    def predict(self, inputs: Tensor, mode: str = "mode", **options: Any) -> dict[str, Tensor]:
        return {"value": self.centre.expand(len(inputs))}

    def spec(self) -> dict[str, Any]:
        return {"task": "robust-mean"}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> RobustMean:
        return cls()


class Apart:
    """Rows that come in batches of seven, like those of a file that is not held in memory."""

    def __init__(self, inputs: Tensor) -> None:
        self.inner = TensorData({"inputs": inputs})
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


def numbers() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.cat([torch.randn(50, 1, generator=generator), torch.full((5, 1), 30.0)]).double()


def optimum(x: Tensor) -> float:
    """By bisection of the derivative Σ (m − x)/√(1 + (x − m)²), which rises."""
    low, high = float(x.min()), float(x.max())
    for _ in range(200):
        middle = (low + high) / 2
        slope = ((middle - x) / (1 + (x - middle).square()).sqrt()).sum()
        low, high = (middle, high) if slope < 0 else (low, middle)
    return low


def train(task: RobustMean, path: Path, *, resume: bool = False, sweeps: int = 100) -> Fit:
    store = folder(path, resume=resume)
    try:
        return fit_statistics(
            task, TensorData({"inputs": numbers()}), TensorData({"inputs": numbers()[:20]}), sweeps=sweeps,
            store=store, checkpoint_seconds=0.0,
        )  # fmt: skip
    finally:
        store.close()


def outcome(path: Path) -> tuple[Checkpoint, list[dict[str, Any]]]:
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        del record["seconds"]
    return newest_checkpoint(path / "checkpoints"), records


def test_sweeps_until_nothing_changes() -> None:
    task = RobustMean()
    result = fit_statistics(task, TensorData({"inputs": numbers()}), sweeps=1000)
    assert task.centre.item() == pytest.approx(optimum(numbers()), abs=1e-8)
    assert result.stopped == "converged"
    assert 1 < result.steps < 1000
    losses = [record["values"]["loss"] for record in result.history]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(losses))


def test_stops_after_the_given_sweeps() -> None:
    result = fit_statistics(RobustMean(), TensorData({"inputs": numbers()}), sweeps=2)
    assert (result.steps, result.stopped) == (2, "finished")


def test_batches_add_up_to_the_whole() -> None:
    whole, apart = RobustMean(), RobustMean()
    fit_statistics(whole, TensorData({"inputs": numbers()}), sweeps=5)
    fit_statistics(apart, Apart(numbers()), sweeps=5)
    assert apart.centre.item() == pytest.approx(whole.centre.item(), rel=1e-12)


def test_a_run_that_is_cut_off_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    train(RobustMean(), tmp_path / "whole")
    task = RobustMean()
    task.crash_in = 4
    with pytest.raises(Crash):
        train(task, tmp_path / "cut")
    train(RobustMean(), tmp_path / "cut", resume=True)
    (whole, records), (cut, again) = outcome(tmp_path / "whole"), outcome(tmp_path / "cut")
    assert whole.step == cut.step
    assert records == again
    assert torch.equal(whole.tensors["final"]["centre"], cut.tensors["final"]["centre"])
    assert {record["split"] for record in records} == {"train", "validation"}


def test_an_interrupt_waits_for_the_end_of_the_sweep_and_saves(tmp_path: Path) -> None:
    task = RobustMean()
    task.interrupt_in = 3
    with pytest.raises(Interrupted, match="interrupted after sweep 3 of 100"):
        train(task, tmp_path / "run")
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").step == 3


def test_a_finished_run_is_not_swept_again(tmp_path: Path) -> None:
    first = train(RobustMean(), tmp_path / "run")
    task = RobustMean()
    again = train(task, tmp_path / "run", resume=True)
    assert again.steps == first.steps
    assert task.updates == 0


def test_a_row_that_is_not_finite_is_named() -> None:
    x = numbers()
    x[17] = torch.nan
    with pytest.raises(InputError, match="row 17 has a value that is not a finite number"):
        fit_statistics(RobustMean(), TensorData({"inputs": x}), sweeps=3)


class Failing(RobustMean):
    """Finds after an update that it should not have been made."""

    def __init__(self, fails_in: int) -> None:
        super().__init__()
        self.fails_in = fails_in
        self.seen: list[float] = []

    def update(self, totals: Mapping[str, Tensor]) -> Swept:
        self.seen.append(self.centre.item())
        swept = super().update(totals)
        if self.updates == self.fails_in:
            self.centre.fill_(torch.nan)
            raise InputError("a component has collapsed", expected="none", fix="fewer")
        return swept


@pytest.mark.parametrize("fails_in", [1, 4])
def test_an_update_that_fails_is_undone_in_any_sweep(fails_in: int) -> None:
    task = Failing(fails_in)
    with pytest.raises(InputError, match="a component has collapsed"):
        fit_statistics(task, TensorData({"inputs": numbers()}), sweeps=9)
    assert task.centre.item() == task.seen[-1]


@pytest.mark.parametrize("where", ["statistics", "update"])
def test_where_memory_runs_out_nothing_is_lost(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TensorData({"inputs": numbers()})
    real, calls = getattr(RobustMean, where), itertools.count()

    def short(task: RobustMean, given: Any) -> Any:
        found = real(task, given)
        if next(calls) >= 4:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return found

    store = folder(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(RobustMean, where, short)
        with pytest.raises(OutOfMemory, match="out of memory in learning by statistics: tried") as caught:
            fit_statistics(RobustMean(), data, sweeps=9, store=store, checkpoint_seconds=0.0)
    store.close()
    assert caught.value.exit_code == 1
    assert "fewer clusters" in caught.value.fix
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").step > 0
    store = folder(tmp_path / "run", resume=True)
    found, wanted = RobustMean(), RobustMean()
    fit_statistics(found, data, sweeps=9, store=store)
    store.close()
    fit_statistics(wanted, data, sweeps=9)
    assert torch.equal(found.centre, wanted.centre)


def test_what_cannot_fail_on_rows_that_were_seen_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    remember = Before.remember
    monkeypatch.setattr(Before, "remember", lambda before: (asked.append(1), remember(before)))
    for steady, data, copied in [
        (False, TensorData({"inputs": numbers()}), 5),
        (True, TensorData({"inputs": numbers()}), 1),
        (True, Apart(numbers()), 5),  # which may be other rows the next time they are read
    ]:
        asked.clear()
        monkeypatch.setattr(RobustMean, "steady", steady)
        assert fit_statistics(RobustMean(), data, sweeps=5).steps == 5
        assert len(asked) == copied


def test_other_data_is_not_resumed(tmp_path: Path) -> None:
    train(RobustMean(), tmp_path / "run", sweeps=2)
    store = folder(tmp_path / "run", resume=True)
    with pytest.raises(InputError, match="resuming with"):
        fit_statistics(RobustMean(), TensorData({"inputs": numbers()[:9]}), sweeps=4, store=store)
    store.close()


# -- Sweeps that begin before the last one was looked at -------------------------------------------


class Resting(RobustMean):
    """Stops by itself, as a device would know: a sweep after the last one changes nothing."""

    rests = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("active", torch.ones((), dtype=torch.bool))

    def course(self, batch: Batch) -> str:
        return "always the same"

    def advance(self, totals: Mapping[str, Tensor]) -> Tensor:
        self.begun += 1
        if self.begun == self.interrupt_in:
            os.kill(os.getpid(), signal.SIGTERM)
        new = torch.where(self.active, totals["weighted"] / totals["weight"], self.centre)
        self.active.copy_((new - self.centre).abs() > 1e-10)
        self.centre.copy_(new)
        return torch.stack([totals["distance"] / totals["rows"], self.active.double()])

    def swept(self, numbers: list[float]) -> Swept:
        self.looked += 1
        self.lead = max(self.lead, self.begun - self.looked)
        return Swept(numbers[0], not numbers[1])

    begun = looked = lead = 0


class Recorded:
    """As a recording behaves that was made in the second sweep, but for the GPU."""

    def __init__(self) -> None:
        self.graph: object = None

    def __call__(self, course: object, work: Callable[[], Tensor]) -> Tensor:
        if self.seen:
            self.graph = "a graph"
        self.seen = True
        return work()

    seen = False


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.train.statistics.Replay", Recorded)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("sweeps", [1, 2, 3, 7, 100])
def test_a_sweep_ahead_changes_nothing(sweeps: int) -> None:
    plain, early, data = RobustMean(), Resting(), TensorData({"inputs": numbers()})
    wanted, found = (fit_statistics(task, data, sweeps=sweeps) for task in (plain, early))
    assert (found.steps, found.stopped) == (wanted.steps, wanted.stopped)
    assert [r["values"] for r in found.history] == [r["values"] for r in wanted.history]
    assert torch.equal(early.centre, plain.centre)
    assert early.lead == (1 if wanted.steps > 2 else 0)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("stop", [2, 3, 4, 6])
def test_what_is_saved_is_the_state_of_its_sweep(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves come due in some sweeps only, and an interrupt while a sweep is ahead."""
    data, states, turns = TensorData({"inputs": numbers()}), {}, itertools.count()
    monkeypatch.setattr("quire.train.statistics.Sweeps._due", lambda self: next(turns) % 3 == 2)
    for sweep in range(1, 12):
        task = RobustMean()
        fit_statistics(task, data, sweeps=sweep)
        states[sweep] = float(task.centre)
    task, store = Resting(), folder(tmp_path / "run")
    task.interrupt_in = stop
    with pytest.raises(Interrupted, match="interrupted after sweep"):
        fit_statistics(task, data, sweeps=100, store=store)
    store.close()
    assert task.lead == (1 if stop > 3 else 0)
    saved = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert saved.step >= stop
    assert float(saved.tensors["weights"]["centre"]) == states[saved.step]
    store, again = folder(tmp_path / "run", resume=True), Resting()
    fit_statistics(again, data, sweeps=100, store=store)
    store.close()
    plain = RobustMean()
    fit_statistics(plain, data, sweeps=100)
    assert torch.equal(again.centre, plain.centre)
