"""Chapter 2: dense layers and nets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributions, nn

from quire.functional.feedforward import (
    dense,
    from_one_hot,
    mlp,
    monotone_violation,
    one_hot,
    parameter_count,
    permute_inputs,
    relu_basis_fit,
    scalar_parameter_count,
    temperature_softmax,
)
from quire.functional.regions import LineRegions, PlaneRegion, line_regions, plane_regions, sawtooth
from quire.models.mlp import MLP, MLPConfig, Norm, linear
from quire.nn.dense import Dense
from quire.nn.heads import Bernoulli, Categorical, Gaussian, Heteroscedastic
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]
Layers = tuple[list[Tensor], list[Tensor]]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _layers(*sizes: int) -> Layers:
    pairs = list(itertools.pairwise(sizes))
    return [_random(after, before) for before, after in pairs], [_random(after) for _, after in pairs]


# Layers and nets ------------------------------------------------------------------------------


class _Transposed(Dense):
    def forward(self, z: Tensor) -> Tensor:
        return self.activation(z @ self.weight + self.bias)


@entry(
    "dense/layer",
    "Dense layer",
    r"a = W z + b, \qquad z' = \sigma(a), \qquad \text{rows: } Z' = \sigma(Z W^\top + \mathbf{1} b^\top)",
    code=(dense, Dense),
    wrong=(lambda z, weight, bias, activation: activation(z @ weight.t()) + bias, _Transposed),
    tolerance=1e-12,
)
def _layer(function: Code, layer: Code) -> float:
    z, (weight,), (bias,) = _random(7, 4), *_layers(4, 4)
    errors = []
    for name, scalar in (("tanh", math.tanh), ("relu", lambda a: max(a, 0.0)), ("arctan", math.atan)):
        loop = torch.tensor(
            [
                [
                    scalar(sum(weight[i, j].item() * row[j].item() for j in range(4)) + bias[i].item())
                    for i in range(4)
                ]
                for row in z
            ],
            dtype=torch.float64,
        )
        shape = {"tanh": torch.tanh, "relu": torch.relu, "arctan": torch.atan}[name]
        module = layer(4, 4, name).double()
        module.load_state_dict({"weight": weight, "bias": bias})
        errors += [gap(function(z, weight, bias, shape), loop), gap(module(z), loop)]
    return worst(*errors)


def _mlp_with_activated_output(config: MLPConfig) -> MLP:
    model = MLP(config)
    model.register_forward_hook(lambda module, inputs, output: torch.tanh(output))
    return model


@entry(
    "dense/mlp",
    "Multi-layer perceptron",
    r"z^0 = x, \quad a^l = W^l z^{l-1} + b^l, \quad z^l = \sigma(\mathrm{norm}(a^l)), "
    r"\quad y = W^L z^{L-1} + b^L",
    code=MLP,
    wrong=_mlp_with_activated_output,
    tolerance=1e-10,
)
def _mlp(build: Code) -> float:
    errors = []
    norms: list[Norm] = ["none", "batch", "layer"]
    shapes: list[tuple[int, ...]] = [(), (5,), (5, 3, 4)]
    for hidden, norm in itertools.product(shapes, norms):
        config = MLPConfig(6, 2, hidden, activation="tanh", dropout=0.5, norm=norm)
        model = build(config).double().eval()
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.1)
        state = iter(model.state_dict().values())
        x = _random(8, 2, 3)
        z = x.reshape(8, 6)
        for _ in hidden:
            weight, bias = next(state), next(state)
            z = z @ weight.t() + bias
            if norm != "none":
                scale, shift = next(state), next(state)
                if norm == "batch":
                    mean, variance, _ = next(state), next(state), next(state)
                else:
                    mean, variance = z.mean(1, keepdim=True), z.var(1, correction=0, keepdim=True)
                z = (z - mean) / (variance + 1e-5).sqrt() * scale + shift
            z = z.tanh()
        weight, bias = next(state), next(state)
        errors.append(gap(model(x), z @ weight.t() + bias))
    return worst(*errors)


def _count(inputs: int, width: int, outputs: int, layers: int) -> int:
    model = MLP(MLPConfig(inputs, outputs, (width,) * layers))
    return sum(parameter.numel() for parameter in model.parameters())


@entry(
    "dense/parameter-count",
    "Parameters of a dense net",
    r"D_0 D + D + (K-1)(D^2 + D) + D\,D_L + D_L, \qquad D_0 = D_L = 1:\; 3D + 1 + (K-1) D (D+1)",
    code=(parameter_count, scalar_parameter_count),
    wrong=(
        lambda inputs, width, outputs, layers: (
            inputs * width + width + layers * (width**2 + width) + width * outputs + outputs
        ),
        lambda width, layers: 3 * width + 1 + layers * width * (width + 1),
    ),
    tolerance=0.0,
    erratum="Often printed with K in the place of K − 1. K hidden layers have K − 1 matrices between them, "
    "so that form counts one D × D matrix and its D biases too many, even where K = 1 and there is none.",
)
def _parameter_count(general: Code, scalar: Code) -> float:
    shapes = itertools.product((1, 3), (1, 4), (1, 2), (1, 2, 5))
    errors = [gap(general(*shape), _count(*shape)) for shape in shapes]
    errors += [
        gap(scalar(width, layers), _count(1, width, 1, layers)) for width in (1, 6) for layers in (1, 2, 4)
    ]
    return worst(*errors)


# Linear regions -------------------------------------------------------------------------------


def _sampled_line(weights: Any, biases: Any, start: Tensor, end: Tensor) -> LineRegions:
    """What a counter by sampling sees: too few points, and a kink inside a step looks like two."""
    t = torch.linspace(0, 1, 60, dtype=torch.float64)
    out = mlp(start + t[:, None] * (end - start), weights, biases, torch.relu)
    slopes = out.diff(dim=0) / t.diff()[:, None]
    first = torch.cat([torch.ones(1, dtype=torch.bool), (slopes.diff(dim=0).abs() > 1e-9).any(dim=1)])
    return LineRegions(torch.cat([t[:-1][first], t[-1:]]), slopes[first])


def _first_layer_only(weights: Any, biases: Any, **where: Any) -> list[PlaneRegion]:
    whole = [torch.eye(1, len(weights[0]), dtype=torch.float64)], [torch.zeros(1, dtype=torch.float64)]
    return plane_regions([weights[0], *whole[0]], [biases[0], *whole[1]], **where)


def _regions_picture() -> Figure:
    from matplotlib.collections import PolyCollection

    from quire.report.style import BLUE, INK, figure

    fig = figure(9.0, 4.0)
    plane, saw = fig.subplots(1, 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        weights, biases = _layers(2, 12, 12, 1)
    regions = plane_regions(weights, biases, u=(-2, 2), v=(-2, 2))
    heights = torch.stack([region.gradient @ region.polygon.mean(0) + region.offset for region in regions])
    patches = PolyCollection([region.polygon.numpy() for region in regions], edgecolors=INK, linewidths=0.4)
    patches.set_array(heights[:, 0].numpy())
    plane.add_collection(patches)
    fig.colorbar(patches, ax=plane, label="output at the region's centre")
    plane.set(xlim=(-2, 2), ylim=(-2, 2), aspect="equal", xlabel="input 1", ylabel="input 2")
    plane.set_title(f"2-12-12-1 ReLU net: {len(regions)} regions")
    weights, biases = sawtooth(3, 3)
    ends = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    found = line_regions(weights, biases, *ends)
    height = mlp(found.breakpoints[:, None], weights, biases, torch.relu)[:, 0]
    saw.plot(found.breakpoints, height, color=BLUE, linewidth=0.9)
    saw.set(xlabel="input", ylabel="output", title=f"Three layers of three units: {len(found)} = 4³ regions")
    return fig


@entry(
    "dense/linear-regions",
    "Linear regions of a ReLU net",
    r"\text{one input, } D \text{ units: at most } D + 1; \qquad K \text{ such layers: at most } (D + 1)^K",
    code=(line_regions, plane_regions, sawtooth),
    wrong=(_sampled_line, _first_layer_only, lambda width, depth: _layers(1, *(width,) * depth, 1)),
    tolerance=1e-9,
    picture=_regions_picture,
)
def _linear_regions(along_line: Code, over_plane: Code, build: Code) -> float:
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    errors = []
    for width, depth in [(1, 1), (2, 1), (7, 1), (3, 2), (3, 4), (4, 3), (6, 2)]:
        errors.append(require(len(along_line(*build(width, depth), zero, one)) == (width + 1) ** depth))
    for width in (3, 5):
        weights, biases = _layers(1, width, width, 1)
        found = along_line(weights, biases, -9 * one, 9 * one)
        errors.append(require(len(found) <= (width + 1) ** 2))
        # The pieces, joined, are the net itself.
        start = mlp(-9 * one[None], weights, biases, torch.relu)
        rebuilt = start + (found.slopes * found.breakpoints.diff()[:, None]).cumsum(0)
        wanted = mlp((found.breakpoints[1:, None] * 18 - 9), weights, biases, torch.relu)
        errors.append(gap(rebuilt, wanted))
    # D lines in general position cut the plane into 1 + D + D(D − 1)/2 parts, if all crossings are inside.
    weights, biases = _layers(2, 5, 1)
    errors.append(require(len(over_plane(weights, biases, u=(-99, 99), v=(-99, 99))) == 1 + 5 + 10))
    weights, biases = _layers(2, 6, 4, 2)
    regions = over_plane(weights, biases, u=(-2, 3), v=(-1, 1))
    errors.append(gap(sum(region.area for region in regions), 10.0))
    for region in regions:
        centre = region.polygon.mean(0)
        errors.append(gap(region.gradient @ centre + region.offset, mlp(centre, weights, biases, torch.relu)))
    return worst(*errors)


# Approximation --------------------------------------------------------------------------------


def _wave(x: Tensor) -> Tensor:
    return torch.sin(2 * math.pi * x) + 0.5 * torch.cos(5 * math.pi * x)


_WAVE_BEND = (2 * math.pi) ** 2 + 0.5 * (5 * math.pi) ** 2  # at least max |f″|


def _fit_error(fit: Code, width: int) -> float:
    x = torch.linspace(0, 1, 513, dtype=torch.float64)
    return (fit(x, _wave(x), width)(x) - _wave(x)).square().mean().sqrt().item()


def _approximation_picture() -> Figure:
    from quire.report.style import figure

    fig = figure(9.0, 3.6)
    curves, errors = fig.subplots(1, 2)
    x = torch.linspace(0, 1, 513, dtype=torch.float64)
    curves.plot(x, _wave(x), color="black", linewidth=1.0, label="function")
    for width in (4, 8, 16):
        curves.plot(x, relu_basis_fit(x, _wave(x), width)(x), linewidth=1.1, label=f"{width} units")
    curves.set(xlabel="x", ylabel="f(x)", title="A net of one hidden layer")
    curves.legend()
    widths = [2, 4, 8, 16, 32, 64, 128]
    errors.loglog(widths, [_fit_error(relu_basis_fit, width) for width in widths], "o-", label="measured")
    errors.loglog(widths, [_WAVE_BEND / 8 / width**2 for width in widths], "--", label="bound max|f″|/(8D²)")
    errors.set(xlabel="width D", ylabel="root mean squared error", title="Width against error")
    errors.legend()
    return fig


@entry(
    "dense/universal-approximation",
    "A wide enough net approximates any continuous function",
    r"f(x) \approx w_0 + \sum_{j=1}^{D} w_j \max(0, x - k_j), \qquad "
    r"\mathrm{RMSE} \le \frac{\max |f''|}{8 D^2} \text{ on } [0, 1]",
    code=relu_basis_fit,
    wrong=lambda x, target, width: relu_basis_fit(x, target, 1),
    tolerance=1.0,
    picture=_approximation_picture,
)
def _approximation(fit: Code) -> float:
    """Error as a share of the bound that straight lines between D + 1 points of a smooth function keep;
    least squares can only be closer. The bound holds for each width, so the error falls below any number."""
    ratios = [_fit_error(fit, width) * 8 * width**2 / _WAVE_BEND for width in (2, 4, 16, 64)]
    return worst(*ratios, require(_fit_error(fit, 64) < 2e-3))


# Output distributions -------------------------------------------------------------------------


def _deviation_for_variance(dim: int) -> Heteroscedastic:
    """log σ in the place of log σ²."""
    head = Heteroscedastic(dim)
    honest = head.distribution
    head.distribution = lambda raw: (honest(raw)[0], honest(raw)[1].square())  # type: ignore[method-assign]
    return head


def _unit_noise(dim: int, **options: Any) -> Gaussian:
    """Forgets the noise that was estimated."""
    head = Gaussian(dim, **options)
    head.set_noise = lambda residual_variance: None  # type: ignore[method-assign]
    return head


def _negated(kind: Code) -> Code:
    def build(dim: int) -> Any:
        head = kind(dim)
        honest = head._predict
        head._predict = lambda raw, *rest: honest(-raw, *rest)
        return head

    return build


@entry(
    "dense/output-distributions",
    "Output distributions",
    r"p(y|x) = \mathcal{N}(\mu, \sigma^2),\; \mathcal{N}(\mu(x), \sigma^2(x)),\; "
    r"\sigma(a)^y (1 - \sigma(a))^{1-y},\; \mathrm{softmax}(a)_y; \qquad L = -\log p(y|x)",
    code=(Categorical, Bernoulli, Gaussian, Heteroscedastic),
    wrong=(_negated(Categorical), _negated(Bernoulli), _unit_noise, _deviation_for_variance),
    tolerance=4.0,
)
def _output_distributions(categorical: Code, bernoulli: Code, gaussian: Code, heteroscedastic: Code) -> float:
    """In standard errors of what is counted, out of n draws; identities must hold to rounding."""
    n = 20_000

    def exact(error: float) -> float:
        return require(error < 1e-9)

    def deviations(hits: Tensor, probability: float) -> float:
        return abs(hits.double().mean().item() - probability) / math.sqrt(probability * (1 - probability) / n)

    errors = []
    logits = _random(1, 4)
    head, draws = categorical(4), torch.multinomial(logits.softmax(-1)[0], n, replacement=True)
    truth = distributions.Categorical(logits=logits)
    errors.append(exact(gap(head.loss_each(logits.expand(n, 4), draws), -truth.log_prob(draws))))
    sampled = head.predict(logits.expand(n, 4), "sample")["class"]
    errors += [deviations(sampled == c, truth.probs[0, c].item()) for c in range(4)]
    chosen = head.predict(logits, "interval", level=0.7)["set"][0]
    errors.append(require(truth.probs[0, chosen].sum() >= 0.7))
    errors.append(require(head.predict(logits)["class"].item() == logits.argmax().item()))

    logit = _random(1, 1)
    head, yes = bernoulli(1), torch.rand(n, 1, dtype=torch.float64) < torch.sigmoid(logit)
    loss = head.loss_each(logit.expand(n, 1), yes.double())
    errors.append(exact(gap(loss, -distributions.Bernoulli(logits=logit).log_prob(yes.double())[:, 0])))
    errors.append(
        deviations(head.predict(logit.expand(n, 1), "sample")["class"], torch.sigmoid(logit).item())
    )

    mean = _random(n, 1)
    variance = torch.exp(_random(n, 1))
    for name in ("same noise", "noise by input"):
        if name == "same noise":
            head, raw, spread = gaussian(1, loss="nll").double(), mean, torch.full_like(mean, 0.3)
            head.set_noise(0.3)
        else:
            head, raw, spread = heteroscedastic(1).double(), torch.cat([mean, variance.log()], 1), variance
        head.shift.fill_(100.0)  # targets in units of their own
        head.scale.fill_(20.0)
        target = 100 + 20 * (mean + spread.sqrt() * _random(n, 1))
        wanted = -distributions.Normal(mean, spread.sqrt()).log_prob((target - 100) / 20)[:, 0]
        errors.append(exact(gap(head.loss_each(raw, target), wanted)))
        for level in (0.5, 0.9):
            answer = head.predict(raw, "interval", level=level)
            inside = (answer["low"] <= target[:, 0]) & (target[:, 0] <= answer["high"])
            errors.append(deviations(inside, level))
        errors.append(exact(gap(head.predict(raw, "mean")["value"], 100 + 20 * mean[:, 0])))
        sample = (head.predict(raw, "sample")["value"] - 100) / 20
        errors.append(deviations((sample - mean[:, 0]).abs() < spread[:, 0].sqrt(), math.erf(math.sqrt(0.5))))
    return worst(*errors)


@entry(
    "dense/temperature",
    "Temperature",
    r"p_i = \frac{e^{a_i / T}}{\sum_j e^{a_j / T}}; \qquad T \to 0:\ \arg\max, \quad T \to \infty:\ 1/C",
    code=temperature_softmax,
    wrong=lambda logits, temperature, dim=-1: torch.softmax(logits * temperature, dim),
    tolerance=1e-12,
)
def _temperature(soft: Code) -> float:
    logits = _random(6, 5)
    largest = nn.functional.one_hot(logits.argmax(-1), 5).double()
    errors = [gap(soft(logits, 1.0), torch.softmax(logits, -1))]
    for temperature in (0.3, 2.5):
        shares = torch.exp(logits / temperature)
        errors.append(gap(soft(logits, temperature), shares / shares.sum(-1, keepdim=True)))
    errors += [gap(soft(logits, 1e-6), largest), gap(soft(logits, 0.0), largest)]
    errors.append(gap(soft(logits, 1e14), torch.full_like(logits, 0.2)))
    errors.append(require(soft(logits * 1e300, 1e-12).isfinite().all()))
    return worst(*errors)


# Limits and symmetries ------------------------------------------------------------------------


@entry(
    "dense/linear-limits",
    "What a linear model cannot fit",
    r"\frac{\partial}{\partial x_i}(w^\top x + b) = w_i \text{ everywhere: monotone}; \qquad "
    r"x_1 \oplus x_2 = \max(0, x_1 + x_2) - 2 \max(0, x_1 + x_2 - 1)",
    code=(linear, mlp, monotone_violation),
    wrong=(
        lambda inputs, outputs: MLP(MLPConfig(inputs, outputs, (16,), "tanh")),
        lambda x, weights, biases, activation: mlp(x, weights, biases, lambda a: a),
        lambda model, start, feature, steps: model(steps.repeat(len(start), 1).t()).diff(dim=0).abs().sum(),
    ),
    tolerance=1e-9,
)
def _linear_limits(build: Code, net: Code, violation: Code) -> float:
    steps = torch.linspace(-3, 3, 61, dtype=torch.float64)
    errors = []
    for feature in range(3):
        model = build(3, 1).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        errors.append(gap(violation(model, _random(3), feature, steps).detach(), 0.0))
    corners = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    xor = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    ones = torch.ones(4, 1, dtype=torch.float64)

    def best_linear(features: Tensor) -> float:
        design = torch.cat([features, ones], dim=1)
        return (
            (design @ torch.linalg.lstsq(design, xor[:, None]).solution - xor[:, None]).square().mean().item()
        )

    # The best line answers ½ everywhere; with the product of the inputs beside them it answers exactly.
    errors += [
        gap(best_linear(corners), 0.25),
        gap(best_linear(torch.cat([corners, corners[:, :1] * corners[:, 1:]], 1)), 0),
    ]
    weights = [torch.tensor([[1.0, 1.0], [1.0, 1.0]]).double(), torch.tensor([[1.0, -2.0]]).double()]
    biases = [torch.tensor([0.0, -1.0]).double(), torch.zeros(1).double()]
    errors.append(gap(net(corners, weights, biases, torch.relu)[:, 0], xor))
    # The same net along x₁ with x₂ = 0 is a hump of height 1 that falls by 1 on [1, 2].
    hump = violation(
        lambda x: net(x, weights, biases, torch.relu), torch.zeros(2).double(), 0, steps.clamp(-3, 2)
    )
    return worst(*errors, gap(hump, 1.0))


@entry(
    "dense/feature-order",
    "The order of the inputs",
    r"W P^\top (P x) = W x \text{ for every permutation } P",
    code=permute_inputs,
    wrong=lambda weight, order: weight[:, order.argsort()],
    tolerance=1e-12,
)
def _feature_order(permute: Code) -> float:
    x, order = _random(9, 7), torch.randperm(7)
    model = MLP(MLPConfig(7, 3, (6,), "tanh")).double()
    before = model(x)
    first = model.body[0]
    assert isinstance(first, nn.Linear)
    kernel = _random(1, 1, 3)
    convolved = nn.functional.conv1d(x[:, None], kernel)
    with torch.no_grad():
        first.weight.copy_(permute(first.weight.clone(), order))
    same = gap(model(x[:, order]), before)
    # No order of its three weights makes a convolution give the same set of answers again.
    changed = min(
        gap(nn.functional.conv1d(x[:, None, order], kernel[..., list(p)]).sort(-1)[0], convolved.sort(-1)[0])
        for p in itertools.permutations(range(3))
    )
    return worst(same, require(changed > 0.1))


@entry(
    "dense/one-hot",
    "Categories as unit vectors",
    r"c \mapsto e_c \in \{0, 1\}^C, \qquad c = \arg\max_i (e_c)_i, \qquad W e_c = W_{:,c}",
    code=(one_hot, from_one_hot),
    wrong=(lambda classes, count: one_hot((classes + 1) % count, count), lambda vectors: vectors.argmin(-1)),
    tolerance=0.0,
)
def _one_hot(encode: Code, decode: Code) -> float:
    classes = torch.randint(0, 5, (4, 3))
    vectors = encode(classes, 5)
    loop = torch.tensor([[[float(c == i) for i in range(5)] for c in row] for row in classes.tolist()])
    weight = torch.randn(2, 5)
    errors = [gap(vectors, loop), gap(decode(vectors), classes), gap(decode(loop), classes)]
    return worst(*errors, gap(vectors @ weight.t(), weight.t()[classes]))
