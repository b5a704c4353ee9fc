"""Every mistake of a user, through the command and through Python: its message, its exit code, and
nothing left behind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import quire.recipes
from quire.cli.main import main
from quire.errors import DataError, InputError, NonFiniteError
from quire.options import Table
from quire.recipes.base import RECIPES
from quire.recipes.execute import execute
from tests.recipes.examples import write_csv


def good(rows: int = 40) -> list[str]:
    return ["a,b,kind"] + [f"{i}.5,{i * 7 % 5},{'xy'[i % 2]}" for i in range(rows)]


class Case(NamedTuple):
    content: bytes
    message: str
    """Begins with file:line:column where the mistake has a place."""
    options: Mapping[str, Any] = MappingProxyType({})


def changed(line: int, text: str, lines: list[str] | None = None) -> bytes:
    lines = lines or good()
    lines[line - 1] = text
    return ("\n".join(lines) + "\n").encode()


CASES = {
    "ragged row": Case(changed(7, "1,2"), "mine.csv:7"),
    "too many cells": Case(changed(9, "1,2,x,4"), "mine.csv:9"),
    "text in a numeric column": Case(changed(12, "oops,2,x"), "mine.csv:12:a: "),
    "infinite number": Case(changed(5, "inf,2,x"), "mine.csv:5:a: "),
    "bad UTF-8": Case(changed(4, "?,2,x").replace(b"?", b"\xff\xfe"), "mine.csv:4"),
    "duplicate column": Case(changed(1, "a,a,kind"), "mine.csv:1"),
    "missing column": Case(changed(1, "a,b,kind"), "mine.csv: ", {"target": "kinds"}),
    "one class only": Case("\n".join(["a,kind"] + [f"{i},x" for i in range(30)]).encode(), "mine.csv"),
    "empty file": Case(b"", "mine.csv: "),
    "header without rows": Case(b"a,b,kind\n", "mine.csv"),
    "missing value refused": Case(changed(6, ",2,x"), "mine.csv:6:a: ", {"missing": "refuse"}),
    "missing target refused": Case(changed(6, "1,2,"), "mine.csv:6:kind: ", {"missing": "refuse"}),
    "too few rows": Case("\n".join(good(2)).encode(), "mine.csv: "),
}


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "mine.csv")


@pytest.mark.parametrize("name", CASES)
def test_mistakes_in_a_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_bytes(case.content)
    missing = case.options.get("missing", "impute")
    target = case.options.get("target")

    recipe = RECIPES["mlp"]
    options = recipe.options(
        data=Path("mine.csv"), target=target, quiet=True, table=Table(missing=missing), out=Path("run")
    )
    with pytest.raises(DataError) as caught:
        execute(recipe, options)
    assert str(caught.value).startswith(case.message)
    assert "expected:" in str(caught.value)
    assert left_behind(tmp_path) == []

    words = ["train", "mlp", "--data", "mine.csv", "--table.missing", missing, "--out", "run"]
    code = main(words + (["--target", target] if target else []))
    printed = capsys.readouterr()
    assert code == 2
    assert printed.err == f"error: {caught.value}\n"
    assert printed.out == ""
    assert left_behind(tmp_path) == []


OPTIONS = {
    "misspelt option": (["train", "mlp", "--optim.lrr", "1"], "--optim.lr"),
    "number out of range": (["train", "mlp", "--optim.lr", "-1"], "a number > 0"),
    "no number": (["train", "mlp", "--optim.lr", "fast"], "fast"),
    "unknown choice": (["train", "mlp", "--optim.name", "adamm"], "adam"),
    "unknown recipe": (["train", "mlpp"], "did you mean 'mlp'?"),
    "target without data": (["train", "mlp", "--target", "x"], "--target x without --data"),
    "epochs and steps": (["train", "mlp", "--epochs", "1", "--steps", "1"], "both --epochs and --steps"),
    "no such file": (["train", "mlp", "--data", "none.csv"], "none.csv"),
    "resume of nothing": (["train", "mlp", "--resume", "runs/none"], "runs/none"),
    "unknown measure": (["train", "mlp", "--train.monitor", "acuracy"], "did you mean 'accuracy'?"),
    "no such device": (["train", "mlp", "--device", "cuda:77"], "--device cuda:77"),
    "no such config": (["train", "mlp", "--config", "none.toml"], "none.toml"),
    "evaluate nothing": (["evaluate", "runs/none"], "runs/none"),
    "predict with nothing": (["predict", "runs/none", "x.csv"], "runs/none"),
    "export nothing": (["export", "runs/none", "model.onnx"], "runs/none"),
    "unknown entry": (["sheet", "show", "maths/norm"], "did you mean 'maths/norms'?"),
    "one target for several": (
        ["train", "multitask", "--data", "mine.csv", "--target", "value"], "separated by commas",
    ),
    "three classes for two": (
        ["train", "logistic", "--data", "mine.csv", "--target", "kind"], "has 3 classes",
    ),
    "classes for values": (
        ["train", "linear", "--data", "mine.csv", "--target", "kind"], "mine.csv:",
    ),
    "transfer from nothing": (["train", "transfer", "--data", "mine.csv"], "--source"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_mistakes_in_options(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = OPTIONS[name]
    monkeypatch.chdir(tmp_path)
    write_csv(Path("mine.csv"))
    assert main([*words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert left_behind(tmp_path) == []


def test_nan_in_an_array_file_stops_the_run_with_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table's NaN is a missing value and imputed; what training itself makes of numbers is guarded."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(60, 3))
    np.savez("mine.npz", X=x, y=x[:, 0])
    recipe = RECIPES["mlp"]
    options = recipe.options(
        data=Path("mine.npz"), quiet=True, out=Path("run"), optim=quire.options.Optim("sgd", lr=1e8)
    )
    with pytest.raises(NonFiniteError, match=r"step \d+: .* The step was not applied"):
        execute(recipe, options)
    words = ["train", "mlp", "--data", "mine.npz", "--out", "again", "--optim.name", "sgd"]
    code = main([*words, "--optim.lr", "1e8", "--quiet"])
    assert code == 1
    assert "The step was not applied" in capsys.readouterr().err


def test_mistakes_at_predict_name_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_csv(Path("mine.csv"))
    recipe = RECIPES["mlp"]
    execute(recipe, recipe.options(data=data, target="value", out=Path("run"), epochs=1, quiet=True))
    lines = data.read_text().splitlines()
    broken = {
        "text.csv": ("\n".join([*lines[:4], "huge" + lines[4][lines[4].index(",") :]]), "text.csv:5:size: "),
        "column.csv": ("\n".join(["siz" + lines[0][4:], *lines[1:]]), "missing column 'size'"),
        "ragged.csv": ("\n".join([*lines[:3], "1,2"]), "ragged.csv:4"),
    }
    for name, (content, message) in broken.items():
        Path(name).write_text(content + "\n")
        with pytest.raises(InputError, match="expected:"):
            quire.load("run").predict(name)
        assert main(["predict", "run", name, "--out", "predictions.csv"]) == 2
        assert message in capsys.readouterr().err
    assert not Path("predictions.csv").exists()
