"""Chapter 4: losses.

Every proof compares values and gradients, for the reductions none, sum and mean, with the printed formula
written out and with torch.nn.functional, on random inputs with uneven weights and ignored targets, and then
with torch.nn.functional on extreme inputs, where they must be finite too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.functional import losses as L
from quire.functional.losses import LOSSES
from quire.sheet.registry import entry, gap, require, worst

Code = Callable[..., Any]
Formula = Callable[..., tuple[Tensor, float | Tensor]]  # values without reduction, and the weight of the mean

TOLERANCE = 1e-11


def _gradients(output: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients under a fixed uneven direction, so that no two errors cancel."""
    direction = torch.linspace(0.5, 1.5, max(output.numel(), 1), dtype=output.dtype).view(output.shape)
    return torch.autograd.grad((output * direction).sum(), inputs)


def _same(first: Code, second: Code, inputs: tuple[Tensor, ...], learned: tuple[int, ...]) -> float:
    """Value and gradient of two functions of the same inputs, with respect to those that are learned."""
    leaves = [value.detach().clone().requires_grad_(i in learned) for i, value in enumerate(inputs)]
    chosen = tuple(leaves[i] for i in learned)
    one, two = first(*leaves), second(*leaves)
    if one.shape != two.shape:
        return math.inf
    ours, theirs = _gradients(one, chosen), _gradients(two, chosen)
    finite = one.isfinite().all() and all(slope.isfinite().all() for slope in ours)
    return worst(gap(one, two), *map(gap, ours, theirs), require(finite))


def _proof(
    name: str,
    function: Code,
    formula: Formula,
    peer: Code,
    *,
    extreme: Callable[..., tuple[Tensor, ...]],
    learned: tuple[int, ...] = (0,),
) -> float:
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    inputs, options = LOSSES[name].example(generator, 30, torch.float64)
    errors = []
    for reduction in ("none", "sum", "mean"):

        def printed(*values: Tensor, reduction: str = reduction) -> Tensor:
            each, weight = formula(*values, **options)
            return each if reduction == "none" else each.sum() / (weight if reduction == "mean" else 1)

        def ours(*values: Tensor, reduction: str = reduction) -> Tensor:
            return function(*values, reduction=reduction, **options)

        def theirs(*values: Tensor, reduction: str = reduction) -> Tensor:
            return peer(*values, reduction=reduction, **options)

        errors.append(_same(ours, printed, inputs, learned))
        errors.append(_same(ours, theirs, inputs, learned))
        errors.append(_same(ours, theirs, extreme(*inputs), learned))
    # The same extremes must stay finite in the dtypes that models are trained in.
    for dtype in (torch.float32, torch.bfloat16):
        values = [v.to(dtype) if v.is_floating_point() else v for v in extreme(*inputs)]
        values = [v.detach().requires_grad_(i in learned) for i, v in enumerate(values)]
        plain = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
        result = function(*values, **plain)
        slopes = torch.autograd.grad(result, [values[i] for i in learned])
        errors.append(require(result.isfinite() and all(slope.isfinite().all() for slope in slopes)))
    return worst(*errors)


def _far(first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The prediction alternately at ±1e4."""
    signs = torch.where(torch.arange(first.numel()) % 2 == 0, 1.0, -1.0).view(first.shape)
    return (1e4 * signs.to(first.dtype), *others)


def _scaled(function: Code, factor: float) -> Code:
    """A loss that is a factor off."""
    return lambda *inputs, **options: factor * function(*inputs, **options)


# Regression -----------------------------------------------------------------------------------


@entry(
    "loss/quadratic-cost",
    "Quadratic cost",
    r"C = \frac{1}{2n} \sum_n \|y_n - \hat y_n\|^2",
    code=L.quadratic_cost,
    wrong=L.half_squared_error,  # also divides by the number of outputs
    tolerance=TOLERANCE,
)
def _quadratic(function: Code) -> float:
    def formula(p: Tensor, t: Tensor) -> tuple[Tensor, float]:
        rows = [torch.dot(t[n] - p[n], t[n] - p[n]) / 2 for n in range(len(p))]
        return torch.stack(rows), float(len(p))

    def peer(p: Tensor, t: Tensor, reduction: str) -> Tensor:
        rows = F.mse_loss(p, t, reduction="none").sum(1) / 2
        return rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.mean()

    return _proof("quadratic_cost", function, formula, peer, extreme=_far)


@entry(
    "loss/mse",
    "Mean squared error",
    r"\mathrm{MSE} = \frac{1}{n} \sum_i (y_i - \hat y_i)^2",
    code=L.mse,
    wrong=_scaled(L.mse, 0.5),
    tolerance=TOLERANCE,
)
def _mse(function: Code) -> float:
    return _proof("mse", function, lambda p, t: ((p - t) * (p - t), 90.0), F.mse_loss, extreme=_far)


@entry(
    "loss/half-squared-error",
    "Half squared error",
    r"\ell = \tfrac12 (\hat y - y)^2, \qquad \frac{\partial \ell}{\partial \hat y} = \hat y - y",
    code=L.half_squared_error,
    wrong=L.mse,
    tolerance=TOLERANCE,
)
def _half(function: Code) -> float:
    def peer(p: Tensor, t: Tensor, reduction: str) -> Tensor:
        return F.mse_loss(p, t, reduction=reduction) / 2

    proof = _proof("half_squared_error", function, lambda p, t: ((p - t) ** 2 / 2, 90.0), peer, extreme=_far)
    p = torch.randn(9, dtype=torch.float64, requires_grad=True)
    t = torch.randn(9, dtype=torch.float64)
    (slope,) = torch.autograd.grad(function(p, t, reduction="sum"), p)
    return worst(proof, gap(slope, p - t))


@entry(
    "loss/l1",
    "Absolute error",
    r"\ell = |\hat y - y|",
    code=L.l1,
    wrong=L.smooth_l1,
    tolerance=TOLERANCE,
)
def _l1(function: Code) -> float:
    def formula(p: Tensor, t: Tensor) -> tuple[Tensor, float]:
        return torch.where(p > t, p - t, t - p), 90.0

    return _proof("l1", function, formula, F.l1_loss, extreme=_far)


@entry(
    "loss/smooth-l1",
    "Smooth L1",
    r"\ell = \begin{cases} (\hat y - y)^2 / (2\beta) & |\hat y - y| < \beta \\ "
    r"|\hat y - y| - \beta/2 & \text{otherwise} \end{cases}",
    code=L.smooth_l1,
    # Huber's loss: β times as large.
    wrong=lambda p, t, beta=1.0, reduction="mean": F.huber_loss(p, t, reduction=reduction, delta=beta),
    tolerance=TOLERANCE,
)
def _smooth_l1(function: Code) -> float:
    def formula(p: Tensor, t: Tensor, beta: float) -> tuple[Tensor, float]:
        d = (p - t).abs()
        return torch.where(d < beta, d * d / (2 * beta), d - beta / 2), 90.0

    return _proof("smooth_l1", function, formula, F.smooth_l1_loss, extreme=_far)


@entry(
    "loss/gaussian-nll",
    "Gaussian negative log-likelihood",
    r"\ell = \tfrac12 \Big( \log 2\pi\sigma^2 + \frac{(y - \mu)^2}{\sigma^2} \Big)",
    code=L.gaussian_nll,
    # Takes the standard deviation for the variance.
    wrong=lambda m, t, v, **options: L.gaussian_nll(m, t, v.square(), **options),
    tolerance=TOLERANCE,
)
def _gaussian(function: Code) -> float:
    def formula(mean: Tensor, target: Tensor, variance: Tensor, full: bool) -> tuple[Tensor, float]:
        return -torch.distributions.Normal(mean, variance.sqrt()).log_prob(target), 90.0

    def too_sure(mean: Tensor, target: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        return 1e4 * mean, target, torch.full_like(variance, 1e-12)  # kept at eps, and still pushed up

    peer = F.gaussian_nll_loss
    return _proof("gaussian_nll", function, formula, peer, extreme=too_sure, learned=(0, 2))


# Classification -------------------------------------------------------------------------------


def _certain(p: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return ((p > 0.5).to(p.dtype), *others)  # probabilities of exactly 0 and 1, right and wrong ones


@entry(
    "loss/binary-cross-entropy",
    "Binary cross-entropy",
    r"\ell = -y \log p - (1 - y) \log(1 - p)",
    code=L.binary_cross_entropy,
    wrong=lambda p, t, w=None, reduction="mean": F.binary_cross_entropy(1 - p, t, w, reduction=reduction),
    tolerance=TOLERANCE,
)
def _binary(function: Code) -> float:
    def formula(p: Tensor, t: Tensor, w: Tensor) -> tuple[Tensor, float]:
        return w * (-t * torch.log(p) - (1 - t) * torch.log(1 - p)), 90.0

    return _proof("binary_cross_entropy", function, formula, F.binary_cross_entropy, extreme=_certain)


def _through_probabilities(a: Tensor, t: Tensor, w: Any = 1, pos_weight: Any = 1, **options: Any) -> Tensor:
    """Without the logits' own formula: σ rounds to 0 and 1."""
    return F.binary_cross_entropy(torch.sigmoid(a), t, w * (1 + (pos_weight - 1) * t), **options)


@entry(
    "loss/binary-cross-entropy-with-logits",
    "Binary cross-entropy on logits",
    r"\ell = -y \log \sigma(a) - (1 - y) \log(1 - \sigma(a)) = \max(a, 0) - a y + \log(1 + e^{-|a|})",
    code=L.binary_cross_entropy_with_logits,
    wrong=_through_probabilities,
    tolerance=TOLERANCE,
)
def _binary_logits(function: Code) -> float:
    def formula(a: Tensor, t: Tensor, w: Tensor, pos_weight: Tensor) -> tuple[Tensor, float]:
        s = 1 / (1 + torch.exp(-a))
        return w * (-pos_weight * t * torch.log(s) - (1 - t) * torch.log(1 - s)), 90.0

    peer = F.binary_cross_entropy_with_logits
    proof = _proof("binary_cross_entropy_with_logits", function, formula, peer, extreme=_far)
    a, t = torch.randn(40, dtype=torch.float64), torch.rand(40, dtype=torch.float64)
    stable = a.clamp(min=0) - a * t + torch.log1p(torch.exp(-a.abs()))
    return worst(proof, gap(function(a, t, reduction="none"), stable))


@entry(
    "loss/multi-label",
    "Multi-label cross-entropy",
    r"\ell = -\frac{1}{C} \sum_c w_c \big( y_c \log \sigma(a_c) + (1 - y_c) \log(1 - \sigma(a_c)) \big)",
    code=L.multi_label,
    wrong=_scaled(L.multi_label, 3.0),  # the sum over labels instead of their mean
    tolerance=TOLERANCE,
)
def _multi_label(function: Code) -> float:
    def formula(a: Tensor, t: Tensor, weight: Tensor) -> tuple[Tensor, float]:
        s = 1 / (1 + torch.exp(-a))
        return -(weight * (t * torch.log(s) + (1 - t) * torch.log(1 - s))).sum(1) / 3, 30.0

    return _proof("multi_label", function, formula, F.multilabel_soft_margin_loss, extreme=_far)


def _smoothed(
    a: Tensor, target: Tensor, weight: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Sample by sample, class by class."""
    rows, total = [], weight.new_zeros(())
    for scores, y in zip(a, target.tolist(), strict=True):
        if y == ignore_index:
            rows.append(0 * scores.sum())
            continue
        surprise = torch.log(torch.exp(scores).sum()) - scores
        share = label_smoothing / len(scores)
        spread = sum(weight[c] * surprise[c] for c in range(len(scores)))
        rows.append((1 - label_smoothing) * weight[y] * surprise[y] + share * spread)
        total = total + weight[y]
    return torch.stack(rows), total


def _mean_over_samples(a: Tensor, t: Tensor, reduction: str = "mean", **options: Any) -> Tensor:
    """Divides by the number of samples, not by the weights of those that count."""
    total = F.cross_entropy(a, t, reduction="sum" if reduction == "mean" else reduction, **options)
    return total / len(t) if reduction == "mean" else total


@entry(
    "loss/cross-entropy",
    "Categorical cross-entropy",
    r"\ell_n = -(1-\varepsilon)\, w_{y_n} \log p_{n y_n} - \frac{\varepsilon}{C} \sum_c w_c \log p_{nc}, "
    r"\quad p = \mathrm{softmax}(a), \quad \text{mean} = \frac{\sum_n \ell_n}{\sum_n w_{y_n}}",
    code=L.cross_entropy,
    wrong=_mean_over_samples,
    tolerance=TOLERANCE,
)
def _cross_entropy(function: Code) -> float:
    errors = [_proof("cross_entropy", function, _smoothed, F.cross_entropy, extreme=_far)]
    a = torch.randn(6, 5, 4, dtype=torch.float64)  # further dimensions, as in a sequence
    tokens = torch.randint(0, 5, (6, 4))
    soft = torch.randn(6, 5, dtype=torch.float64).softmax(1)
    weight = torch.rand(5, dtype=torch.float64)
    for reduction in ("none", "sum", "mean"):
        options: dict[str, Any] = {"reduction": reduction, "ignore_index": 2}

        def ours(v: Tensor, t: Tensor, options: dict[str, Any] = options) -> Tensor:
            return function(v, t, **options)

        def theirs(v: Tensor, t: Tensor, options: dict[str, Any] = options) -> Tensor:
            return F.cross_entropy(v, t, **options)

        errors.append(_same(ours, theirs, (a, tokens), (0,)))
        options = {"reduction": reduction, "weight": weight, "label_smoothing": 0.2}
        mine, peer = function(a[..., 0], soft, **options), F.cross_entropy(a[..., 0], soft, **options)
        errors.append(gap(mine, peer))  # class probabilities as target
    v = a.clone().requires_grad_()
    nothing = function(v, torch.full((6, 4), -100))  # all ignored: 0, with a gradient of 0
    (slope,) = torch.autograd.grad(nothing, v)
    return worst(*errors, gap(nothing, torch.zeros(())), gap(slope, torch.zeros_like(slope)))


def _unlikely(log_probability: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Log-probabilities of 0 and −1e4."""
    third = torch.arange(log_probability.numel()).view_as(log_probability) % 3 == 0
    return (torch.zeros_like(log_probability).masked_fill(third, -1e4), *others)


@entry(
    "loss/nll",
    "Negative log-likelihood",
    r"\ell_n = -w_{y_n} \log p_{n y_n}, \qquad \text{mean} = \frac{\sum_n \ell_n}{\sum_n w_{y_n}}",
    code=L.nll,
    wrong=lambda a, t, **options: L.nll(a.exp(), t, **options),  # given probabilities
    tolerance=TOLERANCE,
)
def _nll(function: Code) -> float:
    def formula(a: Tensor, t: Tensor, weight: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        kept = t != ignore_index
        label = torch.where(kept, t, 0)
        w = weight[label] * kept
        return -w * a[torch.arange(len(a)), label], w.sum()

    return _proof("nll", function, formula, F.nll_loss, extreme=_unlikely)


@entry(
    "loss/kl",
    "Kullback-Leibler divergence as a loss",
    r"\ell = q\,(\log q - \log p), \qquad \sum_c \ell_c = KL(q \| p)",
    code=L.kl_div,
    # The other direction.
    wrong=lambda p, q, **options: L.kl_div(q.log(), p.exp(), **options),
    tolerance=TOLERANCE,
)
def _kl(function: Code) -> float:
    def peer(p: Tensor, q: Tensor, reduction: str) -> Tensor:
        if reduction == "mean":  # PyTorch announces another meaning of its own mean, and warns
            return F.kl_div(p, q, reduction="none").mean()
        return F.kl_div(p, q, reduction=reduction)

    proof = _proof("kl_div", function, lambda p, q: (q * (q.log() - p), 120.0), peer, extreme=_unlikely)
    a, b = torch.randn(2, 20, 6, dtype=torch.float64)
    pairs = torch.distributions.Categorical(logits=b), torch.distributions.Categorical(logits=a)
    divergence = function(a.log_softmax(1), b.softmax(1), reduction="none").sum(1)
    return worst(proof, gap(divergence, torch.distributions.kl_divergence(*pairs)))


# Pairs ----------------------------------------------------------------------------------------


@entry(
    "loss/margin-ranking",
    "Margin ranking",
    r"\ell = \max(0, -y (x_1 - x_2) + m)",
    code=L.margin_ranking,
    wrong=lambda x, z, y, **options: L.margin_ranking(x, z, -y, **options),
    tolerance=TOLERANCE,
)
def _margin_ranking(function: Code) -> float:
    def formula(x: Tensor, z: Tensor, y: Tensor, margin: float) -> tuple[Tensor, float]:
        return torch.relu(margin - y * (x - z)), 30.0

    return _proof("margin_ranking", function, formula, F.margin_ranking_loss, extreme=_far, learned=(0, 1))


@entry(
    "loss/triplet-margin",
    "Triplet margin",
    r"\ell = \max(0, \|a - p\| - \|a - n\| + m)",
    code=L.triplet_margin,
    wrong=lambda a, p, n, **options: L.triplet_margin(a, n, p, **options),
    tolerance=TOLERANCE,
)
def _triplet(function: Code) -> float:
    def formula(a: Tensor, p: Tensor, n: Tensor, margin: float) -> tuple[Tensor, float]:
        # 1e-6 on each difference keeps the root's slope finite at a distance of 0.
        near, far = ((a - other + 1e-6).square().sum(1).sqrt() for other in (p, n))
        return torch.relu(near - far + margin), 30.0

    return _proof("triplet_margin", function, formula, F.triplet_margin_loss, extreme=_far, learned=(0, 1, 2))


@entry(
    "loss/cosine-embedding",
    "Cosine embedding",
    r"\ell = \begin{cases} 1 - \cos(x_1, x_2) & y = 1 \\ \max(0, \cos(x_1, x_2) - m) & y = -1 \end{cases}",
    code=L.cosine_embedding,
    wrong=lambda x, z, y, **options: L.cosine_embedding(x, z, -y, **options),
    tolerance=TOLERANCE,
)
def _cosine(function: Code) -> float:
    def formula(x: Tensor, z: Tensor, y: Tensor, margin: float) -> tuple[Tensor, float]:
        cosine = (x * z).sum(1) / ((x * x).sum(1) * (z * z).sum(1)).sqrt()
        return torch.where(y > 0, 1 - cosine, torch.relu(cosine - margin)), 30.0

    peer = F.cosine_embedding_loss
    return _proof("cosine_embedding", function, formula, peer, extreme=_far, learned=(0, 1))


@entry(
    "loss/info-nce",
    "Contrastive pairs (InfoNCE)",
    r"\ell_i = -\log \frac{\exp(\cos(q_i, k_i)/\tau)}{\sum_j \exp(\cos(q_i, k_j)/\tau)}",
    code=L.info_nce,
    wrong=lambda q, k, **options: L.info_nce(k, q, **options),  # looks for the query of each key
    tolerance=TOLERANCE,
)
def _info_nce(function: Code) -> float:
    def formula(q: Tensor, k: Tensor, temperature: float) -> tuple[Tensor, float]:
        lengths = (q * q).sum(1).sqrt()[:, None] * (k * k).sum(1).sqrt()[None]
        powers = torch.exp((q[:, None] * k[None]).sum(-1) / lengths / temperature)
        return -torch.log(powers.diagonal() / powers.sum(1)), float(len(q))

    def peer(q: Tensor, k: Tensor, temperature: float, reduction: str) -> Tensor:
        scores = F.cosine_similarity(q[:, None], k[None], dim=-1) / temperature
        return F.cross_entropy(scores, torch.arange(len(q)), reduction=reduction)

    return _proof("info_nce", function, formula, peer, extreme=_far, learned=(0, 1))


# What follows from them -----------------------------------------------------------------------


@entry(
    "loss/softmax-gradient",
    "Gradient of the softmax cross-entropy",
    r"\frac{\partial}{\partial o} \Big( -\sum_c y_c \log \mathrm{softmax}(o)_c \Big) = "
    r"\mathrm{softmax}(o) - y",
    code=L.softmax_gradient,
    wrong=lambda o, y: -L.softmax_gradient(o, y),
    tolerance=1e-13,
)
def _softmax_gradient(gradient: Code) -> float:
    o = (torch.randn(20, 6, dtype=torch.float64) * 5).requires_grad_()
    y, soft = torch.randint(0, 6, (20,)), torch.randn(20, 6, dtype=torch.float64).softmax(1)
    (hard_slope,) = torch.autograd.grad(F.cross_entropy(o, y, reduction="sum"), o)
    (soft_slope,) = torch.autograd.grad(F.cross_entropy(o, soft, reduction="sum"), o)
    return worst(gap(gradient(o, y), hard_slope), gap(gradient(o, soft), soft_slope))


@entry(
    "loss/logistic-gradient",
    "Gradient of logistic regression",
    r"\frac{\partial \ell}{\partial w} = x\,(\sigma(a) - y), \qquad a = w^\top x",
    code=L.logistic_gradient,
    wrong=lambda x, a, y: x * (torch.sigmoid(a) * torch.sigmoid(-a) * (torch.sigmoid(a) - y))[:, None],
    tolerance=1e-13,
)
def _logistic_gradient(gradient: Code) -> float:
    x, w = torch.randn(20, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    y = (torch.rand(20) > 0.5).double()

    def loss_of(weights: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x @ weights, y, reduction="none")

    slopes = torch.autograd.functional.jacobian(loss_of, w)  # a row for each sample
    return gap(gradient(x, x @ w, y), slopes)


@entry(
    "loss/perplexity",
    "Perplexity",
    r"\mathrm{PPL} = \exp\Big( -\frac{1}{N} \sum_n \log p(x_n \mid x_{<n}) \Big)",
    code=L.perplexity,
    wrong=lambda a, t, ignore_index=-100: (
        F.cross_entropy(a, t, ignore_index=ignore_index, reduction="none").exp().mean()
    ),  # the mean of the exponentials
    tolerance=1e-12,
)
def _perplexity(perplexity: Code) -> float:
    a, t = torch.randn(30, 7, dtype=torch.float64), torch.randint(0, 7, (30,))
    t[::4] = -100
    product, count = 1.0, 0
    for row, y in zip(a.softmax(1).tolist(), t.tolist(), strict=True):
        if y != -100:
            product, count = product * row[y], count + 1
    geometric = torch.full((), product ** (-1 / count), dtype=torch.float64)
    uniform = perplexity(torch.zeros(5, 7, dtype=torch.float64), torch.arange(5))  # seven equal choices
    return worst(gap(perplexity(a, t), geometric), gap(uniform, 7.0))
