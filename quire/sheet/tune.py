"""Chapter 24: fine-tuning in full, with low-rank adapters, and over a base of four bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quire.functional.nf4 import (
    dequantise_nf4,
    dequantise_scales,
    dynamic_float,
    nf4_bytes,
    normal_float,
    quantise_nf4,
    quantise_scales,
)
from quire.sheet.registry import entry, gap, require, worst
from quire.tuning import Adapters, LoRAConfig, inject, quantise_base

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]
Inject = Callable[[nn.Module, LoRAConfig], Adapters]

PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
"""The code book of NormalFloat4 in bitsandbytes."""


def _fill(adapters: Adapters) -> list[Tensor]:
    """Random factors, as after training: A and B of each weight in turn."""
    found: list[Tensor] = list(adapters.parameters())
    for parameter in found:
        nn.init.normal_(parameter, std=0.4)
    return found


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _against_sum(inject: Inject, layer: nn.Module, inputs: tuple[Tensor, ...], names: Iterable[str]) -> float:
    """Output and gradients of an adapted layer against the plain one with W₀ + (α/r)·B A put in."""
    layer = layer.double()
    plain = copy.deepcopy(layer)
    adapters = inject(layer, LoRAConfig(rank=2, alpha=3.0))
    factors = _fill(adapters)
    leaves = [factor.detach().clone().requires_grad_() for factor in factors]
    weights = {}
    for name, first, second in zip(names, leaves[::2], leaves[1::2], strict=True):
        base = plain.get_parameter(name).detach()
        weights[name] = base + 1.5 * (second.flatten(1) @ first.flatten(1)).view(base.shape)
    expected, actual = _first(functional_call(plain, weights, inputs)), _first(layer(*inputs))
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    actual.backward(cotangent)
    errors = [gap(mine.grad, leaf.grad) for mine, leaf in zip(factors, leaves, strict=True)]
    return worst(gap(actual, expected), *errors)


def _unscaled(model: nn.Module, config: LoRAConfig) -> Adapters:
    """α instead of α/r."""
    return inject(model, replace(config, alpha=(config.alpha or 1.0) * config.rank))


# Full fine-tuning -----------------------------------------------------------------------------


@entry(
    "tune/full",
    "Full fine-tuning",
    r"W \leftarrow W - \eta \nabla_W L \text{ from } W = W_0, \qquad \Delta W = W - W_0",
    code=inject,
    wrong=lambda model, config: inject(model, LoRAConfig(rank=1)),
    tolerance=1e-12,
)
def _(inject: Inject) -> float:
    """A weight that an adapter learns as a whole takes the steps that the plain model takes; W₀ stays."""
    model = nn.Linear(4, 3).double()
    plain, base = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    adapters = inject(model, LoRAConfig(targets=(), full=("weight", "bias")))
    x, y = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    for net, parameters in ((plain, list(plain.parameters())), (model, list(adapters.parameters()))):
        for _ in range(5):
            gradients = torch.autograd.grad((net(x) - y).square().mean(), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.data -= 0.1 * gradient
    kept = adapters.base_state_dict()
    unchanged = [require(torch.equal(kept[name], value)) for name, value in base.items()]
    return worst(gap(model(x), plain(x)), *unchanged)


# LoRA -----------------------------------------------------------------------------------------


@entry(
    "tune/lora",
    "Low-rank adaptation",
    r"y = x W_0 + \frac{\alpha}{r} \, x L_1 L_2, \quad L_1 \in \mathbb{R}^{D \times r}, \; L_2 \in "
    r"\mathbb{R}^{r \times M}; \qquad \nabla_{L_1} = \frac{\alpha}{r} x^\top g L_2^\top, \; \nabla_{L_2} = "
    r"\frac{\alpha}{r} (x L_1)^\top g",
    code=inject,
    wrong=_unscaled,
    tolerance=1e-12,
)
def _(inject: Inject) -> float:
    model = nn.Linear(7, 5).double()
    x, g = torch.randn(6, 7).double(), torch.randn(6, 5).double()
    w, b = model.weight.detach().clone(), model.bias.detach().clone()
    adapters = inject(model, LoRAConfig(rank=2, alpha=6.0))
    start = gap(model(x), x @ w.T + b)
    first, second = _fill(adapters)
    l1, l2 = first.detach().T, second.detach().T
    output = model(x)
    output.backward(g)
    frozen = all(not p.requires_grad for p in model.parameters() if p is not first and p is not second)
    return worst(
        start,
        gap(output, x @ w.T + b + 3.0 * x @ l1 @ l2),
        gap(first.grad, 3.0 * (x.T @ g @ l2.T).T),
        gap(second.grad, 3.0 * ((x @ l1).T @ g).T),
        require(frozen and first.numel() + second.numel() == 2 * (7 + 5)),
    )


def _subtract(adapters: Adapters) -> None:
    """W − ΔW, which is what it says and not what it gives."""
    model, (first, second) = adapters.model, adapters.parameters()
    assert isinstance(model, nn.Linear)
    model.weight.data -= second.data @ first.data


@entry(
    "tune/lora-merge",
    "Merging and unmerging",
    r"W \leftarrow W_0 + \Delta W; \qquad W \leftarrow W_0 \text{ exactly, as } "
    r"\mathrm{fl}(\mathrm{fl}(W_0 + \Delta W) - \Delta W) \neq W_0",
    code=(Adapters.merge, Adapters.unmerge),
    wrong=(Adapters.merge, _subtract),
    tolerance=1e-6,
)
def _(merge: Code, unmerge: Code) -> float:
    model = nn.Linear(30, 20)
    base = model.weight.detach().clone()
    adapters = inject(model, LoRAConfig(rank=2))
    first, second = _fill(adapters)
    x = torch.randn(5, 30)
    output = model(x)
    report = merge(adapters)
    exact = base.double() + second.detach().double() @ first.detach().double()
    plain = type(model) is nn.Linear and set(model.state_dict()) == {"weight", "bias"}
    errors = [
        gap(model.weight, exact),
        gap(model(x), output),
        gap(report.total.largest, (model.weight.double() - exact).abs().max().item()),
        require(plain),  # the layer's own forward: no extra cost
    ]
    unmerge(adapters)
    return worst(*errors, require(torch.equal(model.state_dict()["weight"], base)))


@entry(
    "tune/lora-convolution",
    "LoRA on convolutions",
    r"y = x * W_0 + \frac{\alpha}{r} (x * A) * B, \qquad \Delta W_{oi \cdot} = \frac{\alpha}{r} "
    r"\sum_k B_{ok} A_{ki \cdot}",
    code=inject,
    wrong=_unscaled,
    tolerance=1e-12,
)
def _(inject: Inject) -> float:
    def draw(*shape: int) -> tuple[Tensor, ...]:
        return (torch.randn(*shape).double(),)

    return worst(
        _against_sum(inject, nn.Conv1d(3, 4, 3, padding=1), draw(2, 3, 8), ["weight"]),
        _against_sum(inject, nn.Conv2d(3, 4, (3, 2), stride=2, dilation=2), draw(2, 3, 9, 8), ["weight"]),
        _against_sum(inject, nn.Conv2d(4, 6, 3, groups=2), draw(2, 4, 5, 5), ["weight"]),
        _against_sum(inject, nn.Conv3d(2, 3, 2), draw(1, 2, 3, 3, 3), ["weight"]),
    )


@entry(
    "tune/lora-recurrent",
    "LoRA on recurrent layers",
    r"h_t = f\big((W_{ih} + \Delta W_{ih}) x_t + (W_{hh} + \Delta W_{hh}) h_{t-1} + b\big), \qquad "
    r"\Delta W = \frac{\alpha}{r} B A",
    code=inject,
    wrong=_unscaled,
    tolerance=1e-12,
)
def _(inject: Inject) -> float:
    x = (torch.randn(5, 2, 3).double(),)
    names = ["weight_ih_l0", "weight_hh_l0"]
    layers = (nn.RNN(3, 4), nn.LSTM(3, 4), nn.GRU(3, 4))
    return worst(*[_against_sum(inject, layer, x, names) for layer in layers])


@entry(
    "tune/lora-attention",
    "LoRA on attention",
    r"[Q\,K\,V] = x \, (W_{qkv} + \Delta W_{qkv})^\top, \qquad y = \mathrm{heads}(Q, K, V) \, (W_O + \Delta "
    r"W_O)^\top",
    code=inject,
    wrong=_unscaled,
    tolerance=1e-12,
)
def _(inject: Inject) -> float:
    fused = nn.MultiheadAttention(6, 2, batch_first=True)
    apart = nn.MultiheadAttention(6, 2, kdim=4, vdim=3, batch_first=True)
    x, key, value = (
        torch.randn(2, 5, 6).double(),
        torch.randn(2, 7, 4).double(),
        torch.randn(2, 7, 3).double(),
    )
    thirds = ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]
    return worst(
        _against_sum(inject, fused, (x, x, x), ["in_proj_weight", "out_proj.weight"]),
        _against_sum(inject, apart, (x, key, value), thirds),
    )


def _last_alone(adapters: Adapters, weights: Mapping[str, float]) -> None:
    name = list(weights)[-1]
    adapters.activate({name: weights[name]})


@entry(
    "tune/lora-stack",
    "Several adapters: stack and swap",
    r"W = W_0 + \sum_i c_i \, s_i \, B_i A_i, \qquad c = 0 \text{ gives } W_0",
    code=Adapters.activate,
    wrong=_last_alone,
    tolerance=1e-12,
)
def _(activate: Code) -> float:
    model = nn.Linear(6, 5, bias=False).double()
    base = model.weight.detach().clone()
    adapters = inject(model, LoRAConfig(rank=1, alpha=2.0), "one")
    adapters.add(LoRAConfig(rank=3, alpha=1.5), "two")
    products = {}
    for name, scale in (("one", 2.0), ("two", 0.5)):
        first, second = adapters.parameters(name)
        nn.init.normal_(first), nn.init.normal_(second)
        products[name] = scale * second.detach() @ first.detach()
    x = torch.randn(4, 6).double()
    errors = []
    for weights in ({"one": 1.0}, {"two": 1.0}, {"one": 1.0, "two": 1.0}, {"one": -0.5, "two": 2.0}):
        activate(adapters, weights)
        total = base + sum(c * products[name] for name, c in weights.items())
        errors += [gap(model(x), x @ total.T), gap(model.weight, total)]
    adapters.deactivate()
    return worst(*errors, gap(model(x), x @ base.T))


# NormalFloat4 ---------------------------------------------------------------------------------


def _round_trip(block: Tensor, scale: float) -> Tensor:
    """Number by number: the nearest published code times the scale."""
    nearest = [min(PUBLISHED, key=lambda code: abs(code - v / scale)) for v in block.double().tolist()]
    return torch.tensor(nearest, dtype=torch.float64) * scale


def _draw_code() -> Figure:
    from quire.report.style import figure

    fig = figure(7.0, 3.4)
    axes = fig.subplots()
    code = normal_float().double()
    largest = torch.special.ndtri(torch.tensor(1 - (1 / 32 + 1 / 30) / 2).double())
    x = torch.linspace(-1.4, 1.4, 400).double()
    density, heights = (torch.exp(-((v * largest) ** 2) / 2).numpy() for v in (x, code))
    axes.plot(x.numpy(), density, label="density of N(0, 1), scaled")
    axes.vlines(code.numpy(), 0, heights, label="the 16 codes", colors="C1")
    axes.set(
        xlabel="w / max |w|", ylabel="relative density", title="NormalFloat4: codes lie where weights do"
    )
    axes.legend()
    return fig


@entry(
    "tune/nf4",
    "NormalFloat4",
    r"w \approx c_i \max_{\text{block}} |w|, \quad i = \arg\min_j \Big| c_j - \frac{w}{\max |w|} \Big|, "
    r"\qquad c_j \propto \Phi^{-1}(p_j), \; p \in \{\delta, \dots, \tfrac12, \dots, 1 - \delta\}, \; c_8 = 0",
    code=(normal_float, quantise_nf4, dequantise_nf4),
    wrong=(lambda: torch.linspace(-1, 1, 16), quantise_nf4, dequantise_nf4),
    tolerance=2e-7,
    picture=_draw_code,
)
def _(codes: Code, quantise: Code, dequantise: Code) -> float:
    book = codes()
    delta = (1 / 32 + 1 / 30) / 2
    largest = torch.special.ndtri(torch.tensor(1 - delta).double())
    probabilities = torch.special.ndtr(book.double() * largest)
    even = torch.cat([torch.full((7,), (0.5 - delta) / 7), torch.full((8,), (0.5 - delta) / 8)]).double()
    weight = torch.randn(5, 31)  # 155 numbers: two blocks and a part
    packed = quantise(weight, double=False)
    blocks = weight.flatten().split(64)
    expected = torch.cat([_round_trip(block, block.abs().max().item()) for block in blocks])
    again = quantise(dequantise(packed), double=False)
    return worst(
        gap(book, torch.tensor(PUBLISHED)),
        gap(probabilities.diff(), even),
        gap(dequantise(packed).flatten(), expected),
        require(torch.equal(again.codes, packed.codes)),
        require(torch.equal(dequantise(quantise(torch.zeros(70))), torch.zeros(70))),
    )


def _without_mean(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, steps, mean = quantise_scales(torch.cat([scales, -scales]))  # whose mean is zero
    return codes[: len(scales)], steps[: -(-len(scales) // 256)], mean


@entry(
    "tune/double-quantisation",
    "Double quantisation",
    r"s_k \approx \bar s + d_{j_k} \max_{\text{group}} |s - \bar s|, \qquad "
    r"4 + \frac{8}{64} + \frac{32}{64 \cdot 256} = 4.127 \text{ bits per weight}",
    code=(quantise_scales, dequantise_scales, nf4_bytes),
    wrong=(_without_mean, dequantise_scales, nf4_bytes),
    tolerance=1e-6,
)
def _(quantise: Code, dequantise: Code, count: Code) -> float:
    scales = 1 + 0.3 * torch.rand(600)
    codes, steps, mean = quantise(scales)
    exact, levels = scales.double(), dynamic_float()
    best = []  # the distance to the nearest level, which rounding cannot beat
    for group in (exact - exact.mean()).split(256):
        step = group.abs().max()
        best.append((levels * step - group[:, None]).abs().min(1).values)
    numel = 64 * 256 * 100
    packed = quantise_nf4(torch.randn(64 * 256))
    return worst(
        gap((dequantise(codes, steps, mean).double() - exact).abs(), torch.cat(best)),
        gap(mean, exact.mean()),
        require(codes.dtype == torch.uint8 and len(codes) == 600 and len(steps) == 3),
        require(8 * (count(numel) - 4) / numel == 4 + 8 / 64 + 32 / (64 * 256)),  # 4: the mean, once a tensor
        require(packed.nbytes == count(64 * 256)),
    )


# QLoRA ----------------------------------------------------------------------------------------


def _explicit_rounding(weight: Tensor) -> Tensor:
    """A weight through NormalFloat4 with double quantisation, from published numbers alone."""
    blocks = weight.flatten().float().split(64)
    scales = torch.stack([block.abs().max() for block in blocks])
    centred, levels = scales - scales.mean(), dynamic_float().float()
    step = centred.abs().max()
    coarse = levels[(centred[:, None] / step - levels).abs().argmin(1)] * step + scales.mean()
    parts = []
    for block, scale, rough in zip(blocks, scales, coarse, strict=True):
        parts.append(_round_trip(block, scale.item()) / scale.double() * rough.double())
    return torch.cat(parts).view(weight.shape)


@entry(
    "tune/qlora",
    "QLoRA",
    r"y = x \, \mathrm{dequantise}(W)^\top + \frac{\alpha}{r} x A^\top B^\top, \qquad \nabla_x = g \, "
    r"\mathrm{dequantise}(W) + \frac{\alpha}{r} g B A; \qquad W \text{ frozen in 4.127 bits}",
    code=quantise_base,
    wrong=lambda model: quantise_base(model, double=False),
    tolerance=1e-6,
)
def _(quantise: Code) -> float:
    one, two = nn.Linear(32, 64), nn.Linear(64, 5)
    model = nn.Sequential(one, nn.Tanh(), two).double()
    rounded = [_explicit_rounding(layer.weight.detach()) for layer in (one, two)]
    biases = [layer.bias.detach() for layer in (one, two)]
    quantise(model)
    adapters = inject(model, LoRAConfig(rank=2, alpha=1.0))
    a1, b1, a2, b2 = _fill(adapters)
    x = torch.randn(4, 32).double().requires_grad_()
    g = torch.randn(4, 5).double()
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(x)
    output.backward(g)
    w1, w2 = rounded[0] + 0.5 * (b1 @ a1).detach(), rounded[1] + 0.5 * (b2 @ a2).detach()
    hidden = (x.detach() @ w1.T + biases[0]).tanh()
    back = (g @ w2) * (1 - hidden**2)
    report = adapters.merge()
    merged = report.errors["0.weight"]
    again = _explicit_rounding(w1)
    return worst(
        gap(output, hidden @ w2.T + biases[1]),
        gap(x.grad, back @ w1),
        gap(a1.grad, 0.5 * b1.detach().T @ back.T @ x.detach()),
        gap(b2.grad, 0.5 * g.T @ hidden @ a2.detach().T),
        require(max(kept) < 32 * 64 * 8),  # backward keeps no weight in full
        gap(merged.largest, (again - w1).abs().max().item()),
        gap(merged.relative, ((again - w1).norm() / w1.norm()).item()),
    )
