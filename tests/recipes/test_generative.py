"""Recipes that learn without a target: what they build, what they show, what they refuse."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

import quire.recipes  # noqa: F401
from quire.errors import InputError
from quire.options import Train, Tune
from quire.recipes.base import RECIPES
from quire.recipes.execute import execute
from quire.recipes.generative_pictures import recognised
from quire.recipes.unlabelled import load_unlabelled
from quire.runs import load
from tests.recipes.examples import write_csv, write_images

pytestmark = pytest.mark.slow

AUTOENCODERS = ("autoencoder", "sparse", "denoising", "contractive", "masked")
NAMES = (*AUTOENCODERS, "vae", "cvae", "gan", "cgan")


def options_of(name: str, changes: dict[str, Any] | None = None, **given: Any) -> Any:
    """Options of a recipe; `changes` are those of its network."""
    options = RECIPES[name].options(quiet=True, **given)
    if changes:
        options = dataclasses.replace(options, model=dataclasses.replace(options.model, **changes))
    return options


def plan_of(name: str, changes: dict[str, Any] | None = None, **given: Any) -> Any:
    return RECIPES[name].build(options_of(name, changes, **given))


def pictures(run: Path) -> set[str]:
    return {path.stem for path in (run / "figures").glob("*.svg")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    ring = folder / "ring.csv"
    angles = np.linspace(0, 6, 80)
    sides = np.where(angles < 3, "up", "down")
    rows = [f"{10 + 3 * np.cos(a):.3f},{100 * np.sin(a):.2f},{s}" for a, s in zip(angles, sides, strict=True)]
    ring.write_text("\n".join(["width,weight,side", *rows]) + "\n")
    return {
        "images": write_images(folder / "images"),
        "rows": write_csv(folder / "rows.csv"),
        "ring": ring,
    }


# What is built --------------------------------------------------------------------------------


def test_sizes_follow_the_data(files: dict[str, Path]) -> None:
    small, large, rows = (plan_of("vae", data=d).task for d in (None, files["images"], files["rows"]))
    sizes = [(t.model.config.hidden, t.latent, t.decoder) for t in (small, large, rows)]
    assert sizes[0] == ((128, 128), 8, "bernoulli")  # 8 × 8 grey pixels
    assert sizes[1] == ((500, 500), 20, "gaussian")  # 3 × 16 × 16
    assert sizes[2] == ((128, 128), 7, "gaussian")  # 14 features
    assert small.binarise
    assert plan_of("vae", {"hidden": (), "latent": 3}).task.model.config.hidden == ()
    codes = [plan_of(name).task.model.config for name in AUTOENCODERS]
    assert [config.code for config in codes] == [16, 128, 64, 32, 64]
    assert [config.tied for config in codes] == [False, True, False, True, False]
    assert plan_of("masked").task.rules.patch == 2
    assert plan_of("masked", data=files["images"]).task.rules.patch == 4
    gan, rows = (plan_of("gan", data=d).task.generator.config for d in (None, files["rows"]))
    assert (gan.kind, gan.hidden, gan.channels, gan.output) == ("convolutional", (128,), 16, "tanh")
    assert (rows.kind, rows.hidden, rows.output) == ("dense", (256, 256), "linear")
    assert [plan_of(name).task.classes for name in ("vae", "cvae", "gan", "cgan")] == [0, 10, 0, 10]


def test_options_reach_the_task() -> None:
    assert plan_of("sparse", penalty=0.3).task.rules.sparsity == 0.3
    assert plan_of("contractive", penalty=0.4).task.rules.contraction == 0.4
    rules = plan_of("denoising", noise="salt_and_pepper", amount=0.2).task.rules
    assert (rules.noise, rules.amount) == ("salt_and_pepper", 0.2)
    assert plan_of("masked", share=0.25, patch=4).task.rules == dataclasses.replace(
        plan_of("masked").task.rules, masked=0.25, patch=4
    )
    assert plan_of("autoencoder", loss="bernoulli").task.rules.loss == "bernoulli"
    free = plan_of("autoencoder", {"kind": "convolutional", "channels": 4, "norm": "batch"}).task.model.config
    assert (free.kind, free.channels, free.norm) == ("convolutional", 4, "batch")
    vae = plan_of("vae", beta=2.0, warmup=7, samples=3, importance=0, binarise=False).task
    assert (vae.scales["kl"], vae.warmup, vae.samples, vae.importance, vae.binarise) == (2.0, 7, 3, 0, False)
    assert plan_of("vae", decoder="gaussian", noise=0.1).task.noise == 0.1
    gan = plan_of("gan", {"spectral": False}, loss="min-max", discriminator_steps=2, discriminator_step=0.5)
    assert (gan.task.loss, gan.task.turns) == ("min-max", {"generator": 2})
    assert gan.task.step_factor("discriminator.head.weight") == 0.5
    assert gan.task.step_factor("generator.decoder.layers.0.weight") == 1.0
    assert not gan.task.discriminator.config.spectral


def test_few_rows_are_learned_longer_and_validated_less_often(files: dict[str, Path]) -> None:
    few = plan_of("vae")
    assert few.options.train.validate_every == 50
    assert few.epochs * 10 == 2000  # 1,258 images in batches of 128
    assert plan_of("vae", train=Train(validate_every=7)).options.train.validate_every == 7
    one_each = plan_of("autoencoder", train=Train(batch_size=1))
    assert one_each.options.train.validate_every is None
    assert one_each.epochs == 20


# What is shown --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "wanted"),
    [
        ("denoising", "images", {"reconstructions", "latent-plane"}),
        ("sparse", "images", {"reconstructions", "latent-plane", "filters"}),
        ("masked", "rows", {"reconstructions", "latent-plane"}),
        ("cvae", "images", {"reconstructions", "latent-plane", "samples", "traversal", "kl"}),
        ("vae", "rows", {"reconstructions", "latent-plane", "samples", "kl"}),
        ("cgan", "images", {"samples", "players"}),
        ("cgan", "ring", {"samples", "players", "surface"}),
    ],
)
def test_reports_show_what_was_learned(
    name: str, data: str, wanted: set[str], files: dict[str, Path], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"target": "side"} if data == "ring" else {}
    options = options_of(name, data=files[data], out=tmp_path / "run", steps=3, **given)
    outcome = execute(RECIPES[name], options)
    assert pictures(outcome.run) == wanted
    captions = json.loads((outcome.run / "figures" / "captions.json").read_text())
    assert all(words["title"] and words["caption"].endswith(".") for words in captions.values())
    conditional = {"recognised", "recognised_data"} & outcome.measures["test"].keys()
    assert len(conditional) == (2 if name in ("cvae", "cgan") else 0)


@pytest.mark.usefixtures("unseen")
def test_the_curves_of_the_players_are_those_of_the_validations(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.recipes import generative_pictures

    shown: list[Any] = []
    draw = generative_pictures.players_figure

    def note(*lines: Any, **options: Any) -> Any:
        shown.append(lines)
        return draw(*lines, **options)

    monkeypatch.setattr(generative_pictures, "players_figure", note)
    train = dataclasses.replace(options_of("gan").train, validate_every=2)
    options = options_of("gan", data=files["ring"], out=tmp_path / "run", steps=6, train=train)
    outcome = execute(RECIPES["gan"], options)
    lines = [json.loads(line) for line in (outcome.run / "metrics.jsonl").read_text().splitlines()]
    values = [line["values"] for line in lines if line["split"] == "validation"]
    ((steps, *curves),) = shown
    assert steps.tolist() == [2, 4, 6]
    for name, curve in zip(
        ("discriminator", "generator", "real_accuracy", "fake_accuracy"), curves, strict=True
    ):
        assert curve.tolist() == [value[name] for value in values]


@pytest.mark.usefixtures("unseen")
def test_layers_of_both_players_are_listed_once(tmp_path: Path, files: dict[str, Path]) -> None:
    for name in ("cgan", "cvae"):
        options = options_of(name, data=files["images"], out=tmp_path / name, steps=2)
        outcome = execute(RECIPES[name], options)
        result = json.loads((outcome.run / "result.json").read_text())
        names = [layer["name"] for layer in result["layers"]]
        assert len(names) == len(set(names))
        parts = ("generator.", "discriminator.") if name == "cgan" else ("encoder.", "decoder.")
        assert all(any(n.startswith(part) for n in names) for part in parts)
        counted = sum(layer["parameters"] for layer in result["layers"])
        projection = 3 * 256 if name == "cgan" else 0  # read without a call where all classes are compared
        noise = 1 if name == "cvae" else 0  # the decoder's own deviation
        assert counted + projection + noise == result["parameters"]


class Copies:
    """A model that gives back rows of the class that was asked for, or of the next one."""

    needs_target = True
    device = torch.device("cpu")

    def __init__(self, data: Any, shift: int) -> None:
        self.data, self.shift, self.classes = data, shift, 10

    def sample(self, count: int, label: Tensor) -> Tensor:
        target = self.data.train.target
        wanted = (label + self.shift) % 10
        places = [int((target == k).nonzero()[0]) for k in range(10)]
        return self.data.train.inputs[torch.tensor([places[k] for k in wanted.tolist()])]


def test_samples_are_recognised_by_the_nearest_row() -> None:
    found = load_unlabelled(RECIPES["cgan"].options(), "digits", need_classes=True)
    assert recognised(Copies(found.data, 0), found)["recognised"] == 1.0  # type: ignore[arg-type]
    judged = recognised(Copies(found.data, 1), found)  # type: ignore[arg-type]
    assert judged["recognised"] == 0.0
    data: Any = found.data
    x, y = (np.asarray(part.inputs.flatten(1), dtype=float) for part in (data.train, data.test))
    right = [
        int(data.train.target[((x - row) ** 2).sum(1).argmin()]) == int(label)
        for row, label in zip(y, data.test.target, strict=True)
    ]
    assert judged["recognised_data"] == pytest.approx(np.mean(right))


# What is used afterwards ----------------------------------------------------------------------


@pytest.mark.usefixtures("unseen")
def test_rows_come_back_in_their_own_units(files: dict[str, Path], tmp_path: Path) -> None:
    """A code as wide as the row loses nothing."""
    options = options_of(
        "autoencoder", {"hidden": (), "code": 30, "activation": "linear"}, data=files["rows"],
        out=tmp_path / "run", steps=1500,
    )  # fmt: skip
    run = load(execute(RECIPES["autoencoder"], options).run)
    predicted = run.predict(files["rows"]).to_pylist()
    with files["rows"].open() as file:
        cells = list(csv.DictReader(file))
    sizes = [
        (r["reconstruction of size"], float(c["size"]))
        for r, c in zip(predicted, cells, strict=True)
        if c["size"]
    ]
    assert np.abs(np.diff(np.array(sizes, dtype=float))).max() < 1.0  # deviation 10
    colours = [r["reconstruction of colour"] == c["colour"] for r, c in zip(predicted, cells, strict=True)]
    assert all(colours)
    assert {"code_1", "code_30", "error"} <= predicted[0].keys()


@pytest.mark.usefixtures("unseen")
def test_a_conditional_model_names_the_likeliest_class(files: dict[str, Path], tmp_path: Path) -> None:
    for name in ("cvae", "cgan"):
        options = options_of(name, data=files["images"], out=tmp_path / name, steps=2)
        run = load(execute(RECIPES[name], options).run)
        found = set(run.predict(files["images"])["class"].to_pylist())
        assert found <= {"bar", "noise", "square"}
        kept = pq.read_table(run.path / "predictions.parquet")
        assert set(kept["class"].to_pylist()) <= {"bar", "noise", "square"}


@pytest.mark.usefixtures("unseen")
@pytest.mark.slow
@pytest.mark.parametrize("data", ["images", "rows"])
def test_an_exported_generator_makes_the_same(data: str, files: dict[str, Path], tmp_path: Path) -> None:
    name = "cgan" if data == "images" else "gan"
    run = load(execute(RECIPES[name], options_of(name, data=files[data], out=tmp_path / "r", steps=3)).run)
    facts = run.export(tmp_path / "model.onnx")
    assert facts["outputs"] == [data]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    noise = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).numpy()
    given = {"noise": noise} | ({"label": np.arange(5) % 3} if data == "images" else {})
    (made,) = session.run(None, given)
    ours = run.generate(5, seed=3)
    if data == "images":
        assert ours.images is not None
        assert np.abs(made - ours.images).max() <= 0.51
        assert facts["inputs"][1] == "class number 0…2"
        return
    assert ours.rows is not None
    names = run.preparation.feature_names
    for column in ("size", "value"):
        wanted = ours.rows[column].to_numpy()
        known = ~np.isnan(wanted)
        assert known.any()
        np.testing.assert_allclose(made[known, names.index(column)], wanted[known], rtol=1e-4)


@pytest.mark.usefixtures("unseen")
def test_a_trained_model_is_tuned_on_other_data(files: dict[str, Path], tmp_path: Path) -> None:
    base = execute(RECIPES["cvae"], options_of("cvae", data=files["images"], out=tmp_path / "base", steps=2))
    tune = Tune(base=base.run)
    other = tmp_path / "other"
    write_images(other, each=8, seed=3)
    options = options_of("cvae", data=other, out=tmp_path / "tuned", steps=2, tune=tune)
    tuned, before = load(execute(RECIPES["cvae"], options).run), load(base.run)
    assert tuned.preparation.mean == before.preparation.mean  # type: ignore[attr-defined]
    near = (
        (tuned.task.model.decoder.layers[0].weight - before.task.model.decoder.layers[0].weight).abs().max()
    )
    assert near < 0.01
    (other / "bar").rename(other / "stick")
    with pytest.raises(InputError, match=r"(?s)classes noise, square, stick with .*those of the base: bar"):
        execute(RECIPES["cvae"], dataclasses.replace(options, out=tmp_path / "again"))


@pytest.mark.usefixtures("unseen")
def test_rows_of_another_file_are_scaled_as_those_of_the_base(files: dict[str, Path], tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": files["rows"], "out": tmp_path / "base", "steps": 2}
    base = load(execute(RECIPES["sparse"], options_of("sparse", **given)).run)
    given = {
        "data": write_csv(tmp_path / "b.csv", seed=5),
        "out": tmp_path / "t",
        "tune": Tune(base=base.path),
    }
    tuned = load(execute(RECIPES["sparse"], options_of("sparse", steps=2, **given)).run)
    assert tuned.preparation.inputs == base.preparation.inputs  # type: ignore[attr-defined]


# What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "given", "message"),
    [
        ("autoencoder", {"channels": 4}, {}, "--model.channels 4 with --model.kind dense"),
        ("autoencoder", {"kind": "convolutional"}, {"data": "rows"}, "kind convolutional with a table"),
        ("autoencoder", {"code": 0}, {}, "--model.code is 0"),
        ("autoencoder", {"hidden": (4, 0)}, {}, r"--model.hidden is \(4, 0\)"),
        ("autoencoder", {"tied": True, "norm": "batch"}, {}, "--model.tied with --model.norm batch"),
        ("autoencoder", {}, {"loss": "bernoulli", "data": "rows"}, "--loss bernoulli with a table"),
        ("sparse", {}, {"penalty": 0.0}, "--penalty is 0"),
        ("contractive", {}, {"penalty": -1.0}, "--penalty is -1"),
        ("denoising", {}, {"noise": "masking", "amount": 1.2}, "a share below 1 for masking noise"),
        ("denoising", {}, {"amount": 0.0}, "--amount is 0"),
        ("masked", {}, {"share": 1.0}, "--share is 1"),
        ("masked", {}, {"patch": 9}, "--patch 9 of images of side 8"),
        ("masked", {}, {"patch": 2, "data": "rows"}, "--patch 2 with a table"),
        ("vae", {}, {"decoder": "bernoulli", "data": "rows"}, "--decoder bernoulli with a table"),
        ("vae", {}, {"noise": 0.1}, r"--noise with a bernoulli decoder(.|\n)*--decoder gaussian"),
        ("vae", {}, {"binarise": False, "data": "images"}, "--no-binarise with a gaussian decoder"),
        ("vae", {"latent": 0}, {}, "--model.latent is 0"),
        ("vae", {}, {"samples": 0}, "--samples is 0"),
        ("cvae", {}, {"data": "rows"}, r"rows.csv without --target"),
        ("cgan", {}, {"data": "rows", "target": "value"}, "--target value, which holds values"),
        ("gan", {"hidden": ()}, {}, "--model.hidden without a width"),
        ("gan", {"channels": 4}, {"data": "rows"}, "--model.channels 4 with a table"),
        ("gan", {}, {"discriminator_step": 0.0}, "--discriminator_step is 0"),
        ("gan", {}, {"tune": Tune(base=Path("run"))}, "--tune with two players"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(
    name: str, changes: dict[str, Any], given: dict[str, Any], message: str, files: dict[str, Path]
) -> None:
    if "data" in given:
        given = {**given, "data": files[given["data"]]}
    with pytest.raises(InputError, match=message):
        plan_of(name, changes, **given)


@pytest.mark.parametrize("name", NAMES)
def test_noise_on_bytes_is_refused(name: str) -> None:
    noisy = dataclasses.replace(Train().noise, inputs=0.1)
    with pytest.raises(InputError, match=r"--train.noise.inputs 0.1 with images"):
        plan_of(name, train=dataclasses.replace(options_of(name).train, noise=noisy))
