"""Images bent as a hand or a lens would bend them: shifted, zoomed, turned, slanted, and pulled at a grid of
points, all in one resampling.

    a pixel at p shows the image at A p + t + b(p),   A = slant · turn · zoom

with p = (x, y) from −1 to 1 across the image's longer side, and b smooth between 4×4 points. Everything works
on the device of the images without a loop over them, and draws from `generator` (which then must live there)
or from the global one.

N images, C channels, H×W pixels
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError
from quire.functional.image_augment import (
    Colour,
    Generator,
    check_images,
    colour_values,
    in_type_of,
    widen,
)

POINTS = 4
"""Of the grid that images are pulled at, along a side."""


class Warps(NamedTuple):
    """Where each image is looked at, in units of half its longer side."""

    matrix: Tensor
    """A, (N, 2, 2)"""
    offset: Tensor
    """t, (N, 2)"""
    pulls: Tensor | None = None
    """b at the points of the grid, (N, 2, 4, 4); None where nothing is pulled."""


def draw_warps(
    x: Tensor,
    *,
    shift: float = 0.0,
    zoom: float = 1.0,
    rotate: float = 0.0,
    shear: float = 0.0,
    bend: float = 0.0,
    generator: Generator = None,
) -> Warps:
    """A warp for each image, every change drawn by itself.

    Moved by up to `shift` of its longer side along both axes; width and height each divided by a factor
    between 1/`zoom` and `zoom`, its logarithm uniform; turned by up to `rotate` degrees; slanted by up to
    `shear` pixels a row; points pulled by Gaussian noise of deviation `bend`, as a share of the longer side.
    """
    good = all(math.isfinite(v) and v >= 0 for v in (shift, rotate, shear, bend)) and 1 <= zoom < math.inf
    if not good:
        raise InputError(
            f"warps with shift {shift:g}, zoom {zoom:g}, rotate {rotate:g}, shear {shear:g}, bend {bend:g}",
            expected="zoom >= 1 and all others >= 0",
            fix="zoom 1 and 0 of the others change nothing",
        )
    n, device = len(x), x.device
    u = 2 * torch.rand(6, n, generator=generator, device=device) - 1
    angle = u[0] * math.radians(rotate)
    cos, sin = angle.cos(), angle.sin()
    one, nothing = torch.ones_like(cos), torch.zeros_like(cos)
    turn = _matrices(cos, -sin, sin, cos)
    slant = _matrices(one, shear * u[1], nothing, one)
    sides = (math.log(zoom) * u[2:4]).exp()
    matrix = slant @ turn @ _matrices(sides[0], nothing, nothing, sides[1])
    pulls = None
    if bend:
        pulls = 2 * bend * torch.randn(n, 2, POINTS, POINTS, generator=generator, device=device)
    return Warps(matrix, 2 * shift * u[4:].T, pulls)


def take_warps(x: Tensor, warps: Warps, fill: Colour = 0.0) -> Tensor:
    """The images (N, C, H, W) as their warps show them: linear between the centres of pixels, and towards
    `fill` beyond the outermost ones."""
    check_images(x)
    values = widen(x)
    height, width = x.shape[2:]
    longer = max(height, width)
    down, across = (_places(side, longer, values) for side in (height, width))
    points = torch.stack(torch.broadcast_tensors(across[None, :], down[:, None]), -1)  # (H, W, x and y)
    grid = torch.einsum("nij,hwj->nhwi", warps.matrix.to(values), points)
    grid = grid + warps.offset.to(values)[:, None, None]
    if warps.pulls is not None:
        pulls = functional.interpolate(
            warps.pulls.to(values), (height, width), mode="bicubic", align_corners=True
        )
        grid = grid + pulls.permute(0, 2, 3, 1)
    grid = grid * grid.new_tensor([longer / width, longer / height])  # −1 to 1 along each side
    ground = colour_values(x, fill).to(values.dtype)
    found = functional.grid_sample(
        values - ground, grid, mode="bilinear", padding_mode="zeros", align_corners=False
    )
    found = found + ground
    return in_type_of(found if x.is_floating_point() else found.clamp(0, 255), x)


def _matrices(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """(N, 2, 2) of rows (a, b) and (c, d)."""
    return torch.stack([a, b, c, d], 1).unflatten(1, (2, 2))


def _places(side: int, longer: int, like: Tensor) -> Tensor:
    """Centres of the pixels of a side about its middle, (side,), in units of half the longer side."""
    return (2 * torch.arange(side, device=like.device, dtype=like.dtype) + 1 - side) / longer
