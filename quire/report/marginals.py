"""Rows that a model made beside rows of the data: the distribution of each column, in its own unit.

N rows of either kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from quire.errors import InputError
from quire.report.reading import Array
from quire.report.style import BLUE, VERMILION, figure, plain

WIDTH = 7.2
"""Inches across a page."""
ACROSS = 3
MOST_COLUMNS = 12
"""Columns that are drawn, the first of the table."""
MOST_CATEGORIES = 8
"""Categories of a column that are drawn, the most frequent in the data."""
LEAST_BINS, MOST_BINS = 6, 24


class Column(NamedTuple):
    """Values of one column (N,): numbers or dates, NaN or NaT where missing, or categories as texts."""

    name: str
    data: Array
    samples: Array


def marginals_figure(columns: Sequence[Column], name: str = "Columns of data and samples") -> Figure:
    """A panel for each column: shares of the data as bars, of the samples as a line or beside them."""
    if not columns or any(len(part) == 0 for column in columns for part in column[1:]):
        raise InputError(
            f"{len(columns)} columns", expected="at least one, with rows of the data and samples"
        )
    shown = columns[:MOST_COLUMNS]
    across = min(ACROSS, len(shown))
    down = math.ceil(len(shown) / across)
    fig = figure(max(3.4, WIDTH * across / ACROSS), 1.75 * down + 0.75)
    grid = fig.subplots(down, across, squeeze=False)
    for axes in list(grid.flat)[len(shown) :]:
        axes.remove()
    for axes, column in zip(grid.flat, shown, strict=False):
        quantity = column.data.dtype.kind in "fiuM"
        (_quantities if quantity else _categories)(axes, column)
        axes.set_title(plain(column.name, 26), fontsize=8.5, loc="left", pad=3)
        axes.tick_params(labelsize=7)
    for row in grid:
        row[0].set_ylabel("share of rows", fontsize=8)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=8.5)
    which = f", {len(shown)} of {len(columns)}" if len(shown) < len(columns) else ""
    fig.suptitle(plain(name + which, 60), fontsize=11, x=0.01, ha="left")
    return fig


def _quantities(axes: Axes, column: Column) -> None:
    """Histograms with common bins, which hold all of the data and what samples are as near as that."""
    data, samples = (_finite(part) for part in (column.data, column.samples))
    if column.data.dtype.kind == "M":
        locator = AutoDateLocator(maxticks=4)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, show_offset=False))
    else:
        axes.ticklabel_format(axis="x", useOffset=False)
    if not len(data):
        return
    low, high = float(data.min()), float(data.max())
    margin = 0.15 * (high - low) or 0.5
    bins = int(np.clip(math.sqrt(len(data)), LEAST_BINS, MOST_BINS))
    edges = np.linspace(low - margin, high + margin, bins + 1)
    shares = [np.histogram(part, edges)[0] / max(len(part), 1) for part in (data, samples)]
    axes.stairs(shares[0], edges, fill=True, color=BLUE, alpha=0.45, label="data")
    axes.stairs(shares[1], edges, color=VERMILION, lw=1.4, label="samples")
    outside = 1 - shares[1].sum()
    if len(samples) and outside > 0.005:
        axes.annotate(
            f"{100 * outside:.0f} % outside", (1, 1), xycoords="axes fraction", ha="right", va="top",
            fontsize=7, color=VERMILION,
        )  # fmt: skip


def _finite(values: Array) -> Array:
    """Numbers, or days since 1970, that are there."""
    if values.dtype.kind == "M":
        known = values[~np.isnat(values)].astype("datetime64[D]")
        return known.astype(np.int64).astype(float)
    return values[np.isfinite(values)].astype(float)


def _categories(axes: Axes, column: Column) -> None:
    data, samples = (np.array([str(value) for value in part]) for part in (column.data, column.samples))
    names, counts = np.unique(data, return_counts=True)
    names = names[np.argsort(-counts, kind="stable")][:MOST_CATEGORIES]
    places = np.arange(len(names))
    for part, offset, colour, words in (
        (data, -0.2, BLUE, "data"),
        (samples, 0.2, VERMILION, "samples"),
    ):
        heights = [(part == name).mean() for name in names]
        alpha = 0.45 if words == "data" else 1.0
        axes.bar(places + offset, heights, 0.36, color=colour, alpha=alpha, label=words)
    axes.set_xticks(places, [plain(name, 10) for name in names], rotation=40 if len(names) > 3 else 0)
