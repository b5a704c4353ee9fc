"""Axis-aligned boxes: formats, overlap, and the coding of a box relative to another.

N, M boxes. A box is (x₁, y₁, x₂, y₂), the corners nearest to and farthest from the origin, unless a format
says otherwise. A box with x₂ ≤ x₁ or y₂ ≤ y₁, or with a coordinate that is not a number, is degenerate: it is
refused by its index, or with `degenerate="zero"` taken as a box without area, which overlaps nothing.
Refusing reads a flag back from the device; where boxes are known to be good, "zero" saves the wait.

Overlaps are computed and returned in float32 or wider, because areas of bfloat16 pixels mean little.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name

Degenerate = Literal["refuse", "zero"]
Format = Literal["corners", "size", "centre"]

FORMATS = ("corners", "size", "centre")
VARIANCES = (0.1, 0.2)
"""What centres and sizes are divided by in box coding, so that all four targets have a similar spread."""
LARGEST_LOG = math.log(1000 / 16)
"""Decoded boxes are at most 62.5 times as large as their default box: exp never overflows."""


# Formats --------------------------------------------------------------------------------------


def require_boxes(name: str, boxes: Tensor) -> None:
    """Refuse tensors whose last dimension is not 4."""
    if boxes.dim() < 1 or boxes.shape[-1] != 4:
        raise InputError(
            f"{name} of shape {tuple(boxes.shape)}",
            expected="boxes of shape (…, 4)",
            fix="put the four coordinates of a box in the last dimension; no boxes at all are zeros(0, 4)",
        )


def valid_boxes(boxes: Tensor) -> Tensor:
    """Whether x₂ > x₁ and y₂ > y₁, with finite coordinates, for each box."""
    require_boxes("valid_boxes", boxes)
    return (boxes[..., 2:] > boxes[..., :2]).all(-1) & boxes.isfinite().all(-1)


def require_valid(name: str, boxes: Tensor) -> None:
    """Refuse degenerate boxes, and name the first of them."""
    require_boxes(name, boxes)
    bad = ~valid_boxes(boxes)
    if not bool(bad.any()):
        return
    places = bad.nonzero()
    first = places[0].tolist()
    index = first[0] if len(first) == 1 else tuple(first)
    others = f", and {len(places) - 1} more" if len(places) > 1 else ""
    raise InputError(
        f"{name}: box {index if first else ''} is {_shown(boxes[tuple(first)])}{others}",
        expected="finite corners (x₁, y₁, x₂, y₂) with x₂ > x₁ and y₂ > y₁",
        fix="drop them with boxes[valid_boxes(boxes)], convert them with convert_boxes where they are in "
        'another format, or pass degenerate="zero" where the function has that option',
    )


def _shown(box: Tensor) -> str:
    return "(" + ", ".join(f"{value:g}" for value in box.tolist()) + ")"


def convert_boxes(boxes: Tensor, source: Format, target: Format) -> Tensor:
    """Between "corners" (x₁, y₁, x₂, y₂), "size" (x₁, y₁, w, h) and "centre" (c_x, c_y, w, h)."""
    require_boxes("convert_boxes", boxes)
    for name in (source, target):
        if name not in FORMATS:
            raise unknown_name("box format", name, FORMATS)
    if source == target:
        return boxes
    first, second = boxes[..., :2], boxes[..., 2:]
    size = second - first if source == "corners" else second
    # From corners the centre is their mean: half the size would be rounded once more.
    if target == "centre":
        centre = (first + second) / 2 if source == "corners" else first + size / 2
        return torch.cat([centre, size], -1)
    low = first - size / 2 if source == "centre" else first
    if target == "size":
        return torch.cat([low, size], -1)
    return torch.cat([low, first + size / 2 if source == "centre" else low + size], -1)


def clip_boxes(boxes: Tensor, width: float, height: float) -> Tensor:
    """The part of each box inside [0, width] × [0, height]; one that lies outside keeps no area."""
    require_boxes("clip_boxes", boxes)
    x, y = boxes[..., 0::2].clamp(0, width), boxes[..., 1::2].clamp(0, height)
    return torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], -1)


def box_area(boxes: Tensor) -> Tensor:
    """(x₂ − x₁)(y₂ − y₁), and 0 for a box whose corners are reversed."""
    require_boxes("box_area", boxes)
    side = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0)
    return side[..., 0] * side[..., 1]


# Overlap --------------------------------------------------------------------------------------


def intersection(first: Tensor, second: Tensor) -> Tensor:
    """Area that two boxes share; leading dimensions broadcast."""
    low = torch.maximum(first[..., :2], second[..., :2])
    high = torch.minimum(first[..., 2:], second[..., 2:])
    side = (high - low).clamp(min=0)
    return side[..., 0] * side[..., 1]


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 with a zero gradient where the whole is 0."""
    empty = whole <= 0
    return torch.where(empty, 0.0, part / torch.where(empty, 1.0, whole))


def _prepare(name: str, boxes: Tensor, degenerate: str) -> Tensor:
    require_boxes(name, boxes)
    if degenerate not in ("refuse", "zero"):
        raise unknown_name("treatment of degenerate boxes", degenerate, ("refuse", "zero"))
    boxes = boxes.to(torch.promote_types(boxes.dtype, torch.float32))
    if degenerate == "refuse":
        require_valid(name, boxes)
        return boxes
    # A box that is not one shrinks to its first corner.
    corner = boxes[..., :2].nan_to_num(0.0, 0.0, 0.0)
    return torch.where(valid_boxes(boxes)[..., None], boxes, torch.cat([corner, corner], -1))


def _iou(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    shared = intersection(first, second)
    union = box_area(first) + box_area(second) - shared
    return _share(shared, union), union


def _generalised(first: Tensor, second: Tensor) -> Tensor:
    overlap, union = _iou(first, second)
    low = torch.minimum(first[..., :2], second[..., :2])
    high = torch.maximum(first[..., 2:], second[..., 2:])
    hull = box_area(torch.cat([low, high], -1))
    return overlap - _share(hull - union, hull)


def _paired(name: str, first: Tensor, second: Tensor, degenerate: str) -> tuple[Tensor, Tensor]:
    if first.shape != second.shape:
        raise InputError(
            f"{name} of {tuple(first.shape)} and {tuple(second.shape)} boxes",
            expected="as many boxes on both sides, compared row by row",
            fix=f"use {name}_matrix to compare each of the first with each of the second",
        )
    return _prepare(name, first, degenerate), _prepare(name, second, degenerate)


def _crossed(name: str, first: Tensor, second: Tensor, degenerate: str) -> tuple[Tensor, Tensor]:
    first, second = _prepare(name, first, degenerate), _prepare(name, second, degenerate)
    if first.dim() < 2 or second.dim() < 2:
        raise InputError(
            f"{name} of shapes {tuple(first.shape)} and {tuple(second.shape)}",
            expected="boxes (…, N, 4) and (…, M, 4)",
            fix="give a single box as one row: box[None]",
        )
    return first[..., :, None, :], second[..., None, :, :]


def iou(first: Tensor, second: Tensor, *, degenerate: Degenerate = "refuse") -> Tensor:
    """IoU = |A ∩ B| / |A ∪ B|, row by row: (…, 4) and (…, 4) give (…)."""
    return _iou(*_paired("iou", first, second, degenerate))[0]


def iou_matrix(first: Tensor, second: Tensor, *, degenerate: Degenerate = "refuse") -> Tensor:
    """IoU of each of the first with each of the second: (…, N, 4) and (…, M, 4) give (…, N, M)."""
    return _iou(*_crossed("iou_matrix", first, second, degenerate))[0]


def generalised_iou(first: Tensor, second: Tensor, *, degenerate: Degenerate = "refuse") -> Tensor:
    """GIoU = IoU − (|H| − |A ∪ B|) / |H| with H the smallest box around both, row by row.

    It falls on towards −1 as disjoint boxes move apart, so 1 − GIoU has a gradient where 1 − IoU has none.
    """
    return _generalised(*_paired("generalised_iou", first, second, degenerate))


def generalised_iou_matrix(first: Tensor, second: Tensor, *, degenerate: Degenerate = "refuse") -> Tensor:
    """GIoU of each of the first with each of the second."""
    return _generalised(*_crossed("generalised_iou_matrix", first, second, degenerate))


# Coding ---------------------------------------------------------------------------------------


def encode_boxes(boxes: Tensor, defaults: Tensor, variances: tuple[float, float] = VARIANCES) -> Tensor:
    """t = ((g_c − d_c) / d_s / v₁, log(g_s / d_s) / v₂): boxes g relative to default boxes d.

    c is the centre (x, y), s the size (w, h). Leading dimensions broadcast.
    """
    require_valid("encode_boxes", boxes)
    require_valid("encode_boxes (default boxes)", defaults)
    box, default = convert_boxes(boxes, "corners", "centre"), convert_boxes(defaults, "corners", "centre")
    return encode_centres(box, default, variances)


def encode_centres(box: Tensor, default: Tensor, variances: tuple[float, float]) -> Tensor:
    """`encode_boxes` of boxes that are (x, y, w, h) around their centre, without looking at them."""
    shift = (box[..., :2] - default[..., :2]) / default[..., 2:] / variances[0]
    return torch.cat([shift, torch.log(box[..., 2:] / default[..., 2:]) / variances[1]], -1)


def decode_boxes(offsets: Tensor, defaults: Tensor, variances: tuple[float, float] = VARIANCES) -> Tensor:
    """g_c = d_c + v₁ t_c d_s and g_s = d_s exp(v₂ t_s), as corners: the inverse of `encode_boxes`."""
    require_boxes("decode_boxes", offsets)
    require_boxes("decode_boxes (default boxes)", defaults)
    default = convert_boxes(defaults, "corners", "centre")
    centre = default[..., :2] + offsets[..., :2] * variances[0] * default[..., 2:]
    size = default[..., 2:] * torch.exp((offsets[..., 2:] * variances[1]).clamp(max=LARGEST_LOG))
    return convert_boxes(torch.cat([centre, size], -1), "centre", "corners")
