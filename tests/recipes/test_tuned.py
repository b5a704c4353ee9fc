"""Going on from a trained run: as a whole, through adapters, over a base in four bits; merging and back."""

from __future__ import annotations

import dataclasses
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import quire.recipes  # noqa: F401
from quire.cli.main import main
from quire.errors import InputError
from quire.options import LoRA, Tune
from quire.recipes.base import RECIPES
from quire.recipes.execute import Outcome, execute
from quire.recipes.merged import merge_run, unmerge_run
from quire.runs import load
from quire.train.checkpoints import newest_checkpoint
from tests.recipes.examples import target_for, write_csv, write_data

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unseen")]

KINDS = {"mlp": "dense", "lenet": "convolution", "gru": "recurrent", "transformer": "attention"}
"""A recipe for each kind of layer that adapters can change."""


def options_for(name: str, folder: Path, *, seed: int = 0, **given: Any) -> Any:
    recipe = RECIPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    own = recipe.options()
    if recipe.targets == "text":
        given = {"text": dataclasses.replace(own.text, context=16), **given}
    if recipe.targets == "any":
        given = {"target": target_for(recipe), **given}
    train = dataclasses.replace(own.train, batch_size=16, restore="last", validate_every=3)
    data = given.pop("data", None) or write_data(recipe, folder, seed=seed)
    return recipe.options(data=data, quiet=True, train=train, **{"steps": 6, "out": folder / "run", **given})


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def train(name: str) -> Outcome:
        return execute(RECIPES[name], options_for(name, tmp_path_factory.mktemp(name)))

    return train


def tuned(name: str, base: Path, folder: Path, **given: Any) -> Outcome:
    lora = LoRA(rank=2, targets=(KINDS[name],))
    tune = given.pop("tune", Tune(base=base, lora=lora))
    return execute(RECIPES[name], options_for(name, folder, seed=1, tune=tune, **given))


def predictions(run: Path, name: str, data: Path) -> Any:
    if RECIPES[name].targets == "text":
        return load(run).sample(["the "], length=20, temperature=0.0)
    return load(run).predict(data).to_pydict()


@pytest.mark.parametrize("name", KINDS)
def test_adapters_are_trained_and_the_base_stays(name: str, bases: Any, tmp_path: Path) -> None:
    base = bases(name).run
    outcome = tuned(name, base, tmp_path)
    run, before = load(outcome.run), load(base)
    assert run.adapters is not None
    kept = run.adapters.base_state_dict()
    for key, value in before.task.model.state_dict().items():
        assert torch.equal(kept[key], value), key
    moved = [value.abs().max().item() for value in run.adapters.state_dict().values()]
    assert min(moved) > 0  # the factor that begins at zero has been trained as well
    assert any("parameters are trained beside" in note for note in outcome.warnings)


@pytest.mark.parametrize("name", KINDS)
def test_a_merged_run_predicts_the_same_and_can_be_taken_apart(name: str, bases: Any, tmp_path: Path) -> None:
    outcome = tuned(name, bases(name).run, tmp_path)
    data = next(tmp_path.glob("mine*"))
    report = merge_run(outcome.run, tmp_path / "merged")
    assert report.total.relative < 1e-6
    merged = load(tmp_path / "merged")
    assert merged.adapters is None
    assert type(merged.task.model) is type(load(bases(name).run).task.model)
    expected, found = (predictions(run, name, data) for run in (outcome.run, tmp_path / "merged"))
    assert expected.keys() == found.keys() if isinstance(expected, dict) else expected == found
    if isinstance(expected, dict):
        for key, values in expected.items():
            for a, b in zip(values, found[key], strict=True):
                assert a == (pytest.approx(b, abs=1e-4) if isinstance(b, float) else b), key

    unmerge_run(tmp_path / "merged", tmp_path / "again")
    first, again = (newest_checkpoint(run / "checkpoints") for run in (outcome.run, tmp_path / "again"))
    assert first.documents == again.documents
    assert first.tensors.keys() == again.tensors.keys()
    for group, tensors in first.tensors.items():
        for key, value in tensors.items():
            assert value.numpy().tobytes() == again.tensors[group][key].numpy().tobytes(), (group, key)


def test_a_tuned_run_goes_on_and_needs_its_base_no_more_to_be_judged(bases: Any, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases("gru").run, base)
    whole = tuned("gru", base, tmp_path / "a", steps=6)
    part = tuned("gru", base, tmp_path / "b", steps=3)
    options = options_for(
        "gru", tmp_path / "b", seed=1, steps=6, out=None, resume=part.run,
        tune=Tune(base=base, lora=LoRA(rank=2, targets=("recurrent",))),
    )  # fmt: skip
    again = execute(RECIPES["gru"], options)
    assert newest_checkpoint(again.run / "checkpoints").step == 6
    shutil.rmtree(base)
    for run in (whole.run, again.run):
        measures = load(run).evaluate()
        kept = whole.measures if run == whole.run else again.measures
        assert measures["test"]["loss"] == pytest.approx(kept["test"]["loss"], rel=1e-5)


def test_a_base_in_four_bits(bases: Any, tmp_path: Path) -> None:
    base = bases("transformer").run
    tune = Tune(base=base, quantise="nf4", lora=LoRA(rank=2, targets=("dense",)))
    outcome = tuned("transformer", base, tmp_path, tune=tune)
    assert any("NormalFloat4" in note for note in outcome.warnings)
    run = load(outcome.run)
    assert run.adapters is not None
    assert run.adapters.spec()["stored"]
    again = merge_run(outcome.run, tmp_path / "four")
    whole = merge_run(outcome.run, tmp_path / "whole", dequantise=True)
    # Rounding to four bits a second time loses what the adapters learned in so few steps, and says so.
    assert whole.total.relative < 1e-6 < 1e-5 < again.total.relative
    data = next(tmp_path.glob("mine*"))
    assert load(tmp_path / "four").predict(data).num_rows == load(outcome.run).predict(data).num_rows


def test_other_classes_get_outputs_of_their_own(bases: Any, tmp_path: Path) -> None:
    base = bases("mlp").run
    outcome = tuned("mlp", base, tmp_path, target="label", data=write_csv(tmp_path / "mine.csv", seed=3))
    assert any("are learned anew" in note for note in outcome.warnings)
    run, before = load(outcome.run), load(base)
    assert run.adapters is not None
    kept, old = run.adapters.base_state_dict(), before.task.model.state_dict()
    same = [key for key in old if kept[key].shape == old[key].shape and torch.equal(kept[key], old[key])]
    assert same
    assert len(same) < len(old)


def test_all_of_a_base_is_trained_without_adapters(bases: Any, tmp_path: Path) -> None:
    base = bases("lenet").run
    outcome = tuned("lenet", base, tmp_path, tune=Tune(base=base))
    run, before = load(outcome.run), load(base)
    assert run.adapters is None
    old = before.task.model.state_dict()
    moved = {key: (value - old[key]).abs().max().item() for key, value in run.task.model.state_dict().items()}
    assert all(0 < change < 1 for key, change in moved.items() if value_of(key))


def value_of(key: str) -> bool:
    return key.endswith(("weight", "bias"))


def test_an_adapter_is_listed_and_exported(
    bases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tuned("mlp", bases("mlp").run, tmp_path).run
    assert main(["adapter", "list", str(run)]) == 0
    assert "dense" in capsys.readouterr().out
    assert main(["adapter", "export", str(run), str(tmp_path / "one.safetensors")]) == 0
    assert main(["adapter", "export", str(run), str(tmp_path / "peft")]) == 0
    assert (tmp_path / "peft" / "adapter_config.json").is_file()
    other = load(run)
    assert other.adapters is not None
    assert other.adapters.load(tmp_path / "one.safetensors", "second") == "second"
    assert main(["adapter", "merge", str(run)]) == 0
    assert "relative error" in capsys.readouterr().out
    assert main(["adapter", "unmerge", f"{run}-merged"]) == 0
    assert main(["adapter", "list", f"{run}-merged"]) == 0
    assert "has no adapters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tune.lora.rank", "2"], "on a network that was never trained"),
        (["--tune.quantise", "nf4"], "--tune.quantise nf4 without adapters"),
        (["--tune.lora.alpha", "2"], "--tune.lora.alpha without --tune.lora.rank"),
        (["--tune.base", "BASE", "--tune.lora.rank", "2", "--tune.lora.targets", "atention"], "atention"),
        (["--tune.base", "BASE", "--model.width", "32"], "--model.width 32 with --tune.base"),
    ],
)
def test_mistakes_are_found_before_training(
    given: list[str], message: str, bases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(bases("gru").run) if word == "BASE" else word for word in given]
    data = RECIPES["gru"]
    path = write_data(data, tmp_path)
    command = ["train", "gru", "--data", str(path), "--out", str(tmp_path / "run"), "--text.context", "16"]
    assert main([*command, "--steps", "2", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_context_longer_than_that_of_the_base_is_refused(tmp_path: Path) -> None:
    small = dataclasses.replace(RECIPES["gpt"].options().model, layers=1, width=16, heads=2)  # type: ignore[attr-defined]
    base = execute(RECIPES["gpt"], options_for("gpt", tmp_path / "base", model=small, steps=2)).run
    longer = dataclasses.replace(RECIPES["gpt"].options().text, context=32)  # type: ignore[attr-defined]
    with pytest.raises(InputError) as caught:
        execute(RECIPES["gpt"], options_for("gpt", tmp_path / "new", tune=Tune(base=base), text=longer))
    assert (caught.value.got, caught.value.fix) == (
        f"--text.context 32 with --tune.base {base}",
        "--text.context 16",
    )


def test_a_base_of_another_family_is_refused(bases: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a run of 'gru'"):
        tuned("mlp", bases("gru").run, tmp_path)


def test_merged_runs_are_not_resumed(bases: Any, tmp_path: Path) -> None:
    base = bases("mlp").run
    outcome = tuned("mlp", base, tmp_path)
    merge_run(outcome.run, tmp_path / "merged")
    options = options_for(
        "mlp", tmp_path, seed=1, steps=9, out=None, resume=tmp_path / "merged",
        tune=Tune(base=base, lora=LoRA(rank=2, targets=("dense",))),
    )  # fmt: skip
    with pytest.raises(InputError, match="adapters are merged"):
        execute(RECIPES["mlp"], options)
