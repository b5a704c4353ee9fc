"""Training again on some of the rows: by folds, and on resamples that tell bias from variance.

N training rows, K folds, R repeats, M judged rows, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.doctor.pictures import new_axes
from quire.doctor.studies.refit import HELD, Answers, Counter, Part, Progress, Refit, Study, need
from quire.errors import InputError
from quire.functional import generalise as formulas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMITS = {
    **dict.fromkeys(("accuracy", "precision", "recall", "f1", "coverage"), (0.0, 1.0)),
    **dict.fromkeys(("rmse", "mae"), (0.0, math.inf)),
    "r2": (-math.inf, 1.0),
}
"""Below and above which a measure is never."""

# Folds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A mean, and where it lies with the level's probability."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ({self.low:.4g} to {self.high:.4g})"


def fold_interval(values: Sequence[float], folds: int, level: float = 0.95) -> Interval:
    """mean ± t·s·√(1/n + 1/(K−1)) with n−1 degrees of freedom, n = K·R values.

    The second term under the root is the ratio of judged to training rows: folds share training rows, so
    their spread alone would make the interval too short (Nadeau and Bengio 2003).
    """
    from scipy import stats

    need(len(values), 2, "values", "one has no spread")
    found = torch.tensor(list(values), dtype=torch.float64)
    reach = float(stats.t.ppf((1 + level) / 2, len(values) - 1))
    reach *= float(found.std()) * math.sqrt(1 / len(values) + 1 / (folds - 1))
    mean = float(found.mean())
    return Interval(mean, mean - reach, mean + reach)


@dataclass(frozen=True)
class Folds(Study):
    """K-fold: each row was left out once in each repeat, and judged by a model that had not seen it."""

    measure: str
    folds: int
    repeats: int
    train: dict[str, list[float]]
    """Each measure on the rows that were learned from, (K·R)."""
    held: dict[str, list[float]]
    """On the rows left out."""
    level: float = 0.95

    def interval(self, measure: str) -> Interval:
        """Of the measure on rows left out, within what the measure can be."""
        found = fold_interval(self.held[measure], self.folds, self.level)
        least, most = LIMITS.get(measure.rpartition(".")[2], (-math.inf, math.inf))
        return Interval(found.mean, max(found.low, least), min(found.high, most))

    @property
    def verdict(self) -> str:
        seen = sum(self.train[self.measure]) / len(self.train[self.measure])
        found = self.interval(self.measure)
        times = f", {self.repeats} times" if self.repeats > 1 else ""
        return (
            f"On rows left out {self.measure} is {found.mean:.4g}, and with {self.level:.0%} confidence from "
            f"{found.low:.4g} to {found.high:.4g} ({self.folds} folds{times}); on the rows learned from it "
            f"is {seen:.4g}."
        )

    @property
    def table(self) -> tuple[list[str], list[list[object]]]:
        rows: list[list[object]] = []
        for name, values in self.held.items():
            found = self.interval(name)
            seen = sum(self.train[name]) / len(self.train[name])
            rows.append([name, found.mean, found.low, found.high, min(values), max(values), seen])
        return ["measure", "left out", "low", "high", "worst fold", "best fold", "learned from"], rows

    @property
    def numbers(self) -> dict[str, Any]:
        intervals = {name: vars(self.interval(name)) for name in self.held}
        return {
            "measure": self.measure, "folds": self.folds, "repeats": self.repeats, "level": self.level,
            "train": self.train, "held": self.held, "intervals": intervals,
        }  # fmt: skip

    def figure(self) -> Figure:
        """The measure of each fold, with the interval of its mean."""
        picture, axes = new_axes(f"{self.measure} by {self.folds} folds", "fit", self.measure)
        count = range(1, len(self.held[self.measure]) + 1)
        found = self.interval(self.measure)
        axes.plot(count, self.train[self.measure], "o", color="tab:gray", label="rows learned from")
        axes.plot(count, self.held[self.measure], "o", color="tab:blue", label="rows left out")
        axes.axhline(found.mean, color="tab:blue", label=f"mean {found.mean:.4g}")
        axes.axhspan(found.low, found.high, color="tab:blue", alpha=0.15, label=f"{self.level:.0%} interval")
        axes.set_xticks(list(count))
        axes.legend()
        return picture


def folds(
    refit: Refit, k: int = 5, *, repeats: int = 1, seed: int = 0, progress: Progress | None = None
) -> Folds:
    """Train K·R times on K−1 of K parts of the rows, and judge by the part left out. Parts are drawn anew in
    each repeat; where rows have classes, each part has its share of them."""
    need(repeats, 1, "repeats", "each is one round of folds")
    plans = [
        formulas.k_fold(refit.rows, k, torch.Generator().manual_seed(seed + repeat), refit.stratify)
        for repeat in range(repeats)
    ]
    count = Counter(k * repeats, progress)
    train: dict[str, list[float]] = {}
    held: dict[str, list[float]] = {}
    for number, (inside, outside) in enumerate(split for plan in plans for split in plan):
        judge = refit(inside, seed + number)
        for found, rows in ((train, inside), (held, outside)):
            for name, value in judge.measures(rows).items():
                found.setdefault(name, []).append(value)
        count()
    # A measure that some part lacks, as where none of its rows has a class, has no mean over parts.
    whole = [name for name in held if len(held[name]) == len(train.get(name, ())) == k * repeats]
    if not whole:
        raise InputError(
            "no measure that every fold has", expected="rows to judge by in each", fix="take fewer folds"
        )
    measure = refit.measure if refit.measure in whole else whole[0]
    order = [measure, *(name for name in whole if name != measure)]
    return Folds(measure, k, repeats, {n: train[n] for n in order}, {n: held[n] for n in order})


# Bias and variance --------------------------------------------------------------------------------


@dataclass(frozen=True)
class BiasVariance(Study):
    """Expected error = bias² + variance + noise over training sets drawn from the rows.

    Of values the error is squared. Of classes it is the Brier score ‖p − e_y‖², whose parts are those of the
    C probabilities added up; of classes without probabilities it is half of that, the 0-1 loss.
    """

    loss: str
    """ "squared error", "Brier score" or "0-1 loss"."""
    bias2: formulas.Estimate
    """With the noise of the targets in it, unless that was given."""
    variance: formulas.Estimate
    noise: float
    total: formulas.Estimate
    refits: int
    drawn: str
    judged: int
    """M."""

    @property
    def share(self) -> float:
        """Of the variance in the error."""
        return self.variance.value / self.total.value if self.total.value > 0 else 0.0

    @property
    def verdict(self) -> str:
        mixed = (
            "bias² with the noise of the targets"
            if not self.noise
            else f"bias² (noise {self.noise:.4g} apart)"
        )
        found = (
            f"The {self.loss} of {self.total.value:.4g} is {self.bias2.value:.4g} {mixed} and "
            f"{self.variance.value:.4g} variance ({self.share:.0%}), over {self.refits} fits to {self.drawn}"
        )
        if self.share > 0.5:
            return f"{found}: it is a matter of which rows it saw; more rows, weight decay or bagging help."
        if self.share < 0.2:
            return f"{found}: all fits err alike; a bigger model or better inputs help, more rows hardly."
        return f"{found}: both count."

    @property
    def parts(self) -> dict[str, float]:
        return {"bias²": self.bias2.value, "variance": self.variance.value, "noise": self.noise}

    @property
    def table(self) -> tuple[list[str], list[list[object]]]:
        rows: list[list[object]] = [
            ["bias²" if self.noise else "bias² + noise", self.bias2.value, self.bias2.standard_error],
            ["variance", self.variance.value, self.variance.standard_error],
            *([["noise", self.noise, None]] if self.noise else []),
            [self.loss, self.total.value, self.total.standard_error],
        ]
        return ["part", "value", "standard error"], rows

    @property
    def numbers(self) -> dict[str, Any]:
        return {
            "loss": self.loss, "bias2": vars(self.bias2), "variance": vars(self.variance),
            "noise": self.noise, "total": vars(self.total), "refits": self.refits, "drawn": self.drawn,
            "judged": self.judged,
        }  # fmt: skip

    def figure(self) -> Figure:
        picture, axes = new_axes(f"Where the {self.loss} comes from", f"{self.refits} fits", self.loss)
        height = 0.0
        for name, value in self.parts.items():
            axes.bar(["error"], [max(value, 0.0)], bottom=height, label=f"{name} {value:.3g}", width=0.4)
            height += max(value, 0.0)
        axes.errorbar(
            ["error"], [self.total.value], [2 * self.total.standard_error], color="black", capsize=5
        )
        axes.legend()
        return picture


def bias_variance(
    refit: Refit,
    *,
    resamples: int = 20,
    seed: int = 0,
    noise_std: float = 0.0,
    twice: bool = True,
    progress: Progress | None = None,
) -> BiasVariance:
    """Train on resamples of the rows, each with a seed of its own, and split the error on rows held out.

    A resample has as many rows, drawn with replacement; with `twice` false it is a random half of the rows,
    for what must not see a row twice. `noise_std` is the noise of the targets, where it is known.
    """
    need(resamples, 2, "resamples", "one fit has no variance")
    held = refit.draw(refit.rows // HELD, seed) if refit.apart is None else None
    pool = torch.arange(refit.rows)
    if held is not None:
        pool = pool[~torch.isin(pool, held)]
    part: Part = refit.apart if refit.apart is not None else held  # type: ignore[assignment]
    count = Counter(resamples, progress)
    generator = torch.Generator().manual_seed(seed)
    given: list[Answers] = []
    for number in range(resamples):
        drawn = (
            torch.randint(len(pool), (len(pool),), generator=generator)
            if twice
            else torch.randperm(len(pool), generator=generator)[: len(pool) // 2]
        )
        given.append(refit(pool[drawn], seed + number).answers(part))
        count()
    said = iter([_vector(answers) for answers in given])

    def learned(x: Tensor, y: Tensor) -> formulas.Predict:
        one = next(said)
        return lambda rows: one

    truth, scale, loss = _truth(given[0])
    found = formulas.bias_variance(
        learned, lambda _: (pool, pool), truth, truth, noise_std=noise_std, resamples=resamples,
        generator=generator,
    )  # fmt: skip

    def scaled(estimate: formulas.Estimate) -> formulas.Estimate:
        return formulas.Estimate(scale * estimate.value, scale * estimate.standard_error)

    how = "resamples with replacement" if twice else "random halves of the rows"
    return BiasVariance(
        loss, scaled(found.bias2), scaled(found.variance), scale * found.noise, scaled(found.total),
        resamples, how, len(given[0].target),
    )  # fmt: skip


def _vector(answers: Answers) -> Tensor:
    """Values (M,), or probabilities as one vector (M·C,)."""
    found = answers.values if answers.values is not None else answers.probabilities
    assert found is not None
    return found.double().cpu().flatten()


def _truth(answers: Answers) -> tuple[Tensor, float, str]:
    """What `_vector` should be, by what a mean over it becomes the loss of a row, and that loss's name."""
    target = answers.target.cpu()
    if answers.values is not None:
        return target.double(), 1.0, "squared error"
    assert answers.probabilities is not None
    classes = answers.probabilities.shape[1]
    chosen = torch.nn.functional.one_hot(target.long(), classes).double().flatten()
    return (
        chosen,
        classes / 2 if answers.sure else float(classes),
        "0-1 loss" if answers.sure else "Brier score",
    )
