"""Studies of generalisation, against scikit-learn, closed forms, planted laws and networks made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.calibration import calibration_curve
from sklearn.cluster import KMeans
from sklearn.datasets import load_iris, make_regression
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC
from torch import Tensor, nn

import quire.estimators
from quire.doctor.studies import bias_variance, folds, from_estimator, learning_curve
from quire.doctor.studies.confidence import (
    best_temperature,
    calibration,
    expected_calibration_error,
    reliability,
)
from quire.doctor.studies.learning import LearningCurve, fit_power_law, size_grid
from quire.doctor.studies.refit import Answers, draw_rows
from quire.doctor.studies.resampling import fold_interval
from quire.doctor.studies.shape import equivariance, linear_regions, relu_chain
from quire.errors import InputError
from quire.functional import k_fold, sawtooth

pytestmark = pytest.mark.slow

IRIS = load_iris()


def splits(rows: int, k: int, seed: int, classes: np.ndarray | None = None) -> list[tuple[Any, Any]]:
    stratify = None if classes is None else torch.from_numpy(classes)
    found = k_fold(rows, k, torch.Generator().manual_seed(seed), stratify)
    return [(inside.numpy(), outside.numpy()) for inside, outside in found]


# Rows -------------------------------------------------------------------------------------------


def test_rows_are_drawn_with_the_shares_of_their_classes() -> None:
    classes = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    for count in (10, 20, 50, 100):
        rows = draw_rows(100, count, 3, classes)
        assert len(rows.unique()) == count
        shares = torch.bincount(classes[rows], minlength=3) / count
        assert torch.allclose(shares, torch.tensor([0.6, 0.3, 0.1]), atol=1 / count + 1e-6)
    assert draw_rows(100, 20, 3, classes).tolist() == draw_rows(100, 50, 3, classes)[:20].tolist()
    assert draw_rows(100, 100, 3).tolist() != draw_rows(100, 100, 4).tolist()


# Folds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [LinearRegression, quire.estimators.LinearRegression])
def test_folds_are_those_of_cross_val_score(make: Callable[[], Any]) -> None:
    x, y = make_regression(60, 4, noise=10.0, random_state=0)
    found = folds(from_estimator(make(), x, y), 5, seed=2)
    wanted = cross_val_score(LinearRegression(), x, y, cv=splits(60, 5, 2), scoring="r2")
    np.testing.assert_allclose(found.held["r2"], wanted, rtol=1e-8)
    errors = cross_val_score(LinearRegression(), x, y, cv=splits(60, 5, 2), scoring="neg_mean_squared_error")
    np.testing.assert_allclose(np.square(found.held["rmse"]), -errors, rtol=1e-8)


def test_folds_without_a_target_use_the_score() -> None:
    x = IRIS.data
    found = folds(from_estimator(PCA(2), x), 4, seed=1)
    np.testing.assert_allclose(
        found.held["score"], cross_val_score(PCA(2), x, cv=splits(150, 4, 1)), rtol=1e-10
    )


def test_folds_of_classes_are_stratified_and_repeated() -> None:
    x, y = IRIS.data, IRIS.target
    found = folds(from_estimator(LogisticRegression(max_iter=500), x, y), 3, repeats=2, seed=5)
    both = [*splits(150, 3, 5, y), *splits(150, 3, 6, y)]
    wanted = cross_val_score(LogisticRegression(max_iter=500), x, y, cv=both)
    np.testing.assert_allclose(found.held["accuracy"], wanted)
    model = LogisticRegression(max_iter=500)
    losses = [log_loss(y[o], model.fit(x[i], y[i]).predict_proba(x[o])) for i, o in both]
    np.testing.assert_allclose(found.held["log_loss"], losses, rtol=1e-6)
    assert "3 folds, 2 times" in str(found)
    assert found.table[0][0] == "measure"
    assert len(found.figure().axes) == 1


def test_the_interval_is_the_corrected_t_interval() -> None:
    values = [0.8, 0.9, 0.7, 0.85]
    found = fold_interval(values, 4)
    # By hand: t of 3 degrees at 97.5%, 3.182446; s² = Σ(v − 0.8125)²/3.
    reach = 3.182446 * np.std(values, ddof=1) * np.sqrt(1 / 4 + 1 / 3)
    assert found.mean == pytest.approx(0.8125)
    assert found.high - found.mean == pytest.approx(reach, rel=1e-6)
    plain = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert found.high - found.low > plain[1] - plain[0]


def test_intervals_cover_the_true_error_about_as_often_as_they_say() -> None:
    """The error of least squares on new rows, known from very many of them."""
    rng = np.random.default_rng(0)
    weights = np.array([1.0, -2.0, 0.5])

    def draw(rows: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(rows, 3))
        return x, x @ weights + rng.normal(size=rows)

    big = draw(100_000)
    truths = [
        np.sqrt(np.mean((LinearRegression().fit(*draw(36)).predict(big[0]) - big[1]) ** 2)) for _ in range(50)
    ]
    truth, inside = float(np.mean(truths)), 0
    for seed in range(100):
        found = folds(from_estimator(LinearRegression(), *draw(40)), 10, seed=seed).interval("rmse")
        inside += found.low <= truth <= found.high
    assert inside >= 90


def test_a_measure_that_a_fold_lacks_is_left_out() -> None:
    class Judge:
        def measures(self, part: Tensor) -> dict[str, float]:
            return {"loss": 1.0} | ({"accuracy": 0.5} if 0 in part.tolist() else {})

    class Fits:
        rows, least, apart, measure, stratify = 10, 2, None, "accuracy", None
        higher = frozenset({"accuracy"})

        def __call__(self, rows: Tensor | None, seed: int) -> Judge:
            return Judge()

    assert list(folds(Fits(), 5).held) == ["loss"]  # type: ignore[arg-type]


def test_the_estimator_that_is_given_is_left_alone_and_each_fit_has_its_seed() -> None:
    given = quire.estimators.MLPRegressor(hidden_layer_sizes=(3,), max_iter=2, random_state=7)
    refit = from_estimator(given, IRIS.data, IRIS.data[:, 0])
    one, same, other = refit(None, 1), refit(None, 1), refit(None, 2)
    assert not hasattr(given, "n_features_in_")
    assert given.random_state == 7
    rows = torch.arange(20)
    assert one.measures(rows) == same.measures(rows) != other.measures(rows)


def test_too_many_folds_are_refused() -> None:
    with pytest.raises(InputError, match="200 folds of 150 rows"):
        folds(from_estimator(LinearRegression(), IRIS.data, IRIS.target), 200)


# Learning curve -----------------------------------------------------------------------------------


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


# Bias and variance --------------------------------------------------------------------------------


class Fresh:
    """Least squares on a fixed design, with new noise on the targets in each fit."""

    least, apart, measure, stratify, higher = 2, "validation", "loss", None, frozenset[str]()

    def __init__(self, x: np.ndarray, at: np.ndarray, truth: Callable[[Any], Any], sigma: float) -> None:
        self.x, self.at, self.truth, self.sigma, self.rows = x, at, truth, sigma, len(x)

    def draw(self, count: int, seed: int) -> Tensor:
        return draw_rows(self.rows, count, seed)

    def __call__(self, rows: Tensor | None, seed: int) -> Any:
        noise = np.random.default_rng(seed).normal(size=self.rows) * self.sigma
        said = LinearRegression().fit(self.x, self.truth(self.x) + noise).predict(self.at)
        target = torch.from_numpy(self.truth(self.at))

        class Judge:
            def answers(self, part: Any) -> Answers:
                return Answers(target, values=torch.from_numpy(said))

        return Judge()


def test_the_parts_of_linear_regression_are_those_of_its_closed_form() -> None:
    """Variance σ²·mean xᵀ(XᵀX)⁻¹x and bias² of the best line to x², at known points."""
    rng = np.random.default_rng(0)
    x, at, sigma = rng.uniform(-1, 1, (40, 1)), rng.uniform(-1, 1, (200, 1)), 0.5

    def truth(x: np.ndarray) -> np.ndarray:
        return x[:, 0] ** 2 + x[:, 0]

    design, points = (np.c_[np.ones(len(a)), a] for a in (x, at))
    hat = points @ np.linalg.inv(design.T @ design)
    variance = sigma**2 * np.mean(np.sum(hat * points, 1))
    bias2 = np.mean((hat @ design.T @ truth(x) - truth(at)) ** 2)
    found = bias_variance(Fresh(x, at, truth, sigma), resamples=400, noise_std=sigma)  # type: ignore[arg-type]
    assert found.loss == "squared error"
    assert found.variance.value == pytest.approx(variance, rel=0.15)
    assert found.bias2.value == pytest.approx(bias2, rel=0.05)
    assert found.noise == sigma**2
    assert found.total.value == pytest.approx(bias2 + variance + sigma**2, rel=0.05)


def test_classes_are_split_by_the_brier_score() -> None:
    x, y = IRIS.data[::2], IRIS.target[::2]
    refit = from_estimator(
        LogisticRegression(C=100, max_iter=2000), x, y, apart=(IRIS.data[1::2], IRIS.target[1::2])
    )
    found = bias_variance(refit, resamples=6, seed=3)
    # The same resamples by hand, in their order.
    generator = torch.Generator().manual_seed(3)
    said = []
    for _ in range(6):
        rows = torch.randint(75, (75,), generator=generator).numpy()
        model = LogisticRegression(C=100, max_iter=2000).fit(x[rows], y[rows])
        said.append(model.predict_proba(IRIS.data[1::2]))
    table, wanted = np.stack(said), np.eye(3)[IRIS.target[1::2]]
    assert found.loss == "Brier score"
    assert found.total.value == pytest.approx(np.mean(np.sum((table - wanted) ** 2, -1)), rel=1e-6)
    assert found.variance.value == pytest.approx(np.mean(np.sum(table.var(0, ddof=1), -1)), rel=1e-6)
    assert found.bias2.value + found.variance.value == pytest.approx(found.total.value, rel=1e-9)
    assert sum(found.parts.values()) == pytest.approx(found.total.value)
    assert len(found.figure().axes) == 1


def test_answers_without_probabilities_are_split_by_the_zero_one_loss() -> None:
    found = bias_variance(from_estimator(LinearSVC(), IRIS.data, IRIS.target), resamples=4, seed=0)
    assert found.loss == "0-1 loss"
    held = draw_rows(150, 30, 0, torch.from_numpy(IRIS.target)).numpy()
    generator, pool = torch.Generator().manual_seed(0), np.setdiff1d(np.arange(150), held)
    wrong = []
    for seed in range(4):
        rows = pool[torch.randint(120, (120,), generator=generator).numpy()]
        model = LinearSVC(random_state=seed).fit(IRIS.data[rows], IRIS.target[rows])
        wrong.append(np.mean(model.predict(IRIS.data[held]) != IRIS.target[held]))
    assert found.total.value == pytest.approx(np.mean(wrong))


def test_the_verdict_names_what_counts() -> None:
    class Deep(RegressorMixin, BaseEstimator):  # type: ignore[misc]
        """Remembers the last target it saw: all variance, no bias worth the name."""

        def fit(self, x: Any, y: Any) -> Deep:
            self.last_ = y[-1]
            return self

        def predict(self, x: Any) -> Any:
            return np.full(len(x), self.last_)

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 2)), rng.choice([-10.0, 10.0], 400)
    near = (x[:50], np.zeros(50))
    assert "more rows, weight decay or bagging help" in str(
        bias_variance(from_estimator(Deep(), x, y, apart=near), resamples=40)
    )
    wave = np.sin(6 * x[:, 0])
    stiff = bias_variance(from_estimator(LinearRegression(), x, wave, apart=(x, wave)), resamples=10)
    assert "all fits err alike" in str(stiff)
    assert "random halves" in str(
        bias_variance(from_estimator(LinearRegression(), x, wave), resamples=3, twice=False)
    )


def test_what_answers_nothing_has_no_bias() -> None:
    with pytest.raises(InputError, match="which was given no y"):
        bias_variance(from_estimator(KMeans(2, n_init=1), IRIS.data))
    with pytest.raises(InputError, match="at least 2: one fit has no variance"):
        bias_variance(from_estimator(LinearRegression(), IRIS.data, IRIS.target), resamples=1)
    with pytest.raises(InputError, match="fit and predict"):
        from_estimator(object(), IRIS.data)


# Calibration --------------------------------------------------------------------------------------


def test_bins_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.01, 0.99, 500)
    right = rng.uniform(size=500) < confidence**2
    said, true, count = reliability(torch.from_numpy(confidence), torch.from_numpy(right))
    wanted_true, wanted_said = calibration_curve(right, confidence, n_bins=10)
    np.testing.assert_allclose(said[count > 0], wanted_said)
    np.testing.assert_allclose(true[count > 0], wanted_true)
    by_hand = np.sum(count.numpy()[count > 0] / 500 * np.abs(wanted_true - wanted_said))
    assert expected_calibration_error(torch.from_numpy(confidence), torch.from_numpy(right)) == pytest.approx(
        by_hand
    )


def classes_drawn(rows: int, sharper: float, seed: int) -> Answers:
    """Classes drawn from known probabilities, and these made `sharper` times as sure."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return Answers(target, probabilities=(sharper * logits).softmax(1))


@pytest.mark.parametrize("sharper", [0.4, 1.0, 2.5])
def test_a_planted_temperature_is_found(sharper: float) -> None:
    other = classes_drawn(4000, sharper, 1)
    assert best_temperature(other.probabilities, other.target) == pytest.approx(sharper, rel=0.06)  # type: ignore[arg-type]
    found = calibration(classes_drawn(3000, sharper, 0), other)
    assert found.calibrated == (sharper == 1.0)
    assert found.error_after < 0.02
    word = "Calibrated" if sharper == 1 else "Too sure" if sharper > 1 else "Not sure enough"
    assert str(found).startswith(word)
    assert len(found.figure().axes) == 1


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_deviations_of_values_are_judged_by_their_intervals(factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sigma = 0.5 + torch.rand(4000, generator=generator, dtype=torch.float64)
    values = torch.randn(4000, generator=generator, dtype=torch.float64)
    target = values + sigma * torch.randn(4000, generator=generator, dtype=torch.float64)
    found = calibration(Answers(target, values=values, deviations=factor * sigma))
    assert found.factor == pytest.approx(1 / factor, rel=0.05)
    assert found.calibrated == (factor == 1.0)
    # A central interval of level q covers 2Φ(factor·z) − 1.
    wanted = [2 * stats.norm.cdf(factor * stats.norm.ppf((1 + q) / 2)) - 1 for q in found.said]
    np.testing.assert_allclose(found.happened, wanted, atol=0.03)


def test_what_is_not_sure_of_anything_cannot_be_calibrated() -> None:
    values = from_estimator(LinearRegression(), IRIS.data, IRIS.target)(None, 0).answers(torch.arange(150))
    with pytest.raises(InputError, match="answers without probabilities"):
        calibration(values)
    with pytest.raises(InputError, match="at least 10 to judge"):
        calibration(classes_drawn(12, 1.0, 0))


# Linear regions -----------------------------------------------------------------------------------


def network_of(weights: list[Tensor], biases: list[Tensor]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in zip(weights, biases, strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
        layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
        layers += [layer, nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers[:-2])


def test_a_sawtooth_has_its_known_regions() -> None:
    weights, biases = sawtooth(3, 2)
    rows = torch.tensor([[0.0], [1.0], [0.5]], dtype=torch.float64)
    found = linear_regions(network_of(weights, biases), rows, pairs=40)
    # (D + 1)^K = 16 pieces on [0, 1]; its middle cuts one of them into two.
    left, right, whole = sorted(set(found.lines))
    assert whole == 16
    assert left + right == 17
    assert found.units == 6


def test_lines_in_general_position_cut_a_plane() -> None:
    """Three lines through a triangle's plane make 1 + 3 + 3 pieces."""
    angles = torch.tensor([0.3, 1.4, 2.5], dtype=torch.float64)
    weight = torch.stack([angles.cos(), angles.sin()], 1)
    net = network_of(
        [weight, torch.ones(1, 3).double()],
        [torch.tensor([-0.4, -0.7, 0.1]).double(), torch.zeros(1).double()],
    )
    rows = torch.tensor([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]], dtype=torch.float64) - 3
    found = linear_regions(net, rows, pairs=3)
    assert found.plane == 7
    assert len(found.figure().axes) == 2


def test_convolutions_and_batch_norm_are_written_out() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 4),
    )
    net(torch.randn(50, 1, 4, 4))  # statistics of its own
    rows = torch.randn(6, 1, 4, 4)
    chain = relu_chain(net, rows)
    assert chain.units == 48
    torch.testing.assert_close(chain(rows), net.eval()(rows).double().detach(), atol=1e-5, rtol=1e-4)
    # Pieces of a line, by the signs of the units on many points of it.
    found = linear_regions(net, rows, pairs=1)
    start, end = torch.randperm(6, generator=torch.Generator().manual_seed(0))[:2].tolist()
    t = torch.linspace(0, 1, 20001, dtype=torch.float64)[:, None, None, None]
    line = rows[start].double() * (1 - t) + rows[end].double() * t
    signs = (net[:2].double()(line) > 0).flatten(1)
    assert found.lines[0] == 1 + int((signs[1:] != signs[:-1]).any(1).sum())


def test_what_is_no_chain_of_relus_is_refused() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.act, self.two = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.two(self.act(self.one(x)))

    rows = torch.randn(5, 3)
    with pytest.raises(InputError, match="do not follow each other"):
        linear_regions(Residual(), rows)
    with pytest.raises(InputError, match=r"the layer 1 \(Tanh\)"):
        linear_regions(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), rows)
    with pytest.raises(InputError, match=r"linear regions of the layer norm1 \(LayerNorm\)"):
        linear_regions(nn.TransformerEncoderLayer(4, 1, batch_first=True), torch.randn(5, 3, 4))
    assert linear_regions(nn.Sequential(nn.Linear(3, 2)), rows, pairs=4).lines == [1] * 4


# Equivariance -------------------------------------------------------------------------------------


def test_circular_padding_is_what_makes_a_convolution_follow_a_shift() -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 2, 9, 9)
    circular = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    zeros = nn.Conv2d(2, 3, 3, padding=1)
    zeros.load_state_dict(circular.state_dict())
    one, other = equivariance(circular, images), equivariance(zeros, images)
    assert one.error["shift"] < 1e-6
    assert other.error["shift"] > 0.05
    assert min(one.error["flip"], one.error["rotation"]) > 0.05
    assert not one.same
    assert "follows shift; does not follow flip" in str(one)
    # Padding has changed the outermost pixels, and the shift has moved them by one.
    assert equivariance(zeros, images, margin=2).error["shift"] < 1e-6


def test_a_symmetric_filter_follows_flips_and_a_pooled_answer_stays() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    images = torch.randn(16, 1, 6, 6)
    assert equivariance(net, images).same["shift"] == 1.0
    with torch.no_grad():
        kernel = net[0].weight
        for turn in (lambda k: k.flip(-1), lambda k: k.rot90(1, (-2, -1)), lambda k: k.rot90(2, (-2, -1))):
            kernel.copy_((kernel + turn(kernel)) / 2)  # the mean over the square's symmetries
    found = equivariance(net, images)
    assert max(found.error.values()) < 1e-5
    assert set(found.same.values()) == {1.0}


def test_a_set_stays_in_any_order_and_a_sequence_does_not() -> None:
    torch.manual_seed(0)
    places = torch.randn(6, 7, 5)
    attention = nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True)
    assert max(equivariance(attention, places).error.values()) < 1e-4  # follows: outputs have places
    assert max(equivariance(lambda x: attention(x).sum(1), places).error.values()) < 1e-4
    recurrent = nn.GRU(5, 4, batch_first=True)
    assert min(equivariance(lambda x: recurrent(x)[0][:, -1], places).error.values()) > 1e-2


def test_padding_stays_where_it_is() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 0, 0], [9, 5, 4, 3, 2, 0]])
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x)
        return torch.stack([x.sum(1).float(), (x * torch.arange(6)).sum(1).float()], 1)

    equivariance(model, tokens, real=tokens != 0)
    _, shuffled, backwards = seen
    assert backwards.tolist() == [[8, 7, 6, 5, 0, 0], [2, 3, 4, 5, 9, 0]]
    assert torch.equal(shuffled.sort(1).values, tokens.sort(1).values)
    assert not torch.equal(shuffled, tokens)
    assert bool((shuffled[:, 5] == 0).all())


def test_rows_of_a_table_have_no_symmetries() -> None:
    with pytest.raises(InputError, match="images"):
        equivariance(nn.Identity(), torch.randn(5))
