"""Learning curves with planted laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from torch import Tensor

from quire.doctor.studies import from_estimator, learning_curve
from quire.doctor.studies.learning import LearningCurve, fit_power_law, size_grid
from quire.doctor.studies.refit import draw_rows
from quire.errors import InputError

pytestmark = pytest.mark.slow


class Planted:
    """A way of learning whose error is a law, for values and for shares."""

    least, apart, measure, stratify = 4, "validation", "error", None

    def __init__(self, a: float, b: float, c: float, train: float, *, higher: bool = False) -> None:
        self.law, self.level, self.flip = (a, b, c), train, higher
        self.rows, self.fitted = 1000, list[int]()
        self.higher = frozenset({"error"} if higher else set())

    def draw(self, count: int, seed: int) -> Tensor:
        return draw_rows(self.rows, count, seed)

    def __call__(self, rows: Tensor | None, seed: int) -> Any:
        assert rows is not None
        a, b, c = self.law
        size, owner = len(rows), self
        self.fitted.append(size)

        class Judge:
            def measures(self, part: Tensor | str) -> dict[str, float]:
                error = a + b * size**-c if isinstance(part, str) else owner.level
                return {"error": 1 - error if owner.flip else error}

        return Judge()


@pytest.mark.parametrize(("a", "b", "c"), [(0.1, 2.0, 0.5), (0.0, 1.0, 0.3), (0.2, 5.0, 1.2)])
def test_a_planted_law_is_found(a: float, b: float, c: float) -> None:
    sizes = [20, 50, 120, 300, 700]
    law = fit_power_law(sizes, [a + b * n**-c for n in sizes])
    assert (law.a, law.b, law.c) == pytest.approx((a, b, c), rel=0.02, abs=1e-3)
    assert law(10_000) == pytest.approx(a + b * 10_000**-c, rel=0.02)
    assert law.residual < 1e-3


@pytest.mark.parametrize(
    ("a", "b", "c", "train", "advice"),
    [
        (0.02, 3.0, 0.5, 0.0, "more data"),  # falls by its root, training rows are fitted
        (0.30, 3.0, 1.5, 0.29, "a bigger model"),  # flat, and so is the training error
        (0.30, 3.0, 1.5, 0.0, "neither"),  # flat, with a gap that rows do not close
        (0.0, 0.0, 1.0, 0.0, "neither"),  # nothing to gain
    ],
)
@pytest.mark.parametrize("higher", [False, True])
def test_the_advice_follows_from_the_curve(
    a: float, b: float, c: float, train: float, advice: str, higher: bool
) -> None:
    refit = Planted(a, b, c, train, higher=higher)
    curve = learning_curve(refit, repeats=2)
    assert curve.advice == advice
    assert str(curve).lower().startswith(advice)
    assert curve.sizes == size_grid(4, 1000) == [32, 64, 127, 252, 502, 1000]
    assert refit.fitted == curve.sizes * 2
    assert curve.gain() <= max(curve.gap, 0) + 1e-12
    assert len(curve.figure().axes) == 1
    assert curve.numbers["advice"] == advice


def test_no_more_is_promised_than_the_gap() -> None:
    """The law alone would promise 29% less from twice the rows; training rows have nearly that error."""
    curve = learning_curve(Planted(0.0, 1.0, 0.5, 0.0310), repeats=1)
    assert curve.error == pytest.approx(1000**-0.5)
    assert curve.law(1000) - curve.law(2000) > 0.2 * curve.error
    assert curve.gain() == pytest.approx(curve.gap)
    assert curve.advice == "a bigger model"


def test_the_interval_holds_what_comes_and_widens() -> None:
    rng = np.random.default_rng(1)
    sizes = [25, 50, 100, 200, 400]
    inside = 0
    for _ in range(30):
        held = [[0.1 + n**-0.5 + 0.01 * rng.normal() for _ in range(4)] for n in sizes]
        curve = LearningCurve("error", sizes, [[0.0] * 4] * 5, held, False, "validation")
        low, high = curve.interval(800)
        inside += low <= 0.1 + 800**-0.5 <= high
        wide = curve.interval(8000)
        assert wide[1] - wide[0] > high - low
    assert inside >= 24


def test_a_curve_of_an_estimator_without_a_part_apart() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5))
    y = x @ rng.normal(size=5) + rng.normal(size=200)
    curve = learning_curve(from_estimator(LinearRegression(), x, y), repeats=2)
    assert curve.sizes[-1] == 160
    assert curve.judged == "rows kept apart"
    assert curve.error == pytest.approx(1.0, abs=0.3)
    # Least squares of p coefficients errs by σ²(1 + p/(n − p − 1)) on new rows, σ²(1 − p/n) on its own.
    assert curve.held[0][0] > curve.held[-1][0]
    assert curve.train[0][0] < curve.train[-1][0]


def test_sizes_that_cannot_be_are_refused() -> None:
    refit = Planted(0.1, 1.0, 0.5, 0.0)
    for sizes in ([10, 20], [0, 10, 20], [10, 20, 2000]):
        with pytest.raises(InputError, match="three or more different sizes from 1 to 1000"):
            learning_curve(refit, sizes)
    with pytest.raises(InputError, match="unknown measure 'eror'"):
        learning_curve(refit, measure="eror")
