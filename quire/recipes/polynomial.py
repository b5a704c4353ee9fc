"""Polynomial regression: the degree by K-fold, and why it is that one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.options import Optim, Train, check_range
from quire.recipes.base import Expectation, TableRunOptions, recipe

if TYPE_CHECKING:
    from quire.functional.generalise import DegreeCurve
    from quire.recipes.plan import Picture, Plan

MOST_TERMS = 2000


@dataclass(frozen=True)
class Degree:
    """The polynomial."""

    degree: int | None = None
    """Fixed degree; without it the one with the lowest K-fold error."""
    max_degree: int = 12
    folds: int = 5

    def __post_init__(self) -> None:
        check_range(self, "--model.", degree=">= 1", max_degree=">= 1", folds=">= 1")


@dataclass(frozen=True, kw_only=True)
class PolynomialOptions(TableRunOptions):
    model: Degree = field(default_factory=Degree)
    # In the whitened basis the Hessian is the identity, so a step of 1 is the Newton step.
    optim: Optim = field(default_factory=lambda: Optim("sgd", lr=1.0))
    train: Train = field(default_factory=lambda: Train(batch_size=0, restore="last", validate_every=5))


@recipe(
    "polynomial",
    summary="Polynomial regression; degree by K-fold, with the bias-variance picture",
    expected=Expectation("rmse", at_most=0.25),
    targets="values",
    options=PolynomialOptions,
)
def polynomial(options: PolynomialOptions) -> Plan:
    import torch

    from quire.functional.generalise import degree_curve
    from quire.models.polynomial import PolynomialConfig, PolynomialModel
    from quire.recipes.plan import Plan, make_head, open_data
    from quire.tasks.supervised import Supervised

    data = open_data(options, "wave", kind="regression")
    inputs, target = data.train.inputs, data.train.target
    curve = None
    degree = options.model.degree
    if degree is None:
        degrees = possible_degrees(inputs.shape[1], len(inputs), options.model.max_degree)
        generator = torch.Generator().manual_seed(options.seed)
        curve = degree_curve(
            inputs.double(), target.double(), degrees, folds=options.model.folds, generator=generator
        )
        degree = curve.best
    model = PolynomialModel(PolynomialConfig(inputs.shape[1], 1, degree))
    model.fit_basis(inputs)
    task = Supervised(model, make_head(data.preparation.target, target))

    def pictures() -> list[Picture]:
        found = [] if curve is None else [degree_picture(curve)]
        return found if options.data is not None else [*found, bias_variance_picture(len(inputs))]

    notes = [f"degree {degree}" + (" has the lowest K-fold error" if curve else "")]
    return Plan(task, data, options, epochs=50, pictures=pictures, notes=notes)


def possible_degrees(features: int, rows: int, most: int) -> list[int]:
    """Degrees whose terms number at most half the rows (and `MOST_TERMS`); degree 1 always."""
    from math import comb

    limit = min(rows // 2, MOST_TERMS)
    return [d for d in range(1, most + 1) if d == 1 or comb(features + d, d) <= limit]


def degree_picture(curve: DegreeCurve) -> Picture:
    from quire.recipes.plan import Picture
    from quire.report.style import figure

    fig = figure(5.2, 3.2)
    axes = fig.subplots()
    for name, errors in (("training", curve.train), ("held out", curve.validation)):
        mean, spread = errors.mean(1), errors.std(1) / errors.shape[1] ** 0.5
        axes.errorbar(curve.degrees, mean, spread, marker="o", markersize=3, capsize=2, label=name)
    axes.axvline(curve.best, linestyle=":", color="grey", label=f"chosen: {curve.best}")
    axes.set(title="K-fold error by degree", xlabel="degree", ylabel="mean squared error", yscale="log")
    axes.legend()
    caption = "Mean over the folds with its standard error. Training error falls; held-out error turns."
    return Picture("degree", "Degree by K-fold", caption, fig)


def bias_variance_picture(rows: int, resamples: int = 60) -> Picture:
    """On the built-in wave, whose truth is known, so that bias and noise can be told apart."""
    import torch

    from quire.data.builtin import WAVE_NOISE, wave_truth
    from quire.functional.generalise import bias_variance, fit_polynomial
    from quire.recipes.plan import Picture
    from quire.report.style import figure

    def truth(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(wave_truth(x.numpy()))

    def draw(generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.rand(rows, dtype=torch.float64, generator=generator)
        noise = torch.randn(rows, dtype=torch.float64, generator=generator)
        return x, truth(x) + WAVE_NOISE * noise

    points = torch.linspace(0.02, 0.98, 60, dtype=torch.float64)
    degrees = list(range(1, 11))
    parts = []
    for degree in degrees:
        generator = torch.Generator().manual_seed(0)
        parts.append(
            bias_variance(
                lambda x, y, degree=degree: fit_polynomial(x, y, degree),  # type: ignore[misc]
                draw, points, truth(points), noise_std=WAVE_NOISE, resamples=resamples, generator=generator,
            )
        )  # fmt: skip
    fig = figure(5.2, 3.2)
    axes = fig.subplots()
    axes.plot(degrees, [max(p.bias2.value, 1e-6) for p in parts], marker="o", markersize=3, label="bias²")
    axes.plot(degrees, [p.variance.value for p in parts], marker="s", markersize=3, label="variance")
    axes.plot(degrees, [p.noise for p in parts], linestyle=":", label="noise")
    axes.plot(degrees, [p.total.value for p in parts], linewidth=2, label="total")
    axes.set(title="Bias and variance by degree", xlabel="degree", ylabel="squared error", yscale="log")
    axes.legend()
    caption = f"{resamples} training sets of {rows} points each, drawn from the known source."
    return Picture("bias-variance", "Bias and variance", caption, fig)
