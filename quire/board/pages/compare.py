"""Several runs side by side: curves over each other, what differs in how they were made, what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.board.markup import Markup, address, tag
from quire.board.pages.charts import charts
from quire.board.pages.frame import page, section, state, table
from quire.board.runs import Summary
from quire.report.comparison import WITHOUT_EFFECT
from quire.report.reading import Run
from quire.report.summary import SPLITS, duration, flatten, number, option_text, wording


def compare_page(runs: Sequence[tuple[Summary, Run]]) -> str:
    names = [summary.name for summary, _ in runs]
    measures = list(dict.fromkeys(measure for _, run in runs for measure in run.curves))
    select = tag(
        "div",
        tag("label", "Split", for_="split"),
        tag(
            "select",
            [tag("option", split, value=split) for split in ("validation", "train", "test")],
            id="split",
        ),
        class_="tools",
    )
    return page(
        f"{len(runs)} runs side by side",
        section("Curves", select, charts(names, measures), anchor="curves"),
        section("Results", results(runs), anchor="results"),
        section("What differs", differences([(s.name, run.config.get("options") or {}) for s, run in runs]),
                anchor="differences"),
        place="runs", scripts=("curves",),
    )  # fmt: skip


def link(name: str) -> Markup:
    return tag("a", name, href=address("runs", name))


def results(runs: Sequence[tuple[Summary, Run]]) -> Markup:
    """The most trusted split that any of the runs has, by measure."""
    columns: list[tuple[str, str]] = []
    for split in SPLITS:
        columns = [
            (split, name) for name in dict.fromkeys(n for _, run in runs for n in run.measures.get(split, {}))
        ]
        if columns:
            break
    head = [
        "run",
        "recipe",
        "state",
        *(f"{split} {wording(name)}" for split, name in columns),
        "time",
        "parameters",
    ]
    rows = [
        [
            link(summary.name), run.recipe, state(summary.state),
            *(number(run.measures.get(split, {}).get(name)) for split, name in columns),
            duration((run.result or {}).get("seconds")), number((run.result or {}).get("parameters")),
        ]
        for summary, run in runs
    ]  # fmt: skip
    return table("Results by run", head, rows, numeric="ttt" + "n" * (len(columns) + 2))


def differences(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Markup:
    """Options in which the runs differ, a row each."""
    flat = [(name, flatten(options)) for name, options in runs]
    missing = object()
    every = sorted({option for _, options in flat for option in options} - WITHOUT_EFFECT)
    differing = [
        o for o in every if any(options.get(o, missing) != flat[0][1].get(o, missing) for _, options in flat)
    ]
    if not differing:
        return tag("p", "Their options are the same.")
    rows = [
        [option, *(option_text(options[option]) if option in options else "–" for _, options in flat)]
        for option in differing
    ]
    return table("Options that differ", ["option", *(link(name) for name, _ in flat)], rows)
