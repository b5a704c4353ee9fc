"""Activations and their derivatives in closed form.

a pre-activation, z = f(a) activation, g gradient with respect to z.

An element-wise activation has a derivative f'(a) of the shape of a. Softmax and its relatives mix the
entries of a vector, so their derivative is a Jacobian J; what is needed of it is Jᵀg, and J itself is
never formed. `Activation.pull_back` gives Jᵀg for both kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import InputError
from quire.registry import Registry

# Beyond β·a = 40 softplus equals a to the last bit of float64; PyTorch's own 20 is right for float32 only.
SOFTPLUS_THRESHOLD = 40.0


def linear(a: Tensor) -> Tensor:
    """f(a) = a."""
    return a


def linear_derivative(a: Tensor) -> Tensor:
    """f'(a) = 1."""
    return torch.ones_like(a)


def sigmoid(a: Tensor) -> Tensor:
    """σ(a) = 1 / (1 + e^(−a))."""
    return torch.sigmoid(a)


def sigmoid_derivative(a: Tensor) -> Tensor:
    """σ'(a) = σ(a) σ(−a), which unlike σ(1−σ) keeps its digits where σ rounds to 1."""
    return torch.sigmoid(a) * torch.sigmoid(-a)


def arctan(a: Tensor) -> Tensor:
    """f(a) = arctan a, in (−π/2, π/2)."""
    return torch.atan(a)


def arctan_derivative(a: Tensor) -> Tensor:
    """f'(a) = 1 / (1 + a²)."""
    return 1 / (1 + a * a)


def tanh(a: Tensor) -> Tensor:
    """tanh a; `tanh_from_exponentials` and `tanh_from_sigmoid` are its two printed forms."""
    return torch.tanh(a)


def tanh_from_exponentials(a: Tensor) -> Tensor:
    """tanh a = (e^a − e^(−a)) / (e^a + e^(−a))."""
    # Both exponentials are scaled by e^(−|a|), which cancels in the fraction and keeps them in (0, 1];
    # as a constant it leaves the gradient as it is.
    shift = a.detach().abs()
    rising, falling = torch.exp(a - shift), torch.exp(-a - shift)
    return (rising - falling) / (rising + falling)


def tanh_from_sigmoid(a: Tensor) -> Tensor:
    """tanh a = 2σ(2a) − 1."""
    return 2 * torch.sigmoid(2 * a) - 1


def tanh_derivative(a: Tensor) -> Tensor:
    """tanh'(a) = 1 − tanh² a = 4σ(2a)σ(−2a), the second form being exact where tanh rounds to ±1."""
    return 4 * sigmoid_derivative(2 * a)


def relu(a: Tensor) -> Tensor:
    """f(a) = max(0, a)."""
    return torch.relu(a)


def relu_derivative(a: Tensor) -> Tensor:
    """f'(a) = 1 for a > 0, else 0; at 0 it is 0 by convention."""
    return (a > 0).to(a.dtype)


def leaky_relu(a: Tensor, negative_slope: float = 0.01) -> Tensor:
    """f(a) = a for a > 0, else αa."""
    return F.leaky_relu(a, negative_slope)


def leaky_relu_derivative(a: Tensor, negative_slope: float = 0.01) -> Tensor:
    """f'(a) = 1 for a > 0, else α."""
    return torch.full_like(a, negative_slope).masked_fill_(a > 0, 1.0)


def relu6(a: Tensor) -> Tensor:
    """f(a) = min(max(0, a), 6)."""
    return F.relu6(a)


def relu6_derivative(a: Tensor) -> Tensor:
    """f'(a) = 1 for 0 < a < 6, else 0."""
    return ((a > 0) & (a < 6)).to(a.dtype)


def softplus(a: Tensor, beta: float = 1.0) -> Tensor:
    """f(a) = log(1 + e^(βa)) / β."""
    if beta <= 0:
        raise InputError(f"softplus with beta={beta}", expected="beta > 0", fix="give a positive beta")
    return F.softplus(a, beta, SOFTPLUS_THRESHOLD)


def softplus_derivative(a: Tensor, beta: float = 1.0) -> Tensor:
    """f'(a) = σ(βa)."""
    return torch.sigmoid(beta * a)


def log_sigmoid(a: Tensor) -> Tensor:
    """f(a) = log σ(a) = −log(1 + e^(−a))."""
    return F.logsigmoid(a)


def log_sigmoid_derivative(a: Tensor) -> Tensor:
    """f'(a) = σ(−a)."""
    return torch.sigmoid(-a)


def softmax(a: Tensor, dim: int = -1) -> Tensor:
    """softmax(a)_i = e^(a_i) / Σ_j e^(a_j)."""
    return torch.softmax(a, dim)


def softmax_pull_back(a: Tensor, gradient: Tensor, dim: int = -1) -> Tensor:
    """Jᵀg with J = diag(z) − zzᵀ: z ⊙ (g − Σ_j g_j z_j)."""
    z = torch.softmax(a, dim)
    return z * (gradient - (gradient * z).sum(dim, keepdim=True))


def log_softmax(a: Tensor, dim: int = -1) -> Tensor:
    """log_softmax(a)_i = a_i − log Σ_j e^(a_j)."""
    return torch.log_softmax(a, dim)


def log_softmax_pull_back(a: Tensor, gradient: Tensor, dim: int = -1) -> Tensor:
    """Jᵀg with J = I − 1·softmax(a)ᵀ: g − softmax(a) Σ_j g_j."""
    return gradient - torch.softmax(a, dim) * gradient.sum(dim, keepdim=True)


def softmin(a: Tensor, dim: int = -1) -> Tensor:
    """softmin(a)_i = e^(−a_i) / Σ_j e^(−a_j)."""
    return torch.softmax(-a, dim)


def softmin_pull_back(a: Tensor, gradient: Tensor, dim: int = -1) -> Tensor:
    """Jᵀg of softmax at −a, with the sign of the inner derivative."""
    return -softmax_pull_back(-a, gradient, dim)


@dataclass(frozen=True)
class Activation:
    """An activation with its derivative.

    ``derivative(a)`` is f'(a), element by element; ``derivative_from_output(z)`` is the same from z = f(a),
    where that is all a backward pass needs to keep. Activations that mix their inputs have a ``mixing``
    product Jᵀg instead, and their ``derivative`` refuses.
    """

    name: str
    function: Callable[..., Tensor]
    derivative: Callable[..., Tensor]
    derivative_from_output: Callable[[Tensor], Tensor] | None = None
    mixing: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def elementwise(self) -> bool:
        return self.mixing is None

    def pull_back(self, a: Tensor, gradient: Tensor) -> Tensor:
        """Gradient with respect to a from the one with respect to z: Jᵀg, which is f'(a) ⊙ g element-wise."""
        return self.derivative(a) * gradient if self.mixing is None else self.mixing(a, gradient)


ACTIVATIONS: Registry[Activation] = Registry("activation")


def _add(
    function: Callable[..., Tensor],
    derivative: Callable[..., Tensor],
    from_output: Callable[[Tensor], Tensor] | None = None,
) -> None:
    name = function.__name__
    ACTIVATIONS.register(name)(Activation(name, function, derivative, from_output))


def _add_mixing(function: Callable[..., Tensor], product: Callable[..., Tensor]) -> None:
    name = function.__name__

    def refuse(a: Tensor) -> Tensor:
        raise InputError(
            f"an element-wise derivative of {name}",
            expected="an activation that does not mix its inputs",
            fix=f"use ACTIVATIONS['{name}'].pull_back(a, gradient)",
        )

    ACTIVATIONS.register(name)(Activation(name, function, refuse, mixing=product))


_add(linear, linear_derivative, torch.ones_like)
_add(sigmoid, sigmoid_derivative, lambda z: z * (1 - z))
_add(tanh, tanh_derivative, lambda z: 1 - z * z)
_add(arctan, arctan_derivative)
_add(relu, relu_derivative, relu_derivative)
_add(leaky_relu, leaky_relu_derivative, leaky_relu_derivative)
_add(relu6, relu6_derivative, relu6_derivative)
_add(softplus, softplus_derivative, lambda z: -torch.expm1(-z))
_add(log_sigmoid, log_sigmoid_derivative, lambda z: -torch.expm1(z))
_add_mixing(softmax, softmax_pull_back)
_add_mixing(log_softmax, log_softmax_pull_back)
_add_mixing(softmin, softmin_pull_back)
