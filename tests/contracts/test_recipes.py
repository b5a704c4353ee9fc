"""Every registered recipe: reaches its expected result, takes one's own file, and its run can be used."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import quire.recipes  # noqa: F401
from quire.errors import DataError, InputError
from quire.options import Schedule
from quire.recipes.base import RECIPES, RunOptions
from quire.recipes.execute import Outcome, execute
from quire.runs import load
from tests.recipes.examples import target_for, undrawn, write_csv, write_data

NAMES = list(RECIPES)
TABLES = ("classes", "two classes", "values", "any", "several")
QUICK = {"mlp", "gmm", "lenet", "ssd", "gru", "textclass"}
"""One recipe of each kind of data is tried by `make quick`."""
DISTINCT = [name for name in NAMES if name not in ("alexnet", "vgg", "googlenet", "resnext", "densenet")]
"""Without those that lenet and resnet stand for: the same plan with another network, whose own tests export
it."""
ALIKE = {"sparse", "contractive", "vae", "gan", "contrastive"}
"""Other options of a task that autoencoder, cvae, cgan or siamese is resumed and exported with; of dense,
convolutional, recurrent and tuned networks, mlp, lenet, gru and gpt-lora are resumed; gpt-qlora is
exported."""
SPARED = {"linear", "logistic", "softmax", "heteroscedastic", "resnet", "rnn", "lstm", "gpt", "gpt-qlora"}
RESUMED = [name for name in DISTINCT if name not in ALIKE | SPARED]
EXPORTED = [name for name in DISTINCT if name not in ALIKE | {"denoising", "masked", "gpt-lora"}]


LONG = {
    "alexnet", "vgg", "googlenet", "resnext", "densenet", "gan", "gpt", "gpt-lora", "gpt-qlora",
    "transformer", "seq2seq", "textclass", "lstm", "gru", "ssd", "contrastive", "cvae", "masked", "sparse",
    "contractive",
}  # fmt: skip
"""Whose built-in runs are left to `make faults`: they take twelve minutes together, and others learn from
like data in the same way. What they make of a file of one's own is tried with the rest."""


def tried(names: Iterable[str], long: Iterable[str] = ()) -> list[Any]:
    names = list(names)
    marks = {name: () if name in QUICK else (pytest.mark.slow,) for name in names}
    marks |= {name: (pytest.mark.slow, pytest.mark.long) for name in long}
    return [pytest.param(name, marks=marks[name]) for name in names]


def options_for(name: str, folder: Path, **given: Any) -> RunOptions:
    """Options to train `name` on a file of one's own; a recipe that builds on another run gets one."""
    recipe = RECIPES[name]
    fields = {field.name for field in dataclasses.fields(recipe.options)}
    known = list(folder.glob("mine*"))
    data = known[0] if known else write_data(recipe, folder)
    if "source" in fields:
        source = folder / "source"
        if not source.exists():
            mlp = RECIPES["mlp"]
            table = dataclasses.replace(mlp.options().table, drop=("kind",))
            execute(
                mlp, mlp.options(data=data, target="label", out=source, epochs=2, quiet=True, table=table)
            )
        given["source"] = source
    if "base_steps" in fields:
        given["base_steps"] = 2
    if "labels" in fields:
        given = {"labels": 12, **given}
    if "sweeps" in fields:
        return recipe.options(data=data, quiet=True, **{"sweeps": 2, "out": folder / "run", **given})
    given = {"epochs": 2, "out": folder / "run", **given}
    if recipe.targets not in TABLES:
        small = {"batch_size": 16, "restore": "last", "monitor": "loss"}
        if recipe.targets == "text":
            small["validate_every"] = 10
            given = {"text": dataclasses.replace(recipe.options().text, context=16), **given}
            steps = -(-given.pop("epochs", 2) * 6 // 2)  # epochs of a text are long
            given["steps"] = steps
        own = recipe.options()
        # A schedule that ends is another one where training is longer; here runs are made longer.
        constant = dataclasses.replace(own.optim, schedule=Schedule())
        given = {"train": dataclasses.replace(own.train, **small), "optim": constant, **given}
    else:
        given["target"] = target_for(recipe)
    return recipe.options(data=data, quiet=True, **given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def train(name: str) -> tuple[Outcome, RunOptions]:
        folder = tmp_path_factory.mktemp(name)
        options = options_for(name, folder)
        return execute(RECIPES[name], options, command=f"quire train {name}"), options

    return train


@pytest.mark.slow
@pytest.mark.parametrize("name", tried(NAMES, LONG))
def test_the_expected_result_is_reached_on_built_in_data(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    outcome = execute(recipe, recipe.options(out=tmp_path / "run", quiet=True))
    assert outcome.expected_met, f"{recipe.expected}: {outcome.measures}"
    assert outcome.report.stat().st_size > 10_000
    # What reaches its result is healthy, and the doctor has nothing to say against it.
    silence = () if name in DISTINCT else ("one-batch",)  # what takes the time
    verdict = load(outcome.run).diagnose(silence)
    assert verdict.findings.codes("error", "warning") == [], str(verdict)


@pytest.mark.parametrize("name", tried(NAMES))
def test_a_run_on_ones_own_file_is_complete(name: str, runs: Any) -> None:
    outcome, _ = runs(name)
    makes_text = RECIPES[name].targets in ("text", "pairs")
    judged = "samples.json" if makes_text else "predictions.parquet"
    for file in ("config.toml", "metrics.jsonl", "result.json", judged, "report.html", "log.txt"):
        assert (outcome.run / file).is_file(), file
    assert outcome.expected_met is None
    assert not list(outcome.run.rglob("*.tmp"))
    for split in ("train", "validation", "test"):
        assert all(np.isfinite(v) for v in outcome.measures[split].values()), outcome.measures[split]


@pytest.mark.parametrize("name", tried(NAMES))
def test_evaluate_repeats_the_measures_of_training(name: str, runs: Any) -> None:
    outcome, options = runs(name)
    run = load(outcome.run)
    again = run.evaluate()
    for split, measures in again.items():
        for measure, value in measures.items():
            assert value == pytest.approx(outcome.measures[split][measure], rel=1e-5, abs=1e-6), measure
    if options.data is not None and options.data.suffix != ".npy":
        whole = run.evaluate(options.data)["data"]["loss"]
        assert np.isfinite(whole)
        # A mean over the rows of all parts, but where a row is not judged by itself.
        if RECIPES[name].targets in (*TABLES, "labelled", "pairs") and name != "nadaraya-watson":
            parts = [measures["loss"] for measures in again.values()]
            assert min(parts) - 1e-4 <= whole <= max(parts) + 1e-4


def of_kind(*kinds: str) -> list[Any]:
    return tried(name for name in NAMES if RECIPES[name].targets in kinds)


@pytest.mark.parametrize("name", of_kind("images", "scenes"))
def test_predict_reads_images_as_training_did(name: str, runs: Any, tmp_path: Path) -> None:
    """Images of the test part in a folder of their own, without classes or annotations."""
    outcome, options = runs(name)
    kept = pq.read_table(outcome.run / "predictions.parquet").to_pylist()
    column = "row" if RECIPES[name].targets == "images" else "image"
    files = dict.fromkeys(str(row[column]) for row in kept)
    for number, file in enumerate(files):
        files[file] = f"{number:03d}{Path(file).suffix}"
        shutil.copy(next(options.data.rglob(Path(file).name)) if column == "image" else options.data / file,
                    tmp_path / files[file])  # fmt: skip
    asked = {"score": 0.01} if RECIPES[name].targets == "scenes" else {}
    predicted = load(outcome.run).predict(tmp_path, **asked).to_pylist()
    assert [row["image"] for row in predicted] == [files[str(row[column])] for row in kept]
    for ours, theirs in zip(predicted, kept, strict=True):
        for said in ("prediction", "class"):
            assert ours.get(said) == theirs.get(said)
        for number in ("left", "top", "right", "bottom", "score", "probability", "elbo", "code_1"):
            if number in theirs:
                assert ours[number] == pytest.approx(theirs[number], rel=1e-3, abs=1e-3)
    if name == "lenet":
        (tmp_path / "broken.png").write_bytes(b"no image")
        run = load(outcome.run)
        with pytest.raises(DataError, match=r"--images\.broken skip"):
            run.predict(tmp_path)
        assert run.predict(tmp_path, broken="skip").num_rows == len(predicted)
        assert "1 of" in run.notes[0]
        assert "broken.png: not an image" in run.notes[0]


@pytest.mark.parametrize("name", of_kind("labelled", "pairs"))
def test_predict_reads_texts_as_training_did(name: str, runs: Any, tmp_path: Path) -> None:
    outcome, options = runs(name)
    lines = options.data.read_text().splitlines()
    new = tmp_path / options.data.name
    if RECIPES[name].targets == "pairs":
        new.write_text("".join(line.split("\t")[0] + "\n" for line in lines[:7]))
        assert load(outcome.run).predict(new).num_rows == 7
        return
    kept = pq.read_table(outcome.run / "predictions.parquet").to_pylist()
    new.write_text("\n".join([lines[0], *(lines[row["row"] - 1] for row in kept)]) + "\n")
    predicted = load(outcome.run).predict(new).to_pylist()
    assert [row["prediction"] for row in predicted] == [row["prediction"] for row in kept]


@pytest.mark.parametrize("name", of_kind("text"))
def test_a_language_model_makes_text(name: str, runs: Any) -> None:
    outcome, options = runs(name)
    run = load(outcome.run)
    one, two = run.sample(["the ", "a dog"], length=20, seed=1)
    assert one.startswith("the ")
    assert two.startswith("a dog")
    assert run.sample(["the ", "a dog"], length=20, seed=1) == [one, two]
    assert "the " + "".join(run.stream("the ", length=20, temperature=0.0)) == run.sample(
        ["the "], length=20, temperature=0.0
    )[0]  # fmt: skip
    with pytest.raises(InputError, match="the character 'Ω', number 3"):
        run.sample(["a Ω"])
    with pytest.raises(InputError, match="a language model"):
        run.predict(options.data)


@pytest.mark.parametrize("name", of_kind(*TABLES))
def test_predict_applies_the_saved_preparation(name: str, runs: Any, tmp_path: Path) -> None:
    """Rows of the test part, shuffled columns and no target: the predictions are those of the run."""
    outcome, options = runs(name)
    kept = pq.read_table(outcome.run / "predictions.parquet")
    lines = options.data.read_text().splitlines()
    cells = [line.split(",") for line in (lines[0], *(lines[row - 1] for row in kept["row"].to_pylist()))]
    columns = ["day", "fast", "colour", "kind", "label", "value", "size"]
    targets = options.target.split(",")
    chosen = [cells[0].index(c) for c in columns if c not in targets]
    new = tmp_path / "new.csv"
    new.write_text("".join(",".join(row[i] for i in chosen) + "\n" for row in cells))
    predicted = load(outcome.run).predict(new)
    assert predicted.num_rows == kept.num_rows
    for column in [c for c in kept.column_names if c.endswith("prediction")]:
        ours, theirs = predicted[column].to_pylist(), kept[column].to_pylist()
        if isinstance(theirs[0], float):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        else:
            assert ours == theirs


@pytest.mark.parametrize("name", of_kind("rows", "unlabelled"))
def test_predict_says_of_rows_what_the_run_said(name: str, runs: Any) -> None:
    outcome, options = runs(name)
    kept = pq.read_table(outcome.run / "predictions.parquet")
    predicted = load(outcome.run).predict(options.data).take([row - 2 for row in kept["row"].to_pylist()])
    assert predicted.column_names == kept.column_names[1:]
    for column in predicted.column_names:
        if name == "masked" and not column.startswith("code"):
            continue  # what is hidden goes by a row's place in the file
        ours, theirs = predicted[column], kept[column]
        if isinstance(theirs[0].as_py(), int | float):
            np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), rtol=1e-4, atol=1e-5)
        else:
            assert ours.to_pylist() == theirs.to_pylist()


NO_HEAD = {"pca", "kmeans", "mixture", "reconstruction", "variational", "adversarial"}


@pytest.mark.parametrize("name", tried(name for name in NAMES if RECIPES[name].targets != "text"))
def test_what_predictions_do_not_take_is_refused_before_a_file_is_read(name: str, runs: Any) -> None:
    run = load(runs(name)[0].run)
    kind = run.task.spec()["task"]
    taken = {"detection": {"score"}, "translation": {"seed"}}.get(kind, {"level", "seed"})
    taken = set() if kind in NO_HEAD else taken
    for option, value in {"level": 0.5, "score": 0.5, "seed": 1}.items():
        with pytest.raises(InputError) as caught:
            run.predict("nowhere.csv", **{option: value})
        message = f"{option} {value} for predictions of '{name}'"
        assert str(caught.value).startswith("nowhere.csv" if option in taken else message)
    with pytest.raises(InputError, match="did you mean 'score'"):
        run.predict("nowhere.csv", scroe=0.5)
    with pytest.raises(InputError, match=r"unknown prediction option of .* 'temprature'"):
        run.task.predict(None, temprature=2)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
@pytest.mark.parametrize("name", tried(EXPORTED, {"ssd"}))
def test_export_agrees_with_the_run(name: str, ending: str, runs: Any, tmp_path: Path) -> None:
    outcome, _ = runs(name)
    if RECIPES[name].targets == "pairs":
        with pytest.raises(InputError, match="decodes token by token"):
            load(outcome.run).export(tmp_path / f"model{ending}")
        assert not list(tmp_path.iterdir())
        return
    facts = load(outcome.run).export(tmp_path / f"model{ending}")
    assert facts["largest_difference"] <= 1e-4
    assert [path.name for path in tmp_path.iterdir()] == [f"model{ending}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_resuming_takes_the_run_to_where_a_longer_one_would_be(name: str, runs: Any, tmp_path: Path) -> None:
    short, options = runs(name)
    sweeps = hasattr(options, "sweeps")
    more = {"sweeps": 3} if sweeps else {"steps": 9} if options.steps else {"epochs": 3}
    longer = dataclasses.replace(options, **more)
    with undrawn():
        whole = execute(RECIPES[name], dataclasses.replace(longer, out=tmp_path / "whole"))
    copy = shutil.copytree(short.run, tmp_path / "short")
    resumed = execute(RECIPES[name], dataclasses.replace(longer, out=None, resume=copy))
    assert resumed.measures == whole.measures
    assert sweeps or short.measures != whole.measures


def test_resuming_with_other_options_or_data_is_refused(runs: Any, tmp_path: Path) -> None:
    options = options_for("mlp", tmp_path)
    execute(RECIPES["mlp"], options)
    resume = dataclasses.replace(options, out=None, resume=tmp_path / "run")
    with pytest.raises(InputError, match="other values of --seed"):
        execute(RECIPES["mlp"], dataclasses.replace(resume, seed=1))
    softmax = RECIPES["softmax"]
    with pytest.raises(InputError, match="is a run of the recipe 'mlp'"):
        execute(softmax, softmax.options(data=options.data, resume=tmp_path / "run"))
    with pytest.raises(InputError, match="does not exist"):
        execute(RECIPES["mlp"], dataclasses.replace(resume, resume=tmp_path / "nothing"))
    write_csv(tmp_path / "mine.csv", seed=5)
    with pytest.raises(InputError, match="has changed since"):
        execute(RECIPES["mlp"], resume)


def test_an_existing_run_is_not_overwritten(runs: Any) -> None:
    outcome, options = runs("mlp")
    before = (outcome.run / "result.json").read_bytes()
    with pytest.raises(InputError, match="exists already"):
        execute(RECIPES["mlp"], options)
    assert (outcome.run / "result.json").read_bytes() == before


def test_bad_data_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n3\n")
    mlp = RECIPES["mlp"]
    with pytest.raises(InputError, match=r"bad.csv:3"):
        execute(mlp, mlp.options(data=tmp_path / "bad.csv", out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_run_names_everything_needed_to_repeat_it(runs: Any) -> None:
    outcome, options = runs("softmax")
    run = load(outcome.run)
    assert dataclasses.replace(run.options(), quiet=True) == dataclasses.replace(
        options, data=options.data.resolve()
    )
    assert run.config["versions"].keys() == {"quire", "torch", "python"}
    assert run.config["command"] == "quire train softmax"
    result = json.loads((outcome.run / "result.json").read_text())
    assert result["layers"][-1]["parameters"] == result["parameters"]
