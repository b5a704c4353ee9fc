"""Every recipe trained anew on some of its rows: the run itself on all of them, nothing leaked on fewer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import quire.recipes  # noqa: F401
from quire.data.batch import Data, TensorData, as_judged
from quire.doctor.studies import bias_variance, folds, learning_curve
from quire.errors import InputError
from quire.options import Schedule
from quire.recipes.again import KINDS, Again
from quire.recipes.base import RECIPES, DescentOptions
from quire.recipes.execute import check_descent, descend, execute, run_config, sweep
from quire.runs import load
from quire.tasks.bagging import COUNTS
from quire.tasks.kernel import OWN
from quire.train import StatisticsTask, evaluate
from quire.train.folder import RunFolder
from tests.recipes.examples import target_for, write_data

pytestmark = pytest.mark.slow

NAMES = [name for name in RECIPES if name not in ("alexnet", "vgg", "googlenet", "resnext", "densenet")]
"""Without those that lenet and resnet stand for."""
TABLES = ("classes", "two classes", "values", "any", "several")


def own_options(name: str, folder: Path, **given: Any) -> Any:
    """Options for a run of two steps on a small file of one's own."""
    recipe = RECIPES[name]
    fields = {field.name for field in dataclasses.fields(recipe.options)}
    data = write_data(recipe, folder)
    if "source" in fields:
        mlp = RECIPES["mlp"]
        table = dataclasses.replace(mlp.options().table, drop=("kind",))
        source = folder / "source"
        execute(mlp, mlp.options(data=data, target="label", out=source, steps=2, quiet=True, table=table))
        given["source"] = source
    small = {"base_steps": 2, "labels": 24}
    given = {key: value for key, value in small.items() if key in fields} | given
    if "sweeps" in fields:
        return recipe.options(data=data, quiet=True, out=folder / "run", **{"sweeps": 2, **given})
    if recipe.targets in TABLES:
        given["target"] = target_for(recipe)
    else:
        usual = recipe.options()
        train = {"batch_size": 16, "restore": "last", "monitor": "loss"}
        if recipe.targets == "text":
            given["text"] = dataclasses.replace(usual.text, context=16)
            small = {"layers": 1, "heads": 2, "width": 16} if name.startswith("gpt") else {"width": 16}
            given["model"] = dataclasses.replace(usual.model, **small)
        given["train"] = dataclasses.replace(usual.train, **train)
        given["optim"] = dataclasses.replace(usual.optim, schedule=Schedule())
    return recipe.options(data=data, quiet=True, out=folder / "run", **{"steps": 2, **given})


class Done(NamedTuple):
    run: Path
    measures: dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Done]:
    """Runs as `execute` makes them, but without their report, which nothing here reads."""

    @cache
    def train(name: str) -> Done:
        options = own_options(name, tmp_path_factory.mktemp(name))
        plan = RECIPES[name].build(options)
        if isinstance(options, DescentOptions):
            check_descent(plan, options)
        folder = RunFolder.create(options.out, run_config(name, options, ""), overwrite=False)
        learn = sweep if isinstance(plan.task, StatisticsTask) else descend
        learn(plan, folder, torch.device("cpu"))
        folder.close()
        parts = {split: getattr(plan.data, split) for split in ("validation", "test")}
        return Done(
            options.out, {split: evaluate(plan.task, as_judged(part)) for split, part in parts.items()}
        )

    return train


# The contract of every recipe ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_folds_or_says_why_not(name: str, runs: Any) -> None:
    run = load(runs(name).run)
    before = sorted(path.name for path in run.path.parent.rglob("*"))
    if RECIPES[name].targets == "text":
        with pytest.raises(InputError, match="windows of a text share their tokens") as refusal:
            Again(run, kind="folds")
        assert "learning-curve" in refusal.value.fix
    else:
        found = folds(Again(run, steps=1, kind="folds"), 2)
        assert len(found.held["loss"]) == 2
        assert all(np.isfinite(values).all() for values in found.held.values()), found.held
        assert found.measure in found.verdict
    # On all rows with the run's own seed, it is the run.
    again = Again(run)
    assert again.apart == "validation"
    wanted = runs(name).measures["validation"]
    for measure, value in again(None, 0).measures("validation").items():
        assert value == pytest.approx(wanted[measure], rel=1e-6, abs=1e-9), measure
    assert sorted(path.name for path in run.path.parent.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mlp", "bagging", "transfer", "polynomial", "kmeans", "resnet", "cgan", "gpt-lora"]
)
def test_another_seed_gives_another_start(name: str, runs: Any) -> None:
    again = Again(load(runs(name).run))
    first, same, other = (again.start(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(value, same[key]) for key, value in first.items())
    differs = [key for key, value in first.items() if not torch.equal(value, other[key])]
    begins_alike = name in ("kmeans", "polynomial", "gpt-lora")
    assert bool(differs) != begins_alike, differs
    if name == "transfer":
        assert differs == ["model.head.weight"]  # the body that was taken over stays


# What may be learned from -------------------------------------------------------------------------


class Spy(Again):
    """Looks at what training is given."""

    given: list[tuple[Any, Data]]

    def _descend(self, task: Any, data: Data, seed: int) -> None:
        self.__dict__.setdefault("given", []).append((task, data))
        super()._descend(task, data, seed)


def one_fit(name: str, runs: Any, rows: Tensor) -> tuple[Any, Any, Spy]:
    spy = Spy(load(runs(name).run), steps=1)
    spy(rows, 3)
    ((task, data),) = spy.given
    return task, data, spy


def test_training_sees_the_given_rows_alone(runs: Any) -> None:
    rows = torch.tensor([3, 9, 4, 4])
    _, data, spy = one_fit("mlp", runs, rows)
    whole: Any = spy.plan.data.train
    assert torch.equal(data.inputs, whole.inputs[rows])
    assert torch.equal(data.target, whole.target[rows])


def test_a_kernel_remembers_the_given_rows_alone(runs: Any) -> None:
    rows = torch.arange(0, 60, 3)
    task, data, spy = one_fit("nadaraya-watson", runs, rows)
    assert torch.equal(task.model.keys, spy.plan.data.train.inputs[rows])  # type: ignore[attr-defined]
    assert data.fields[OWN].tolist() == list(range(20))
    judge = spy(rows, 3)
    outside = torch.arange(1, 60, 3)
    # A row that was learned from is answered by the others, one that was not by all.
    inside_data, outside_data = judge._data(rows[[4, 2]]), judge._data(outside)
    assert isinstance(inside_data, TensorData)
    assert isinstance(outside_data, TensorData)
    assert inside_data.fields[OWN].tolist() == [4, 2]
    assert OWN not in outside_data.fields
    assert not spy.twice


def test_an_ensemble_draws_its_bootstraps_anew(runs: Any) -> None:
    rows = torch.arange(30)
    _, data, spy = one_fit("bagging", runs, rows)
    assert data.fields[COUNTS].sum(0).tolist() == [30.0] * 50
    assert COUNTS not in spy.subset(rows).fields  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["contrastive", "siamese"])
def test_references_are_among_the_given_rows(name: str, runs: Any) -> None:
    whole = Again(load(runs(name).run))
    rows = torch.arange(0, whole.rows, 2)
    task, _, _ = one_fit(name, runs, rows)
    kept = task.reference_rows.tolist()
    assert set(kept) < set(whole.plan.task.reference_rows.tolist())  # type: ignore[union-attr, operator]
    assert set(kept) <= set(rows.tolist())
    assert len(task.reference_inputs) == len(task.reference_target) == len(kept)
    assert torch.equal(task.reference_inputs, whole.plan.data.train.take(task.reference_rows).inputs)


def test_labelled_rows_are_among_the_given_rows(runs: Any) -> None:
    whole = Again(load(runs("semi-supervised").run))
    train: Any = whole.plan.data.train
    rows = torch.arange(0, whole.rows, 2)
    task, _, _ = one_fit("semi-supervised", runs, rows)
    known = rows[train.target[rows] >= 0]
    assert 0 < len(known) < 24
    assert torch.equal(task.taught_inputs, train.inputs[known])
    none = torch.nonzero(train.target < 0).flatten()[:5]
    with pytest.raises(InputError, match="0 labelled rows among 5") as refusal:
        Again(load(runs("semi-supervised").run), steps=1)(none, 0)
    assert "more --labels" in refusal.value.fix


@pytest.mark.parametrize("name", ["gpt", "gru"])
def test_a_stretch_of_a_text_hides_the_rest(name: str, runs: Any) -> None:
    again = Again(load(runs(name).run), steps=1)
    train: Any = again.plan.data.train
    rows = again.draw(50, 7)
    assert rows.diff().tolist() == [1] * 49
    part: Any = again.subset(rows)
    assert len(part) == 50
    first = int(rows[0])
    assert torch.equal(part.tokens.values, train.tokens.values[first : first + 50 + 16])
    batch, wanted = part.take(torch.arange(50)), train.take(rows)
    assert torch.equal(batch.inputs, wanted.inputs)
    assert torch.equal(batch.target, wanted.target)
    curve = learning_curve(again, [40, 80, 160], repeats=1)
    assert curve.measure == "accuracy"
    with pytest.raises(InputError, match="single windows of a text"):
        again.subset(torch.tensor([1, 5, 2]))


# Studies ------------------------------------------------------------------------------------------


def test_folds_of_a_statistics_recipe_are_those_of_scikit_learn(runs: Any) -> None:
    from sklearn.decomposition import PCA

    from quire.functional import k_fold

    again = Again(load(runs("pca").run), kind="folds")
    components = 3
    again.plan.task = type(again.plan.task)(again.plan.data.train.row_size, components)  # type: ignore[call-arg]
    found = folds(again, 4, seed=2)
    x = again.plan.data.train.inputs.double().numpy()  # type: ignore[attr-defined]
    for (inside, outside), loss in zip(
        k_fold(len(x), 4, torch.Generator().manual_seed(2), again.stratify),
        found.held["explained_share"],
        strict=True,
    ):
        model = PCA(components).fit(x[inside.numpy()])
        rows = x[outside.numpy()]
        left = np.square(rows - model.inverse_transform(model.transform(rows))).sum()
        total = np.square(rows - model.mean_).sum()
        assert loss == pytest.approx(1 - left / total, rel=1e-4)


def test_bias_and_variance_of_a_kernel_uses_halves(runs: Any) -> None:
    again = Again(load(runs("nadaraya-watson").run), steps=1, kind="bias-variance")
    found = bias_variance(again, resamples=3, twice=again.twice)
    assert found.loss == "Brier score"
    assert "random halves" in str(found)


def test_several_targets_are_studied_one_by_one(runs: Any) -> None:
    run = load(runs("multitask").run)
    with pytest.raises(InputError, match="2 targets: value, label") as refusal:
        Again(run, kind="calibration")
    assert "--target 'value'" in refusal.value.fix
    with pytest.raises(InputError, match="did you mean 'value'"):
        Again(run, target="valu", kind="calibration")
    label = Again(run, target="label", kind="calibration").trained.answers("test")
    assert label.probabilities is not None
    right = (label.probabilities.argmax(1) == label.target).double().mean()
    assert float(right) == pytest.approx(runs("multitask").measures["test"]["label.accuracy"])
    value = Again(run, target="value", kind="calibration").trained.answers("test")
    assert value.values is not None
    rmse = (value.values - value.target).square().mean().sqrt()
    assert float(rmse) == pytest.approx(runs("multitask").measures["test"]["value.rmse"], rel=1e-5)
    low_high = run.predict(run.options().data).num_rows
    assert low_high == 160
    # The deviations are those of the run's noise, in the target's units.
    head = run.task.heads["value"]  # type: ignore[index, union-attr]
    expected = float(head.noise_variance.sqrt() * head.scale)
    assert value.deviations is not None
    assert value.deviations.tolist() == pytest.approx([expected] * len(value.target), rel=1e-4)


def test_answers_of_a_text_are_its_tokens(runs: Any) -> None:
    outcome = runs("gpt")
    answers = Again(load(outcome.run), kind="calibration").trained.answers("validation")
    assert answers.probabilities is not None
    chosen = answers.probabilities.gather(1, answers.target[:, None])
    assert float(-chosen.log().mean()) == pytest.approx(outcome.measures["validation"]["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("pca", "calibration", "which answers no target"),
        ("vae", "bias-variance", "which answers no target"),
        ("pca", "regions", "which has no network"),
        ("mlp", "equivariance", "on a table"),
        ("ssd", "bias-variance", "whose answers are boxes"),
        ("ssd", "equivariance", "whose answers are boxes"),
        ("seq2seq", "calibration", "whose answers are texts"),
        ("gpt", "bias-variance", "whose answers are the tokens of a text"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(
    name: str, kind: str, message: str, runs: Any
) -> None:
    run = load(runs(name).run)
    with pytest.raises(InputError, match=message) as refusal:
        Again(run, kind=kind)
    assert refusal.value.expected
    assert refusal.value.fix


def test_an_unknown_study_and_both_lengths_are_refused(runs: Any) -> None:
    run = load(runs("mlp").run)
    with pytest.raises(InputError, match="did you mean 'folds'"):
        Again(run, kind="fold")
    assert len(KINDS) == 6
    with pytest.raises(InputError, match="both epochs and steps"):
        Again(run, epochs=1, steps=1)


def test_changed_or_missing_data_is_refused(tmp_path: Path) -> None:
    options = own_options("softmax", tmp_path)
    run = load(execute(RECIPES["softmax"], options).run)
    kept = options.data.read_text()
    options.data.write_text(kept + "1,red,yes,2024-03-01,small,low,3\n")
    with pytest.raises(InputError, match="has changed since the run"):
        Again(run)
    options.data.unlink()
    with pytest.raises(InputError, match="is not there any more"):
        Again(run)
