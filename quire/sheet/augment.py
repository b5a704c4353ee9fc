"""Chapter 9, augmentation of images with what belongs to them: boxes, colours, shares of two classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.functional import augment
from quire.sheet.registry import entry, gap, require, worst
from quire.sheet.regularise import standard_errors

Code = Callable[..., Any]


def _followed(box: list[float], window: list[float]) -> list[float]:
    """One box in one window, side by side; zeros where it is lost."""
    cut = []
    for axis in (0, 1):
        low, high, start, end = box[axis], box[axis + 2], window[axis], window[axis + 2]
        if not start <= (low + high) / 2 <= end or min(high, end) <= max(low, start):
            return [0.0] * 4
        cut.append(((max(low, start) - start) / (end - start), (min(high, end) - start) / (end - start)))
    return [cut[0][0], cut[1][0], cut[0][1], cut[1][1]]


def _seen(image: Tensor, window: list[float], i: int, j: int, fill: float) -> float:
    """The image (H, W) at the centre of pixel (i, j) of a window, by four neighbours."""
    places = []
    for place, extent, start, end in (
        (i, image.shape[0], window[1], window[3]),
        (j, image.shape[1], window[0], window[2]),
    ):
        share = start + (place + 0.5) / extent * (end - start)
        if not 0 <= share < 1:
            return fill
        at = min(max(share * extent - 0.5, 0.0), extent - 1.0)
        low = math.floor(at)
        places.append(((low, 1 - (at - low)), (min(low + 1, extent - 1), at - low)))
    return sum(image[row, column].item() * a * b for row, a in places[0] for column, b in places[1])


@entry(
    "regularise/augmentation-boxes",
    "Random windows of images, with their boxes",
    r"x'(p) = x(c + s \odot p), \qquad b' = \mathrm{clip}\Big(\frac{b - c}{s}, 0, 1\Big), \qquad "
    r"\log s \sim U(\log s_{\min}, \log s_{\max}), \; c \sim U(0, 1 - s)",
    code=(augment.draw_windows, augment.take_windows, augment.boxes_in_windows),
    wrong=(
        augment.draw_windows,
        augment.take_windows,
        lambda boxes, present, windows: (boxes - windows[:, None, [0, 1, 0, 1]], present),
    ),
    tolerance=4.0,
)
def _(draw: Code, take: Code, follow: Code) -> float:
    x = torch.rand(6, 1, 5, 7, dtype=torch.float64) * 255
    windows = draw(x, smallest=0.4, largest=2.0, aspect=1.5).double()
    corner = torch.rand(6, 4, 2, dtype=torch.float64) * 0.7
    boxes = torch.cat([corner, corner + 0.3], -1)
    moved, left = follow(boxes, torch.ones(6, 4, dtype=torch.bool), windows)
    shown = take(x, windows, 9.0)
    wanted = torch.tensor(
        [[_followed(box, w) for box in row] for row, w in zip(boxes.tolist(), windows.tolist(), strict=True)]
    )
    pixels = [
        [[_seen(image[0], w, i, j, 9.0) for j in range(7)] for i in range(5)]
        for image, w in zip(x, windows.tolist(), strict=True)
    ]
    many = draw(torch.zeros(4000, 1, 1, 1), smallest=0.5, largest=3.0).double()
    sides = many[:, 2:] - many[:, :2]
    place = (sides[:, 0].log() - math.log(0.5)) / math.log(6.0)
    return worst(
        require(gap(shown[:, 0], torch.tensor(pixels, dtype=torch.float64)) < 1e-9),
        require(gap(moved, wanted.double()) < 1e-6),
        require(torch.equal(left, (wanted != 0).any(-1)) and left.any() and not left.all()),
        standard_errors(place, 0.5),
        standard_errors((place - 0.5).square(), 1 / 12),
        standard_errors(many[:, :2] / (1 - sides), 0.5),
    )


@entry(
    "regularise/augmentation-colour",
    "Brightness, contrast and saturation",
    r"y = b \, \big(c \, (s x + (1 - s) g) + (1 - c) \bar g\big), \qquad g = 0.299 R + 0.587 G + 0.114 B",
    code=(augment.adjust_colour, augment.colour_jitter),
    wrong=(
        lambda x, *factors: augment.adjust_colour(x.flip(1), *factors).flip(1),  # takes blue for red
        augment.colour_jitter,
    ),
    tolerance=4.0,
)
def _(adjust: Callable[..., Tensor], jitter: Callable[..., Tensor]) -> float:
    x = torch.rand(5, 3, 4, 3, dtype=torch.float64) * 255
    factors = 0.5 + torch.rand(3, 5, dtype=torch.float64)
    loop = torch.empty_like(x)
    for n, (b, c, s) in enumerate(factors.T.tolist()):
        bright = x[n] * b

        def grey(pixel: Tensor) -> float:
            return 0.299 * pixel[0].item() + 0.587 * pixel[1].item() + 0.114 * pixel[2].item()

        mean = sum(grey(pixel) for pixel in bright.flatten(1).T) / 12
        for i in range(4):
            for j in range(3):
                pixel = mean + c * (bright[:, i, j] - mean)
                level = grey(pixel)
                loop[n, :, i, j] = (level + s * (pixel - level)).clamp(0, 255)
    even = jitter(torch.full((4000, 1, 1, 1), 100.0), 0.4).flatten().double() / 100  # brightness alone
    return worst(
        require(gap(adjust(x, *factors), loop) < 1e-12),
        standard_errors(even, 1.0),
        standard_errors((even - 1).square(), 0.4**2 / 3),
    )


def _uncorrected(x: Tensor, y: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Blends the targets by the λ that was drawn, whatever window came of it."""
    state = torch.get_rng_state()
    pasted, _ = augment.cutmix(x, y, alpha)
    torch.set_rng_state(state)  # mixup draws λ and partners first of all, too
    return pasted, augment.mixup(y, y, alpha)[1]


@entry(
    "regularise/cutmix",
    "Cutmix",
    r"x' = m \odot x_i + (1 - m) \odot x_j, \quad y' = \lambda y_i + (1 - \lambda) y_j, \quad "
    r"\lambda = \frac{1}{HW} \sum m",
    code=augment.cutmix,
    wrong=_uncorrected,
    tolerance=4.0,
)
def _(cutmix: Code) -> float:
    count = 1500
    x = torch.arange(float(count))[:, None, None, None].expand(-1, 1, 20, 20)
    mixed, target = cutmix(x, torch.eye(count), 0.7)
    foreign = mixed[:, 0] != x[:, 0]
    rows, columns = foreign.any(2), foreign.any(1)
    share = foreign.double().mean((1, 2))
    owner = mixed.amax((1, 2, 3)).where(mixed.amax((1, 2, 3)) != x[:, 0, 0, 0], mixed.amin((1, 2, 3))).long()
    wanted = torch.zeros(count, count, dtype=torch.float64)
    own = torch.arange(count)
    wanted[own, own] += 1 - share
    wanted[own, owner] += share
    return worst(
        require(torch.equal(foreign, rows[:, :, None] & columns[:, None, :])),  # one rectangle
        require((rows.sum(1) == columns.sum(1)).all()),  # of the image's own shape
        require(gap(target, wanted) < 1e-6),
        standard_errors(share, 0.5),
        # The variance of Beta(α, α); whole pixels add little to it.
        require(abs(share.var().item() - 1 / (4 * (2 * 0.7 + 1))) < 0.01),
    )
