"""Descent in two processes learns what one learns: rows, weights, guard, stops and checkpoints."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable as Function
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn

from quire.data.batch import Batch, TensorData
from quire.errors import InputError, NonFiniteError
from quire.options import Noise, Optim, Schedule, Train
from quire.tasks import KMeansTask
from quire.tasks.adversarial import Adversarial
from quire.train import Callback, Interrupted, Task, evaluate, fit, fit_statistics
from quire.train.descent import Descent
from quire.train.peers import Peers
from quire.train.processes import all_do, alone, first_does, from_all, give_to_all, processes
from tests.tasks.playing import circle, players
from tests.tasks.test_language import recurrent, text
from tests.train.examples import classes, classifier, folder, numbers, regressor
from tests.train.together import once, together

pytestmark = pytest.mark.slow

Found = tuple[dict[str, Tensor], dict[str, Any]]
SCENARIOS: dict[str, Function[[Path], Found]] = {}
HISTORY = ("step", "split", "values")


def scenario(work: Function[[Path], Found]) -> Function[[Path], Found]:
    SCENARIOS[work.__name__] = work
    return work


def wide(data: TensorData) -> TensorData:
    return TensorData({n: v.double() if v.is_floating_point() else v for n, v in data.fields.items()})


def told(fitted: Any) -> dict[str, Any]:
    history = [{key: record[key] for key in HISTORY} for record in fitted.history]
    return {"steps": fitted.steps, "stopped": fitted.stopped, "best": fitted.best_step, "history": history}


def state(task: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone().contiguous() for name, value in task.state_dict().items()}


# -- What one process and two do -------------------------------------------------------------------


@scenario
def explicit(_: Path) -> Found:
    """Uneven shares, the explicit equations, clipping, both penalties, a schedule, the average of weights."""
    task = classifier().double()
    optim = Optim("sgd", lr=0.1, momentum=0.5, clip_norm=0.3, l1=1e-3, weight_decay=0.01, decay="l2",
                  schedule=Schedule("cosine", warmup=3))  # fmt: skip
    train = Train(batch_size=20, average=0.8, patience=3)
    done = fit(task, wide(classes(91)), wide(classes(33, 2)), epochs=5, optim=optim, train=train, seed=3)
    return state(task), told(done)


@scenario
def ignored(_: Path) -> Found:
    """Targets that do not count, most of them in some shares; micro-batches; the last batch has one row, so
    that one of two processes has none."""
    data = classes(41)
    target = data.target.clone()
    target[torch.arange(41) % 7 < 5] = -100
    task = classifier().double()
    rows = wide(TensorData({"inputs": data.inputs, "target": target}))
    train = Train(batch_size=10, micro_batches=3)
    done = fit(task, rows, wide(classes(9, 2)), epochs=4, optim=Optim(lr=0.05), train=train, seed=3)
    return state(task), told(done)


@scenario
def single(_: Path) -> Found:
    """Single precision."""
    task = regressor(hidden=(8,))
    done = fit(task, numbers(50), numbers(20, 2), epochs=4, optim=Optim("sgd", lr=0.05), seed=1,
               train=Train(batch_size=16))  # fmt: skip
    return state(task), told(done)


@scenario
def norms(_: Path) -> Found:
    """Batch norm has the moments of the whole batch, also where the last three rows are one process's."""
    task = classifier(norm="batch").double()
    done = fit(task, wide(classes(43)), wide(classes(20, 2)), epochs=4, optim=Optim("sgd", lr=0.1), seed=3,
               train=Train(batch_size=20))  # fmt: skip
    return state(task), told(done)


class Pairs(Task):
    """Rows of a batch are told from each other: −log softmax of each row's likeness to itself, damaged."""

    couples_samples = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(5, 4).double()

    def weigh(self, batch: Batch) -> dict[str, float]:
        return {"pairs": float(len(batch))}

    def represent(self, batch: Batch) -> Tensor:
        return torch.stack([self.net(batch.inputs), self.net(batch.inputs.round())], 1)

    def coupled_terms(self, representations: Tensor, batch: Batch) -> dict[str, Tensor]:
        one, other = representations.unbind(1)
        likeness = one @ other.T - (batch.target[:, None] == batch.target) * 0.3
        same = torch.arange(len(one), device=one.device)
        return {"pairs": nn.functional.cross_entropy(likeness, same, reduction="sum")}

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return self.coupled_terms(self.represent(batch), batch)

    def predict(self, inputs: Tensor, mode: str = "mode", **options: Any) -> dict[str, Tensor]:
        return {}

    def spec(self) -> dict[str, Any]:
        return {"task": "pairs"}

    @classmethod
    def from_spec(cls, spec: Any) -> Pairs:
        return cls()


@scenario
def pairs(_: Path) -> Found:
    task = Pairs()
    done = fit(task, wide(classes(43)), wide(classes(10, 2)), epochs=3, optim=Optim(lr=0.02), seed=2,
               train=Train(batch_size=20))  # fmt: skip
    return state(task), told(done)


@scenario
def carried(_: Path) -> Found:
    task = recurrent()
    done = fit(task, text(), epochs=2, optim=Optim("sgd", lr=0.5), train=Train(batch_size=5, carry=True))
    return state(task), told(done)


@scenario
def judged(_: Path) -> Found:
    """Batches dealt out: six of seven rows and a rest; and fewer batches than processes."""
    task, found = classifier().double(), {}
    for rows in (45, 3):
        found |= {f"{rows} {name}": value for name, value in
                  evaluate(task, wide(classes(rows)), 7, together=True).items()}  # fmt: skip
    return {}, found


SAME = tuple(SCENARIOS)


# -- What only two do ------------------------------------------------------------------------------


@scenario
def chance(_: Path) -> Found:
    """Dropout and noise are drawn by each process for itself; weights stay alike."""
    task = classifier(dropout=0.5, norm="batch")
    seen: list[float] = []

    class Draw(Callback):
        def on_step(self, descent: Descent, step: int) -> None:
            seen.append(torch.rand(()).item())

    fit(task, classes(43), epochs=2, train=Train(batch_size=20, noise=Noise(inputs=0.1, weights=0.1)), seed=4,
        callbacks=[Draw()])  # fmt: skip
    return state(task), {"drawn": seen}


@scenario
def adversaries(_: Path) -> Found:
    """Two players with batch norms; three rows are left in the end."""
    task: Adversarial = players(norm="batch")
    done = fit(task, circle(43), circle(20), epochs=2, train=Train(batch_size=20), seed=4)
    return state(task), told(done)


@scenario
def not_finite(_: Path) -> Found:
    """One bad row, which one process alone has: 8 of the first batch's rows in order, of which it has 4–7."""
    data = classes(16)
    data.inputs[5, 1] = float("nan")
    task = classifier(norm="batch")
    before = state(task)
    try:
        fit(task, data, epochs=1, train=Train(batch_size=8, shuffle=False))
    except NonFiniteError as error:
        return before | {f"after {n}": v for n, v in state(task).items()}, {"error": str(error)}
    raise AssertionError("trained on NaN")


class Interrupting(Callback):
    """Sends a signal to one of the processes, after a step."""

    def __init__(self, number: int, step: int, which: int) -> None:
        self.number, self.step, self.which = number, step, which

    def on_step(self, descent: Descent, step: int) -> None:
        if step == self.step and processes()[0] == self.number:
            os.kill(os.getpid(), self.which)


def kept(path: Path, *callbacks: Callback, dropout: float = 0.3, train: Train | None = None) -> Found:
    """A run with a store, new or gone on with."""
    first = processes()[0] == 0
    store = folder(path, resume=path.exists()) if first else None
    task = classifier(dropout=dropout, norm="batch")
    try:
        done = fit(task, classes(43), classes(20, 2), epochs=6, seed=4, callbacks=callbacks, store=store,
                   optim=Optim("sgd", lr=0.1, momentum=0.9),
                   train=train or Train(batch_size=20, checkpoint_every=4))  # fmt: skip
    except Interrupted as stop:
        return {}, {"stopped": str(stop), "code": stop.exit_code}
    finally:
        if store:
            store.close()
    return state(task), told(done)


@scenario
def interrupted(path: Path) -> Found:
    whole, _ = kept(path / "whole")
    _, stop = kept(path / "run", Interrupting(1, 7, signal.SIGTERM))
    _, again = kept(path / "run", Interrupting(0, 10, signal.SIGINT))
    resumed, _ = kept(path / "run")
    different = {name for name, value in whole.items() if not torch.equal(value, resumed[name])}
    return resumed, {"term": stop, "int": again, "different": sorted(different)}


@scenario
def begun(path: Path) -> Found:
    """A run that another number of processes will go on with."""
    _, stop = kept(path / "begun", Interrupting(processes()[1] - 1, 7, signal.SIGTERM), dropout=0.0)
    return {}, stop


@scenario
def ended(_: Path) -> Found:
    class End(Callback):
        def on_step(self, descent: Descent, step: int) -> None:
            if step == 3 and processes()[0] == 1:
                descent.stop()

    return {}, told(fit(classifier(), classes(43), epochs=9, train=Train(batch_size=20), callbacks=[End()]))


@scenario
def swept(path: Path) -> Found:
    """A signal to one process of a run by statistics."""

    class Sweeping(KMeansTask):
        def statistics(self, batch: Batch) -> dict[str, Tensor]:
            if processes()[0] == 1 and not hasattr(self, "sent"):
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)
            return super().statistics(batch)

    store = folder(path / "swept") if processes()[0] == 0 else None
    try:
        fit_statistics(Sweeping(5, 4, tol=0.0), classes(90), sweeps=50, store=store)
    except Interrupted as stop:
        return {}, {"stopped": str(stop), "code": stop.exit_code}
    raise AssertionError("not interrupted")


@scenario
def given(_: Path) -> Found:
    """Tensors in one piece but with a stride of their own, turned round, of another type, empty."""
    whole = torch.arange(72.0).add(processes()[0])
    tensors = {
        "odd": whole.as_strided((8, 1, 3, 3), (9, 1, 3, 1)),
        "turned": whole.clone().view(8, 9).t(),
        "flags": torch.arange(5) % 2 == processes()[0],
        "empty": torch.empty(0, 3),
    }
    give_to_all(tensors.values(), torch.device("cpu"))
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, {}


class Alone(Pairs):
    represent = Task.represent


@scenario
def refused(_: Path) -> Found:
    found = {}

    def attempt(name: str, work: Function[[], object]) -> None:
        try:
            work()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    attempt("coupled", lambda: fit(Alone(), classes(), epochs=1))
    attempt("unlike", lambda: fit(classifier(), classes(30 + processes()[0]), epochs=1))
    attempt("streams", lambda: fit(recurrent(), text(), epochs=1, train=Train(batch_size=3, carry=True)))

    def fail() -> None:
        if processes()[0] == 1:
            raise ValueError("only here")

    def first_fails() -> None:
        raise InputError("the first's", fix="nothing")

    attempt("one of all", lambda: all_do(fail))
    attempt("first", lambda: first_does(first_fails))
    found["result"] = str(first_does(lambda: processes()))
    with alone():
        fit(classifier(), classes(), epochs=1)
    return {}, found


def main(path: Path, number: int, count: int, names: list[str]) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=number, world_size=count)
    for name in names or [name for name in SCENARIOS if name not in ("resumed", "on_gpu")]:
        tensors, facts = SCENARIOS[name](path)
        save_file(tensors, path / f"{name}-{number}.safetensors")
        (path / f"{name}-{number}.json").write_text(json.dumps(facts))
    assert len(from_all(number)) == count
    distributed.destroy_process_group()


def start(path: Path, count: int, *names: str) -> None:
    together("tests.train.test_parallel", path, count, count, names)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "parallel", lambda path: start(path, 2))


def found(path: Path, name: str, number: int) -> Found:
    facts = json.loads((path / f"{name}-{number}.json").read_text())
    return load_file(path / f"{name}-{number}.safetensors"), facts


def assert_agreed(path: Path, name: str) -> None:
    """Both processes ended with the same bits, and told the same where chance has no part in it."""
    (first, told), (second, told_too) = (found(path, name, number) for number in range(2))
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    if name != "chance":
        assert told == told_too


def assert_alike(first: Any, second: Any, relative: float) -> None:
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_alike(first[key], second[key], relative)
    elif isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_alike(one, other, relative)
    else:
        assert first == (pytest.approx(second, rel=relative) if isinstance(second, float) else second)


@scenario
def on_gpu(path: Path) -> Found:
    """Two processes may share one GPU where gloo adds for them."""
    task = classifier(norm="batch")
    optim = Optim("sgd", lr=0.1, momentum=0.5, clip_norm=1.0)
    train = Train(batch_size=20, micro_batches=1, capture=False)
    done = fit(task, classes(43), classes(20, 2), epochs=4, optim=optim, train=train, seed=3, device="cuda")
    bad = classes(16)
    bad.inputs[5, 1] = float("nan")
    facts = told(done)
    try:
        fit(classifier(), bad, epochs=1, train=Train(batch_size=8, shuffle=False), device="cuda")
    except NonFiniteError as error:
        facts["error"] = str(error)
    if processes()[1] > 1:
        store = folder(path / "gpu") if processes()[0] == 0 else None
        try:
            fit(classifier(), classes(43), epochs=40, train=Train(batch_size=20), device="cuda", store=store,
                callbacks=[Interrupting(1, 7, signal.SIGTERM)])  # fmt: skip
        except Interrupted as stop:
            facts["stopped"] = str(stop)
    return {name: value.cpu() for name, value in state(task).items()}, facts


# -- Tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAME)
def test_two_learn_what_one_learns(two: Path, name: str, tmp_path: Path) -> None:
    wanted, facts = SCENARIOS[name](tmp_path)
    relative = 2e-5 if name in ("single", "carried") else 1e-9
    for number in range(2):
        tensors, told = found(two, name, number)
        for key, value in wanted.items():
            torch.testing.assert_close(
                tensors[key], value, rtol=relative, atol=relative / 100, msg=f"{name} {key}"
            )
        assert_alike(told, json.loads(json.dumps(facts)), relative)


@pytest.mark.parametrize("name", [*SAME, "chance", "adversaries"])
def test_processes_agree_to_the_bit(two: Path, name: str) -> None:
    assert_agreed(two, name)


def test_all_have_the_tensors_of_the_first_however_they_lie(two: Path) -> None:
    for number in range(2):
        tensors, _ = found(two, "given", number)
        assert tensors["odd"].flatten().tolist() == list(range(72))
        assert torch.equal(tensors["turned"], torch.arange(72.0).view(8, 9).t())
        assert tensors["flags"].tolist() == [True, False, True, False, True]
        assert tensors["empty"].shape == (0, 3)


def test_each_process_draws_its_own_numbers(two: Path) -> None:
    first, second = (found(two, "chance", number)[1]["drawn"] for number in range(2))
    assert len(first) == len(second) == 6
    assert not set(first) & set(second)


def test_a_bad_row_of_one_process_stops_all_with_its_name(two: Path) -> None:
    for number in range(2):
        tensors, facts = found(two, "not_finite", number)
        assert facts["error"].startswith("process 1 of 2, step 0: the data has non-finite values in 'inputs'")
        assert "caused by rows 5 of the training data" in facts["error"]
        weights = [key for key in tensors if not key.startswith("after ") and "running" not in key]
        assert all(
            torch.equal(tensors[key], tensors[f"after {key}"]) for key in weights if "tracked" not in key
        )


def test_a_signal_to_one_process_stops_all_and_the_run_goes_on_to_the_same_bits(two: Path) -> None:
    for number in range(2):
        _, facts = found(two, "interrupted", number)
        assert facts["term"]["code"] == 143
        assert facts["int"]["code"] == 130
        # The step in which the others hear of it is still taken.
        assert facts["term"]["stopped"].startswith("interrupted after step 8 of 18")
        assert facts["int"]["stopped"].startswith("interrupted after step 11 of 18")
        assert facts["different"] == []


def test_a_run_of_two_goes_on_in_one_and_a_run_of_one_in_two(two: Path, tmp_path: Path) -> None:
    wanted, facts = kept(tmp_path / "whole", dropout=0.0)
    _, stop = kept(tmp_path / "begun", Interrupting(0, 7, signal.SIGTERM), dropout=0.0)
    assert stop["code"] == 143
    for alone_first, where in ((True, tmp_path), (False, two)):
        tensors, told = _go_on(where / "begun", tmp_path / f"{alone_first}", 2 if alone_first else 1)
        for key, value in wanted.items():
            torch.testing.assert_close(tensors[key], value, rtol=1e-4, atol=1e-6, msg=key)
        assert_alike(told, json.loads(json.dumps(facts)), 1e-4)


def _go_on(run: Path, path: Path, count: int) -> Found:
    if count == 1:
        return kept(run, dropout=0.0)
    path.mkdir()
    run.rename(path / "run")
    start(path, count, "resumed")
    return found(path, "resumed", 0)


@scenario
def resumed(path: Path) -> Found:
    return kept(path / "run", dropout=0.0)


def test_one_process_may_ask_for_an_end(two: Path) -> None:
    for number in range(2):
        facts = found(two, "ended", number)[1]
        assert (facts["steps"], facts["stopped"]) == (4, "early")


def test_a_signal_to_one_process_ends_the_sweeps_of_all(two: Path) -> None:
    for number in range(2):
        facts = found(two, "swept", number)[1]
        assert facts["code"] == 143
        assert facts["stopped"].startswith("interrupted after sweep ")
    assert (two / "swept" / "checkpoints").is_dir()


def test_what_cannot_be_done_together_is_refused_by_all(two: Path) -> None:
    for number in range(2):
        facts = found(two, "refused", number)[1]
        assert "2 processes with a loss that compares the samples of a batch" in facts["coupled"]
        assert "processes with rows, batch size and seed of (30, 30, 0) and (31, 31, 0)" in facts["unlike"]
        assert "--train.carry with 3 streams for 2 processes" in facts["streams"]
        assert facts["first"] == "InputError: the first's\n  fix: nothing"
        assert facts["result"] == "(0, 1)"
    assert "process 1: ValueError: only here" in found(two, "refused", 0)[1]["one of all"]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_shares_are_all_rows_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, order = classes(29), torch.randperm(29)
    for batch_size in (1, 2, 3, 5, 8, 29):
        parts: list[list[Tensor]] = []
        for number in range(count):
            monkeypatch.setattr("quire.train.peers.processes", lambda number=number: (number, count))
            peers = Peers(classifier(), torch.device("cpu"))
            mine = []
            for batch in peers.batches(data, order, batch_size, start=1):
                assert len(batch) >= min(2, batch_size, 29 % batch_size or batch_size)
                mine.append(batch.rows[:0] if peers.idle else batch.rows)
            parts.append(mine)
        steps = [torch.cat(rows) for rows in zip(*parts, strict=True)]
        wanted = order.split(batch_size)[1:]
        assert len(steps) == len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(steps, wanted, strict=True))


@pytest.mark.gpu
def test_two_processes_on_a_gpu_learn_what_one_learns(tmp_path: Path) -> None:
    start(tmp_path, 2, "on_gpu")
    wanted, facts = on_gpu(tmp_path / "one")
    for number in range(2):
        tensors, told = found(tmp_path, "on_gpu", number)
        for key, value in wanted.items():
            torch.testing.assert_close(tensors[key], value, rtol=1e-3, atol=1e-5, msg=key)
        assert_alike(told["history"], json.loads(json.dumps(facts["history"])), 1e-3)
        assert told["error"].startswith("process 1 of 2, step 0: the data has non-finite values in 'inputs'")
        # The word travels with the weights of the next step, and is read two steps later.
        assert told["stopped"].startswith("interrupted after step 10 of 120")
