"""Chapter 8: initial weights, and what they do to a signal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.functional.initialise import gain, he_, orthogonal_, recurrent_growth, variance_by_layer, xavier_
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]

WIDTH, DEPTH = 128, 50


def _empty(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float64)


def _spread_error(fill: Code, shape: tuple[int, ...], variance: float) -> float:
    """In standard errors: the sample variance of a zero-mean normal has relative error √(2/n), of a uniform
    √(0.8/n)."""
    weight = fill(_empty(*shape))
    return abs(weight.square().mean().item() / variance - 1) / math.sqrt(2 / weight.numel())


def _growth_error(fill: Code, activation: str, kurtosis: float) -> float:
    """Drift of log variance through 50 layers, forward or back, in standard errors.

    Given its input, the mean square of a layer of n units is a mean of n independent terms with relative
    variance `kurtosis` (2 for normal terms, 5 where half of them are cut to zero), so log variance walks
    with step √(kurtosis/n).
    """
    weights = [fill(_empty(WIDTH, WIDTH)) for _ in range(DEPTH)]
    sizes = variance_by_layer(weights, activation, torch.randn(16, WIDTH, dtype=torch.float64))
    step = math.sqrt(DEPTH * kurtosis / WIDTH)
    forward = (sizes.forward[-1] / sizes.forward[0]).log().abs().item()
    backward = (sizes.backward[0] / sizes.backward[-1]).log().abs().item()
    return worst(forward, backward) / step


def _he_doubled(weight: Tensor, *, slope: float = 0.0, distribution: str = "normal") -> Tensor:
    alpha = 2.0
    return weight.normal_(0.0, math.sqrt(2 * alpha / ((1 + slope**2) * weight[0].numel())))


def _variance_picture() -> Figure:
    from quire.report.style import figure

    choices: dict[str, Code] = {
        "He, σ² = 2/D": he_,
        "misprint, σ² = 4/D": _he_doubled,
        "Xavier, σ² = 1/D": xavier_,
        "orthogonal": orthogonal_,
    }
    fig = figure(9.0, 3.6)
    forward, backward = fig.subplots(1, 2, sharey=True)
    with torch.random.fork_rng(devices=[]):
        for name, fill in choices.items():
            torch.manual_seed(0)
            weights = [fill(_empty(WIDTH, WIDTH)) for _ in range(DEPTH)]
            sizes = variance_by_layer(weights, "relu", torch.randn(16, WIDTH, dtype=torch.float64))
            layers = range(1, DEPTH + 1)
            forward.semilogy(layers, sizes.forward, label=name)
            backward.semilogy(layers, sizes.backward, label=name)
    forward.set(xlabel="layer", ylabel="mean square", title=f"Signal, {WIDTH} ReLU units a layer")
    backward.set(xlabel="layer", title="Gradient, from the last layer back")
    forward.legend()
    return fig


@entry(
    "initialise/he",
    "He's initial weights",
    r"\sigma^2 = \frac{2}{D_{in}} \text{ (ReLU)}, \qquad \sigma^2 = \frac{2}{(1 + \alpha^2) D_{in}} "
    r"\text{ (leaky, slope } \alpha)",
    code=he_,
    wrong=_he_doubled,
    tolerance=4.0,
    erratum="Sometimes printed as 2α/D_in with α = 2 for ReLU. That is twice too much: half of the units are "
    "zero, which the 2 makes up for already, and the signal doubles in every layer.",
    picture=_variance_picture,
)
def _he(fill: Code) -> float:
    """In standard errors."""
    return worst(
        _growth_error(fill, "relu", 5.0),
        _spread_error(fill, (300, 200), 2 / 200),
        _spread_error(lambda weight: fill(weight, distribution="uniform"), (40, 20, 3, 3), 2 / 180),
        _spread_error(lambda weight: fill(weight, slope=0.5), (300, 200), 2 / 250),
    )


@entry(
    "initialise/xavier",
    "Xavier's initial weights",
    r"\sigma^2 = \frac{2}{D_{in} + D_{out}}",
    code=xavier_,
    wrong=lambda weight, **options: he_(weight, **{k: v for k, v in options.items() if k != "gain"}),
    tolerance=4.0,
)
def _xavier(fill: Code) -> float:
    """In standard errors."""
    return worst(
        _growth_error(fill, "linear", 2.0),
        _spread_error(fill, (300, 100), 2 / 400),
        _spread_error(lambda weight: fill(weight, distribution="uniform"), (40, 20, 3, 3), 2 / 540),
        _spread_error(lambda weight: fill(weight, gain=1.5), (100, 300), 1.5**2 * 2 / 400),
    )


def _normalised_rows(weight: Tensor, *, gain: float = 1.0) -> Tensor:
    return weight.copy_(
        gain * nn.functional.normalize(torch.randn_like(weight).flatten(1), dim=1).reshape_as(weight)
    )


@entry(
    "initialise/orthogonal",
    "Orthogonal initial weights",
    r"W W^\top = g^2 I \;\text{ or }\; W^\top W = g^2 I, \qquad \|W x\| = g \|x\|",
    code=orthogonal_,
    wrong=_normalised_rows,
    tolerance=1e-10,
)
def _orthogonal(fill: Code) -> float:
    errors = []
    for rows, columns, scale in ((5, 5, 1.0), (4, 9, 2.0), (9, 4, 0.5)):
        weight = fill(_empty(rows, columns), gain=scale)
        product = weight @ weight.t() if rows <= columns else weight.t() @ weight
        errors.append(gap(product, scale**2 * torch.eye(min(rows, columns), dtype=torch.float64)))
    window = fill(_empty(6, 2, 3, 3)).flatten(1)
    errors.append(gap(window @ window.t(), torch.eye(6, dtype=torch.float64)))
    weights = [fill(_empty(24, 24)) for _ in range(DEPTH)]
    sizes = variance_by_layer(weights, "linear", torch.randn(8, 24, dtype=torch.float64))
    errors += [gap(sizes.forward[-1], sizes.forward[0]), gap(sizes.backward[0], sizes.backward[-1])]
    # Uniform over orthogonal matrices: the trace has mean 0 and variance 1 (in standard errors).
    traces = torch.stack([fill(_empty(6, 6)).trace() for _ in range(300)])
    return worst(*errors, require(traces.mean().abs() * math.sqrt(300) < 4))


def _gauss_hermite(function: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    nodes, weights = np.polynomial.hermite_e.hermegauss(180)
    return _number((function(nodes) ** 2 * weights).sum() / math.sqrt(2 * math.pi))


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@entry(
    "initialise/gains",
    "Gains by activation",
    r"g = \frac{1}{\sqrt{\mathbb{E}[\phi(a)^2]}}, \quad g' = \frac{1}{\sqrt{\mathbb{E}[\phi'(a)^2]}}, "
    r"\quad a \sim \mathcal{N}(0, 1); \qquad \sigma^2 = g^2 / D_{in}",
    code=gain,
    wrong=lambda activation, *, direction="forward": gain(activation, direction=direction) ** 2,
    tolerance=1e-6,
)
def _gains(of: Code) -> float:
    known = {name: nn.init.calculate_gain(name) for name in ("linear", "relu", "leaky_relu")}
    errors = [gap(_number(of(name)), _number(value)) for name, value in known.items()]
    errors += [gap(_number(of(name, direction="backward")), _number(value)) for name, value in known.items()]
    smooth: dict[str, tuple[Any, Any]] = {
        "tanh": (np.tanh, lambda a: 1 / np.cosh(a) ** 2),
        "sigmoid": (lambda a: 1 / (1 + np.exp(-a)), lambda a: 1 / (2 * np.cosh(a / 2)) ** 2),
        "softplus": (lambda a: np.log1p(np.exp(a)), lambda a: 1 / (1 + np.exp(-a))),
    }
    for name, (function, derivative) in smooth.items():
        errors.append(gap(_number(of(name) ** -2), _gauss_hermite(function)))
        errors.append(gap(_number(of(name, direction="backward") ** -2), _gauss_hermite(derivative)))
    # With its gain size 1 is a stable fixed point of tanh's forward signal: any start is drawn to it. The
    # mean over ten layers of 128 units fluctuates by about 3%.
    weights = [
        torch.randn(WIDTH, WIDTH, dtype=torch.float64) * of("tanh") / math.sqrt(WIDTH) for _ in range(DEPTH)
    ]
    sizes = variance_by_layer(weights, "tanh", torch.randn(16, WIDTH, dtype=torch.float64))
    return worst(*errors, require((sizes.forward[-10:].mean() - 1).abs() < 0.12))


@entry(
    "initialise/recurrent",
    "Recurrent weights explode or vanish",
    r"\|W^t h\| \le s_{\max}(W)^t \|h\|; \qquad W = g Q,\ Q^\top Q = I:\ \|W^t h\| = g^t \|h\|",
    code=(recurrent_growth, orthogonal_),
    wrong=(
        lambda weight, steps, start: recurrent_growth(weight, steps, start).clamp(0.5, 2.0),
        _normalised_rows,
    ),
    tolerance=1e-9,
)
def _recurrent(growth: Code, fill: Code) -> float:
    steps, start = 60, torch.randn(20, dtype=torch.float64)
    times = torch.arange(steps + 1, dtype=torch.float64)
    errors = []
    for scale in (0.9, 1.0, 1.1):
        errors.append(gap(growth(fill(_empty(20, 20), gain=scale), steps, start), scale**times))
    matrix = torch.randn(20, 20, dtype=torch.float64)
    below = 0.9 * matrix / torch.linalg.matrix_norm(matrix, 2)
    errors.append(require((growth(below, steps, start) <= 0.9**times * (1 + 1e-12)).all()))
    errors.append(require(growth(below, steps, start)[-1] < 1e-3))
    symmetric = matrix + matrix.t()
    above = growth(1.1 * symmetric / torch.linalg.matrix_norm(symmetric, 2), 200, start)
    errors.append(require(above[-1] > 1e3))
    # s_max > 1 is needed to explode but does not suffice: this matrix doubles once and is zero after that.
    nilpotent = torch.tensor([[0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    short = growth(nilpotent, 2, torch.tensor([0.0, 1.0], dtype=torch.float64))
    return worst(*errors, gap(short, torch.tensor([1.0, 2.0, 0.0])))
