"""`quire sample`: text as it is made, one object with --json, and one message for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quire.recipes  # noqa: F401
from quire.cli.main import main
from quire.options import Text, Train
from quire.recipes.base import RECIPES
from quire.recipes.execute import execute
from tests.recipes.examples import write_csv, write_text


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    recipe = RECIPES["gru"]
    options = recipe.options(
        data=write_text(folder / "book.txt"), out=folder / "run", steps=5, quiet=True,
        text=Text(context=16), train=Train(batch_size=8, carry=True),
    )  # fmt: skip
    return execute(recipe, options).run


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
    assert message in capsys.readouterr().err


def test_a_run_that_makes_no_text_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mlp = RECIPES["mlp"]
    data = write_csv(tmp_path / "a.csv")
    execute(mlp, mlp.options(data=data, target="kind", out=tmp_path / "run", epochs=1, quiet=True))
    assert main(["sample", str(tmp_path / "run")]) == 2
    assert "a run of 'mlp', which makes no text" in capsys.readouterr().err
