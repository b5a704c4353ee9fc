"""Pictures of networks that see: filters, maps and evidence, mistakes, boxes.

Images are (N, C, H, W) with values from 0 to 255 and C 1 or 3; boxes are corners in shares of the image.
Pixels are embedded: no more of them than are seen, in 64 shades, which a PNG packs twice as tightly as 256.

N images, C channels, K filters or maps, B boxes of an image
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from PIL import Image

from quire.errors import InputError
from quire.report.reading import Array
from quire.report.style import BLUE, INK, PALETTE, VERMILION, figure, plain

MOST_FILTERS = 64
MOST_MISTAKES = 24
MOST_CURVES = 12
WIDTH = 7.2
"""Inches across a page."""
DENSITY = 100
"""Pixels of an image on an inch, at most."""
DASHES = (0, (3, 2))

SIGNED = LinearSegmentedColormap.from_list("signed", [BLUE, "#dcdfe3", VERMILION])
"""Negative, zero, positive; its middle is seen on light and on dark paper."""
STRENGTH = LinearSegmentedColormap.from_list("strength", ["#20252b", BLUE, "#cfe6f5"])
EVIDENCE = LinearSegmentedColormap.from_list(
    "evidence", [(0.84, 0.37, 0.0, 0.0), (0.84, 0.37, 0.0, 0.45), (1.0, 0.85, 0.2, 0.8)]
)
"""Transparent where there is none."""


@dataclass(frozen=True)
class Boxes:
    """The boxes of one image: corners (B, 4), class numbers (B,), and scores (B,) where they were found."""

    corners: Array
    labels: Array
    scores: Array | None = None


# Filters and maps -----------------------------------------------------------------------------


def filter_figure(weights: Array, name: str = "the first layer") -> Figure:
    """The first filters (K, C, h, w) on one scale, zero in the middle: in colour where C is 3, otherwise
    signed, averaged over their channels."""
    count = min(len(weights), MOST_FILTERS)
    colour = weights.shape[1] == 3
    filters = np.asarray(weights[:count], dtype=float)
    filters = filters.transpose(0, 2, 3, 1) if colour else filters.mean(axis=1)
    scale = float(np.quantile(np.abs(filters), 0.995)) or 1.0  # a few outliers would hide the rest
    columns = min(count, 16 if count > 32 else 8)
    rows = math.ceil(count / columns)
    cell = min(0.62, WIDTH / columns - 0.05)
    fig = figure(max(2.6, cell * columns + (0.2 if colour else 0.9)), cell * rows + 0.75)
    axes = fig.subplots()
    _bare(axes)
    for i, one in enumerate(filters):
        row, column = divmod(i, columns)
        place = (column + 0.04, column + 0.96, row + 0.96, row + 0.04)
        pixels = np.clip(0.5 + one / (2 * scale), 0, 1) if colour else one
        shown = axes.imshow(pixels, SIGNED, vmin=-scale, vmax=scale, extent=place, interpolation="nearest")
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    axes.set_title(plain(f"Filters of {name}", 60), loc="left", fontsize=11)
    which = f"{count:,} of {len(weights):,}" if count < len(weights) else f"{count:,}"
    averaged = "" if weights.shape[1] in (1, 3) else f", mean over {weights.shape[1]:,} channels"
    words = f"{which} filter{'s' * (count > 1)} of {weights.shape[2]}×{weights.shape[3]}{averaged}"
    axes.set_xlabel(words, fontsize=8.5, loc="left")
    if not colour:
        bar = fig.colorbar(shown, ax=axes, shrink=0.9, aspect=18, label="weight")
        bar.outline.set_visible(False)
    return fig


def maps_figure(
    images: Array,
    activations: Mapping[str, Array],
    evidence: Array | None = None,
    captions: Sequence[str] = (),
    channels: int = 2,
) -> Figure:
    """A row for each image: the image, what the liveliest channels of each layer (N, K, h, w) answer, and the
    evidence (N, h, w) for a class, laid over the image; `captions` say which class, and how sure."""
    picked = {name: _liveliest(maps, channels) for name, maps in activations.items()}
    columns = 1 + sum(len(chosen) for chosen in picked.values()) + (evidence is not None)
    cell = min(1.15, WIDTH / columns)
    ratio = images.shape[2] / images.shape[3]
    said = [textwrap.wrap(plain(words, 60), round(cell * 15)) for words in captions]
    lines = max((len(parts) for parts in said), default=0)
    fig = figure(cell * columns, ((cell - 0.08) * ratio + 0.1 + 0.13 * lines) * len(images) + 0.6)
    _pack(fig)
    grid = fig.subplots(len(images), columns, squeeze=False)
    for i, image in enumerate(images):
        line = iter(grid[i])
        axes = next(line)
        _show(axes, image, cell)
        _head(axes, "image", i)
        for name, chosen in picked.items():
            for channel in chosen:
                axes = next(line)
                _bare(axes)
                maps = np.asarray(activations[name][:, channel], dtype=float)
                axes.imshow(maps[i], cmap=STRENGTH, vmin=maps.min(), vmax=max(maps.max(), maps.min() + 1e-12),
                            interpolation="nearest", aspect="auto")  # fmt: skip
                axes.set_box_aspect(ratio)
                _head(axes, f"{plain(name, 14)}\nchannel {channel}", i)
        if evidence is not None:
            axes = next(line)
            _show(axes, image, cell)
            _lay_over(axes, evidence[i])
            _head(axes, "evidence", i)
            if i < len(said):
                axes.set_xlabel("\n".join(said[i]), fontsize=7.5, labelpad=2)
    _title(fig, "What the layers answer" + (", and the evidence for a class" if evidence is not None else ""))
    return fig


def _liveliest(maps: Array, count: int) -> list[int]:
    """The channels that differ most from place to place, in their own order."""
    spread = np.asarray(maps, dtype=float).std(axis=(2, 3)).mean(axis=0)
    return sorted(int(k) for k in np.argsort(-spread, kind="stable")[:count])


def _lay_over(axes: Axes, evidence: Array) -> None:
    """A coarse map (h, w) over the whole image, smoothly."""
    left, right, bottom, top = axes.images[0].get_extent()
    strongest = float(np.max(evidence)) or 1.0
    grey = Image.fromarray((np.clip(evidence, 0, None) / strongest).astype(np.float32))
    width, height = (max(size, 64) for size in grey.size)
    smooth = np.asarray(grey.resize((width, height), Image.Resampling.BILINEAR))
    axes.imshow(smooth, extent=(left, right, bottom, top), cmap=EVIDENCE, vmin=0, vmax=1)
    axes.set(xlim=(left, right), ylim=(bottom, top))


# Samples and mistakes -------------------------------------------------------------------------


def samples_figure(
    before: Array, after: Array, labels: Sequence[str], after_labels: Sequence[str] | None = None
) -> Figure:
    """Training images as they are, and under them as the network sees them once they are augmented."""
    columns = len(before)
    cell = min(1.2, (WIDTH - 0.25) / max(columns, 1))
    fig = figure(cell * columns + 0.25, 2 * ((cell - 0.08) * before.shape[2] / before.shape[3] + 0.24) + 0.34)
    _pack(fig)
    grid = fig.subplots(2, columns, squeeze=False)
    for row, images, words in ((0, before, labels), (1, after, after_labels or labels)):
        for i, image in enumerate(images):
            axes = grid[row, i]
            _show(axes, image, cell)
            axes.set_title(plain(words[i], round(cell * 14)), fontsize=7.5, pad=2)
            if i == 0:
                axes.set_ylabel(("as it is", "as trained on")[row], fontsize=8.5)
    _title(fig, "Training images before and after augmentation")
    return fig


def mistakes_figure(
    images: Array, truth: Sequence[str], prediction: Sequence[str], probability: Array
) -> Figure | None:
    """The mistakes that the network was surest of, first the worst; None where it made none.

    `probability` (N,) is that of the predicted class.
    """
    wrong = [i for i, (right, said) in enumerate(zip(truth, prediction, strict=True)) if right != said]
    if not wrong:
        return None
    chosen = sorted(wrong, key=lambda i: -float(probability[i]))[:MOST_MISTAKES]
    columns = min(8, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    cell = WIDTH / max(columns, 6)
    height = (cell - 0.08) * images.shape[2] / images.shape[3] + 0.4
    fig = figure(cell * columns, rows * height + 0.3)
    _pack(fig)
    grid = list(fig.subplots(rows, columns, squeeze=False).flat)
    limit = round(cell * 14) - 5
    for axes, i in zip(grid, chosen, strict=False):
        _show(axes, images[i], cell)
        said = f"{plain(prediction[i], limit)} ({100 * float(probability[i]):.0f} %)"
        axes.set_title(said, fontsize=7.5, pad=2, color=VERMILION)
        axes.set_xlabel(f"is {plain(truth[i], limit + 2)}", fontsize=7.5, labelpad=2)
    for axes in grid[len(chosen) :]:
        axes.set_visible(False)
    _title(fig, f"Surest mistakes ({len(chosen)} of {len(wrong):,})")
    return fig


# Boxes ----------------------------------------------------------------------------------------


def boxes_figure(
    images: Array,
    truth: Sequence[Boxes],
    found: Sequence[Boxes],
    classes: Sequence[str],
    name: str = "True and found boxes",
) -> Figure:
    """Images with their true boxes dashed and those that were found solid, with their score in per cent; a
    colour for each class, and its name beside the score where there are few boxes or many classes."""
    columns = min(3, len(images))
    rows = math.ceil(len(images) / columns)
    cell = WIDTH / max(columns, 2)
    height, width = images.shape[2:]
    fig = figure(cell * columns, rows * ((cell - 0.08) * height / width + 0.12) + 0.62)
    _pack(fig)
    grid = list(fig.subplots(rows, columns, squeeze=False).flat)
    used = sorted({int(label) for boxes in (*truth, *found) for label in boxes.labels})
    named = len(used) > len(PALETTE) or max((len(boxes.labels) for boxes in found), default=0) <= 6
    for axes, image, true, seen in zip(grid, images, truth, found, strict=False):
        _show(axes, image, cell)
        _draw(axes, true, DASHES, (width, height))
        _draw(axes, seen, "-", (width, height))
        if seen.scores is not None:
            _write_scores(axes, seen, classes if named else (), (width, height))
    for axes in grid[len(images) :]:
        axes.set_visible(False)
    lines = [Line2D([], [], color=_colour(k), lw=2, label=plain(classes[k], 20)) for k in used]
    lines.append(Line2D([], [], color=INK, lw=1.2, ls=DASHES, label="true"))
    if any(len(boxes.labels) for boxes in found):
        lines.append(Line2D([], [], color=INK, lw=1.2, label="found, with score in %"))
    fig.legend(handles=lines, loc="outside lower left", ncols=min(len(lines), 6), fontsize=8.5)
    _title(fig, plain(name, 60))
    return fig


def _corners(boxes: Boxes, size: tuple[int, int]) -> Array:
    return np.asarray(boxes.corners, dtype=float).reshape(-1, 4) * np.array(size * 2)


def _draw(axes: Axes, boxes: Boxes, dashes: Any, size: tuple[int, int]) -> None:
    """All boxes of a class as one outline, with a pale one under it that shows on dark images."""
    corners = _corners(boxes, size)
    labels = np.asarray(boxes.labels, dtype=int)
    for label in sorted(set(labels.tolist())):
        x1, y1, x2, y2 = corners[labels == label].T
        around = np.stack([x1, y1, x2, y1, x2, y2, x1, y2, x1, y1], axis=1).reshape(-1, 2)
        steps = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * len(x1)
        for width, color, alpha in ((2.4, "white", 0.6), (1.2, _colour(label), 1.0)):
            axes.add_patch(PathPatch(Path(around, steps), fill=False, edgecolor=color, linewidth=width,
                                     linestyle=dashes, alpha=alpha))  # fmt: skip


def _write_scores(axes: Axes, boxes: Boxes, classes: Sequence[str], size: tuple[int, int]) -> None:
    assert boxes.scores is not None
    for (x, y, *_), label, score in zip(_corners(boxes, size), boxes.labels, boxes.scores, strict=True):
        words = f"{plain(classes[int(label)], 12)} {100 * score:.0f}" if classes else f"{100 * score:.0f}"
        back = {"facecolor": _colour(int(label)), "edgecolor": "none", "pad": 0.8}
        axes.text(x, y, words, fontsize=6, color="white", va="bottom", bbox=back)


def precision_recall_figure(
    curves: Mapping[str, tuple[Array, Array, float]], name: str = "Precision and recall"
) -> Figure:
    """A line for each class from its recall, precision and average precision, best first; of many classes
    the best and the worst."""
    fig = figure(4.9, 3.4)
    axes = fig.subplots()
    ordered = sorted(curves.items(), key=lambda item: -item[1][2])
    others = ordered[3:-3] if len(ordered) > MOST_CURVES else []
    for recall, precision, _ in (curve for _, curve in others):
        axes.step(recall, precision, where="pre", color=INK, lw=0.7, alpha=0.4)
    shown = [*ordered[:3], *ordered[-3:]] if others else ordered
    for i, (label, (recall, precision, area)) in enumerate(shown):
        dashes = ("-", "--")[i // len(PALETTE)]
        words = f"{plain(label, 24)}: AP {area:.3f}"
        axes.step(recall, precision, dashes, where="pre", color=_colour(i), lw=1.6, label=words)
    if others:
        axes.plot([], [], color=INK, lw=0.7, label=f"{len(others):,} others")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.04), xlabel="recall", ylabel="precision")
    axes.set_title(plain(name, 60), loc="left", fontsize=11)
    axes.legend(fontsize=8.5, loc="lower left")
    return fig


# Parts ----------------------------------------------------------------------------------------


def _colour(label: int) -> str:
    return PALETTE[label % len(PALETTE)]


def _title(fig: Figure, text: str) -> None:
    fig.suptitle(text, fontsize=11, x=0.01, ha="left")


def _pack(fig: Figure) -> None:
    """Little room between images."""
    engine = fig.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.03, h_pad=0.03, wspace=0.01, hspace=0.0)  # type: ignore[call-arg]


def _bare(axes: Axes) -> None:
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _head(axes: Axes, text: str, row: int) -> None:
    if row == 0:
        axes.set_title(text, fontsize=8, pad=3)


def _show(axes: Axes, image: Array, inches: float) -> None:
    """One image (C, H, W), as wide as said, whose pixels are the units of both axes."""
    _bare(axes)
    pixels = _pixels(image, round(DENSITY * inches))
    extent = (0.0, float(image.shape[2]), float(image.shape[1]), 0.0)
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, extent=extent, interpolation="nearest")


def _pixels(image: Array, most: int) -> Array:
    """Bytes (h, w) or (h, w, 3), at most so many a side."""
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise InputError(
            f"an image of shape {image.shape}",
            expected="(1, H, W) in grey or (3, H, W) in colour",
            fix="give one image with its channels first",
        )
    pixels = np.clip(np.rint(image), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    picture = Image.fromarray(pixels[:, :, 0] if image.shape[0] == 1 else pixels)
    picture.thumbnail((most, most), Image.Resampling.BOX)
    return np.rint(np.rint(np.asarray(picture) * (63 / 255)) * (255 / 63)).astype(np.uint8)
