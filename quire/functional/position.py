"""Positions for models that do not see order by themselves.

T places, E width (even), i = 0 … E/2 − 1 the waves.

    w_i = base^(−2i/E),   r_n = (sin w_0 n, cos w_0 n, sin w_1 n, cos w_1 n, …)

All parts are in [−1, 1] for any n. r_n·r_m = Σ_i cos(w_i (n − m)) knows the distance alone, and r_{n+k} is a
rotation M_k of r_n that is the same for every n.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError


def frequencies(size: int, base: float = 10_000.0, device: torch.device | None = None) -> Tensor:
    """w_i = base^(−2i/E), (E/2,) in float64: from 1 down towards 1/base."""
    if size < 2 or size % 2:
        raise InputError(
            f"sinusoidal positions of width {size}",
            expected="an even number of at least 2: a sine and a cosine for each wave",
            fix=f"use a width of {max(2, size + size % 2)}",
        )
    if not base > 0:
        raise InputError(f"a base of {base!r}", expected="a number > 0")
    return base ** (-torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)


def sinusoidal(
    positions: int | Tensor, size: int, base: float = 10_000.0, *, dtype: torch.dtype | None = None
) -> Tensor:
    """r_n for places 0 … T − 1, or for any tensor of places (…), fractions and negatives too: (…, E).

    Angles are taken in float64: in float32 the angle at place 100,000 is already off by 0.004.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions)
    angles = positions.double()[..., None] * frequencies(size, base, positions.device)
    waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)
    return waves.to(torch.get_default_dtype() if dtype is None else dtype)


def relative_dot_product(distance: Tensor, size: int, base: float = 10_000.0) -> Tensor:
    """r_n·r_m = Σ_i cos(w_i (n − m)) for distances n − m of any shape, in float64."""
    return (distance.double()[..., None] * frequencies(size, base, distance.device)).cos().sum(-1)


def shift_matrix(shift: float, size: int, base: float = 10_000.0) -> Tensor:
    """M_k (E, E) with r_{n+k} = M_k r_n for every n: a rotation by w_i k in the plane of each wave."""
    angles = frequencies(size, base) * shift
    sine, cosine = angles.sin(), angles.cos()
    rotations = torch.stack([torch.stack([cosine, sine], -1), torch.stack([-sine, cosine], -1)], -2)
    return torch.block_diag(*rotations)


def concatenate_project(x: Tensor, position: Tensor, weight: Tensor) -> Tensor:
    """W (x, r) = W_x x + W_r r: (…, E), (…, P), (O, E + P) → (…, O), without the concatenation.

    So adding positions to embeddings loses nothing that concatenating them would have given, as long
    as a projection follows and E + P directions fit in the width.
    """
    width = x.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width + position.shape[-1]:
        raise InputError(
            f"a projection of shape {tuple(weight.shape)} for widths {width} and {position.shape[-1]}",
            expected=f"(O, {width + position.shape[-1]})",
        )
    return functional.linear(x, weight[:, :width]) + functional.linear(position, weight[:, width:])
