"""Memory that runs out in some of two processes: both take smaller parts, and nobody waits for the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from quire.options import Optim, Train
from quire.train import evaluate, fit
from quire.train.checkpoints import newest_checkpoint
from quire.train.memory import OutOfMemory
from quire.train.processes import from_all, processes
from tests.tasks.playing import circle, players
from tests.train.examples import classes, folder
from tests.train.test_memory import KINDS, ROWS, Limit, dense, find
from tests.train.test_memory_ends import Narrow
from tests.train.test_parallel import state, wide
from tests.train.together import Found, once, read, together, write

pytestmark = pytest.mark.slow

WHO = {"first": (0,), "second": (1,), "both": (0, 1)}
CASES = [("first", "forward"), ("second", "backward"), ("both", "forward"), ("both", "backward")]
PLAIN = [kind for kind in KINDS if kind != "noisy_weights"]
"""Kinds that draw nothing which each process would draw for itself, but for a GAN's noise."""
OPTIM = Optim("sgd", lr=0.1, momentum=0.5, clip_norm=0.5)


def short(kind: str, who: tuple[int, ...], where: str, first: int = 0) -> Found:
    """Five steps; processes `who` have memory for three rows."""
    task, data, train, layer = KINDS[kind]()
    limit = Limit(layer, 3 if processes()[0] in who else 1000, where, first)
    done = fit(task, data, steps=5, optim=OPTIM, train=train, seed=3, train_measures=False)
    parts = done.history[-1]["values"].get("micro_batches", 1)
    return state(task), {
        "failures": limit.failures,
        "parts": parts,
        "loss": done.history[-1]["values"]["loss"],
    }


def normed(who: tuple[int, ...], where: str, micro_batches: int, gan: bool) -> Found:
    """Batch norms add up over the processes in the middle of a pass. The last batch has four rows."""
    task: Any = players(norm="batch").double() if gan else dense(norm=True, dropout=0.3)
    data = wide(circle(44) if gan else classes(44))
    rows = 10 if gan else 5  # a discriminator sees as many samples beside the data
    layer = find(task.discriminator if gan else task)
    limit = Limit(layer, rows if processes()[0] in who else 1000, where)
    train = Train(batch_size=ROWS, micro_batches=micro_batches)
    done = fit(task, data, steps=5, optim=OPTIM, train=train, seed=3, train_measures=False)
    return state(task), {"failures": limit.failures, "loss": done.history[-1]["values"]["loss"]}


def stopped(path: Path) -> Found:
    """One of the two has no memory for a single row, from the fourth step on."""
    store = folder(path / "run") if processes()[0] == 0 else None
    task = dense()
    if processes()[0] == 1:
        Limit(find(task), 0, first=3)
    try:
        train = Train(batch_size=ROWS, checkpoint_every=1)
        fit(task, wide(classes(60)), steps=9, train=train, seed=3, store=store)
    except OutOfMemory as error:
        return {}, {"error": str(error), "elsewhere": error.said_elsewhere}  # type: ignore[attr-defined]
    finally:
        if store:
            store.close()
    raise AssertionError("went on")


def judged(_: Path) -> Found:
    task = Narrow(dense().model, dense().heads)
    task.rows = 7 if processes()[0] else 1000
    return {}, evaluate(task, wide(classes(60)), 20, together=True)


def main(path: Path, number: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=number, world_size=2)
    found: dict[str, Found] = {}
    for kind in PLAIN:
        found[kind] = short(kind, (), "forward")
        for name, where in CASES:
            found[f"{kind} {name} {where}"] = short(kind, WHO[name], where, first=0 if name == "both" else 3)
    for gan in (False, True):
        found[f"norms {gan}"] = normed((), "forward", 2, gan)
        for name, where in CASES:
            found[f"norms {gan} {name} {where}"] = normed(WHO[name], where, 1, gan)
    found["stopped"], found["judged"] = stopped(path), judged(path)
    write(path, found, number)
    assert len(from_all(number)) == 2
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(
        tmp_path_factory,
        "memory_parallel",
        lambda path: together("tests.train.test_memory_parallel", path, 2),
    )


@pytest.mark.parametrize(("who", "where"), CASES)
@pytest.mark.parametrize("kind", PLAIN)
def test_both_take_smaller_parts_and_the_same_step(two: Path, kind: str, who: str, where: str) -> None:
    wanted, facts = read(two, kind, 0)
    alone, _ = short(kind, (), "forward")
    for number in range(2):
        found, told = read(two, f"{kind} {who} {where}", number)
        assert (told["failures"] > 0) == (number in WHO[who])
        assert told["parts"] > facts["parts"] == 1
        assert told["loss"] == pytest.approx(facts["loss"], rel=1e-11)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)
            if kind != "two_players":  # whose noise is each process's own
                torch.testing.assert_close(found[name], alone[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(("who", "where"), CASES)
@pytest.mark.parametrize("gan", [False, True])
def test_batch_norms_wait_for_nobody_and_forget_the_try(two: Path, gan: bool, who: str, where: str) -> None:
    """To the bit as if both had computed in two parts from the beginning."""
    for number in range(2):
        wanted, facts = read(two, f"norms {gan}", number)
        found, told = read(two, f"norms {gan} {who} {where}", number)
        assert told["failures"] == (number in WHO[who])
        assert told["loss"] == facts["loss"]
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_stop_of_one_is_a_stop_of_all_and_names_it(two: Path) -> None:
    for number in range(2):
        _, facts = read(two, "stopped", number)
        assert facts["error"].startswith("step 3, process 1 of 2: out of memory with one row at a time")
        assert facts["elsewhere"] == (number == 0)
    assert newest_checkpoint(two / "run" / "checkpoints").step == 3


def test_judging_needs_no_agreement(two: Path) -> None:
    wanted = evaluate(dense(), wide(classes(60)), 20)
    for number in range(2):
        assert read(two, "judged", number)[1] == pytest.approx(wanted, rel=1e-12)
