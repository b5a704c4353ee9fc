"""Pictures of a generative model: samples, what each latent dimension does, and which ones are in use.

Images are (C, H, W) with values from 0 to 255, grey or in colour.

N images, K rows of a picture, T steps, d latent dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from quire.errors import InputError
from quire.report.reading import Array
from quire.report.style import BLUE, GREY, VERMILION, figure, plain

WIDTH = 7.2
"""Inches across a page."""
LARGEST = 0.75
"""Inches of an image, at most."""
MOST_PIXELS = 96
"""Pixels of an image's longer side, at most."""
MOST_NAMED = 40
"""Bars that have their own number."""


def samples_grid_figure(
    images: Array, columns: int = 10, names: Sequence[str] = (), title: str = "Samples"
) -> Figure:
    """Images (N, C, H, W) side by side, row by row; `names` are those of the rows."""
    _check_images(images, 4)
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    missing = rows * columns - len(images)
    whole = np.concatenate([images, np.full((missing, *images.shape[1:]), np.nan)]) if missing else images
    fig, axes = _mosaic(whole.reshape(rows, columns, *images.shape[1:]), names)
    axes.set(xticks=[])
    axes.set_title(plain(title, 70), loc="left", fontsize=11)
    return fig


def traversal_figure(
    images: Array, values: Array, names: Sequence[str] = (), title: str = "Latent traversal"
) -> Figure:
    """Images (K, T, C, H, W): in each row one latent dimension takes the `values` (T,), all others stay."""
    _check_images(images, 5)
    if len(values) != images.shape[1]:
        raise InputError(
            f"{len(values)} values for {images.shape[1]} images in a row",
            expected="the value of the latent dimension in each column",
        )
    fig, axes = _mosaic(images, names or [f"z{row}" for row in range(len(images))])
    shown = range(0, len(values), max(1, math.ceil(len(values) / 11)))
    axes.set_xticks([i + 0.5 for i in shown], [f"{float(values[i]):.2g}" for i in shown])
    axes.set_xlabel("value of the latent dimension (standard deviations of the prior)", fontsize=8.5)
    axes.set_title(plain(title, 70), loc="left", fontsize=11)
    return fig


def kl_figure(kl: Array, threshold: float = 0.01) -> Figure:
    """KL(q ‖ p) of each latent dimension (d,) in nats; those below the threshold are marked as dead."""
    kl = np.asarray(kl, dtype=float)
    places, dead = np.arange(len(kl)), kl < threshold
    fig = figure(min(WIDTH, max(3.4, 0.22 * len(kl) + 1.2)), 2.7)
    axes = fig.subplots()
    used = int((~dead).sum())
    axes.bar(places[~dead], kl[~dead], color=BLUE, label=f"{used} in use")
    if dead.any():
        axes.plot(
            places[dead], np.zeros(len(kl) - used), "x", color=VERMILION, ms=6, mew=1.6, clip_on=False,
            label=f"{len(kl) - used} dead (< {threshold:g} nats)",
        )  # fmt: skip
    axes.axhline(0.0, color=GREY, lw=0.8)
    every = max(1, math.ceil(len(kl) / MOST_NAMED))
    axes.set_xticks(places[::every] if len(kl) <= MOST_NAMED else places[:: every * 5])
    axes.tick_params(axis="x", labelsize=7.5 if len(kl) > 12 else 9)
    axes.set(xlabel="latent dimension", ylabel="KL (nats)", xlim=(-0.7, len(kl) - 0.3))
    axes.set_title(f"What the codes carry: {kl.sum():.2f} nats", loc="left", fontsize=11)
    fig.legend(fontsize=8.5, loc="outside lower left", ncols=2)
    return fig


# Parts ----------------------------------------------------------------------------------------


def _mosaic(images: Array, names: Sequence[str]) -> tuple[Figure, Axes]:
    """All images (K, T, C, H, W) as one, with a gap between them; a unit of either axis is an image."""
    rows, columns, channels = images.shape[:3]
    height, width = _size(images.shape[3:])
    if names and len(names) != rows:
        raise InputError(f"{len(names)} names for {rows} rows of images", expected="one for each row")
    beside = 0.1 + 0.062 * max((len(plain(name, 18)) for name in names), default=0)
    cell = min(LARGEST, (WIDTH - beside) / columns)
    fig = figure(max(2.2, cell * columns + beside), cell * rows * height / width + 0.75)
    axes = fig.subplots()
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    gap = max(1, round(0.06 * max(height, width)))
    # Transparent where there is no image, so that any paper shows through.
    pixels = np.zeros((rows * (height + gap), columns * (width + gap), 4), dtype=np.uint8)
    for row in range(rows):
        for column in range(columns):
            image = images[row, column]
            if np.isnan(image.astype(float)).any():
                continue
            top, left = row * (height + gap) + gap // 2, column * (width + gap) + gap // 2
            place = pixels[top : top + height, left : left + width]
            colours = np.clip(np.rint(image), 0, 255).astype(np.uint8).transpose(1, 2, 0)
            if colours.shape[:2] != (height, width):
                picture = Image.fromarray(colours if channels == 3 else colours[:, :, 0])
                shrunk = np.asarray(picture.resize((width, height), Image.Resampling.BOX))
                colours = shrunk if channels == 3 else shrunk[:, :, None]
            place[..., :3] = colours
            place[..., 3] = 255
    axes.imshow(pixels, extent=(0, columns, rows, 0), interpolation="nearest", aspect=height / width)
    axes.tick_params(length=0)
    axes.set_yticks([i + 0.5 for i in range(len(names))], [plain(name, 18) for name in names])
    axes.tick_params(axis="y", labelsize=8)
    return fig, axes


def _size(size: Sequence[int]) -> tuple[int, int]:
    """Height and width in pixels as they are shown."""
    factor = min(1.0, MOST_PIXELS / max(size))
    height, width = (max(1, round(side * factor)) for side in size)
    return height, width


def _check_images(images: Array, dimensions: int) -> None:
    if images.ndim != dimensions or images.shape[-3] not in (1, 3) or not images.size:
        before = "(N, C, H, W)" if dimensions == 4 else "(K, T, C, H, W)"
        raise InputError(
            f"images of shape {images.shape}",
            expected=f"{before} with 1 or 3 channels, and at least one image",
            fix="give bytes or numbers from 0 to 255, channels before height and width",
        )
