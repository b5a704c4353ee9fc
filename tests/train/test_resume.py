"""A resumed run computes the same bits as one that was never interrupted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from quire.data.batch import Batch
from quire.errors import CheckpointError, InputError
from quire.options import Optim, Schedule, Train
from quire.train import Callback, Interrupted, fit
from quire.train.checkpoints import Checkpoint, newest_checkpoint
from quire.train.descent import Descent, Record
from quire.train.folder import RunFolder
from tests.train.examples import classes, classifier, folder, often

EPOCHS = 4  # of 5 steps each
OPTIM = Optim(lr=0.01, weight_decay=0.01, clip_norm=1.0, schedule=Schedule("cosine", warmup=3))
TRAIN = often(micro_batches=3, checkpoint_every=2, average=0.9)


class Crash(Exception):
    """Stands for whatever ends a process."""


class CrashAfterStep(Callback):
    def __init__(self, step: int) -> None:
        self.at = step

    def on_step(self, descent: Descent, step: int) -> None:
        if step == self.at:
            raise Crash


class CrashInMicroBatch:
    """Wraps `terms` so that it fails in the middle of a step."""

    def __init__(self, task: torch.nn.Module, calls: int) -> None:
        self.inner, self.left = task.terms, calls

    def __call__(self, batch: Batch, player: str = "model") -> dict[str, torch.Tensor]:
        self.left -= 1
        if self.left == 0:
            raise Crash
        return self.inner(batch, player)


def train(path: Path, *, crash_step: int = 0, crash_call: int = 0, resume: bool = False) -> None:
    task = classifier(dropout=0.3, norm="batch")
    task.explicit = lambda: None  # dropout needs autograd anyway
    if crash_call:
        task.terms = CrashInMicroBatch(task, crash_call)
    store = folder(path, resume=resume)
    try:
        fit(
            task,
            classes(90),
            classes(30, seed=2),
            epochs=EPOCHS,
            optim=OPTIM,
            train=TRAIN,
            seed=5,
            store=store,
            callbacks=[CrashAfterStep(crash_step)] if crash_step else [],
        )
    finally:
        store.close()


def outcome(path: Path) -> tuple[Checkpoint, list[dict[str, object]]]:
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        del record["seconds"]  # the one thing that a clock decides
    return newest_checkpoint(path / "checkpoints"), records


def assert_same(one: Path, other: Path) -> None:
    (a, records_a), (b, records_b) = outcome(one), outcome(other)
    assert records_a == records_b
    assert a.tensors.keys() == b.tensors.keys() >= {"weights", "best", "average", "optimiser-model", "final"}
    for kind in a.tensors:
        assert a.tensors[kind].keys() == b.tensors[kind].keys()
        for name in a.tensors[kind]:
            x, y = a.tensors[kind][name], b.tensors[kind][name]
            same = torch.allclose(
                x, y, rtol=0, atol=0, equal_nan=True
            )  # NaN stands for "none" in random states
            assert x.dtype == y.dtype, f"{kind}: {name}"
            assert same, f"{kind}: {name}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    train(path)
    return path


@pytest.mark.parametrize(
    "step", [5, 10, 7, 1, 20], ids=["boundary", "boundary2", "mid-epoch", "first", "last"]
)
def test_interrupted_once_after_a_step(whole: Path, tmp_path: Path, step: int) -> None:
    with pytest.raises(Crash):
        train(tmp_path / "run", crash_step=step)
    train(tmp_path / "run", resume=True)
    assert_same(whole, tmp_path / "run")


@pytest.mark.parametrize("call", [2, 3 * 7 + 3], ids=["first step", "mid-epoch"])
def test_interrupted_inside_accumulation(whole: Path, tmp_path: Path, call: int) -> None:
    with pytest.raises(Crash):
        train(tmp_path / "run", crash_call=call)
    train(tmp_path / "run", resume=True)
    assert_same(whole, tmp_path / "run")


def test_interrupted_three_times(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Crash):
        train(run, crash_call=8)
    with pytest.raises(Crash):
        train(run, crash_step=10, resume=True)
    with pytest.raises(Crash):
        train(run, crash_step=13, resume=True)
    train(run, resume=True)
    assert_same(whole, run)


def test_records_after_the_checkpoint_are_written_once(whole: Path, tmp_path: Path) -> None:
    """Killed after the records of step 5 were written, with the last checkpoint at step 4."""

    class CrashAfterRecord(Callback):
        def on_record(self, descent: Descent, record: Record) -> None:
            if record["split"] == "validation":
                raise Crash

    store = folder(tmp_path / "run")
    task = classifier(dropout=0.3, norm="batch")
    with pytest.raises(Crash):
        fit(
            task, classes(90), classes(30, seed=2), epochs=EPOCHS, optim=OPTIM, train=TRAIN, seed=5,
            store=store, callbacks=[CrashAfterRecord()],
        )  # fmt: skip
    store.close()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    train(tmp_path / "run", resume=True)
    assert_same(whole, tmp_path / "run")


def test_the_comparison_notices_another_seed(whole: Path, tmp_path: Path) -> None:
    task = classifier(dropout=0.3, norm="batch", seed=1)
    store = folder(tmp_path / "run")
    fit(task, classes(90), classes(30, seed=2), epochs=EPOCHS, optim=OPTIM, train=TRAIN, seed=5, store=store)
    with pytest.raises(AssertionError):
        assert_same(whole, tmp_path / "run")


def test_a_signal_stops_at_the_end_of_the_step_with_everything_saved(whole: Path, tmp_path: Path) -> None:
    class Terminate(Callback):
        def on_step(self, descent: Descent, step: int) -> None:
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)

    def attempt(resume: bool, callbacks: list[Callback]) -> None:
        task = classifier(dropout=0.3, norm="batch")
        store = folder(tmp_path / "run", resume=resume)
        fit(
            task, classes(90), classes(30, seed=2), epochs=EPOCHS, optim=OPTIM, train=TRAIN, seed=5,
            store=store, callbacks=callbacks,
        )  # fmt: skip

    with pytest.raises(Interrupted, match="after step 7 of 20"):
        attempt(False, [Terminate()])
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").step == 7
    attempt(True, [])
    assert_same(whole, tmp_path / "run")


def test_a_finished_run_can_go_on_for_longer(tmp_path: Path) -> None:
    def attempt(path: Path, epochs: int, resume: bool) -> None:
        store = folder(path, resume=resume)
        fit(classifier(), classes(), classes(30, 2), epochs=epochs, train=often(), store=store)
        store.close()

    attempt(tmp_path / "a", 2, False)
    attempt(tmp_path / "a", 5, True)
    attempt(tmp_path / "b", 5, False)
    (a, records_a), (b, records_b) = outcome(tmp_path / "a"), outcome(tmp_path / "b")
    assert records_a == records_b
    for name, value in b.tensors["final"].items():
        assert torch.equal(a.tensors["final"][name], value)


@pytest.mark.parametrize("step", [5, 7])
def test_the_explicit_equations_resume_to_the_same_bits_too(tmp_path: Path, step: int) -> None:
    """Without dropout the gradients come from the engine; 90·5 floats a batch are no multiple of a cache
    line, so a batch that lay elsewhere in memory would show."""

    def attempt(path: Path, *, crash: int = 0, resume: bool = False) -> None:
        task = classifier()
        assert task.explicit() is not None
        store = folder(path, resume=resume)
        callbacks = [CrashAfterStep(crash)] if crash else []
        options = often(checkpoint_every=1, average=0.9)
        try:
            fit(task, classes(), classes(30, 2), epochs=4, train=options, store=store, callbacks=callbacks)
        finally:
            store.close()

    attempt(tmp_path / "whole")
    with pytest.raises(Crash):
        attempt(tmp_path / "run", crash=step)
    attempt(tmp_path / "run", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_early_stopping_survives_resuming(tmp_path: Path) -> None:
    def attempt(path: Path, *, resume: bool = False, crash: int = 0) -> int:
        store = folder(path, resume=resume)
        callbacks = [CrashAfterStep(crash)] if crash else []
        options = often(patience=2, monitor="accuracy", checkpoint_every=1)
        result = fit(
            classifier(), classes(), classes(30, 2), epochs=60, train=options, optim=Optim(lr=0.05),
            store=store, callbacks=callbacks,
        )  # fmt: skip
        assert result.stopped == "early"
        return result.steps

    steps = attempt(tmp_path / "a")
    assert 10 < steps < 300
    with pytest.raises(Crash):
        attempt(tmp_path / "b", crash=steps - 7)
    assert attempt(tmp_path / "b", resume=True) == steps
    # A run that has stopped early does not start again.
    assert attempt(tmp_path / "b", resume=True) == steps


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    fit(classifier(), classes(), epochs=1, train=often(), store=folder(tmp_path / "run"))
    with pytest.raises(InputError, match=r"(?s)resuming with .*'rows': 80.*expected: .*'rows': 90"):
        fit(classifier(), classes(80), epochs=2, train=often(), store=folder(tmp_path / "run", resume=True))


def test_resuming_another_model_is_refused(tmp_path: Path) -> None:
    fit(classifier(), classes(), epochs=1, train=often(), store=folder(tmp_path / "run"))
    with pytest.raises(CheckpointError, match="optimiser state that does not fit"):
        fit(
            classifier(),
            classes(),
            epochs=2,
            train=often(),
            optim=Optim("sgd", momentum=0.9),
            store=folder(tmp_path / "run", resume=True),
        )


def test_a_run_folder_is_never_overwritten_silently(tmp_path: Path) -> None:
    folder(tmp_path / "run").close()
    with pytest.raises(InputError, match="exists already"):
        folder(tmp_path / "run")
    RunFolder.create(tmp_path / "run", {"format": 1}, overwrite=True).close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="is no run folder"):
        RunFolder.create(tmp_path / "other", {"format": 1}, overwrite=True)
    with pytest.raises(InputError, match="does not exist"):
        RunFolder.reopen(tmp_path / "nothing")


def test_two_processes_cannot_train_the_same_run(tmp_path: Path) -> None:
    store = folder(tmp_path / "run")
    with pytest.raises(InputError, match="another process"):
        RunFolder.reopen(tmp_path / "run")
    store.close()
    RunFolder.reopen(tmp_path / "run").close()


def test_fit_leaves_the_callers_random_numbers_alone() -> None:
    task = classifier(dropout=0.5)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    fit(task, classes(), epochs=1, train=Train(batch_size=20))
    assert torch.equal(torch.rand(3), expected)
