"""Attention: values averaged by how well their keys answer a query.

B batch, H heads, N queries, M keys and values, D width of queries and keys, V width of values; the
leading dimensions (…) are shared, such as (B,) or (B, H).

    pooling   Σ_i α(q, k_i) v_i
    score     how well a key fits: dot product, scaled dot product, additive, Gaussian, or any function
    weighting from scores to α: convex (softmax), one-hot, uniform, non-negative

Scores and weights are (…, N, M) here. What never holds that many numbers is `attention` (PyTorch's
fused kernels), `quire.functional.streaming` and `quire.functional.kernel_pooling`.
Masks are explained in `quire.functional.masks`. A query that may see no key gets zeros, and no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.errors import InputError, unknown_name
from quire.functional.masks import MaskRule, applied
from quire.functional.regularise import check_rate

CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
Score = Callable[[Tensor, Tensor], Tensor]
Weighting = Literal["convex", "one-hot", "uniform", "non-negative"]


# Scores ---------------------------------------------------------------------------------------


def dot_score(query: Tensor, key: Tensor) -> Tensor:
    """q·k: (…, N, D), (…, M, D) → (…, N, M)."""
    check_widths("dot_score", query, key)
    return query @ key.mT


def scaled_dot_score(query: Tensor, key: Tensor) -> Tensor:
    """q·k/√D, which has variance 1 where the parts of q and k are independent with variance 1."""
    check_widths("scaled_dot_score", query, key)
    return (query / math.sqrt(query.shape[-1])) @ key.mT


def gaussian_score(query: Tensor, key: Tensor, width: float | Tensor = 1.0) -> Tensor:
    """−½‖q − k‖²/h². It is q·k/h² less ½‖q‖²/h², which no softmax over keys sees, and ½‖k‖²/h², which it
    does not see either where all keys are equally long."""
    check_widths("gaussian_score", query, key)
    difference = (query[..., :, None, :] - key[..., None, :, :]) / width
    return -0.5 * difference.square().sum(-1)


def additive_score(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, vector: Tensor
) -> Tensor:
    """w_v·tanh(W_q q + W_k k): queries and keys of any two widths, W_q (h, D_q), W_k (h, D_k), w_v (h,)."""
    projected = functional.linear(query, query_weight), functional.linear(key, key_weight)
    return projected_score(*projected, vector)


def projected_score(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
    """w_v·tanh(q + k) of queries and keys that are projected already: (…, N, h), (…, M, h), (h,)."""
    check_widths("additive score", query, key)
    return (query[..., :, None, :] + key[..., None, :, :]).tanh_() @ vector


# From scores to weights -----------------------------------------------------------------------


def masked_softmax(
    scores: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, causal: bool = False
) -> Tensor:
    """exp s_m / Σ_allowed exp s over the allowed keys, 0 at the others; rows without any are zeros."""
    return _safe_softmax(MaskRule.of(scores.shape, mask, lengths, causal).apply(scores))


def hard_softmax(
    scores: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, causal: bool = False
) -> Tensor:
    """One-hot of the best allowed key (the first of equals), with the gradient of `masked_softmax`.

    A step function has no useful gradient, so the soft weights lend theirs (straight through).
    """
    soft = masked_softmax(scores, mask, lengths, causal)
    if not scores.shape[-1]:
        return soft
    best = torch.zeros_like(soft).scatter_(-1, soft.detach().argmax(-1, keepdim=True), 1.0)
    best = torch.where(soft.detach().sum(-1, keepdim=True) > 0, best, 0.0)
    # The difference is exactly 0, so the weights are exactly 0 and 1.
    return best + (soft - soft.detach())


def uniform_weights(
    scores: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, causal: bool = False
) -> Tensor:
    """1/(number of allowed keys) at the allowed keys, whatever the scores: average pooling."""
    # A mask of floats adds to scores, which do not count here: only its −∞ do.
    allowed, _ = MaskRule.of(scores.shape, mask, lengths, causal).whole(scores.device)
    return _safe_softmax(applied(torch.zeros_like(scores), allowed, None))


def nonnegative_weights(
    scores: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, causal: bool = False
) -> Tensor:
    """max(0, s) at the allowed keys: weights that are not forced to sum to 1."""
    return MaskRule.of(scores.shape, mask, lengths, causal).apply(scores).relu()


WEIGHTINGS: dict[str, Callable[..., Tensor]] = {
    "convex": masked_softmax,
    "one-hot": hard_softmax,
    "uniform": uniform_weights,
    "non-negative": nonnegative_weights,
}


def _safe_softmax(scores: Tensor) -> Tensor:
    """Softmax in which −∞ counts as absent, and a row of nothing else gives zeros."""
    alive = (scores != -torch.inf).any(-1, keepdim=True)
    # Replaced before and after: a NaN that is only covered up would still be in the gradient.
    weights = torch.where(alive, scores, 0.0).softmax(-1)
    return torch.where(alive, weights, 0.0)


class WeightKind(NamedTuple):
    """What rows of attention weights are: one-hot and uniform are convex, convex is non-negative."""

    nonnegative: bool
    """A conical combination of the values."""
    convex: bool
    """Non-negative with sum 1: the result lies among the values."""
    one_hot: bool
    """One value is taken as it is: a database query."""
    uniform: bool
    """The mean of all values: average pooling."""


def weight_kind(weights: Tensor, tolerance: float = 1e-6) -> WeightKind:
    """Which of the special cases hold for all rows of (…, M)."""
    nonnegative = bool((weights >= -tolerance).all())
    convex = nonnegative and bool(((weights.sum(-1) - 1).abs() <= tolerance).all())
    largest = weights.amax(-1)
    one_hot = convex and bool(((largest - 1).abs() <= tolerance).all())
    uniform = convex and bool((largest - weights.amin(-1) <= tolerance).all())
    return WeightKind(nonnegative, convex, one_hot, uniform)


# Pooling --------------------------------------------------------------------------------------


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """(…, N, M), (…, M, V) → (…, N, V): a matrix product for each entry of the batch, Σ_m A_nm B_mv."""
    if min(left.dim(), right.dim()) < 2 or left.shape[-1] != right.shape[-2]:
        raise InputError(
            f"a batch of matrix products of shapes {tuple(left.shape)} and {tuple(right.shape)}",
            expected="(…, N, M) and (…, M, V)",
            fix="one weight for each value: the last size of the first is the last but one of the second",
        )
    return left @ right


def attention_pooling(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score = scaled_dot_score,
    weighting: Weighting = "convex",
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Σ_i α(q, k_i) v_i with any score and weighting: (…, N, D), (…, M, D), (…, M, V) → (…, N, V).

    All N·M scores are held at once; the streamed forms do without.
    """
    if weighting not in WEIGHTINGS:
        raise unknown_name("weighting", weighting, WEIGHTINGS)
    check_values(key, value)
    return bmm(WEIGHTINGS[weighting](score(query, key), mask, lengths, causal), value)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q·k·scale + mask) v by PyTorch's fused kernels; scale is 1/√D unless given.

    `dropout` is the share of weights that is dropped, so give 0 in evaluation. Unlike the kernels, a query
    that may see no key gets zeros and no gradient on every device.
    """
    check_rate(dropout, "attention dropout")
    check_widths("attention", query, key)
    check_values(key, value)
    queries, keys = query.shape[-2], key.shape[-2]
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    rule = MaskRule.of((*batch, queries, keys), mask, lengths, causal)
    if not keys:  # nothing to pool: zeros that still belong to the graph
        return attention_pooling(query, key, value)
    # One query beside all keys sees them all, so decoding by single tokens needs no mask.
    triangle = causal and queries == keys and mask is None and lengths is None
    if triangle or rule.is_open or (causal and queries == 1 and mask is None and lengths is None):
        return fused_attention(query, key, value, dropout=dropout, causal=triangle, scale=scale)
    allowed, added = rule.whole(query.device)
    assert allowed is not None
    alive = allowed.any(-1, keepdim=True)
    open_mask: Tensor = allowed | ~alive
    if added is not None:
        open_mask = torch.where(alive, added, 0.0).masked_fill(alive & ~allowed, -torch.inf).to(query.dtype)
    return torch.where(
        alive, fused_attention(query, key, value, open_mask, dropout=dropout, scale=scale), 0.0
    )


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """PyTorch's fused kernels as they are, in the fastest way there is for a device and a type."""
    if query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16):
        # Its way back takes five times as long in half precision as in single.
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        with torch.autocast("cpu", enabled=False):
            wide = fused_attention(
                query.float(), key.float(), value.float(), mask, dropout=dropout, causal=causal, scale=scale
            )
        return wide.to(query.dtype)
    attend = partial(functional.scaled_dot_product_attention, query, key, value, mask, dropout, causal)
    if mask is None and not torch.compiler.is_compiling() and _for_cudnn(query, key, dropout):
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):
            return attend(scale=scale)
    return attend(scale=scale)


def _for_cudnn(query: Tensor, key: Tensor, dropout: float) -> bool:
    """Whether cuDNN's kernel is the fastest: for GPT-2's shapes on an H200, forward and backward together, it
    took 0.62 of the time of the one that PyTorch prefers. It plans anew for each shape, so short texts, which
    differ in length, are left to the other."""
    if not query.is_cuda or dropout or min(query.shape[-2], key.shape[-2]) < 512:
        return False
    halves = query.dtype in (torch.bfloat16, torch.float16)
    return halves and query.dim() == 4 and torch.cuda.get_device_capability(query.device) >= (9, 0)


def check_widths(name: str, query: Tensor, key: Tensor) -> None:
    """Refuse queries and keys that cannot be compared."""
    if min(query.dim(), key.dim()) < 2 or query.shape[-1] != key.shape[-1]:
        raise InputError(
            f"{name} of queries of shape {tuple(query.shape)} and keys of shape {tuple(key.shape)}",
            expected="(…, N, D) and (…, M, D)",
            fix="project both to one width, or use an additive score with two projections",
        )


def check_values(key: Tensor, value: Tensor) -> None:
    """Refuse values that do not stand beside the keys."""
    if min(key.dim(), value.dim()) < 2 or key.shape[-2] != value.shape[-2]:
        raise InputError(
            f"keys of shape {tuple(key.shape)} with values of shape {tuple(value.shape)}",
            expected="(…, M, D) and (…, M, V): one value for each key",
        )
