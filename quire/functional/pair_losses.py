"""Losses that compare pairs and triples.

N samples, D features of an embedding, y = ±1 says whether a pair belongs together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import InputError
from quire.functional.reduction import (
    Example,
    count_elements,
    loss,
    normal,
    require_positive,
    require_same_shape,
    uniform,
)


def _signs(generator: torch.Generator, n: int, dtype: torch.dtype) -> Tensor:
    return torch.where(uniform(generator, dtype, n) > 0.5, 1, -1).to(dtype)


def _count_vectors(_: object, other: Tensor, *__: object, **___: object) -> float:
    return float(other.shape[:-1].numel())


def _count_pairs(_: object, __: object, target: Tensor, **___: object) -> float:
    return float(target.numel())


def _ranking_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    scores = normal(generator, dtype, n), normal(generator, dtype, n)
    return (*scores, _signs(generator, n, dtype)), {"margin": 0.3}


@loss("margin_ranking", weigh=count_elements, example=_ranking_example)
def margin_ranking(
    first: Tensor, second: Tensor, target: Tensor, /, *, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """max(0, −y (x₁ − x₂) + m): the first score should be larger where y = 1, smaller where y = −1."""
    require_same_shape("margin_ranking", first, second)
    require_same_shape("margin_ranking", first, target)
    return F.margin_ranking_loss(first, second, target, margin, reduction=reduction)


def _triplet_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    anchor, positive, negative = normal(generator, dtype, 3, n, 4).unbind()
    return (anchor, positive, negative), {"margin": 0.8}


@loss("triplet_margin", weigh=_count_vectors, example=_triplet_example)
def triplet_margin(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    /,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """max(0, d(a, p) − d(a, n) + m) with the p-norm's distance; `swap` takes the nearer of a and p to n."""
    require_same_shape("triplet_margin", anchor, positive)
    require_same_shape("triplet_margin", anchor, negative)
    require_positive("triplet_margin", "margin", margin)
    return F.triplet_margin_loss(anchor, positive, negative, margin, p, swap=swap, reduction=reduction)


def _cosine_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    vectors = normal(generator, dtype, n, 4), normal(generator, dtype, n, 4)
    return (*vectors, _signs(generator, n, dtype)), {"margin": 0.2}


@loss("cosine_embedding", weigh=_count_pairs, example=_cosine_example)
def cosine_embedding(
    first: Tensor, second: Tensor, target: Tensor, /, *, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """1 − cos(x₁, x₂) where y = 1, max(0, cos(x₁, x₂) − m) where y = −1; a mean over pairs."""
    require_same_shape("cosine_embedding", first, second)
    return F.cosine_embedding_loss(first, second, target, margin, reduction=reduction)


def _contrastive_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    return (normal(generator, dtype, n, 4), normal(generator, dtype, n, 4)), {"temperature": 0.5}


@loss("info_nce", weigh=_count_vectors, example=_contrastive_example, couples_samples=True)
def info_nce(query: Tensor, key: Tensor, /, *, temperature: float = 0.1, reduction: str = "mean") -> Tensor:
    """−log( e^(s_ii/τ) / Σ_j e^(s_ij/τ) ) with s_ij = cos(q_i, k_j) for embeddings (N, D).

    Row i of `key` is the partner of row i of `query`; the other rows are its negatives, so the loss of a
    sample depends on its whole batch. The symmetric form is the average of (q, k) and (k, q).
    """
    require_same_shape("info_nce", query, key)
    require_positive("info_nce", "temperature", temperature)
    if query.dim() != 2:
        raise InputError(
            f"info_nce of shape {tuple(query.shape)}",
            expected="embeddings (N, D)",
            fix="flatten what a sample is compared by into one vector",
        )
    scores = F.normalize(query, dim=1) @ F.normalize(key, dim=1).T / temperature  # (N, N)
    return F.cross_entropy(scores, torch.arange(len(query), device=query.device), reduction=reduction)
