"""Chapter 11: convolution, pooling, and what a pixel of the output sees."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.nn import functional

from quire.functional import convolutions, feedforward, geometry, receptive
from quire.functional.receptive import Branches, Window
from quire.report.style import VERMILION, figure
from quire.sheet.registry import entry, gap, require, worst

Code = Callable[..., Any]
TORCH_CORRELATE: tuple[Code, ...] = (functional.conv1d, functional.conv2d, functional.conv3d)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _gradients(output: Tensor, *inputs: Tensor) -> Tensor:
    """All gradients of a fixed, uneven combination of the outputs, in one vector."""
    factors = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    found = torch.autograd.grad((output * factors).sum(), inputs, retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in found])


def _places(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, sizes)))


def _pixel(x: Tensor, place: Sequence[int]) -> Tensor:
    """The value there, along the last dimensions."""
    index: tuple[Any, ...] = (..., *place)
    return x[index]


# Convolution ----------------------------------------------------------------------------------

# Size, kernel, stride, padding on each side, dilation, groups.
_CASES = (
    ((9,), (3,), (2,), ((1, 1),), (2,), 1),
    ((5, 6), (3, 2), (1, 2), ((1, 0), (0, 2)), (1, 2), 2),
    ((3, 4, 3), (2, 3, 1), (1, 1, 2), ((0, 0), (1, 1), (0, 0)), (2, 1, 1), 2),
)


def _by_loops(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    flipped: bool,
) -> Tensor:
    """The sum of the definition, one output pixel and one tap at a time."""
    size, kernel = x.shape[2:], weight.shape[2:]
    per_group, share = len(weight) // groups, weight.shape[1]
    shape = [
        len(range(-before, w + after - d * (k - 1), s))
        for w, k, s, (before, after), d in zip(size, kernel, stride, padding, dilation, strict=True)
    ]
    pixels = []
    for t in _places(shape):
        filters = []
        for f in range(len(weight)):
            channels = slice((f // per_group) * share, (f // per_group + 1) * share)
            total = bias[f].expand(len(x))
            for k in _places(kernel):
                tap = tuple(n - 1 - i for n, i in zip(kernel, k, strict=True)) if flipped else k
                at = [
                    s * i + d * j - before
                    for s, i, d, j, (before, _) in zip(stride, t, dilation, tap, padding, strict=True)
                ]
                if all(0 <= i < w for i, w in zip(at, size, strict=True)):
                    total = total + _pixel(x[:, channels], at) @ _pixel(weight[f], k)
            filters.append(total)
        pixels.append(torch.stack(filters, 1))
    return torch.stack(pixels, 2).unflatten(2, shape)


def _against_loops(code: Code, flipped: bool) -> float:
    errors = []
    for size, kernel, stride, padding, dilation, groups in _CASES:
        x, weight, bias = _random(2, 4, *size), _random(2, 4 // groups, *kernel), _random(2)
        inputs = tuple(value.requires_grad_() for value in (x, weight, bias))
        options: dict[str, Any] = {
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "groups": groups,
        }
        wanted = _by_loops(x, weight, bias, flipped=flipped, **options)
        got = code(*inputs, **options)
        errors += [gap(got, wanted), gap(_gradients(got, *inputs), _gradients(wanted, *inputs))]
    return worst(*errors)


@entry(
    "convolve/cross-correlation",
    "Cross-correlation, the layer called convolution",
    r"y_{n,f,t} = b_f + \sum_{c,k} w_{f,c,k} \, x_{n,c,\,St + dk - P}",
    code=convolutions.cross_correlation,
    wrong=convolutions.convolution,
    tolerance=1e-12,
)
def _cross_correlation(correlate: Code) -> float:
    errors = [_against_loops(correlate, flipped=False)]
    for count, size in enumerate(((9,), (6, 7), (4, 5, 3)), 1):
        x, bias = _random(2, 4, *size).requires_grad_(), _random(6).requires_grad_()
        weight = _random(6, 2, *[3, 5, 1][:count]).requires_grad_()
        for padding in (0, 1, "valid", "same", [0, 2, 1][:count]):
            for stride in (1,) if padding == "same" else (1, 2):
                got = correlate(x, weight, bias, stride=stride, padding=padding, groups=2)
                wanted = TORCH_CORRELATE[count - 1](x, weight, bias, stride, padding, 1, 2)
                gradients = _gradients(wanted, x, weight, bias)
                errors += [gap(got, wanted), gap(_gradients(got, x, weight, bias), gradients)]
        # PyTorch has no "same" with a stride: ⌈W/S⌉ outputs.
        strided = correlate(x, weight, stride=2, padding="same", groups=2)
        errors.append(require(list(strided.shape[2:]) == [math.ceil(w / 2) for w in size]))
    return worst(*errors)


@entry(
    "convolve/convolution",
    "Convolution proper, which flips the filter",
    r"y_{n,f,t} = b_f + \sum_{c,k} w_{f,c,k} \, x_{n,c,\,St + d(K-1-k) - P}, \qquad f * g = g * f",
    code=convolutions.convolution,
    wrong=convolutions.cross_correlation,
    tolerance=1e-12,
)
def _convolution(convolve: Code) -> float:
    errors = [_against_loops(convolve, flipped=True)]
    for sizes in (((5,), (3,)), ((4, 3), (2, 3)), ((3, 2, 2), (2, 2, 3))):
        f, g = (_random(1, 1, *size) for size in sizes)
        full = torch.zeros([a + b - 1 for a, b in zip(*sizes, strict=True)], dtype=torch.float64)
        for s, r in itertools.product(_places(sizes[0]), _places(sizes[1])):
            full[tuple(i + j for i, j in zip(s, r, strict=True))] += _pixel(f[0, 0], s) * _pixel(g[0, 0], r)
        both_ways = [convolve(a, b, padding=[k - 1 for k in b.shape[2:]])[0, 0] for a, b in ((f, g), (g, f))]
        errors += [gap(way, full) for way in both_ways]
    return worst(*errors)


def _relu_after_each(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: Code
) -> Tensor:
    return activation(convolutions.pointwise(x, weights, biases, activation))


@entry(
    "convolve/pointwise",
    "1×1 convolutions are an MLP for each pixel",
    r"h^k_{n,:,p} = \sigma(W^k h^{k-1}_{n,:,p} + b^k) \text{ for each pixel } p",
    code=convolutions.pointwise,
    wrong=_relu_after_each,
    tolerance=1e-12,
)
def _pointwise(pointwise: Code) -> float:
    weights = [_random(5, 3).requires_grad_(), _random(4, 5).requires_grad_()]
    biases = [_random(5).requires_grad_(), _random(4).requires_grad_()]
    errors = []
    for size in ((6,), (3, 4), (2, 3, 2)):
        x = _random(2, 3, *size).requires_grad_()
        wanted = torch.stack(
            [feedforward.mlp(_pixel(x, p), weights, biases, torch.relu) for p in _places(size)],
            2,
        ).unflatten(2, size)
        got = pointwise(x, weights, biases, torch.relu)
        inputs = (x, *weights, *biases)
        errors += [gap(got, wanted), gap(_gradients(got, *inputs), _gradients(wanted, *inputs))]
    return worst(*errors)


# Pooling --------------------------------------------------------------------------------------


def _windows(size: Sequence[int], kernel: int, stride: int, padding: int, dilation: int) -> list[Any]:
    """For each output pixel the pixels of its window that lie inside."""
    outputs = [range(-padding, w + padding - dilation * (kernel - 1), stride) for w in size]
    return [
        [
            place
            for place in itertools.product(
                *[range(first, first + dilation * kernel, dilation) for first in corner]
            )
            if all(0 <= i < w for i, w in zip(place, size, strict=True))
        ]
        for corner in itertools.product(*outputs)
    ]


@entry(
    "convolve/pooling",
    "Max and average pooling",
    r"y_{n,c,t} = \max_k x_{n,c,\,St + dk - P}, \qquad "
    r"y_{n,c,t} = \frac{1}{|K|} \sum_k x_{n,c,\,St + k - P}",
    code=(convolutions.max_pool, convolutions.average_pool),
    wrong=(
        lambda x, *args, dilation=1, **options: convolutions.average_pool(x, *args, **options),
        lambda x, *args, **options: convolutions.average_pool(x, *args, **options, count_padding=False),
    ),
    tolerance=1e-12,
)
def _pooling(max_pool: Code, average_pool: Code) -> float:
    errors = []
    for size, kernel, stride, padding, dilation in (
        ((9,), 3, 2, 1, 1),
        ((10,), 3, 2, 0, 2),
        ((5, 6), 2, 2, 0, 1),
        ((5, 4), 3, 1, 1, 1),
        ((4, 3, 4), 2, 1, 1, 1),
    ):
        x = _random(2, 3, *size).requires_grad_()
        values = [
            torch.stack([_pixel(x, place) for place in window], 2)
            for window in _windows(size, kernel, stride, padding, dilation)
        ]
        largest = torch.stack([value.amax(2) for value in values], 2)
        got = max_pool(x, kernel, stride, padding=padding, dilation=dilation)
        errors += [gap(got.flatten(2), largest), gap(_gradients(got, x), _gradients(largest, x))]
        if dilation == 1:
            mean = torch.stack([value.sum(2) / kernel ** len(size) for value in values], 2)
            got = average_pool(x, kernel, stride, padding=padding)
            errors += [gap(got.flatten(2), mean), gap(_gradients(got, x), _gradients(mean, x))]
    return worst(*errors)


def _unpool_in_order(x: Tensor, indices: Tensor, kernel: int, **options: Any) -> Tensor:
    """Forgets the places: puts each value at the start of its window."""
    first = torch.arange(math.prod(x.shape[2:])).reshape(x.shape[2:]).expand_as(x) * kernel
    return convolutions.unpool(x, first, kernel, **options)


def _from_corners(x: Tensor, scale: int, mode: str = "nearest") -> Tensor:
    """Interpolates between corners of the image instead of centres of pixels."""
    if mode == "nearest":
        return convolutions.upsample(x, scale)
    kind = ("linear", "bilinear", "trilinear")[x.dim() - 3]
    return functional.interpolate(x, scale_factor=scale, mode=kind, align_corners=True)


def _interpolation(size: int, scale: int) -> Tensor:
    """Row i holds the weights of the pixels around (i + ½)/s − ½."""
    matrix = torch.zeros(size * scale, size, dtype=torch.float64)
    for i in range(size * scale):
        place = min(max((i + 0.5) / scale - 0.5, 0.0), size - 1.0)
        left = min(int(place), size - 1)
        matrix[i, left] += 1 - (place - left)
        matrix[i, min(left + 1, size - 1)] += place - left
    return matrix


@entry(
    "convolve/unpooling",
    "Inverse pooling: unpooling and upsampling",
    r"y_{n,c,i_t} = x_{n,c,t}, \; 0 \text{ elsewhere}; \qquad y_i = x_{\lfloor i/s \rfloor}; \qquad "
    r"y_i = x\!\left(\tfrac{i + 1/2}{s} - \tfrac12\right)",
    code=(convolutions.unpool, convolutions.upsample),
    wrong=(_unpool_in_order, _from_corners),
    tolerance=1e-12,
)
def _unpooling(unpool: Code, upsample: Code) -> float:
    peers: tuple[Code, ...] = (functional.max_unpool1d, functional.max_unpool2d, functional.max_unpool3d)
    errors = []
    for count, size in enumerate(((7,), (4, 5), (2, 4, 3)), 1):
        x = _random(2, 3, *size)
        pooled, indices = convolutions.max_pool(x, 2, return_indices=True)
        pooled.requires_grad_()
        got = unpool(pooled, indices, 2, size=size)
        wanted = peers[count - 1](pooled, indices, 2, output_size=list(size))
        errors += [gap(got, wanted), gap(_gradients(got, pooled), _gradients(wanted, pooled))]
        # Where the windows do not overlap, the maxima are back in their places.
        errors.append(gap(got, torch.where(got != 0, x, 0.0)))
        x.requires_grad_()
        for mode in ("nearest", "linear"):
            wanted = x
            for dim, extent in enumerate(size, 2):
                matrix = _interpolation(extent, 3)
                if mode == "nearest":
                    matrix = torch.eye(extent).double()[[i // 3 for i in range(extent * 3)]]
                wanted = (wanted.movedim(dim, -1) @ matrix.T).movedim(-1, dim)
            got = upsample(x, 3, mode)
            errors += [gap(got, wanted), gap(_gradients(got, x), _gradients(wanted, x))]
    return worst(*errors)


# Calculators ----------------------------------------------------------------------------------


@entry(
    "convolve/output-size",
    "Size of the output",
    r"\left\lfloor \frac{W - d(K-1) - 1 + 2P}{S} \right\rfloor + 1",
    code=geometry.output_size,
    wrong=lambda size, kernel, stride=1, padding=0, dilation=1: geometry.output_size(
        size, kernel, stride, padding
    ),
    tolerance=0.0,
)
def _output_size(size_of: Code) -> float:
    errors = []
    for w, k, s, p, d in itertools.product((7, 8), (1, 3), (1, 2, 3), (0, 2), (1, 2)):
        real = functional.conv1d(torch.zeros(1, 1, w), torch.zeros(1, 1, k), None, s, p, d).shape[-1]
        # Counted: the first pixels of all windows that still fit.
        counted = len(range(-p, w + p - d * (k - 1), s))
        errors.append(require(size_of(w, k, s, p, d) == real == counted))
    real_pair = functional.conv2d(torch.zeros(1, 1, 9, 7), torch.zeros(1, 1, 3, 2), None, (2, 1), 1).shape[2:]
    return worst(*errors, require(size_of((9, 7), (3, 2), (2, 1), 1) == tuple(real_pair)))


@entry(
    "convolve/parameter-count",
    "Parameters of a convolution",
    r"F \left( h\,w\,\frac{C}{\mathrm{groups}} + 1 \right)",
    code=geometry.convolution_parameter_count,
    wrong=lambda filters, kernel, channels, groups=1, bias=True: (
        filters * (math.prod(kernel) * channels + bias)
    ),
    tolerance=0.0,
)
def _parameter_count(count: Code) -> float:
    errors = []
    layers: tuple[tuple[Code, tuple[int, ...]], ...] = (
        (nn.Conv1d, (5,)), (nn.Conv2d, (3, 2)), (nn.Conv3d, (2, 3, 1))
    )  # fmt: skip
    for layer, kernel in layers:
        for groups, bias in itertools.product((1, 2, 4), (True, False)):
            peer = layer(4, 8, kernel, groups=groups, bias=bias)
            real = sum(parameter.numel() for parameter in peer.parameters())
            errors.append(require(count(8, kernel, 4, groups, bias) == real))
    return worst(*errors)


class _Split(nn.Module):
    """Branches that are added."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        out = self.branches[0](x)
        for branch in self.branches[1:]:
            out = out + branch(x)
        return out


def _as_model(layers: Sequence[Window | Branches]) -> nn.Module:
    """The chain in one dimension, with a rectifier and a norm after each convolutions."""
    parts: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, Branches):
            parts.append(_Split(*[_as_model(chain) for chain in layer.chains]))
        elif layer.kernel == layer.stride:
            parts.append(nn.MaxPool1d(layer.kernel, layer.stride, layer.padding, layer.dilation))
        else:
            parts += [nn.Conv1d(2, 2, *layer), nn.BatchNorm1d(2), nn.ReLU()]
    return nn.Sequential(*parts)


_CHAINS: tuple[list[Window | Branches], ...] = (
    [Window(3), Window(3), Window(3)],
    [Window(5, 2, 2), Window(2, 2), Window(3, 1, 1, dilation=2)],
    [Window(3, 1, 1), Branches([[Window(3, 1, 1), Window(3, 1, 1)], []]), Window(3, 2, 1)],
    [Branches([[Window(1)], [Window(5, 1, 2)], [Window(3, 1, 3, dilation=3)]]), Window(2, 2), Window(3)],
)


def _without_strides(layers: Sequence[Window | Branches]) -> receptive.ReceptiveField:
    """Adds d(f − 1) without the product of the strides before."""
    field = receptive.receptive_field(layers)
    plain = [layer._replace(stride=1) for layer in layers if isinstance(layer, Window)]
    return dataclasses.replace(field, size=receptive.receptive_field(plain).size)


def _one_gradient(model: nn.Module, shape: Sequence[int], position: tuple[int]) -> receptive.FieldSupport:
    """The gradient of the model as it is, which loses what rectifiers and maxima switch off."""
    x = torch.randn(1, *shape, requires_grad=True)
    model.eval()(x)[0, :, position[0]].sum().backward()
    assert x.grad is not None
    return receptive.FieldSupport(position, (x.grad[0] != 0).any(0))


def _field_picture() -> Figure:
    fig = figure(8.4, 3.4)
    growth, seen = fig.subplots(1, 2)
    # Doubling the stride and doubling the dilation give the same sizes: the dashes lie on the line.
    kinds: list[tuple[str, str, Callable[[int], Window]]] = [
        ("3, stride 1", "-", lambda k: Window(3)),
        ("3, stride 2", "-", lambda k: Window(3, 2)),
        ("3, dilation $2^{k-1}$", "--", lambda k: Window(3, dilation=2 ** (k - 1))),
    ]
    for label, style, window in kinds:
        chain = [window(k) for k in range(1, 7)]
        sizes = [receptive.receptive_field(chain[:k]).size for k in range(7)]
        growth.plot(range(7), sizes, style, marker="o", markersize=3, label=label)
    growth.set(title="Receptive field of chains", xlabel="layers k", ylabel="size l (pixels)", yscale="log")
    growth.legend(fontsize=8)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, dilation=3))
    found = receptive.receptive_field_of(model, (1, 28, 28), generator=torch.Generator().manual_seed(0))
    field = receptive.receptive_field([Window(3), Window(2, 2), Window(3, dilation=3)])
    seen.imshow(found.support.float().numpy(), cmap="Greys", vmin=0, vmax=2)
    top, left = (field.span(place)[0] - 0.5 for place in found.position)
    box = Rectangle((left, top), field.size, field.size, fill=False, edgecolor=VERMILION, linewidth=2)
    box.set_label(f"formula: {field.size}×{field.size}")
    seen.add_patch(box)
    seen.set(title="Support of the gradient", xlabel="column (pixels)", ylabel="row (pixels)")
    seen.grid(False)
    seen.legend(fontsize=8)
    return fig


@entry(
    "convolve/receptive-field",
    "Receptive field",
    r"l_k = l_{k-1} + d_k (f_k - 1) \prod_{i=1}^{k-1} s_i, \qquad l_0 = 1",
    code=(receptive.receptive_field, receptive.receptive_field_of),
    wrong=(
        _without_strides,
        _one_gradient,
    ),
    tolerance=0.0,
    picture=_field_picture,
)
def _receptive_field(field_of_chain: Code, measure: Code) -> float:
    # By hand: three 3s see 7; 5 stride 2, then 2 stride 2, then 3 dilated by 2 see 5 + 1·2 + 4·4 = 23.
    errors = [require(field_of_chain(_CHAINS[0]).size == 7), require(field_of_chain(_CHAINS[1]).size == 23)]
    for chain in _CHAINS:
        field, model = field_of_chain(chain), _as_model(chain)
        for position in ((5,), (6,)):
            found = measure(model, (2, 64), position=position)
            errors.append(require(found.spans == (field.span(*position),)))
        # By brute force: change one pixel at a time and see whether the output does. Averages instead of
        # maxima, and no rectifier, so that every change shows.
        linear = _linear_copy(model).double().eval()
        x = _random(1, 2, 64)
        pixels = x.repeat(64, 1, 1)
        pixels[range(64), :, range(64)] += 1.0
        moved = (linear(pixels)[..., 5] - linear(x)[..., 5]).abs().amax(1) > 1e-12
        places = moved.nonzero()
        errors.append(require(field.span(5) == (int(places.min()), int(places.max()) + 1)))
    return worst(*errors)


def _linear_copy(model: nn.Module) -> nn.Module:
    if isinstance(model, nn.Sequential):
        return nn.Sequential(*[_linear_copy(part) for part in model if not isinstance(part, nn.ReLU)])
    if isinstance(model, _Split):
        return _Split(*[_linear_copy(branch) for branch in model.branches])
    return nn.AvgPool1d(model.kernel_size) if isinstance(model, nn.MaxPool1d) else model


# Separable filters ----------------------------------------------------------------------------


def _by_determinant(filter: Tensor, tolerance: float | None = None) -> tuple[Tensor, Tensor] | None:
    if filter.shape[0] == filter.shape[1] and filter.double().det().abs() > 1e-12:
        return None
    return geometry.separate(filter, tolerance=math.inf)


@entry(
    "convolve/separable",
    "Separable filters",
    r"W = u v^\top \iff \operatorname{rank} W = 1, \qquad W * x = u * (v^\top * x)",
    code=geometry.separate,
    wrong=_by_determinant,
    tolerance=1e-12,
    erratum="A filter is often said to split into a column and a row when its determinant is 0. That only "
    "says that the rank is not full: a 3×3 filter of rank 2 has determinant 0 and does not split. The rank "
    "must be 1.",
)
def _separable(separate: Code) -> float:
    errors = []
    x = _random(1, 1, 9, 8)
    sobel = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]], dtype=torch.float64)
    for filter in (sobel, _random(3, 1) @ _random(1, 3), _random(5, 1) @ _random(1, 2), _random(1, 4)):
        pair = separate(filter)
        if pair is None:
            return math.inf
        column, row = pair
        whole = functional.conv2d(x, filter[None, None])
        in_turn = functional.conv2d(functional.conv2d(x, row[None, None, None]), column[None, None, :, None])
        errors += [gap(column[:, None] * row, filter), gap(in_turn, whole)]
    # Each has a 2×2 minor that is not 0, hence a rank above 1, and the first two have determinant 0.
    laplace = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]], dtype=torch.float64)
    count_up = torch.arange(1.0, 10).double().reshape(3, 3)
    for filter in (laplace, count_up, torch.eye(3).double(), _random(2, 5)):
        minors = [
            filter[a, c] * filter[b, d] - filter[a, d] * filter[b, c]
            for a, b in itertools.combinations(range(filter.shape[0]), 2)
            for c, d in itertools.combinations(range(filter.shape[1]), 2)
        ]
        errors.append(require(max(abs(float(minor)) for minor in minors) > 1e-3 and separate(filter) is None))
    return worst(*errors)


# Equivariance ---------------------------------------------------------------------------------


@entry(
    "convolve/equivariance",
    "Equivariance of a model",
    r"f(T x) = T f(x); \quad \text{convolution: shifts}; \quad "
    r"\text{pooling: only shifts by multiples of its stride}",
    code=geometry.equivariance_error,
    # Asks for invariance: f(Tx) = f(x).
    wrong=lambda model, x, *args, **options: geometry.equivariance_error(
        lambda images: model(images).flatten(1), x, *args, **options
    ),
    tolerance=1e-12,
)
def _equivariance(error_of: Code) -> float:
    x = _random(2, 3, 8, 8)
    circular = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular").double()
    zeros = nn.Conv2d(3, 4, 3, padding=1).double()
    zeros.load_state_dict(circular.state_dict())
    symmetric = nn.Conv2d(3, 4, 3, padding=1).double()
    with torch.no_grad():
        weight = symmetric.weight.clone()
        turns = [torch.rot90(weight, turn, (2, 3)) for turn in range(4)]
        symmetric.weight.copy_(sum((turn + turn.flip(-1) for turn in turns), torch.zeros_like(weight)))
    pool, classifier = nn.MaxPool2d(2), nn.Sequential(circular, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    # By hand: max pooling of 1, 2, 3, 4 gives 2, 4; moved by one, of 4, 1, 2, 3 it gives 4, 3. The shift by
    # ½ is none or one: 2, 4 or 4, 2, so that the smaller difference is 1, of a largest value of 4.
    ramp = torch.tensor([[[1.0, 2, 3, 4]]], dtype=torch.float64)
    return worst(
        *[error_of(circular, x, "shift", amount=amount) for amount in (1, 3, -2)],
        error_of(zeros, x, "shift", amount=1, margin=2),
        require(error_of(zeros, x, "shift", amount=1) > 0.01),
        require(error_of(circular, x, "flip") > 0.01),
        require(error_of(circular, x, "rotation") > 0.01),
        *[error_of(symmetric, x, "rotation", amount=amount) for amount in (1, 2, 3)],
        error_of(symmetric, x, "flip"),
        error_of(pool, x, "shift", amount=2, stride=2),
        require(0.01 < error_of(pool, x, "shift", amount=1, stride=2) < 2),
        error_of(pool, x, "flip"),
        error_of(classifier, x, "shift"),
        gap(error_of(nn.MaxPool1d(2), ramp, "shift", stride=2), 0.25),
    )
