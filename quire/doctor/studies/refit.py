"""What can be trained anew, and asked afterwards: the common form of recipes, estimators and anything else.

N training rows, M judged rows, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quire.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

Part = Tensor | str
"""Numbers of training rows, or the name of a part that no fit is given."""
Progress = Callable[[int, int], None]
"""Called with the number of fits done and of all."""
HELD = 5
"""One row in so many is kept apart where there is no part of its own to judge by."""


@dataclass(frozen=True)
class Answers:
    """What was said of M rows, beside what is true: values, or probabilities of classes."""

    target: Tensor
    """(M,) values, or class numbers."""
    values: Tensor | None = None
    """(M,)"""
    deviations: Tensor | None = None
    """(M,) standard deviations of values, where they are known."""
    probabilities: Tensor | None = None
    """(M, C)"""
    sure: bool = False
    """Whether the probabilities are 0 and 1 for want of better ones."""


class Judge(Protocol):
    """Something trained."""

    def measures(self, part: Part) -> dict[str, float]: ...

    def answers(self, part: Part) -> Answers: ...


class Refit(Protocol):
    """A way of learning that can be begun anew."""

    @property
    def rows(self) -> int:
        """N."""

    @property
    def least(self) -> int:
        """The fewest rows that it can learn from."""

    @property
    def apart(self) -> str | None:
        """The part that no fit is given, by which a curve is judged; None where there is none."""

    @property
    def measure(self) -> str:
        """What it is judged by first."""

    @property
    def higher(self) -> frozenset[str]:
        """Measures that are better when they are higher."""

    @property
    def stratify(self) -> Tensor | None:
        """The class of each row, (N,), where there are any."""

    def draw(self, count: int, seed: int) -> Tensor:
        """So many training rows at random; with the same seed fewer are the first of more."""

    def __call__(self, rows: Tensor | None, seed: int) -> Judge:
        """Train on these rows (on all for None; some may come twice), and on nothing else."""


def draw_rows(rows: int, count: int, seed: int, stratify: Tensor | None = None) -> Tensor:
    """`count` of the row numbers in random order, each class in its share at any count."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    if stratify is not None:
        # The r-th row of a class of n stands at (r + ½)/n of the order.
        labels = stratify.cpu()[order]
        place = torch.empty(rows, dtype=torch.float64)
        for label in labels.unique():
            members = (labels == label).nonzero().flatten()
            place[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
        order = order[place.argsort(stable=True)]
    return order[:count]


class Study(ABC):
    """What a study found: numbers, a table, a sentence and a picture."""

    @property
    @abstractmethod
    def verdict(self) -> str: ...

    @property
    @abstractmethod
    def table(self) -> tuple[list[str], list[list[object]]]:
        """Names of the columns, and the rows."""

    @property
    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """Plain values for a JSON file."""

    @abstractmethod
    def figure(self) -> Figure: ...

    def __str__(self) -> str:
        return self.verdict


class Counter:
    """Tells how many fits are done."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


def need(value: int, least: int, name: str, why: str) -> None:
    if value < least:
        raise InputError(
            f"{value} {name}", expected=f"at least {least}: {why}", fix=f"ask for {least} or more"
        )


class EstimatorJudge:
    """A fitted estimator with the rows that it may be asked about."""

    def __init__(self, fitted: Any, source: FromEstimator) -> None:
        self.fitted, self.source = fitted, source

    def measures(self, part: Part) -> dict[str, float]:
        """r2, rmse and mae of values; accuracy, and the log loss where there are probabilities, of classes;
        else what the estimator's own `score` says."""
        from sklearn import metrics

        x, y = self.source.part(part)
        if self.source.kind == "none":
            return {"score": float(self.fitted.score(x))}
        if self.source.kind == "values":
            said = self.fitted.predict(x)
            squared = float(metrics.mean_squared_error(y, said))
            return {
                "r2": float(metrics.r2_score(y, said)) if len(x) > 1 else float("nan"),
                "rmse": squared**0.5,
                "mae": float(metrics.mean_absolute_error(y, said)),
            }
        found = {"accuracy": float(metrics.accuracy_score(y, self.fitted.predict(x)))}
        answers = self.answers(part)
        if not answers.sure:
            assert answers.probabilities is not None
            chosen = answers.probabilities.gather(1, answers.target[:, None])
            found["log_loss"] = float(-chosen.clamp(min=1e-15).log().mean())
        return found

    def answers(self, part: Part) -> Answers:
        import numpy as np

        x, y = self.source.part(part)
        if self.source.kind == "none":
            raise InputError(
                f"answers of {type(self.fitted).__name__}, which was given no y",
                expected="an estimator that predicts a target",
                fix="give y as well",
            )
        if self.source.kind == "values":
            said = np.asarray(self.fitted.predict(x), dtype=np.float64)
            if said.ndim > 1 and said.shape[1] != 1:
                raise InputError(
                    f"{said.shape[1]} values for each row", expected="one", fix="study one target at a time"
                )
            target = torch.as_tensor(np.asarray(y, dtype=np.float64).reshape(-1))
            return Answers(target, values=torch.from_numpy(said.reshape(-1)))
        classes = self.source.classes
        target = torch.from_numpy(np.searchsorted(classes, y))
        sure = not hasattr(self.fitted, "predict_proba")
        table = np.zeros((len(x), len(classes)))
        if sure:
            table[np.arange(len(x)), np.searchsorted(classes, self.fitted.predict(x))] = 1.0
        else:
            # A resample may lack a class, which then has no column.
            table[:, np.searchsorted(classes, self.fitted.classes_)] = self.fitted.predict_proba(x)
        return Answers(target, probabilities=torch.from_numpy(table), sure=sure)


class FromEstimator:
    """A `Refit` of clones of a scikit-learn estimator."""

    def __init__(self, estimator: Any, x: Any, y: Any = None, apart: tuple[Any, Any] | None = None) -> None:
        import numpy as np
        from sklearn.base import is_classifier

        if not hasattr(estimator, "fit") or not (
            hasattr(estimator, "predict") or hasattr(estimator, "score")
        ):
            raise InputError(
                f"{type(estimator).__name__} as an estimator",
                expected="fit and predict, as in scikit-learn",
                fix="wrap it in a class with both",
            )
        self.estimator, self.x = estimator, np.asarray(x)
        self.y = None if y is None else np.asarray(y)
        if self.y is not None and len(self.y) != len(self.x):
            raise InputError(
                f"{len(self.x)} rows and {len(self.y)} targets", expected="one target for each row"
            )
        self.kind = "none" if y is None else "classes" if is_classifier(estimator) else "values"
        self.classes: np.ndarray = np.unique(self.y) if self.kind == "classes" else np.empty(0)  # type: ignore[arg-type]
        self.others = None if apart is None else tuple(None if p is None else np.asarray(p) for p in apart)
        self.rows = len(self.x)
        self.apart = None if apart is None else "validation"
        self.measure = {"none": "score", "classes": "accuracy", "values": "rmse"}[self.kind]
        self.higher = frozenset({"score", "accuracy", "r2"})
        self.least = max(8, 2 * len(self.classes))
        codes = np.searchsorted(self.classes, self.y) if self.kind == "classes" else None  # type: ignore[arg-type]
        self.stratify = None if codes is None else torch.from_numpy(codes)

    def part(self, part: Part) -> tuple[Any, Any]:
        if isinstance(part, str):
            assert self.others is not None
            return self.others[0], self.others[1]
        rows = part.cpu().numpy()
        return self.x[rows], None if self.y is None else self.y[rows]

    def draw(self, count: int, seed: int) -> Tensor:
        return draw_rows(self.rows, count, seed, self.stratify)

    def __call__(self, rows: Tensor | None, seed: int) -> EstimatorJudge:
        from sklearn.base import clone

        fresh = clone(self.estimator)
        if "random_state" in fresh.get_params():
            fresh.set_params(random_state=seed)
        x, y = self.part(torch.arange(self.rows) if rows is None else rows)
        return EstimatorJudge(fresh.fit(x) if y is None else fresh.fit(x, y), self)


def from_estimator(
    estimator: Any, x: Any, y: Any = None, *, apart: tuple[Any, Any] | None = None
) -> FromEstimator:
    """A way of learning anew from a scikit-learn estimator (Quire's or any other), which is cloned for each
    fit, and its training rows. `apart` are rows to judge by that no fit is given; without them a fifth of the
    rows is kept apart where a study needs some. A `random_state` is set to the seed of each fit."""
    return FromEstimator(estimator, x, y, apart)
