"""Runs documents: their commands and snippets, in order, each document in a new folder below the current one.

    python -m tests.running_docs README.md docs/tutorials/*.md examples/*.ipynb

In a block marked `console` each line after `$ ` is a command and the lines below it are what it prints:
they must come in this order, numbers and spacing aside; `…` stands for the rest of a line, or alone for
any lines. A command must succeed unless the first line shown is an error. Blocks marked `python` share
their names, as do the cells of a notebook. Commands `make TARGET` are only looked up: the tests themselves
run inside one of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire.cli.main import main as quire

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-−]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


class Block(NamedTuple):
    line: int
    language: str
    text: str


class Step(NamedTuple):
    command: str
    shown: list[str]


def blocks(text: str) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        yield Block(text.count("\n", 0, found.start()) + 2, found[1], found[2])


def cells(text: str) -> Iterator[Block]:
    """The code of a notebook, on lines that follow each other."""
    line = 1
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"]) + "\n"
            yield Block(line, "python", code)
            line += code.count("\n")


def steps(text: str) -> Iterator[Step]:
    command, shown = "", list[str]()
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield Step(command, shown)
            command, shown = line.removeprefix("$ "), []
        else:
            shown.append(line)
    if command:
        yield Step(command, shown)


def normal(line: str) -> str:
    """What has to agree: everything but numbers, spacing and drawn lines."""
    return " ".join(NUMBER.sub("#", line).split())


def missing_line(shown: list[str], printed: str) -> str | None:
    """The first shown line that does not follow in what was printed."""
    lines = iter([normal(line) for line in printed.splitlines()])
    for line in shown:
        wanted = normal(line)
        if wanted in ("", "…"):
            continue
        start, cut = wanted.removesuffix("…").strip(), wanted.endswith("…")
        if not any(actual == wanted or (cut and actual.startswith(start)) for actual in lines):
            return line
    return None


def run_command(command: str) -> tuple[int, str]:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return (0, "") if set(words[1:]) <= set(targets) else (1, f"no such target: {command}")
    if words[0] == "quire" and not set(command) & set("|<>;&$"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = quire(words[1:])
        return code, printed.getvalue()
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={"PATH": path})
    return done.returncode, done.stdout + done.stderr


def check_step(step: Step) -> str | None:
    """What is wrong with a command, if anything."""
    code, printed = run_command(step.command)
    error_shown = bool(step.shown) and step.shown[0].startswith("error: ")
    if code != (2 if error_shown else 0):
        return f"$ {step.command}\nexit code {code}\n{printed}"
    line = missing_line(step.shown, printed)
    if line is not None and not step.command.startswith("make "):
        return f"$ {step.command}\nshown but not printed: {line}\n--- printed:\n{printed}"
    return None


def run_document(path: Path) -> list[str]:
    problems: list[str] = []
    text = path.read_text(encoding="utf-8")
    found = list(cells(text) if path.suffix == ".ipynb" else blocks(text))
    module = python_of(found)
    for block in found:
        if block.language == "console":
            answers = [check_step(step) for step in steps(block.text)]
            problems += [f"{path.name}:{block.line}: {answer}" for answer in answers if answer]
        elif block.language == "python":
            code = compile(
                "\n" * (block.line - 1) + block.text, str(module.__file__), "exec", dont_inherit=True
            )
            exec(code, module.__dict__)
    return problems


def python_of(found: list[Block]) -> types.ModuleType:
    """A module for the snippets, with a file whose lines are those of the document.

    Dataclasses look for the module of a class, and the help of its options for its source.
    """
    module = types.ModuleType("document")
    lines: list[str] = []
    for block in found:
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    file = Path("document.py").absolute()
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.modules["document"], module.__file__ = module, str(file)
    return module


def run_documents(paths: list[Path]) -> list[str]:
    """What is wrong with any of them. Imports, which take longest, are paid for once."""
    problems: list[str] = []
    start = Path.cwd()
    for number, path in enumerate(paths):
        folder = start / f"{number}-{path.stem}"
        folder.mkdir()
        os.chdir(folder)
        problems += run_document(path)
    os.chdir(start)
    return problems


if __name__ == "__main__":
    problems = run_documents([Path(name).absolute() for name in sys.argv[1:]])
    print("\n\n".join(problems))
    sys.exit(1 if problems else 0)
