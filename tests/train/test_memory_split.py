"""Memory that runs out in some of two processes that have split the model between them: both give the step up
at the same place and take it again in smaller parts."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import fit
from quire.train.checkpoints import newest_checkpoint
from quire.train.memory import OutOfMemory
from quire.train.processes import from_all, processes
from quire.train.step import Stepper
from tests.train.examples import classes, folder
from tests.train.test_memory import KINDS, ROWS, SAID, Limit, dense, find
from tests.train.test_memory_ends import failing
from tests.train.test_parallel import state, wide
from tests.train.test_shard import language, sharding, tokens
from tests.train.together import Found, once, read, together, write

pytestmark = pytest.mark.slow

WHO = {"first": (0,), "second": (1,), "both": (0, 1)}
CASES = [(who, where) for who in WHO for where in ("forward", "backward")]
LATER = [("first", "backward"), ("second", "forward")]
OPTIM = Optim("sgd", lr=0.1, momentum=0.5, clip_norm=0.5)


def gpt(checkpoint: bool) -> Any:
    """Memory runs out in the second of three blocks, while the third is on its way on the way back."""
    task = language(checkpoint).double()
    return task, tokens(50), Train(batch_size=ROWS), task.model.transformer.h[1].mlp


def normed() -> Any:
    """Batch norms add up over the processes besides, and dropout draws."""
    task = dense(norm=True, dropout=0.3)
    return task, wide(classes(50)), Train(batch_size=ROWS), find(task)


def first_layer() -> Any:
    """Whose want of memory on the way back comes when all else has been added up."""
    task = dense()
    return task, wide(classes(50)), Train(batch_size=ROWS), task.model[0]


MADE: dict[str, Any] = {
    **{kind: KINDS[kind] for kind in ("one_player", "two_players", "compared", "carried")},
    "gpt": lambda: gpt(False),
    "gpt_checkpointed": lambda: gpt(True),
    "normed": normed,
    "first_layer": first_layer,
}
FEW = ("one_player", "gpt", "normed")
"""Kinds that stand for the others where time is short."""
KIND = [pytest.param(kind, marks=[] if kind in FEW else pytest.mark.long) for kind in MADE]


def learn(kind: str, who: tuple[int, ...], where: str, parts: int, first: int = 0) -> Found:
    """Five steps from `parts` parts on; processes `who` have memory for half of the rows they have."""
    task, data, train, layer = MADE[kind]()
    rows = -(-len(task.players) * train.batch_size // 4)  # a discriminator sees samples beside the data
    limit = Limit(layer, rows if processes()[0] in who else 1000, where, first)
    train = Train(batch_size=train.batch_size, micro_batches=parts, average=train.average, carry=train.carry)
    done = fit(task, data, steps=5, optim=OPTIM, train=train, seed=3, train_measures=False, shard=True)
    values = done.history[-1]["values"]
    facts = {"failures": limit.failures, "parts": values.pop("micro_batches", parts), "values": values}
    return state(task), facts


class Allocations:
    """Of what FSDP puts together or adds up in a step; the one with number `bad` fails, in process `who`."""

    def __init__(self, bad: int = -1, who: int = -1) -> None:
        self.bad, self.here, self.seen, self.stepping = bad, processes()[0] == who, 0, False
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> Allocations:
        allocate, step = DefaultAllocMixin.allocate, Stepper.step

        def failing(comm: Any, *given: Any, **options: Any) -> Tensor:
            self.seen += self.stepping
            if self.stepping and self.here and self.seen - 1 == self.bad:
                raise torch.OutOfMemoryError(SAID)
            return allocate(comm, *given, **options)

        def noted(stepper: Stepper, *given: Any) -> Any:
            self.stepping = True
            found = step(stepper, *given)
            self.stepping = False
            return found

        self.patch.setattr(DefaultAllocMixin, "allocate", failing)
        self.patch.setattr(Stepper, "step", noted)
        return self

    def __exit__(self, *problem: Any) -> None:
        self.patch.undo()


def sent(parts: int, bad: int = -1, who: int = -1) -> Found:
    task = language().double()
    train = Train(batch_size=ROWS, micro_batches=parts)
    with Allocations(bad, who) as allocations:
        fit(task, tokens(50), steps=1, optim=OPTIM, train=train, seed=3, train_measures=False, shard=True)
    return state(task), {"seen": allocations.seen}


def everywhere() -> Found:
    """Each allocation of a step in two parts fails once, in one of the two processes."""
    tensors, _ = sent(4)
    before = sent(2, -1)[1]["seen"]
    in_vain: list[int] = []
    different: list[int] = []
    for bad in range(before):
        found, told = sent(2, bad, bad % 2)
        if told["seen"] == before:
            in_vain.append(bad)
        if not all(torch.equal(found[name], value) for name, value in tensors.items()):
            different.append(bad)
    return {}, {"seen": before, "in vain": in_vain, "different": different}


def optimised(who: tuple[int, ...], times: int) -> Found:
    """The optimiser's kernel fails `times` times, in the third step."""
    task = dense()
    patch = pytest.MonkeyPatch()
    with failing("adam", patch, times if processes()[0] in who else 0, 2 * 4 + 1):
        fit(task, wide(classes(60)), steps=4, train=Train(batch_size=ROWS), seed=3, shard=True)
    return state(task), {}


def stopped(path: Path, who: int) -> Found:
    """One of the two has no memory for a single row, from the fourth step on."""
    store = folder(path / f"run {who}") if processes()[0] == 0 else None
    task = dense()
    if processes()[0] == who:
        Limit(find(task), 0, first=3)
    began = time.monotonic()
    try:
        train = Train(batch_size=ROWS, checkpoint_every=1)
        fit(task, wide(classes(60)), steps=9, train=train, seed=3, store=store, shard=True)
    except OutOfMemory as error:
        facts = {"error": str(error), "elsewhere": error.said_elsewhere}  # type: ignore[attr-defined]
        return {}, {**facts, "seconds": time.monotonic() - began}
    finally:
        if store:
            store.close()
    raise AssertionError("went on")


def of_kinds(kinds: Iterable[str]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for kind in kinds:
        found[f"{kind} whole"] = learn(kind, (), "forward", 1)
        found[f"{kind} parts"] = learn(kind, (), "forward", 2)
        for who, where in CASES:
            found[f"{kind} {who} {where}"] = learn(kind, WHO[who], where, 1)
        for who, where in LATER:
            found[f"{kind} {who} {where} later"] = learn(kind, WHO[who], where, 1, first=3)
    return found


def rest(_: Path) -> dict[str, Found]:
    return of_kinds(kind for kind in MADE if kind not in FEW) | {"everywhere": everywhere()}


def work(path: Path) -> dict[str, Found]:
    found = of_kinds(FEW)
    for who, numbers in {"nobody": (), **WHO}.items():
        found[f"optimiser {who}"] = optimised(numbers, 1)
    for number in range(2):
        found[f"stopped {number}"] = stopped(path, number)
    return found


def for_real(_: Path) -> dict[str, Found]:
    """128 MiB more than there is already, in the second process; its 256 rows of a layer of 50,000 units take
    98 MiB, several times."""
    found: dict[str, Found] = {}
    for name in ("enough", "short"):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(5, 50_000), nn.Tanh(), nn.Linear(50_000, 3))
        task = Supervised(layers, Categorical(3)).double()
        if name == "short" and processes()[0] == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 2**27
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        done = fit(task, wide(classes(512)), steps=1, optim=Optim("sgd", lr=1e-4), shard=True,
                   train=Train(batch_size=512), train_measures=False)  # fmt: skip
        found[name] = state(task), done.history[-1]["values"]
    return found


def main(path: Path, number: int, what: str = "work") -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=number, world_size=2)
    doing = {"work": work, "rest": rest, "for real": for_real}[what]
    write(path, sharding(lambda: doing(path), True), number)
    assert len(from_all(number)) == 2
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(
        tmp_path_factory, "memory_split", lambda path: together("tests.train.test_memory_split", path, 2)
    )


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(
        tmp_path_factory,
        "memory_split_rest",
        lambda path: together("tests.train.test_memory_split", path, 2, "rest"),
    )


@pytest.fixture
def done(request: pytest.FixtureRequest, kind: str) -> Path:
    """Where the runs of a kind are."""
    return request.getfixturevalue("two" if kind in FEW else "others")


@pytest.mark.parametrize(("who", "where"), CASES)
@pytest.mark.parametrize("kind", KIND)
def test_to_the_bit_as_if_parts_had_been_smaller_from_the_beginning(
    done: Path, kind: str, who: str, where: str
) -> None:
    for number in range(2):
        wanted, facts = read(done, f"{kind} parts", number)
        found, told = read(done, f"{kind} {who} {where}", number)
        assert told["failures"] == (number in WHO[who])
        assert (told["parts"], told["values"]) == (2, facts["values"])
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("who", "where"), LATER)
@pytest.mark.parametrize("kind", [kind for kind in KIND if kind.values[0] not in ("normed", "two_players")])
def test_in_the_middle_of_a_run_the_step_is_that_of_the_whole_batch(
    done: Path, kind: str, who: str, where: str
) -> None:
    """Without what is drawn for a part, and moments that are those of a part."""
    for number in range(2):
        wanted, facts = read(done, f"{kind} whole", number)
        found, told = read(done, f"{kind} {who} {where} later", number)
        assert told["failures"] == (number in WHO[who])
        assert (told["parts"], facts["parts"]) == (2, 1)
        assert told["values"] == pytest.approx(facts["values"], rel=1e-11)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("who", WHO)
def test_an_optimiser_that_fails_goes_on_where_it_stopped(two: Path, who: str) -> None:
    for number in range(2):
        wanted, found = (read(two, f"optimiser {name}", number)[0] for name in ("nobody", who))
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("short", [0, 1])
def test_a_stop_of_one_is_a_stop_of_all_and_names_it(two: Path, short: int) -> None:
    for number in range(2):
        facts = read(two, f"stopped {short}", number)[1]
        wanted = f"step 3, process {short} of 2: out of memory with one row at a time: {SAID}"
        assert facts["error"].startswith(wanted)
        assert facts["elsewhere"] == (number != short)
        assert facts["seconds"] < 30
    assert newest_checkpoint(two / f"run {short}" / "checkpoints").step == 3


@pytest.mark.long
def test_wherever_in_a_step_it_runs_out(others: Path) -> None:
    """Three blocks and the rest of the model, put together twice and added up once in each of two parts."""
    for number in range(2):
        facts = read(others, "everywhere", number)[1]
        assert facts["seen"] >= 2 * (3 * 2 + 1 + 2 * 4)
        assert facts["in vain"] == facts["different"] == []


def test_the_memory_of_this_machine_for_real(tmp_path: Path) -> None:
    together("tests.train.test_memory_split", tmp_path, 2, "for real")
    for number in range(2):
        wanted, values = read(tmp_path, "enough", number)
        found, told = read(tmp_path, "short", number)
        assert told.pop("micro_batches") >= 2
        assert told == pytest.approx(values, rel=1e-12)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
