"""Places for curves, which the script `curves.js` fills and keeps filled; and the numbers it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.board.markup import Markup, tag
from quire.board.metrics import thin
from quire.board.runs import Runs, splits_of
from quire.report.reading import TRAINER_VALUES
from quire.report.summary import wording

POINTS = 12_000
"""In one picture, shared by its lines."""
LEAST, MOST = 200, 800
"""Of one line; a screen has no more columns to show them in."""


def ordered(measures: Sequence[str]) -> list[str]:
    """Loss first, the trainer's own values last."""
    return sorted(measures, key=lambda name: (name in TRAINER_VALUES, name.rpartition(".")[2] != "loss"))


def charts(names: Sequence[str], measures: Sequence[str]) -> Markup:
    """One chart for each measure. A run that has recorded nothing yet gets its first ones when it has."""
    figures = [
        tag("figure", tag("figcaption", capital(wording(measure))), class_="chart", data_measure=measure)
        for measure in ordered(measures)
    ]
    words = "Without JavaScript there are no curves here; a run's report has them as pictures."
    empty = tag("p", "Nothing has been recorded yet.", class_="soft", hidden=bool(figures))
    boxes = [tag("input", type="hidden", name="run", value=name) for name in names]
    return tag(
        "div",
        boxes,
        tag("noscript", tag("p", words)),
        empty,
        tag("div", figures, class_="pictures"),
        id="charts",
    )


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def curves(runs: Runs, names: Sequence[str], measure: str, split: str | None = None) -> dict[str, Any]:
    """The lines of one measure: of one run a line for each split, of several a line for each run."""
    every = zip(names, runs.all_metrics(names), strict=True)
    found = {name: metrics.series.get(measure, {}) for name, metrics in every}
    splits = splits_of(list(found.values()))
    if len(names) > 1:
        chosen = split if split in splits else "validation" if "validation" in splits else (splits or [""])[0]
        lines = [(name, series[chosen]) for name, series in found.items() if chosen in series]
    else:
        chosen = ""
        lines = [(split, found[names[0]][split]) for split in splits]
    points = min(MOST, max(LEAST, POINTS // max(1, len(lines))))
    drawn = [{"name": name, **_plain(thin(series.curve(), points))} for name, series in lines]
    return {
        "measure": measure,
        "title": capital(wording(measure)),
        "split": chosen,
        "splits": splits,
        "lines": drawn,
    }


def _plain(curve: Any) -> dict[str, Any]:
    values = [float(f"{value:.6g}") if np.isfinite(value) else None for value in curve.values.tolist()]
    return {"x": curve.steps.tolist(), "y": values}
