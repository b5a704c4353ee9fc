"""Descent with the model split among processes learns what one process learns, and leaves the same files."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn

from quire.data.batch import TensorData
from quire.errors import InputError
from quire.models.gpt import GPT, GPTConfig
from quire.models.mlp import MLP, MLPConfig
from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.recipes.base import RECIPES
from quire.recipes.execute import execute
from quire.tasks.language import LanguageModel
from quire.tasks.supervised import Supervised
from quire.train import Callback, Interrupted, fit
from quire.train.checkpoints import Checkpoint, Later, load_checkpoint, newest_checkpoint, save_checkpoint
from quire.train.descent import Descent
from quire.train.processes import processes
from tests.train import test_parallel as parallel
from tests.train import test_parallel_recipes as trying
from tests.train.examples import classes, classifier, folder
from tests.train.test_parallel import (
    Found,
    Interrupting,
    assert_agreed,
    assert_alike,
    found,
    kept,
    state,
    told,
    wide,
)
from tests.train.together import once, together

pytestmark = pytest.mark.slow

SCENARIOS: dict[str, Any] = {}
CHANCE = ("chance", "adversaries", "gpt_mixed")
"""What draws numbers, or rounds them by how many there are: two processes do it alike, split or not."""
SAME = [name for name in parallel.SAME if name != "judged"]


def scenario(work: Any) -> Any:
    SCENARIOS[work.__name__] = work
    return work


def sharding(work: Any, shard: bool, block: int = 1) -> Any:
    """`work` with every `fit` of it split or not, and with blocks of `block` numbers at least."""
    import quire.train.blocks

    before, least = parallel.fit, quire.train.blocks.BLOCK
    try:
        parallel.fit, quire.train.blocks.BLOCK = partial(fit, shard=shard), block
        return work()
    finally:
        parallel.fit, quire.train.blocks.BLOCK = before, least


# -- What processes do -----------------------------------------------------------------------------


def language(checkpoint: bool = False) -> LanguageModel:
    torch.manual_seed(3)
    config = GPTConfig(11, context=8, layers=3, heads=2, width=12, checkpoint=checkpoint)
    return LanguageModel(GPT(config))


def tokens(rows: int, seed: int = 1) -> TensorData:
    drawn = torch.randint(11, (rows, 9), generator=torch.Generator().manual_seed(seed))
    return TensorData({"inputs": drawn[:, :-1], "target": drawn[:, 1:]})


def train_language(checkpoint: bool, shard: bool, precision: str = "float32") -> Found:
    """Blocks that are let go and put together again; tied embeddings; biases that do not decay; parts."""
    task = language(checkpoint)
    task = task.double() if precision == "float32" else task
    optim = Optim(lr=0.01, eps=1e-5, clip_norm=0.5, weight_decay=0.1, decay_biases=False)
    train = Train(batch_size=10, micro_batches=2, average=0.9, precision=precision)  # type: ignore[arg-type]
    done = fit(task, tokens(43), tokens(9, 2), epochs=3, optim=optim, train=train, seed=3, shard=shard)
    return state(task), told(done)


@scenario
def gpt(_: Path, shard: bool) -> Found:
    return train_language(False, shard)


@scenario
def gpt_checkpointed(_: Path, shard: bool) -> Found:
    return train_language(True, shard)


@scenario
def gpt_mixed(_: Path, shard: bool) -> Found:
    return train_language(False, shard, "bfloat16")


class Waiting(Supervised):
    """Parts that join later: the last layer moves from the beginning, the first from the third epoch on."""

    frozen = {"model.body": 2.0}  # noqa: RUF012
    step_factors = {"model.head": 0.5}  # noqa: RUF012


@scenario
def joining(_: Path, shard: bool) -> Found:
    torch.manual_seed(1)
    task = Waiting(MLP(MLPConfig(5, 3, hidden=(8, 8), norm="batch")), Categorical(3)).double()
    optim = Optim("sgd", lr=0.1, momentum=0.5, weight_decay=0.01, clip_value=0.05)
    done = fit(task, wide(classes(43)), wide(classes(20, 2)), epochs=4, optim=optim, seed=3, shard=shard,
               train=Train(batch_size=20))  # fmt: skip
    return state(task), told(done)


class Scalar(Supervised):
    """A parameter that is a single number, which cannot be split."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.slope = nn.Parameter(torch.tensor(0.7))

    def explicit(self) -> None:
        """Its equations are of a task without the parameter."""

    def terms(self, batch: Any, player: str = "model") -> dict[str, Tensor]:
        return {name: value * self.slope for name, value in super().terms(batch, player).items()}


@scenario
def scalar(_: Path, shard: bool) -> Found:
    torch.manual_seed(1)
    task = Scalar(MLP(MLPConfig(5, 3, hidden=(8,))), Categorical(3)).double()
    done = fit(task, wide(classes(43)), wide(classes(20, 2)), epochs=3, seed=3, shard=shard,
               optim=Optim(lr=0.02, clip_norm=0.1, l1=1e-3), train=Train(batch_size=20))  # fmt: skip
    return state(task), told(done)


@scenario
def twice(_: Path, shard: bool) -> Found:
    """A task is left as it was: the same parameters, classes and hooks, and can be trained again."""
    task = classifier(norm="batch").double()
    before = [(type(m), dict(m._parameters), len(m._forward_hooks), len(vars(m))) for m in task.modules()]
    for seed in (1, 2):
        done = fit(task, wide(classes(43)), epochs=1, seed=seed, shard=shard, optim=Optim("sgd", lr=0.1),
                   train=Train(batch_size=20))  # fmt: skip
    after = [(type(m), dict(m._parameters), len(m._forward_hooks), len(vars(m))) for m in task.modules()]
    for one, other in zip(before, after, strict=True):
        assert one[0] is other[0]
        assert all(value is other[1][name] for name, value in one[1].items())
        assert one[2:] == other[2:]
    assert all(type(p) is nn.Parameter for p in task.parameters())
    return state(task), told(done)


class Weighing(Callback):
    """Bytes of all tensors that live after a step, and those of one step's parameters."""

    def __init__(self) -> None:
        self.bytes = 0
        self.kinds: set[str] = set()

    def on_step(self, descent: Descent, step: int) -> None:
        if step == 2:
            gc.collect()
            tensors = [value for value in gc.get_objects() if isinstance(value, Tensor)]
            tensors += [group.flat for player in descent.stepper.players for group in player.groups]
            plain = [getattr(value, "_local_tensor", value) for value in tensors]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}
            self.bytes = sum(storages.values())
            self.kinds = {type(m).__name__ for m in descent.task.modules()}


@scenario
def memory(_: Path, shard: bool) -> Found:
    torch.manual_seed(0)
    task = Supervised(MLP(MLPConfig(5, 3, hidden=(600, 600, 600))), Categorical(3))
    weighing = Weighing()
    fit(task, classes(20), steps=2, train=Train(batch_size=20), callbacks=[weighing], shard=shard)
    size = sum(p.nbytes for p in task.parameters())
    return {}, {"share": weighing.bytes / (4 * size), "kinds": sorted(weighing.kinds)}


@scenario
def begun(path: Path, shard: bool) -> Found:
    """A run that others go on with."""
    last = Interrupting(processes()[1] - 1, 7, 15)
    train = Train(batch_size=20, average=0.9)
    return sharding(lambda: kept(path / "begun", last, dropout=0.0, train=train), shard)


@scenario
def resumed(path: Path, shard: bool) -> Found:
    train = Train(batch_size=20, average=0.9)
    return sharding(lambda: kept(path / "run", dropout=0.0, train=train), shard)


@scenario
def gpt_kept(path: Path, shard: bool) -> Found:
    """Interrupted and gone on with; and what is in the last checkpoint."""

    def run(name: str, *callbacks: Callback) -> LanguageModel:
        task = language()
        store = folder(path / name, resume=(path / name).exists()) if processes()[0] == 0 else None
        train = Train(batch_size=10, checkpoint_every=2)
        fit(task, tokens(43), tokens(9, 2), epochs=2, train=train, seed=3, shard=shard, store=store,
            callbacks=callbacks)  # fmt: skip
        return task

    wanted = state(run("gpt-whole"))
    with pytest.raises(Interrupted):
        run("gpt-stopped", Interrupting(1, 4, 15))
    resumed = state(run("gpt-stopped"))
    different = {name for name, value in wanted.items() if not torch.equal(value, resumed[name])}
    return resumed, {"different": sorted(different)}


@scenario
def refused(_: Path, shard: bool) -> Found:
    said = {}
    try:
        fit(classifier(), classes(), epochs=1, train=Train(compile=True), shard=shard)
    except InputError as error:
        said["compile"] = str(error)
    task = classifier()
    head: Any = task.model.head
    head.__class__ = type(
        "Tuned", (nn.Linear,), {"weight": property(lambda self: self._parameters["weight"] * 2)}
    )
    try:
        fit(task, classes(), epochs=1, shard=shard)
    except InputError as error:
        said["computed"] = str(error)
    return {}, said


CERTAIN = ("gru", "nadaraya-watson", "multitask")
RECIPES_TRIED = (*CERTAIN, "gpt", "transformer", "cgan", "vae", "resnet", "ssd", "autoencoder", "contrastive")
"""Of all kinds: weights used twice, lists, two players, a single number, batch norms, comparisons."""


@scenario
def recipes(path: Path, shard: bool) -> Found:
    trying.execute = partial(execute, shard=shard)
    return {}, {name: trying.train(name, path / name).measures for name in RECIPES_TRIED}


def main(path: Path, number: int, count: int, names: list[str]) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=number, world_size=count)
    for name in names:
        given, _, how = name.partition(":")
        shard = how != "whole"
        if given in SCENARIOS:
            tensors, facts = sharding(lambda: SCENARIOS[given](path, shard), shard)  # noqa: B023
        else:
            tensors, facts = sharding(lambda: parallel.SCENARIOS[given](path), shard)  # noqa: B023
        save_file(tensors, path / f"{name}-{number}.safetensors")
        (path / f"{name}-{number}.json").write_text(json.dumps(facts))
    distributed.destroy_process_group()


def start(path: Path, count: int, *names: str) -> None:
    together("tests.train.test_shard", path, count, count, names)


OWN = ("gpt", "gpt_checkpointed", "joining", "scalar", "twice")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = [f"{name}:whole" for name in (*CHANCE, "memory")]
    names = (
        *SAME,
        *CHANCE,
        *OWN,
        "not_finite",
        "interrupted",
        "begun",
        "gpt_kept",
        "memory",
        "refused",
        *whole,
    )
    return once(tmp_path_factory, "split", lambda path: start(path, 2, *names))


# -- Tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SAME, *OWN])
def test_two_that_split_a_model_learn_what_one_learns(two: Path, name: str, tmp_path: Path) -> None:
    wanted, facts = SCENARIOS[name](tmp_path, False) if name in OWN else parallel.SCENARIOS[name](tmp_path)
    relative = 2e-5 if name in ("single", "carried") else 1e-9
    for number in range(2):
        tensors, told = found(two, name, number)
        assert tensors.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(tensors[key], value, rtol=relative, atol=relative / 100, msg=key)
        assert_alike(told, json.loads(json.dumps(facts)), relative)


@pytest.mark.parametrize("name", [*SAME, *CHANCE, *OWN])
def test_processes_agree_to_the_bit(two: Path, name: str) -> None:
    assert_agreed(two, name)


@pytest.mark.parametrize("name", CHANCE)
def test_split_or_not_they_draw_and_learn_the_same(two: Path, name: str) -> None:
    """Of weights each process draws the noise of its own part, so with noise they are others."""
    for number in range(2):
        wanted, facts = found(two, f"{name}:whole", number)
        tensors, told = found(two, name, number)
        if name == "chance":
            assert tensors.keys() == wanted.keys()
            continue
        for key, value in wanted.items():
            # A sum in another order may be the half that rounds the other way.
            loose = 1e-4 if name == "gpt_mixed" else 1e-5
            torch.testing.assert_close(tensors[key], value, rtol=10 * loose, atol=loose, msg=key)
        assert_alike(told, facts, 10 * loose)


def test_each_has_half_of_weights_gradients_and_moments(two: Path) -> None:
    for number in range(2):
        whole, split = (found(two, name, number)[1] for name in ("memory:whole", "memory"))
        # Besides the four, one that has the whole holds gradients as autograd hands them over.
        assert 1.0 < whole["share"] < 1.35
        assert 0.5 < split["share"] < 0.58
        assert "FSDPLinear" in split["kinds"]
        assert "FSDPLinear" not in whole["kinds"]


def test_a_bad_row_of_one_process_stops_all_with_its_name(two: Path) -> None:
    for number in range(2):
        tensors, facts = found(two, "not_finite", number)
        assert facts["error"].startswith("process 1 of 2, step 0: the data has non-finite values in 'inputs'")
        assert "caused by rows 5 of the training data" in facts["error"]
        weights = [key for key in tensors if key.endswith((".weight", ".bias")) and key[:6] != "after "]
        assert weights
        assert all(torch.equal(tensors[key], tensors[f"after {key}"]) for key in weights)


def test_an_interrupted_run_goes_on_to_the_same_bits(two: Path) -> None:
    for number in range(2):
        _, facts = found(two, "interrupted", number)
        assert (facts["term"]["code"], facts["int"]["code"]) == (143, 130)
        assert facts["different"] == []


LONG = pytest.mark.long


OTHERS = [pytest.param(*given, marks=LONG) for given in ((2, "whole"), (2, "split"), (3, "split"))]


@pytest.mark.parametrize(("count", "how"), [(1, "whole"), *OTHERS])
def test_any_number_goes_on_with_what_two_have_split(two: Path, count: int, how: str, tmp_path: Path) -> None:
    _go_on(two / "begun", tmp_path, count, how)


def test_tied_weights_are_kept_and_gone_on_with(two: Path) -> None:
    for number in range(2):
        tensors, facts = found(two, "gpt_kept", number)
        assert facts["different"] == []
        checkpoint = newest_checkpoint(two / "gpt-stopped" / "checkpoints")
        task = language()
        task.load_state_dict(dict(checkpoint.tensors["final"]))
        assert all(torch.equal(value, tensors[name]) for name, value in task.state_dict().items())
        shapes = {name: value.shape for name, value in task.named_parameters()}
        for kind in ("first", "second"):
            moments = {n: v for n, v in checkpoint.tensors["optimiser-model"].items() if n.startswith(kind)}
            assert {n.partition(":")[2]: v.shape for n, v in moments.items()} == shapes


@LONG
@pytest.mark.parametrize("count", [2, 3])
def test_a_run_of_one_goes_on_split(count: int, tmp_path: Path) -> None:
    begun(tmp_path, False)
    _go_on(tmp_path / "begun", tmp_path, count, "split")


def _go_on(run: Path, path: Path, count: int, how: str) -> None:
    """… to what a process learns that was never interrupted."""
    import shutil

    train = Train(batch_size=20, average=0.9)
    wanted, facts = kept(path / "whole", dropout=0.0, train=train)
    shutil.copytree(run, path / "run")
    if count == 1:
        tensors, told = resumed(path, False)
    else:
        start(path, count, f"resumed:{how}")
        tensors, told = found(path, f"resumed:{how}", 0)
    for key, value in wanted.items():
        torch.testing.assert_close(tensors[key], value, rtol=1e-4, atol=1e-6, msg=key)
    assert_alike(told, json.loads(json.dumps(facts)), 1e-4)
    one, other = (newest_checkpoint(path / name / "checkpoints") for name in ("whole", "run"))
    assert one.tensors.keys() - {"random"} == {n for n in other.tensors if not n.startswith("random")}
    for name, values in one.tensors.items():
        if name == "random":
            continue
        assert values.keys() == other.tensors[name].keys(), name
        for key, value in values.items():
            assert value.dtype == other.tensors[name][key].dtype
            torch.testing.assert_close(
                other.tensors[name][key], value, rtol=1e-3, atol=1e-5, msg=f"{name} {key}"
            )


def test_what_cannot_be_split_is_refused(two: Path) -> None:
    for number in range(2):
        facts = found(two, "refused", number)[1]
        assert "--parallel.shard with --train.compile" in facts["compile"]
        assert "'model.head.weight', which is computed from other parameters" in facts["computed"]


def test_one_process_has_nobody_to_split_with() -> None:
    with pytest.raises(InputError, match=r"--parallel\.shard in one process"):
        fit(classifier(), classes(), epochs=1, shard=True)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("pca", {}, "with 'pca', which learns from sums over the data"),
        ("gpt-lora", {}, "with --tune.lora.rank 8"),
        ("mlp", {"train": Train(compile=True)}, "with --train.compile"),
        ("mlp", {}, "in one process"),
    ],
)
def test_a_recipe_is_refused_before_it_begins(name: str, given: Any, says: str, tmp_path: Path) -> None:
    from quire.cli.recipes import all_recipes

    options = all_recipes()[name].options(out=tmp_path / "run", **given)
    with pytest.raises(InputError, match=says):
        execute(RECIPES[name], options, shard=True)
    assert not (tmp_path / "run").exists()


def test_blocks_that_others_look_into_are_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.train import blocks as finding

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
            self.list = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)])
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.list[1].weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.tied(self.list[1](self.list[0](self.row(x))))
            return nn.functional.linear(x, self.row[0].weight)  # and list[2], list[3] are never called

    model = Model()
    monkeypatch.setattr(finding, "BLOCK", 18)
    blocks = finding.separate_blocks(model, lambda: model(torch.ones(2, 4)))
    assert blocks == [model.row[1], model.row[3], model.list[0]]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_tensors_made_one_by_one_are_a_file_as_any_other(tmp_path: Path) -> None:
    values = {
        "a": torch.randn(3, 4), "é\"": torch.randn(2, 3).bfloat16(), "empty": torch.empty(0, 5),
        "n": torch.tensor(7), "b": torch.tensor([True, False]), "t": torch.arange(6.0).view(2, 3).T,
    }  # fmt: skip
    asked: list[str] = []

    def make(name: str) -> Tensor:
        asked.append(name)
        return values[name]

    later: Any = {
        name: value if name == "n" else Later(tuple(value.shape), value.dtype, partial(make, name))
        for name, value in values.items()
    }
    path = save_checkpoint(tmp_path / "run", Checkpoint(3, {"weights": later}, {}), keep=1)
    assert asked == [name for name in values if name != "n"]
    read = load_checkpoint(path).tensors["weights"]
    assert read.keys() == values.keys()
    for name, value in values.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value), name
    assert load_file(path / "weights.safetensors").keys() == values.keys()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_recipes_of_all_kinds_can_be_split(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    start(tmp_path / "two", 2, "recipes")
    first, second = (found(tmp_path / "two", "recipes", number)[1] for number in range(2))
    assert first == second
    for name in RECIPES_TRIED:
        assert (tmp_path / "two" / name / "run" / "report.html").exists()
    for name in CERTAIN:
        alone = trying.train(name, tmp_path / name).measures
        for part, values in alone.items():
            assert first[name][part] == pytest.approx(values, rel=1e-4, abs=1e-6), (name, part)


@pytest.mark.gpu
def test_splitting_for_one_gpu_by_nccl_changes_nothing(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.train.test_shard import alone_on_gpu; "
    code += "alone_on_gpu(Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def alone_on_gpu(path: Path) -> None:
    torch.cuda.set_device(0)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{path}/meet", rank=0, world_size=1
    )
    import quire.train.blocks

    quire.train.blocks.BLOCK = 1
    states, histories = [], []
    for shard in (False, True):
        task = language(checkpoint=True)
        optim = Optim(lr=0.01, clip_norm=0.5, weight_decay=0.1)
        train = Train(batch_size=10, micro_batches=2, average=0.9, capture=False)
        done = fit(
            task, tokens(43), tokens(9, 2), epochs=3, optim=optim, train=train, device="cuda", shard=shard
        )
        states.append(state(task))
        histories.append(told(done))
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-3, atol=1e-5, msg=key)
    assert_alike(histories[1], histories[0], 1e-3)
    distributed.destroy_process_group()
