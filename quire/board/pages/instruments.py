"""The instruments: their list, and the page of one with its controls."""

from __future__ import annotations

from quire.board.instruments import INSTRUMENTS, Instrument
from quire.board.instruments.base import Choice, Slider
from quire.board.markup import Markup, address, tag
from quire.board.pages.frame import page
from quire.board.pages.sheet import entry_address


def list_page() -> str:
    cards = [
        tag("li", tag("h2", tag("a", one.title, href=address("instruments", one.name))), tag("p", one.about))
        for _, one in INSTRUMENTS.items()
    ]
    return page(
        "Instruments", tag("p", "Formulas whose numbers can be moved."), tag("ul", cards, class_="cards"),
        place="instruments",
    )  # fmt: skip


def instrument_page(one: Instrument) -> str:
    entries = [tag("a", id, href=entry_address(id)) for id in one.entries]
    return page(
        one.title,
        tag("p", one.about),
        tag(
            "form",
            [control(each) for each in one.controls],
            id="instrument",
            data_name=one.name,
            class_="fields",
        ),
        tag("p", id="said", role="status"),
        tag("dl", id="facts", class_="facts"),
        tag("div", id="plots", class_="pictures", aria_busy="true"),
        tag("p", "In the sheet: ", entries, class_="links") if entries else None,
        tag("noscript", tag("p", "Instruments need JavaScript.")),
        place="instruments",
        scripts=("instrument",),
    )


def control(each: Slider | Choice) -> Markup:
    label = tag("label", each.label, for_=each.name)
    if isinstance(each, Choice):
        options = [tag("option", word.replace("_", " "), value=word) for word in each.choices]
        return tag("div", label, tag("select", options, id=each.name, name=each.name))
    slider = tag(
        "input", id=each.name, name=each.name, type="range", min=f"{each.least:g}", max=f"{each.most:g}",
        step=f"{each.step:g}", value=f"{each.start:g}",
    )  # fmt: skip
    return tag("div", label, tag("output", f"{each.start:g}", for_=each.name), slider)
