"""The benchmarks as a page, from the results that are kept: pictures, a table, each result as printed."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.generate.pictures import comparison, growth
from quire.bench.table import markdown

Document = Mapping[str, Any]
INTRODUCTION = """# Benchmarks

The same work by Quire and by its peers, in turns, in one process; medians of the rounds. Bars that are not
met are shown as well. `quire bench NAME` runs a subject where you are; `--save FOLDER` keeps what it finds.

```console
$ quire bench --list
…
kmeans …
…
```

In the pictures Quire's time is 1. A bar to the right is a peer that takes longer, with how many times as
long; one to the left is a peer that is faster. *What the machine allows* is the time that its rates of
products and copies permit at best, both measured on the spot.
"""


def pages(folder: Path) -> dict[str, str | bytes]:
    results = folder / "results"
    measured, grown = newest(results)
    parts = [INTRODUCTION]
    machines = dict.fromkeys(document["machine"].splitlines()[0] for document in measured.values())
    for machine in sorted(machines, key=lambda name: "NVIDIA" not in name):
        own = {name: found for name, found in measured.items() if found["machine"].startswith(machine)}
        parts += [f"## {short(machine)}\n", f"{html.escape(machine)}\n", gallery(own)]
    made: dict[str, str | bytes] = {}
    if grown:
        parts += ["## Growth\n", "Time and extra memory against size, both axes logarithmic.\n"]
        for name, document in grown.items():
            picture = results / f"{document['date']}-{name}.png"
            if "order" in document:
                drawn = growth(document, name, f"{document['title']}: time and memory against size")
                parts.append(framed(drawn, document["title"], "wide"))
            elif picture.exists():
                parts.append(f"![{document['title']}](benchmarks/{picture.name}){{: .paper }}\n")
                made[f"benchmarks/{picture.name}"] = picture.read_bytes()
    rows = [(short(found["machine"]), one) for found in measured.values() for one in found["outcomes"]]
    parts += [
        "## All of it in one table\n",
        "A ratio above 1 means that Quire takes less time. *Share of the limit* is the time that the machine",
        "allows, over the time it took.\n",
        f"{markdown(rows)}\n",
        "## Each result\n",
        "As it was printed, with the machine and the bars.\n",
    ]
    for file in sorted(results.glob("*.txt"), reverse=True):
        text = file.read_text(encoding="utf-8").strip()
        body = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
        parts.append(f'??? note "{title(file.stem)}"\n\n    ```text\n{body}\n    ```\n')
    return made | {"benchmarks.md": "\n".join(parts)}


def newest(results: Path) -> tuple[dict[str, Document], dict[str, Document]]:
    """The last comparison and the last growth of each subject and machine, by the name they share."""
    measured: dict[str, Document] = {}
    grown: dict[str, Document] = {}
    for file in sorted(results.glob("*.json")):
        document = json.loads(file.read_text(encoding="utf-8")) | {"date": file.stem[:10]}
        kind = measured if "outcomes" in document else grown
        kind[file.stem[11:]] = document
    return measured, grown


def gallery(documents: Mapping[str, Document]) -> str:
    return f'<div class="pictures" markdown="0">\n{"".join(pictures(documents))}</div>\n'


def pictures(documents: Mapping[str, Document]) -> Iterator[str]:
    for name, document in documents.items():
        label = f"{document['subject']}: time of Quire and of its peers"
        drawn = comparison(document["outcomes"], name, label)
        if drawn:
            yield framed(drawn, f"{document['subject']}, {document['date']}")


def framed(drawn: str, caption: str, kind: str = "") -> str:
    # Markdown leaves HTML alone up to the first blank line.
    lines = "\n".join(line for line in drawn.splitlines() if line.strip())
    words = f"<figcaption>{html.escape(caption)}</figcaption>"
    return f'<figure class="{f"drawn {kind}".strip()}">\n{words}\n{lines}\n</figure>\n'


def short(machine: str) -> str:
    """The processor that did the work: "NVIDIA H200", or a CPU with its cores."""
    words = machine.splitlines()[0].split(", ")
    return next((word for word in words if word.startswith("NVIDIA")), ", ".join(words[:2]))


def title(stem: str) -> str:
    """ "kmeans h200, 2026-11-16" of 2026-11-16-kmeans-h200."""
    return f"{stem[11:].replace('-', ' ')}, {stem[:10]}"
