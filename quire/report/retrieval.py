"""A picture of retrieval: rows, and what was found to be most like them.

Images are (C, H, W) with values from 0 to 255, grey or in colour.

Q queries, k neighbours of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from quire.errors import InputError
from quire.report.reading import Array
from quire.report.style import GREEN, VERMILION, figure, plain

WIDTH = 7.2
"""Inches across a page."""
LARGEST = 0.95
"""Inches of an image, at most."""
MOST_PIXELS = 96
"""Of an image's longer side, as it is embedded."""


def retrieval_figure(
    queries: Array,
    neighbours: Array,
    truth: Sequence[str],
    found: Sequence[Sequence[str]],
    likeness: Array,
    title: str = "Nearest neighbours",
) -> Figure:
    """Each query (Q, C, H, W), then its neighbours (Q, k, C, H, W), the nearest first, with their classes
    `found` and likeness (Q, k): framed green where they are of the query's class `truth`, else red."""
    count, k = neighbours.shape[:2]
    shapes = neighbours.ndim == 5 and queries.shape == (count, *neighbours.shape[2:])
    shapes = shapes and queries.shape[1] in (1, 3)
    if not shapes or len(truth) != count or likeness.shape != (count, k) or {*map(len, found)} != {k}:
        raise InputError(
            f"queries {queries.shape}, neighbours {neighbours.shape}, likeness {likeness.shape}",
            expected="(Q, C, H, W), (Q, k, C, H, W) and (Q, k), C being 1 or 3, with a class for each",
        )
    cell = min(LARGEST, WIDTH / (k + 1))
    ratio = queries.shape[2] / queries.shape[3]
    fig = figure(cell * (k + 1), (cell * ratio + 0.2) * count + 0.5)
    grid = fig.subplots(count, k + 1, squeeze=False)
    for i in range(count):
        _show(grid[i, 0], queries[i], plain(truth[i], 12))
        for j in range(k):
            words = f"{plain(found[i][j], 8)}  {likeness[i, j]:.2f}"
            axes = grid[i, j + 1]
            _show(axes, neighbours[i, j], words)
            right = found[i][j] == truth[i]
            for spine in axes.spines.values():
                spine.set(visible=True, edgecolor=GREEN if right else VERMILION, linewidth=1.6)
                spine.set_linestyle("-" if right else "--")
    fig.suptitle(plain(title, 60), fontsize=11, x=0.01, ha="left")
    return fig


def _show(axes: Axes, image: Array, words: str) -> None:
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
    pixels = np.clip(np.rint(image), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    picture = Image.fromarray(pixels[:, :, 0] if len(image) == 1 else pixels)
    picture.thumbnail((MOST_PIXELS, MOST_PIXELS), Image.Resampling.BOX)
    axes.imshow(np.asarray(picture), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_title(words, fontsize=7.5, pad=2)
