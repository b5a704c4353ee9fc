"""The sheet as pages: each entry with its formula, code, picture and erratum, and its proof run now."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Collection
from functools import cache

import quire.sheet  # noqa: F401  registers every entry
from docs.generate.markup import fenced, inline, source
from quire.board.formula import formula
from quire.report.style import to_svg
from quire.sheet.registry import ENTRIES, Entry, Verdict, locate

Chapters = str | Collection[str]
MOST_LINES = 60
"""Of code that is shown; a whole network is better read in its file."""


@cache
def chapters() -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for _, entry in ENTRIES.items():
        found.setdefault(entry.chapter, []).append(entry)
    return found


def described(chapter: str) -> list[str]:
    """What each of its files says that it holds and is proven against."""
    modules = dict.fromkeys(entry.proof.__module__ for entry in chapters()[chapter])
    texts = [" ".join((sys.modules[name].__doc__ or "").split("\n\n")[0].split()) for name in modules]
    # "Chapter 9, second part: error on …" is about the file; the page says which chapter it is.
    return [re.sub(r"^Chapter \d+(, \w+ part)?[:,] ", "", text) for text in texts]


def contents() -> list[object]:
    return ["sheet/index.md", *({name: f"sheet/{name}.md"} for name in chapters())]


def pages(proven: Chapters, anchors: dict[str, str]) -> dict[str, str | bytes]:
    """Every chapter; those in `proven` with the results of their proofs and their pictures."""
    made: dict[str, str | bytes] = {}
    verdicts: dict[str, Verdict] = {}
    for name, entries in chapters().items():
        run = proven == "all" or name in proven
        for entry in entries if run else ():
            verdicts[entry.id] = entry.verify()
            if entry.picture is not None:
                made[picture_path(entry)] = picture(entry)
        made[f"sheet/{name}.md"] = chapter_page(name, verdicts, anchors, pictures=run)
    made["sheet/index.md"] = overview(verdicts)
    return made


def picture_path(entry: Entry) -> str:
    return f"sheet/pictures/{entry.id.replace('/', '-')}.svg"


def picture(entry: Entry) -> bytes:
    assert entry.picture is not None
    return to_svg(entry.picture()).encode()


def overview(verdicts: dict[str, Verdict]) -> str:
    passed = sum(verdict.passed for verdict in verdicts.values())
    lines = [
        "# The sheet\n",
        f"{len(ENTRIES)} entries in {len(chapters())} chapters. Each ties a formula to public code and to a",
        "proof: a function that computes the same thing another way and returns the largest difference. A",
        "proof counts only if it also rejects a version that is wrong on purpose, which the tests demand.\n",
        f"When this page was made **{passed} of {len(verdicts)} proofs that were run passed**.",
        "`quire sheet verify` runs them where you are.\n",
        "| chapter | what it is and what it is proven against | entries | passed |",
        "| --- | --- | --- | --- |",
    ]
    for name, entries in chapters().items():
        run = [verdicts[entry.id] for entry in entries if entry.id in verdicts]
        result = f"{sum(v.passed for v in run)} of {len(run)}" if run else "not run"
        about = inline(" ".join(capital(text) for text in described(name)))
        lines.append(f"| [{name}]({name}.md) | {about} | {len(entries)} | {result} |")
    lines += [
        "\n## Errata\n",
        "Formulas that are commonly printed wrong; the proof refutes the printed form.\n",
    ]
    for _, entry in ENTRIES.items():
        if entry.erratum:
            lines += [
                f"[{entry.title}]({entry.chapter}.md#{anchor(entry)})\n",
                f":   {html.escape(entry.erratum)}\n",
            ]
    return "\n".join(lines)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def anchor(entry: Entry) -> str:
    return entry.id.split("/")[1]


def chapter_page(name: str, verdicts: dict[str, Verdict], anchors: dict[str, str], *, pictures: bool) -> str:
    parts = [f"# {name}\n", *(f"{capital(inline(text))}\n" for text in described(name))]
    for entry in chapters()[name]:
        parts += [f"## {entry.title} {{: #{anchor(entry)} }}\n", f"`{entry.id}`\n"]
        parts.append(f"{formula(entry.latex)}\n")
        parts.append(result(entry, verdicts.get(entry.id)))
        if entry.erratum:
            parts.append(f'!!! warning "Often printed otherwise"\n\n    {html.escape(entry.erratum)}\n')
        if pictures and entry.picture is not None:
            file = picture_path(entry).removeprefix("sheet/")
            parts.append(f"![Picture: {entry.title}]({file}){{: .plot }}\n")
        parts.append(code_of(entry, anchors))
    return "\n".join(parts)


def result(entry: Entry, verdict: Verdict | None) -> str:
    if verdict is None:
        return f"Proof: not run when this page was made; the error may be {entry.tolerance:.0e} at most.\n"
    word = "passed" if verdict.passed else "FAILED"
    text = f"Proof: **{word}**, error {verdict.error:.1e}, at most {verdict.tolerance:.0e}."
    if verdict.refuted is not None:
        text += f" The printed form: error {verdict.refuted:.1e}, refuted."
    return f"{text}{' ' + html.escape(verdict.detail) if verdict.detail else ''}\n"


def code_of(entry: Entry, anchors: dict[str, str]) -> str:
    lines = []
    for item in entry.code:
        place, _, file = locate(item).partition(" (")
        link = f"[`{place}`](../{anchors[place]})" if place in anchors else f"`{place}`"
        lines.append(f"- {link}{' in `' + file.rstrip(')') + '`' if file else ''}")
    lines.append("")
    seen = [text for item in entry.code if (text := source(item)) and text.count("\n") < MOST_LINES]
    if seen:
        lines += ['??? note "The code"\n', *(fenced(text, indent="    ") for text in seen)]
    lines += ['??? note "What the proof compares"\n', fenced(source(entry.proof), indent="    ")]
    return "\n".join(lines)
