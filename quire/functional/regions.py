"""The linear regions of a ReLU net, counted exactly (in float64) rather than sampled.

A ReLU net is linear wherever no unit changes sign. Along a line the places where one does are found layer
by layer: within a piece every pre-activation is linear, so its zero is a division. In a plane each convex
polygon is cut along the zero lines of the next layer's units, again layer by layer.

W^l is (D_l, D_{l−1}), b^l is (D_l,); the last layer has no ReLU. D units in a layer, K hidden layers.

Bounds for one input: one layer has at most D + 1 regions, K layers at most (D + 1)^K. The second is
reached by `sawtooth` from D = 3 on. With two units it is not: each unit of the second layer would have to
cross zero in all three pieces, so their slopes would have to alternate, but the slope of the middle piece
of two units is the sum of the outer two, or one of the three is flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.errors import InputError

# Differences below this share of the values compared are rounding, not a new region.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class LineRegions:
    """Maximal intervals of a segment on which the net is linear.

    `breakpoints` (R + 1,) are positions t from 0 at the start to 1 at the end, `slopes` (R, D_out) are
    d output / dt in each interval.
    """

    breakpoints: Tensor
    slopes: Tensor

    def __len__(self) -> int:
        return len(self.slopes)


def line_regions(
    weights: Sequence[Tensor], biases: Sequence[Tensor], start: Tensor, end: Tensor
) -> LineRegions:
    """The linear regions of a ReLU net on the segment from `start` to `end`, each (D_0,)."""
    _check(weights, biases, len(start))
    t = torch.tensor([0.0, 1.0], dtype=torch.float64, device=start.device)
    z = torch.stack([start, end]).double()
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        a = z @ weight.detach().double().t() + bias.detach().double()
        t, a = _insert_zeros(t, a)
        z = torch.relu(a)
    out = z @ weights[-1].detach().double().t() + biases[-1].detach().double()
    slopes = out.diff(dim=0) / t.diff()[:, None]
    # Cancellation makes a slope uncertain by about ε·|output| / width of its piece.
    noise = TOLERANCE * slopes.abs().max() + 1e-14 * out.abs().max() / t.diff().min()
    new = (slopes.diff(dim=0).abs() > noise).any(dim=1)
    first = torch.cat([new.new_ones(1), new])
    return LineRegions(torch.cat([t[:-1][first], t[-1:]]), slopes[first])


def _insert_zeros(t: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Add the positions where a column of `a` (P, D), linear between positions, changes sign."""
    left, right = a[:-1], a[1:]
    crosses = left * right < 0
    share = torch.where(crosses, left / torch.where(crosses, left - right, 1.0), 0.0)
    piece, unit = crosses.nonzero(as_tuple=True)
    found = share[piece, unit]
    values = left[piece] + found[:, None] * (right - left)[piece]
    # What crosses here is zero here; interpolation alone would leave a sign that crosses again later.
    values[torch.arange(len(unit), device=a.device), unit] = 0.0
    places = torch.cat([t, t[piece] + found * t.diff()[piece]])
    order = places.argsort(stable=True)
    places, values = places[order], torch.cat([a, values])[order]
    # Two units with one zero give the same place twice, apart by rounding.
    kept = torch.cat([places.new_ones(1, dtype=torch.bool), places.diff() > 1e-13])
    return places[kept], values[kept]


@dataclass(frozen=True)
class PlaneRegion:
    """A convex polygon of the plane on which every unit keeps its state.

    `polygon` (V, 2) are its corners in order, `gradient` (D_out, 2) and `offset` (D_out,) the net inside:
    output = gradient · (u, v) + offset. `pattern` says which hidden units are on, layer after layer.
    """

    polygon: Tensor
    gradient: Tensor
    offset: Tensor
    pattern: tuple[bool, ...]

    @property
    def area(self) -> float:
        u, v = self.polygon[:, 0], self.polygon[:, 1]
        return (u * v.roll(-1) - v * u.roll(-1)).sum().abs().item() / 2


def plane_regions(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    origin: Tensor | None = None,
    axes: Tensor | None = None,
    u: tuple[float, float] = (-1.0, 1.0),
    v: tuple[float, float] = (-1.0, 1.0),
) -> list[PlaneRegion]:
    """The activation regions of a ReLU net on the rectangle u × v of the plane
    x = origin + u·axes[0] + v·axes[1]; `axes` is (2, D_0). With two inputs both may be left out."""
    inputs = weights[0].shape[1]
    if axes is None:
        if inputs != 2:
            raise InputError(
                f"a net with {inputs} inputs and no axes",
                expected="two directions, a tensor (2, inputs)",
                fix="give axes=, and origin= unless it is zero",
            )
        axes = torch.eye(2, dtype=torch.float64)
    _check(weights, biases, axes.shape[1])
    gradient = _numpy(axes).T
    offset = np.zeros(inputs) if origin is None else _numpy(origin)
    corners = np.array([(u[0], v[0]), (u[1], v[0]), (u[1], v[1]), (u[0], v[1])], dtype=np.float64)
    # A piece: its corners, the layer's input as a linear map of (u, v), and the states so far.
    pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray, tuple[bool, ...]]] = [
        (corners, gradient, offset, ())
    ]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        w, b = _numpy(weight), _numpy(bias)
        pieces_after = []
        for polygon, slope, constant, pattern in pieces:
            slope, constant = w @ slope, w @ constant + b
            for part in _cut(polygon, slope, constant):
                # A unit's state is that at the centre: corners lie on its zero line, the centre does not.
                on = slope @ part.mean(axis=0) + constant > 0
                pieces_after.append((part, slope * on[:, None], constant * on, (*pattern, *on.tolist())))
        pieces = pieces_after
    w, b = _numpy(weights[-1]), _numpy(biases[-1])
    return [
        PlaneRegion(_torch(polygon), _torch(w @ slope), _torch(w @ constant + b), pattern)
        for polygon, slope, constant, pattern in pieces
    ]


def _cut(polygon: np.ndarray, slope: np.ndarray, constant: np.ndarray) -> list[np.ndarray]:
    """The convex parts of a convex polygon (V, 2) between the lines slope·p + constant = 0, one a unit."""
    values = polygon @ slope.T + constant
    noise = TOLERANCE * (np.abs(slope).sum(axis=1) + np.abs(constant))
    crossing = (values.max(axis=0) > noise) & (values.min(axis=0) < -noise)
    parts = [polygon]
    for unit in np.flatnonzero(crossing):
        after = []
        for part in parts:
            height = part @ slope[unit] + constant[unit]
            if height.max() <= noise[unit] or height.min() >= -noise[unit]:
                after.append(part)
            else:
                after += [_clip(part, height), _clip(part, -height)]
        parts = after
    return parts


def _clip(polygon: np.ndarray, height: np.ndarray) -> np.ndarray:
    """The part of a convex polygon where the height, linear and given at the corners, is not negative."""
    following, height_after = np.roll(polygon, -1, axis=0), np.roll(height, -1)
    kept: list[np.ndarray] = []
    for here, there, low, high in zip(polygon, following, height, height_after, strict=True):
        if low >= 0:
            kept.append(here)
        if low * high < 0:
            kept.append(here + (there - here) * (low / (low - high)))
    return np.stack(kept)


def sawtooth(width: int, depth: int) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases of a net with one input and one output that has (D + 1)^K linear regions on [0, 1].

    Each hidden layer folds [0, 1] onto itself D + 1 times, so regions multiply. D units with kinks k_j and
    weights δ_j in the sum have slopes s_j = s_{j−1} + δ_j, and s_0 = −Σ δ_j over the units that are on to
    the left of their kink. Pieces of widths 2, 2, 1, 1, … / (D + 3) and units 2 and 3 on to the left make
    the slopes alternate; so for K > 1 at least three units are needed.
    """
    if width < 1 or depth < 1 or (depth > 1 and width < 3):
        raise InputError(
            f"a sawtooth of width {width} and depth {depth}",
            expected="width >= 3 (>= 1 for a single layer) and depth >= 1",
            fix="the bound (D + 1)^K is not reachable with fewer units",
        )
    if width < 3:
        # One layer need not fold: kinks inside [0, 1] with any weights give D + 1 slopes.
        kinks = torch.arange(1, width + 1, dtype=torch.float64) / (width + 1)
        sign, change, level = (
            torch.ones_like(kinks),
            torch.ones_like(kinks),
            torch.zeros((), dtype=torch.float64),
        )
    else:
        pieces = torch.tensor([2.0, 2.0] + [1.0] * (width - 1), dtype=torch.float64) / (width + 3)
        kinks = pieces.cumsum(0)[:-1]
        slopes = (-1.0) ** torch.arange(width + 1) / pieces
        change = slopes.diff()
        sign = torch.ones_like(kinks)
        sign[1:3] = -1.0
        level = -(change * torch.relu(-sign * kinks)).sum()
    # Unit j is relu(sign_j (f − k_j)) of the fold f = change · z + level of the layer before.
    first, bias = sign[:, None], -sign * kinks
    between = sign[:, None] * change[None, :]
    weights = [first, *[between.clone() for _ in range(depth - 1)], change[None, :]]
    biases = [bias, *[sign * level + bias for _ in range(depth - 1)], level.reshape(1)]
    return weights, biases


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


def _torch(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)


def _check(weights: Sequence[Tensor], biases: Sequence[Tensor], inputs: int) -> None:
    if not weights or len(weights) != len(biases) or weights[0].shape[1] != inputs:
        shapes = [tuple(weight.shape) for weight in weights]
        raise InputError(
            f"weights {shapes} and {len(biases)} biases for {inputs} inputs",
            expected=f"one bias for each weight, the first weight (units, {inputs})",
            fix="give them layer by layer, as in nn.Linear",
        )
