"""The page of an error: what came, what was expected, what helps."""

from __future__ import annotations

from quire.board.markup import tag
from quire.board.pages.frame import page


def problem_page(title: str, got: str, expected: str = "", fix: str = "", *, place: str = "") -> str:
    lines = [tag("p", got)]
    lines += [tag("p", tag("b", "Expected: "), expected)] if expected else []
    lines += [tag("p", tag("b", "What helps: "), fix)] if fix else []
    return page(
        title, tag("div", lines, class_="notice bad"), tag("p", tag("a", "All runs", href="/")), place=place
    )
