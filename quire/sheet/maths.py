"""Chapter 1: maths. Norms, products, rules, probability, convexity, convolution, dimensions, graphs."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.convexity import Violation, convex_set_violation, convexity_violation, jensen_gap
from quire.functional.losses import gaussian_nll
from quire.functional.maths import (
    chain_rule,
    convolve,
    convolved_difference,
    difference,
    exponential_rule,
    hadamard,
    jacobian_chain_rule,
    log_base,
    logarithm_rule,
    p_norm,
    points_for_resolution,
    power_rule,
    product_rule,
    quotient_rule,
    simulated_distance_spread,
    squared_distance_spread,
)
from quire.functional.probability import (
    DiscreteNetwork,
    GaussianFit,
    bayes,
    distribution_cross_entropy,
    entropy,
    gaussian_mle,
    js_divergence,
    kl_divergence,
)
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _table(*shape: int) -> Tensor:
    """Random distributions along the last dimension."""
    return _random(*shape).softmax(-1)


@entry(
    "maths/norms",
    "L1, L2 and Lp norms",
    r"\|x\|_p = \Big(\sum_i |x_i|^p\Big)^{1/p}, \qquad \|x + y\|_p \le \|x\|_p + \|y\|_p",
    code=p_norm,
    wrong=lambda x, p=2.0, dim=-1: x.pow(p).sum(dim).abs().pow(1 / p),
    tolerance=1e-12,
    erratum="Often printed as (Σ x_i^p)^(1/p) without the absolute value, which for p = 1 makes (1, −1) a "
    "vector of length 0, and the triangle inequality as an equality, which holds for parallel vectors only.",
)
def _norms(norm: Code) -> float:
    errors = [gap(norm(torch.tensor([3.0, -4.0], dtype=torch.float64), 2), 5.0)]
    strict = False
    for p in (1.0, 1.5, 2.0, 3.0, 7.0, math.inf):
        x, y, scale = _random(40, 5), _random(40, 5), _random(40, 1)
        errors.append(gap(norm(x, p), torch.linalg.vector_norm(x, p, dim=-1)))
        errors.append(gap(norm(scale * x, p), scale[:, 0].abs() * norm(x, p)))
        slack = norm(x, p) + norm(y, p) - norm(x + y, p)
        strict |= bool((slack > 0.1).any())
        errors.append(require((slack >= -1e-12).all()))
        errors.append(require((norm(x, p) > 0).all() and norm(torch.zeros(5).double(), p) == 0))
    return worst(*errors, require(strict))  # strict: the triangle inequality is no equality


@entry(
    "maths/hadamard",
    "Element-wise product",
    r"(x \odot y)_i = x_i y_i",
    code=hadamard,
    wrong=lambda x, y: torch.cat([(x * y)[..., :1], (x + y)[..., 1:]], -1),
    tolerance=0.0,
    erratum="The worked example [1, 2] ⊙ [2, 4] is printed with a wrong second entry, such as the 6 that "
    "comes of adding; it is [1·2, 2·4] = [2, 8].",
)
def _hadamard(product: Code) -> float:
    x, y = _random(4, 3), _random(4, 3)
    loop = torch.zeros_like(x)
    for i, j in itertools.product(range(4), range(3)):
        loop[i, j] = x[i, j].item() * y[i, j].item()
    printed = product(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    return worst(gap(product(x, y), loop), gap(printed, torch.tensor([2.0, 8.0])))


def _quotient_with_plus(f: Code, df: Code, g: Code, dg: Code) -> Code:
    return lambda x: (df(x) * g(x) + f(x) * dg(x)) / g(x).square()


@entry(
    "maths/derivative-rules",
    "Rules of differentiation",
    r"(x^n)' = n x^{n-1}, \; (fg)' = f'g + fg', \; (f/g)' = \frac{f'g - fg'}{g^2}, \; "
    r"(f \circ g)' = (f' \circ g)\, g', \; J_{f \circ g} = (J_f \circ g)\, J_g, \; "
    r"(b^x)' = b^x \ln b, \; (\log_b x)' = \frac{1}{x \ln b}",
    code=(
        power_rule,
        product_rule,
        quotient_rule,
        chain_rule,
        jacobian_chain_rule,
        exponential_rule,
        logarithm_rule,
    ),
    wrong=(
        power_rule,
        product_rule,
        _quotient_with_plus,
        chain_rule,
        jacobian_chain_rule,
        exponential_rule,
        logarithm_rule,
    ),
    tolerance=1e-11,
)
def _derivative_rules(
    power: Code, product: Code, quotient: Code, chain: Code, jacobian: Code, exponential: Code, log: Code
) -> float:
    points = torch.rand(50, dtype=torch.float64) * 2 + 0.5

    def slope(function: Code) -> Tensor:
        x = points.clone().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    errors = [gap(power(n)(points), slope(lambda x, n=n: x.pow(n))) for n in (-2.0, 0.0, 0.5, 1.0, 3.0)]
    errors += [gap(exponential(b)(points), slope(lambda x, b=b: b**x)) for b in (0.5, 2.0, math.e)]
    errors += [gap(log(b)(points), slope(lambda x, b=b: torch.log(x) / math.log(b))) for b in (2.0, 10.0)]
    errors.append(gap(log()(points), slope(torch.log)))
    f, df, g, dg = torch.sin, torch.cos, torch.exp, torch.exp
    errors.append(gap(product(f, df, g, dg)(points), slope(lambda x: f(x) * g(x))))
    errors.append(gap(quotient(f, df, g, dg)(points), slope(lambda x: f(x) / g(x))))
    errors.append(gap(chain(df, g, dg)(points), slope(lambda x: f(g(x)))))

    inner, outer, x = _random(4, 3), _random(2, 4), _random(3)
    composed = torch.autograd.functional.jacobian(lambda v: torch.tanh(outer @ torch.sin(inner @ v)), x)
    rule = jacobian(
        lambda h: (1 - torch.tanh(outer @ h).square())[:, None] * outer,
        lambda v: torch.sin(inner @ v),
        lambda v: torch.cos(inner @ v)[:, None] * inner,
    )
    return worst(*errors, gap(rule(x), composed))


def _log_with_base_one(x: Tensor, base: float) -> Tensor:
    return torch.zeros_like(x) if base == 1 else torch.log(x) / math.log(base)


@entry(
    "maths/log-rules",
    "Rules of logarithms",
    r"\log_b xy = \log_b x + \log_b y, \; \log_b \tfrac{x}{y} = \log_b x - \log_b y, \; "
    r"\log_b x^c = c \log_b x, \; \log_b x = \frac{\log_a x}{\log_a b}, \; b^{\log_b x} = x, \; \log_b 1 = 0",
    code=log_base,
    wrong=_log_with_base_one,
    tolerance=1e-12,
    erratum="Printed with base and argument exchanged, as if log_1 x were 0. It is log_b 1 that is 0, for "
    "every base b; a logarithm to base 1 does not exist, because every power of 1 is 1.",
)
def _log_rules(log: Code) -> float:
    x, y = torch.rand(2, 60, dtype=torch.float64) * 9 + 0.1
    errors = [gap(log(torch.tensor(8.0).double(), 2.0), 3.0)]
    with contextlib.suppress(InputError):
        errors.append(gap(1.0 ** log(x, 1.0), x))  # whatever it gives, 1 to that power is not x
    for base in (0.3, 2.0, math.e, 10.0):
        errors.append(gap(log(x * y, base), log(x, base) + log(y, base)))
        errors.append(gap(log(x / y, base), log(x, base) - log(y, base)))
        errors.append(gap(log(x**2.5, base), 2.5 * log(x, base)))
        errors.append(gap(log(x, base), torch.log2(x) / math.log2(base)))
        errors.append(gap(base ** log(x, base), x))
        errors.append(gap(log(torch.ones(1).double(), base), [0.0]))
    return worst(*errors)


@entry(
    "maths/bayes",
    "Bayes' theorem",
    r"P(A \mid B) = \frac{P(B \mid A)\, P(A)}{P(B)}, \qquad P(B) = \sum_A P(B \mid A)\, P(A)",
    code=bayes,
    wrong=lambda prior, likelihood: likelihood / likelihood.sum(0),  # forgets the prior
    tolerance=1e-13,
)
def _bayes(posterior: Code) -> float:
    joint = _table(12).view(3, 4)
    prior = joint.sum(1)
    truth = torch.stack([joint[:, b] / joint[:, b].sum() for b in range(4)], 1)
    # By hand: a disease of 1%, a test right in 99% of both cases, gives 50% when it is positive.
    test = torch.tensor([[0.99, 0.01], [0.01, 0.99]], dtype=torch.float64)
    rare = posterior(torch.tensor([0.99, 0.01], dtype=torch.float64), test)
    return worst(gap(posterior(prior, joint / prior[:, None]), truth), gap(rare[1, 1], 0.5))


def _finds_nothing(function: Code, low: Any, high: Any, **_: Any) -> Violation | None:
    return None


@entry(
    "maths/convexity",
    "Convex sets and functions",
    r"f(\lambda x + (1-\lambda) x') \le \lambda f(x) + (1-\lambda) f(x'), \qquad x, x' \in \mathcal{X} "
    r"\Rightarrow \lambda x + (1-\lambda) x' \in \mathcal{X}, \qquad \lambda \in [0, 1]",
    code=(convexity_violation, convex_set_violation),
    wrong=(_finds_nothing, _finds_nothing),
    tolerance=1e-12,
)
def _convexity(function_check: Code, set_check: Code) -> float:
    low, high = torch.full((3,), -4.0).double(), torch.full((3,), 4.0).double()
    start = torch.tensor(-4.0, dtype=torch.float64)
    found = function_check(torch.sin, start, 4.0)
    if found is None:
        return math.inf
    x, other, weight, amount = found
    excess = torch.sin(weight * x + (1 - weight) * other) - weight * x.sin() - (1 - weight) * other.sin()
    errors = [require(excess > 1e-3 and torch.isclose(excess, amount, rtol=1e-12))]
    errors.append(require(function_check(torch.square, start, 4.0) is None))
    errors.append(require(function_check(lambda v: v.square().sum(-1), low, high) is None))
    errors.append(require(function_check(lambda v: v.logsumexp(-1), low, high) is None))
    errors.append(require(function_check(lambda v: -v.logsumexp(-1), low, high) is not None))

    errors.append(require(set_check(lambda v: v.norm(dim=-1) < 3, low, high) is None))
    ring = set_check(lambda v: v.norm(dim=-1) > 3, low, high)
    if ring is None:
        return math.inf
    x, other, weight, depth = ring
    between = weight * x + (1 - weight) * other
    errors.append(require(x.norm() > 3 and other.norm() > 3 and between.norm() <= 3 and 0 <= weight <= 1))
    errors.append(require((torch.stack([x, other]).abs() <= 4).all()))  # of the box that was searched
    errors.append(gap(depth, min((between - x).norm(), (between - other).norm())))
    return worst(*errors)


@entry(
    "maths/jensen",
    "Jensen's inequality",
    r"f(\mathbb{E}[X]) \le \mathbb{E}[f(X)] \text{ for convex } f, \qquad "
    r"\mathbb{E}_Y[-\log P(X \mid Y)] \ge -\log P(X)",
    code=jensen_gap,
    wrong=lambda f, values, p: f((p * values).sum(-1)) - (p * f(values)).sum(-1),
    tolerance=1e-12,
)
def _jensen(excess: Code) -> float:
    values, probability = _random(200, 6), _table(200, 6)
    errors = [
        require((excess(f, values, probability) >= 0).all()) for f in (torch.square, torch.exp, torch.abs)
    ]
    # For the square the gap is the variance, which has its own formula.
    mean = (probability * values).sum(-1, keepdim=True)
    variance = (probability * (values - mean).square()).sum(-1)
    errors.append(gap(excess(torch.square, values, probability), variance))
    # −log is convex: the surprise of X, averaged over Y, is at least the surprise without Y.
    joint = _table(20).view(4, 5)  # (X, Y)
    likelihood = joint / joint.sum(0)
    surprise = excess(lambda v: -torch.log(v), likelihood, joint.sum(0).expand(4, 5))
    direct = -(joint.sum(0) * torch.log(likelihood)).sum(1) + torch.log(joint.sum(1))
    return worst(*errors, gap(surprise, direct), require((surprise >= 0).all()))


@entry(
    "maths/gaussian-mle",
    "Least squares is Gaussian maximum likelihood",
    r"-\log \prod_n \mathcal{N}(y_n \mid w^\top x_n, \sigma^2) = \frac{N}{2}\log 2\pi\sigma^2 + "
    r"\frac{1}{2\sigma^2} \sum_n (y_n - w^\top x_n)^2, \qquad \hat w = (X^\top X)^{-1} X^\top y",
    code=gaussian_mle,
    wrong=lambda x, y: GaussianFit(x.T @ y / len(x), (y - x @ (x.T @ y / len(x))).square().mean()),
    tolerance=1e-9,
)
def _gaussian_mle(fit: Code) -> float:
    x, y = _random(60, 4) @ _random(4, 4), _random(60)
    weights, variance = fit(x, y)
    oracle, residual, *_ = np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)
    errors = [gap(weights, torch.from_numpy(oracle)), gap(variance, residual[0] / 60)]

    def negative_log_likelihood(w: Tensor, s: Tensor) -> Tensor:
        normal = torch.distributions.Normal(x @ w, s.sqrt())
        return -normal.log_prob(y).sum()

    # The likelihood's own slope vanishes at the fit, in the weights and in the variance.
    w, s = weights.clone().requires_grad_(), variance.clone().requires_grad_()
    slopes = torch.autograd.grad(negative_log_likelihood(w, s), (w, s))
    errors += [float(slope.abs().max()) / 60 for slope in slopes]
    # For a fixed variance it is the squared error over 2σ², plus a constant.
    for other in _random(5, 4):
        direct = gaussian_nll(x @ other, y, variance, full=True, reduction="sum")
        errors.append(gap(negative_log_likelihood(other, variance), direct))
        constant = 30 * torch.log(2 * math.pi * variance)
        errors.append(gap(direct - constant, (y - x @ other).square().sum() / (2 * variance)))
    return worst(*errors)


@entry(
    "maths/divergences",
    "Cross-entropy, Kullback-Leibler and Jensen-Shannon divergence",
    r"H(P, Q) = -\sum P \log Q, \; KL(P\|Q) = \sum P \log\frac{P}{Q} \ge 0, \; "
    r"JS(P, Q) = \tfrac12 KL(P\|M) + \tfrac12 KL(Q\|M) \le \log 2, \; M = \tfrac12 (P + Q)",
    code=(entropy, distribution_cross_entropy, kl_divergence, js_divergence),
    # Averaging both directions is symmetric too, but has no bound.
    wrong=(
        entropy,
        distribution_cross_entropy,
        kl_divergence,
        lambda p, q: (kl_divergence(p, q) + kl_divergence(q, p)) / 2,
    ),
    tolerance=1e-12,
)
def _divergences(own: Code, cross: Code, kl: Code, js: Code) -> float:
    p, q = _table(100, 6), _table(100, 6)
    first, second = torch.distributions.Categorical(p), torch.distributions.Categorical(q)
    oracle = torch.distributions.kl_divergence
    middle = torch.distributions.Categorical((p + q) / 2)
    errors = [
        gap(own(p), first.entropy()),
        gap(kl(p, q), oracle(first, second)),
        gap(cross(p, q), first.entropy() + oracle(first, second)),
        gap(js(p, q), (oracle(first, middle) + oracle(second, middle)) / 2),
        gap(js(p, q), js(q, p)),
        require((kl(p, q) >= 0).all() and gap(kl(p, p), torch.zeros(100)) < 1e-13),
        require(((kl(p, q) - kl(q, p)).abs() > 1e-2).any()),
    ]
    apart = torch.eye(2, dtype=torch.float64)  # no common support: KL is infinite, JS reaches its bound
    bound = torch.full((), math.log(2), dtype=torch.float64)
    errors += [gap(js(apart[0], apart[1]), bound), require(kl(apart[0], apart[1]) == math.inf)]
    return worst(*errors, require((js(p, q) <= math.log(2)).all()))


def _derivative_as_sum(f: Tensor, g: Tensor) -> Tensor:
    return convolve(difference(f), g) + convolve(f, difference(g))


@entry(
    "maths/convolution-algebra",
    "Algebra of convolution",
    r"f * g = g * f, \; (f * g) * h = f * (g * h), \; f * (g + h) = f * g + f * h, \; "
    r"c (f * g) = (c f) * g, \; D(f * g) = (Df) * g = f * (Dg)",
    code=(convolve, difference, convolved_difference),
    wrong=(convolve, difference, _derivative_as_sum),
    tolerance=1e-12,
    erratum="The derivative is printed as (Df) ∗ g + f ∗ (Dg), after the product rule. Convolution is linear "
    "in each argument, so the derivative falls on one of them, and the sum is twice too much.",
)
def _convolution(conv: Code, step: Code, derivative: Code) -> float:
    f, g, h, k = _random(7), _random(4), _random(5), _random(4)
    loop = torch.zeros(10, dtype=torch.float64)
    for i, j in itertools.product(range(7), range(4)):
        loop[i + j] += f[i] * g[j]
    whole = torch.from_numpy(np.diff(loop.numpy(), prepend=0.0, append=0.0))
    return worst(
        gap(step(loop), whole),
        gap(conv(f, g), loop),
        gap(conv(f, g), conv(g, f)),
        gap(conv(conv(f, g), h), conv(f, conv(g, h))),
        gap(conv(f, g + k), conv(f, g) + conv(f, k)),
        gap(conv(3.7 * f, g), 3.7 * conv(f, g)),
        gap(derivative(f, g), whole),
        gap(derivative(g, f), whole),
    )


def _curse_picture() -> Figure:
    from quire.report.style import figure

    generator = torch.Generator().manual_seed(0)
    dimensions = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    fig = figure(8.6, 3.2)
    left, right = fig.subplots(1, 2)
    for spacing in (0.5, 0.2, 0.1):
        needed = [points_for_resolution(d, spacing) for d in dimensions[:7]]
        left.plot(dimensions[:7], needed, marker="o", label=f"spacing {spacing:g}")
    left.set(title="Points for a fixed resolution", xlabel="dimensions D", ylabel="grid points", yscale="log")
    left.legend()
    closed = [squared_distance_spread(d) for d in dimensions]
    measured = [simulated_distance_spread(d, 4000, generator=generator).item() for d in dimensions]
    right.plot(dimensions, closed, label="closed form √(7/5D)")
    right.plot(dimensions, measured, "o", label="4000 random pairs")
    right.set(
        title="Distances concentrate",
        xlabel="dimensions D",
        ylabel="spread / mean of squared distance",
        xscale="log",
        yscale="log",
    )
    right.legend()
    return fig


@entry(
    "maths/curse-of-dimensionality",
    "The curse of dimensionality",
    r"N = \lceil 1/h \rceil^{D}, \qquad \frac{\operatorname{std} \|x-y\|^2}{\mathbb{E}\|x-y\|^2} = "
    r"\sqrt{\frac{7}{5D}}, \quad x, y \sim U[0,1]^D",
    code=(points_for_resolution, squared_distance_spread, simulated_distance_spread),
    wrong=(
        lambda dimensions, spacing: dimensions * math.ceil(1 / spacing),  # grows linearly
        lambda dimensions: math.sqrt(7 / 5),
        simulated_distance_spread,
    ),
    tolerance=4.0,  # in standard errors
    picture=_curse_picture,
)
def _curse(points: Code, closed: Code, simulated: Code) -> float:
    exact = []
    for dimensions, cells in ((1, 10), (2, 5), (4, 3)):
        corners = itertools.product(range(cells), repeat=dimensions)
        exact.append(require(points(dimensions, 1 / cells) == len(list(corners))))
    # Twelve estimates for each dimension give the standard error that their mean is judged by.
    errors = []
    for dimensions in (1, 3, 10, 50):
        estimates = torch.stack([simulated(dimensions, 2000, dtype=torch.float64) for _ in range(12)])
        standard_error = estimates.std() / math.sqrt(12)
        errors.append(float((estimates.mean() - closed(dimensions)).abs() / standard_error))
    return worst(*exact, *errors)


class _Unconditional(DiscreteNetwork):
    """Forgets to divide by the probability of the evidence."""

    def posterior(self, names: Any, evidence: Any) -> Tensor:
        return self._eliminate(tuple(names), evidence)


@entry(
    "maths/graphical-model",
    "Graphical model",
    r"p(x) = \prod_i p(x_i \mid \mathrm{pa}(x_i)), \qquad p(a \mid b) = \frac{p(a, b)}{p(b)}",
    code=DiscreteNetwork,
    wrong=_Unconditional,
    tolerance=1e-13,
)
def _graphical_model(network: Code) -> float:
    tables = {
        "e": (("c", "d"), _table(3, 2, 2)),  # in no particular order
        "a": ((), _table(2)),
        "b": (("a",), _table(2, 3)),
        "c": (("a",), _table(2, 3)),
        "d": (("b", "c"), _table(3, 3, 2)),
    }
    model = network(tables)
    full = torch.zeros(2, 3, 3, 2, 2, dtype=torch.float64)  # a, b, c, d, e
    for a, b, c, d, e in itertools.product(range(2), range(3), range(3), range(2), range(2)):
        up = tables["a"][1][a] * tables["b"][1][a, b] * tables["c"][1][a, c]
        full[a, b, c, d, e] = up * tables["d"][1][b, c, d] * tables["e"][1][c, d, e]
    order = [model.variables.index(name) for name in "abcde"]
    given_e = full[..., 1].sum((1, 3))  # a, c with e = 1
    pair = full.sum((1, 2, 3))  # a, e
    return worst(
        gap(full.sum(), 1.0),
        gap(model.joint().permute(order), full),
        gap(model.marginal("d", "b"), full.sum((0, 2, 4)).T),
        gap(model.posterior(["c", "a"], {"e": 1}), given_e.T / given_e.sum()),
        gap(model.conditional(["a"], ["e"]), (pair / pair.sum(0)).T),
        gap(model.probability({"b": 2, "d": 0}), full[:, 2, :, 0].sum()),
    )
