"""Initial weights that keep the signal's size, and the tools to see whether they do.

D_in and D_out are the numbers of inputs and outputs of a layer, W is (D_out, D_in, …) as in
`nn.Linear` and `nn.Conv2d`, where D_in counts the receptive field too. All fill `weight` in place
and return it, as `torch.nn.init` does.

He: K. He et al., Delving deep into rectifiers (2015). Xavier: X. Glorot and Y. Bengio (2010).
Orthogonal: A. Saxe et al. (2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name
from quire.functional.activations import ACTIVATIONS, Activation

Distribution = Literal["normal", "uniform"]

# Slope of the negative half of the leaky ReLU, as in torch.nn.LeakyReLU.
LEAKY_SLOPE = 0.01

_RECTIFIERS = frozenset({"relu", "leaky_relu", "relu6", "softplus"})


def fans(weight: Tensor) -> tuple[int, int]:
    """D_in and D_out of a weight (D_out, D_in, …); the window of a convolution counts in both."""
    if weight.dim() < 2:
        raise InputError(
            f"a weight of shape {tuple(weight.shape)}",
            expected="at least two dimensions (D_out, D_in, …)",
            fix="initialise biases and gains with zeros_ and ones_",
        )
    window = math.prod(weight.shape[2:])
    return weight.shape[1] * window, weight.shape[0] * window


def _fill(weight: Tensor, variance: float, distribution: str, generator: torch.Generator | None) -> Tensor:
    """Zero mean and the given variance: N(0, σ²), or U(−√3σ, √3σ)."""
    deviation = math.sqrt(variance)
    with torch.no_grad():
        if distribution == "normal":
            return weight.normal_(0.0, deviation, generator=generator)
        if distribution == "uniform":
            bound = math.sqrt(3.0) * deviation
            return weight.uniform_(-bound, bound, generator=generator)
    raise unknown_name("distribution", distribution, ("normal", "uniform"))


def he_(
    weight: Tensor,
    *,
    slope: float = 0.0,
    distribution: Distribution = "normal",
    generator: torch.Generator | None = None,
) -> Tensor:
    """σ² = 2 / ((1 + slope²) D_in), for ReLU (slope 0) and leaky ReLU."""
    return _fill(weight, 2.0 / ((1.0 + slope**2) * fans(weight)[0]), distribution, generator)


def xavier_(
    weight: Tensor,
    *,
    gain: float = 1.0,
    distribution: Distribution = "normal",
    generator: torch.Generator | None = None,
) -> Tensor:
    """σ² = gain² · 2 / (D_in + D_out), for activations with slope 1 around zero."""
    return _fill(weight, gain**2 * 2.0 / sum(fans(weight)), distribution, generator)


def orthogonal_(weight: Tensor, *, gain: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """W Wᵀ = gain² I or Wᵀ W = gain² I, whichever is the smaller; uniform over such matrices."""
    if weight.dim() < 2:
        fans(weight)
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    # QR has no half-precision kernel, and float32 is enough for every narrower type.
    dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
    start = weight.new_empty(max(rows, columns), min(rows, columns), dtype=dtype)
    with torch.no_grad():
        q, r = torch.linalg.qr(start.normal_(generator=generator))
        # Householder's choice of signs is not uniform; making R's diagonal positive repairs it.
        q = q * r.diagonal().sign()
        matrix = q.t() if rows < columns else q
        return weight.copy_((gain * matrix).reshape(weight.shape))


def gain(activation: str, *, direction: Literal["forward", "backward"] = "forward") -> float:
    """1/√E[φ(a)²] (forward) or 1/√E[φ′(a)²] (backward) for a ~ N(0, 1).

    W ~ N(0, gain²/D_in) keeps E[a²] = 1 from layer to layer; with the backward gain and D_out in
    the place of D_in it keeps the gradient's size. Both are √2 for ReLU, so it alone keeps both
    at once; for saturating activations the two differ and no weight variance keeps both for ever.
    """
    function = _elementwise(activation).function
    # Midpoint rule on ±12 deviations; float64 and smooth tails make it exact to about 1e-8, and
    # an even number of cells puts the kink of the rectifiers between two of them.
    cells = 24_000
    a = (torch.arange(cells, dtype=torch.float64) + 0.5) * (24.0 / cells) - 12.0
    density = torch.exp(-0.5 * a.square()) * (24.0 / cells / math.sqrt(2.0 * math.pi))
    if direction == "forward":
        values = function(a)
    elif direction == "backward":
        values = _elementwise(activation).derivative(a)
    else:
        raise unknown_name("direction", direction, ("forward", "backward"))
    return 1.0 / math.sqrt((values.square() * density).sum().item())


def initialise_(weight: Tensor, activation: str, generator: torch.Generator | None = None) -> Tensor:
    """The usual choice for a layer that feeds `activation`: He for rectifiers, Xavier for the others."""
    if _elementwise(activation).name in _RECTIFIERS:
        slope = LEAKY_SLOPE if activation == "leaky_relu" else 0.0
        return he_(weight, slope=slope, generator=generator)
    return xavier_(weight, generator=generator)


def _elementwise(activation: str) -> Activation:
    found = ACTIVATIONS[activation]
    if not found.elementwise:
        choices = [name for name, one in ACTIVATIONS.items() if one.elementwise]
        raise unknown_name("element-wise activation", activation, choices)
    return found


class SignalSizes(NamedTuple):
    """Mean squares by layer: of the pre-activations a^l, and of the gradients ∂(v·a^L)/∂a^l."""

    forward: Tensor
    backward: Tensor


def variance_by_layer(
    weights: Sequence[Tensor], activation: str, inputs: Tensor, generator: torch.Generator | None = None
) -> SignalSizes:
    """Propagate `inputs` (N, D_0) through a^l = W^l φ(a^{l−1}), a^1 = W^1 x, and a random v ~ N(0, I)
    back from a^L; mean squares of signal and gradient at each a^l, each (L,)."""
    function = _elementwise(activation).function
    with torch.enable_grad():
        layers: list[Tensor] = []
        z = inputs.detach()
        for weight in weights:
            layers.append((z @ weight.detach().t()).requires_grad_())
            z = function(layers[-1])
        direction = torch.empty_like(layers[-1]).normal_(generator=generator)
        gradients = torch.autograd.grad(layers[-1], layers, direction)
    mean_squares = [layer.detach().square().mean() for layer in layers]
    return SignalSizes(torch.stack(mean_squares), torch.stack([g.square().mean() for g in gradients]))


def recurrent_growth(weight: Tensor, steps: int, start: Tensor) -> Tensor:
    """‖h_t‖ / ‖h_0‖ for h_t = W h_{t−1}, t = 0 … steps; `start` is (D,) and W is (D, D).

    ‖h_t‖ ≤ s_max^t ‖h_0‖: below 1 it must vanish; for an orthogonal W times g it is exactly g^t.
    """
    states = [start]
    for _ in range(steps):
        states.append(weight @ states[-1])
    return torch.stack(states).norm(dim=1) / start.norm()
