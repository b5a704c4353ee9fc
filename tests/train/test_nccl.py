"""Two processes with a GPU each, which add by NCCL, learn what one learns on a CPU.

NCCL refuses two processes on one GPU of one machine. Those that it takes to be on two machines may share it:
they then talk through sockets, and take turns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable as Function
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import evaluate, fit, fit_statistics
from quire.train.processes import processes
from tests.train import test_memory_parallel as short
from tests.train import test_memory_split as short_split
from tests.train import test_parallel as parallel
from tests.train import test_processes as sums
from tests.train import test_shard as split
from tests.train.examples import classes
from tests.train.test_parallel import assert_alike, state, wide
from tests.train.together import Found, once, read, together, write

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

WHOLE = [name for name in parallel.SAME if name != "judged"]
SHORT = ("one_player", "two_players", "compared")
GIB = 2**30


def on_gpu() -> None:
    """Whatever is learned by other tests' functions is learned on the GPU."""
    for module in (parallel, split, short, short_split):
        module.fit = partial(fit, device="cuda")  # type: ignore[attr-defined]
    sums.fit_statistics = partial(fit_statistics, device="cuda")  # type: ignore[attr-defined]


def meet(path: Path, number: int) -> None:
    os.environ |= {"NCCL_HOSTID": f"machine {number}", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(0)
    backends = "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backends, init_method=f"file://{path}/meet", rank=number, world_size=2)


# -- What both processes do ------------------------------------------------------------------------


def learned(path: Path) -> dict[str, Found]:
    names = (*WHOLE, "chance", "adversaries", "not_finite", "interrupted", "swept")
    found = {name: parallel.SCENARIOS[name](path) for name in names}
    task = parallel.classifier().double().cuda()
    found["judged"] = {}, evaluate(task, wide(classes(45)).to(torch.device("cuda")), 7, together=True)
    return found


def learned_split(path: Path) -> dict[str, Found]:
    names = {name: parallel.SCENARIOS[name] for name in (*WHOLE, "not_finite")}
    found = {name: split.sharding(partial(work, path), True) for name, work in names.items()}
    for name in (*split.OWN, "gpt_mixed", "gpt_kept"):
        found[name] = split.sharding(partial(split.SCENARIOS[name], path, True), True)
    return found


def swept(_: Path) -> dict[str, Found]:
    return {name: (state(sums.learn(name)), {}) for name in sums.TASKS}


def without_memory(_: Path) -> dict[str, Found]:
    """It is said to have run out, in some."""
    found = {}
    for kind in SHORT:
        found[kind] = short.short(kind, (), "forward")
        for who, where in short.CASES:
            found[f"{kind} {who} {where}"] = short.short(kind, short.WHO[who], where)
    for kind in short_split.FEW:
        work = partial(short_split.learn, kind)
        found[f"{kind} split"] = split.sharding(partial(work, (), "forward", 2), True)
        for who, where in short_split.CASES:
            tried = partial(work, short_split.WHO[who], where, 1)
            found[f"{kind} split {who} {where}"] = split.sharding(tried, True)
    return found


def without_memory_for_real(_: Path) -> dict[str, Found]:
    """The second process may take 2 GiB, and half of the batch needs more."""
    found: dict[str, Found] = {}
    whole = torch.cuda.get_device_properties(0).total_memory
    for shard in (False, True):
        for name in ("enough", "short"):
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Linear(5, 100_000), nn.Tanh(), nn.Linear(100_000, 3))
            task = Supervised(layers, Categorical(3)).double()
            torch.cuda.empty_cache()
            if name == "short" and processes()[0] == 1:
                torch.cuda.set_per_process_memory_fraction(2 * GIB / whole)
            done = fit(task, wide(classes(4096)), steps=4, optim=Optim("sgd", lr=1e-4), shard=shard,
                       train=Train(batch_size=2048), train_measures=False, device="cuda")  # fmt: skip
            torch.cuda.set_per_process_memory_fraction(1.0)
            found[f"{name} {shard}"] = state(task), done.history[-1]["values"]
    return found


WORK: dict[str, Function[[Path], dict[str, Found]]] = {
    work.__name__: work for work in (learned, learned_split, swept, without_memory, without_memory_for_real)
}


def main(path: Path, number: int, work: str) -> None:
    torch.set_num_threads(1)
    meet(path, number)
    on_gpu()
    write(path, WORK[work](path), number)
    distributed.destroy_process_group()


# -- Tests -----------------------------------------------------------------------------------------


@pytest.fixture
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both processes have done some work."""
    work = request.param
    return once(
        tmp_path_factory, f"nccl_{work}", lambda path: together("tests.train.test_nccl", path, 2, work)
    )


def after(*works: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("done", works, indirect=True)


def assert_same(done: Path, name: str, wanted: Found, relative: float) -> None:
    for number in range(2):
        tensors, facts = read(done, name, number)
        assert tensors.keys() == wanted[0].keys()
        for key, value in wanted[0].items():
            torch.testing.assert_close(tensors[key], value, rtol=relative, atol=relative / 100, msg=key)
        assert_alike(facts, json.loads(json.dumps(wanted[1])), relative)


def tolerance(name: str) -> float:
    return 1e-3 if name in ("single", "carried") else 1e-9


@after("learned")
@pytest.mark.parametrize("name", WHOLE)
def test_two_learn_what_one_learns(done: Path, name: str, tmp_path: Path) -> None:
    assert_same(done, name, parallel.SCENARIOS[name](tmp_path), tolerance(name))


@after("learned")
def test_what_each_draws_leaves_weights_alike(done: Path) -> None:
    for name in ("chance", "adversaries"):
        (first, _), (second, _) = (read(done, name, number) for number in range(2))
        assert all(torch.equal(value, second[key]) for key, value in first.items()), name


@after("learned")
def test_judged_together(done: Path) -> None:
    wanted = evaluate(parallel.classifier().double(), wide(classes(45)), 7)
    for number in range(2):
        assert read(done, "judged", number)[1] == pytest.approx(wanted, rel=1e-12)


@after("learned")
def test_signals_stop_both(done: Path) -> None:
    for number in range(2):
        facts = read(done, "interrupted", number)[1]
        assert facts["term"]["code"] == 143
        # The word travels with the weights of the next step, and is read two steps later.
        assert facts["term"]["stopped"].startswith("interrupted after step 10 of 18")
        assert read(done, "swept", number)[1]["code"] == 143


@after("learned", "learned_split")
def test_a_bad_row_of_one_process_stops_both_with_its_name(done: Path) -> None:
    for number in range(2):
        tensors, facts = read(done, "not_finite", number)
        assert facts["error"].startswith("process 1 of 2, step 0: the data has non-finite values in 'inputs'")
        assert "caused by rows 5 of the training data" in facts["error"]
        weights = [key for key in tensors if key.endswith((".weight", ".bias")) and key[:6] != "after "]
        assert weights
        assert all(torch.equal(tensors[key], tensors[f"after {key}"]) for key in weights)


@after("learned_split")
@pytest.mark.parametrize("name", [*WHOLE, *split.OWN])
def test_two_that_split_a_model_learn_what_one_learns(done: Path, name: str, tmp_path: Path) -> None:
    own = name in split.OWN
    wanted = split.SCENARIOS[name](tmp_path, False) if own else parallel.SCENARIOS[name](tmp_path)
    assert_same(done, name, wanted, tolerance(name))


@after("learned_split")
def test_a_split_run_is_kept_and_gone_on_with(done: Path) -> None:
    (first, facts), (second, _) = (read(done, "gpt_kept", number) for number in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert facts["different"] == []


@after("swept")
@pytest.mark.parametrize("name", sums.TASKS)
def test_sums_of_two_are_those_of_one(done: Path, name: str) -> None:
    wanted = sums.learn(name).state_dict()
    for number in range(2):
        found, _ = read(done, name, number)
        for key, value in wanted.items():
            if key not in ("layout", "best", "shift"):  # where rows are seen from is a device's own affair
                torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-8, msg=f"{name} {key}")


@after("without_memory")
@pytest.mark.parametrize(("who", "where"), short.CASES)
@pytest.mark.parametrize("kind", SHORT)
def test_both_take_smaller_parts_and_the_same_step(done: Path, kind: str, who: str, where: str) -> None:
    for number in range(2):
        wanted, facts = read(done, kind, number)
        found, told = read(done, f"{kind} {who} {where}", number)
        assert (told["failures"] > 0) == (number in short.WHO[who])
        assert told["parts"] > facts["parts"] == 1
        assert told["loss"] == pytest.approx(facts["loss"], rel=1e-9)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


@after("without_memory")
@pytest.mark.parametrize(("who", "where"), short_split.CASES)
@pytest.mark.parametrize("kind", short_split.FEW)
def test_both_that_split_a_model_take_smaller_parts(done: Path, kind: str, who: str, where: str) -> None:
    for number in range(2):
        wanted, facts = read(done, f"{kind} split", number)
        found, told = read(done, f"{kind} split {who} {where}", number)
        assert told["failures"] == (number in short.WHO[who])
        assert told["parts"] == 2
        assert told["values"] == pytest.approx(facts["values"], rel=1e-9)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


@after("without_memory_for_real")
@pytest.mark.parametrize("shard", [False, True])
def test_the_memory_of_one_gpu_for_real(done: Path, shard: bool) -> None:
    for number in range(2):
        wanted, values = read(done, f"enough {shard}", number)
        found, told = read(done, f"short {shard}", number)
        assert told.pop("micro_batches") >= 2
        assert told == pytest.approx(values, rel=1e-9)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
