"""The mathematics under the rest: norms, products, logarithms, derivatives, convolution, high dimensions.

D dimensions, N points.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import InputError

Function = Callable[[Tensor], Tensor]


def p_norm(x: Tensor, p: float = 2.0, dim: int | tuple[int, ...] = -1, *, keepdim: bool = False) -> Tensor:
    """‖x‖_p = (Σ|x_i|^p)^(1/p) for p ≥ 1; the largest |x_i| for p = ∞.

    Entries are scaled by the largest before they are raised to the power, so neither 1e30 overflows nor
    1e-30 vanishes in float32; the gradient at 0 is 0.
    """
    if not p >= 1:
        raise InputError(
            f"p_norm with p={p}",
            expected="p ≥ 1",
            fix="take p = 1 or more: below 1 the triangle inequality fails, so it is no norm",
        )
    magnitude = x.abs()
    largest = magnitude.amax(dim, keepdim=True)
    if math.isinf(p):
        return largest if keepdim else magnitude.amax(dim)
    unusable = (largest == 0) | largest.isinf()
    scale = torch.where(unusable, torch.ones_like(largest), largest).detach()
    powers = (magnitude / scale).pow(p).sum(dim, keepdim=True)
    # At x = 0 the root has no finite slope: keep its argument away from 0 and its result at 0.
    zero = powers == 0
    norm = torch.where(zero, 0.0, torch.where(zero, 1.0, powers).pow(1 / p) * scale)
    return norm if keepdim else norm.squeeze(dim)


def hadamard(x: Tensor, y: Tensor) -> Tensor:
    """(x ⊙ y)_i = x_i y_i, for tensors of one shape."""
    if x.shape != y.shape:
        raise InputError(
            f"hadamard of shapes {tuple(x.shape)} and {tuple(y.shape)}",
            expected="two tensors of the same shape",
            fix="expand one of them first if each row should be multiplied alike",
        )
    return x * y


def log_base(x: Tensor, base: float) -> Tensor:
    """log_b x = ln x / ln b, for b > 0 and b ≠ 1."""
    if not base > 0 or base == 1:
        raise InputError(
            f"a logarithm to base {base}",
            expected="a base above 0 other than 1",
            fix="choose another base: every power of 1 is 1, and powers of a base ≤ 0 are not all real",
        )
    return torch.log(x) / math.log(base)


# Rules of differentiation: from functions and their derivatives to the derivative of a combination ------


def power_rule(exponent: float) -> Function:
    """(xⁿ)' = n xⁿ⁻¹."""
    return lambda x: exponent * x.pow(exponent - 1) if exponent else torch.zeros_like(x)


def exponential_rule(base: float = math.e) -> Function:
    """(bˣ)' = bˣ ln b."""
    return lambda x: torch.exp(x * math.log(base)) * math.log(base)


def logarithm_rule(base: float = math.e) -> Function:
    """(log_b x)' = 1 / (x ln b)."""
    return lambda x: 1 / (x * math.log(base))


def product_rule(f: Function, df: Function, g: Function, dg: Function) -> Function:
    """(fg)' = f'g + fg'."""
    return lambda x: df(x) * g(x) + f(x) * dg(x)


def quotient_rule(f: Function, df: Function, g: Function, dg: Function) -> Function:
    """(f/g)' = (f'g − fg') / g²."""
    return lambda x: (df(x) * g(x) - f(x) * dg(x)) / g(x).square()


def chain_rule(df: Function, g: Function, dg: Function) -> Function:
    """(f∘g)'(x) = f'(g(x)) g'(x) for functions of one number."""
    return lambda x: df(g(x)) * dg(x)


def jacobian_chain_rule(df: Function, g: Function, dg: Function) -> Function:
    """J_{f∘g}(x) = J_f(g(x)) J_g(x) for functions of vectors; `df` and `dg` give Jacobian matrices."""
    return lambda x: df(g(x)) @ dg(x)


# Convolution ----------------------------------------------------------------------------------


def convolve(f: Tensor, g: Tensor) -> Tensor:
    """(f ∗ g)_t = Σ_s f_s g_{t−s} along the last dimension, at full length len(f) + len(g) − 1.

    Leading dimensions must be equal or missing in one of the two.
    """
    if not f.dim() or not g.dim() or not f.shape[-1] or not g.shape[-1]:
        raise InputError(
            f"convolve of shapes {tuple(f.shape)} and {tuple(g.shape)}",
            expected="two signals of at least one value",
            fix="give vectors, or batches of vectors",
        )
    lead = torch.broadcast_shapes(f.shape[:-1], g.shape[:-1])
    f, g = f.expand(*lead, -1), g.expand(*lead, -1)
    if f.shape[-1] < g.shape[-1]:  # the shorter one becomes the kernel
        f, g = g, f
    rows = lead.numel()
    # A grouped correlation with the flipped kernel: one group for each row of the batch.
    signal, kernel = f.reshape(1, rows, -1), g.flip(-1).reshape(rows, 1, -1)
    full = F.conv1d(signal, kernel, padding=g.shape[-1] - 1, groups=rows)
    return full.reshape(*lead, -1)


def difference(f: Tensor) -> Tensor:
    """(Df)_t = f_t − f_{t−1} with f = 0 outside: the discrete derivative, one value longer than f."""
    return F.pad(f, (0, 1)) - F.pad(f, (1, 0))


def convolved_difference(f: Tensor, g: Tensor) -> Tensor:
    """D(f ∗ g) = (Df) ∗ g = f ∗ (Dg): convolution is linear, so the derivative falls on either one."""
    return convolve(difference(f), g)


# The curse of dimensionality ------------------------------------------------------------------


def points_for_resolution(dimensions: int, spacing: float) -> int:
    """⌈1/h⌉^D: the grid points that leave cells of side h or less in the unit cube."""
    if dimensions < 1 or not 0 < spacing <= 1:
        raise InputError(
            f"points_for_resolution of {dimensions} dimensions with spacing {spacing}",
            expected="at least 1 dimension and a spacing in (0, 1]",
            fix="measure the spacing as a fraction of the cube's side",
        )
    # 1/0.1 must count as 10 cells and not as 11 where division rounds up.
    return math.ceil(1 / spacing - 1e-9) ** dimensions


def squared_distance_spread(dimensions: int) -> float:
    """Standard deviation over mean of ‖x − y‖² for x, y uniform in the unit cube: √(7/(5D)).

    One coordinate's (x−y)² has mean 1/6 and variance 1/15 − 1/36 = 7/180; coordinates are independent, so
    means and variances add, and the ratio falls as 1/√D: all points become about equally far away.
    """
    if dimensions < 1:
        raise InputError(f"{dimensions} dimensions", expected="at least 1", fix="give a positive number")
    return math.sqrt(7 / (5 * dimensions))


def simulated_distance_spread(
    dimensions: int,
    pairs: int = 10_000,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The same ratio measured on random pairs of points."""
    shape = (2, pairs, dimensions)
    x, y = torch.rand(shape, generator=generator, dtype=dtype, device=device)
    distances = (x - y).square().sum(-1)
    return distances.std() / distances.mean()
