"""Recipes of few labels: which labels are used, tables and images, more rows without, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from sklearn.datasets import load_wine

from quire.data.few_labels import NO_LABEL
from quire.errors import InputError
from quire.options import Train
from quire.recipes.base import RECIPES
from quire.recipes.execute import Outcome, execute
from quire.recipes.few_labels import Changes, Coder, FewLabelsOptions, RowChanges
from quire.recipes.few_labels_data import background, open_few
from quire.runs import load
from tests.recipes.examples import write_csv, write_images

pytestmark = pytest.mark.slow

NAMES = ("semi-supervised", "contrastive", "siamese")
SMALL = Coder(code=6, hidden=(8,), channels=4)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "mine")


@pytest.fixture
def wine(tmp_path: Path) -> Path:
    data = load_wine()
    lines = [",".join([*data.feature_names, "cultivar"])]
    names = ("barolo", "grignolino", "barbera")
    lines += [
        ",".join(map(str, row)) + f",{names[kind]}" for row, kind in zip(data.data, data.target, strict=True)
    ]
    path = tmp_path / "wine.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def options(name: str, **given: Any) -> Any:
    given = {"labels": 12, "epochs": 2, "quiet": True, "model": SMALL, **given}
    return RECIPES[name].options(**given)


def run(name: str, folder: Path, **given: Any) -> Outcome:
    return execute(RECIPES[name], options(name, out=folder, **given))


# Which labels are used ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["semi-supervised", "contrastive"])
def test_few_training_rows_keep_their_class_and_all_others_are_learned_from(name: str, images: Path) -> None:
    few = open_few(options(name, data=images))
    data: Any = few.whole.data
    target = data.train.target
    assert int((target >= 0).sum()) == 12
    assert (target >= 0).nonzero()[:, 0].tolist() == few.rows.tolist()
    assert torch.bincount(target[target >= 0]).tolist() == [4, 4, 4], "stratified"
    assert set(target.tolist()) == {NO_LABEL, 0, 1, 2}
    assert torch.equal(few.inputs, data.train.inputs[few.rows])
    assert torch.equal(few.target, target[few.rows])
    for part in (data.validation, data.test):
        assert (part.target >= 0).all(), "to judge by"
    whole = open_few(options(name, data=images, labels=None)).whole.data
    assert (whole.train.target >= 0).all()  # type: ignore[attr-defined]


def test_siamese_pairs_need_classes_so_the_others_are_left_out(images: Path) -> None:
    few = open_few(options("siamese", data=images), only_labelled=True)
    data: Any = few.whole.data
    assert len(data.train) == 12
    assert few.rows.tolist() == list(range(12))
    assert len(data.lines("train")) == 12
    everything = open_few(options("siamese", data=images, labels=None))
    for pixels, name in zip(data.train.inputs, data.lines("train"), strict=True):
        place = list(everything.whole.data.lines("train")).index(name)
        assert torch.equal(pixels, everything.inputs[place]), "names stay with their images"


def test_the_seed_decides_which_labels_and_nothing_is_chosen_by_others(images: Path) -> None:
    one, again, other = (
        open_few(options("contrastive", data=images, seed=seed)).inputs for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    for name in NAMES:
        assert RECIPES[name].options().train.restore == "last", "validation labels must not choose weights"
        assert RECIPES[name].options().labels == 100


# Runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_learned_from_as_images_are(name: str, wine: Path, tmp_path: Path) -> None:
    length = {"epochs": None, "steps": 300} if name == "siamese" else {"epochs": 60}
    outcome = run(
        name, tmp_path / "run", data=wine, target="cultivar", labels=30, **length,
        train=Train(batch_size=64, restore="last", validate_every=100),
        model=Coder(code=16, hidden=(32,)),
    )  # fmt: skip
    assert outcome.measures["test"]["accuracy"] > 0.85, outcome.measures["test"]
    rows = pq.read_table(outcome.run / "predictions.parquet").to_pylist()
    assert {row["truth"] for row in rows} == {"barolo", "grignolino", "barbera"}
    assert sum(row["truth"] == row["prediction"] for row in rows) / len(rows) == pytest.approx(
        outcome.measures["test"]["accuracy"]
    )
    predicted = load(outcome.run).predict(wine)
    assert predicted.num_rows == 178
    captions = json.loads((outcome.run / "figures" / "captions.json").read_text())
    assert list(captions) == ["latent.svg"]


@pytest.mark.parametrize("name", NAMES)
def test_images_have_pictures_of_codes_views_and_neighbours(name: str, images: Path, tmp_path: Path) -> None:
    outcome = run(name, tmp_path / "run", data=images)
    captions = json.loads((outcome.run / "figures" / "captions.json").read_text())
    wanted = {"latent.svg", "views.svg"} | ({"retrieval.svg"} if name != "semi-supervised" else set())
    assert wanted <= set(captions)
    report = (outcome.run / "report.html").read_text()
    assert "12 of " in report, "how many labels were used"
    measures = outcome.measures["test"]
    if name == "semi-supervised":
        assert "confident" in measures
    else:
        assert {"precision_at_1", "precision_at_k"} <= measures.keys()


@pytest.mark.usefixtures("unseen")
def test_autoencoding_reports_both_its_terms(images: Path, tmp_path: Path) -> None:
    outcome = run("semi-supervised", tmp_path / "run", data=images, method="autoencode")
    measures = outcome.measures["test"]
    assert measures["loss"] == pytest.approx(measures["target"] + measures["autoencode"])


@pytest.mark.usefixtures("unseen")
def test_rows_without_a_class_can_come_from_elsewhere(images: Path, wine: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.mkdir()
    for i, file in enumerate(sorted(images.rglob("*.png"))[:9]):
        shutil.copy(file, more / f"{i}.png")
    before = open_few(options("contrastive", data=images))
    after = open_few(options("contrastive", data=images, unlabelled=more))
    assert len(after.whole.data.train) == len(before.whole.data.train) + 9
    assert torch.equal(after.rows, before.rows)
    assert (after.whole.data.train.target[-9:] == NO_LABEL).all()  # type: ignore[attr-defined]
    outcome = run("semi-supervised", tmp_path / "run", data=images, unlabelled=more)
    assert load(outcome.run).evaluate()["test"] == pytest.approx(outcome.measures["test"])
    # A table without its column of classes.
    lines = wine.read_text().splitlines()
    other = tmp_path / "other.csv"
    other.write_text("\n".join(line.rsplit(",", 1)[0] for line in lines[:40]) + "\n")
    table = {"data": wine, "target": "cultivar"}
    longer = open_few(options("semi-supervised", **table, unlabelled=other)).whole.data.train
    assert len(longer) == len(open_few(options("semi-supervised", **table)).whole.data.train) + 39


@pytest.mark.usefixtures("unseen")
def test_images_larger_than_memory_are_learned_from(images: Path, tmp_path: Path) -> None:
    reading = dataclasses.replace(RECIPES["semi-supervised"].options().images, memory=1e-9, workers=1)
    outcome = run("semi-supervised", tmp_path / "run", data=images, images=reading)
    inside = run("semi-supervised", tmp_path / "inside", data=images)
    assert outcome.measures["train"] == pytest.approx(inside.measures["train"], rel=1e-4)


def test_many_labels_leave_an_even_selection_to_compare_with(images: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("quire.recipes.few_labels.MOST_REFERENCES", 9)
    plan = RECIPES["contrastive"].build(options("contrastive", data=images, labels=None))
    task: Any = plan.task
    assert torch.bincount(task.reference_target).tolist() == [3, 3, 3]
    train: Any = plan.data.train
    assert torch.equal(train.inputs[task.reference_rows], task.reference_inputs)
    assert torch.equal(train.target[task.reference_rows], task.reference_target)
    assert any("9 labelled rows are kept" in note for note in plan.notes)


def test_paper_around_drawings_is_found(images: Path) -> None:
    few = open_few(options("contrastive"))
    assert background(few.whole) == [0.0]
    photos = background(open_few(options("contrastive", data=images)).whole)
    assert len(photos) == 3
    assert all(20 < value < 90 for value in photos), "noise up to 90, with a few bars"


# Refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_labels_that_cannot_be_are_refused_before_anything_is_written(
    name: str, images: Path, tmp_path: Path
) -> None:
    for labels, words in ((1000, r"--labels 1000 of 34 training rows"), (2, "--labels 2 for 3 classes")):
        with pytest.raises(InputError, match=words):
            run(name, tmp_path / "run", data=images, labels=labels)
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="--labels is 0"):
        options(name, labels=0)


def test_tables_need_a_column_of_classes(wine: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)wine.csv without --target.*--target COLUMN"):
        run("siamese", tmp_path / "run", data=wine)
    with pytest.raises(InputError, match=r"(?s)--target value, which holds values.*column of classes"):
        run("siamese", tmp_path / "run", data=write_csv(tmp_path / "t.csv"), target="value")


def test_options_that_would_do_nothing_are_refused(images: Path, wine: Path, tmp_path: Path) -> None:
    for given, words in (
        ({"data": images, "rows": RowChanges(noise=1.0)}, r"(?s)--rows options with images.*use --augment"),
        (
            {"data": wine, "target": "cultivar", "augment": Changes(rotate=3.0)},
            r"(?s)--augment options with a table.*use --rows",
        ),
        ({"data": images, "unlabelled": tmp_path / "no"}, "no, which does not exist"),
        ({"data": images, "unlabelled": wine}, r"(?s)wine.csv, a table.*images, like the data"),
        ({"data": wine, "target": "cultivar", "unlabelled": images}, r"mine, images"),
    ):
        with pytest.raises(InputError, match=words):
            run("contrastive", tmp_path / "run", **given)
    base = RECIPES["contrastive"].options()
    noise = dataclasses.replace(base.train, noise=dataclasses.replace(base.train.noise, inputs=0.1))
    with pytest.raises(InputError, match=r"(?s)noise.inputs 0.1 with a recipe of few labels.*--rows.noise"):
        options("contrastive", train=noise)
    tune = dataclasses.replace(base.tune, base=tmp_path)
    with pytest.raises(InputError, match="--tune with a recipe of few labels"):
        options("contrastive", tune=tune)
    held_out = dataclasses.replace(base.images, validation=0.0, test=0.0)
    with pytest.raises(InputError, match=r"(?s)no validation and no test part.*--images.validation 0"):
        run("contrastive", tmp_path / "run", data=images, images=held_out)
    assert not (tmp_path / "run").exists()
    assert issubclass(RECIPES["siamese"].options, FewLabelsOptions)
    assert not hasattr(RECIPES["siamese"].options(), "unlabelled")
