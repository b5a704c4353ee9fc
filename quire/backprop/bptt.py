"""Backpropagation through time, for Elman's recurrent net.

    a_t = W_x x_t + W_h h_{t−1} + b,   h_t = σ(a_t)

    dh_t/dW = Σ_{k ≤ t} (Π_{j=k+1..t} ∂h_j/∂h_{j−1}) ∂h_k/∂W,   ∂h_j/∂h_{j−1} = diag(σ'(a_j)) W_h

where ∂h_k/∂W is the direct effect of W at step k, with h_{k−1} held fixed. Truncated to L steps, the sum
begins at k = t − L + 1; with L ≥ t it is the full gradient.

T steps, B sequences, D inputs, H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.backprop.engine import ActivationLike, as_activation
from quire.errors import InputError


@dataclass(frozen=True)
class Elman:
    """The weights of a recurrent net: W_x (H, D), W_h (H, H), b (H,), and an element-wise activation."""

    w_input: Tensor
    w_hidden: Tensor
    bias: Tensor
    activation: ActivationLike = "tanh"

    def __post_init__(self) -> None:
        hidden = self.w_hidden.shape[0]
        shapes = [tuple(part.shape) for part in (self.w_input, self.w_hidden, self.bias)]
        if self.w_hidden.shape != (hidden, hidden) or len(self.w_input) != hidden or len(self.bias) != hidden:
            raise InputError(
                f"W_x, W_h and b of shapes {shapes[0]}, {shapes[1]}, {shapes[2]}",
                expected="(H, D), (H, H) and (H,)",
            )
        activation = as_activation(self.activation)
        if activation.name in ("softmax", "log_softmax", "softmin"):
            raise InputError(
                f"activation '{activation.name}' in a recurrent net",
                expected="an element-wise activation such as tanh",
            )

    def run(self, x: Tensor, h0: Tensor | None = None) -> Trajectory:
        """All states for inputs x (T, …, D), starting from h0 (…, H) or from zero."""
        activation = as_activation(self.activation)
        h = x.new_zeros(*x.shape[1:-1], len(self.bias)) if h0 is None else h0
        states, slopes = [h], []
        for step in x:
            a = step @ self.w_input.t() + h @ self.w_hidden.t() + self.bias
            h = activation.function(a)
            states.append(h)
            slopes.append(activation.derivative(a))
        return Trajectory(x, torch.stack(states), torch.stack(slopes))


class Trajectory(NamedTuple):
    inputs: Tensor
    """x_1 … x_T, (T, …, D)."""
    states: Tensor
    """h_0 … h_T, (T + 1, …, H)."""
    slopes: Tensor
    """σ'(a_1) … σ'(a_T), (T, …, H)."""


class ElmanGradients(NamedTuple):
    w_input: Tensor
    w_hidden: Tensor
    bias: Tensor


def state_jacobian(cell: Elman, slope: Tensor) -> Tensor:
    """∂h_t/∂h_{t−1} = diag(σ'(a_t)) W_h, (H, H)."""
    return slope.unsqueeze(-1) * cell.w_hidden


def state_gradient(
    cell: Elman, x: Tensor, h0: Tensor | None = None, *, steps: int | None = None
) -> ElmanGradients:
    """dh_T/dW of one sequence x (T, D) as the sum of products of Jacobians.

    The first dimension of each result is that of h_T: (H, H, D), (H, H, H) and (H, H). `steps` is L;
    None takes all.
    """
    inputs, states, slopes = cell.run(x, h0)
    last = _check_steps(steps, len(x))
    product = torch.eye(len(cell.bias), dtype=x.dtype, device=x.device)  # ∂h_T/∂h_k
    w_input = x.new_zeros(*product.shape, x.shape[-1])
    w_hidden, bias = x.new_zeros(*product.shape, len(product)), torch.zeros_like(product)
    for k in range(len(x) - 1, len(x) - 1 - last, -1):
        # Unit i of h_k feels row i of W alone: ∂h_k[i]/∂W[i, j] = σ'(a_k)[i] · input[j].
        direct = product * slopes[k]
        bias += direct
        w_input += torch.einsum("mi,j->mij", direct, inputs[k])
        w_hidden += torch.einsum("mi,j->mij", direct, states[k])
        product = product @ state_jacobian(cell, slopes[k])
    return ElmanGradients(w_input, w_hidden, bias)


def bptt(
    cell: Elman,
    x: Tensor,
    state_gradients: Tensor,
    h0: Tensor | None = None,
    *,
    steps: int | None = None,
) -> ElmanGradients:
    """∂C/∂W for a cost with given ∂C/∂h_t, each sent back through at most `steps` = L steps.

    x (T, D) or (T, B, D); state_gradients (T, H) or (T, B, H) are the direct effects of h_t on C, as
    an output layer at each step gives them. Sums over the batch.
    """
    if state_gradients.shape != (*x.shape[:-1], len(cell.bias)):
        raise InputError(
            f"∂C/∂h of shape {tuple(state_gradients.shape)} for inputs of shape {tuple(x.shape)}",
            expected=f"shape {(*x.shape[:-1], len(cell.bias))}",
            fix="give zeros where a state has no effect on the cost",
        )
    inputs, states, slopes = cell.run(x, h0)
    total = [torch.zeros_like(part) for part in (cell.w_input, cell.w_hidden, cell.bias)]
    length = _check_steps(steps, len(x))
    # `flowing[t]` is what reaches the current k from the cost at t; all t go back together, one step at a
    # time, so that L passes of whole-sequence products suffice instead of T·L small ones.
    flowing = state_gradients
    for _ in range(length):  # entry i stands at k = i and comes from t = i + passes so far
        errors = flowing * slopes[: len(flowing)]
        flat = errors.reshape(-1, errors.shape[-1])
        total[0] += flat.t() @ inputs[: len(flowing)].reshape(len(flat), -1)
        total[1] += flat.t() @ states[: len(flowing)].reshape(len(flat), -1)
        total[2] += flat.sum(0)
        flowing = errors[1:] @ cell.w_hidden
    return ElmanGradients(*total)


def _check_steps(steps: int | None, length: int) -> int:
    if steps is not None and steps < 1:
        raise InputError(f"truncation to {steps} steps", expected="at least 1, or None for all")
    return length if steps is None else min(steps, length)
