"""Measures of classification and regression, and the sums they can be had from.

N samples, C classes; M[i, j] samples of true class i that were predicted as j; tp, fp, fn true positives,
false positives and false negatives of each class.

A confusion matrix and the sums of `regression_sums` add up over batches and processes, and everything else
follows from them. Counts are exact integers and ratios are float64, whatever the dtype of the model. A ratio
with nothing to count in its denominator is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name
from quire.functional.reduction import require_same_shape

Average = Literal["macro", "weighted", "none"]


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where the whole is 0."""
    part, whole = part.double(), whole.double()
    return torch.where(whole == 0, 0.0, part / torch.where(whole == 0, 1.0, whole))


# Classification -------------------------------------------------------------------------------


def confusion_matrix(
    prediction: Tensor, target: Tensor, classes: int, *, ignore_index: int | None = None
) -> Tensor:
    """M[i, j] = number of samples of true class i predicted as class j, (C, C) on the inputs' device."""
    require_same_shape("confusion_matrix", prediction, target)
    for numbers in (prediction, target):
        if numbers.is_floating_point() and not bool((numbers == numbers.trunc()).all()):
            raise InputError(
                "confusion_matrix of numbers with a fraction, or of none",
                expected="class numbers",
                fix="take the likeliest class first: scores.argmax(-1), or (probability > 0.5).long()",
            )
    prediction, target = prediction.flatten().long(), target.flatten().long()
    if ignore_index is not None:
        kept = target != ignore_index
        prediction, target = prediction[kept], target[kept]
    if len(target):
        low, high = torch.stack([prediction, target]).aminmax()
        if low < 0 or high >= classes:
            raise InputError(
                f"confusion_matrix of class numbers from {low.item()} to {high.item()}",
                expected=f"numbers from 0 to {classes - 1}",
                fix="give the number of classes, and number them from 0",
            )
    cells = torch.bincount(target * classes + prediction, minlength=classes * classes)
    return cells.view(classes, classes)


def class_counts(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tp, fp and fn of each class: the diagonal, the rest of its column, the rest of its row."""
    tp = matrix.diagonal()
    return tp, matrix.sum(0) - tp, matrix.sum(1) - tp


def f1_from_counts(tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
    """F1 = 2tp / (2tp + fp + fn)."""
    return _ratio(2 * tp, 2 * tp + fp + fn)


def f1_from_precision_recall(precision: Tensor, recall: Tensor) -> Tensor:
    """F1 = 2PR / (P + R), the harmonic mean of precision and recall."""
    return _ratio(2 * precision * recall, precision + recall)


def _average(values: Tensor, matrix: Tensor, average: str) -> Tensor:
    """Macro: over the classes that occur, as target or as prediction. Weighted: by the number of targets."""
    if average == "none":
        return values
    if average not in ("macro", "weighted"):
        raise unknown_name("average", average, ("macro", "weighted", "none"))
    support = matrix.sum(1)
    weights = support if average == "weighted" else (support + matrix.sum(0) > 0)
    return _ratio((values * weights).sum(), weights.sum())


def accuracy_from_confusion(matrix: Tensor) -> Tensor:
    """Σ_i M[i, i] / ΣM."""
    return _ratio(matrix.diagonal().sum(), matrix.sum())


def precision_from_confusion(matrix: Tensor, average: str = "macro") -> Tensor:
    """P = tp / (tp + fp) of each class, averaged."""
    tp, fp, _ = class_counts(matrix)
    return _average(_ratio(tp, tp + fp), matrix, average)


def recall_from_confusion(matrix: Tensor, average: str = "macro") -> Tensor:
    """R = tp / (tp + fn) of each class, averaged."""
    tp, _, fn = class_counts(matrix)
    return _average(_ratio(tp, tp + fn), matrix, average)


def f1_from_confusion(matrix: Tensor, average: str = "macro") -> Tensor:
    """F1 = 2tp / (2tp + fp + fn) of each class, averaged."""
    return _average(f1_from_counts(*class_counts(matrix)), matrix, average)


def measures_from_confusion(matrix: Tensor) -> dict[str, float]:
    """Accuracy and the macro averages of precision, recall and F1."""
    values = {
        "accuracy": accuracy_from_confusion(matrix),
        "precision": precision_from_confusion(matrix),
        "recall": recall_from_confusion(matrix),
        "f1": f1_from_confusion(matrix),
    }
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    """Share of predictions that equal their target."""
    require_same_shape("accuracy", prediction, target)
    right = (prediction == target).sum()
    return _ratio(right, torch.full_like(right, target.numel()))


def precision(prediction: Tensor, target: Tensor, classes: int, *, average: str = "macro") -> Tensor:
    """P = tp / (tp + fp): how many of those predicted as a class belong to it.

    `average="none"` gives a value per class; the second of them is the usual precision of a yes-or-no answer.
    """
    return precision_from_confusion(confusion_matrix(prediction, target, classes), average)


def recall(prediction: Tensor, target: Tensor, classes: int, *, average: str = "macro") -> Tensor:
    """R = tp / (tp + fn): how many of a class were predicted as such."""
    return recall_from_confusion(confusion_matrix(prediction, target, classes), average)


def f1(prediction: Tensor, target: Tensor, classes: int, *, average: str = "macro") -> Tensor:
    """F1 = 2tp / (2tp + fp + fn) = 2PR / (P + R)."""
    return f1_from_confusion(confusion_matrix(prediction, target, classes), average)


def precision_recall_curve(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Precision and recall of `score ≥ threshold` for each distinct score, thresholds rising.

    `target` is 0 or 1. The last point, precision 1 at recall 0, has no threshold.
    """
    require_same_shape("precision_recall_curve", scores, target)
    if scores.dim() != 1 or not len(scores):
        raise InputError(
            f"precision_recall_curve of shape {tuple(scores.shape)}",
            expected="a vector with a score for each sample",
            fix="flatten the scores, or take one class at a time",
        )
    if not bool(((target == 0) | (target == 1)).all()):
        raise InputError(
            "precision_recall_curve with targets other than 0 and 1",
            expected="1 for the class that is looked for, else 0",
            fix="compare the target with that class: (target == k).long()",
        )
    if bool(scores.isnan().any()):
        raise InputError(
            f"precision_recall_curve with {int(scores.isnan().sum())} scores that are not numbers",
            expected="scores that can be sorted",
            fix="look for NaN in the model's output",
        )
    scores, order = scores.sort(stable=True)
    positive = target[order].long()
    # Equal scores are called together, so a point stands where a new score begins.
    starts = torch.cat([scores.new_ones(1, dtype=torch.bool), scores[1:] != scores[:-1]])
    called = torch.arange(len(scores), 0, -1, device=scores.device)[starts]
    tp = positive.flip(0).cumsum(0).flip(0)[starts]
    end = tp.new_zeros(1)
    return (
        torch.cat([_ratio(tp, called), end.double() + 1]),
        torch.cat([_ratio(tp, positive.sum()), end.double()]),
        scores[starts],
    )


def average_precision(scores: Tensor, target: Tensor) -> Tensor:
    """AP = Σ_k (R_k − R_{k−1}) P_k, the area under the steps of the precision-recall curve."""
    precisions, recalls, _ = precision_recall_curve(scores, target)
    return ((recalls[:-1] - recalls[1:]) * precisions[:-1]).sum()


# Regression -----------------------------------------------------------------------------------


def regression_sums(prediction: Tensor, target: Tensor) -> dict[str, Tensor]:
    """n, Σy, Σy², Σ(ŷ−y)² and Σ|ŷ−y| over samples for each output, in float64; they add up over batches."""
    require_same_shape("regression_sums", prediction, target)
    y = target.double()
    error = prediction.double() - y
    if not y.dim():
        raise InputError("regression_sums of a single number", expected="a tensor with a row for each sample")
    return {
        "n": y.new_full((), len(y)),
        "sum": y.sum(0),
        "squares": y.square().sum(0),
        "squared_errors": error.square().sum(0),
        "absolute_errors": error.abs().sum(0),
    }


def measures_from_sums(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """mse, rmse, mae and r2 from the sum of `regression_sums`, averaged over outputs."""
    n, spread = sums["n"], _spread(sums)
    values = {
        "mse": _ratio(sums["squared_errors"], n).mean(),
        "rmse": _ratio(sums["squared_errors"], n).sqrt().mean(),
        "mae": _ratio(sums["absolute_errors"], n).mean(),
        "r2": _explained(sums["squared_errors"], spread).mean(),
    }
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def _spread(sums: Mapping[str, Tensor]) -> Tensor:
    """Σ(y − ȳ)² = Σy² − (Σy)²/n, where what rounding leaves of a constant target counts as 0."""
    spread = sums["squares"] - _ratio(sums["sum"].square(), sums["n"])
    rounding = 4 * torch.finfo(spread.dtype).eps * sums["n"].sqrt() * sums["squares"]
    return torch.where(spread <= rounding, 0.0, spread)


def _explained(squared_errors: Tensor, spread: Tensor) -> Tensor:
    """1 − Σ(ŷ−y)²/Σ(y−ȳ)²; for a constant target 1 where every prediction is right, else 0."""
    constant = (squared_errors == 0).double()
    return torch.where(spread == 0, constant, 1 - _ratio(squared_errors, spread))


def mean_squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean of (ŷ − y)²."""
    require_same_shape("mean_squared_error", prediction, target)
    return (prediction.double() - target.double()).square().mean()


def root_mean_squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """√ of the mean of (ŷ − y)² of each output, averaged over outputs."""
    require_same_shape("root_mean_squared_error", prediction, target)
    return (prediction.double() - target.double()).square().mean(0).sqrt().mean()


def mean_absolute_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean of |ŷ − y|."""
    require_same_shape("mean_absolute_error", prediction, target)
    return (prediction.double() - target.double()).abs().mean()


def r2_score(prediction: Tensor, target: Tensor) -> Tensor:
    """R² = 1 − Σ(ŷ−y)²/Σ(y−ȳ)² of each output, averaged over outputs."""
    require_same_shape("r2_score", prediction, target)
    y = target.double()
    errors = (prediction.double() - y).square().sum(0)
    spread = (y - y.mean(0)).square().sum(0)
    rounding = (4 * torch.finfo(y.dtype).eps) ** 2 * y.square().sum(0)
    return _explained(errors, torch.where(spread <= rounding, 0.0, spread)).mean()


def interval_coverage(low: Tensor, high: Tensor, target: Tensor) -> Tensor:
    """Share of targets in [low, high]; a calibrated 90% interval covers 90% of them."""
    require_same_shape("interval_coverage", low, high)
    require_same_shape("interval_coverage", low, target)
    inside = ((low <= target) & (target <= high)).sum()
    return _ratio(inside, torch.full_like(inside, target.numel()))
