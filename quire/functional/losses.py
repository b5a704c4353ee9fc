"""Losses, each the sum over samples of what `reduction="none"` gives, with PyTorch's weighted mean.

N samples, C classes or outputs, * further dimensions; ŷ prediction, y target, w class weight, p probability.

Every mean is sum / weight (see `quire.functional.reduction`). It differs from PyTorch's in one place: where
nothing counts, as in a batch whose targets are all ignored, the mean is 0 with a zero gradient, not NaN.
Losses that compare embeddings stand in `pair_losses`, and are exported here too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import InputError
from quire.functional.pair_losses import cosine_embedding, info_nce, margin_ranking, triplet_margin
from quire.functional.reduction import (
    LOSSES,
    Example,
    Loss,
    Weight,
    count_elements,
    count_samples,
    loss,
    mean_of,
    normal,
    reduce,
    require_positive,
    require_same_shape,
    uniform,
)

__all__ = [
    "LOSSES", "Loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding",
    "cross_entropy", "gaussian_nll", "half_squared_error", "info_nce", "kl_div", "l1", "logistic_gradient",
    "margin_ranking", "mean_of", "mse", "multi_label", "nll", "perplexity", "quadratic_cost", "smooth_l1",
    "softmax_gradient", "triplet_margin",
]  # fmt: skip

IGNORE_INDEX = -100


# Regression -----------------------------------------------------------------------------------


def _regression_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    return (normal(generator, dtype, n, 3), normal(generator, dtype, n, 3)), {}


@loss("quadratic_cost", weigh=count_samples, example=_regression_example)
def quadratic_cost(prediction: Tensor, target: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """C = 1/(2n) Σ_n ‖ŷ_n − y_n‖²; the mean is over samples (rows), not over elements."""
    require_same_shape("quadratic_cost", prediction, target)
    if reduction == "sum":
        return F.mse_loss(prediction, target, reduction="sum") / 2
    squares = (prediction - target).square()
    return squares.flatten(1).sum(1) / 2 if squares.dim() > 1 else squares / 2


@loss("mse", weigh=count_elements, example=_regression_example)
def mse(prediction: Tensor, target: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """(ŷ − y)²; the mean is over elements."""
    require_same_shape("mse", prediction, target)
    return F.mse_loss(prediction, target, reduction=reduction)


@loss("half_squared_error", weigh=count_elements, example=_regression_example)
def half_squared_error(prediction: Tensor, target: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """½(ŷ − y)², whose derivative is ŷ − y; the mean is over elements."""
    require_same_shape("half_squared_error", prediction, target)
    return F.mse_loss(prediction, target, reduction=reduction) / 2


@loss("l1", weigh=count_elements, example=_regression_example)
def l1(prediction: Tensor, target: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """|ŷ − y|."""
    require_same_shape("l1", prediction, target)
    return F.l1_loss(prediction, target, reduction=reduction)


def _smooth_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    return _regression_example(generator, n, dtype)[0], {"beta": 0.7}


@loss("smooth_l1", weigh=count_elements, example=_smooth_example)
def smooth_l1(prediction: Tensor, target: Tensor, /, *, beta: float = 1.0, reduction: str = "mean") -> Tensor:
    """(ŷ − y)²/(2β) where |ŷ − y| < β, else |ŷ − y| − β/2."""
    require_same_shape("smooth_l1", prediction, target)
    require_positive("smooth_l1", "beta", beta)
    return F.smooth_l1_loss(prediction, target, reduction=reduction, beta=beta)


def _gaussian_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    variance = uniform(generator, dtype, n, 3) + 0.1
    return (normal(generator, dtype, n, 3), normal(generator, dtype, n, 3), variance), {"full": True}


@loss("gaussian_nll", weigh=count_elements, example=_gaussian_example)
def gaussian_nll(
    mean: Tensor,
    target: Tensor,
    variance: Tensor,
    /,
    *,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """½(log σ² + (μ − y)²/σ²), and + ½ log 2π where `full`.

    `variance` broadcasts to the mean. It is kept at eps or above, by a step that its gradient does not see,
    so a variance that falls too far is still pushed back up.
    """
    require_same_shape("gaussian_nll", mean, target)
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    values = (torch.log(variance) + (mean - target).square() / variance) / 2
    return reduce(values + math.log(2 * math.pi) / 2 if full else values, reduction)


# Classification -------------------------------------------------------------------------------


def _binary_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    target = (uniform(generator, dtype, n, 3) > 0.5).to(dtype)
    return (uniform(generator, dtype, n, 3) * 0.98 + 0.01, target, uniform(generator, dtype, n, 3)), {}


@loss("binary_cross_entropy", weigh=count_elements, example=_binary_example)
def binary_cross_entropy(
    probability: Tensor, target: Tensor, weight: Tensor | None = None, /, *, reduction: str = "mean"
) -> Tensor:
    """−y log p − (1−y) log(1−p), with logarithms kept at −100 or above.

    `weight` scales elements and, as in PyTorch, does not enter the denominator of the mean.
    """
    require_same_shape("binary_cross_entropy", probability, target)
    # On a GPU the same check would wait for the device; its kernel asserts instead.
    if probability.device.type == "cpu" and probability.numel():
        low, high = (bound.item() for bound in torch.aminmax(probability.detach()))
        if not (low >= 0 and high <= 1):
            raise InputError(
                f"binary_cross_entropy of values from {low:g} to {high:g}",
                expected="probabilities in [0, 1]",
                fix="use binary_cross_entropy_with_logits for scores before the sigmoid",
            )
    return F.binary_cross_entropy(probability, target, weight, reduction=reduction)


def _logits_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    _, target, weight = _binary_example(generator, n, dtype)[0]
    return (normal(generator, dtype, n, 3), target, weight), {"pos_weight": uniform(generator, dtype, 3)}


@loss("binary_cross_entropy_with_logits", weigh=count_elements, example=_logits_example)
def binary_cross_entropy_with_logits(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    /,
    *,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """−y log σ(a) − (1−y) log σ(−a), finite for any logit a; `pos_weight` scales the first part by class."""
    require_same_shape("binary_cross_entropy_with_logits", logits, target)
    return F.binary_cross_entropy_with_logits(
        logits, target, weight, reduction=reduction, pos_weight=pos_weight
    )


def _multi_label_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    inputs = _logits_example(generator, n, dtype)[0][:2]
    return inputs, {"weight": uniform(generator, dtype, 3)}


def _count_rows(_: object, target: Tensor, **__: object) -> float:
    return float(target.shape[:-1].numel())


@loss("multi_label", weigh=_count_rows, example=_multi_label_example)
def multi_label(
    logits: Tensor, target: Tensor, /, *, weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """(1/C) Σ_c w_c · binary cross-entropy of label c; the mean is over samples."""
    require_same_shape("multi_label", logits, target)
    return F.multilabel_soft_margin_loss(logits, target, weight, reduction=reduction)


def weigh_classes(
    _: object,
    target: Tensor,
    /,
    *,
    weight: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    **__: object,
) -> Weight:
    """Σ w over the targets that are not ignored; for class probabilities, as in PyTorch, their number."""
    if target.is_floating_point():
        return float(target.numel() // target.shape[min(1, target.dim() - 1)])
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    weights = weight[torch.where(kept, target, 0)] * kept
    return weights.sum(dtype=torch.promote_types(weight.dtype, torch.float32))


def _class_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    device = generator.device
    target = torch.randint(0, 5, (n,), generator=generator, device=device)
    ignored = torch.rand(n, generator=generator, device=device) < 0.3
    target = torch.where(ignored, torch.full_like(target, IGNORE_INDEX), target)
    options = {"weight": uniform(generator, dtype, 5) + 0.1, "ignore_index": IGNORE_INDEX}
    return (normal(generator, dtype, n, 5), target), options


def _smoothed_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    inputs, options = _class_example(generator, n, dtype)
    return inputs, {**options, "label_smoothing": 0.1}


def _check_classes(name: str, scores: Tensor, target: Tensor, weight: Tensor | None) -> None:
    dim = min(1, scores.dim() - 1)
    batch = scores.shape[:dim] + scores.shape[dim + 1 :]
    if target.is_floating_point() or target.shape != batch:
        raise InputError(
            f"{name} of scores {tuple(scores.shape)} with a {target.dtype} target {tuple(target.shape)}",
            expected=f"class indices (torch.int64) of shape {tuple(batch)}",
            fix="give one class number per sample, classes being dimension 1 of the scores",
        )
    if weight is not None and weight.shape != scores.shape[dim : dim + 1]:
        raise InputError(
            f"{name} with class weights of shape {tuple(weight.shape)}",
            expected=f"one weight for each of {scores.shape[dim]} classes",
            fix="give a vector with as many entries as there are classes",
        )


def _out_of_range(name: str, scores: Tensor, problem: IndexError) -> InputError:
    classes = scores.shape[min(1, scores.dim() - 1)]
    return InputError(
        f"{name}: {str(problem).rstrip('.').lower()}",
        expected=f"class indices from 0 to {classes - 1}, or ignore_index",
        fix="number the classes from 0, or give the model more outputs",
    )


@loss("cross_entropy", weigh=weigh_classes, example=_smoothed_example)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    /,
    *,
    weight: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """−w_y log softmax(a)_y for logits (N, C, *) and class indices (N, *), or −Σ_c w_c y_c log softmax(a)_c
    for class probabilities (N, C, *).

    With smoothing ε the target is (1−ε) on its class and ε/C on all. The mean divides by Σ w_y over the
    targets that are not ignored.
    """
    if not target.is_floating_point() or target.shape != logits.shape:
        _check_classes("cross_entropy", logits, target, weight)
        target = target.long()
    if weight is not None:
        logits, weight = _promote(logits, weight)
    try:
        return F.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    except IndexError as problem:
        raise _out_of_range("cross_entropy", logits, problem) from None


@loss("nll", weigh=weigh_classes, example=_class_example)
def nll(
    log_probability: Tensor,
    target: Tensor,
    /,
    *,
    weight: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    """−w_y log p_y for log-probabilities (N, C, *) and class indices (N, *)."""
    _check_classes("nll", log_probability, target, weight)
    if weight is not None:
        log_probability, weight = _promote(log_probability, weight)
    try:
        return F.nll_loss(
            log_probability, target.long(), weight, ignore_index=ignore_index, reduction=reduction
        )
    except IndexError as problem:
        raise _out_of_range("nll", log_probability, problem) from None


def _promote(scores: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(scores.dtype, weight.dtype)
    return scores.to(dtype), weight.to(dtype)


def _divergence_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    prediction = normal(generator, dtype, n, 4).log_softmax(1)
    return (prediction, normal(generator, dtype, n, 4).softmax(1)), {}


@loss("kl_div", weigh=count_elements, example=_divergence_example)
def kl_div(
    log_probability: Tensor, target: Tensor, /, *, log_target: bool = False, reduction: str = "mean"
) -> Tensor:
    """q (log q − log p) for a target q and a prediction log p, element by element.

    Their sum over a row is KL(q‖p). The mean is over elements, as in PyTorch; divide the sum by N for the
    mean divergence.
    """
    require_same_shape("kl_div", log_probability, target)
    return F.kl_div(log_probability, target, reduction=reduction, log_target=log_target)


# What follows from them -----------------------------------------------------------------------


def perplexity(logits: Tensor, target: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """exp of the mean negative log-likelihood per token, of logits (N, C, *) and tokens (N, *); in float32 at
    least, because exp makes much of the few digits of a half-precision mean."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.exp(cross_entropy(wide, target, ignore_index=ignore_index))


def softmax_gradient(logits: Tensor, target: Tensor) -> Tensor:
    """∂ cross-entropy / ∂o = softmax(o) − y for logits (N, C); y are class indices or probabilities."""
    if not target.is_floating_point():
        target = F.one_hot(target, logits.shape[-1]).to(logits.dtype)
    return torch.softmax(logits, -1) - target


def logistic_gradient(inputs: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    """∂ binary cross-entropy / ∂w = x (σ(a) − y), a row per sample: inputs (N, D), logits a = wᵀx (N,)."""
    require_same_shape("logistic_gradient", logits, target)
    return inputs * (torch.sigmoid(logits) - target).unsqueeze(-1)
