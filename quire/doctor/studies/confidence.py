"""Whether probabilities are what they say: of the rows called 80% sure, 80% should be right.

M rows, C classes, B bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.doctor.pictures import new_axes
from quire.doctor.studies.refit import Answers, Study
from quire.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWS = 200
"""Targets that are drawn from the model's own probabilities, to see which error chance alone gives."""
LEVELS = tuple(i / 20 for i in range(1, 20))
"""Central intervals of values that are looked at."""


def reliability(confidence: Tensor, right: Tensor, bins: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """Mean confidence, share of right answers and number of rows of each of B bins of equal width."""
    place = (confidence.double() * bins).long().clamp(0, bins - 1)
    count = torch.bincount(place, minlength=bins).double()
    said = torch.bincount(place, confidence.double(), minlength=bins)
    true = torch.bincount(place, right.double(), minlength=bins)
    filled = count.clamp(min=1)
    return said / filled, true / filled, count


def expected_calibration_error(confidence: Tensor, right: Tensor, bins: int = 10) -> float:
    """Σ_b n_b/M·|share right − mean confidence| over bins of the confidence."""
    said, true, count = reliability(confidence, right, bins)
    return float((count * (said - true).abs()).sum() / count.sum())


def best_temperature(probabilities: Tensor, target: Tensor) -> float:
    """T that makes −log softmax(ln p / T) of the targets least; above 1 the probabilities are too sure.

    The loss is convex in 1/T, so the place where its slope changes sign is found by bisection.
    """
    logits = probabilities.double().clamp(min=1e-30).log()
    chosen = logits.gather(1, target[:, None].long())[:, 0]

    def slope(inverse: float) -> float:
        return float(((logits * inverse).softmax(1) * logits).sum(1).mean() - chosen.mean())

    low, high = 1e-3, 1e3
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / math.sqrt(low * high)


@dataclass(frozen=True)
class Calibration(Study):
    """What was said against what happened. Of classes: the probability of the likeliest class against the
    share of right answers, in bins. Of values: the level of central intervals against the share inside."""

    of: str
    """ "classes" or "values"."""
    said: list[float]
    happened: list[float]
    count: list[float]
    error: float
    """Expected calibration error; of values the mean difference over the levels."""
    by_chance: float
    """What the error of a perfectly calibrated model would stay below in 95 of 100 such parts."""
    factor: float
    """Temperature to divide logits by; of values the factor of the deviations. Fitted on other rows than
    the rest where there are any."""
    error_after: float
    """With that factor."""
    rows: int

    @property
    def calibrated(self) -> bool:
        return self.error <= self.by_chance

    @property
    def verdict(self) -> str:
        name = "expected calibration error" if self.of == "classes" else "mean difference of coverage"
        seen = f"the {name} is {self.error:.3g} on {self.rows:,} rows, where chance alone gives up to"
        if self.calibrated:
            return f"Calibrated: {seen} {self.by_chance:.3g}."
        sure = "sure" if self.of == "classes" else "narrow"
        how = "Too " + sure if self.factor > 1 else "Not " + sure + " enough"
        what = "logits by the temperature" if self.of == "classes" else "deviations by"
        verb = "divide" if self.of == "classes" else "multiply"
        after = f"which leaves {self.error_after:.3g}"
        if self.error_after >= self.error:
            after = f"though that leaves {self.error_after:.3g}: one factor is not enough"
        return f"{how}: {seen} {self.by_chance:.3g}; {verb} {what} {self.factor:.3g}, {after}."

    @property
    def table(self) -> tuple[list[str], list[list[object]]]:
        rows: list[list[object]] = [
            [said, happened, int(count)]
            for said, happened, count in zip(self.said, self.happened, self.count, strict=True)
            if count
        ]
        return (
            ["confidence", "right", "rows"] if self.of == "classes" else ["level", "inside", "rows"]
        ), rows

    @property
    def numbers(self) -> dict[str, Any]:
        return {**vars(self), "calibrated": self.calibrated}

    def figure(self) -> Figure:
        """The reliability diagram."""
        labels = ("level of the interval", "share of targets inside")
        if self.of == "classes":
            labels = ("probability of the answer", "share of right answers")
        title = "Calibrated" if self.calibrated else "Not calibrated"
        picture, axes = new_axes(title, *labels, size=(4.8, 4.6))
        shown = [i for i, count in enumerate(self.count) if count]
        said, happened = ([values[i] for i in shown] for values in (self.said, self.happened))
        axes.plot([0, 1], [0, 1], ":", color="tab:gray", label="calibrated")
        axes.plot(said, happened, "o-", color="tab:blue", label=f"error {self.error:.3g}")
        if self.of == "classes":
            share = [self.count[i] / self.rows for i in shown]
            axes.bar(said, share, width=0.04, color="tab:blue", alpha=0.2, label="share of the rows")
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.legend()
        return picture


def calibration(
    answers: Answers, other: Answers | None = None, *, bins: int = 10, seed: int = 0
) -> Calibration:
    """How far probabilities, or the deviations of values, can be trusted. The factor that would repair them
    is fitted on the `other` rows; without them on every second row, and the rest is then judged."""
    if answers.sure or (answers.probabilities is None and answers.deviations is None):
        raise InputError(
            "answers without probabilities",
            expected="probabilities of classes, or values with their deviations",
            fix="study a model that says how sure it is, such as a classifier with predict_proba",
        )
    if other is None:
        answers, other = _every(answers, 0), _every(answers, 1)
    if len(answers.target) < 10 or len(other.target) < 10:
        rows = min(len(answers.target), len(other.target))
        raise InputError(f"{rows} rows", expected="at least 10 to judge and 10 to fit", fix="give more rows")
    if answers.probabilities is None:
        return _of_values(answers, other, seed)
    assert other.probabilities is not None
    probabilities, target = answers.probabilities.double().cpu(), answers.target.cpu().long()
    confidence, said = probabilities.max(1)
    right = said == target
    temperature = best_temperature(other.probabilities.cpu(), other.target.cpu())
    changed = (probabilities.clamp(min=1e-30).log() / temperature).softmax(1).max(1).values
    generator = torch.Generator().manual_seed(seed)
    coins = torch.rand(DRAWS, len(target), generator=generator, dtype=torch.float64) < confidence
    chance = torch.tensor([expected_calibration_error(confidence, drawn, bins) for drawn in coins])
    means, shares, count = reliability(confidence, right, bins)
    return Calibration(
        "classes", means.tolist(), shares.tolist(), count.tolist(),
        expected_calibration_error(confidence, right, bins), float(chance.quantile(0.95)), temperature,
        expected_calibration_error(changed, right, bins), len(target),
    )  # fmt: skip


def _every(answers: Answers, start: int) -> Answers:
    def part(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[start::2]

    return Answers(
        answers.target[start::2], part(answers.values), part(answers.deviations), part(answers.probabilities)
    )


def _of_values(answers: Answers, other: Answers, seed: int) -> Calibration:
    def distances(given: Answers) -> Tensor:
        """|y − ŷ|/σ of each row."""
        assert given.values is not None
        assert given.deviations is not None
        return ((given.target - given.values).abs() / given.deviations.clamp(min=1e-30)).double().cpu()

    levels = torch.tensor(LEVELS, dtype=torch.float64)
    reach = math.sqrt(2) * torch.erfinv(levels)

    def inside(z: Tensor) -> Tensor:
        return (z[:, None] <= reach).double().mean(0)

    found, factor = distances(answers), float(distances(other).square().mean().sqrt())
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(DRAWS, len(found), generator=generator, dtype=torch.float64).abs()
    chance = torch.stack([(inside(z) - levels).abs().mean() for z in drawn])
    shares = inside(found)
    return Calibration(
        "values", list(LEVELS), shares.tolist(), [float(len(found))] * len(LEVELS),
        float((shares - levels).abs().mean()), float(chance.quantile(0.95)), factor,
        float((inside(found / factor) - levels).abs().mean()), len(found),
    )  # fmt: skip
