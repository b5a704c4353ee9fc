"""Every command and snippet of the documents is run, and prints what the document shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running_docs import Step, blocks, check_step, missing_line, normal, run_document, steps

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_documented_runs(path: Path, tmp_path: Path) -> None:
    # In a process of its own: what a document registers must not be met by the contract tests.
    done = subprocess.run(
        [sys.executable, "-m", "tests.running_docs", str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_what_it_is(path: Path) -> None:
    kinds = {block.language for block in blocks(path.read_text(encoding="utf-8"))}
    assert kinds <= {"console", "python", "text", "toml"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert "://" in target or (path.parent / target).exists(), target


def test_the_two_commands_are_in_the_readme() -> None:
    readme = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    commands = [step.command for block in readme for step in steps(block.text)]
    assert {"make train", "make test"} <= set(commands)


def test_a_wrong_document_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = tmp_path / "wrong.md"
    lines = [
        "```console",
        "$ quire --version",
        "quire 0.0.0",
        "nothing else",
        "$ quire lst",
        "$ make nothing",
    ]
    document.write_text("\n".join([*lines, "```", ""]))
    first, second, third = run_document(document)
    assert "shown but not printed: nothing else" in first
    assert "exit code 2" in second
    assert "no such target" in third
    assert check_step(Step("quire --version", ["error: no"])) is not None
    document.write_text("```python\nassert 1 + 1 == 3\n```\n")
    with pytest.raises(AssertionError):
        run_document(document)


def test_numbers_and_spacing_may_differ_but_words_and_order_may_not() -> None:
    assert normal("test   0.97  −0.5") == normal("test 1.2e-05 3")
    assert missing_line(["a 1", "…", "b 2"], "a 7\nother\nb   9\n") is None
    assert missing_line(["b 2", "a 1"], "a 7\nb 9\n") == "a 1"
    assert missing_line(["a met"], "a NOT met\n") == "a met"
    assert missing_line(["a b …"], "a b c d\n") is None
    assert missing_line(["a b …"], "a c b d\n") == "a b …"
