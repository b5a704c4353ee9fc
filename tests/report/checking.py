"""A page read by Python's own parser: balanced tags, nothing that runs or loads, sound coordinates."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img", "br", "hr", "link", "input"}
_BAD_NUMBER = re.compile(r"(?<![a-z])(nan|inf|none)(?![a-z])", re.IGNORECASE)


class Page(HTMLParser):
    """The text of a page by element; raises AssertionError at the first thing that is wrong."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert [name for name, count in self.ids.items() if count > 1] == []
        assert [name for name in self.links if name not in self.ids] == []
        assert self.tags["script"] == 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attributes:
            value = value or ""
            assert not name.startswith("on"), f"{name} on <{tag}>"
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                assert value.startswith(("#", "data:image/")), f"{tag} loads {value}"
            if name == "id":
                self.ids[value] += 1
            if name == "href" and value.startswith("#"):
                self.links.append(value[1:])
            self.links += re.findall(r"url\(#([^)]*)\)", value)
            assert "url(http" not in value
            if name in ("d", "x", "y", "cx", "cy", "r", "points", "transform", "width", "height", "viewbox"):
                assert not _BAD_NUMBER.search(value), f'{tag} {name}="{value[:80]}"'
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without its start"
        assert self.open[-1] == tag, f"</{tag}> where <{self.open[-1]}> is open"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "@import" not in data
            assert "url(" not in data
        elif data.strip():
            self.texts.append((self.open[-1] if self.open else "", " ".join(data.split())))

    def of(self, tag: str) -> list[str]:
        return [text for element, text in self.texts if element == tag]

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.texts)


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))
