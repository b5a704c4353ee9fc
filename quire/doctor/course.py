"""How training went, as far as anybody looked: what a verdict is read from.

A course comes from a short probe (`probe.py`), from the records of a run, or from a monitor beside a loop of
anybody's; each fills in what it knows, and a sign that needs more says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.doctor.watch import Look

Curve = list[tuple[int, float]]


class Trial(NamedTuple):
    """A few steps with another step size, all else equal."""

    factor: float
    """Of the step size that was given."""
    before: float
    after: float
    """Loss over the same rows; not finite where it diverged."""

    @property
    def change(self) -> float:
        """Share of the loss that was taken away; −∞ where it diverged."""
        if not math.isfinite(self.after):
            return -math.inf
        return (self.before - self.after) / max(abs(self.before), 1e-12)


class Noise(NamedTuple):
    """Gradients of several batches at the same weights (McCandlish et al., 2018)."""

    signal: float
    """|G|², of the mean gradient."""
    variance: float
    """Σ over the parameters of the variance of one row's gradient."""
    rows: int
    """Of a batch."""

    @property
    def scale(self) -> float:
        """The batch at which signal and noise are equal, in rows."""
        return self.variance / self.signal if self.signal > 0 else math.inf


class Baseline(NamedTuple):
    """What the simplest answer would reach, beside what was reached."""

    measure: str
    trivial: float
    reached: float
    answer: str
    higher_is_better: bool


@dataclass
class Course:
    train: Curve = field(default_factory=list)
    """Loss by step."""
    validation: Curve = field(default_factory=list)
    batches: int = 0
    """After so many steps the same batch comes again; 0 where nobody knows."""
    norms: Curve = field(default_factory=list)
    """Of the gradient."""
    looks: list[Look] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    optimiser: str | None = None
    step_size: float | None = None
    momentum: float = 0.0
    curvatures: Curve = field(default_factory=list)
    """λmax by step."""
    noise: Noise | None = None
    likeness: float | None = None
    """Mean cosine between gradients at inputs that are near to each other."""
    recurrent: Mapping[str, float] = field(default_factory=dict)
    """The largest singular value of each recurrent weight."""
    baseline: Baseline | None = None
    players: int = 1
    """Of several, one's gain is another's loss, and no loss has to fall; none where nothing descends."""
    judged: Curve = field(default_factory=list)
    """A validation measure beside the loss, such as accuracy: higher is better."""
    ended: bool = False
    """Whether it is the whole of training, and no probe."""
    keeps_best: bool = True
    """Whether the weights that did best in validation are those that are kept."""
    warnings: list[str] = field(default_factory=list)
    """What a task says of its own kind of collapse."""
    failed: str = ""
    """What training failed with, in the words of its log."""

    @classmethod
    def of_history(cls, records: Iterable[Mapping[str, Any]], **known: Any) -> Course:
        """From the records of a run: lines of its metrics.jsonl."""
        course = cls(**known)
        for record in records:
            step, values = int(record["step"]), record["values"]
            loss = number(values.get("loss"))
            (course.train if record["split"] == "train" else course.validation).append((step, loss))
            if record["split"] == "validation":
                names = [name for name in ("accuracy", "r2") if name in values]
                course.judged += [(step, number(values[name])) for name in names[:1]]
            if "gradient_norm" in values:
                course.norms.append((step, number(values["gradient_norm"])))
        return course


def number(value: Any) -> float:
    """JSON has no name for what is not finite."""
    if value is None:
        return math.nan
    return float(value)


def finite(curve: Curve) -> Curve:
    return [(step, value) for step, value in curve if math.isfinite(value)]


def falls(curve: Curve) -> float:
    """Share of its first value that a curve has lost at its lowest."""
    values = [value for _, value in finite(curve)]
    if not values or values[0] == 0:
        return 0.0
    return (values[0] - min(values)) / abs(values[0])
