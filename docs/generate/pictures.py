"""Results of benchmarks as pictures: peers beside Quire, and how time and memory grow.

Each peer is a bar from Quire's time, which is 1, to its own: to the right where it takes longer. The axis is
logarithmic, so that twice and half as long are bars of one length.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from quire.bench.case import Growth
from quire.bench.growth import Grown, draw
from quire.bench.table import seconds
from quire.report.style import BLUE, GREEN, GREY, INK, PURPLE, VERMILION, figure, inline, plain, to_svg

Case = Mapping[str, Any]
WIDTH = 5.4
"""Inches: on the screen of a phone the letters are still read."""


def comparison(outcomes: Sequence[Case], name: str, label: str) -> str:
    """The cases of one subject as SVG for a page; empty where nobody stood beside Quire."""
    shown = [outcome for outcome in outcomes if len(present(outcome)) > 1]
    if not shown:
        return ""
    rows = [len(present(outcome)) for outcome in shown]
    titles = [textwrap.fill(plain(outcome["title"], 140), 58) for outcome in shown]
    heights = [
        0.27 * count + 0.3 + 0.18 * title.count("\n") for count, title in zip(rows, titles, strict=True)
    ]
    fig = figure(WIDTH, sum(heights) + 0.9)
    grid = fig.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, outcome, title in zip(grid[:, 0], shown, titles, strict=True):
        draw_case(axes, outcome, title)
    span(grid[0, 0], [place for outcome in shown for place in places(outcome)])
    grid[-1, 0].set_xlabel("time, Quire's = 1")
    fig.legend(handles=list(legend(shown)), loc="outside lower center", ncols=3, fontsize=8)
    return inline(to_svg(fig), name, label)


def present(outcome: Case) -> list[Any]:
    """Who ran, Quire first; nobody where Quire did not."""
    own, *others = outcome["contestants"]
    return [] if own["absent"] else [own, *(other for other in others if not other["absent"])]


def promised(outcome: Case) -> Iterator[tuple[float, bool | None]]:
    """Where each bar on time stands, over Quire's time: Quire meets it where that is 1 or more."""
    own, *others = present(outcome)
    rivals = {other["name"]: other["seconds"] for other in others}
    for bar in outcome["bars"]:
        if bar["of"] == "time" and bar["at_most"] is not None:
            if bar["rival"] is None or bar["rival"] in rivals:
                yield bar["at_most"] * rivals.get(bar["rival"], 1.0) / own["seconds"], bar["met"]
        elif bar["of"] == "rate" and bar["at_least"] is not None and bar["rival"] is None:
            yield 1.0 / bar["at_least"] / own["seconds"], bar["met"]


def places(outcome: Case) -> Iterator[float]:
    """Everything that is drawn on the axis of times."""
    own = present(outcome)[0]["seconds"]
    yield from (other["seconds"] / own for other in present(outcome))
    yield from (place for place, _ in promised(outcome))
    if outcome["limit"]:
        yield outcome["limit"] / own


def draw_case(axes: Axes, outcome: Case, title: str) -> None:
    found = present(outcome)
    own = found[0]["seconds"]
    axes.axvline(1.0, color=INK, linewidth=1)
    for row, other in enumerate(found):
        ratio = other["seconds"] / own
        words = seconds(other["seconds"])
        if row:
            axes.barh(row, ratio - 1.0, left=1.0, height=0.62, color=colour(other["name"], ratio))
            words = f"{ratio:.2f} ×, {words}" if ratio < 10 else f"{ratio:,.0f} ×, {words}"
        else:
            axes.plot(1.0, row, "o", color=GREEN, markersize=6)
            words = f"{words}/{outcome['unit']}"
        axes.annotate(
            words, (max(ratio, 1.0), row), (6, 0), textcoords="offset points", va="center", fontsize=8
        )
    if outcome["limit"]:
        axes.axvline(outcome["limit"] / own, color=PURPLE, linestyle=":", linewidth=1.4)
    for place, met in promised(outcome):
        axes.axvline(place, color=INK if met else VERMILION, linestyle="--", linewidth=1.2)
    axes.set(xscale="log", ylim=(len(found) - 0.5, -0.5))
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_yticks(range(len(found)), [plain(other["name"], 24) for other in found])
    axes.grid(visible=False, axis="y")


def colour(name: str, ratio: float) -> str:
    if name.startswith("quire"):
        return GREY
    return BLUE if ratio >= 1 else VERMILION


def span(axes: Axes, found: Sequence[float]) -> None:
    """From the smallest to the largest, with room for the words on the right; few numbers below."""
    least, most = min(found) / 1.4, max(found)
    most *= max(2.0, (most / least) ** 0.42)
    axes.set_xlim(least, most)
    decades = math.log10(most / least)
    steps = (1.0, 2.0, 5.0) if decades < 2 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=6 if decades < 2 else 5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def legend(outcomes: Sequence[Case]) -> Iterator[Patch | Line2D]:
    """What is to be seen in these cases, and nothing else."""
    others = [
        (other["name"], other["seconds"] / present(outcome)[0]["seconds"])
        for outcome in outcomes
        for other in present(outcome)[1:]
    ]
    drawn = {colour(*other) for other in others}
    words = {BLUE: "slower than Quire", VERMILION: "faster than Quire", GREY: "Quire otherwise"}
    yield from (Patch(color=key, label=text) for key, text in words.items() if key in drawn)
    if any(outcome["limit"] for outcome in outcomes):
        yield Line2D([], [], color=PURPLE, linestyle=":", label="what the machine allows")
    bars = {bool(met) for outcome in outcomes for _, met in promised(outcome)}
    if True in bars:
        yield Line2D([], [], color=INK, linestyle="--", label="bar, met")
    if False in bars:
        yield Line2D([], [], color=VERMILION, linestyle="--", label="bar, not met")


def growth(document: Mapping[str, Any], name: str, label: str) -> str:
    """Time and memory against size as SVG for a page, with the order that is expected."""
    points = document["points"]
    sizes = tuple(sorted({point["size"] for own in points.values() for point in own}))
    known = Growth(
        document["title"], document["variable"], sizes, unused, document["order"], document["memory_order"]
    )
    made: Figure = draw(Grown(known, points), document["machine"].splitlines()[0])
    return inline(to_svg(made), name, label)


def unused(size: int) -> Any:
    raise AssertionError("what was measured is not measured again")
