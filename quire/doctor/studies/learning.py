"""More data, or a bigger model? The error by the number of rows that were learned from, and where it leads.

    error(n) = a + b·n^−c

S sizes, R repeats, B curves, G values of c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.doctor.pictures import new_axes
from quire.doctor.studies.refit import HELD, Counter, Progress, Refit, Study, need
from quire.errors import InputError, unknown_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = 6
DRAWS = 400
"""Curves that are drawn anew within their spread, for the interval of an extrapolation."""
WORTH = 0.05
"""Share of the error that twice the rows must save to be worth having."""
CLOSE = 0.25
"""Training and held-out error are close where they differ by less than this share."""


@dataclass(frozen=True)
class PowerLaw:
    """error(n) = a + b·n^−c: what is left with endless rows, and how fast the rest falls."""

    a: float
    b: float
    c: float
    residual: float
    """Deviation of the points from it."""

    def __call__(self, n: float) -> float:
        return self.a + self.b * n**-self.c

    def __str__(self) -> str:
        return f"{self.a:.3g} + {self.b:.3g}·n^−{self.c:.2g}"


def _solve(
    sizes: Tensor, errors: Tensor, weights: Tensor, floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, b, c and the weighted squares left of each curve (B, S), by least squares in a ≥ floor and b ≥ 0 for
    each of many c; sizes are shares of the largest."""
    low, high = 0.02, 4.0
    for _ in range(3):
        grid = torch.logspace(math.log10(low), math.log10(high), 200, dtype=torch.float64)
        feature = sizes ** -grid[:, None]  # (G, S)
        total = weights.sum()
        mean_f, mean_e = (feature * weights).sum(1) / total, (errors * weights).sum(1) / total
        spread = ((feature - mean_f[:, None]).square() * weights).sum(1)
        shared = (errors[:, None] - mean_e[:, None, None]) * (feature - mean_f[:, None]) * weights
        b = (shared.sum(2) / spread).clamp(min=0)  # (B, G)
        a = mean_e[:, None] - b * mean_f
        above = errors[:, None] - floor if math.isfinite(floor) else torch.zeros_like(errors[:, None])
        along = (above * feature * weights).sum(2) / (feature.square() * weights).sum(1)
        b, a = torch.where(a < floor, along.clamp(min=0), b), a.clamp(min=floor)
        left = ((errors[:, None] - a[..., None] - b[..., None] * feature).square() * weights).sum(2)
        best = left.argmin(1)
        if len(errors) > 1:  # one grid is fine enough for an interval
            break
        at = int(best[0])
        low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)])
    every = torch.arange(len(errors))
    return a[every, best], b[every, best], grid[best], left[every, best]


def fit_power_law(
    sizes: Sequence[float], errors: Sequence[float], deviations: Sequence[float] | None = None
) -> PowerLaw:
    """The law nearest to the errors, each weighed by 1/deviation². a ≥ 0 where no error is negative."""
    need(len(sizes), 3, "sizes", "the law has three numbers")
    n = torch.tensor(list(sizes), dtype=torch.float64)
    e = torch.tensor(list(errors), dtype=torch.float64)
    floor = 0.0 if bool((e >= 0).all()) else -math.inf
    weights = _weights(e, deviations)
    a, b, c, left = (float(found[0]) for found in _solve(n / n.max(), e[None], weights, floor))
    residual = math.sqrt(left / float(weights.mean()) / max(len(n) - 3, 1))
    return PowerLaw(a, b * float(n.max()) ** c, c, residual)


def _weights(errors: Tensor, deviations: Sequence[float] | None) -> Tensor:
    if deviations is None:
        return torch.ones_like(errors)
    spread = torch.tensor(list(deviations), dtype=torch.float64)
    # A point that never moved is not endlessly sure.
    return spread.clamp(min=max(0.2 * float(spread.mean()), 1e-12)).square().reciprocal()


@dataclass(frozen=True)
class LearningCurve(Study):
    """A measure by the number of rows learned from, S sizes and R repeats."""

    measure: str
    sizes: list[int]
    train: list[list[float]]
    """(S, R), on the rows learned from."""
    held: list[list[float]]
    """(S, R), on rows that no fit was given."""
    higher: bool
    judged: str
    """What `held` was measured on."""
    law: PowerLaw = field(init=False)
    """Of the held-out error."""

    def __post_init__(self) -> None:
        held = self._errors(self.held)
        spread = self._spread(held) if len(self.held[0]) > 1 else None
        object.__setattr__(self, "law", fit_power_law(self.sizes, held.mean(1).tolist(), spread))

    def _errors(self, values: list[list[float]]) -> Tensor:
        """The measure as an error: as it is, 1 − it, or −it, whichever falls and stays above 0 if it can."""
        found = torch.tensor(values, dtype=torch.float64)
        if not self.higher:
            return found
        most = max(max(map(max, self.held)), max(map(max, self.train)))
        return 1 - found if most <= 1 else -found

    def _spread(self, errors: Tensor) -> list[float]:
        deviations: list[float] = (errors.std(1) / errors.shape[1] ** 0.5).tolist()
        return deviations

    @property
    def error(self) -> float:
        """With all rows, on rows held out."""
        return float(self._errors(self.held)[-1].mean())

    @property
    def train_error(self) -> float:
        return float(self._errors(self.train)[-1].mean())

    @property
    def gap(self) -> float:
        return self.error - self.train_error

    def gain(self, factor: float = 2.0) -> float:
        """What so many times the rows would save of the error: by the law, but no more than the gap, since
        the error of the training rows rises with their number and both end at one value."""
        rows = self.sizes[-1]
        return max(0.0, min(self.law(rows) - self.law(factor * rows), max(self.gap, 0.0)))

    def interval(self, rows: float, level: float = 0.95) -> tuple[float, float]:
        """Where the law's error at so many rows lies, from curves drawn within the spread of the points."""
        held = self._errors(self.held)
        points = held.mean(1)
        several = held.shape[1] > 1
        spread = torch.tensor(self._spread(held)) if several else torch.full_like(points, self.law.residual)
        noise = torch.randn(
            DRAWS, len(points), generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        weights = _weights(points, spread.tolist() if several else None)
        floor = 0.0 if bool((points >= 0).all()) else -math.inf
        a, b, c, _ = _solve(sizes / sizes.max(), points + spread * noise, weights, floor)
        found = a + b * (rows / float(sizes.max())) ** -c
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        low, high = found.quantile(ends).tolist()
        return low, high

    @property
    def noise(self) -> float:
        """Standard error of the held-out error with all rows; 0 where nothing was repeated."""
        return self._spread(self._errors(self.held))[-1] if len(self.held[-1]) > 1 else 0.0

    @property
    def _perfect(self) -> bool:
        """Whether nothing is left that can be told from 0."""
        return self.law.a >= 0 and 0 <= self.error <= max(2 * self.noise, 1e-12)

    @property
    def advice(self) -> str:
        """ "more data", "a bigger model" or "neither"."""
        if self._perfect:
            return "neither"
        size = abs(self.error)
        if self.gain() >= max(WORTH * size, self.noise):
            return "more data"
        return "a bigger model" if self.gap < CLOSE * size else "neither"

    @property
    def verdict(self) -> str:
        rows = self.sizes[-1]
        low, high = self.interval(2 * rows)
        error = f"1 − {self.measure}" if self.higher and self.error >= 0 else self.measure
        error = f"−{self.measure}" if self.higher and self.error < 0 else error
        seen = (
            f"With {rows:,} rows the error ({error}) is {self.error:.4g} on {self.judged} and "
            f"{self.train_error:.4g} on the rows learned from"
        )
        later = f"{max(self.error - self.gain(), 0) if self.error >= 0 else self.error - self.gain():.4g}"
        share = f"{self.gain() / abs(self.error):.0%}" if self.error else "0%"
        if self.advice == "more data":
            return (
                f"More data: {seen}. Twice the rows would bring it to about {later}, {share} less (the law "
                f"{self.law} gives {low:.4g} to {high:.4g})."
            )
        if self.advice == "a bigger model":
            return (
                f"A bigger model: {seen}, nearly the same, and twice the rows would save {share} of it. More "
                "rows cannot help where the rows that are there are not fitted; a larger model, longer "
                "training or better inputs can, unless what is left is noise."
            )
        if self._perfect:
            return f"Neither: {seen}; nothing is left that can be told from 0."
        if self.gain() >= WORTH * abs(self.error):
            return (
                f"Neither for sure: {seen}. Twice the rows would save {share} of it, but that is less than "
                f"its standard error of {self.noise:.2g}; more repeats would tell."
            )
        return (
            f"Neither: {seen}. Twice the rows would save {share} of it, and the model has room enough: try "
            "weight decay, dropout, augmentation, earlier stopping, or inputs that say more."
        )

    @property
    def table(self) -> tuple[list[str], list[list[object]]]:
        rows: list[list[object]] = []
        for size, seen, held in zip(self.sizes, self.train, self.held, strict=True):
            values = torch.tensor([seen, held], dtype=torch.float64)
            spread = values.std(1).tolist() if len(held) > 1 else [None, None]
            mean = values.mean(1).tolist()
            rows.append([size, mean[0], spread[0], mean[1], spread[1]])
        return ["rows", "learned from", "±", self.judged, "±"], rows

    @property
    def numbers(self) -> dict[str, Any]:
        rows = self.sizes[-1]
        return {
            "measure": self.measure, "sizes": self.sizes, "train": self.train, "held": self.held,
            "judged": self.judged, "law": vars(self.law), "error": self.error,
            "train_error": self.train_error, "gain_of_twice_the_rows": self.gain(), "advice": self.advice,
            "extrapolated": {str(f * rows): list(self.interval(f * rows)) for f in (2, 4, 10)},
        }  # fmt: skip

    def figure(self) -> Figure:
        """Both errors by size, the law and where it leads."""
        title = f"Learning curve: {self.advice}"
        picture, axes = new_axes(title, "training rows", f"error by {self.measure}")
        for values, name, colour in (
            (self.train, "rows learned from", "tab:gray"),
            (self.held, self.judged, "tab:blue"),
        ):
            found = self._errors(values)
            spread = found.std(1).tolist() if found.shape[1] > 1 else None
            axes.errorbar(
                self.sizes, found.mean(1).tolist(), spread, fmt="o-", color=colour, capsize=3, label=name
            )
        last = self.sizes[-1]
        reach = torch.logspace(math.log10(self.sizes[0]), math.log10(4 * last), 60).tolist()
        axes.plot(reach, [self.law(n) for n in reach], "--", color="tab:red", label=str(self.law))
        beyond = [n for n in reach if n >= last]
        ends = [self.interval(n) for n in beyond]
        axes.fill_between(beyond, [e[0] for e in ends], [e[1] for e in ends], color="tab:red", alpha=0.15)
        axes.set_xscale("log")
        axes.legend()
        return picture


def size_grid(least: int, most: int, count: int = SIZES) -> list[int]:
    """Sizes in equal ratios, up to a factor of 32 below the largest."""
    first = min(max(least, math.ceil(most / 32)), most)
    return sorted({round(first * (most / first) ** (i / (count - 1))) for i in range(count)})


def learning_curve(
    refit: Refit,
    sizes: Sequence[int] | None = None,
    *,
    repeats: int = 3,
    seed: int = 0,
    measure: str | None = None,
    progress: Progress | None = None,
) -> LearningCurve:
    """Train on more and more rows, R times each with other rows and another seed, and judge by the part that
    no fit is given; without one, a fifth of the rows is kept apart."""
    need(repeats, 1, "repeats", "each is one curve")
    held = refit.draw(refit.rows // HELD, seed) if refit.apart is None else None
    most = refit.rows - (0 if held is None else len(held))
    chosen = sorted(set(sizes)) if sizes else size_grid(refit.least, most)
    if len(chosen) < 3 or chosen[0] < 1 or chosen[-1] > most:
        raise InputError(
            f"sizes {', '.join(map(str, chosen))} of {most} rows",
            expected=f"three or more different sizes from 1 to {most}",
            fix="leave --sizes out" if sizes else "give more rows",
        )
    count = Counter(len(chosen) * repeats, progress)
    train: list[list[float]] = [[] for _ in chosen]
    judged: list[list[float]] = [[] for _ in chosen]
    for repeat in range(repeats):
        order = None
        if held is not None:
            order = refit.draw(refit.rows, seed + 1 + repeat)
            order = order[~torch.isin(order, held)]
        for place, size in enumerate(chosen):
            rows = refit.draw(size, seed + 1 + repeat) if order is None else order[:size]
            judge = refit(rows, seed + repeat)
            found = judge.measures(refit.apart or held)  # type: ignore[arg-type]
            name = measure or (refit.measure if refit.measure in found else next(iter(found)))
            if name not in found:
                raise unknown_name("measure", name, found)
            measure = name
            train[place].append(judge.measures(rows)[name])
            judged[place].append(found[name])
            count()
    assert measure is not None
    where = f"the {refit.apart} part" if refit.apart else "rows kept apart"
    return LearningCurve(measure, chosen, train, judged, measure in refit.higher, where)
