"""Variational inference with a diagonal Gaussian q(z | x) = N(μ, diag σ²) and the prior p(z) = N(0, I).

    log p(x) ≥ E_q[log p(x | z)] − KL(q ‖ p) = ELBO

q is given by its mean μ and by log σ, which may be any number. The last functions draw noise that depends on
a row's own number alone, so that a judgement does not depend on who is judged beside it.

B rows, M samples of each row's code, d latent dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import InputError

LOG_TWO_PI = math.log(2 * math.pi)


# The approximate posterior ----------------------------------------------------------------------


def reparameterise(mean: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """z = μ + σ ⊙ ε: a draw from q where ε ~ N(0, I), differentiable in μ and log σ.

    μ and log σ (B, d) with ε (B, d) or (M, B, d) give codes of the shape of ε.
    """
    return mean + log_std.exp() * noise


def latent_kl_by_dimension(mean: Tensor, log_std: Tensor) -> Tensor:
    """½(μ² + σ² − 2 log σ − 1) ≥ 0 for each dimension; their sum is `latent_kl`."""
    # σ² − 1 as expm1, which keeps its digits where σ is close to 1 and the divergence close to 0.
    return 0.5 * (mean.square() + torch.expm1(2 * log_std)) - log_std


def latent_kl(mean: Tensor, log_std: Tensor) -> Tensor:
    """KL(N(μ, diag σ²) ‖ N(0, I)) = ½(‖μ‖² + ‖σ‖² − 2⟨log σ, 1⟩ − d), for each row."""
    _check_posterior("latent_kl", mean, log_std)
    return latent_kl_by_dimension(mean, log_std).sum(-1)


def diagonal_normal_log_density(z: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log N(z | μ, diag σ²) = −½(‖(z − μ)/σ‖² + d log 2π) − ⟨log σ, 1⟩, summed over the last dimension."""
    standard = (z - mean) * torch.exp(-log_std)
    return (-0.5 * (standard.square() + LOG_TWO_PI) - log_std).sum(-1)


# Decoders ---------------------------------------------------------------------------------------


def bernoulli_log_likelihood(logits: Tensor, target: Tensor) -> Tensor:
    """log p(x | z) = Σ x·a − softplus(a), each x being 1 with probability sigmoid(a).

    Targets (B, …) and logits (B, …) or (M, B, …) give (B,) or (M, B). For grey x in (0, 1) this is the
    usual cross-entropy, which is no likelihood of them.
    """
    _check_decoded("bernoulli_log_likelihood", logits, target)
    each = target * logits - torch.nn.functional.softplus(logits)
    return _sum_sample(each, target)


def gaussian_log_likelihood(mean: Tensor, target: Tensor, log_std: Tensor | float = 0.0) -> Tensor:
    """log p(x | z) = −½Σ((x − m)²/s² + log 2πs²), for shapes as above; log s is a number, or one each."""
    _check_decoded("gaussian_log_likelihood", mean, target)
    log_std = torch.as_tensor(log_std, dtype=mean.dtype, device=mean.device)
    standard = (target - mean) * torch.exp(-log_std)
    return _sum_sample(-0.5 * (standard.square() + LOG_TWO_PI) - log_std, target)


# Bounds -----------------------------------------------------------------------------------------


def elbo(log_likelihood: Tensor, kl: Tensor) -> Tensor:
    """(1/M)Σ_m log p(x | z_m) − KL(q ‖ p), from log-likelihoods (M, B) of draws z_m ~ q and KL (B,)."""
    if log_likelihood.dim() != kl.dim() + 1 or log_likelihood.shape[1:] != kl.shape:
        raise InputError(
            f"elbo of log-likelihoods {tuple(log_likelihood.shape)} and divergences {tuple(kl.shape)}",
            expected="log-likelihoods (M, B) of M draws and divergences (B,)",
            fix="give a single draw a first dimension of 1",
        )
    return log_likelihood.mean(0) - kl


def log_importance_weights(log_likelihood: Tensor, z: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log w = log p(x | z) + log p(z) − log q(z | x), from log-likelihoods (M, B) of codes z (M, B, d)."""
    posterior = diagonal_normal_log_density(z, mean, log_std)
    prior = -0.5 * (z.square() + LOG_TWO_PI).sum(-1)
    return log_likelihood + prior - posterior


def importance_weighted_bound(log_weights: Tensor) -> Tensor:
    """log (1/M)Σ_m w_m from the logarithms (M, B) of importance weights.

    Its expectation is the ELBO for M = 1, never falls as M grows, and tends to log p(x).
    """
    return log_weights.logsumexp(0) - math.log(len(log_weights))


# Looking around ---------------------------------------------------------------------------------


def traversal(around: Tensor, dimensions: Sequence[int] | None, steps: int, span: float) -> Tensor:
    """(dimensions, steps, d): copies of the code `around` (d,) in which one dimension, all in turn where none
    are chosen, goes from −span to span."""
    if steps < 2:
        raise InputError(f"{steps} steps", expected="at least 2, from one end to the other")
    chosen = range(len(around)) if dimensions is None else dimensions
    codes = around.repeat(len(chosen), steps, 1)
    for place, dimension in enumerate(chosen):
        if not 0 <= dimension < len(around):
            raise InputError(f"the latent dimension {dimension}", expected=f"0 to {len(around) - 1}")
        codes[place, :, dimension] = torch.linspace(-span, span, steps)
    return codes


# Noise by row -----------------------------------------------------------------------------------


def row_uniform(rows: Tensor, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [0, 1) for row numbers (B,): (B, count), a pure function of row, place and seed.

    A hash takes the place of a generator, so that the same row has the same numbers in any batch and on any
    device.
    """
    places = torch.arange(count, device=rows.device)
    keys = _mix(rows.long() * _GOLDEN + _wrap(seed * 0x632BE59BD9B4E019))
    bits = _mix(keys[:, None] + (places + 1) * _GOLDEN)
    # 24 bits are what float32 has room for: 1 is never reached.
    return _shift(bits, 40).to(dtype) * 2.0**-24


def row_normal(rows: Tensor, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers for row numbers (B,): (B, count), likewise; by √(−2 log u) cos 2πv."""
    u, v = row_uniform(rows, 2 * count, seed, dtype).view(len(rows), count, 2).unbind(-1)
    return (-2 * torch.log1p(-u)).sqrt() * (2 * math.pi * v).cos()


def _wrap(number: int) -> int:
    """The 64 lowest bits as a signed integer, which is what tensors count in."""
    return (number + 2**63) % 2**64 - 2**63


_GOLDEN = _wrap(0x9E3779B97F4A7C15)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Zeros move in from the left, where integers of a tensor would repeat their sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers in which each bit depends on all others (splitmix64's finaliser)."""
    x = (x ^ _shift(x, 30)) * _wrap(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _wrap(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


# Checks -----------------------------------------------------------------------------------------


def _sum_sample(each: Tensor, target: Tensor) -> Tensor:
    """Over all dimensions of a sample: those after the first of the target."""
    return each.flatten(each.dim() - target.dim() + 1).sum(-1)


def _check_decoded(name: str, decoded: Tensor, target: Tensor) -> None:
    if target.dim() < 2 or decoded.shape[-target.dim() :] != target.shape:
        raise InputError(
            f"{name} of decoded numbers {tuple(decoded.shape)} and targets {tuple(target.shape)}",
            expected="targets (B, …), and decoded numbers of that shape or with M samples before it",
            fix="reshape one to the other's shape, for example decoded.view_as(target)",
        )


def _check_posterior(name: str, mean: Tensor, log_std: Tensor) -> None:
    if mean.shape != log_std.shape:
        raise InputError(
            f"{name} of means {tuple(mean.shape)} and log standard deviations {tuple(log_std.shape)}",
            expected="two tensors of the same shape (B, d)",
            fix="give both for each latent dimension",
        )
