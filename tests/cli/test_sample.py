"""`quire sample`: text as it is made, images and rows in the user's own form, one message for a mistake."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import quire.recipes  # noqa: F401
from quire.cli.main import main
from quire.options import Text, Train
from quire.recipes.base import RECIPES
from quire.recipes.execute import execute
from quire.runs import load
from tests.cli.conftest import Quire
from tests.recipes.examples import undrawn, write_csv, write_images, write_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    recipe = RECIPES["gru"]
    options = recipe.options(
        data=write_text(folder / "book.txt"), out=folder / "run", steps=5, quiet=True,
        text=Text(context=16), train=Train(batch_size=8, carry=True),
    )  # fmt: skip
    with undrawn():
        return execute(recipe, options).run


@pytest.mark.parametrize(("text", "begins"), [("to be or not ", " "), ("abcabdacb", "a"), ("a line\n", "\n")])
def test_a_text_without_line_breaks_begins_with_something_else(
    text: str, begins: str, tmp_path: Path, quire: Quire
) -> None:
    """In the samples of the report, and where it is gone on with."""
    path = tmp_path / "text.txt"
    path.write_text(text * 60)
    recipe = RECIPES["gru"]
    options = recipe.options(
        data=path, out=tmp_path / "run", steps=2, quiet=True,
        text=Text(context=16), train=Train(batch_size=8, carry=True),
    )  # fmt: skip
    with undrawn():
        run = execute(recipe, options).run
    samples = json.loads((run / "samples.json").read_text())
    assert all(sample["text"].startswith(begins) for sample in samples)
    assert quire("sample", str(run), "--length", "5").out.startswith(begins)


def test_a_prompt_that_cannot_be_read_is_refused_before_anything_is_trained(
    tmp_path: Path, quire: Quire
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("to be or not\n" * 60)
    wrong = quire("train", "gru", "--data", str(path), "--prompt", "to Ω", "--out", str(tmp_path / "run"))
    assert wrong.code == 2
    assert wrong.error.startswith("error: the character 'Ω', number 4 of the prompt\n")
    assert not (tmp_path / "run").exists()


def test_text_begins_with_the_prompt_and_repeats_with_its_seed(
    book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sample", str(book), "--prompt", "the cat", "--length", "30", "--seed", "3"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert first.startswith("the cat")
    assert len(first) == len("the cat") + 30 + 1
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert main([*words[:-1], "4"]) == 0
    assert capsys.readouterr().out != first


def test_json_holds_as_many_texts_as_were_asked_for(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(book), "--prompt", "a", "--count", "3", "--length", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == "a"
    assert [len(text) for text in found["texts"]] == [10, 10, 10]


def test_a_text_ends_at_a_stop_string(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(book), "--prompt", "the ", "--length", "400", "--temperature", "1", "--stop", " "]
    assert main(words) == 0
    assert " " not in capsys.readouterr().out.rstrip("\n").removeprefix("the ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a Ω"], "the character 'Ω', number 3 of the prompt"),
        (["--prompt", ""], "an empty prompt"),
        (["--top-p", "1.5"], "--top-p is 1.5"),
        (["--top-k", "0"], "--top_k is 0"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--length", "0"], "--length is 0"),
    ],
)
def test_a_mistake_gets_one_message(
    words: list[str], message: str, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(book), *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""  # not the prompt either


def test_a_run_that_makes_no_text_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mlp = RECIPES["mlp"]
    data = write_csv(tmp_path / "a.csv")
    execute(mlp, mlp.options(data=data, target="kind", out=tmp_path / "run", epochs=1, quiet=True))
    assert main(["sample", str(tmp_path / "run")]) == 2
    assert "a run of 'mlp', which makes nothing new" in capsys.readouterr().err


# Images and rows ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("made")
    images, rows = write_images(folder / "images"), write_csv(folder / "rows.csv")
    numbers = folder / "numbers.csv"
    numbers.write_text("".join(f"{line}\n" for line in ("a,b", *(f"{i},{2 * i + i % 3}" for i in range(60)))))
    short: dict[str, Any] = {"quiet": True, "steps": 3}
    found = {}
    for key, name, given in (
        ("classes", "cgan", {"data": images, **short}),
        ("images", "vae", {"data": images, **short}),
        ("rows", "vae", {"data": rows, **short}),
        ("kinds", "cvae", {"data": rows, "target": "kind", **short}),
        ("numbers", "gan", {"data": numbers, **short}),
        ("mixture", "gmm", {"data": rows, "quiet": True, "sweeps": 3, "clusters": 2}),
        ("codes", "autoencoder", {"data": rows, **short}),
    ):
        recipe = RECIPES[name]
        with undrawn():
            found[key] = str(execute(recipe, recipe.options(out=folder / "runs" / key, **given)).run)
    return found


def test_images_stand_in_a_grid_with_a_column_for_each_class(
    runs: dict[str, str], quire: Quire, tmp_path: Path
) -> None:
    out = tmp_path / "a.png"
    answer = quire("sample", runs["classes"], "--count", "7", "--out", str(out), "--seed", "4")
    assert (answer.code, answer.out) == (0, f"7 images: {out}\n")
    made = load(runs["classes"]).generate(7, seed=4)
    assert made.images is not None
    assert made.labels == ("bar", "noise", "square", "bar", "noise", "square", "bar")
    picture = np.asarray(Image.open(out))
    assert picture.shape == (3 * 50 + 2, 3 * 50 + 2, 3)  # three times enlarged: 48 pixels and a gap of two
    for number, image in enumerate(made.images):
        row, column = divmod(number, 3)
        tile = picture[2 + 50 * row : 50 + 50 * row, 2 + 50 * column : 50 + 50 * column]
        assert np.array_equal(tile[::3, ::3], image.transpose(1, 2, 0))
        assert np.array_equal(tile[2::3, 1::3], image.transpose(1, 2, 0))
    assert (picture[102:, 52:] == 128).all(), "two places are free"


def test_images_of_a_class_in_a_folder_can_be_trained_on(
    runs: dict[str, str], quire: Quire, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    assert quire("sample", runs["classes"], "--count", "12", "--out", str(folder)).code == 0
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    assert files[:2] == ["bar/01.png", "bar/04.png"]
    assert len(files) == 12
    lenet = RECIPES["lenet"]
    execute(lenet, lenet.options(data=folder, out=tmp_path / "run", steps=1, quiet=True))
    one = tmp_path / "one"
    one.mkdir()
    words = ["sample", runs["classes"], "--label", "square", "--count", "2", "--out"]
    assert quire(*words, str(one)).code == 0
    made = load(runs["classes"]).generate(2, label="square").images
    assert made is not None
    for number in (1, 2):
        pixels = np.asarray(Image.open(one / "square" / f"{number}.png"))
        assert np.array_equal(pixels, made[number - 1].transpose(1, 2, 0))
    assert quire("sample", runs["images"], "--count", "2", "--out", str(tmp_path / "plain")).code == 0
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["1.png", "2.png"]


def test_arrays_hold_images_or_numbers(runs: dict[str, str], quire: Quire, tmp_path: Path) -> None:
    images, numbers = tmp_path / "i.npy", tmp_path / "n.npy"
    assert quire("sample", runs["images"], "--out", str(images)).code == 0
    found = np.load(images)
    assert (found.shape, found.dtype) == ((25, 3, 16, 16), np.uint8)
    cold = quire("sample", runs["images"], "--out", str(images), "--temperature", "0", "--overwrite")
    assert cold.code == 0
    found = np.load(images)
    assert (found == found[:1]).all()
    assert quire("sample", runs["numbers"], "--out", str(numbers), "--count", "4").code == 0
    rows = load(runs["numbers"]).generate(4).rows
    assert rows is not None
    assert np.array_equal(np.load(numbers), np.stack([rows["a"], rows["b"]], 1))


def test_rows_are_csv_in_the_columns_of_the_training_file(
    runs: dict[str, str], quire: Quire, tmp_path: Path
) -> None:
    answer = quire("sample", runs["kinds"], "--count", "5", "--label", "small", "--seed", "2")
    assert answer.code == 0
    rows = list(csv.DictReader(io.StringIO(answer.out)))
    assert list(rows[0]) == ["size", "colour", "fast", "day", "label", "value", "kind"]
    assert len(rows) == 5
    for row in rows:
        assert row["kind"] == "small"
        assert row["colour"] in ("red", "green", "blue")
        assert -50 < float(row["size"] or 50) < 150  # 50 ± 10 in the file
    assert quire("sample", runs["kinds"], "--count", "5", "--label", "small", "--seed", "2").out == answer.out
    found = json.loads(quire("sample", runs["kinds"], "--count", "6", "--json").out)
    assert found["count"] == 6
    assert [row["kind"] for row in found["rows"]] == ["large", "middle", "small"] * 2
    out = tmp_path / "a.parquet"
    assert quire("sample", runs["rows"], "--out", str(out)).code == 0
    assert pq.read_table(out).num_rows == 25


def test_a_mixture_makes_rows_as_well(runs: dict[str, str], quire: Quire) -> None:
    rows = list(csv.DictReader(io.StringIO(quire("sample", runs["mixture"], "--count", "300").out)))
    assert np.mean([float(row["value"]) for row in rows]) == pytest.approx(160, abs=8)  # 3·50 + 20/3 + 5/2
    assert "made without classes" in quire("sample", runs["mixture"], "--label", "1").error


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        ("images", [], "images without --out"),
        ("images", ["--out", "a.csv"], "images in a.csv"),
        ("images", ["--out", "a.jpg"], "--out a.jpg"),
        ("images", ["--out", "a.png", "--label", "bar"], "label 'bar' for a model that was made without"),
        ("images", ["--out", "a.png", "--prompt", "x"], "--prompt with a run of 'vae', which makes images"),
        ("images", ["--out", "a.png", "--top-k", "3"], "--top-k with a run of 'vae'"),
        ("images", ["--out", "none/a.png"], "there is no folder none"),
        ("images", ["--out", "none/folder"], "there is no folder none"),
        ("images", ["--out", "full"], "full is a folder that is not empty"),
        ("images", ["--out", "full/file"], "full/file is a file"),
        ("images", ["--out", "full/a.png"], "full/a.png exists already"),
        ("classes", ["--out", "a.png", "--label", "squares"], "did you mean 'square'?"),
        ("rows", ["--out", "a.png"], "rows in a.png"),
        ("rows", ["--out", "folder"], "rows in folder"),
        ("rows", ["--out", "a.npy"], "in a.npy: not all of its cells are numbers"),
        ("rows", ["--count", "0"], "--count is 0"),
        ("rows", ["--temperature", "-1"], "--temperature is -1"),
        ("codes", [], "a run of 'autoencoder', which makes nothing new"),
    ],
)
def test_mistakes_about_images_and_rows(
    run: str, words: list[str], message: str, runs: dict[str, str], quire: Quire, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    for name in ("file", "a.png"):
        (tmp_path / "full" / name).write_text("mine")
    answer = quire("sample", runs[run], *words)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.png", "file", "full"]
    assert (tmp_path / "full" / "a.png").read_text() == "mine"


@pytest.mark.parametrize("words", [["--label", "a"], ["--out", "a.png"]])
def test_options_of_images_do_not_fit_text(words: list[str], book: Path, quire: Quire) -> None:
    assert f"{words[0]} with a run of 'gru', which makes text" in quire("sample", str(book), *words).error
