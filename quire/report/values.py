"""Pictures and tables of a regressor: prediction against truth, residuals, coverage of its intervals.

The error of a row is prediction − truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from quire.report.reading import Array, Predictions
from quire.report.style import BLUE, INK, VERMILION, figure, plain
from quire.report.summary import percent, wilson

POINTS = 1500
INTERVALS = 400
"""More rows than these are thinned out, evenly over the file, in the scatter picture."""
GROUPS = 5
_ROWS_PER_GROUP = 20


@dataclass(frozen=True)
class Coverage:
    """How many truths lie within their interval, over all and by groups of equal size."""

    covered: int
    rows: int
    level: float | None
    centres: Array
    """Median prediction of each group."""
    group_covered: Array
    group_rows: Array

    @property
    def share(self) -> float:
        return self.covered / self.rows


def coverage(found: Predictions) -> Coverage | None:
    """None where the file has no intervals."""
    if found.low is None or found.high is None:
        return None
    known = np.isfinite(found.low) & np.isfinite(found.high)
    if not known.any():
        return None
    inside = ((found.low <= found.truth) & (found.truth <= found.high))[known]
    prediction = found.prediction[known]
    groups = max(1, min(GROUPS, len(prediction) // _ROWS_PER_GROUP))
    parts = np.array_split(np.argsort(prediction, kind="stable"), groups)
    return Coverage(
        covered=int(inside.sum()),
        rows=len(inside),
        level=found.level,
        centres=np.array([np.median(prediction[part]) for part in parts]),
        group_covered=np.array([inside[part].sum() for part in parts]),
        group_rows=np.array([len(part) for part in parts]),
    )


def drawn_rows(found: Predictions) -> Array:
    """Places of the rows that the scatter picture shows."""
    limit = POINTS if found.low is None else INTERVALS
    return np.unique(np.linspace(0, len(found) - 1, min(len(found), limit)).round().astype(int))


def scatter_figure(found: Predictions, name: str) -> Figure:
    """Prediction against truth with the intervals as bars; a miss has another colour and mark."""
    chosen = drawn_rows(found)
    truth, prediction = found.truth[chosen], found.prediction[chosen]
    fig = figure(4.6, 4.2)
    axes = fig.subplots()
    ends = np.array([min(truth.min(), prediction.min()), max(truth.max(), prediction.max())])
    axes.plot(ends, ends, color=INK, ls=":", lw=1.2, label="prediction = truth", zorder=3)
    few = len(chosen) <= 150
    look: dict[str, Any] = {"ms": 4 if few else 2.5, "alpha": 0.85 if few else 0.55}
    if found.low is None or found.high is None:
        axes.plot(truth, prediction, "o", color=BLUE, mew=0, label="row", **look)
    else:
        low, high = found.low[chosen], found.high[chosen]
        inside = (low <= truth) & (truth <= high)
        level = "" if found.level is None else f"{100 * found.level:g} % "
        for where, color, mark, text in (
            (inside, BLUE, "o", f"truth within its {level}interval"),
            (~inside, VERMILION, "x", "outside"),
        ):
            drawable = where & np.isfinite(low) & np.isfinite(high)
            axes.vlines(truth[drawable], low[drawable], high[drawable], color=color, lw=0.8, alpha=0.35)
            if where.any():
                axes.plot(truth[where], prediction[where], mark, color=color, label=text, **look)
    axes.set_xlabel(plain(f"truth ({name})"))
    axes.set_ylabel(plain(f"prediction ({name})"))
    axes.set_title("Prediction against truth", loc="left", fontsize=11)
    axes.legend(fontsize=8.5, loc="upper left", markerscale=1.6)
    return fig


def residual_figure(found: Predictions, name: str) -> Figure:
    error = found.prediction - found.truth
    fig = figure()
    axes = fig.subplots()
    bins = int(np.clip(np.sqrt(len(error)) * 1.5, 5, 40))
    span = error.max() - error.min()
    # All errors (nearly) equal: bins of a width that arithmetic can still tell apart.
    limits = None if span > 1e-9 * max(1e-9, np.abs(error).max()) else (error[0] - 0.5, error[0] + 0.5)
    axes.hist(error, bins=bins, range=limits, color=BLUE, alpha=0.75, label="rows")
    axes.axvline(0, color=INK, lw=1, ls=":")
    axes.axvline(error.mean(), color=VERMILION, lw=1.4, label="mean error")
    axes.set_xlabel(plain(f"prediction − truth ({name})"))
    axes.set_ylabel("rows")
    axes.set_title("Residuals", loc="left", fontsize=11)
    axes.legend(fontsize=8.5)
    return fig


def coverage_figure(measured: Coverage, name: str) -> Figure:
    """Coverage by groups of predictions of equal size, beside the level that was promised."""
    fig = figure()
    axes = fig.subplots()
    if measured.level is not None:
        text = f"nominal {100 * measured.level:g} %"
        axes.axhline(100 * measured.level, color=VERMILION, lw=1.2, ls="--", label=text)
    share = measured.group_covered / measured.group_rows
    pairs = zip(measured.group_covered, measured.group_rows, strict=True)
    low, high = np.array([wilson(int(hit), int(n)) for hit, n in pairs]).T
    axes.errorbar(
        measured.centres, 100 * share,
        yerr=100 * np.array([np.maximum(share - low, 0), np.maximum(high - share, 0)]),
        fmt="o", color=BLUE, ms=5, elinewidth=1, capsize=3, label="observed, 95 % interval",
    )  # fmt: skip
    axes.set_title(f"Interval coverage: {percent(measured.share)} over all", loc="left", fontsize=11)
    axes.set_xlabel(plain(f"prediction ({name}), median of the group"))
    axes.set_ylabel("truths within interval (%)")
    # Room for the legend below the lowest bar.
    floor = 100 * min(float(low.min()), measured.level or 1.0)
    axes.set_ylim(floor - 0.35 * (102 - floor), 102)
    axes.legend(fontsize=8.5, loc="lower left")
    return fig
