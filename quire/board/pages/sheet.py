"""The sheet: its chapters, and a chapter with formulas, code, proofs and pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from quire.board.formula import formula
from quire.board.instruments import INSTRUMENTS
from quire.board.markup import Markup, address, tag
from quire.board.pages.frame import page, section

Entries = Sequence[dict[str, Any]]


def chapters_of(entries: Entries) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        found.setdefault(entry["chapter"], []).append(entry)
    return found


def anchor(id: str) -> str:
    """The name of an entry's section on the page of its chapter."""
    return re.sub("[^a-z0-9]+", "-", id.lower())


def entry_address(id: str) -> str:
    """Where an entry stands in the sheet."""
    return f"{address('sheet', id.partition('/')[0])}#{anchor(id)}"


def contents_page(entries: Entries) -> str:
    blocks = []
    for chapter, own in chapters_of(entries).items():
        links = [tag("li", tag("a", entry["title"], href=entry_address(entry["id"]))) for entry in own]
        about = re.sub(r"^Chapter \d+[:,]\s*", "", own[0]["about"])
        blocks.append(
            tag(
                "section",
                tag("h2", tag("a", chapter.replace("-", " ").capitalize(), href=address("sheet", chapter))),
                tag("p", about[:1].upper() + about[1:], class_="soft"),
                tag("ul", links, class_="entries"),
                class_="chapter",
            )
        )
    search = tag(
        "div",
        tag("label", "Find a formula", for_="words"),
        tag("input", id="words", type="search", autocomplete="off", maxlength="200"),
        tag("span", f"{len(entries)} formulas", id="count", role="status", class_="soft"),
        class_="tools",
    )
    words = "Every formula with its code and a proof that can fail. A proof runs where you press its button."
    return page(
        "Sheet",
        tag("p", words),
        search,
        tag("div", blocks, class_="chapters"),
        place="sheet",
        scripts=("contents",),
    )


def chapter_page(chapter: str, entries: Entries) -> str:
    links = [tag("a", entry["title"], href=f"#{anchor(entry['id'])}") for entry in entries]
    tools = tag(
        "div", tag("button", "Run all proofs of this chapter", type="button", id="all"), class_="tools"
    )
    return page(
        chapter.replace("-", " ").capitalize(),
        tag("nav", links, aria_label="Formulas of this chapter", class_="index"),
        tools,
        [entry_section(entry) for entry in entries],
        place="sheet",
        scripts=("proof",),
    )


def entry_section(entry: dict[str, Any]) -> Markup:
    return section(
        entry["title"],
        tag("p", tag("code", entry["id"]), class_="soft"),
        formula(entry["latex"]),
        tag("p", tag("b", "Erratum: "), entry["erratum"], class_="notice") if entry["erratum"] else None,
        tag(
            "div",
            tag("button", "Run the proof", tag("span", f" of {entry['title']}", class_="hidden"),
                type="button", class_="proof", data_id=entry["id"]),
            tag("span", f"tolerance {entry['tolerance']:.3g}", role="status", class_="outcome soft"),
            class_="tools",
        ),
        [code(item["place"], item["source"]) for item in entry["code"]],
        code("the proof", entry["proof"]) if entry["proof"] else None,
        links(entry["id"]),
        picture(entry) if entry["picture"] else None,
        anchor=anchor(entry["id"]),
    )  # fmt: skip


def code(place: str, source: str) -> Markup:
    if not source:
        return tag("p", tag("code", place), class_="soft")
    return tag("details", tag("summary", tag("code", place)), tag("pre", tag("code", source)))


def links(id: str) -> Markup | None:
    about = [instrument for _, instrument in INSTRUMENTS.items() if id in instrument.entries]
    found = [tag("a", f"Move it: {one.title}", href=address("instruments", one.name)) for one in about]
    return tag("p", found, class_="links") if found else None


def picture(entry: dict[str, Any]) -> Markup:
    chapter, _, name = entry["id"].partition("/")
    source = f"{address('sheet', chapter, name)}/picture.svg"
    return tag(
        "figure", tag("img", src=source, alt=f"Picture of {entry['title']}", loading="lazy"), class_="wide"
    )
