"""HTML in which everything is escaped, unless it is `Markup` already.

tag("a", name, href=address("runs", name))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from quire.report.page import escape

_EMPTY = frozenset({"input", "img", "link", "meta", "br", "hr"})


class Markup(str):
    """Text that is HTML already: made by `tag`, or by the building blocks of a report."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. Attributes are spelt as Python allows: `class_`, `aria_label`, `data_run`; True stands for
    one without a value, and None or False leaves it out."""
    words = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _EMPTY:
        return Markup(f"<{name}{words}>")
    return Markup(f"<{name}{words}>{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Markup:
    """All of them one after the other; None is nothing, and lists are gone through."""
    return Markup("".join(_text(child) for child in children))


def _text(child: Any) -> str:
    if isinstance(child, Markup):
        return child
    if child is None:
        return ""
    if isinstance(child, list | tuple):
        return join(child)
    return escape(child)


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(value)}"'


def address(*parts: str) -> str:
    """A path of this site; a part may hold any character and stays one part."""
    return "/" + "/".join(quote(part, safe="") for part in parts)
