"""One sweep of expectation-maximisation: from rows and a mixture to the sums the next mixture is made of.

N rows, D features, K components, R starts at once, n rows of a chunk, P features φ.

A log-density is quadratic in x, so it is linear in the products of x's entries, and so are the sums:

    ln π_k N(x; μ_k, Σ_k) = Σ_p Θ_kp φ_p(x),    Σ_n r_nk φ_p(x_n) ∋ N_k, Σ r x, Σ r xxᵀ

    full       φ = x̂_i x̂_j for i ≤ j, x̂ = (x, 1)      spherical  φ = (‖x‖², x, 1)
    diag       φ = (x², x, 1)                          tied       φ = (x, 1); xᵀΣ⁻¹x is the same for all k

A sweep is then two matrix products over all components and starts, in chunks that stay in the cache. Its
terms cancel: they are about ‖μ_k C_k‖² while their sum is about D, so rows are first put into a `Frame` in
which all of them together have mean 0 and covariance 1. Where a component is so small and far off that this
does not help (`cancellation`), the differences x − μ_k are taken first. All of it is float64, whatever the
rows are: float32 would leave five digits of a likelihood, and fewer where components are narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.functional.mixture_chunks import (
    DIAG,
    FULL,
    SPHERICAL,
    TIED,
    fill,
    products_of,
    sweep_chunks,
    sweep_on_host,
)
from quire.functional.mixtures import (
    Mixture,
    Moments,
    _distances,
    _moments,
    log_constants,
    make_mixture,
)
from quire.functional.threads import share_rows
from quire.kernels import Backend, host, refusal, use_triton

# Products may be this many times larger than their sum: ten digits of it are left.
LARGEST_CANCELLATION = 2.0**20
# The Triton kernels subtract before they square, and cancel only in the sums, whose errors move the
# likelihood to second order.
KERNEL_CANCELLATION = 2.0**19
KERNEL_COMPONENTS, KERNEL_FEATURES = 128, 64  # what still fits into registers
# Numbers of φ in a chunk, by measurement: large enough for the products, small enough for the cache.
CHUNK_NUMBERS = {"cpu": 3 * 2**17, "cuda": 2**25}
ROWS_PER_THREAD = 2**12
# Chunks are a multiple of it: rows of φ a power of two apart would drive each other out of the cache,
# and products of this width take two thirds of the time of others.
ROWS_TOGETHER = 48


class Frame(NamedTuple):
    """An exact change of coordinates, x̃ = (x − m)W; a factor instead of W where variances are learned."""

    shift: Tensor
    """m (D,)"""
    scale: Tensor
    """W (D, D), or factors (D,) or (1,)"""
    back: Tensor
    """W⁻¹, likewise"""

    def enter(self, x: Tensor) -> Tensor:
        """Rows (N, D) in this frame."""
        apart = x - self.shift.to(x.dtype)
        scale = self.scale.to(x.dtype)
        return apart @ scale if scale.ndim == 2 else apart * scale

    def put(self, mixture: Mixture) -> Mixture:
        """A mixture of rows x as the mixture of rows x̃."""
        return _moved(mixture, mixture.means - self.shift, self.scale)

    def take(self, mixture: Mixture) -> Mixture:
        """A mixture of rows x̃ as the mixture of rows x."""
        moved = _moved(mixture, mixture.means, self.back)
        return moved._replace(means=moved.means + self.shift)

    def log_determinant(self) -> Tensor:
        """ln |W|: ln p(x) = ln p̃(x̃) + ln |W|."""
        if self.scale.ndim == 2:
            return self.scale.diagonal().log().sum()
        return self.scale.log().expand_as(self.shift).sum()

    def floor(self, floor: float) -> Tensor:
        """What adding `floor` to the variances of x adds to the covariances of x̃."""
        return floor * (self.scale.mT @ self.scale if self.scale.ndim == 2 else self.scale.square())


def _moved(mixture: Mixture, means: Tensor, scale: Tensor) -> Mixture:
    if scale.ndim == 2:
        covariances = scale.mT @ mixture.covariances @ scale
        # Rounding makes the two triangles differ in the last place.
        return make_mixture(mixture.weights, means @ scale, (covariances + covariances.mT) / 2)
    return make_mixture(mixture.weights, means * scale, mixture.covariances * scale.square())


def frame_of(mean: Tensor, covariance: Tensor, kind: str, floor: float = 0.0) -> Frame:
    """The frame in which rows of this mean (D,) and covariance (D, D) have mean 0 and covariance 1.

    Only as far as the kind of covariances allows: each feature is scaled for "diag", all alike for
    "spherical". m and W are rounded to float32 and W⁻¹ follows from the rounded W, so that rows of either
    precision are moved by the same numbers.
    """
    variance = covariance.diagonal()
    # Features that are constant or depend on each other have no inverse; any scale does for them.
    ridge = floor + 1e-10 * variance + (variance + floor == 0)
    shift = mean.float().to(mean.dtype)
    if kind in ("diag", "spherical"):
        spread = variance + ridge
        scale = (spread if kind == "diag" else spread.mean()[None]).rsqrt().float().to(mean.dtype)
        return Frame(shift, scale, 1 / scale)
    lower = torch.linalg.cholesky(covariance + ridge.diag())
    unit = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
    scale = torch.linalg.solve_triangular(lower, unit, upper=False).mT.float().to(mean.dtype)
    return Frame(shift, scale, torch.linalg.solve_triangular(scale, unit, upper=True))


def cancellation(mixture: Mixture) -> Tensor:
    """The largest ‖μ_k C_k‖²: how large the terms of Σ_p Θ_kp φ_p(x) are where the sum is about 1."""
    return _scaled_means(mixture).square().sum(-1).max()


def _scaled_means(mixture: Mixture) -> Tensor:
    """μ_k C_k, (…, K, D)."""
    if mixture.matrices:
        return (mixture.means[..., None, :] @ mixture.factors)[..., 0, :]
    return mixture.means * mixture.factors


def mixture_coefficients(mixture: Mixture) -> Tensor:
    """Θ (…, K, P): ln π_k N(x; μ_k, Σ_k) = Σ_p Θ_kp φ_p(x), less −½ xᵀΣ⁻¹x where the covariances are tied."""
    factors, scaled = mixture.factors, _scaled_means(mixture)
    constant = (log_constants(mixture) - 0.5 * scaled.square().sum(-1))[..., None]
    if not mixture.matrices:
        return torch.cat([-0.5 * factors.square(), factors * scaled, constant], -1)
    slope = (scaled[..., None, :] @ factors.mT)[..., 0, :]
    if not mixture.apart:
        return torch.cat([slope, constant], -1)
    features = slope.shape[-1]
    first, second = torch.triu_indices(features, features, device=slope.device)
    quadratic = (factors @ factors.mT)[..., first, second] * torch.where(first == second, -0.5, -1.0).to(
        slope
    )
    # Row i of the triangle of x̂x̂ᵀ ends with x_i·1, and the last row is 1·1.
    out = slope.new_empty(*constant.shape[:-1], len(first) + features + 1)
    where = _triangle(features, first, second)
    out[..., where] = quadratic
    out[..., _triangle(features, torch.arange(features, device=first.device), features)] = slope
    out[..., -1:] = constant
    return out


def _triangle(features: int, first: Tensor, second: Tensor | int) -> Tensor:
    """The place of the pair i ≤ j among the pairs of D + 1 numbers."""
    return first * (features + 1) - first * (first - 1) // 2 + second - first


def quadratic_features(augmented: Tensor, like: Mixture) -> Tensor:
    """φ (P, n) of x̂ᵀ (D + 1, n), in the order of `mixture_coefficients`."""
    if like.matrices and not like.apart:
        return augmented
    kind, (size, count) = _kind(like), augmented.shape
    height = {FULL: size * (size + 1) // 2, DIAG: 2 * size - 1, SPHERICAL: size + 1}[kind]
    out = augmented.new_empty(height, count)
    return fill(kind, augmented, out, products_of(kind, augmented, out))


def _kind(like: Mixture) -> int:
    if like.matrices:
        return FULL if like.apart else TIED
    return DIAG if like.apart else SPHERICAL


def moments_of_features(sums: Tensor, like: Mixture, total: Tensor | None = None) -> Moments:
    """Σ_n r_nk φ_p(x_n) (…, K, P) as moments about 0; `total` is Σ_n xxᵀ (D, D), for tied covariances."""
    features = like.means.shape[-1]
    if like.matrices and like.apart:
        i = torch.arange(features, device=sums.device)
        low, high = torch.minimum(i[:, None], i), torch.maximum(i[:, None], i)
        second = sums[..., _triangle(features, low, high)]
        return Moments(sums[..., -1], sums[..., _triangle(features, i, features)], second)
    count, first = sums[..., -1], sums[..., -1 - features : -1]
    if total is not None:
        return Moments(count, first, total.expand(*count.shape[:-1], 1, features, features))
    return Moments(count, first, sums[..., : -1 - features])


def product_moments(rows: Tensor, shares: Tensor, like: Mixture) -> Moments:
    """The moments about 0 of rows (n, D) with responsibilities (…, n, K), by one product with their φ."""
    columns = torch.cat([rows.mT, rows.new_ones(1, len(rows))])
    sums = shares.mT.reshape(-1, len(rows)) @ quadratic_features(columns, like).mT
    sums = sums.view(*shares.shape[:-2], shares.shape[-1], -1)
    tied = like.matrices and not like.apart
    return moments_of_features(sums, like, rows.mT @ rows if tied else None)


class MixtureSweep(NamedTuple):
    """What one sweep found."""

    log_likelihood: Tensor
    """Σ_n ln p(x̃_n), (…) float64"""
    moments: Moments
    """in float64"""
    centred: bool
    """Whether the moments are about the means of the mixture, rather than about 0."""


def mixture_sweep(
    x: Tensor, mixture: Mixture, frame: Frame, size: float | None = None, *, backend: Backend = "auto"
) -> MixtureSweep:
    """The log-likelihood of the rows x̃ of x (N, D) under a mixture of them, and what the next one is made of.

    `size` is `cancellation(mixture)`, if it is known already: from it follows which way is exact enough.
    "triton" is for full covariances of float32 rows on a GPU.
    """
    size = float(cancellation(mixture)) if size is None else size
    if takes_kernels(x, mixture, size, backend):
        return _sweep_triton(x, mixture, frame)
    # Not "size > …": NaN takes the careful way.
    if size <= LARGEST_CANCELLATION:
        return _sweep_products(x, mixture, frame, backend)
    return _sweep_centred(x, mixture, frame)


def takes_kernels(x: Tensor, mixture: Mixture, size: float, backend: Backend = "auto") -> bool:
    """Whether Triton's kernels sweep over x, without ever waiting for the GPU."""
    components, features = mixture.means.shape[-2:]
    reason = refusal(x)
    if not (mixture.matrices and mixture.apart):
        reason = "covariances that are not full"
    elif not size <= KERNEL_CANCELLATION:
        reason = "components too small and too far apart for float32"
    elif components > KERNEL_COMPONENTS or features > KERNEL_FEATURES:
        reason = f"{components} components of {features} features"
    elif not reason and x.dtype != torch.float32:
        reason = f"a tensor of type {x.dtype}"
    takes = f", full covariances of at most {KERNEL_COMPONENTS} components and {KERNEL_FEATURES} features"
    return use_triton(backend, reason, takes=takes)


def _sweep_triton(x: Tensor, mixture: Mixture, frame: Frame) -> MixtureSweep:
    from quire.kernels.mixture import sweep

    lead = mixture.weights.shape[:-1]
    weights, means, _, factors = (
        tensor.reshape(-1, *tensor.shape[len(lead) :]).contiguous() for tensor in mixture
    )
    scale = frame.scale.to(x.dtype).contiguous()
    sums = sweep(x, frame.shift.to(x.dtype), scale, weights, means, factors)
    likelihood, *moments = (tensor.reshape(*lead, *tensor.shape[1:]) for tensor in sums)
    return MixtureSweep(likelihood, Moments(*moments), False)


def _sweep_products(x: Tensor, mixture: Mixture, frame: Frame, backend: Backend) -> MixtureSweep:
    lead, coefficients = mixture.weights.shape[:-1], mixture_coefficients(mixture)
    theta = coefficients.reshape(-1, coefficients.shape[-1])  # (R·K, P)
    shift, scale = frame.shift.to(theta.dtype), frame.scale.to(theta.dtype)
    tied = mixture.matrices and not mixture.apart

    def work(x: Tensor) -> tuple[Tensor, ...]:
        starts, kind = max(1, math.prod(lead)), _kind(mixture)
        if backend != "torch" and host.takes(x, theta):
            return sweep_on_host(x, shift, scale, theta, starts, kind)
        return sweep_chunks(x, shift, scale, theta, starts, kind, _chunk_rows(x, max(theta.shape)))

    likelihood, sums, total = _shared(work, x)
    likelihood, sums = likelihood.view(lead), sums.view(coefficients.shape)
    if not tied:
        return MixtureSweep(likelihood, moments_of_features(sums, mixture), False)
    precision = mixture.factors @ mixture.factors.mT
    likelihood -= 0.5 * (precision * total).sum((-1, -2, -3))
    return MixtureSweep(likelihood, moments_of_features(sums, mixture, total), False)


def _sweep_centred(x: Tensor, mixture: Mixture, frame: Frame) -> MixtureSweep:
    constant = log_constants(mixture)[..., None]

    def work(x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for part in x.split(_chunk_rows(x, mixture.means.numel())):
            apart, distance = _distances(frame.enter(part.double()), mixture)
            logs = constant - 0.5 * distance
            row_likelihood = logs.logsumexp(-2, keepdim=True)
            moments = _moments(apart, (logs - row_likelihood).exp(), mixture)
            sums = [row_likelihood.sum((-1, -2)), *moments]
            found = [a + b for a, b in zip(found, sums, strict=True)] if found else sums
        return tuple(found)

    likelihood, *moments = _shared(work, x)
    return MixtureSweep(likelihood, Moments(*moments), True)


def _shared(work: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """`work` of all rows, on the CPU divided among threads."""
    if x.device.type != "cpu":
        return work(x)
    first, *others = share_rows(lambda span: work(x[span]), len(x), least=ROWS_PER_THREAD)
    for other in others:
        for mine, more in zip(first, other, strict=True):
            mine += more
    return first


def _chunk_rows(x: Tensor, width: int) -> int:
    numbers = CHUNK_NUMBERS.get(x.device.type, CHUNK_NUMBERS["cuda"])
    return max(ROWS_TOGETHER, numbers // width // ROWS_TOGETHER * ROWS_TOGETHER)
