"""Pictures of autoencoders: what they give back of their inputs, and where codes lie.

Images are (N, C, H, W) with values from 0 to 255 and C 1 or 3, rows are (N, D), codes are (N, K).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quire.errors import InputError
from quire.report.reading import Array
from quire.report.style import BLUE, GREEN, INK, PALETTE, VERMILION, figure, plain

WIDTH = 7.2
"""Inches across a page."""
ACROSS = 10
"""Images side by side."""
MOST_ROWS = 6
"""Rows that are drawn as lines, each in a panel of its own."""
MOST_NAMES = 16
"""Features up to which they are named below a panel."""
MOST_POINTS = 1000
"""Codes that are drawn; more would hide each other."""
GAP = 0.08
"""Between images, in shares of one."""
MARKS = ("o", "^", "s", "D", "v", "P")


# Reconstructions ------------------------------------------------------------------------------


def reconstruction_figure(
    originals: Array,
    reconstructions: Array,
    *,
    damaged: Array | None = None,
    features: Sequence[str] = (),
    name: str = "Originals and reconstructions",
) -> Figure:
    """Originals above what was made of them: images in a grid, rows as lines over their features.

    `damaged`, where given, is what the network saw, and stands between the two. `features` names the columns
    of rows.
    """
    parts = {"original": originals, "as it was seen": damaged, "reconstruction": reconstructions}
    shown = {words: np.asarray(part, dtype=float) for words, part in parts.items() if part is not None}
    shapes = {part.shape for part in shown.values()}
    if len(shapes) != 1 or originals.ndim not in (2, 4) or not len(originals):
        raise InputError(
            f"originals and reconstructions of shapes {', '.join(map(str, sorted(shapes)))}",
            expected="one shape, (N, C, H, W) for images or (N, D) for rows, with N at least 1",
            fix="give the same rows before and after",
        )
    return _image_grid(shown, name) if originals.ndim == 4 else _lines(shown, features, name)


def _image_grid(parts: Mapping[str, Array], name: str) -> Figure:
    """Blocks of lines of images: as many lines in a block as there are parts."""
    first = next(iter(parts.values()))
    count, channels, height, width = first.shape
    if channels not in (1, 3):
        raise InputError(
            f"images with {channels} channels", expected="1 channel (grey) or 3 (red, green, blue)"
        )
    columns = min(count, ACROSS)
    blocks = math.ceil(count / columns)
    cell = min(0.68, (WIDTH - 1.1) / columns)
    lines = blocks * len(parts)
    fig = figure(max(2.8, cell * columns + 1.1), cell * (1 + GAP) * lines * height / width + 0.5)
    axes = fig.subplots()
    _bare(axes)
    step_down, step_across = height * (1 + GAP), width * (1 + GAP)
    places, words = [], []
    for line in range(lines):
        block, which = divmod(line, len(parts))
        top = line * step_down + block * height * GAP
        label, images = list(parts.items())[which]
        for i, image in enumerate(images[block * columns : (block + 1) * columns]):
            left = i * step_across
            pixels = np.clip(np.rint(image), 0, 255).astype(np.uint8).transpose(1, 2, 0)
            axes.imshow(
                pixels[:, :, 0] if channels == 1 else pixels, cmap="gray", vmin=0, vmax=255,
                extent=(left, left + width, top + height, top), interpolation="nearest",
            )  # fmt: skip
        places.append(top + height / 2)
        words.append(label)
    bottom = lines * step_down + (blocks - 1) * height * GAP
    axes.set(xlim=(0, columns * step_across), ylim=(bottom, 0))
    axes.set_yticks(places, words, fontsize=8.5)
    axes.tick_params(length=0)
    _title(fig, name)
    return fig


def _lines(parts: Mapping[str, Array], features: Sequence[str], name: str) -> Figure:
    """A panel for each row: its original as a line, its reconstruction dashed over it."""
    rows, size = next(iter(parts.values())).shape
    columns = min(rows, 2)
    down = min(rows, MOST_ROWS) // columns  # full lines only, so that features are named once, at the bottom
    count = down * columns
    named = len(features) == size <= MOST_NAMES
    fig = figure(WIDTH * columns / 2, 1.6 * down + (1.2 if named else 0.7))
    grid = fig.subplots(down, columns, squeeze=False, sharex=True, sharey=True)
    looks = {"original": (BLUE, "-"), "as it was seen": (GREEN, ":"), "reconstruction": (VERMILION, "--")}
    at = np.arange(size)
    for i, axes in enumerate(grid.flat):
        for label, values in parts.items():
            color, dashes = looks[label]
            axes.plot(at, values[i], dashes, color=color, lw=1.4, label=label, marker="o", ms=2.5)
        axes.set_title(f"row {i + 1}", fontsize=8.5, pad=2, loc="left")
        if i % columns == 0:
            axes.set_ylabel("value", fontsize=8.5)
        if i + columns >= count:
            axes.set_xlabel("feature", fontsize=8.5)
            if named:
                axes.set_xticks(
                    at, [plain(word, 18) for word in features], rotation=60, ha="right", fontsize=7
                )
    handles, labels = grid.flat[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower left", ncols=len(parts), fontsize=8.5)
    _title(fig, name)
    return fig


def _title(fig: Figure, text: str) -> None:
    fig.suptitle(plain(text, 60), fontsize=11, x=0.01, ha="left")


def _bare(axes: Axes) -> None:
    axes.grid(False)
    axes.set_xticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


# The latent plane -----------------------------------------------------------------------------


class Plane(NamedTuple):
    """Points (N, 2) and the names of the two axes."""

    points: Array
    names: tuple[str, str]


def latent_plane(codes: Array) -> Plane:
    """The codes themselves where they have two numbers; otherwise as they lie along the two directions of
    their largest variance, each turned so that its largest weight is positive. A single number is laid out
    by its rank."""
    codes = np.asarray(codes, dtype=float)
    if codes.ndim != 2 or not codes.size:
        raise InputError(f"codes of shape {codes.shape}", expected="(N, K), both at least 1")
    if codes.shape[1] == 1:
        rank = codes[:, 0].argsort(kind="stable").argsort(kind="stable")
        return Plane(np.stack([codes[:, 0], rank / len(codes)], 1), ("code 1", "share of rows below"))
    if codes.shape[1] == 2:
        return Plane(codes, ("code 1", "code 2"))
    centred = codes - codes.mean(0)
    variances, directions = np.linalg.eigh(centred.T @ centred / len(codes))  # rising
    directions = directions[:, [-1, -2]]
    largest = directions[np.abs(directions).argmax(0), [0, 1]]
    shares = variances[[-1, -2]] / (variances.sum() or 1.0)
    first, second = (f"principal direction {i + 1} of codes ({100 * shares[i]:.0f} %)" for i in range(2))
    return Plane(centred @ (directions * np.where(largest < 0, -1.0, 1.0)), (first, second))


def latent_figure(
    codes: Array,
    labels: Array | None = None,
    classes: Sequence[str] = (),
    name: str = "The latent plane",
) -> Figure:
    """Where codes lie in their plane, coloured by class: `labels` (N,) numbers the `classes`, and is negative
    where a class is not known. Of many codes an even selection is drawn."""
    points, names = latent_plane(codes)
    known = np.full(len(points), -1) if labels is None else np.asarray(labels, dtype=int)
    if known.shape != (len(points),) or known.max() >= len(classes):
        raise InputError(
            f"labels of shape {known.shape} up to {known.max(initial=-1)}",
            expected=f"{len(points)} numbers below {len(classes)}, the number of classes",
        )
    chosen = np.unique(np.linspace(0, len(points) - 1, min(len(points), MOST_POINTS)).round().astype(int))
    points, known = points[chosen], known[chosen]
    fig = figure(5.6, 4.2)
    axes = fig.subplots()
    for k in range(-1, len(classes)):
        x, y = points[np.maximum(known, -1) == k].T
        if not len(x):
            continue
        color = INK if k < 0 else PALETTE[k % len(PALETTE)]
        mark = MARKS[max(k, 0) // len(PALETTE) % len(MARKS)]
        words = "not known" if k < 0 else plain(classes[k], 20)
        axes.scatter(x, y, s=11, color=color, marker=mark, alpha=0.75, linewidths=0, label=words)
    axes.set_xlabel(names[0], fontsize=9)
    axes.set_ylabel(names[1], fontsize=9)
    axes.set_title(plain(name, 60), loc="left", fontsize=11)
    if len(chosen) < len(codes):
        axes.set_title(f"{len(chosen):,} of {len(codes):,} rows", loc="right", fontsize=8.5)
    if (known >= 0).any():
        fig.legend(loc="outside right upper", fontsize=8.5, title="class", title_fontsize=8.5)
    return fig
