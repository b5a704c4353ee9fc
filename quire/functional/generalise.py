"""How well a model does on data it has not seen: Monte-Carlo error, K-fold, bias and variance,
polynomial degree.

A model is anything of the form ``fit(x, y) -> predict`` with ``predict(x) -> prediction``.

N rows, M test points, R refits, D features, K folds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.reduction import require_same_shape

Predict = Callable[[Tensor], Tensor]
Fit = Callable[[Tensor, Tensor], Predict]
Loss = Callable[[Tensor, Tensor], Tensor]
Generator = torch.Generator | None


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """(ŷ−y)² of each row."""
    require_same_shape("squared_error", prediction, target)
    return (prediction - target).square()


# Monte Carlo ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error."""

    value: float
    standard_error: float

    def interval(self, width: float = 1.96) -> tuple[float, float]:
        """value ± width·standard error; 1.96 covers 95% for many samples."""
        return self.value - width * self.standard_error, self.value + width * self.standard_error

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.standard_error:.2g}"


def monte_carlo(values: Tensor) -> Estimate:
    """E[v] ≈ v̄ = (1/n)Σv_i with standard error s/√n, s² = Σ(v_i−v̄)²/(n−1)."""
    if values.dim() != 1 or len(values) < 2:
        raise InputError(
            f"values of shape {tuple(values.shape)}",
            expected="a vector of at least 2 independent values, so that their spread is known",
        )
    values = values.detach().double()
    return Estimate(values.mean().item(), values.std().item() / len(values) ** 0.5)


def generalisation_error(predict: Predict, x: Tensor, y: Tensor, loss: Loss = squared_error) -> Estimate:
    """E_gen = E[ℓ(f(x), y)] from rows that took no part in the fit; `loss` gives one value per row."""
    return monte_carlo(loss(predict(x), y))


# K-fold ---------------------------------------------------------------------------------------


def k_fold(
    rows: int, folds: int = 5, generator: Generator = None, stratify: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """(training rows, held-out rows) K times; each row is held out exactly once.

    Fold sizes differ by at most one; with `stratify` (a class per row) this holds for each class too.
    Rows are shuffled when a generator is given.
    """
    if not 2 <= folds <= rows:
        raise InputError(
            f"{folds} folds of {rows} rows",
            expected="at least 2 folds and no more folds than rows",
            fix="take fewer folds",
        )
    order = torch.arange(rows) if generator is None else torch.randperm(rows, generator=generator)
    fold = torch.empty(rows, dtype=torch.long)
    if stratify is None:
        sizes = torch.tensor([len(part) for part in order.tensor_split(folds)])
        fold[order] = torch.arange(folds).repeat_interleave(sizes)
    else:
        if len(stratify) != rows:
            raise InputError(
                f"{len(stratify)} classes to stratify {rows} rows by", expected="one class for each row"
            )
        # Dealing the rows out like cards, class after class, evens out every class and every fold.
        by_class = order[stratify.cpu()[order].argsort(stable=True)]
        fold[by_class] = torch.arange(rows) % folds
    everything = torch.arange(rows)
    return [(everything[fold != k], everything[fold == k]) for k in range(folds)]


@dataclass(frozen=True)
class CrossValidation:
    """Mean loss of each fold on the rows it was fitted on and on the rows held out, both (K,)."""

    train: Tensor
    validation: Tensor

    @property
    def score(self) -> Estimate:
        """The held-out loss. Folds share training rows, so the standard error is a rough one."""
        return monte_carlo(self.validation)


def cross_validate(
    fit: Fit,
    x: Tensor,
    y: Tensor,
    loss: Loss = squared_error,
    folds: int = 5,
    generator: Generator = None,
    stratify: Tensor | None = None,
) -> CrossValidation:
    """Fit K times, each time judged on the fold that was left out."""
    train, validation = [], []
    for inside, outside in k_fold(len(x), folds, generator, stratify):
        inside, outside = inside.to(x.device), outside.to(x.device)
        predict = fit(x[inside], y[inside])
        train.append(loss(predict(x[inside]), y[inside]).detach().double().mean())
        validation.append(loss(predict(x[outside]), y[outside]).detach().double().mean())
    return CrossValidation(torch.stack(train), torch.stack(validation))


# Bias and variance ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Decomposition:
    """Expected squared error = bias² + variance + noise, each averaged over the test points.

    `total` is measured on its own, against fresh noisy targets; it is not the sum of the others.
    """

    bias2: Estimate
    variance: Estimate
    noise: float
    total: Estimate
    predictions: Tensor  # (R, M), each refit's
    truth: Tensor  # (M,)

    @property
    def residual(self) -> float:
        """total − (bias² + variance + noise): 0 but for the randomness of the fresh targets."""
        return self.total.value - (self.bias2.value + self.variance.value + self.noise)

    @property
    def pointwise_bias2(self) -> Tensor:
        """(f̄−f)² − s²/R at each test point, free of the spread of the mean prediction f̄."""
        offset = self.predictions.mean(0) - self.truth
        return offset.square() - self.pointwise_variance / len(self.predictions)

    @property
    def pointwise_variance(self) -> Tensor:
        """s² of the predictions at each test point."""
        return self.predictions.var(0)


def bias_variance(
    fit: Fit,
    resample: Callable[[Generator], tuple[Tensor, Tensor]],
    x: Tensor,
    truth: Tensor,
    *,
    noise_std: float = 0.0,
    resamples: int = 100,
    generator: Generator = None,
) -> Decomposition:
    """Refit on `resamples` training sets and split the error at the test points `x`.

    bias² = E_x[(f̄−f)²], variance = E_x[E_D[(f_D−f̄)²]], noise = σ². `resample` draws a training set:
    fresh from a known source, or with replacement from a real one (`resample_rows`). `truth` is the
    noiseless target; where only noisy observations exist, give them with noise_std 0, and bias² then
    contains the noise, since nothing can tell the two apart.
    """
    if resamples < 2:
        raise InputError(f"{resamples} resamples", expected="at least 2, so that a variance exists")
    if len(truth) != len(x) or truth.dim() != 1:
        raise InputError(
            f"{len(x)} test points and true values of shape {tuple(truth.shape)}",
            expected="one true value for each test point",
        )
    fits = (fit(*resample(generator)) for _ in range(resamples))
    predictions = torch.stack([predict(x).detach().reshape(-1) for predict in fits]).double()
    if predictions.shape[1] != len(truth):
        raise InputError(
            f"{predictions.shape[1]} predictions for {len(truth)} test points",
            expected="one number for each test point",
        )
    truth = truth.detach().double()
    noise = torch.randn(predictions.shape, generator=generator, device=truth.device, dtype=truth.dtype)
    # Values of single refits, whose means are the parts and whose spread gives their standard errors.
    mean = predictions.mean(0)
    errors = (predictions - truth - noise_std * noise).square().mean(1)
    spreads = (predictions - mean).square().mean(1) * resamples / (resamples - 1)
    pulls = 2 * ((mean - truth) * (predictions - mean)).mean(1)
    bias2 = (mean - truth).square().mean() - predictions.var(0).mean() / resamples
    return Decomposition(
        bias2=Estimate(bias2.item(), monte_carlo(pulls).standard_error),
        variance=monte_carlo(spreads),
        noise=noise_std**2,
        total=monte_carlo(errors),
        predictions=predictions,
        truth=truth,
    )


def resample_rows(x: Tensor, y: Tensor) -> Callable[[Generator], tuple[Tensor, Tensor]]:
    """A bootstrap of a real data set for `bias_variance`: as many rows, drawn with replacement."""

    def draw(generator: Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(x), (len(x),), generator=generator, device=x.device)
        return x[rows], y[rows]

    return draw


# Polynomials ----------------------------------------------------------------------------------


def polynomial_features(x: Tensor, degree: int, bias: bool = True) -> Tensor:
    """All monomials up to total degree d: 1, x, x², …, x^d for one input, with all products of the
    inputs for several; (N,) or (N, D) -> (N, C(D+d, d)), lower degrees first."""
    if degree < 0 or x.dim() not in (1, 2):
        raise InputError(
            f"degree {degree} of inputs of shape {tuple(x.shape)}",
            expected="a degree >= 0 of inputs (N,) or (N, D)",
        )
    columns = x.unsqueeze(1) if x.dim() == 1 else x
    monomials: dict[tuple[int, ...], Tensor] = {(): columns.new_ones(columns.shape[0])}
    for total in range(1, degree + 1):
        for inputs in combinations_with_replacement(range(columns.shape[1]), total):
            monomials[inputs] = monomials[inputs[:-1]] * columns[:, inputs[-1]]
    if not bias:
        del monomials[()]
    if not monomials:
        return columns.new_empty(columns.shape[0], 0)
    return torch.stack(list(monomials.values()), 1)


@dataclass(frozen=True)
class Polynomial:
    """Σ_j c_j·φ_j(x) over the features of `polynomial_features`."""

    degree: int
    coefficients: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return polynomial_features(x, self.degree) @ self.coefficients


def fit_polynomial(x: Tensor, y: Tensor, degree: int) -> Polynomial:
    """The least-squares polynomial of `degree`; the shortest one where several fit equally well."""
    features = polynomial_features(x, degree)
    # Powers differ in size by orders of magnitude; columns of equal length keep the system solvable.
    length = features.norm(dim=0).clamp(min=torch.finfo(features.dtype).tiny)
    driver = "gelsd" if x.device.type == "cpu" else "gels"
    solution = torch.linalg.lstsq(features / length, y.unsqueeze(-1), driver=driver).solution
    return Polynomial(degree, solution.squeeze(-1) / length)


@dataclass(frozen=True)
class DegreeCurve:
    """Error by polynomial degree, (number of degrees, K)."""

    degrees: tuple[int, ...]
    train: Tensor
    validation: Tensor

    @property
    def best(self) -> int:
        """The degree with the lowest mean validation error."""
        return self.degrees[int(self.validation.mean(1).argmin())]


def degree_curve(
    x: Tensor, y: Tensor, degrees: Sequence[int], folds: int = 5, generator: Generator = None
) -> DegreeCurve:
    """Training and validation error of each degree, over the same K folds."""
    if not degrees:
        raise InputError("no degree to try", expected="at least one, such as range(10)")
    seed = int(torch.randint(2**62, (), generator=generator))
    results = []
    for degree in degrees:
        same_folds = torch.Generator().manual_seed(seed)

        def fit(x: Tensor, y: Tensor, degree: int = degree) -> Polynomial:
            return fit_polynomial(x, y, degree)

        results.append(cross_validate(fit, x, y, folds=folds, generator=same_folds))
    train, validation = ([getattr(result, name) for result in results] for name in ("train", "validation"))
    return DegreeCurve(tuple(degrees), torch.stack(train), torch.stack(validation))
