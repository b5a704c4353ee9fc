"""The building blocks of the page. Whatever comes from a file passes through `escape` here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Literal

from quire.report.css import CSS


def escape(text: object) -> str:
    return html.escape(str(text))


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: str = "", foot: bool = False
) -> str:
    """A table of texts. `numeric` has an "n" for a column of numbers; with `foot` the last row is a total."""
    kinds = [' class="n"' if flag == "n" else "" for flag in numeric.ljust(len(head), "t")]
    lines = [
        "<tr>" + "".join(f"<td{k}>{escape(c)}</td>" for c, k in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    ]
    last = f"<tfoot>{lines.pop()}</tfoot>" if foot and lines else ""
    top = "".join(f'<th scope="col"{k}>{escape(name)}</th>' for name, k in zip(head, kinds, strict=True))
    body = "<tbody>\n" + "\n".join(lines) + "\n</tbody>"
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead>{body}{last}</table></div>\n'


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names with their values, in as many columns as fit."""
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs)
    return f'<dl class="facts">{items}</dl>\n' if items else ""


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{escape(text)}</p>\n" if text else ""


def code(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>\n"


def picture(svg: str, caption: str = "", *, shape: Literal["", "wide", "tall"] = "") -> str:
    """A figure around markup that was made by `style.inline` or made safe by `pictures.embed`.

    A wide one takes the whole width and scrolls on a narrow screen; a tall one has two others beside it.
    """
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure{_class(shape)}><div class="scroll">{svg}</div>{words}</figure>\n'


def pictures(blocks: Iterable[str]) -> str:
    joined = "".join(blocks)
    return f'<div class="pictures">{joined}</div>\n' if joined else ""


def folded(title: str, content: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{content}</details>\n"


def section(title: str, content: str, *, anchor: str, level: int = 2) -> str:
    return f'<section id="{anchor}"><h{level}>{escape(title)}</h{level}>\n{content}</section>\n'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def document(title: str, header: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """The whole page from (anchor, title, markup) of each section; links to them follow the header."""
    links = "".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name, _ in sections)
    body = "".join(section(name, markup, anchor=anchor) for anchor, name, markup in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # Nothing of this page runs or loads anything; the browser is told to hold it to that.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f'{header}<nav aria-label="Sections">{links}</nav>\n{body}</main>\n</body>\n</html>\n'
    )
