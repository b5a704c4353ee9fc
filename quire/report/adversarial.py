"""Pictures of adversarial training: how the two players stand, and what the discriminator takes for data.

Images of samples are drawn by `quire.report.latent.samples_grid_figure`.

S records, N points, H×W places of a plane.
"""

from __future__ import annotations

import math

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from quire.errors import InputError
from quire.report.reading import Array
from quire.report.style import BLUE, GREEN, INK, VERMILION, figure, plain

MOST_POINTS = 1500
"""Points of a kind that are drawn; more would hide each other."""
LOG_2 = math.log(2)
TELLS = LinearSegmentedColormap.from_list("tells", [VERMILION, "#dcdfe3", BLUE])
"""A sample, undecided, data; its middle is seen on light and on dark paper."""


def players_figure(
    steps: Array,
    discriminator: Array,
    generator: Array,
    real_accuracy: Array | None = None,
    fake_accuracy: Array | None = None,
    *,
    minimax: bool = False,
    name: str = "Losses of the two players",
) -> Figure:
    """Both losses (S,) over the steps (S,), with what they are where neither can do better: 2 log 2, and log
    2 or, for the min-max loss, −log 2. With accuracies also those of the discriminator, ½ there."""
    given = [discriminator, generator, *(a for a in (real_accuracy, fake_accuracy) if a is not None)]
    if any(np.shape(values) != np.shape(steps) or np.ndim(values) != 1 for values in given):
        raise InputError(
            f"{np.shape(steps)} steps and values of shapes {', '.join(str(np.shape(v)) for v in given)}",
            expected="one value of each kind for each step",
            fix="take all of them from the records of one split",
        )
    judged = real_accuracy is not None and fake_accuracy is not None
    fig = figure(7.2 if judged else 4.6, 3.1)
    losses, *others = fig.subplots(1, 2 if judged else 1, squeeze=False).flat
    marker = "o" if len(steps) <= 30 else ""
    settled, sign = (-LOG_2, "−") if minimax else (LOG_2, "")
    for values, level, level_words, words, colour in (
        (discriminator, 2 * LOG_2, "2 log 2", "discriminator", BLUE),
        (generator, settled, f"{sign}log 2", "generator", VERMILION),
    ):
        losses.plot(steps, values, color=colour, lw=1.6, marker=marker, ms=3, label=words)
        losses.axhline(level, color=colour, lw=1, ls="--", zorder=1)
        losses.annotate(
            level_words, (1, level), xycoords=("axes fraction", "data"), xytext=(-2, 2),
            textcoords="offset points", ha="right", va="bottom", fontsize=8, color=colour,
        )  # fmt: skip
    losses.plot([], [], color=INK, lw=1, ls="--", label="at the equilibrium")
    losses.set(xlabel="step", ylabel="loss of a row (nats)")
    losses.set_title(plain(name, 60), loc="left", fontsize=11)
    losses.legend(fontsize=8.5)
    for axes in others:
        for rates, words, colour, dashes in (
            (real_accuracy, "on data", GREEN, "-"),
            (fake_accuracy, "on samples", VERMILION, "-."),
        ):
            assert rates is not None
            axes.plot(steps, rates, dashes, color=colour, lw=1.6, marker=marker, ms=3, label=words)
        axes.axhline(0.5, color=INK, lw=1, ls="--", label="at the equilibrium")
        axes.set(xlabel="step", ylabel="share recognised", ylim=(-0.03, 1.03))
        axes.set_title("Accuracy of the discriminator", loc="left", fontsize=11)
        axes.legend(fontsize=8.5)
    return fig


def surface_figure(
    horizontal: Array,
    vertical: Array,
    probability: Array,
    real: Array,
    fake: Array,
    *,
    columns: tuple[str, str] = ("first feature", "second feature"),
    name: str = "What the discriminator takes for data",
) -> Figure:
    """D (H, W) over a plane whose places are `vertical` (H,) and `horizontal` (W,), with points of the data
    (N, 2) and of the generator (N, 2), and the line D = ½."""
    if probability.shape != (len(vertical), len(horizontal)):
        raise InputError(
            f"a surface of shape {probability.shape} over {len(vertical)} × {len(horizontal)} places",
            expected="a row for each vertical place and a column for each horizontal one",
        )
    for points in (real, fake):
        if points.ndim != 2 or points.shape[1] != 2:
            raise InputError(
                f"points of shape {points.shape}", expected="(N, 2)", fix="choose two columns of the rows"
            )
    fig = figure(5.4, 4.1)
    axes = fig.subplots()
    axes.grid(False)
    # A picture of pixels: a mesh would be one path for each place.
    half_x, half_y = ((places[-1] - places[0]) / (len(places) - 1) / 2 for places in (horizontal, vertical))
    extent = (
        float(horizontal[0] - half_x), float(horizontal[-1] + half_x),
        float(vertical[0] - half_y), float(vertical[-1] + half_y),
    )  # fmt: skip
    surface = axes.imshow(
        probability, TELLS, vmin=0, vmax=1, origin="lower", extent=extent, aspect="auto",
        interpolation="bilinear", alpha=0.45,
    )  # fmt: skip
    if probability.min() < 0.5 < probability.max():
        axes.contour(horizontal, vertical, probability, levels=[0.5], colors=[INK], linewidths=1.2)
        axes.plot([], [], color=INK, lw=1.2, label="D = ½")
    for points, words, colour, mark in ((real, "data", BLUE, "o"), (fake, "samples", VERMILION, "^")):
        axes.plot(*points[:MOST_POINTS].T, ls="", marker=mark, ms=3, mec="white", mew=0.3, color=colour,
                  label=words)  # fmt: skip
    axes.set(xlim=extent[:2], ylim=extent[2:], xlabel=plain(columns[0], 40), ylabel=plain(columns[1], 40))
    axes.set_title(plain(name, 60), loc="left", fontsize=11)
    bar = fig.colorbar(surface, ax=axes, label="probability D of being data")
    bar.outline.set_visible(False)
    fig.legend(fontsize=8.5, loc="outside lower left", ncols=3)
    return fig
