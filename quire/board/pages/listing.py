"""The list of runs: sorted and filtered by the address, so that it works without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from quire.board.markup import Markup, address, tag
from quire.board.pages.frame import page, state, value_of
from quire.board.runs import Summary
from quire.report.summary import number, wording

COLUMNS = {"name": "Run", "recipe": "Recipe", "state": "State", "value": "Last value", "step": "Step",
           "when": "When"}  # fmt: skip
_DOWN_FIRST = frozenset({"when", "step", "value"})


def key(run: Summary, column: str) -> Any:
    if column == "value":
        return run.main.value if run.main is not None and math.isfinite(run.main.value) else -math.inf
    return (run.when, run.written) if column == "when" else getattr(run, column)


def listing_page(runs: Sequence[Summary], folder: str, sort: str, order: str, words: str) -> str:
    column = sort if sort in COLUMNS else "when"
    down = order == "down" if order in ("up", "down") else column in _DOWN_FIRST
    shown = [run for run in runs if matches(run, words)]
    shown.sort(key=lambda run: key(run, column), reverse=down)
    form = tag(
        "form",
        tag("label", "Filter", for_="words"),
        tag("input", id="words", name="words", type="search", value=words, autocomplete="off",
            placeholder="name, recipe or state", maxlength="200"),
        tag("input", type="hidden", name="sort", value=column),
        tag("input", type="hidden", name="order", value="down" if down else "up"),
        tag("button", "Filter"),
        tag("span", count(len(shown), len(runs)), id="count", role="status", class_="soft"),
        tag("span", id="news", role="status"),
        method="get", action="/", class_="tools", role="search",
    )  # fmt: skip
    if not runs:
        body: Any = tag(
            "div",
            tag("p", f"There are no runs in {folder} yet."),
            tag("p", "Make one: ", tag("code", "quire train mlp")),
            class_="notice",
        )
    else:
        body = [form, chosen(shown, column, down, words)]
    return page("Runs", tag("p", f"In {folder}", class_="soft"), body, place="runs", scripts=("list",))


def count(shown: int, total: int) -> str:
    return f"{shown:,} of {total:,} runs" if shown != total else f"{total:,} runs"


def matches(run: Summary, words: str) -> bool:
    text = f"{run.name} {run.recipe} {run.state}".casefold()
    return all(word in text for word in words.casefold().split())


def chosen(runs: Sequence[Summary], column: str, down: bool, words: str) -> Markup:
    head = [tag("th", tag("span", "Compare", class_="hidden"), scope="col")]
    head += [header(name, title, column, down, words) for name, title in COLUMNS.items()]
    table = tag(
        "table",
        tag("caption", "Runs", class_="hidden"),
        tag("thead", tag("tr", head)),
        tag("tbody", [line(run) for run in runs]),
        id="runs",
        class_="wide",
    )
    return tag(
        "form",
        tag("div", tag("button", "Compare chosen runs", id="compare"), class_="tools"),
        tag("div", table, class_="scroll"),
        method="get",
        action="/compare",
    )


def header(name: str, title: str, column: str, down: bool, words: str) -> Markup:
    here = name == column
    turned = (not down) if here else name in _DOWN_FIRST
    query = urlencode(
        {"sort": name, "order": "down" if turned else "up", **({"words": words} if words else {})}
    )
    mark = tag("span", " ↓" if down else " ↑", aria_hidden="true") if here else None
    return tag(
        "th",
        tag("a", title, mark, href=f"/?{query}"),
        scope="col",
        aria_sort=("descending" if down else "ascending") if here else None,
        class_="n" if name == "step" else None,
    )


def line(run: Summary) -> Markup:
    box = tag("input", type="checkbox", name="run", value=run.name, aria_label=f"Compare {run.name}")
    return tag(
        "tr",
        tag("td", box),
        tag("th", tag("a", run.name, href=address("runs", run.name)), scope="row"),
        tag("td", run.recipe),
        tag("td", state(run.state), tag("div", run.problem, class_="soft") if run.problem else None),
        tag("td", value_of(run.main)),
        tag("td", f"{run.step:,}", class_="n"),
        tag("td", run.when),
        data_run=run.name,
    )


def plain(run: Summary) -> dict[str, Any]:
    """A run as the script of the list takes it."""
    main = run.main
    return {
        "name": run.name,
        "state": run.state,
        "value": "–" if main is None else number(main.value),
        "measure": "" if main is None else f"{main.split} {wording(main.measure)}",
        "step": f"{run.step:,}",
    }
