"""Chapter 3: activations, each with its derivative.

Every proof compares value and derivative with the printed formula and its autograd derivative in float64,
runs gradcheck, and asks for finite values and gradients at ±1e4 in float32 and bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.functional import activations as A
from quire.functional.activations import ACTIVATIONS
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]
Function = Callable[[Tensor], Tensor]

TOLERANCE = 1e-12


def _points() -> Tensor:
    """Random pre-activations, none so close to a kink that finite differences would step over it."""
    a = torch.randn(60, dtype=torch.float64) * 4
    for kink in (0.0, 6.0):
        a = a[(a - kink).abs() > 1e-3]
    return a


def _slope(function: Function, a: Tensor) -> Tensor:
    a = a.clone().requires_grad_()
    return torch.autograd.grad(function(a).sum(), a)[0]


def _stays_finite(function: Function) -> float:
    """At ±1e4, ±100 and 0, in float32 and bfloat16, with finite gradients."""
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], dtype=dtype)
        errors.append(require(function(a).isfinite().all() and function(a).dtype == dtype))
        errors.append(require(_slope(function, a).isfinite().all()))
    return worst(*errors)


def _elementwise(function: Function, derivative: Function, printed: Function) -> float:
    a = _points()
    check = torch.autograd.gradcheck(function, (a.clone().requires_grad_(),), raise_exception=False)
    return worst(
        gap(function(a), printed(a)),
        gap(derivative(a), _slope(printed, a)),
        gap(_slope(function, a), derivative(a)),
        require(check),
        _stays_finite(function),
        _stays_finite(lambda v: derivative(v) * v),  # its own gradient is not needed, its value is
    )


def _from_output(name: str) -> float:
    """The shortcut f'(a) = h(f(a)) that a backward pass may use."""
    shortcut = ACTIVATIONS[name].derivative_from_output
    a = _points()
    return gap(shortcut(ACTIVATIONS[name].function(a)), ACTIVATIONS[name].derivative(a)) if shortcut else 0.0


def _curves(name: str) -> Callable[[], Figure]:
    def picture() -> Figure:
        from quire.report.style import figure

        activation = ACTIVATIONS[name]
        a = torch.linspace(-8, 8, 801, dtype=torch.float64)
        fig = figure(4.6, 3.0)
        axes = fig.subplots()
        axes.plot(a, activation.function(a), label=name)
        axes.plot(a, activation.derivative(a), linestyle="--", label="derivative")
        axes.set(title=name.replace("_", " "), xlabel="pre-activation a", ylabel="value")
        axes.legend()
        return fig

    return picture


def _mixing_curves(name: str) -> Callable[[], Figure]:
    def picture() -> Figure:
        from quire.report.style import figure

        first = torch.linspace(-8, 8, 401, dtype=torch.float64)
        a = torch.stack([first, torch.zeros_like(first), torch.ones_like(first)], 1).requires_grad_()
        z = ACTIVATIONS[name].function(a)
        slopes = [torch.autograd.grad(z[:, k].sum(), a, retain_graph=True)[0][:, 0] for k in range(3)]
        fig = figure(8.6, 3.0)
        left, right = fig.subplots(1, 2)
        for k in range(3):
            left.plot(first, z[:, k].detach(), label=f"output {k + 1}")
            right.plot(first, slopes[k], linestyle="--", label=f"output {k + 1}")
        title = name.replace("_", " ")
        left.set(title=f"{title} of (a, 0, 1)", xlabel="first input a", ylabel="value")
        right.set(title="Derivative by the first input", xlabel="first input a", ylabel="slope")
        left.legend()
        right.legend()
        return fig

    return picture


@entry(
    "activation/linear",
    "Linear",
    r"f(a) = a, \qquad f'(a) = 1",
    code=(A.linear, A.linear_derivative),
    wrong=(A.linear, torch.zeros_like),
    tolerance=TOLERANCE,
    picture=_curves("linear"),
)
def _linear(function: Code, derivative: Code) -> float:
    return worst(_elementwise(function, derivative, lambda a: 1 * a), _from_output("linear"))


@entry(
    "activation/sigmoid",
    "Sigmoid",
    r"\sigma(a) = \frac{1}{1 + e^{-a}}, \qquad \sigma'(a) = \sigma(a)\,(1 - \sigma(a))",
    code=(A.sigmoid, A.sigmoid_derivative),
    wrong=(A.sigmoid, lambda a: torch.sigmoid(a).square()),
    tolerance=TOLERANCE,
    picture=_curves("sigmoid"),
)
def _sigmoid(function: Code, derivative: Code) -> float:
    printed = _elementwise(function, derivative, lambda a: 1 / (1 + torch.exp(-a)))
    return worst(printed, gap(derivative(torch.zeros(1)), [0.25]), _from_output("sigmoid"))


@entry(
    "activation/arctan",
    "Arctangent",
    r"f(a) = \arctan a, \qquad f'(a) = \frac{1}{1 + a^2}",
    code=(A.arctan, A.arctan_derivative),
    wrong=(A.arctan, lambda a: torch.rsqrt(1 + a * a)),
    tolerance=TOLERANCE,
    picture=_curves("arctan"),
)
def _arctan(function: Code, derivative: Code) -> float:
    def printed(a: Tensor) -> Tensor:  # through complex logarithms
        return torch.log(torch.complex(torch.ones_like(a), a)).imag

    back = _points().clamp(-1.5, 1.5)
    return worst(_elementwise(function, derivative, printed), gap(function(torch.tan(back)), back))


def _naive_tanh(a: Tensor) -> Tensor:
    return (torch.exp(a) - torch.exp(-a)) / (torch.exp(a) + torch.exp(-a))


@entry(
    "activation/tanh",
    "Hyperbolic tangent, both forms",
    r"\tanh a = \frac{e^a - e^{-a}}{e^a + e^{-a}} = 2\sigma(2a) - 1, \qquad \tanh' a = 1 - \tanh^2 a",
    code=(A.tanh, A.tanh_from_exponentials, A.tanh_from_sigmoid, A.tanh_derivative),
    # Overflows: e^a is infinite long before a = 1e4.
    wrong=(A.tanh, _naive_tanh, A.tanh_from_sigmoid, A.tanh_derivative),
    tolerance=TOLERANCE,
    picture=_curves("tanh"),
)
def _tanh(function: Code, exponentials: Code, sigmoid_form: Code, derivative: Code) -> float:
    forms = (function, exponentials, sigmoid_form)
    a = _points()
    errors = [_elementwise(form, derivative, _naive_tanh) for form in forms]
    errors += [gap(form(a), torch.tanh(a)) for form in forms]
    return worst(*errors, _from_output("tanh"))


@entry(
    "activation/relu",
    "Rectified linear unit",
    r"f(a) = \max(0, a), \qquad f'(a) = \mathbf{1}[a > 0], \; f'(0) = 0",
    code=(A.relu, A.relu_derivative),
    wrong=(A.relu, lambda a: (a >= 0).to(a.dtype)),  # 1 at 0
    tolerance=TOLERANCE,
    picture=_curves("relu"),
)
def _relu(function: Code, derivative: Code) -> float:
    zero = torch.zeros(1, dtype=torch.float64)
    at_zero = worst(gap(derivative(zero), zero), gap(_slope(function, zero), zero))
    return worst(
        _elementwise(function, derivative, lambda a: (a + a.abs()) / 2), at_zero, _from_output("relu")
    )


@entry(
    "activation/leaky-relu",
    "Leaky rectified linear unit",
    r"f(a) = \begin{cases} a & a > 0 \\ \alpha a & a \le 0 \end{cases}, \qquad "
    r"f'(a) = \begin{cases} 1 & a > 0 \\ \alpha & a \le 0 \end{cases}",
    code=(A.leaky_relu, A.leaky_relu_derivative),
    wrong=(
        lambda a, slope=0.01: torch.where(a > 0, a, -slope * a),
        A.leaky_relu_derivative,
    ),
    tolerance=TOLERANCE,
    picture=_curves("leaky_relu"),
)
def _leaky_relu(function: Code, derivative: Code) -> float:
    def proof(slope: float) -> float:
        return _elementwise(
            lambda a: function(a, slope),
            lambda a: derivative(a, slope),
            lambda a: a.clamp(min=0) + slope * a.clamp(max=0),
        )

    zero = torch.zeros(1, dtype=torch.float64)
    at_zero = gap(derivative(zero, 0.2), zero + 0.2)
    return worst(proof(0.01), proof(0.2), at_zero, _from_output("leaky_relu"))


@entry(
    "activation/relu6",
    "ReLU6",
    r"f(a) = \min(\max(0, a), 6), \qquad f'(a) = \mathbf{1}[0 < a < 6]",
    code=(A.relu6, A.relu6_derivative),
    wrong=(A.relu, A.relu_derivative),
    tolerance=TOLERANCE,
    picture=_curves("relu6"),
)
def _relu6(function: Code, derivative: Code) -> float:
    kinks = torch.tensor([0.0, 6.0], dtype=torch.float64)
    at_kinks = worst(gap(derivative(kinks), kinks * 0), gap(_slope(function, kinks), kinks * 0))
    printed = _elementwise(function, derivative, lambda a: a.clamp(min=0) - (a - 6).clamp(min=0))
    return worst(printed, at_kinks, _from_output("relu6"))


@entry(
    "activation/softplus",
    "Softplus",
    r"f(a) = \frac{1}{\beta} \log(1 + e^{\beta a}), \qquad f'(a) = \sigma(\beta a)",
    code=(A.softplus, A.softplus_derivative),
    wrong=(lambda a, beta=1.0: torch.log1p(torch.exp(beta * a)), A.softplus_derivative),  # without 1/β
    tolerance=TOLERANCE,
    picture=_curves("softplus"),
)
def _softplus(function: Code, derivative: Code) -> float:
    def proof(beta: float) -> float:
        return _elementwise(
            lambda a: function(a, beta),
            lambda a: derivative(a, beta),
            lambda a: torch.log1p(torch.exp(beta * a)) / beta,
        )

    # softplus(a) − softplus(−a) = a, also where PyTorch's default threshold would round
    a = torch.linspace(18, 45, 50, dtype=torch.float64)
    mirrored = gap(function(a) - function(-a), a)
    return worst(proof(0.5), proof(1.0), proof(5.0), mirrored, _from_output("softplus"))


@entry(
    "activation/log-sigmoid",
    "Log-sigmoid",
    r"f(a) = \log \sigma(a) = -\log(1 + e^{-a}), \qquad f'(a) = \sigma(-a)",
    code=(A.log_sigmoid, A.log_sigmoid_derivative),
    wrong=(lambda a: torch.log(torch.sigmoid(a)), A.log_sigmoid_derivative),  # log 0 at −1e4
    tolerance=TOLERANCE,
    picture=_curves("log_sigmoid"),
)
def _log_sigmoid(function: Code, derivative: Code) -> float:
    printed = _elementwise(function, derivative, lambda a: -torch.log1p(torch.exp(-a)))
    return worst(printed, _from_output("log_sigmoid"))


def _mixing(function: Code, pull_back: Code, printed: Function) -> float:
    """Values, and Jᵀg against the whole Jacobian of the printed formula, along both dimensions."""
    a, gradient = torch.randn(2, 6, 5, dtype=torch.float64) * 2
    errors = [gap(function(a), printed(a)), gap(function(a, 0), printed(a.T).T)]
    for row, g in zip(a, gradient, strict=True):
        jacobian = torch.autograd.functional.jacobian(printed, row)
        errors.append(gap(pull_back(row, g), jacobian.T @ g))
    errors.append(gap(pull_back(a, gradient, 0), pull_back(a.T, gradient.T).T))
    check = torch.autograd.gradcheck(function, (a.clone().requires_grad_(),), raise_exception=False)
    for dtype in (torch.float32, torch.bfloat16):
        extreme = torch.tensor([[-1e4, 0.0, 1e4], [1e4, 1e4, 1e4], [-1e4, -1e4, -1e4]], dtype=dtype)
        product = pull_back(extreme, torch.ones_like(extreme))
        errors.append(require(function(extreme).isfinite().all() and product.isfinite().all()))
        errors.append(require(_slope(function, extreme).isfinite().all()))
    return worst(*errors, require(check))


def _naive_softmax(a: Tensor) -> Tensor:
    return torch.exp(a) / torch.exp(a).sum(-1, keepdim=True)


@entry(
    "activation/softmax",
    "Softmax",
    r"z_i = \frac{e^{a_i}}{\sum_j e^{a_j}}, \qquad "
    r"\frac{\partial z_i}{\partial a_j} = z_i(\delta_{ij} - z_j)",
    code=(A.softmax, A.softmax_pull_back),
    # The derivative of each output by its own input alone.
    wrong=(A.softmax, lambda a, g, dim=-1: a.softmax(dim) * (1 - a.softmax(dim)) * g),
    tolerance=TOLERANCE,
    picture=_mixing_curves("softmax"),
)
def _softmax(function: Code, pull_back: Code) -> float:
    a = torch.randn(20, 7, dtype=torch.float64)
    total, shifted = function(a).sum(-1), function(a + 300)
    one = torch.ones(20, dtype=torch.float64)
    return worst(_mixing(function, pull_back, _naive_softmax), gap(total, one), gap(shifted, function(a)))


@entry(
    "activation/log-softmax",
    "Log-softmax",
    r"z_i = \log \frac{e^{a_i}}{\sum_j e^{a_j}} = a_i - \log \sum_j e^{a_j}, \qquad "
    r"\frac{\partial z_i}{\partial a_j} = \delta_{ij} - \mathrm{softmax}(a)_j",
    code=(A.log_softmax, A.log_softmax_pull_back),
    wrong=(
        lambda a, dim=-1: torch.log(torch.exp(a)) / torch.exp(a).sum(dim, keepdim=True),
        A.log_softmax_pull_back,
    ),
    tolerance=TOLERANCE,
    erratum="Printed as log(e^x) / Σe^x, the logarithm of the numerator alone. The logarithm belongs around "
    "the whole fraction; the printed form is x/Σe^x, whose exponentials do not sum to 1.",
    picture=_mixing_curves("log_softmax"),
)
def _log_softmax(function: Code, pull_back: Code) -> float:
    a = torch.randn(20, 7, dtype=torch.float64)
    one = torch.ones(20, dtype=torch.float64)
    proper = _mixing(function, pull_back, lambda v: torch.log(_naive_softmax(v)))
    return worst(proper, gap(torch.exp(function(a)).sum(-1), one))


@entry(
    "activation/softmin",
    "Softmin",
    r"z_i = \frac{e^{-a_i}}{\sum_j e^{-a_j}} = \mathrm{softmax}(-a)_i",
    code=(A.softmin, A.softmin_pull_back),
    wrong=(A.softmin, A.softmax_pull_back),  # forgets the inner minus
    tolerance=TOLERANCE,
    picture=_mixing_curves("softmin"),
)
def _softmin(function: Code, pull_back: Code) -> float:
    a = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    weights = torch.tensor([math.exp(-v) for v in a.tolist()], dtype=torch.float64)
    printed = _mixing(function, pull_back, lambda v: torch.exp(-v) / torch.exp(-v).sum(-1, keepdim=True))
    return worst(printed, gap(function(a), weights / weights.sum()), require(function(a).argmax() == 1))
