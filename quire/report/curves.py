"""Loss and measures over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quire.report.reading import TRAINER_VALUES, Array, Curve
from quire.report.style import BLUE, INK, VERMILION, figure, plain
from quire.report.summary import number, wording

_LOOKS = {"train": (BLUE, "--"), "validation": (VERMILION, "-")}
_POINTS = 800
_UP_TO_ONE = ("r2", "accuracy", "precision", "recall", "f1", "coverage", "agreement", "map", "map50", "map75")
"""Measures that are read by their distance from 1, which a logarithm would hide."""


def thin(curve: Curve, points: int = _POINTS) -> Curve:
    """Neighbouring points averaged, where there are more than a picture can show."""
    if len(curve.steps) <= points:
        return curve
    parts = np.array_split(np.arange(len(curve.steps)), points)
    with np.errstate(invalid="ignore"):
        values = [curve.values[part].mean() for part in parts]
    return Curve(np.array([curve.steps[part].mean() for part in parts]), np.array(values))


def wide_range(values: Array) -> bool:
    """Whether positive values span more than two decades, so that only a logarithm shows them all."""
    known = values[np.isfinite(values)]
    return len(known) > 1 and known.min() > 0 and np.log10(known.max()) - np.log10(known.min()) > 2


def curve_figure(measure: str, splits: Mapping[str, Curve], best_step: int | None) -> Figure | None:
    """One measure, a line per split, the best step marked; None where no value is finite."""
    splits = {split: curve for split, curve in splits.items() if np.isfinite(curve.values).any()}
    if not splits:
        return None
    fig = figure()
    axes = fig.subplots()
    for split in sorted(splits, key=lambda name: name != "train"):
        curve = thin(splits[split])
        color, dashes = _LOOKS.get(split, (None, ":"))
        marker = "o" if np.isfinite(curve.values).sum() <= 30 else ""
        axes.plot(curve.steps, curve.values, dashes, color=color, lw=1.6, marker=marker, ms=3, label=split)
    if best_step is not None and measure not in TRAINER_VALUES:
        text = f"best step {best_step:,}"
        axes.axvline(best_step, color=INK, lw=1, ls=":", zorder=1)
        at_best = splits.get("validation", Curve(np.array([]), np.array([])))
        found = at_best.values[at_best.steps == best_step]
        if len(found) and np.isfinite(found[0]):
            text += f" ({number(float(found[0]))})"
            axes.plot([best_step], found[:1], ls="", marker="*", ms=11, color=VERMILION, label=text)
        else:
            axes.plot([], [], color=INK, lw=1, ls=":", label=text)
    up_to_one = measure.rpartition(".")[2] in _UP_TO_ONE
    if not up_to_one and wide_range(np.concatenate([curve.values for curve in splits.values()])):
        axes.set_yscale("log")
    elif measure in TRAINER_VALUES:
        axes.set_ylim(bottom=0)
    name = wording(measure)
    axes.set_title(plain(name if "." in measure else name[:1].upper() + name[1:]), loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.set_ylabel(plain(name.rpartition(": ")[2]) + (" (log scale)" if axes.get_yscale() == "log" else ""))
    axes.legend(fontsize=8.5)
    return fig


def gaps(splits: Mapping[str, Curve]) -> str:
    """A sentence about values that are not finite, or nothing."""
    found = [
        f"{np.isnan(curve.values).sum():,} of {len(curve.values):,} {split} values "
        f"(first at step {int(curve.steps[np.isnan(curve.values)][0]):,})"
        for split, curve in splits.items()
        if np.isnan(curve.values).any()
    ]
    return f"Not finite and left out: {'; '.join(found)}." if found else ""
