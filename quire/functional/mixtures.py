"""Gaussian mixtures: p(x) = Σ_k π_k N(x; μ_k, Σ_k), and the sums that expectation-maximisation learns from.

N rows, D features, K components, … any leading dimensions (several starts at once).

Covariances have one of four shapes, and everything follows from the shape:

    full       (…, K, D, D)   a matrix for each component
    tied       (…, 1, D, D)   one matrix for all of them
    diag       (…, K, D)      a variance for each component and feature
    spherical  (…, K, 1)      a variance for each component

Sums are taken about a shift s, and the formulas below hold for any s. In exact arithmetic it does not matter;
in floating point Σ r xxᵀ − N μμᵀ loses all digits where ‖μ − s‖ is large beside the spread, so s is either
the mean of all rows or, for components that are small and far apart, each component's own last mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name

CovarianceType = Literal["full", "tied", "diag", "spherical"]
COVARIANCE_TYPES: tuple[str, ...] = get_args(CovarianceType)


class Mixture(NamedTuple):
    """The parameters of a mixture; covariances in one of the four shapes."""

    weights: Tensor
    """π (…, K), summing to 1."""
    means: Tensor
    """μ (…, K, D)"""
    covariances: Tensor
    """Σ, or variances"""
    factors: Tensor
    """C with CCᵀ = Σ⁻¹, upper triangular, or 1/σ: y = (x − μ)C is standard normal under N(μ, Σ)."""

    @property
    def matrices(self) -> bool:
        """Whether the covariances are matrices rather than variances."""
        return self.covariances.ndim == self.means.ndim + 1

    @property
    def apart(self) -> bool:
        """Whether every component has its own matrix, or every feature its own variance."""
        if self.matrices:
            return self.covariances.shape[-3] == self.means.shape[-2]
        return self.covariances.shape[-1] == self.means.shape[-1]

    def map(self, change: Callable[[Tensor], Tensor]) -> Mixture:
        """`change` of each tensor, such as a choice among several starts."""
        return Mixture(*(change(tensor) for tensor in self))


class Moments(NamedTuple):
    """Sums over rows, which add up over batches; about a shift that both sides know."""

    counts: Tensor
    """N_k = Σ_n r_nk, (…, K)"""
    first: Tensor
    """Σ_n r_nk (x_n − s_k), (…, K, D)"""
    second: Tensor
    """Σ_n r_nk (x_n − s_k)(x_n − s_k)ᵀ, in the shape of the covariances: summed over k where they are tied,
    the diagonal where they are variances, its trace where they are spherical."""


def covariance_shape(kind: str, components: int, features: int) -> tuple[int, ...]:
    """The shape of the covariances of one mixture."""
    shapes = {
        "full": (components, features, features),
        "tied": (1, features, features),
        "diag": (components, features),
        "spherical": (components, 1),
    }
    if kind not in shapes:
        raise unknown_name("covariance type", kind, shapes)
    return shapes[kind]


def mixture_parameter_count(kind: str, components: int, features: int) -> int:
    """Free numbers of a mixture: (K − 1) weights, KD means, and the covariances."""
    matrix = features * (features + 1) // 2
    free = {
        "full": components * matrix,
        "tied": matrix,
        "diag": components * features,
        "spherical": components,
    }
    if kind not in free:
        raise unknown_name("covariance type", kind, free)
    return components - 1 + components * features + free[kind]


def bayesian_information(log_likelihood: float, parameters: int, rows: int) -> float:
    """BIC = p·ln N − 2·ln L; the smaller, the better."""
    return parameters * math.log(rows) - 2 * log_likelihood


def akaike_information(log_likelihood: float, parameters: int) -> float:
    """AIC = 2p − 2·ln L; the smaller, the better."""
    return 2 * parameters - 2 * log_likelihood


def make_mixture(weights: Tensor, means: Tensor, covariances: Tensor) -> Mixture:
    """A mixture of these parameters; its factors are NaN where a covariance is not positive definite."""
    if covariances.ndim != means.ndim + 1:
        return Mixture(weights, means, covariances, covariances.rsqrt())
    lower, failed = torch.linalg.cholesky_ex(covariances)
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    factors = torch.linalg.solve_triangular(lower, unit, upper=False).mT
    return Mixture(weights, means, covariances, torch.where(failed[..., None, None] == 0, factors, torch.nan))


def log_constants(mixture: Mixture) -> Tensor:
    """ln π_k + ln |C_k| − ½ D ln 2π, (…, K): ln π_k N(x; μ_k, Σ_k) where x is the mean."""
    if mixture.matrices:
        determinants = mixture.factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    else:
        determinants = mixture.factors.log().expand_as(mixture.means).sum(-1)
    return mixture.weights.log() + determinants - 0.5 * math.log(2 * math.pi) * mixture.means.shape[-1]


def mixture_log_densities(x: Tensor, mixture: Mixture) -> Tensor:
    """ln π_k N(x_n; μ_k, Σ_k) = ln π_k + ln |C_k| − ½ D ln 2π − ½ ‖(x_n − μ_k)C_k‖², (…, N, K).

    Rows are (N, D). Differences are taken before the product, so nothing cancels wherever the components lie.
    """
    return (log_constants(mixture)[..., None] - 0.5 * _distances(x, mixture)[1]).mT


def _distances(x: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """x − μ_k (…, K, N, D), and ‖(x_n − μ_k)C_k‖² (…, K, N)."""
    apart = x - mixture.means[..., None, :]
    scaled = apart @ mixture.factors if mixture.matrices else apart * mixture.factors[..., None, :]
    return apart, scaled.square().sum(-1)


def mixture_responsibilities(log_densities: Tensor) -> tuple[Tensor, Tensor]:
    """r_nk = π_k N(x_n; μ_k, Σ_k) / p(x_n) (…, N, K), and ln p(x_n) (…, N), from ln π_k N (…, N, K)."""
    return log_densities.softmax(-1), log_densities.logsumexp(-1)


def mixture_moments(x: Tensor, responsibilities: Tensor, like: Mixture, shift: Tensor) -> Moments:
    """The sums of rows (N, D) with responsibilities (…, N, K) about `shift` (…, K, D) or (D,).

    `like` says in which of the four shapes.
    """
    shift = shift.expand_as(like.means)
    apart = x - shift[..., None, :]  # (…, K, N, D)
    return _moments(apart, responsibilities.mT, like)


def _moments(apart: Tensor, share: Tensor, like: Mixture) -> Moments:
    """As `mixture_moments`, of x − s_k (…, K, N, D) and rᵀ (…, K, N)."""
    weighted = apart * share[..., None]
    if like.matrices:
        second = weighted.mT @ apart
        second = second if like.apart else second.sum(-3, keepdim=True)
    else:
        second = (weighted * apart).sum(-2)
        second = second if like.apart else second.sum(-1, keepdim=True)
    return Moments(share.sum(-1), weighted.sum(-2), second)


def mixture_update(moments: Moments, like: Mixture, shift: Tensor, floor: Tensor | float = 0.0) -> Mixture:
    """The parameters that maximise the expected log-likelihood, given sums about `shift`:

        π_k = N_k / N,   μ_k = s + δ_k with δ_k = Σ_n r_nk (x_n − s) / N_k,
        Σ_k = Σ_n r_nk (x_n − s)(x_n − s)ᵀ / N_k − δ_k δ_kᵀ + floor

    Tied covariances are the mean of the Σ_k weighted by π_k, variances their diagonal, spherical ones its
    mean. `floor` is added to the covariances, (D, D), (D,) or a number: it keeps a component from collapsing
    onto a row.
    """
    if like.matrices and like.apart and _has_kernel(moments.counts, like.means):
        return _updated_by_kernel(moments, shift, floor)
    # Ten units in the last place of 1 keep an empty component finite: it stays at its shift.
    count = moments.counts + 10 * torch.finfo(moments.counts.dtype).eps
    delta = moments.first / count[..., None]
    if like.matrices:
        outer = delta[..., None] * delta[..., None, :]
        if like.apart:
            covariances = moments.second / count[..., None, None] - outer
        else:
            between = (count[..., None, None] * outer).sum(-3, keepdim=True)
            covariances = (moments.second - between) / count.sum(-1)[..., None, None, None]
    elif like.apart:
        covariances = moments.second / count[..., None] - delta.square()
    else:
        within = moments.second / count[..., None] - delta.square().sum(-1, keepdim=True)
        covariances = within / delta.shape[-1]
    return make_mixture(
        count / count.sum(-1, keepdim=True), shift.expand_as(delta) + delta, covariances + floor
    )


def _has_kernel(counts: Tensor, means: Tensor) -> bool:
    """Whether a GPU factorises all covariances in one kernel; PyTorch's calls take ten times as long."""
    from quire.kernels import refusal

    return counts.is_cuda and counts.dtype == torch.float64 and means.shape[-1] <= 64 and not refusal()


def _updated_by_kernel(moments: Moments, shift: Tensor, floor: Tensor | float) -> Mixture:
    from quire.kernels.mixture import renewed

    features = moments.first.shape[-1]
    if not isinstance(floor, Tensor) or floor.ndim != 2:
        floor = torch.as_tensor(floor, dtype=torch.float64).expand(features, features)
    shift = shift.expand_as(moments.first)
    counts, first, second, shift = (
        tensor.reshape(-1, *tensor.shape[moments.counts.ndim - 1 :]).contiguous()
        for tensor in (*moments, shift)
    )
    out = renewed(counts, first, second, shift, floor.to(counts).contiguous())
    shapes = (moments.counts, moments.first, moments.second, moments.second)
    return Mixture(*(value.view_as(like) for value, like in zip(out, shapes, strict=True)))


def sample_mixture(
    mixture: Mixture, rows: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """`rows` draws of one mixture (N, D), and the component (N,) that each came from, in random order."""
    if mixture.weights.ndim != 1:
        raise InputError(
            f"weights of shape {tuple(mixture.weights.shape)}",
            expected="the weights (K,) of one mixture",
            fix="choose one of the starts",
        )
    device = mixture.means.device
    component = torch.multinomial(mixture.weights, rows, replacement=True, generator=generator)
    noise = torch.randn(
        rows, mixture.means.shape[-1], dtype=mixture.means.dtype, device=device, generator=generator
    )
    if not mixture.matrices:
        spread = mixture.covariances.sqrt().expand_as(mixture.means)
        return mixture.means[component] + noise * spread[component], component
    lower = torch.linalg.cholesky(mixture.covariances)
    out = torch.empty_like(noise)
    # A component at a time: gathering a matrix for each row would take D times the memory of the rows.
    for k in range(len(mixture.weights)):
        chosen = component == k
        out[chosen] = mixture.means[k] + noise[chosen] @ lower[min(k, len(lower) - 1)].mT
    return out, component
