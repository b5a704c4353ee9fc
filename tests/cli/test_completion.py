"""The completion scripts, asked through the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import fields

import pytest

from quire.cli.completion import places
from quire.recipes.base import Recipe, TableRunOptions
from tests.cli.conftest import Quire

BASH = r"""
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_quire; printf '%s\n' "${{COMPREPLY[@]}}"
"""
# zsh filters what it is offered by itself; here the filter stands in the stub.
ZSH = r"""
words=({words}); CURRENT=$#words
_quire
"""
ZSH_STUBS = r"""
compdef() {{ : }}
_files() {{ : }}
compadd() {{
    local each
    for each in "${{(@P)2}}"; do [[ $each == ${{words[CURRENT]}}* ]] && print -r -- $each; done
}}
"""
FISH = "complete -C {line}\n"


def complete(shell: str, script: str, *words: str) -> list[str]:
    """What the shell offers for the last of the words, files left out."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    quoted = " ".join(f"'{word}'" for word in ("quire", *words))
    line = "'" + " ".join(("quire", *words)) + "'"
    program = {
        "bash": script + BASH.format(words=quoted),
        "zsh": ZSH_STUBS.format() + script + ZSH.format(words=quoted),
        "fish": script + FISH.format(line=line),
    }[shell]
    bare = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run([shell, *bare, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train"]),
        (["train", "ti"], ["tiny"]),
        (["train", "tiny", "--optim.l"], ["--optim.lr", "--optim.l1"]),
        (["train", "tiny", "--seed", "3", "--over"], ["--overwrite"]),
        (["train", "tiny", "--model.h"], ["--model.hidden"]),
        (["train", "tiny", "--con"], ["--config"]),
        (["train", "tiny", "--optim.name", ""], ["adam", "sgd"]),
        (["train", "tiny", "--data", "nothing-like-it"], []),
        (["sheet", "v"], ["verify"]),
        (["sheet", "verify", "--j"], ["--json"]),
        (["predict", "runs/x", "--mode", "i"], ["interval"]),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes(
    quire: Quire, tiny: Recipe, shell: str, words: list[str], offered: list[str]
) -> None:
    script = quire("completion", shell).out
    assert sorted(complete(shell, script, *words)) == sorted(offered)


def test_every_common_option_is_offered(tiny: Recipe) -> None:
    offered = places()["train/tiny"].candidates
    nested = {
        "optim": "optim.lr", "train": "train.batch-size", "table": "table.header", "tune": "tune.base",
    }  # fmt: skip
    for field in fields(TableRunOptions):
        assert f"--{nested.get(field.name, field.name)}" in offered


def test_an_unknown_shell(quire: Quire) -> None:
    answer = quire("completion", "zhs")
    assert answer.code == 2
    assert "did you mean 'zsh'?" in answer.error
