"""Formulas of dense layers and nets.

N rows, D features or units, K hidden layers, C classes, T temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.errors import InputError


def dense(z: Tensor, weight: Tensor, bias: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """σ(W z + b) for each row: z (N, D_in), W (D_out, D_in), b (D_out,) → (N, D_out)."""
    return activation(torch.nn.functional.linear(z, weight, bias))


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """z^0 = x, z^l = σ(W^l z^{l−1} + b^l), and the last layer without σ."""
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = dense(x, weight, bias, activation)
    return torch.nn.functional.linear(x, weights[-1], biases[-1])


def parameter_count(inputs: int, width: int, outputs: int, layers: int) -> int:
    """D₀D + D + (K−1)(D² + D) + D·D_L + D_L for K ≥ 1 hidden layers of width D; D₀D_L + D_L for K = 0.

    With one input and one output this is 3D + 1 + (K−1)D(D+1).
    """
    if layers < 0:
        raise InputError(f"{layers} hidden layers", expected="an integer >= 0", fix="set layers to 0 or more")
    if layers == 0:
        return inputs * outputs + outputs
    between = (layers - 1) * (width * width + width)
    return inputs * width + width + between + width * outputs + outputs


def scalar_parameter_count(width: int, layers: int) -> int:
    """3D + 1 + (K−1)D(D+1): the parameters of a net with one input, one output and K ≥ 1 layers of D."""
    if layers < 1:
        raise InputError(
            f"{layers} hidden layers", expected="an integer >= 1", fix="set layers to at least 1"
        )
    return 3 * width + 1 + (layers - 1) * width * (width + 1)


def one_hot(classes: Tensor, count: int) -> Tensor:
    """Class c as the unit vector e_c: integers (…) → (…, C), in the default floating type."""
    if classes.is_floating_point() or classes.is_complex():
        raise InputError(
            f"classes of type {classes.dtype}", expected="integers", fix="convert with classes.long()"
        )
    if classes.numel() and (classes.min() < 0 or classes.max() >= count):
        raise InputError(
            f"classes from {int(classes.min())} to {int(classes.max())}",
            expected=f"numbers from 0 to {count - 1}",
            fix=f"give a count above {int(classes.max())}, and no negative class",
        )
    units = torch.eye(count, device=classes.device)
    return units[classes.long()]


def from_one_hot(vectors: Tensor) -> Tensor:
    """The class whose unit vector a row is; of a row of scores, the class with the highest. (…, C) → (…)."""
    return vectors.argmax(dim=-1)


def temperature_softmax(logits: Tensor, temperature: float, dim: int = -1) -> Tensor:
    """softmax(a / T): T = 1 is the softmax, T → ∞ uniform, T → 0 all on the largest.

    T = 0 is the limit itself: equal shares on the largest logits.
    """
    if not temperature >= 0:
        raise InputError(
            f"temperature is {temperature!r}",
            expected="a number >= 0",
            fix="use 0 for arg max, 1 for softmax",
        )
    top = logits.amax(dim=dim, keepdim=True)
    if temperature == 0:
        hits = (logits == top).to(logits.dtype)
        return hits / hits.sum(dim=dim, keepdim=True)
    # Differences first: a / T may overflow where (a − max a) / T only runs to −∞, which softmax bears.
    return torch.softmax((logits - top) / temperature, dim=dim)


def permute_inputs(weight: Tensor, order: Tensor) -> Tensor:
    """First weights for inputs that come in another order: W′ x[order] = W x, with W′ = W[:, order]."""
    if sorted(order.tolist()) != list(range(weight.shape[1])):
        raise InputError(
            f"an order of {len(order)} numbers for {weight.shape[1]} inputs",
            expected=f"each of 0 … {weight.shape[1] - 1} once",
            fix="use torch.randperm(inputs)",
        )
    return weight[:, order]


def monotone_violation(
    model: Callable[[Tensor], Tensor], start: Tensor, feature: int, steps: Tensor
) -> Tensor:
    """How far a model with one output is from monotone in one input.

    `start` (D,) is moved along `feature` to the increasing values `steps` (S,). The result is the smaller
    of the total rise and the total fall of the output: 0 for every linear model, at least the height of
    the hump for one that fits it.
    """
    rows = start.repeat(len(steps), 1)
    rows[:, feature] = steps
    change = model(rows).reshape(len(steps)).diff()
    return torch.minimum(change.clamp(min=0).sum(), -change.clamp(max=0).sum())


def relu_basis_fit(x: Tensor, target: Tensor, width: int) -> Callable[[Tensor], Tensor]:
    """f(x) = w₀ + Σ_j w_j relu(x − k_j): a net with one input and `width` units, whose kinks k_j are spread
    evenly over the range of x from its left end on, and whose output weights are those of least squares.
    """
    left, right = x.min(), x.max()
    kinks = left + (right - left) * torch.arange(width, dtype=x.dtype, device=x.device) / width

    def units(points: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(points)[:, None], torch.relu(points[:, None] - kinks)], dim=1)

    solution = torch.linalg.lstsq(units(x), target[:, None]).solution

    def predict(points: Tensor) -> Tensor:
        return (units(points) @ solution).squeeze(1)

    return predict
