"""Pictures of classical learning: what components explain, and clusters with their ellipses.

Rows are (N, D), centres (K, D), covariances (K, D, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from quire.errors import InputError
from quire.report.reading import Array
from quire.report.style import BLUE, INK, PALETTE, VERMILION, figure, plain

MOST_POINTS = 1000
MOST_BARS = 40
DEVIATIONS = 2.0
"""Standard deviations that an ellipse reaches: 86 % of a Gaussian in the plane."""


def scree_figure(ratios: Array, name: str = "Explained variance") -> Figure:
    """The share of each component as a bar, and their sum as a line."""
    ratios = np.asarray(ratios, dtype=float)
    if ratios.ndim != 1 or not len(ratios):
        raise InputError(f"shares of shape {ratios.shape}", expected="one for each component, (K,)")
    total = 100 * ratios.cumsum()
    shown = min(len(ratios), MOST_BARS)
    at = np.arange(1, shown + 1)
    fig = figure(5.2, 3.0)
    axes = fig.subplots()
    axes.bar(at, 100 * ratios[:shown], color=BLUE, width=0.8, label="each")
    axes.plot(at, total[:shown], color=VERMILION, marker="o", ms=3, lw=1.4, label="so far")
    axes.set(xlabel="component", ylabel="share of the variance (%)", ylim=(0, 104))
    axes.set_xlim(0.4, shown + 0.6)
    axes.set_title(plain(name, 60), loc="left", fontsize=11)
    axes.set_title(f"{len(ratios)} explain {total[-1]:.1f} %", loc="right", fontsize=8.5)
    axes.legend(fontsize=8.5, loc="center right")
    return fig


class Plane(NamedTuple):
    """Two directions of a space, and where they meet."""

    centre: Array
    axes: Array
    """(D, 2), orthonormal."""
    names: tuple[str, str]

    def project(self, rows: Array) -> Array:
        return (rows - self.centre) @ self.axes


def principal_plane(rows: Array, names: Sequence[str] = ()) -> Plane:
    """The features themselves where there are at most two, otherwise the directions of largest variance."""
    size = rows.shape[1]
    if size <= 2:
        axes = np.eye(size, 2)
        labels = [plain(name, 24) for name in names] or [f"feature {i + 1}" for i in range(size)]
        first, second, *_ = [*labels, ""]
        return Plane(np.zeros(size), axes, (first, second))
    centre = rows.mean(0)
    _, values, directions = np.linalg.svd(rows - centre, full_matrices=False)
    directions = directions[:2].T
    largest = directions[np.abs(directions).argmax(0), [0, 1]]
    shares = values[:2] ** 2 / ((values**2).sum() or 1.0)
    first, second = (f"principal direction {i + 1} ({100 * shares[i]:.0f} %)" for i in range(2))
    return Plane(centre, directions * np.where(largest < 0, -1.0, 1.0), (first, second))


def clusters_figure(
    rows: Array,
    clusters: Array,
    centres: Array,
    covariances: Array | None = None,
    *,
    features: Sequence[str] = (),
    name: str = "Clusters",
) -> Figure:
    """Rows coloured by cluster in the plane in which they vary most, with centres, and ellipses where
    covariances are known."""
    rows, centres = np.asarray(rows, dtype=float), np.asarray(centres, dtype=float)
    clusters = np.asarray(clusters, dtype=int)
    if rows.ndim != 2 or clusters.shape != (len(rows),) or not len(rows):
        raise InputError(
            f"rows of shape {rows.shape} with clusters of shape {clusters.shape}",
            expected="(N, D) and (N,), N at least 1",
        )
    plane = principal_plane(rows, features)
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_POINTS)).round().astype(int))
    points, middle = plane.project(rows[chosen]), plane.project(centres)
    fig = figure(5.6, 4.2)
    axes = fig.subplots()
    for k in range(len(centres)):
        x, y = points[clusters[chosen] == k].T
        axes.scatter(x, y, s=11, color=PALETTE[k % len(PALETTE)], alpha=0.7, linewidths=0)
    if covariances is not None:
        for k, covariance in enumerate(np.asarray(covariances, dtype=float)):
            axes.add_patch(_ellipse(middle[k], plane.axes.T @ covariance @ plane.axes, k))
    axes.scatter(
        middle[:, 0], middle[:, 1], s=46, marker="X", color=INK, linewidths=0, label="centre", zorder=3
    )
    axes.set(xlabel=plane.names[0], ylabel=plane.names[1])
    axes.set_title(plain(name, 60), loc="left", fontsize=11)
    words = f"{len(centres)} clusters"
    if covariances is not None:
        words += f", ellipses at {DEVIATIONS:g} standard deviations"
    if len(chosen) < len(rows):
        words += f", {len(chosen):,} of {len(rows):,} rows"
    axes.set_title(words, loc="right", fontsize=8.5)
    return fig


def _ellipse(centre: Array, covariance: Array, k: int) -> Ellipse:
    variances, directions = np.linalg.eigh(covariance)
    width, height = 2 * DEVIATIONS * np.sqrt(np.maximum(variances[::-1], 0.0))
    x, y = directions[:, 1]
    return Ellipse(
        (float(centre[0]), float(centre[1])), width, height, angle=float(np.degrees(np.arctan2(y, x))),
        fill=False, lw=1.4, edgecolor=PALETTE[k % len(PALETTE)],
    )  # fmt: skip
