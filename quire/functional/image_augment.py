"""Augmentation of images, and of the boxes on them, on whole batches.

Every function is pure, works on the device of its input without a loop over images, and draws from
`generator` (which then must live on that device) or from the global one. Images hold values from 0 to 255 in
uint8 or floating point; their type is kept, uint8 being rounded where a value falls between two.

Boxes (N, G, 4) are corners (x₁, y₁, x₂, y₂) in shares of the image, and `present` (N, G) says which rows hold
one. They follow their image: a box is cut at the border, and given up where its centre has left the image or
nothing of it is left. Rows without a box are 0.

N images, C channels, H×W pixels, G boxes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError
from quire.functional.boxes import require_boxes
from quire.functional.regularise import check_rate

Generator = torch.Generator | None
Colour = float | Sequence[float] | Tensor
"""One value for all channels or one for each; a tensor on the device of the images saves a copy there."""
Scene = tuple[Tensor, Tensor, Tensor]
"""Images, their boxes, and which rows hold one."""


# Windows --------------------------------------------------------------------------------------


def draw_windows(
    x: Tensor,
    *,
    smallest: float = 1.0,
    largest: float = 1.0,
    aspect: float = 1.0,
    generator: Generator = None,
) -> Tensor:
    """A window for each image, as corners (N, 4) in shares of it.

    Its side s is drawn between `smallest` and `largest` with log s uniform, so that every factor of
    enlargement is as likely; with log r uniform in ± log `aspect` it is s√r wide and s/√r high, both kept
    between the bounds. Its corner is uniform in [0, 1 − side], or in [1 − side, 0] where the side is above 1:
    a small window lies inside the image, a large one contains it.
    """
    if not 0 < smallest <= largest < math.inf or not 1 <= aspect < math.inf:
        raise InputError(
            f"windows of sides from {smallest:g} to {largest:g} and an aspect of {aspect:g}",
            expected="0 < smallest <= largest, as shares of the image, and aspect >= 1",
            fix="0.5 to 1 cuts out half of a side at most; above 1 the image becomes smaller",
        )
    u = torch.rand(4, len(x), generator=generator, device=x.device)
    side = math.log(smallest) + (math.log(largest) - math.log(smallest)) * u[0]
    ratio = (u[1] - 0.5) * math.log(aspect)  # half of log r
    sides = torch.stack([side + ratio, side - ratio], 1).exp().clamp(smallest, largest)  # (N, 2)
    corner = u[2:].T * (1 - sides)
    return torch.cat([corner, corner + sides], 1)


def take_windows(x: Tensor, windows: Tensor, fill: Colour = 0.0) -> Tensor:
    """The content of a window (N, 4) of each image, brought to the image's own size.

    A pixel of the result whose centre is at share p of the window shows the image at x₁ + p(x₂ − x₁),
    interpolated linearly between the centres of pixels and constant from the outermost ones to the edge;
    outside the image it is `fill`.
    """
    check_images(x)
    values = widen(x)
    across, down = (_places(x.shape[3 - axis], windows[:, axis::2].to(values)) for axis in (0, 1))
    grid = torch.stack(torch.broadcast_tensors(across[:, None, :], down[:, :, None]), -1)  # (N, H, W, 2)
    found = functional.grid_sample(
        values, 2 * grid - 1, mode="bilinear", padding_mode="border", align_corners=False
    )
    inside = ((grid >= 0) & (grid < 1)).all(-1).unsqueeze(1)
    return in_type_of(torch.where(inside, found, colour_values(x, fill).to(values.dtype)), x)


def boxes_in_windows(boxes: Tensor, present: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """b′ = (b − corner) / side, cut at 0 and 1: boxes in shares of the windows (N, 4), and which are left."""
    _check_scene(windows, boxes, present)
    kind = torch.promote_types(boxes.dtype, torch.float32)
    corner, other = windows[:, None, None, :2].to(kind), windows[:, None, None, 2:].to(kind)
    ends = (boxes.to(kind).unflatten(-1, (2, 2)) - corner) / (other - corner)  # (N, G, corner, x and y)
    centre, cut = ends.mean(2), ends.clamp(0, 1)
    left = present & ((centre >= 0) & (centre <= 1)).all(-1) & (cut[:, :, 1] > cut[:, :, 0]).all(-1)
    return _only(cut.flatten(2), left).to(boxes.dtype), left


@overload
def random_window(
    x: Tensor,
    *,
    smallest: float = ...,
    largest: float = ...,
    aspect: float = ...,
    fill: Colour = ...,
    generator: Generator = ...,
) -> Tensor: ...
@overload
def random_window(
    x: Tensor,
    boxes: Tensor,
    present: Tensor,
    *,
    smallest: float = ...,
    largest: float = ...,
    aspect: float = ...,
    fill: Colour = ...,
    generator: Generator = ...,
) -> Scene: ...
def random_window(
    x: Tensor,
    boxes: Tensor | None = None,
    present: Tensor | None = None,
    *,
    smallest: float = 1.0,
    largest: float = 1.0,
    aspect: float = 1.0,
    fill: Colour = 0.0,
    generator: Generator = None,
) -> Tensor | Scene:
    """A random window of each image at full size (see `draw_windows`, `take_windows`), with `fill` where it
    reaches out of the image: crops below 1, smaller images above 1, distorted ones with an aspect."""
    check_images(x)
    windows = draw_windows(x, smallest=smallest, largest=largest, aspect=aspect, generator=generator)
    return _with_boxes(take_windows(x, windows, fill), windows, boxes, present)


@overload
def random_crop(
    x: Tensor, size: tuple[int, int], padding: int = ..., generator: Generator = ...
) -> Tensor: ...
@overload
def random_crop(
    x: Tensor, size: tuple[int, int], padding: int, generator: Generator, boxes: Tensor, present: Tensor
) -> Scene: ...
def random_crop(
    x: Tensor,
    size: tuple[int, int],
    padding: int = 0,
    generator: Generator = None,
    boxes: Tensor | None = None,
    present: Tensor | None = None,
) -> Tensor | Scene:
    """A window of `size` at a random place of each image, after `padding` zeros on all sides."""
    check_images(x)
    height, width = x.shape[2:]
    x = functional.pad(x, [padding] * 4) if padding else x
    free = [x.shape[2] - size[0], x.shape[3] - size[1]]
    if min(free) < 0 or min(size) < 1:
        raise InputError(
            f"a crop of {size[0]}×{size[1]} out of {x.shape[2]}×{x.shape[3]} (padding included)",
            expected="a window inside the image",
            fix="take a smaller window or more padding",
        )
    top, left = (integers(x, (len(x), 1), 0, space + 1, generator) for space in free)
    rows = top + torch.arange(size[0], device=x.device)  # (N, h)
    columns = left + torch.arange(size[1], device=x.device)  # (N, w)
    taller = x.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    taken = taller.gather(3, columns[:, None, None, :].expand(-1, x.shape[1], size[0], -1))
    corner = [(left - padding) / width, (top - padding) / height]
    windows = torch.cat([*corner, corner[0] + size[1] / width, corner[1] + size[0] / height], 1)
    return _with_boxes(taken, windows, boxes, present)


@overload
def random_shift(x: Tensor, limit: int, generator: Generator = ...) -> Tensor: ...
@overload
def random_shift(x: Tensor, limit: int, generator: Generator, boxes: Tensor, present: Tensor) -> Scene: ...
def random_shift(
    x: Tensor,
    limit: int,
    generator: Generator = None,
    boxes: Tensor | None = None,
    present: Tensor | None = None,
) -> Tensor | Scene:
    """Each image moved by up to `limit` pixels in both directions; zeros come in."""
    check_images(x)
    _check_both(boxes, present)
    size = (x.shape[2], x.shape[3])
    if boxes is None or present is None:
        return random_crop(x, size, limit, generator)
    return random_crop(x, size, limit, generator, boxes, present)


@overload
def random_flip(x: Tensor, rate: float = ..., generator: Generator = ...) -> Tensor: ...
@overload
def random_flip(x: Tensor, rate: float, generator: Generator, boxes: Tensor, present: Tensor) -> Scene: ...
def random_flip(
    x: Tensor,
    rate: float = 0.5,
    generator: Generator = None,
    boxes: Tensor | None = None,
    present: Tensor | None = None,
) -> Tensor | Scene:
    """Each image mirrored left to right with probability `rate`; a box's x₁ and x₂ become 1 − x₂, 1 − x₁."""
    check_images(x)
    _check_both(boxes, present)
    turned = chosen(x, (len(x), 1, 1, 1), rate, generator)
    mirrored = torch.where(turned, x.flip(-1), x)
    if boxes is None or present is None:
        return mirrored
    _check_scene(x, boxes, present)
    x1, y1, x2, y2 = boxes.unbind(-1)
    other = torch.stack([1 - x2, y1, 1 - x1, y2], -1)
    return mirrored, _only(torch.where(turned.squeeze(1), other, boxes), present), present


# Helpers --------------------------------------------------------------------------------------


def integers(like: Tensor, shape: tuple[int, ...], low: int, high: int, generator: Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=like.device)


def chosen(like: Tensor, shape: tuple[int, ...], rate: float, generator: Generator) -> Tensor:
    """Independent true values with probability `rate`."""
    check_rate(rate, "probability", allow_one=True)
    return torch.rand(shape, generator=generator, device=like.device) < rate


def check_images(x: Tensor) -> None:
    if x.dim() != 4:
        raise InputError(
            f"a tensor of shape {tuple(x.shape)}",
            expected="a batch of images (N, C, H, W)",
            fix="add the missing dimensions with x.unsqueeze(…)",
        )


def _check_scene(x: Tensor, boxes: Tensor, present: Tensor) -> None:
    require_boxes("boxes", boxes)
    if boxes.dim() != 3 or len(boxes) != len(x) or present.shape != boxes.shape[:2]:
        raise InputError(
            f"boxes {tuple(boxes.shape)} and present {tuple(present.shape)} for {len(x)} images",
            expected=f"boxes ({len(x)}, G, 4) and present ({len(x)}, G)",
            fix="give every image the same number of rows, those without a box marked by present = False",
        )


def _check_both(boxes: Tensor | None, present: Tensor | None) -> None:
    if (boxes is None) != (present is None):
        raise InputError(
            "boxes without present" if present is None else "present without boxes",
            expected="both, or images alone",
            fix="where every row holds a box, present is boxes.new_ones(boxes.shape[:2], dtype=torch.bool)",
        )


def _with_boxes(x: Tensor, windows: Tensor, boxes: Tensor | None, present: Tensor | None) -> Tensor | Scene:
    _check_both(boxes, present)
    if boxes is None or present is None:
        return x
    return x, *boxes_in_windows(boxes, present, windows)


def _only(boxes: Tensor, present: Tensor) -> Tensor:
    return torch.where(present.unsqueeze(-1), boxes, 0.0)


def _places(extent: int, ends: Tensor) -> Tensor:
    """(N, extent): where the centres of `extent` equal parts of each span (N, 2) lie."""
    share = (torch.arange(extent, device=ends.device, dtype=ends.dtype) + 0.5) / extent
    return ends[:, :1] + share * (ends[:, 1:] - ends[:, :1])


def colour_values(x: Tensor, colour: Colour) -> Tensor:
    """(1, C, 1, 1) or (1, 1, 1, 1), on the device of the images."""
    if isinstance(colour, int | float):
        return torch.full((1, 1, 1, 1), float(colour), device=x.device)
    values = torch.as_tensor(colour, dtype=torch.float32).to(x.device)
    if values.numel() not in (1, x.shape[1]):
        raise InputError(
            f"a colour of {values.numel()} values for images with {x.shape[1]} channels",
            expected="one value, or one for each channel",
            fix="give the mean of the training images, channel by channel",
        )
    return values.reshape(1, -1, 1, 1)


def widen(values: Tensor) -> Tensor:
    """In float32 at least, in which pixels can be computed with."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def in_type_of(values: Tensor, like: Tensor) -> Tensor:
    """In the type of `like`; to the nearest integer where that has no fractions."""
    return (values if like.is_floating_point() else values.round()).to(like.dtype)
