"""Memory that runs out elsewhere than on the way to a gradient, or for good, or for real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable as Function
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quire.errors import QuireError
from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import Task, evaluate, fit
from quire.train.checkpoints import newest_checkpoint
from quire.train.memory import OutOfMemory, is_out_of_memory
from quire.train.optimisers import Optimiser, make_optimiser
from quire.train.progress import Plain
from tests.train.examples import classes, folder
from tests.train.test_memory import ROWS, SAID, Limit, Together, dense, find
from tests.train.test_parallel import state, wide

# -- The optimiser ---------------------------------------------------------------------------------


@contextmanager
def failing(optim: str, monkeypatch: pytest.MonkeyPatch, times: int, after: int) -> Iterator[None]:
    """The fused kernel fails `times` times, after `after` calls that go well."""
    name = {"adam": "_fused_adamw_", "sgd": "_fused_sgd_"}[optim]
    real, calls = getattr(torch, name), [0]

    def kernel(*arguments: Any, **options: Any) -> None:
        calls[0] += 1
        if after < calls[0] <= after + times:
            raise torch.OutOfMemoryError(SAID)
        real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, name, kernel)
        yield


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("optim", ["adam", "sgd"])
def test_an_optimiser_that_fails_goes_on_where_it_stopped(
    optim: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups, of which the first may have moved already."""

    def run(times: int) -> dict[str, Tensor]:
        task = dense()
        task.step_factors = {"model.0": 0.5}
        options = Optim(optim, lr=0.05, momentum=0.9 if optim == "sgd" else 0.0, weight_decay=0.1,
                        clip_norm=0.1)  # fmt: skip
        with failing(optim, monkeypatch, times, after):
            fit(task, wide(classes(60)), steps=4, optim=options, train=Train(batch_size=ROWS), seed=3)
        return state(task)

    wanted, found = run(0), run(1)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_an_optimiser_that_fails_again_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    task = dense()
    with (
        failing("adam", monkeypatch, 99, 2),
        pytest.raises(
            OutOfMemory, match="out of memory beside the gradient of a step: CUDA out of"
        ) as caught,
    ):
        fit(task, wide(classes(60)), steps=4, train=Train(batch_size=ROWS), seed=3)
    assert caught.value.exit_code == 1
    assert "--optim.name sgd" in caught.value.fix


def test_the_optimisers_count_is_that_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Optimiser] = []
    made = "quire.train.player.make_optimiser"
    monkeypatch.setattr(made, lambda *given: seen.append(make_optimiser(*given)) or seen[-1])
    with failing("adam", monkeypatch, 1, 1):
        fit(dense(), wide(classes(60)), steps=4, train=Train(batch_size=ROWS), seed=3)
    assert [count.item() for count in seen[0].counts()] == [4]


# -- Where it ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "rows", "asked", "said"),
    [
        (lambda: dense(), 0, 1, "with one row at a time"),
        (lambda: dense(norm=True), 1, 1, "with 2 rows, which batch norms need, at a time"),
        (lambda: Together(), 10, 2, "with all 20 rows at once"),
    ],
    ids=["one row", "batch norm", "compared"],
)
def test_a_clear_stop_with_what_was_saved_intact(
    made: Function[[], Task], rows: int, asked: int, said: str, tmp_path: Path
) -> None:
    data, train = wide(classes(60)), Train(batch_size=ROWS, checkpoint_every=1)
    store, task = folder(tmp_path / "run"), made()
    Limit(find(task), rows, first=3 * asked)
    with pytest.raises(OutOfMemory) as caught:
        fit(task, data, steps=9, train=train, seed=3, store=store)
    store.close()
    assert caught.value.exit_code == 1
    assert f"step 3: out of memory {said}: {SAID}" in caught.value.got
    assert "what was saved is whole" in caught.value.expected
    assert caught.value.fix
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").step == 3
    store, task = folder(tmp_path / "run", resume=True), made()
    fit(task, data, steps=9, train=train, seed=3, store=store)
    store.close()
    wanted = made()
    fit(wanted, data, steps=9, train=train, seed=3)
    for name, value in state(wanted).items():
        torch.testing.assert_close(state(task)[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_a_run_remembers_and_tells_of_it(tmp_path: Path) -> None:
    data, validation, train = wide(classes(60)), wide(classes(20, 2)), Train(batch_size=ROWS)
    store, task = folder(tmp_path / "run"), dense()
    first = Limit(find(task), 6)
    fit(task, data, validation, steps=6, train=train, seed=3, store=store)
    store.close()
    store, task = folder(tmp_path / "run", resume=True), dense()
    again = Limit(find(task), 6)
    fit(task, data, validation, steps=9, train=train, seed=3, store=store)
    store.close()
    assert (first.failures, again.failures) == (2, 0)
    assert first.most == again.most == 5
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("out of memory in step 0: CUDA out of memory") == 1
    assert "computed in 4 parts from here on, of 5 rows at most; the step is that of the whole batch" in log
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["values"].get("micro_batches") for r in lines if r["split"] == "train"] == [4.0, 4.0, 4.0]
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").documents["progress"]["parts"] == {
        "parts": 4,
        "processes": 1,
    }


def test_a_person_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    task = dense(norm=True)
    Limit(find(task), 6)
    fit(task, wide(classes(60)), steps=6, train=Train(batch_size=ROWS), progress=Plain())
    said = capsys.readouterr().err
    assert said.count("note: out of memory in step 0") == said.count("note: ") == 1
    assert "though batch norms have the moments of a part" in said


# -- Judging ---------------------------------------------------------------------------------------


class Narrow(Supervised):
    """Judges so many rows at most."""

    rows = 7

    def judge(self, batch: Any) -> Any:
        if len(batch) > self.rows:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
            )
        return super().judge(batch)


def test_judging_in_smaller_parts_gives_the_same() -> None:
    wanted = evaluate(dense(), wide(classes(50)))
    torch.manual_seed(0)
    narrow = Narrow(dense().model, Categorical(3))
    assert evaluate(narrow, wide(classes(50))) == pytest.approx(wanted, rel=1e-12)
    assert evaluate(narrow, wide(classes(50)), 20) == pytest.approx(wanted, rel=1e-12)
    narrow.rows = 0
    with pytest.raises(OutOfMemory, match="out of memory in judging with one row at a time"):
        evaluate(narrow, wide(classes(50)))


# -- What counts -----------------------------------------------------------------------------------


def test_what_is_a_want_of_memory() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**50)
    assert is_out_of_memory(real.value)
    with pytest.raises(MemoryError) as numpy:
        np.empty(2**50)
    assert is_out_of_memory(numpy.value)
    assert is_out_of_memory(torch.OutOfMemoryError(SAID))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    wrapped = ValueError("compilation failed")
    wrapped.__cause__ = MemoryError()
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(QuireError("out of memory"))


def test_other_errors_are_left_alone() -> None:
    task = dense()
    find(task).register_forward_hook(lambda *given: (_ for _ in ()).throw(KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        fit(task, wide(classes(60)), steps=2)


# -- For real --------------------------------------------------------------------------------------

REAL = """
import resource, torch
from torch import nn
from quire.data.batch import TensorData
from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import fit
from tests.train.examples import classes

torch.set_num_threads(1)
data = classes(256)
data = TensorData({"inputs": data.inputs.double(), "target": data.target})
for limited in (False, True):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 50_000), nn.Tanh(), nn.Linear(50_000, 3))
    task = Supervised(layers, Categorical(3)).double()
    if limited:
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 2**27, now + 2**27))
    optim = Optim("sgd", lr=1e-4)
    done = fit(task, data, steps=1, optim=optim, train=Train(batch_size=256), train_measures=False)
    values = done.history[-1]["values"]
    print(values.get("micro_batches", 1), values["loss"], *(p.norm().item() for p in task.parameters()))
"""


@pytest.mark.slow
def test_the_memory_of_this_machine_for_real() -> None:
    """128 MiB more than there is already; 256 rows of a layer of 50,000 units take 98 MiB, several times."""
    run = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    (whole, *wanted), (parts, *found) = ([float(w) for w in line.split()] for line in run.stdout.splitlines())
    assert whole == 1
    assert parts >= 2
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True])
def test_the_memory_of_a_gpu_for_real(capture: bool) -> None:
    def run(fraction: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(5, 100_000), nn.Tanh(), nn.Linear(100_000, 3))
        task = Supervised(layers, Categorical(3)).double()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(fraction)
        try:
            done = fit(task, wide(classes(2048)), steps=8, optim=Optim("sgd", lr=1e-4), device="cuda",
                       train=Train(batch_size=1024, capture=capture), train_measures=False)  # fmt: skip
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return state(task), done.history[-1]["values"]

    torch.cuda.init()
    whole = torch.cuda.get_device_properties(0).total_memory
    wanted, values = run(1.0)
    found, told = run(2 * 2**30 / whole)
    assert told.pop("micro_batches") >= 2
    assert told == pytest.approx(values, rel=1e-9)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
