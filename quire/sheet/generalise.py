"""Chapter 9, second part: error on unseen data, and what it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn import model_selection
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.preprocessing import PolynomialFeatures
from torch import Tensor

from quire.functional import generalise
from quire.report.style import BLUE, GREEN, GREY, VERMILION, figure
from quire.sheet.registry import entry, gap, require, worst

NOISE = 0.3


def _hump(x: Tensor) -> Tensor:
    return torch.sin(3 * x)


def _source(rows: int) -> Callable[[torch.Generator | None], tuple[Tensor, Tensor]]:
    """Training sets of a fixed design: the same x each time, new noise."""
    x = torch.linspace(-1, 1, rows).double()

    def draw(generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        return x, _hump(x) + NOISE * torch.randn(rows, generator=generator, dtype=torch.float64)

    return draw


def _fit(degree: int) -> Callable[[Tensor, Tensor], generalise.Polynomial]:
    return lambda x, y: generalise.fit_polynomial(x, y, degree)


# Bias and variance ----------------------------------------------------------------------------


def _bias_variance_picture() -> Figure:
    degrees, x = range(10), torch.linspace(-1, 1, 50).double()
    generator = torch.Generator().manual_seed(0)
    results = [
        generalise.bias_variance(
            _fit(degree), _source(15), x, _hump(x), noise_std=NOISE, resamples=200, generator=generator
        )
        for degree in degrees
    ]
    fig = figure(8.4, 3.2)
    curves, fits = fig.subplots(1, 2)
    for label, values in {
        "bias²": [r.bias2.value for r in results],
        "variance": [r.variance.value for r in results],
        "noise": [r.noise for r in results],
        "total, measured": [r.total.value for r in results],
    }.items():
        curves.plot(degrees, values, label=label, marker="o", markersize=3)
    curves.set(title="Expected squared error", xlabel="polynomial degree", ylabel="squared error")
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    curves.legend(fontsize=8)
    for degree, colour in ((1, BLUE), (9, VERMILION)):
        result = results[degree]
        fits.plot(x, result.predictions[:25].T, color=colour, alpha=0.15, linewidth=0.7)
        fits.plot(x, result.predictions.mean(0), color=colour, label=f"degree {degree}, mean of refits")
    fits.plot(x, _hump(x), color=GREEN, linestyle="--", label="truth")
    fits.set(title="25 refits and their mean", xlabel="x", ylabel="prediction", ylim=(-2, 2))
    fits.legend(fontsize=8)
    return fig


def _bias_of_single_fits(*args: Any, **options: Any) -> generalise.Decomposition:
    right = generalise.bias_variance(*args, **options)
    error = (right.predictions - right.truth).square().mean().item()
    return dataclasses.replace(right, bias2=generalise.Estimate(error, right.bias2.standard_error))


@entry(
    "generalise/bias-variance",
    "Bias, variance and noise",
    r"\mathbb{E}\,(y - f_D(x))^2 = (\bar{f}(x) - f(x))^2 + \mathbb{E}_D (f_D(x) - \bar{f}(x))^2 + \sigma^2",
    code=generalise.bias_variance,
    wrong=_bias_of_single_fits,
    tolerance=1e-12,
    picture=_bias_variance_picture,
)
def _(bias_variance: Callable[..., generalise.Decomposition]) -> float:
    x = torch.linspace(-0.95, 0.95, 20).double()
    generator = torch.Generator().manual_seed(0)
    errors = []
    for degree in (1, 3):
        options = {"resamples": 300, "generator": generator}
        without = bias_variance(_fit(degree), _source(15), x, _hump(x), **options)
        # Against noiseless targets the three add up to rounding, whatever the number of refits.
        errors.append(abs(without.residual))
        measured = bias_variance(_fit(degree), _source(15), x, _hump(x), noise_std=NOISE, **options)
        errors.append(require(abs(measured.residual) < 4 * measured.total.standard_error))
        # Least squares on a fixed design has both parts in closed form: f̄ is the fit to the noiseless
        # values, the variance at x is σ²·φ(x)ᵀ(ΦᵀΦ)⁻¹φ(x).
        design = torch.linspace(-1, 1, 15).double()
        powers = torch.stack([design**d for d in range(degree + 1)], 1)
        at = torch.stack([x**d for d in range(degree + 1)], 1)
        inverse = torch.linalg.inv(powers.T @ powers)
        bias2 = (at @ inverse @ powers.T @ _hump(design) - _hump(x)).square().mean().item()
        variance = NOISE**2 * ((at @ inverse) * at).sum(1).mean().item()
        for estimate, exact in ((measured.bias2, bias2), (measured.variance, variance)):
            errors.append(require(abs(estimate.value - exact) < 4 * estimate.standard_error))
    return worst(*errors)


# Monte Carlo ----------------------------------------------------------------------------------


@entry(
    "generalise/monte-carlo",
    "Generalisation error by Monte Carlo",
    r"E_{\text{gen}} \approx \frac{1}{n} \sum_i \ell(f(x_i), y_i) \pm \frac{s}{\sqrt{n}}",
    code=generalise.generalisation_error,
    wrong=lambda predict, x, y: generalise.Estimate(
        (predict(x) - y).square().mean().item(), (predict(x) - y).square().std().item()
    ),
    tolerance=4.0,
)
def _(estimate: Callable[..., generalise.Estimate]) -> float:
    # y = 2x + 0.5ε judged by f(x) = 1.4x: the error is (2−1.4)²·E[x²] + 0.5² for x ~ N(0, 1).
    truth, offs = 0.6**2 + 0.5**2, []
    for _ in range(500):
        x = torch.randn(400).double()
        result = estimate(lambda rows: 1.4 * rows, x, 2 * x + 0.5 * torch.randn(400).double())
        offs.append((result.value - truth) / result.standard_error)
    off = torch.tensor(offs)
    # In standard errors, errors must be spread like N(0, 1). Squared losses are skewed, which pulls
    # the mean of off by about −skewness/(2√n) ≈ −0.07; the first allowance covers it.
    centre = max(abs(off.mean().item()) - 0.07, 0.0) * 500**0.5
    spread = abs(off.std().item() - 1) * (2 * 500) ** 0.5
    return worst(centre, spread)


# K-fold ---------------------------------------------------------------------------------------


def _equal_folds_only(
    rows: int, folds: int = 5, generator: Any = None, stratify: Any = None
) -> list[tuple[Tensor, Tensor]]:
    parts = torch.arange(rows)[: rows // folds * folds].chunk(folds)
    return [(torch.cat([p for p in parts if p is not part]), part) for part in parts]


@entry(
    "generalise/k-fold",
    "K-fold cross-validation",
    r"\bigsqcup_{k=1}^{K} V_k = \{1, \dots, n\}, \qquad E = \frac{1}{K} \sum_k \frac{1}{|V_k|} "
    r"\sum_{i \in V_k} \ell(f_{\setminus V_k}(x_i), y_i)",
    code=(generalise.k_fold, generalise.cross_validate),
    wrong=(
        _equal_folds_only,
        lambda fit, x, y, folds: generalise.CrossValidation(*[(fit(x, y)(x) - y).square()[:folds]] * 2),
    ),
    tolerance=1e-10,
)
def _(k_fold: Callable[..., Any], cross_validate: Callable[..., Any]) -> float:
    errors = []
    for rows, folds in ((10, 5), (23, 4), (7, 7), (100, 3)):
        for generator in (None, torch.Generator().manual_seed(rows)):
            pairs = k_fold(rows, folds, generator)
            held_out = torch.cat([outside for _, outside in pairs])
            errors.append(gap(held_out.sort().values, torch.arange(rows)))  # each row held out once
            whole = [torch.cat(pair).sort().values for pair in pairs]
            errors += [gap(both, torch.arange(rows)) for both in whole]
            sizes = [len(outside) for _, outside in pairs]
            peer = [len(outside) for _, outside in KFold(folds).split(np.zeros(rows))]
            errors.append(require(sizes == peer))
    y = torch.tensor([0] * 11 + [1] * 23 + [2] * 6)
    pairs = k_fold(40, 4, torch.Generator().manual_seed(0), y)
    mine = sorted(torch.bincount(y[outside], minlength=3).tolist() for _, outside in pairs)
    peers = StratifiedKFold(4, shuffle=True, random_state=0).split(np.zeros(40), y.numpy())
    peer_counts = sorted(np.bincount(y.numpy()[outside], minlength=3).tolist() for _, outside in peers)
    errors.append(require(mine == peer_counts))
    x = torch.randn(31, 3).double()
    target = x @ torch.randn(3).double() + torch.randn(31).double()
    scores = cross_validate(_fit(1), x, target, folds=4)
    expected = model_selection.cross_validate(
        LinearRegression(), x.numpy(), target.numpy(), cv=KFold(4), scoring="neg_mean_squared_error",
        return_train_score=True,
    )  # fmt: skip
    both = gap(scores.validation, -expected["test_score"]), gap(scores.train, -expected["train_score"])
    return worst(*errors, *both)


# Polynomials ----------------------------------------------------------------------------------


def _degree_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = 2 * torch.rand(30, generator=generator, dtype=torch.float64) - 1
    return x, _hump(x) + NOISE * torch.randn(30, generator=generator, dtype=torch.float64)


def _degree_picture() -> Figure:
    x, y = _degree_data()
    curve = generalise.degree_curve(x, y, range(13), folds=5, generator=torch.Generator().manual_seed(0))
    fig = figure(8.4, 3.2)
    errors, fits = fig.subplots(1, 2)
    errors.plot(curve.degrees, curve.train.mean(1), label="training", marker="o", markersize=3)
    errors.plot(curve.degrees, curve.validation.mean(1), label="validation", marker="o", markersize=3)
    errors.axvline(curve.best, color=GREEN, linestyle="--", label=f"best: degree {curve.best}")
    errors.set(title="5-fold error", xlabel="polynomial degree", ylabel="mean squared error", yscale="log")
    errors.xaxis.set_major_locator(MaxNLocator(integer=True))
    errors.legend(fontsize=8)
    grid = torch.linspace(-1, 1, 200).double()
    fits.plot(x, y, "o", color=GREY, markersize=3, label="data")
    for degree, colour in ((1, BLUE), (curve.best, GREEN), (12, VERMILION)):
        fit = generalise.fit_polynomial(x, y, degree)
        fits.plot(grid, fit(grid), color=colour, label=f"degree {degree}")
    fits.set(title="Fits", xlabel="x", ylabel="y", ylim=(-2, 2))
    fits.legend(fontsize=8)
    return fig


@entry(
    "generalise/polynomial",
    "Polynomial degree against training and validation error",
    r"f(x) = \sum_{j=0}^{d} c_j x^j, \qquad d^* = \arg\min_d E_{\text{validation}}(d)",
    code=(generalise.polynomial_features, generalise.fit_polynomial, generalise.degree_curve),
    wrong=(
        lambda x, degree: torch.stack([x**j for j in range(1, degree + 2)], 1),  # no constant
        lambda x, y, degree: generalise.fit_polynomial(x, y, max(degree - 1, 0)),
        lambda x, y, degrees, folds=5, generator=None: generalise.DegreeCurve(
            tuple(degrees), torch.ones(len(degrees), folds), torch.ones(len(degrees), folds)
        ),
    ),
    tolerance=1e-8,
    picture=_degree_picture,
)
def _(features: Callable[..., Tensor], fit: Callable[..., Any], curve_of: Callable[..., Any]) -> float:
    x, y = _degree_data()
    errors = []
    for degree in (0, 1, 4, 9):
        expected = np.polyfit(x.numpy(), y.numpy(), degree)[::-1].copy()
        errors.append(gap(fit(x, y, degree).coefficients, torch.from_numpy(expected)))
        errors.append(gap(features(x, degree), torch.from_numpy(np.vander(x.numpy(), degree + 1, True))))
    several = torch.randn(6, 3).double()
    errors.append(gap(features(several, 3), PolynomialFeatures(3).fit_transform(several.numpy())))
    curve = curve_of(x, y, range(8), generator=torch.Generator().manual_seed(0))
    # Each degree contains the one below, so that the training error of a fold never rises.
    errors.append(float((curve.train[1:] - curve.train[:-1]).max().clamp(min=0)))
    # With as many folds as rows the order of the rows does not matter: all rows but one, then that one.
    for degree in (1, 4):
        alone, others = [], []
        for row in range(len(x)):
            rest = np.delete(np.arange(len(x)), row)
            own = np.polynomial.Polynomial.fit(x.numpy()[rest], y.numpy()[rest], degree)
            squared = np.square(own(x.numpy()) - y.numpy())
            alone.append(squared[row])
            others.append(squared[rest].mean())
        single = curve_of(x, y, (degree,), folds=len(x), generator=torch.Generator().manual_seed(1))
        errors.append(require(single.degrees == (degree,)))
        for found, wanted in ((single.validation, alone), (single.train, others)):
            errors.append(
                gap(found[0].sort().values, torch.tensor(wanted, dtype=torch.float64).sort().values)
            )
    # sin(3x) on [−1, 1] is nearly a cubic: a line misses it, and more bends than 5 find only noise.
    return worst(*errors, require(3 <= curve.best <= 5))
