"""`quire study RUN KIND`."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quire.cli.main import main
from tests.cli.conftest import Quire

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of points in the plane, and a run of a small network that tells them apart."""
    place = tmp_path_factory.mktemp("study")
    rng = np.random.default_rng(0)
    kind = np.arange(150) % 3
    points = rng.normal(size=(150, 2)) + 3 * np.stack([kind == 1, kind == 2], 1)
    lines = [f"{a:.5f},{b:.5f},{'abc'[k]}" for (a, b), k in zip(points, kind, strict=True)]
    (place / "points.csv").write_text("x,y,kind\n" + "\n".join(lines) + "\n")
    with chdir(place):
        train = ["train", "mlp", "--data", "points.csv", "--target", "kind", "--model.hidden", "8"]
        assert main([*train, "--epochs", "30", "--optim.lr", "0.02", "--quiet", "--out", "run"]) == 0
    return place


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_folds_are_shown_as_a_table_and_a_sentence(quire: Quire) -> None:
    answer = quire("study", "run", "folds", "--folds", "3", "--epochs", "10")
    assert answer.code == 0, answer.error
    lines = answer.out.splitlines()
    assert lines[0].split()[0] == "measure"
    assert lines[1].startswith("accuracy")
    assert lines[-1].startswith("On rows left out accuracy is 0.")
    assert "(3 folds)" in lines[-1]
    assert answer.error.split("\n")[:3] == ["fit 1 of 3", "fit 2 of 3", "fit 3 of 3"]


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (("folds", "--folds", "2", "--repeats", "2", "--steps", "3"), {"held", "intervals", "folds"}),
        (
            ("learning-curve", "--sizes", "12", "40", "100", "--repeats", "1", "--steps", "3"),
            {"law", "advice"},
        ),
        (("bias-variance", "--repeats", "2", "--steps", "3"), {"bias2", "variance", "total", "loss"}),
        (("calibration",), {"said", "happened", "error", "factor"}),
        (("regions",), {"lines", "mean", "units", "plane"}),
    ],
)
def test_numbers_and_pictures_are_written(
    words: tuple[str, ...], known: set[str], quire: Quire, tmp_path: Path
) -> None:
    kind = words[0]
    answer = quire("study", "run", *words, "--json", "--out", str(tmp_path / "out"))
    assert answer.code == 0, answer.error
    printed = json.loads(answer.out)
    assert known <= set(printed)
    assert printed["kind"] == kind
    assert printed["verdict"]
    assert answer.error == ""
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"{kind}.json", f"{kind}.png", f"{kind}.svg"}
    written = json.loads((tmp_path / "out" / f"{kind}.json").read_text())
    assert {name: value for name, value in written.items() if name != "format"} == printed
    assert Image.open(tmp_path / "out" / f"{kind}.png").width > 300
    assert (tmp_path / "out" / f"{kind}.svg").read_text().startswith("<svg")


def test_files_are_not_replaced_unasked(quire: Quire, tmp_path: Path) -> None:
    out = str(tmp_path)
    assert quire("study", "run", "regions", "--out", out).code == 0
    again = quire("study", "run", "regions", "--out", out)
    assert again.code == 2
    assert "exists already" in again.error
    assert quire("study", "run", "regions", "--out", out, "--overwrite", "--seed", "1").code == 0
    (tmp_path / "file").write_text("")
    assert "is a file" in quire("study", "run", "regions", "--out", str(tmp_path / "file")).error


def test_a_run_of_statistics_is_studied_in_sweeps(quire: Quire) -> None:
    assert (
        quire("train", "kmeans", "--data", "points.csv", "--target", "kind", "--out", "means", "--quiet").code
        == 0
    )
    answer = quire("study", "means", "learning-curve", "--epochs", "2", "--quiet")
    assert answer.code == 0, answer.error
    assert answer.out.splitlines()[-1].split(":")[0] in (
        "More data",
        "A bigger model",
        "Neither",
        "Neither for sure",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing", "folds"), "run nothing does not exist"),
        (("run",), "KIND missing"),
        (("run", "fold"), "did you mean 'folds'"),
        (("run", "folds", "--folds", "1"), "--folds 1"),
        (("run", "folds", "--folds", "900"), "900 folds of 106 rows"),
        (("run", "folds", "--sizes", "1", "2"), "--sizes with folds"),
        (("run", "regions", "--epochs", "1"), "--epochs with regions"),
        (("run", "learning-curve", "--sizes", "5", "9"), "three or more different numbers of rows"),
        (("run", "learning-curve", "--sizes", "5", "9", "9000"), "from 1 to 106"),
        (("run", "learning-curve", "--epochs", "0"), "a number above 0"),
        (("run", "learning-curve", "--epochs", "1", "--steps", "1"), "both --epochs and --steps"),
        (("run", "bias-variance", "--repeats", "1"), "2 or more"),
        (("run", "bias-variance", "--noise", "-1"), "at least 0"),
        (("run", "equivariance"), "on a table"),
        (("run", "folds", "--device", "cuda:99"), "cuda:99"),
    ],
)
def test_mistakes_are_found_before_any_work(words: tuple[str, ...], message: str, quire: Quire) -> None:
    answer = quire("study", *words)
    assert answer.code == 2
    assert message in answer.error
    assert "fit " not in answer.error.replace("to fit", "")
    assert answer.out == ""


def test_help_names_the_studies(quire: Quire) -> None:
    answer = quire("study", "--help")
    assert answer.code == 0
    for kind in ("folds", "learning-curve", "bias-variance", "calibration", "regions", "equivariance"):
        assert kind in answer.out
