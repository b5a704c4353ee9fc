"""Two players: a discriminator D that tells samples from data, a generator G that makes samples.

    V(D, G) = E_data[log D(x)] + E_z[log(1 − D(G(z)))],   D maximises, G minimises

Losses take logits a with D = sigmoid(a), so that no logarithm of a rounded probability is ever taken. Sums
add up over parts of a batch. Distributions are tables along the last dimension, as in `probability`.

N samples, D features, K directions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import InputError, unknown_name
from quire.functional.probability import js_divergence


def discriminator_loss(real: Tensor, fake: Tensor, *, reduction: str = "mean") -> Tensor:
    """J_D = −Σ log D(x) − Σ log(1 − D(G(z))) of logits of the data and of samples.

    The mean is over each of the two by itself; 2 log 2 where D cannot tell them apart.
    """
    return _reduced(F.softplus(-_wide(real)), reduction) + _reduced(F.softplus(_wide(fake)), reduction)


def minimax_generator_loss(fake: Tensor, *, reduction: str = "mean") -> Tensor:
    """J_G = Σ log(1 − D(G(z))), the game's own; its slope −D(G(z)) fades where the discriminator is sure."""
    return _reduced(-F.softplus(_wide(fake)), reduction)


def non_saturating_generator_loss(fake: Tensor, *, reduction: str = "mean") -> Tensor:
    """J_G = −Σ log D(G(z)): the same equilibrium, with the slope D(G(z)) − 1 instead."""
    return _reduced(F.softplus(-_wide(fake)), reduction)


def discriminator_value(data: Tensor, model: Tensor, discriminator: Tensor) -> Tensor:
    """V = Σ p_data log D + Σ p_G log(1 − D) of distributions and the probabilities D of each outcome."""
    return (torch.xlogy(data, discriminator) + torch.special.xlog1py(model, -discriminator)).sum(-1)


def optimal_discriminator(data: Tensor, model: Tensor) -> Tensor:
    """D*(x) = p_data(x) / (p_data(x) + p_G(x)); ½ where neither puts anything."""
    total = data + model
    nothing = total <= 0
    return torch.where(nothing, 0.5, data / torch.where(nothing, 1.0, total))


def value_at_optimum(data: Tensor, model: Tensor) -> Tensor:
    """max_D V = 2·JS(p_data, p_G) − 2 log 2, least where the two are equal."""
    return 2 * js_divergence(data, model) - 2 * math.log(2)


def random_directions(
    features: int, count: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`count` unit vectors (K, D), uniform on the sphere; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, features, generator=generator, dtype=torch.float64)).to(dtype)


def sliced_wasserstein(first: Tensor, second: Tensor, directions: Tensor | None = None) -> Tensor:
    """(mean_θ W₂²(⟨θ, x⟩, ⟨θ, y⟩))^½ of as many rows x as y, over directions θ (K, D).

    In one dimension the best plan pairs the sorted values: W₂² = mean_n (x_(n) − y_(n))². Rows (N, D) are
    projected first; without `directions` each column is taken as one projection.
    """
    if first.shape != second.shape or first.dim() != 2 or not len(first):
        raise InputError(
            f"sliced_wasserstein of rows {tuple(first.shape)} and {tuple(second.shape)}",
            expected="two tensors of the same shape (N, D)",
            fix="draw as many samples as there are rows, and flatten each",
        )
    if directions is not None:
        first, second = first @ directions.mT, second @ directions.mT
    return (first.sort(0).values - second.sort(0).values).square().mean().sqrt()


def _wide(logits: Tensor) -> Tensor:
    """Half precision has too few digits for a sum over a batch."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _reduced(values: Tensor, reduction: str) -> Tensor:
    if reduction == "sum":
        return values.sum()
    if reduction == "mean":
        return values.mean()
    raise unknown_name("reduction", reduction, ("sum", "mean"))
