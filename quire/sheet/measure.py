"""Chapter 23: measures of classification and regression, against scikit-learn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.functional import measures as M
from quire.nn.heads import IGNORE
from quire.sheet.registry import entry, gap, require, worst
from quire.tasks.language import LanguageModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]

TOLERANCE = 1e-12


def _peer() -> Any:
    import sklearn.metrics  # not needed to list the sheet

    return sklearn.metrics


def _number(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float64)


def _labels(classes: int = 4, n: int = 300) -> tuple[Tensor, Tensor]:
    """Uneven classes, and predictions that are right about half of the time."""
    target = (torch.rand(n) ** 2 * classes).long()
    prediction = torch.where(torch.rand(n) < 0.5, target, torch.randint(0, classes, (n,)))
    return prediction, target


def _against_peer(measure: Code, name: str) -> float:
    """All averages, also with classes that never occur or are never predicted."""
    oracle = getattr(_peer(), name)
    errors = []
    never_predicted = torch.tensor([0, 0, 2, 2]), torch.tensor([0, 1, 2, 2])
    for prediction, target in (_labels(), _labels(2, 50), never_predicted):
        for average in ("macro", "weighted"):
            expected = oracle(target, prediction, average=average, zero_division=0)
            errors.append(gap(measure(prediction, target, 6, average=average), _number(expected)))
        each = oracle(target, prediction, average=None, labels=list(range(6)), zero_division=0)
        errors.append(gap(measure(prediction, target, 6, average="none"), torch.from_numpy(each)))
    return worst(*errors)


def _confusion_picture() -> Figure:
    from quire.report.style import figure

    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, 4, (400,), generator=generator)
    noise = torch.randint(0, 4, (400,), generator=generator)
    right = torch.rand(400, generator=generator) < 0.6
    matrix = M.confusion_matrix(torch.where(right, target, noise), target, 4)
    fig = figure(3.8, 3.4)
    axes = fig.subplots()
    shown = axes.imshow(matrix.numpy(), cmap="Blues")
    for i in range(4):
        for j in range(4):
            dark = matrix[i, j] > matrix.max() / 2
            axes.text(j, i, str(matrix[i, j].item()), ha="center", va="center", color="w" if dark else "k")
    axes.set(title="Confusion matrix", xlabel="predicted class", ylabel="true class")
    axes.set(xticks=range(4), yticks=range(4))
    fig.colorbar(shown, ax=axes, label="samples")
    return fig


@entry(
    "measure/confusion-matrix",
    "Confusion matrix",
    r"M_{ij} = \sum_n \mathbf{1}[y_n = i]\, \mathbf{1}[\hat y_n = j]",
    code=M.confusion_matrix,
    wrong=lambda prediction, target, classes: M.confusion_matrix(target, prediction, classes),  # transposed
    tolerance=0.0,
    picture=_confusion_picture,
)
def _confusion(confusion: Code) -> float:
    prediction, target = _labels()
    loop = torch.zeros(5, 5, dtype=torch.long)
    for p, t in zip(prediction.tolist(), target.tolist(), strict=True):
        loop[t, p] += 1
    oracle = torch.from_numpy(_peer().confusion_matrix(target, prediction, labels=list(range(5))))
    whole = confusion(prediction, target, 5)
    halves = confusion(prediction[:90], target[:90], 5) + confusion(prediction[90:], target[90:], 5)
    return worst(gap(whole, loop), gap(whole, oracle), gap(halves, whole))


@entry(
    "measure/accuracy",
    "Accuracy",
    r"\mathrm{accuracy} = \frac{1}{N} \sum_n \mathbf{1}[\hat y_n = y_n] = "
    r"\frac{\sum_i M_{ii}}{\sum_{ij} M_{ij}}",
    code=(M.accuracy, M.accuracy_from_confusion),
    wrong=(M.accuracy, M.recall_from_confusion),  # balanced accuracy
    tolerance=TOLERANCE,
)
def _accuracy(direct: Code, from_confusion: Code) -> float:
    prediction, target = _labels()
    expected = _number(_peer().accuracy_score(target, prediction))
    matrix = torch.from_numpy(_peer().confusion_matrix(target, prediction))
    return worst(gap(direct(prediction, target), expected), gap(from_confusion(matrix), expected))


@entry(
    "measure/precision",
    "Precision",
    r"P = \frac{TP}{TP + FP}",
    code=M.precision,
    wrong=M.recall,
    tolerance=TOLERANCE,
)
def _precision(precision: Code) -> float:
    return _against_peer(precision, "precision_score")


@entry(
    "measure/recall",
    "Recall",
    r"R = \frac{TP}{TP + FN}",
    code=M.recall,
    wrong=M.precision,
    tolerance=TOLERANCE,
)
def _recall(recall: Code) -> float:
    return _against_peer(recall, "recall_score")


@entry(
    "measure/f1",
    "F1, both forms",
    r"F_1 = \frac{2 P R}{P + R} = \frac{2\,TP}{2\,TP + FP + FN}",
    code=(M.f1, M.f1_from_counts, M.f1_from_precision_recall),
    # The arithmetic mean.
    wrong=(M.f1, M.f1_from_counts, lambda precision, recall: (precision + recall) / 2),
    tolerance=TOLERANCE,
)
def _f1(f1: Code, from_counts: Code, from_precision_recall: Code) -> float:
    prediction, target = _labels()
    scores = _peer().precision_recall_fscore_support(target, prediction, zero_division=0)
    precision, recall, expected = (torch.from_numpy(score) for score in scores[:3])
    classes = range(len(expected))
    tp, fp, fn = (
        torch.tensor([int((one(prediction, k) & two(target, k)).sum()) for k in classes])
        for one, two in ((torch.eq, torch.eq), (torch.eq, torch.ne), (torch.ne, torch.eq))
    )
    by_hand = from_counts(torch.tensor(6), torch.tensor(2), torch.tensor(4))  # P = 3/4, R = 3/5
    return worst(
        _against_peer(f1, "f1_score"),
        gap(from_counts(tp, fp, fn), expected),
        gap(from_precision_recall(precision, recall), expected),
        gap(by_hand, _number(2 / 3)),
        gap(from_precision_recall(_number(0.75), _number(0.6)), _number(2 / 3)),
    )


@entry(
    "measure/from-confusion",
    "Accuracy and macro averages from an additive matrix",
    r"P_i = \frac{M_{ii}}{\sum_j M_{ji}}, \quad R_i = \frac{M_{ii}}{\sum_j M_{ij}}, \quad "
    r"F_{1,i} = \frac{2 M_{ii}}{\sum_j M_{ij} + \sum_j M_{ji}}",
    code=M.measures_from_confusion,
    wrong=lambda matrix: M.measures_from_confusion(matrix.T),  # predictions as rows
    tolerance=TOLERANCE,
)
def _from_confusion(measures: Code) -> float:
    peer = _peer()
    prediction, target = _labels()
    found = measures(torch.from_numpy(peer.confusion_matrix(target, prediction)))
    macro = {"average": "macro", "zero_division": 0}
    return worst(
        gap(_number(found["accuracy"]), _number(peer.accuracy_score(target, prediction))),
        gap(_number(found["precision"]), _number(peer.precision_score(target, prediction, **macro))),
        gap(_number(found["recall"]), _number(peer.recall_score(target, prediction, **macro))),
        gap(_number(found["f1"]), _number(peer.f1_score(target, prediction, **macro))),
    )


def _scores() -> tuple[Tensor, Tensor]:
    """Scores with many ties, for a class of about a third of the samples."""
    target = (torch.rand(200) < 0.35).long()
    scores = (torch.randn(200, dtype=torch.float64) + target) * 4
    return scores.round() / 4, target


def _curve_picture() -> Figure:
    from quire.report.style import figure

    generator = torch.Generator().manual_seed(5)
    target = (torch.rand(300, generator=generator) < 0.35).long()
    fig = figure(4.6, 3.2)
    axes = fig.subplots()
    for separation in (0.5, 1.5, 3.0):
        scores = torch.randn(300, generator=generator) + separation * target
        precision, recall, _ = M.precision_recall_curve(scores, target)
        area = M.average_precision(scores, target).item()
        axes.step(recall, precision, where="post", label=f"separation {separation:g}, AP {area:.2f}")
    axes.set(title="Precision-recall curve", xlabel="recall", ylabel="precision", ylim=(0, 1.05))
    axes.legend()
    return fig


def _one_point_a_sample(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ranks samples of equal score, as if their order meant something."""
    return M.precision_recall_curve(scores + 1e-9 * torch.arange(len(scores)), target)


@entry(
    "measure/precision-recall-curve",
    "Precision-recall curve",
    r"P(t) = \frac{|\{n : s_n \ge t,\, y_n = 1\}|}{|\{n : s_n \ge t\}|}, \qquad "
    r"R(t) = \frac{|\{n : s_n \ge t,\, y_n = 1\}|}{|\{n : y_n = 1\}|}",
    code=M.precision_recall_curve,
    wrong=_one_point_a_sample,
    tolerance=TOLERANCE,
    picture=_curve_picture,
)
def _curve(curve: Code) -> float:
    scores, target = _scores()
    expected = _peer().precision_recall_curve(target, scores)
    errors = [
        gap(a, torch.from_numpy(b.copy())) for a, b in zip(curve(scores, target), expected, strict=True)
    ]
    precision, recall, thresholds = curve(scores, target)
    for k in range(0, len(thresholds), 7):
        called = scores >= thresholds[k]
        errors.append(gap(precision[k], target[called].double().mean()))
        errors.append(gap(recall[k], target[called].sum().double() / target.sum()))
    return worst(*errors)


def _trapezoid(scores: Tensor, target: Tensor) -> Tensor:
    """Joins the points by straight lines, which precision between them does not follow."""
    precision, recall, _ = M.precision_recall_curve(scores, target)
    return -torch.trapezoid(precision, recall)


@entry(
    "measure/average-precision",
    "Average precision, the area under the precision-recall curve",
    r"AP = \sum_k (R_k - R_{k-1})\, P_k",
    code=M.average_precision,
    wrong=_trapezoid,
    tolerance=TOLERANCE,
)
def _average_precision(area: Code) -> float:
    scores, target = _scores()
    expected = _number(_peer().average_precision_score(target, scores))
    # By hand: the two positives stand at ranks 1 and 3, so AP = (1/1 + 2/3) / 2.
    ranked = area(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([1, 0, 1, 0]))
    return worst(gap(area(scores, target), expected), gap(ranked, _number(5 / 6)))


class _Words(nn.Module):
    """A bigram model: the logits of the next word are a row for each word."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table = nn.Parameter(2 * torch.randn(words, words, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def _mean_of_batches(model: nn.Module) -> LanguageModel:
    """Averages the means of batches, however many tokens each of them had."""
    task = LanguageModel(model)
    honest = task.tally

    def tally(batch: Batch) -> dict[str, Tensor]:
        found = honest(batch)
        return {name: value / found["tokens"].clamp(min=1) for name, value in found.items()}

    task.tally = tally  # type: ignore[method-assign]
    return task


@entry(
    "measure/perplexity",
    "Perplexity of a text that is read in batches",
    r"\mathrm{PPL} = \exp\Big(-\frac{\sum_b \sum_{n \in b} \log p(x_n \mid x_{<n})}{\sum_b |b|}\Big), \qquad "
    r"p = 1/V \text{ everywhere}: \mathrm{PPL} = V",
    code=LanguageModel,
    wrong=_mean_of_batches,
    tolerance=1e-6,  # judged in float32
)
def _perplexity(task_of: Code) -> float:
    words = 7
    task = task_of(_Words(words))
    inputs, target = torch.randint(0, words, (2, 9, 5))
    target[torch.rand(9, 5) < 0.3] = IGNORE
    target[0] = IGNORE  # a row that says nothing
    product, count, right = 1.0, 0, 0
    for row, wanted in zip(inputs.flatten().tolist(), target.flatten().tolist(), strict=True):
        if wanted != IGNORE:
            chances = task.model.table[row].softmax(0).tolist()
            product, count, right = (
                product * chances[wanted],
                count + 1,
                right + (max(chances) == chances[wanted]),
            )
    whole = Batch({"inputs": inputs, "target": target}, torch.arange(9))
    errors = []
    for parts in ([whole], whole.split(3), whole.split(9)):
        tallies = [task.tally(part) for part in parts]
        found = task.measures({name: sum(tally[name] for tally in tallies) for name in tallies[0]})
        errors += [
            gap(_number(found["perplexity"]), _number(product ** (-1 / count))),
            gap(_number(found["bits_per_token"]), _number(-math.log2(product) / count)),
            gap(_number(found["accuracy"]), _number(right / count)),
        ]
    with torch.no_grad():
        task.model.table.zero_()
    even = task.measures(task.tally(whole))
    return worst(*errors, gap(_number(even["perplexity"]), _number(float(words))))


def _regression(measure: Code, name: str) -> float:
    errors = []
    for scale in ([2.0], [1.0, 2.0, 5.0]):
        target = torch.randn(80, len(scale), dtype=torch.float64) * torch.tensor(scale)
        target = target.squeeze(1)  # one output is a vector, three are a matrix
        prediction = target + torch.randn_like(target)
        errors.append(gap(measure(prediction, target), _number(getattr(_peer(), name)(target, prediction))))
    return worst(*errors)


@entry(
    "measure/mean-squared-error",
    "Mean squared error",
    r"\mathrm{MSE} = \frac{1}{N} \sum_n (y_n - \hat y_n)^2",
    code=M.mean_squared_error,
    wrong=lambda p, t: M.mean_squared_error(p, t) / 2,
    tolerance=TOLERANCE,
)
def _mean_squared(measure: Code) -> float:
    return _regression(measure, "mean_squared_error")


@entry(
    "measure/root-mean-squared-error",
    "Root mean squared error",
    r"\mathrm{RMSE} = \sqrt{\tfrac{1}{N} \textstyle\sum_n (y_n - \hat y_n)^2}",
    code=M.root_mean_squared_error,
    wrong=M.mean_absolute_error,
    tolerance=TOLERANCE,
)
def _root(measure: Code) -> float:
    return _regression(measure, "root_mean_squared_error")


@entry(
    "measure/mean-absolute-error",
    "Mean absolute error",
    r"\mathrm{MAE} = \frac{1}{N} \sum_n |y_n - \hat y_n|",
    code=M.mean_absolute_error,
    wrong=M.root_mean_squared_error,
    tolerance=TOLERANCE,
)
def _mean_absolute(measure: Code) -> float:
    return _regression(measure, "mean_absolute_error")


@entry(
    "measure/r2",
    "Coefficient of determination",
    r"R^2 = 1 - \frac{\sum_n (y_n - \hat y_n)^2}{\sum_n (y_n - \bar y)^2}",
    code=M.r2_score,
    # The squared correlation, which forgives a wrong offset and scale.
    wrong=lambda p, t: torch.corrcoef(torch.stack([p.flatten(), t.flatten()]))[0, 1].square(),
    tolerance=TOLERANCE,
)
def _r2(measure: Code) -> float:
    target = torch.randn(30, dtype=torch.float64)
    mean = measure(target.mean().expand(30), target)  # predicting the mean explains nothing
    constant = torch.ones(5, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [_peer().r2_score(constant, constant), _peer().r2_score(constant, constant + 1)]
    edge = [measure(constant, constant), measure(constant + 1, constant)]
    errors = [gap(a, _number(b)) for a, b in zip(edge, expected, strict=True)]
    return worst(_regression(measure, "r2_score"), gap(mean, _number(0.0)), *errors)


@entry(
    "measure/from-sums",
    "Regression measures from additive sums",
    r"\sum_n (y_n - \bar y)^2 = \sum_n y_n^2 - \tfrac{1}{N} \Big(\sum_n y_n\Big)^2",
    code=(M.regression_sums, M.measures_from_sums),
    # Leaves the mean out of the spread.
    wrong=(lambda p, t: {**M.regression_sums(p, t), "sum": t.sum(0) * 0}, M.measures_from_sums),
    tolerance=1e-10,
)
def _from_sums(sums: Code, measures: Code) -> float:
    peer = _peer()
    target = torch.randn(100, 2, dtype=torch.float64) * 3 + 20
    prediction = target + torch.randn(100, 2, dtype=torch.float64)
    parts = [sums(p, t) for p, t in zip(prediction.split(33), target.split(33), strict=True)]
    added = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    names = {
        "mse": "mean_squared_error",
        "rmse": "root_mean_squared_error",
        "mae": "mean_absolute_error",
        "r2": "r2_score",
    }
    found = measures(added)
    oracle = {short: getattr(peer, name)(target, prediction) for short, name in names.items()}
    return worst(*(gap(_number(found[short]), _number(oracle[short])) for short in names))


@entry(
    "measure/interval-coverage",
    "Coverage of intervals",
    r"\mathrm{coverage} = \frac{1}{N} \sum_n \mathbf{1}[l_n \le y_n \le u_n]",
    code=M.interval_coverage,
    wrong=lambda low, high, target: (target <= high).double().mean(),  # one side only
    tolerance=4.0,  # in standard errors
)
def _coverage(coverage: Code) -> float:
    low, high = torch.tensor([0.0, 0.0, 0.0, 2.0]), torch.tensor([1.0, 1.0, 1.0, 3.0])
    by_hand = gap(coverage(low, high, torch.tensor([0.0, 1.0, 1.5, 1.0])), _number(0.5))
    # The central 90% of a normal distribution, on 20,000 draws.
    bound = 1.6448536269514722
    draws = torch.randn(20_000, dtype=torch.float64)
    low, high = torch.full_like(draws, -bound), torch.full_like(draws, bound)
    error = abs(float(coverage(low, high, draws)) - 0.9) / math.sqrt(0.9 * 0.1 / 20_000)
    return worst(error, require(by_hand == 0))
