"""What keeps autoencoders from learning to copy: penalties of the code, and damage to the input.

    sparse         ‖x − x̂‖² + λ Σ_i |h_i|
    contractive    ‖x − x̂‖² + λ Σ_i ‖∇_x h_i‖²
    denoising      ‖x − x̂‖²             with x̂ from a damaged x
    masked         Σ_{d hidden} (x_d − x̂_d)²   with x̂ from what is not hidden

Contractive: S. Rifai et al. (2011). Denoising: P. Vincent et al. (2008).

B rows, D features, K numbers of a code h, C channels, H height, W width, p pixels along the side of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name
from quire.functional.activations import ACTIVATIONS
from quire.functional.regularise import check_rate, gaussian_noise, random_mask

Corruption = Literal["gaussian", "masking", "salt_and_pepper"]
CORRUPTIONS = get_args(Corruption)

MOST_GRADIENTS = 2**24
"""Numbers of ∇_x h that are computed at once."""


# Penalties of the code ------------------------------------------------------------------------


def code_sparsity(codes: Tensor) -> Tensor:
    """Σ_i |h_i| of each row: (B, K) → (B,)."""
    return codes.abs().flatten(1).sum(1)


def laplace_nll(codes: Tensor, strength: float = 1.0) -> Tensor:
    """−log p(h) for p(h) = Π_i (λ/2) e^(−λ|h_i|), of each row: λ Σ_i |h_i| − K log(λ/2).

    The last part does not depend on h: beside a squared error, the L1 penalty of strength λ is this prior.
    """
    if not strength > 0:
        raise InputError(f"a Laplace prior of strength {strength!r}", expected="a number > 0")
    return strength * code_sparsity(codes) - codes[0].numel() * math.log(strength / 2)


def contractive_layer(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Σ_i ‖∇_x h_i‖² of each row for one layer h = f(Wx + b), in closed form: Σ_i f′(a_i)² ‖W_i‖².

    (B, D) → (B,); the Jacobian is never formed.
    """
    slopes = ACTIVATIONS[activation].derivative(torch.nn.functional.linear(inputs, weight, bias))
    return slopes.square() @ weight.square().sum(1)


def contractive_penalty(encode: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Σ_i ‖∇_x h_i‖² of each row for any encoder (B, …) → (B, K) whose rows do not look at each other.

    Exact: one backward for each number of the code. Its own gradient reaches the encoder's parameters.
    """
    codes, pull_back, *_ = torch.func.vjp(encode, inputs)
    if codes.dim() != 2:
        raise InputError(
            f"codes of shape {tuple(codes.shape)}",
            expected="one vector for each row, (B, K)",
            fix="flatten what the encoder gives",
        )

    def squared_gradient(direction: Tensor) -> Tensor:
        (gradient,) = pull_back(direction.expand_as(codes))
        squared: Tensor = gradient.square().flatten(1).sum(1)
        return squared

    directions = torch.eye(codes.shape[1], dtype=codes.dtype, device=codes.device)
    at_once = max(1, MOST_GRADIENTS // max(inputs.numel(), 1))
    return torch.func.vmap(squared_gradient, chunk_size=at_once)(directions).sum(0)


# Damage to the input --------------------------------------------------------------------------


def masking_noise(x: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """Each number set to 0 with probability `rate`, independently; the others stay as they are."""
    check_rate(rate, "share to mask", allow_one=True)
    return torch.where(_uniform(x, generator) < rate, torch.zeros((), dtype=x.dtype, device=x.device), x)


def salt_and_pepper(
    x: Tensor,
    rate: float,
    low: float | Tensor = 0.0,
    high: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Each number set to `low` or to `high`, with probability rate/2 each; both broadcast to x."""
    check_rate(rate, "share to replace", allow_one=True)
    lot = _uniform(x, generator)
    low, high = (torch.as_tensor(end, dtype=x.dtype, device=x.device) for end in (low, high))
    return torch.where(lot < rate / 2, low, torch.where(lot < rate, high, x))


def corrupt(
    x: Tensor,
    kind: Corruption,
    amount: float,
    low: float | Tensor = 0.0,
    high: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """x damaged by noise of one `kind`; `amount` is the deviation of Gaussian noise, and the share of numbers
    that the other two replace. `low` and `high` are pepper and salt."""
    if kind == "gaussian":
        return gaussian_noise(x, amount, generator)
    if kind == "masking":
        return masking_noise(x, amount, generator)
    if kind == "salt_and_pepper":
        return salt_and_pepper(x, amount, low, high, generator)
    raise unknown_name("kind of noise", kind, CORRUPTIONS)


def hide_places(
    rows: int,
    shape: Sequence[int],
    share: float,
    patch: int = 1,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which places of each row are hidden: (B, D) for features, (B, 1, H, W) for images in whole patches.

    Every row hides ⌊share·n + ½⌋ of its n features or patches of p×p pixels. Where p does not divide the
    side, the last patches are cut off by the border. All channels of a pixel are hidden together.
    """
    if len(shape) == 1:
        return random_mask((rows, *shape), share, generator, device)
    _, height, width = shape
    down, across = (math.ceil(side / patch) for side in (height, width))
    chosen = random_mask((rows, down * across), share, generator, device).view(rows, 1, down, across)
    enlarged = chosen.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
    return enlarged[:, :, :height, :width]


def _uniform(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """In [0, 1), at least in float32: bfloat16 has too few numbers there for a share to be kept."""
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    return torch.rand(x.shape, generator=generator, device=x.device, dtype=dtype)
