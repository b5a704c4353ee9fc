"""The benchmarks as a page, from the results that are kept."""

from __future__ import annotations

import json
from pathlib import Path

from quire.bench.table import markdown


def pages(folder: Path) -> dict[str, str | bytes]:
    results = folder / "results"
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob("*.json"))]
    documents = [document for document in documents if "outcomes" in document]
    rows = [
        (short(document["machine"]), outcome) for document in documents for outcome in document["outcomes"]
    ]
    pictures = sorted(results.glob("*.png"))
    parts = [
        "# Benchmarks\n",
        "The same work by Quire and by its peers, in turns, in one process; medians of the rounds. A ratio",
        "above 1 means that Quire takes less time. *Share of the limit* is the time that the machine's rates",
        "of products and copies allow, over the time it took. Bars that are not met are shown as well. To",
        "repeat it:\n",
        "```text\nquire bench --list\nquire bench kmeans --save results\n```\n",
    ]
    if rows:
        parts += ["## All of it in one table\n", markdown(rows) + "\n"]
    if pictures:
        parts.append("## Pictures\n")
        parts += [f"![{title(file)}](benchmarks/{file.name}){{: .plot }}\n" for file in pictures]
    parts += ["## Each result\n", "As it was printed, with the machine and the bars.\n"]
    for file in sorted(results.glob("*.txt"), reverse=True):
        text = file.read_text(encoding="utf-8").strip()
        body = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
        parts.append(f'??? note "{title(file)}"\n\n    ```text\n{body}\n    ```\n')
    made: dict[str, str | bytes] = {"benchmarks.md": "\n".join(parts)}
    return made | {f"benchmarks/{file.name}": file.read_bytes() for file in pictures}


def short(machine: str) -> str:
    """The processor that did the work: "NVIDIA H200", or a CPU with its cores."""
    words = machine.splitlines()[0].split(", ")
    return next((word for word in words if word.startswith("NVIDIA")), ", ".join(words[:2]))


def title(file: Path) -> str:
    """ "kmeans on h200, 2026-11-16" of 2026-11-16-kmeans-h200.txt."""
    date, name = file.stem[:10], file.stem[11:]
    return f"{name.replace('-', ' ')}, {date}"
