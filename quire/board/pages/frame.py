"""What every page has: a head, the way to the other pages, a title; and small parts that several use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quire.board.markup import Markup, join, tag
from quire.report.summary import Headline, number, wording

PLACES = (("runs", "/", "Runs"), ("sheet", "/sheet", "Sheet"), ("explain", "/explain", "Explain"),
          ("instruments", "/instruments", "Instruments"))  # fmt: skip


STATIC = Path(__file__).parents[1] / "static"


@cache
def imported(script: str) -> tuple[str, ...]:
    """Scripts that this one needs, which a browser would otherwise ask for one after the other."""
    text = (STATIC / f"{script}.js").read_text(encoding="utf-8")
    own = re.findall(r'^import .* from "\./(\w+)\.js"', text, re.MULTILINE)
    return tuple(dict.fromkeys(name for each in own for name in (each, *imported(each))))


def page(title: str, *content: Any, place: str, scripts: Sequence[str] = ()) -> str:
    """A whole document. `scripts` are names in static/."""
    links = [
        tag("a", words, href=href, aria_current="page" if name == place else None)
        for name, href, words in PLACES
    ]
    needed = dict.fromkeys(name for script in scripts for name in imported(script))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · Quire"),
        tag("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
        tag("link", rel="stylesheet", href="/static/board.css"),
        [tag("link", rel="modulepreload", href=f"/static/{name}.js") for name in needed],
        [tag("script", type="module", src=f"/static/{name}.js") for name in ("page", *scripts)],
    )
    body = tag(
        "body",
        tag("a", "Skip to content", href="#content", class_="skip"),
        tag("div", tag("span", "Quire", class_="brand"), tag("nav", links, aria_label="Board"), class_="bar"),
        tag("main", tag("h1", title), content, id="content", tabindex="-1"),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def table(
    caption: str, head: Sequence[Any], rows: Iterable[Sequence[Any]], *, numeric: str = "", **attributes: Any
) -> Markup:
    """A table with a name; the first cell of a row names the row. `numeric` is as for a report's table."""
    kinds = ["n" if kind == "n" else None for kind in numeric.ljust(len(head), "t")]
    top = tag(
        "tr", [tag("th", cell, scope="col", class_=kind) for cell, kind in zip(head, kinds, strict=True)]
    )
    lines = [
        tag(
            "tr",
            tag("th", row[0], scope="row", class_=kinds[0]),
            [tag("td", cell, class_=kind) for cell, kind in zip(row[1:], kinds[1:], strict=True)],
        )
        for row in rows
    ]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption, class_="hidden"),
            tag("thead", top),
            tag("tbody", lines),
            **attributes,
        ),
        class_="scroll",
    )


def section(title: str, *content: Any, anchor: str) -> Markup:
    return tag("section", tag("h2", title, id=anchor), content, aria_labelledby=anchor)


def facts(pairs: Iterable[tuple[str, Any]]) -> Markup:
    return tag("dl", [tag("div", tag("dt", k), tag("dd", v)) for k, v in pairs], class_="facts")


def state(word: str) -> Markup:
    """A state as a word with a mark; the mark is for the eye alone."""
    kinds = {"training": "live", "damaged": "bad", "interrupted": "bad"}
    return tag("span", word, class_=f"state {kinds.get(word, 'quiet' if word == 'unfinished' else 'done')}")


def value_of(main: Headline | None) -> Markup:
    if main is None:
        return tag("span", "–")
    return join(
        [
            tag("b", number(main.value)),
            " ",
            tag("span", f"{main.split} {wording(main.measure)}", class_="soft"),
        ]
    )


def notice(text: str, *, kind: str = "") -> Markup:
    return tag("p", text, class_=f"notice {kind}".strip())
