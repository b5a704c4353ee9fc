"""Chapter 25: what training costs, against PyTorch's counter, its allocator, and counts one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from quire.doctor.costs.account import explain
from quire.doctor.costs.budget import largest_batch
from quire.doctor.costs.machine import Machine
from quire.functional.costs import (
    attention_bytes,
    attention_flops,
    backward_flops,
    convolution_flops,
    dense_flops,
    roofline_seconds,
    training_bytes,
    transformer_flops,
)
from quire.functional.memory import allocated_bytes
from quire.functional.receptive import receptive_field_of
from quire.models import GPT, GPTConfig, resnet20
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]


def _none(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _counted(step: Callable[[], Tensor], backward: bool) -> int:
    """What PyTorch's counter says of one of the two passes of a real step."""
    forward, both = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward:
        step()
    with both:
        step().backward()
    return both.get_total_flops() - forward.get_total_flops() if backward else forward.get_total_flops()


def _small() -> nn.Sequential:
    first = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, (1, 3), bias=False)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(6 * 7 * 5, 10))


class _Twice:
    """An explanation that takes shared weights for two."""

    def __init__(self, model: nn.Module, inputs: Any, **options: Any) -> None:
        self.parameters = sum(p.numel() for module in model.modules() for p in module.parameters())


@entry(
    "cost/parameters",
    "Parameters",
    r"D = \sum_{\text{dense}} (D_{in} + 1) D_{out} + "
    r"\sum_{\text{conv}} (\tfrac{C_{in}}{g} f_h f_w + 1) C_{out} "
    r"+ 2 \sum_{\text{norm}} C, \quad \text{shared ones once}",
    code=explain,
    wrong=_Twice,
    tolerance=0.0,
)
def _parameters(code: Code) -> float:
    wanted = 3 * 3 * 3 * 8 + 8 + 2 * 8 + 8 * 3 * 6 + (6 * 7 * 5 + 1) * 10
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    published = 269_722  # 0.27 million in the paper
    return worst(
        gap(code(_small(), _none(2, 3, 16, 16)).parameters, wanted),
        gap(code(tied, _none(1, 4)).parameters, 16 + 8),
        gap(code(resnet20(), _none(2, 3, 32, 32)).parameters, published),
    )


@entry(
    "cost/shapes",
    "Output shapes and receptive fields",
    r"o = \left\lfloor \frac{n + 2p - d(f-1) - 1}{s} \right\rfloor + 1, \quad "
    r"l_k = l_{k-1} + d_k (f_k - 1) \prod_{i<k} s_i \quad \text{for each layer of any model}",
    code=explain,
    wrong=lambda model, inputs: explain(nn.Sequential(nn.ConstantPad2d(1, 0.0), model), inputs),
    tolerance=0.0,
)
def _shapes(code: Code) -> float:
    model = resnet20()
    found = {row.name.removeprefix("1."): row for row in code(model, _none(2, 3, 64, 64)).layers}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():

        def keep(module: nn.Module, given: Any, output: Tensor, name: str = name) -> None:
            shapes[name] = tuple(output.shape)

        module.register_forward_hook(keep)
    model(torch.randn(2, 3, 64, 64))
    same = all(row.output == shapes[name] for name, row in found.items() if name in shapes)
    names = ("conv1", "bn1", "relu", "layer1", "layer2")
    part = nn.Sequential(*(model.get_submodule(name) for name in names))
    seen = receptive_field_of(part, (3, 64, 64)).size
    field = next(row for name, row in reversed(found.items()) if name.startswith("layer2")).receptive_field
    return worst(require(same and len(found) > 20), require(field == seen))


@entry(
    "cost/forward",
    "FLOPs of the forward pass",
    r"\text{dense: } 2 N D_{in} D_{out}, "
    r"\qquad \text{convolution: } 2 N C_{out} o_h o_w \tfrac{C_{in}}{g} f_h f_w",
    code=(dense_flops, convolution_flops, explain),
    wrong=(
        lambda rows, inputs, outputs: rows * inputs * outputs,
        lambda samples, inputs, outputs, kernel, size, groups=1: convolution_flops(
            samples, inputs, outputs, kernel, size
        ),
        lambda model, inputs: explain(model, inputs[:1]),
    ),
    tolerance=0.0,
)
def _forward(dense: Code, convolution: Code, code: Code) -> float:
    x = torch.randn(3, 3, 16, 16)
    model = _small()
    layers = [convolution(3, 3, 8, (3, 3), (7, 7)), convolution(3, 8, 6, (1, 3), (7, 5)), dense(3, 210, 10)]
    grouped = nn.Conv2d(6, 9, 3, groups=3)
    y = torch.randn(2, 6, 8, 8)
    return worst(
        gap(sum(layers), _counted(lambda: model(x).sum(), False)),
        gap(code(model, x).forward_flops, sum(layers)),
        gap(convolution(2, 6, 9, (3, 3), (6, 6), groups=3), _counted(lambda: grouped(y).sum(), False)),
        # One product and one sum for each weight and place, counted.
        gap(convolution(1, 2, 2, (2,), (3,)), sum(2 for o in range(3) for c in range(2) for w in range(4))),
    )


@entry(
    "cost/backward",
    "The backward pass takes twice the forward pass",
    r"F_{backward} = 2 F_{forward} - F_1: \quad \nabla_W = X^\top \Delta, \; \nabla_X = \Delta W^\top "
    r"\text{ are products of the same size, and the first layer passes nothing on}",
    code=(backward_flops, explain),
    wrong=(
        lambda forward, first=0: forward,
        lambda model, inputs: explain(model.requires_grad_(False), inputs),
    ),
    tolerance=0.0,
)
def _backward(twice: Code, code: Code) -> float:
    errors = []
    x = torch.randn(3, 3, 16, 16)
    for model, inputs in (
        (_small(), x),
        (nn.Sequential(nn.Flatten(), nn.Linear(768, 9), nn.Linear(9, 2)), x),
    ):
        measured = _counted(lambda model=model, inputs=inputs: model(inputs).sum(), True)  # type: ignore[misc]
        costs = code(model, inputs)
        first = next(row.forward_flops for row in costs.layers if row.forward_flops)
        wanted = twice(costs.forward_flops, first)
        errors += [gap(costs.backward_flops, measured), gap(wanted, measured)]
    return worst(*errors)


@entry(
    "cost/transformer",
    "A Transformer takes six FLOPs for each token and weight",
    r"F = 6\, N T D + F_{attention}, \quad D \text{ weights in matrices, embeddings left out}",
    code=(transformer_flops, attention_flops),
    wrong=(
        lambda tokens, parameters: 2 * tokens * parameters,
        lambda queries, keys, width, batch=1: attention_flops(queries, keys, width),
    ),
    tolerance=1e-12,
)
def _transformer(products: Code, attention: Code) -> float:
    samples, places, layers, width = 2, 12, 3, 32
    model = GPT(GPTConfig(vocab_size=50, context=places, layers=layers, heads=4, width=width, tied=False))
    tables = {f"transformer.{name}.weight" for name in ("wte", "wpe")}
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name not in tables)
    costs = explain(model, _none(samples, places, dtype=torch.long))
    # Backward, the weights of attention are computed once more, and each product has two gradients.
    pairs = layers * attention(places, places, width, samples)
    wanted = products(samples * places, matrices) + 3.5 * pairs
    tokens = torch.randint(50, (samples, places))
    measured = sum(_counted(lambda: model(tokens)[0].sum(), side) for side in (False, True))
    return worst(
        gap(float(costs.forward_flops + costs.backward_flops), wanted),
        gap(float(costs.counter_flops), float(measured)),
    )


@entry(
    "cost/attention",
    "Attention is quadratic in the number of places",
    r"F = 4 N T S E, \quad M = N H T S \text{ numbers for the weights } A \in \mathbb R^{H \times T \times S}"
    r" \text{, none with a fused kernel}",
    code=(attention_flops, attention_bytes),
    wrong=(
        lambda queries, keys, width, batch=1: 4 * batch * (queries + keys) * width,
        lambda queries, keys, heads, batch=1, itemsize=4: batch * queries * keys * itemsize,
    ),
    tolerance=0.0,
)
def _attention(flops: Code, size: Code) -> float:
    samples, heads, places, keys, part = 2, 4, 24, 40, 8
    q, k, v = (torch.randn(samples, heads, n, part, requires_grad=True) for n in (places, keys, keys))

    def weights() -> Tensor:
        return (q @ k.mT).softmax(-1)

    class Explicit(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT).mul(part**-0.5).softmax(-1) @ v

    class Fused(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    shapes = tuple(_none(samples, heads, n, part) for n in (places, keys, keys))
    explicit, fused = explain(Explicit(), shapes), explain(Fused(), shapes)
    wanted = flops(places, keys, heads * part, samples)
    return worst(
        gap(wanted, _counted(lambda: (weights() @ v).sum(), False)),
        gap(size(places, keys, heads, samples), weights().nbytes),
        gap(explicit.attention_flops, wanted),
        gap(fused.attention_flops, wanted),
        gap(explicit.attention_bytes, weights().nbytes),
    )


def _step(model: nn.Module, inputs: Tensor) -> tuple[int, int]:
    """What a real step with Adam takes: all that is allocated, and all that is there before it."""
    optimiser = torch.optim.Adam(model.parameters())

    def step() -> None:
        output = model(inputs)
        output.sum().backward()
        optimiser.step()

    step()
    optimiser.zero_grad()
    states = [value for state in optimiser.state.values() for value in state.values()]
    there = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), inputs, *states))
    return allocated_bytes(step), there


class _NothingKept:
    """An explanation that forgets what the backward pass waits for."""

    def __init__(self, model: nn.Module, inputs: Any, **options: Any) -> None:
        costs = explain(model, inputs, **options)
        self.peak_bytes = costs.peak_bytes - costs.activation_bytes


@entry(
    "cost/memory",
    "Memory of a training step",
    r"M = \underbrace{(2 + s) D}_{W, \nabla W, \text{optimiser}} + \max_t \text{activations alive at } t, "
    r"\quad s = 2 \text{ for Adam, } 1 \text{ for momentum, } 0 \text{ for SGD}; \quad \text{within } 10\%",
    code=(training_bytes, explain),
    wrong=(lambda parameters, states, itemsize=4: parameters * itemsize, _NothingKept),
    tolerance=0.1,
)
def _memory(fixed: Code, code: Code) -> float:
    errors = []
    wide = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
    for model, inputs in ((wide, torch.randn(512, 64)), (resnet20(), torch.randn(4, 3, 32, 32))):
        allocated, there = _step(model.train(), inputs)
        errors.append(abs(code(model, inputs).peak_bytes / (allocated + there) - 1))
    makers: tuple[Code, ...] = (torch.optim.SGD, _momentum, torch.optim.Adam)
    for states, make in enumerate(makers):
        layer = nn.Linear(300, 300)
        optimiser = make(layer.parameters(), lr=0.1)
        layer(torch.randn(2, 300)).sum().backward()
        optimiser.step()
        kept = [v for state in optimiser.state.values() for v in state.values() if isinstance(v, Tensor)]
        both = sum(p.nbytes + p.grad.nbytes for p in layer.parameters() if p.grad is not None)
        wanted = both + sum(value.nbytes for value in kept if value.dim())
        errors.append(gap(fixed(300 * 301, states), wanted))
    return worst(*errors)


def _momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def _picture() -> Figure:
    from quire.report.style import figure

    fig = figure(9.4, 3.4)
    memory, flops = fig.subplots(1, 2)
    lengths = [64, 128, 256, 512, 1024]
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, context=1024, layers=2, heads=4, width=64))
    found = [explain(model, _none(1, length, dtype=torch.long)) for length in lengths]
    memory.loglog(lengths, [costs.peak_bytes / 2**20 for costs in found], marker="o", label="peak of a step")
    kept = [attention_bytes(length, length, 4) * 2 / 2**20 for length in lengths]
    memory.loglog(lengths, kept, "--", label="weights of attention, if kept")
    memory.set(title="memory of a small GPT", xlabel="tokens T", ylabel="MiB")
    memory.legend()
    for name in ("forward_flops", "attention_flops"):
        values = [getattr(costs, name) for costs in found]
        flops.loglog(lengths, values, marker="o", label=name.replace("_flops", ""))
    flops.set(title="operations", xlabel="tokens T", ylabel="FLOPs")
    flops.legend()
    return fig


@entry(
    "cost/largest-batch",
    "The largest batch that fits",
    r"n^* = \max \{ n : M(n) \le M_0 \}, \quad M(n^*) \le M_0 < M(n^* + 1)",
    code=largest_batch,
    wrong=lambda model, inputs, memory: largest_batch(model, inputs, 2 * memory),
    tolerance=0.0,
    picture=_picture,
)
def _batch(code: Code) -> float:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    most = 0
    while explain(model, _none(most + 1, 64)).peak_bytes <= 120_000:  # one by one
        most += 1
    errors = [gap(code(model, _none(1, 64), 120_000).batch, most)]
    for memory in (10**6, 10**8):
        fit = code(model, _none(1, 64), memory)
        peaks = [explain(model, _none(fit.batch + more, 64)).peak_bytes for more in (0, 1)]
        errors.append(require(peaks[0] <= memory < peaks[1]))
    return worst(*errors)


@entry(
    "cost/step-time",
    "Predicted time of a step",
    r"t = \sum_k \max\left( \frac{F_k}{R_{flops}}, \frac{B_k}{R_{bytes}} \right) + t_0 "
    r"\quad \text{over the operations of forward, backward and optimiser}",
    code=(roofline_seconds, Machine),
    wrong=(
        lambda operations, flops, moved, launch=0.0: sum(
            f / flops + b / moved + launch for f, b in operations
        ),
        lambda device, flops, bytes, launch: Machine(device, flops, bytes, launch, ahead=True),
    ),
    tolerance=1e-12,
)
def _time(roofline: Code, machine: Code) -> float:
    rate, moving, start = 1e9, 2e8, 1e-3
    rows, size = 32, 16
    model = nn.Linear(size, size, bias=False)
    this = machine("cpu", {torch.float32: rate}, moving, start)
    costs = explain(model, torch.randn(rows, size), optimiser="sgd").on(this)
    matrix, batch = size * size * 4, rows * size * 4
    flops = 2 * rows * size * size
    moved = [
        (flops, 2 * batch + matrix),  # y = x W
        (0, batch + 4),  # its sum
        (0, 8),  # 1, which the backward pass begins with, and which stands for the whole gradient of y
        (flops, batch + 4 + matrix),  # the gradient of W
        (0, 3 * matrix),  # W − η∇W
    ]
    wanted = sum(max(f / rate, b / moving) + start for f, b in moved)
    return worst(gap(roofline(moved, rate, moving, start), wanted), gap((costs.seconds or 0) / wanted, 1.0))
