"""Nadaraya-Watson: values averaged with a kernel of the distance between query and key.

N queries, M keys, D dimensions, V width of values, h width of the kernel; leading dimensions (…) are shared.

    ŷ(q) = Σ_m s_m K(‖q − k_m‖/h) v_m / Σ_m s_m K(‖q − k_m‖/h)

    gaussian      K(u) = exp(−½u²)
    boxcar        K(u) = 1 where u ≤ 1, its edge included
    epanechnikov  K(u) = max(0, 1 − u²)

No form here holds N×M numbers. The Gaussian and, in several dimensions, the compact kernels are streamed;
in one dimension the compact kernels are exact sums over sorted keys in O((N + M) log M)
(`quire.functional.sorted_keys`).

A compact kernel can have no key in reach. `empty` says what then: "nearest", the value of the nearest key
(what a Gaussian tends to as its width shrinks), "mean" of all values, or "zero".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name
from quire.functional.attention import check_values, check_widths
from quire.functional.masks import MaskRule
from quire.functional.sorted_keys import sorted_pooling
from quire.functional.streaming import (
    Backend,
    Pooled,
    block_size,
    check_backend,
    flattened,
    shared_batch,
    slices,
    streamed_pooling,
)
from quire.kernels import refusal, use_triton

Kernel = Literal["gaussian", "boxcar", "epanechnikov"]
Empty = Literal["nearest", "mean", "zero"]

KERNELS = ("gaussian", "boxcar", "epanechnikov")
EMPTY = ("nearest", "mean", "zero")

# Below this, PyTorch's operations take less than choosing and launching the kernel.
_KERNEL_PAIRS = 1 << 20
_KERNEL_WIDEST = 64
_KERNEL_TAKES = (
    ", at most 64 dimensions and values, within 64 widths of the keys' mean, one width or one for each"
    " dimension, and lengths or causality instead of a mask"
)


def kernel_weights(
    query: Tensor, key: Tensor, kernel: Kernel = "gaussian", width: float | Tensor = 1.0
) -> Tensor:
    """K(‖q − k‖/h), not yet divided by its sum: (…, N, D), (…, M, D) → (…, N, M), held as a whole."""
    check_widths("kernel_weights", query, key)
    return _kernel(_squared(query.double(), key.double(), width), kernel).to(query.dtype)


def gaussian_pooling(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: float | Tensor = 1.0,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    exclude_self: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Σ_m softmax_m(−½‖q − k_m‖²/h²) v_m, streamed: (…, N, D), (…, M, D), (…, M, V) → (…, N, V).

    `width` is one number, or one for each dimension (D,); it may be learned. `weights` (…, M) are
    factors of the keys. `exclude_self` leaves key n out for query n. Extra memory is O((N + M)·D).

    backend="triton" is a kernel for CUDA, for data within 64 widths of the keys' mean (any, where V is 1 and
    nothing is learned: then it does not wait for the device either); weights are right to 10⁻⁶ for queries
    among the keys, to about 10⁻⁷·½x² for one that is x widths from the nearest. "auto" takes it for large
    inputs. "torch" computes scores in float64.
    """
    check_backend(backend)
    check_widths("gaussian_pooling", query, key)
    check_values(key, value)
    _check_positive(width, weights)
    pairs = query.shape[:-1].numel() * key.shape[-2]
    reason = _kernel_refusal(query, key, value, width, mask)
    if use_triton(backend, reason, worth=pairs >= _KERNEL_PAIRS, takes=_KERNEL_TAKES) and pairs:
        pooled = _gaussian_kernel(query, key, value, width, weights, lengths, causal, exclude_self)
        if pooled is not None:
            return pooled
        use_triton(backend, "queries and keys spread over more than 64 widths", takes=_KERNEL_TAKES)
    augmented = _as_dot_product(query, key, width, weights)
    return streamed_pooling(
        _dot, *augmented, value, mask=mask, lengths=lengths, causal=causal, exclude_self=exclude_self
    ).value


def nadaraya_watson(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel = "gaussian",
    width: float | Tensor = 1.0,
    *,
    weights: Tensor | None = None,
    exclude_self: bool = False,
    empty: Empty = "nearest",
    backend: Backend = "auto",
) -> Tensor:
    """Σ_m s_m K(‖q − k_m‖/h) v_m / Σ_m s_m K(‖q − k_m‖/h): (…, N, D), (…, M, D), (…, M, V) → (…, N, V).

    `width` is one number, or one for each dimension (D,); `weights` s (…, M) are ones unless given. With
    `exclude_self` the queries are the keys, and each is answered by the others: leave-one-out.
    """
    if kernel not in KERNELS:
        raise unknown_name("kernel", kernel, KERNELS)
    if empty not in EMPTY:
        raise unknown_name("answer where no key is in reach", empty, EMPTY)
    check_backend(backend)
    check_widths("nadaraya_watson", query, key)
    check_values(key, value)
    _check_positive(width, weights)
    if kernel == "gaussian":
        return gaussian_pooling(
            query, key, value, width, weights=weights, exclude_self=exclude_self, backend=backend
        )
    use_triton(backend, f"kernel '{kernel}'", takes="; and kernel 'gaussian'")
    if query.shape[-1] == 1:
        pooled, reached, nearest = sorted_pooling(
            query[..., 0], key[..., 0], value, kernel, width, weights=weights, exclude_self=exclude_self
        )
        return _fill(pooled, reached, lambda: nearest, value, weights, exclude_self, empty)
    pooled, total = _compact(query, key, value, kernel, width, weights, exclude_self)
    return _fill(
        pooled, total != -torch.inf, lambda: nearest_key(query, key, width, exclude_self=exclude_self),
        value, weights, exclude_self, empty,
    )  # fmt: skip


@torch.no_grad()
def nearest_key(
    query: Tensor, key: Tensor, width: float | Tensor = 1.0, *, exclude_self: bool = False
) -> Tensor:
    """The number of the nearest key, the first of equals: (…, N, D), (…, M, D) → (…, N)."""
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    shape = (*batch, query.shape[-2], key.shape[-2])
    rule = MaskRule.of(shape, exclude_self=exclude_self)
    rows, columns = block_size(shape, query.shape[-1], query.device)
    best = torch.full(shape[:-1], torch.inf, dtype=torch.float64, device=query.device)
    place = torch.zeros(shape[:-1], dtype=torch.int64, device=query.device)
    for some in slices(shape[-2], rows):
        for part in slices(shape[-1], columns):
            squared = _squared(query[..., some, :].double(), key[..., part, :].double(), width)
            allowed, _ = rule.block(some, part, query.device)
            if allowed is not None:
                squared = squared.masked_fill(~allowed, torch.inf)
            low, where = squared.min(-1)
            nearer = low < best[..., some]
            place[..., some] = torch.where(nearer, where + part.start, place[..., some])
            best[..., some] = torch.where(nearer, low, best[..., some])
    return place


def _kernel_refusal(
    query: Tensor, key: Tensor, value: Tensor, width: float | Tensor, mask: Tensor | None
) -> str:
    """Why the Triton kernel cannot be used, or ""."""
    if mask is not None:
        return "a mask"
    if query.shape[-1] > _KERNEL_WIDEST or value.shape[-1] > _KERNEL_WIDEST:
        return f"{query.shape[-1]} dimensions and {value.shape[-1]} values"
    if isinstance(width, Tensor) and width.shape not in ((), (1,), query.shape[-1:]):
        return f"a width of shape {tuple(width.shape)}"
    return refusal(query, key, value)


def _gaussian_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: float | Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    causal: bool,
    exclude_self: bool,
) -> Tensor | None:
    """By Triton, or None where queries and keys are spread too wide for float32."""
    from quire.kernels.gaussian import LARGEST, gaussian_pooling
    from quire.kernels.halves import measure

    batch = shared_batch(query, key, value)
    queries, keys = query.shape[-2], key.shape[-2]
    rule = MaskRule.of((*batch, queries, keys), lengths=lengths, causal=causal, exclude_self=exclude_self)
    places, others, values = flattened(batch, query, key, value)
    if isinstance(width, Tensor):
        scale = width.to(query.device, torch.float32).reciprocal().expand(query.shape[-1]).contiguous()
    else:
        scale = torch.full(query.shape[-1:], 1 / width, device=query.device)
    factor = None if weights is None else weights.float().log().expand(*batch, keys).reshape(-1, keys)
    extent = measure(places, others, values, scale, factor)
    known = None
    given = (places, others, values, scale, factor)
    learned = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if learned or value.shape[-1] > 1:
        known = extent.read()
        if not known.radius <= LARGEST:
            return None
    limit = None
    if rule.lengths is not None:
        limit = rule.lengths[..., 0].expand(*batch, queries)
    if causal:
        last = torch.arange(queries, device=query.device) + (keys - queries + 1)
        limit = last.expand(*batch, queries) if limit is None else torch.minimum(limit, last)
    if limit is not None:
        limit = limit.reshape(-1, queries).to(torch.int32).contiguous()
    pooled = gaussian_pooling(places, others, values, scale, factor, limit, exclude_self, extent, known)
    return pooled.view(*batch, *pooled.shape[-2:]).to(value.dtype)


def _fill(
    pooled: Tensor,
    reached: Tensor,
    nearest: Callable[[], Tensor],
    value: Tensor,
    weights: Tensor | None,
    exclude_self: bool,
    empty: str,
) -> Tensor:
    """`pooled`, with the answer of `empty` where no key was in reach, if there is another key at all."""
    if empty == "zero" or value.shape[-2] <= int(exclude_self) or bool(reached.all()):
        return pooled
    value = value.expand(*pooled.shape[:-2], *value.shape[-2:])
    if empty == "nearest":
        answer = value.gather(-2, nearest()[..., None].expand(*reached.shape, value.shape[-1]))
    else:
        share = value.new_ones(value.shape[:-1]) if weights is None else weights.expand(value.shape[:-1])
        share = share.to(value.dtype)[..., None]
        total, weight = (share * value).sum(-2, keepdim=True), share.sum(-2, keepdim=True)
        if exclude_self:
            total, weight = total - share * value, weight - share
        answer = (total / weight).expand_as(pooled)
    return torch.where(reached[..., None], pooled, answer)


def _compact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: str,
    width: float | Tensor,
    weights: Tensor | None,
    exclude_self: bool,
) -> Pooled:
    """Streamed averages with K = exp(ln K), and ln Σ s K. The last column of the keys is ln s."""
    query, key = query.double(), key.double()
    factor = key.new_zeros(key.shape[:-1]) if weights is None else weights.double().log()
    key = torch.cat([key, factor.expand(key.shape[:-1])[..., None]], -1)
    width = torch.as_tensor(width, dtype=torch.float64, device=key.device)

    def score(queries: Tensor, keys: Tensor, width: Tensor) -> Tensor:
        squared = _squared(queries, keys[..., :-1], width)
        inside = squared <= 1 if kernel == "boxcar" else squared < 1
        # ln K where K is positive, and no gradient elsewhere.
        logarithm = (
            torch.zeros_like(squared) if kernel == "boxcar" else (torch.where(inside, 1 - squared, 1.0).log())
        )
        return (logarithm + keys[..., None, :, -1]).masked_fill(~inside, -torch.inf)

    return streamed_pooling(
        score, query, key, value, (width,), hidden=query.shape[-1], exclude_self=exclude_self
    )


def _squared(query: Tensor, key: Tensor, width: float | Tensor) -> Tensor:
    """‖q − k‖²/h² from differences, which do not round where queries, keys and h are small whole numbers."""
    difference = query[..., :, None, :] - key[..., None, :, :]
    if isinstance(width, Tensor) and width.numel() > 1:
        return (difference / width).square().sum(-1)
    return difference.square().sum(-1) / (width * width)


def _check_positive(width: float | Tensor, weights: Tensor | None) -> None:
    if not (bool((width > 0).all()) if isinstance(width, Tensor) else width > 0):
        raise InputError(f"a kernel of width {width!r}", expected="a number > 0")
    if weights is not None and not bool((weights > 0).all()):
        raise InputError(
            "a key with a weight that is not positive",
            expected="weights > 0",
            fix="leave keys of weight 0 out: key[weights > 0], value[weights > 0]",
        )


def _kernel(squared: Tensor, kernel: str) -> Tensor:
    """K as a function of u²."""
    if kernel == "gaussian":
        return (-0.5 * squared).exp()
    if kernel == "boxcar":
        return (squared <= 1).to(squared.dtype)
    if kernel == "epanechnikov":
        return (1 - squared).clamp(min=0)
    raise unknown_name("kernel", kernel, KERNELS)


def _dot(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT


def _as_dot_product(
    query: Tensor, key: Tensor, width: float | Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries and keys (…, D + 2) in float64 whose dot product is −½‖q − k‖²/h² + ln s.

    −½‖q − k‖² = (q, −½‖q‖², 1)·(k, 1, −½‖k‖²). These large terms cancel, so they are taken from the keys'
    mean, and in float64: in float32, keys that are a hundred widths apart would be off by parts in a
    thousand.
    """
    query, key = query.double() / width, key.double() / width
    if key.shape[-2]:
        centre = key.detach().mean(-2, keepdim=True)
        query, key = query - centre, key - centre
    from_query = -0.5 * query.square().sum(-1, keepdim=True)
    from_key = -0.5 * key.square().sum(-1, keepdim=True)
    if weights is not None:
        from_key = from_key + weights.double().log()[..., None]
    return (
        torch.cat([query, from_query, torch.ones_like(from_query)], -1),
        torch.cat([key, torch.ones_like(from_key), from_key], -1),
    )
