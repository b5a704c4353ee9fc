"""Convexity, and a search for its violation.

λ weight of a convex combination λx + (1−λ)x', D dimensions, N pairs tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import InputError


class Violation(NamedTuple):
    """Two points and a weight for which the defining inequality fails, and by how much."""

    x: Tensor
    other: Tensor
    weight: Tensor
    amount: Tensor


def convexity_violation(
    function: Callable[[Tensor], Tensor],
    low: Tensor | float,
    high: Tensor | float,
    *,
    pairs: int = 10_000,
    tolerance: float | None = None,
    generator: torch.Generator | None = None,
) -> Violation | None:
    """The worst (x, x', λ) found with f(λx + (1−λ)x') > λf(x) + (1−λ)f(x'), or None.

    `function` maps points (N, D) to values (N,); for scalar bounds it maps (N,) to (N,). The box [low, high]
    is searched with random pairs, in the dtype of the bounds. A violation found is a disproof; None is
    evidence, no proof. `tolerance` is relative to the values compared and stands above their rounding.
    """
    x, other, weight = _random_pairs(low, high, pairs, generator)
    middle = _combine(x, other, weight)
    below, left, right = function(middle), function(x), function(other)
    if below.shape != weight.shape:
        raise InputError(
            f"a function from {tuple(x.shape)} to {tuple(below.shape)}",
            expected=f"one value for each point: {tuple(weight.shape)}",
            fix="let the function reduce the last dimension, for example x.square().sum(-1)",
        )
    values = torch.stack([below, left, right])
    if bool(values.isnan().any()):
        place = torch.stack([middle, x, other])[values.isnan()][0]
        raise InputError(
            f"a function that is no number at {place.tolist()}",
            expected="a number at each point between low and high",
            fix="narrow the box to where the function is defined",
        )
    chord = weight * left + (1 - weight) * right
    # Below an infinite chord everything is allowed: ∞ outside of a convex set keeps a function convex.
    excess = torch.where(chord == torch.inf, -torch.inf, below - chord)
    scale = torch.cat([values.abs(), torch.ones_like(below)[None]]).amax(0)
    if tolerance is None:
        tolerance = 64 * torch.finfo(below.dtype).eps
    share = torch.where(excess.isinf(), excess, excess / scale)
    worst = int(torch.argmax(share))
    if not share[worst] > tolerance:
        return None
    return Violation(x[worst], other[worst], weight[worst], excess[worst])


def convex_set_violation(
    contains: Callable[[Tensor], Tensor],
    low: Tensor | float,
    high: Tensor | float,
    *,
    pairs: int = 10_000,
    generator: torch.Generator | None = None,
) -> Violation | None:
    """Members x and x' of a set with a point λx + (1−λ)x' between them outside it, or None.

    `contains` maps points (N, D) to booleans (N,). The amount of the violation is the distance from the
    outside point to the nearer end.
    """
    x, other, weight = _random_pairs(low, high, pairs, generator)
    members = contains(x) & contains(other)
    if not bool(members.any()):
        raise InputError(
            "no two random points of the box lie in the set",
            expected="a box that the set fills to some part",
            fix="narrow low and high around the set, or try more pairs",
        )
    middle = _combine(x, other, weight)
    outside = members & ~contains(middle)
    if not bool(outside.any()):
        return None
    ends = torch.stack([(middle - x).abs(), (middle - other).abs()])
    depth = ends.amin(0) if x.dim() == 1 else ends.square().sum(-1).sqrt().amin(0)
    worst = int(torch.argmax(torch.where(outside, depth, -1.0)))
    return Violation(x[worst], other[worst], weight[worst], depth[worst])


def jensen_gap(function: Callable[[Tensor], Tensor], values: Tensor, probability: Tensor) -> Tensor:
    """E[f(X)] − f(E[X]) of a discrete X: never below 0 for a convex f (Jensen's inequality).

    The last dimension of both tensors runs over the values that X takes.
    """
    total = probability.sum(-1)
    if bool((probability < 0).any()) or not torch.allclose(total, torch.ones_like(total), atol=1e-4):
        raise InputError(
            f"probabilities from {probability.min().item():g} that sum to {total.flatten()[0].item():g}",
            expected="numbers of at least 0 that sum to 1 along the last dimension",
            fix="divide them by their sum",
        )
    return (probability * function(values)).sum(-1) - function((probability * values).sum(-1))


def _random_pairs(
    low: Tensor | float, high: Tensor | float, pairs: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(torch.as_tensor(low).dtype, torch.get_default_dtype())
    bottom = torch.as_tensor(low, dtype=dtype)
    top = torch.as_tensor(high, dtype=dtype, device=bottom.device)
    bottom, top = torch.broadcast_tensors(bottom, top)
    if not bool((bottom < top).all()) or bottom.dim() > 1:
        raise InputError(
            f"a box from {low} to {high}",
            expected="low < high, as numbers or as vectors with a bound for each dimension",
            fix="swap or widen the bounds",
        )
    unit = torch.rand((2, pairs, *bottom.shape), generator=generator, dtype=dtype, device=bottom.device)
    x, other = bottom + unit * (top - bottom)
    weight = torch.rand(pairs, generator=generator, dtype=dtype, device=bottom.device)
    return x, other, weight


def _combine(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    spread = weight if x.dim() == 1 else weight[:, None]
    return spread * x + (1 - spread) * other
