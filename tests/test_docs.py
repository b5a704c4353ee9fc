"""Every command and snippet of the documents is run, and prints what the document shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.generate import benchmarks, pictures
from tests.running_docs import (
    Step,
    blocks,
    check_step,
    missing_line,
    normal,
    run_command,
    run_document,
    steps,
)

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
GROUPS = {
    "start": [path for path in DOCUMENTS if path.parent == ROOT],
    **{folder.name: sorted(folder.glob("*.md")) for folder in (DOCS, DOCS / "tutorials", DOCS / "howto")},
    "examples": NOTEBOOKS,
}
MADE = ("sheet/", "api/", "benchmarks.md")
"""Pages that are made when the site is built, which looks at the links to them itself."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", GROUPS)
def test_what_is_documented_runs(group: str, tmp_path: Path) -> None:
    # In a process of its own: what a document registers must not be met by the contract tests.
    done = subprocess.run(
        [sys.executable, "-m", "tests.running_docs", *map(str, GROUPS[group])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_document_is_in_a_group() -> None:
    assert {path for paths in GROUPS.values() for path in paths} == {*DOCUMENTS, *NOTEBOOKS}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_block_says_what_it_is(path: Path) -> None:
    kinds = {block.language for block in blocks(path.read_text(encoding="utf-8"))}
    assert kinds <= {"console", "python", "text", "toml"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        made = path.is_relative_to(DOCS) and target.removeprefix("../").startswith(MADE)
        assert made or "://" in target or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_notebook_holds_no_results_of_somebody_else(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_warning_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material comes with the extra 'docs'")
    site = tmp_path / "site"
    build = f"""
import logging

from mkdocs.commands.build import build
from mkdocs.config import load_config

logging.basicConfig()  # a warning says which page it is about
config = load_config({str(ROOT / "mkdocs.yml")!r}, site_dir={str(site)!r}, strict=True, plugins=[])
config.extra["proofs"] = ["dense"]
build(config)
"""
    done = subprocess.run(
        [sys.executable, "-c", build],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {str(page.relative_to(site)): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    for page, text in pages.items():
        fetched = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?(https?:|//)[^>]*", text)
        assert not fetched, page
    styles = [style.read_text(encoding="utf-8") for style in site.rglob("*.css")]
    assert not any(re.search(r"(@import|url\()\s*[\"']?(https?:|//)", style) for style in styles)
    # The proofs were run, formulas are typeset, and code leads to the reference.
    dense = pages["sheet/dense.html"]
    assert dense.count("Proof: <strong>passed</strong>") == dense.count("<h2 id=") > 5
    assert "<math" in dense
    assert "The printed form: error" in dense
    assert 'href="../api/functional/feedforward.html#' in dense
    assert 'id="quire.nn.attention.MultiHeadAttention"' in pages["api/nn.html"]


def outcome(title: str, peers: dict[str, float], **more: Any) -> dict[str, Any]:
    contestants = [
        {"name": name, "seconds": value, "bytes": None, "absent": "" if value else "not installed"}
        for name, value in ({"quire": 0.5} | peers).items()
    ]
    return {"title": title, "unit": "step", "limit": None, "bars": [], "contestants": contestants} | more


def test_benchmarks_are_drawn_from_the_newest_results(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()

    def write(name: str, **content: Any) -> None:
        (results / f"{name}.json").write_text(
            json.dumps({"format": 1, "machine": "A CPU, 2 cores\nx"} | content)
        )

    bar = {"of": "time", "at_most": 0.4, "at_least": None, "rival": "slow", "found": 0.5, "met": False}
    alone = outcome("nobody beside it", {"missing": 0.0})
    write("2026-01-01-sums-cpu", subject="sums", outcomes=[outcome("an older one", {"slow": 9.0})])
    shown = outcome("sums of rows", {"slow": 1.0, "fast": 0.25}, limit=0.125, bars=[bar])
    write("2026-01-02-sums-cpu", subject="sums", outcomes=[shown, alone])
    write("2026-01-02-alone-cpu", subject="alone", outcomes=[alone])
    points = {"quire": [{"size": n, "seconds": n / 1e6, "bytes": None} for n in (10, 100, 1000)]}
    write(
        "2026-01-02-growth-sums-cpu",
        title="sums grow",
        points=points,
        variable="rows N",
        order=1,
        memory_order=1,
    )
    write("2026-01-02-growth-old-cpu", title="of an older form", points=points)
    (results / "2026-01-02-growth-old-cpu.png").write_bytes(b"png")
    made = benchmarks.pages(tmp_path)
    page = str(made["benchmarks.md"])
    first, second = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    drawn = [
        "sums of rows",
        "500 ms/step",
        "2.00 ×, 1 s",
        "0.50 ×, 250 ms",
        "what the machine allows",
        "bar, not met",
    ]
    for words in (*drawn, "slower than Quire", "faster than Quire"):
        assert words in first, words
    assert "an older one" not in page
    assert "missing" not in first
    assert "rows N" in second
    assert "![of an older form](benchmarks/2026-01-02-growth-old-cpu.png)" in page
    assert made["benchmarks/2026-01-02-growth-old-cpu.png"] == b"png"


def test_bars_of_a_picture_stand_where_quire_would_meet_them() -> None:
    """Quire takes 0.5 s; at most 0.4 of a rival's 1 s are 0.4 s, at least 4 steps a second are 0.25 s."""
    half = {"of": "time", "at_most": 0.4, "at_least": None, "rival": "slow", "met": False}
    rate = {"of": "rate", "at_most": None, "at_least": 4.0, "rival": None, "met": False}
    given = outcome(
        "sums", {"slow": 1.0}, bars=[half, rate, half | {"rival": "missing"}, half | {"of": "memory"}]
    )
    assert [place for place, _ in pictures.promised(given)] == pytest.approx([0.8, 0.5])


@pytest.mark.slow
def test_what_the_benchmark_page_shows_is_so() -> None:
    page = str(benchmarks.pages(ROOT / "benchmarks")["benchmarks.md"])
    commands = [step for block in blocks(page) if block.language == "console" for step in steps(block.text)]
    assert commands
    assert [check_step(step) for step in commands] == [None] * len(commands)
    compared = set()
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        cases = json.loads(path.read_text(encoding="utf-8")).get("outcomes", [])
        ran = [[one for one in case["contestants"] if not one["absent"]] for case in cases]
        if any(len(some) > 1 and some[0]["name"] == case["contestants"][0]["name"]
               for some, case in zip(ran, cases, strict=True)):  # fmt: skip
            compared.add(path.stem[11:])
    assert page.count('<figure class="drawn">') == len(compared)


SENTENCES = sorted(
    {
        " ".join(command.split())
        for path in DOCUMENTS
        for command in re.findall(r"`quire ([^`]+)`", path.read_text(encoding="utf-8"))
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("command", SENTENCES)
def test_a_command_within_a_sentence_exists(command: str) -> None:
    """It may name a file that is not there, and is not run; but its words and options are known."""
    words = command.replace("…", "mlp").split()
    depth = 2 if words[0] in ("train", "sheet", "adapter") else 1
    code, printed = run_command(" ".join(["quire", *filter(str.isalnum, words[:depth]), "--help"]))
    assert code == 0, printed
    options = {word for word in words if word.startswith("--")} - {"--help"}
    assert {option for option in options if not re.search(rf"{re.escape(option)}\b", printed)} == set()


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
