"""The command as a person meets it: exit codes, one message, nothing heavy before the options are right."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import __version__
from quire.cli import main as command
from quire.cli.main import COMMANDS, Command
from quire.errors import CheckpointError, DataError
from quire.recipes.base import Recipe
from tests.cli.conftest import Quire


def failing(problem: BaseException) -> Command:
    def run(words: Any) -> int:
        raise problem

    return Command("fails", run)


def in_a_process(*words: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a fresh process; `after` runs once it has returned its code."""
    program = f"import sys; from quire.cli.main import main; code = main(sys.argv[1:])\n{after}\nexit(code)"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_help_names_every_command(quire: Quire, words: tuple[str, ...]) -> None:
    answer = quire(*words)
    assert answer.code == 0
    assert all(f"\n  {name} " in answer.out for name in COMMANDS)


def test_version(quire: Quire) -> None:
    assert quire("--version").out == f"quire {__version__}\n"


def test_every_command_has_help(quire: Quire) -> None:
    for name in COMMANDS:
        answer = quire(name, "--help")
        assert answer.code == 0, name
        assert answer.out.startswith(f"usage: quire {name}"), name
        assert answer.error == ""


def test_an_unknown_command_gets_the_nearest(quire: Quire) -> None:
    answer = quire("trian")
    assert (answer.code, answer.out) == (2, "")
    assert answer.error.startswith("error: unknown command 'trian'\n")
    assert "did you mean 'train'?" in answer.error


def test_an_option_before_the_command(quire: Quire) -> None:
    assert quire("--seed", "train").code == 2


@pytest.mark.parametrize(
    ("problem", "code", "message"),
    [
        (DataError("ragged row", path="a.csv", line=3), 2, "error: a.csv:3: ragged row\n"),
        (CheckpointError("damaged", fix="resume"), 1, "error: damaged\n  fix: resume\n"),
        (RuntimeError("two\nlines"), 1, "error: RuntimeError: two lines\n  fix: run again with --debug"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\n  fix: check"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes_and_one_message(
    quire: Quire, monkeypatch: pytest.MonkeyPatch, problem: BaseException, code: int, message: str
) -> None:
    monkeypatch.setitem(command.COMMANDS, "list", failing(problem))
    answer = quire("list")
    assert (answer.code, answer.out) == (code, "")
    assert answer.error.startswith(message)
    assert "Traceback" not in answer.error


def test_an_interrupt_that_a_library_turns_into_something_else_is_one(
    quire: Quire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: object) -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        one, other = 1, 2, 3  # type: ignore[misc]
        return one + other

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setitem(command.COMMANDS, "list", command.Command("", lost))
    assert quire("list")[:2] == (130, "")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("problem", [RuntimeError("odd"), DataError("ragged row")])
def test_debug_shows_the_traceback(quire: Quire, monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    monkeypatch.setitem(command.COMMANDS, "list", failing(problem))
    answer = quire("list", "--debug")
    assert answer.code == (2 if isinstance(problem, DataError) else 1)
    assert "Traceback (most recent call last)" in answer.error
    assert answer.error.count(str(problem)) >= 1


def test_a_reader_that_leaves_is_no_error() -> None:
    shell = f"{sys.executable} -m quire.cli.main completion bash | head -1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("_quire")
    assert done.stderr == ""


HEAVY = "torch", "numpy", "sklearn", "pyarrow", "matplotlib"
LOADED = f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["list"], 0),
        (["train", "--help"], 0),
        (["train", "mlp", "--help"], 0),
        (["completion", "bash"], 0),
        (["train", "mlp", "--optim.lr", "fast"], 2),
        (["train", "mlp", "--optim.lr", "-1"], 2),
        (["predict", "nowhere", "nothing.csv"], 2),
        (["export", "nowhere", "model.txt"], 2),
    ],
)
def test_nothing_heavy_is_imported(words: list[str], code: int) -> None:
    done = in_a_process(*words, after=LOADED)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_list_shows_the_expected_result(quire: Quire, tiny: Recipe) -> None:
    line = next(line for line in quire("list").out.splitlines() if line.startswith("tiny "))
    assert line.split(maxsplit=1)[1].startswith("A recipe of the tests.")
    assert line.endswith("test accuracy ≥ 0.5")
    rows = json.loads(quire("list", "--json").out)
    shown = {"name": "tiny", "summary": tiny.summary, "expected": "test accuracy ≥ 0.5", "targets": "any"}
    assert shown in rows


def test_train_without_a_recipe_lists_them(quire: Quire, tiny: Recipe) -> None:
    for words in (["train"], ["train", "--seed", "1"]):
        answer = quire(*words)
        assert answer.code == 2
        assert "tiny" in answer.error


def test_a_misspelt_recipe_gets_the_nearest(quire: Quire, tiny: Recipe) -> None:
    answer = quire("train", "tinny")
    assert answer.code == 2
    assert "did you mean 'tiny'?" in answer.error


def test_the_help_of_a_recipe_has_every_option(quire: Quire, tiny: Recipe) -> None:
    text = quire("train", "tiny", "--help").out
    for name in ("--data", "--resume", "--config", "--optim.lr", "--model.hidden", "--train.noise.inputs"):
        assert name in text
    assert "A recipe of the tests. Expected on built-in data: test accuracy ≥ 0.5." in " ".join(text.split())


def test_an_odd_terminal_is_no_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "list"],
        capture_output=True,
        timeout=60,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout
