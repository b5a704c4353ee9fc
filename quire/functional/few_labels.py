"""What learning from few labels is made of: losses of pairs in a batch, guessed labels, neighbours.

Codes are unit vectors, so that the nearest by distance is the nearest by angle: ‖a − b‖² = 2 − 2 a·b.

N codes of a batch, K numbers of a code, C classes, R references whose class is known, k of them nearest to a
query, B queries; s_ij = a_i·a_j.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError, unknown_name
from quire.functional.losses import IGNORE_INDEX
from quire.functional.reduction import (
    Example,
    loss,
    normal,
    reduce,
    require_positive,
    require_same_shape,
    uniform,
)

PairKind = Literal["siamese", "triplet", "cosine"]
CLOSEST = 1e-8
"""Squared distance below which two codes count as one: the root has no slope at 0."""


# Losses -----------------------------------------------------------------------------------------


def _count_rows(_: object, other: Tensor, *__: object, **___: object) -> float:
    return float(len(other))


def _pair_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    signs = torch.where(uniform(generator, dtype, n) > 0.5, 1, -1).to(dtype)
    return (normal(generator, dtype, n, 4), normal(generator, dtype, n, 4), signs), {"margin": 3.0}


@loss("contrastive_margin", weigh=_count_rows, example=_pair_example)
def contrastive_margin(
    first: Tensor, second: Tensor, target: Tensor, /, *, margin: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """d² where y = 1, max(0, m − d)² where y = −1, with d = ‖a − b‖: pairs (N, K) of a siamese network."""
    require_same_shape("contrastive_margin", first, second)
    require_same_shape("contrastive_margin: pairs and target", first[..., 0], target)
    require_positive("contrastive_margin", "margin", margin)
    squared = (first - second).square().sum(-1)
    return reduce(torch.where(target > 0, squared, _short_of(squared, margin)), reduction)


def _short_of(squared: Tensor, margin: float) -> Tensor:
    """max(0, m − d)² from d²."""
    return (margin - squared.clamp(min=CLOSEST).sqrt()).clamp(min=0).square()


def _guess_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    logits = normal(generator, dtype, n, 4), 2 * normal(generator, dtype, n, 4)
    return logits, {"threshold": 0.6}


@loss("pseudo_label", weigh=_count_rows, example=_guess_example)
def pseudo_label(
    logits: Tensor, sure: Tensor, /, *, threshold: float = 0.95, reduction: str = "mean"
) -> Tensor:
    """[max_c q_c ≥ t] · −log p_ĉ with ĉ = argmax q: what is answered to one view of a row (`sure`, (N, C)) is
    the label of another (`logits`), where it is answered with enough trust. No gradient reaches `sure`.

    The mean is over all rows, those that count nothing included: the less is trusted, the less is learned.
    """
    require_same_shape("pseudo_label", logits, sure)
    wide = sure.detach().to(torch.promote_types(sure.dtype, torch.float32))
    trust, guess = wide.softmax(-1).max(-1)
    each = functional.cross_entropy(logits, guess, reduction="none")
    return reduce(each * (trust >= threshold), reduction)


def pair_masks(target: Tensor) -> tuple[Tensor, Tensor]:
    """Which pairs (N, N) of different rows belong together and which apart, by class numbers (N,); pairs
    with a row whose class is not known, a negative number, are neither."""
    known = (target >= 0)[:, None] & (target >= 0)
    same = target[:, None] == target
    other = ~torch.eye(len(target), dtype=torch.bool, device=target.device)
    return known & same & other, known & ~same


def pair_losses_each(codes: Tensor, target: Tensor, kind: PairKind, margin: float) -> Tensor:
    """The loss of each code (N,) from all pairs in its batch: unit codes (N, K), classes (N,) or negative.

        siamese   mean d² of the pairs that belong together + mean max(0, m − d)² of those that do not
        cosine    mean 1 − s of the pairs that belong together + mean max(0, s − m) of those that do not
        triplet   mean max(0, d⁺ − d⁻ + m) over all triplets of a code, one of its class and one of another

    A code without a pair of one kind loses nothing by it; a triplet needs both.
    """
    if kind not in get_args(PairKind):
        raise unknown_name("loss of pairs", kind, get_args(PairKind))
    if codes.dim() != 2 or target.shape != codes.shape[:1]:
        raise InputError(
            f"codes of shape {tuple(codes.shape)} and classes of shape {tuple(target.shape)}",
            expected="(N, K) and (N,)",
        )
    together, apart = pair_masks(target)
    likeness = codes @ codes.T
    if kind == "cosine":
        return _mean_over(together, 1 - likeness) + _mean_over(apart, (likeness - margin).clamp(min=0))
    squared = (2 - 2 * likeness).clamp(min=0)
    if kind == "siamese":
        return _mean_over(together, squared) + _mean_over(apart, _short_of(squared, margin))
    return _all_triplets(squared.clamp(min=CLOSEST).sqrt(), together, apart, margin)


def _all_triplets(distance: Tensor, together: Tensor, apart: Tensor, margin: float) -> Tensor:
    """Mean over j, l of max(0, d_ij + m − d_il) for each i, of all N² pairs j, l by sorting: with the d_il in
    order, those below d_ij + m come first, and their sum is known from the running sum."""
    ordered = distance.masked_fill(~apart, torch.inf).sort(1).values
    running = functional.pad(ordered.masked_fill(ordered.isinf(), 0.0).cumsum(1), (1, 0))
    bound = distance + margin
    below = torch.searchsorted(ordered.detach(), bound.detach())
    sums = (below * bound - running.gather(1, below)) * together
    return sums.sum(1) / (together.sum(1) * apart.sum(1)).clamp(min=1)


def _mean_over(chosen: Tensor, values: Tensor) -> Tensor:
    """Mean of the chosen values of each row, 0 where there are none."""
    return (values * chosen).sum(1) / chosen.sum(1).clamp(min=1)


# Neighbours ---------------------------------------------------------------------------------------


def nearest_codes(queries: Tensor, references: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k references most like each query, best first: s (B, k) and their places (B, k)."""
    if not 1 <= k <= len(references):
        raise InputError(
            f"{k} neighbours among {len(references)} references",
            expected=f"a number from 1 to {len(references)}",
        )
    likeness, places = (queries @ references.T).topk(k, dim=1)
    return likeness, places


def neighbour_votes(
    likeness: Tensor, classes: Tensor, number: int, *, temperature: float = 0.1, doubt: float = 0.01
) -> Tensor:
    """p_c = (1 − ε) Σ_{i: y_i = c} e^(s_i/τ) / Σ_i e^(s_i/τ) + ε/C: neighbours (B, k) vote for their class,
    the nearer the louder, and a little doubt ε remains → (B, C)."""
    require_same_shape("neighbour_votes", likeness, classes)
    loud = (likeness / temperature).softmax(1)
    ballots = classes.unsqueeze(-1) == torch.arange(number, device=classes.device)  # (B, k, C)
    return (1 - doubt) * (loud.unsqueeze(-1) * ballots).sum(1) + doubt / number


def softmax_regression(
    codes: Tensor, target: Tensor, classes: int, *, penalty: float, steps: int = 200
) -> tuple[Tensor, Tensor]:
    """W (C, K) and b (C,) that minimise Σ_r −log softmax(W a_r + b)_{y_r} + λ/2 ‖W‖², for all rows (R, K) at
    once, in float64: a convex problem with one answer, which L-BFGS finds."""
    require_positive("softmax_regression", "penalty", penalty)
    # About their mean rows are better conditioned; the bias, which costs nothing, makes up for it.
    mean = codes.detach().cpu().double().mean(0)
    rows, wanted = codes.detach().cpu().double() - mean, target.cpu()
    weight = torch.zeros(classes, codes.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, bias], max_iter=steps, tolerance_grad=1e-5, tolerance_change=1e-12, history_size=20,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def objective() -> Tensor:
        solver.zero_grad()
        value = functional.cross_entropy(rows @ weight.T + bias, wanted, ignore_index=IGNORE_INDEX,
                                         reduction="sum")  # fmt: skip
        value = value + 0.5 * penalty * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(objective)
    found = weight.detach()
    return found.to(codes), (bias.detach() - found @ mean).to(codes)
