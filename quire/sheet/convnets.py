"""Chapter 12: the classic convolutional networks, counted layer by layer.

Each proof lists, on its own, the name of every layer that torchvision's network has and how many parameters
that layer must have, and demands the same of the network and of its published total. Networks are built on
the meta device, where parameters have shapes and no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn import functional

from quire import models
from quire.functional.geometry import convolution_parameter_count
from quire.models.googlenet import Inception
from quire.models.resnet import BasicBlock, Bottleneck
from quire.sheet.registry import entry, gap, require, worst

Code = Callable[..., Any]
Layers = Iterable[tuple[str, int]]


def _convolution(filters: int, kernel: int, channels: int, groups: int = 1, bias: bool = False) -> int:
    return convolution_parameter_count(filters, (kernel, kernel), channels, groups, bias)


def _norm(channels: int) -> int:
    return 2 * channels


def _dense(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def _compared(build: Code, layers: Layers, published: int, **options: Any) -> float:
    """0 if the network has exactly these layers with so many parameters each, `published` in all."""
    with torch.device("meta"):
        net = build(**options)
    own = {
        name: sum(parameter.numel() for parameter in module.parameters(recurse=False))
        for name, module in net.named_modules()
    }
    expected = dict(layers)
    return require(
        {name: count for name, count in own.items() if count} == expected
        and sum(expected.values()) == published
    )


# LeNet, AlexNet, VGG --------------------------------------------------------------------------


def _lenet_without_border(**options: Any) -> nn.Module:
    """On 28×28 pixels as they are, C5 would read 4×4 places: 44,426 parameters, as is often seen."""
    net = models.lenet5(**options)
    net.c5 = nn.Linear(16 * 4 * 4, 120)
    return net


@entry(
    "convnets/lenet",
    "LeNet-5",
    r"1 \times 32 \times 32 \to 6 \times 28^2 \to 6 \times 14^2 \to 16 \times 10^2 \to 16 \times 5^2 "
    r"\to 120 \to 84 \to 10: \quad 61{,}706 \text{ parameters}",
    code=models.lenet5,
    wrong=_lenet_without_border,
    tolerance=0.0,
)
def _lenet(build: Code) -> float:
    layers = {
        "c1": _convolution(6, 5, 1, bias=True),
        "c3": _convolution(16, 5, 6, bias=True),
        "c5": _convolution(120, 5, 16, bias=True),
        "f6": _dense(120, 84),
        "output": _dense(84, 10),
    }
    sizes = [tuple(stage.shape[1:]) for stage in build().stages(torch.zeros(1, 1, 32, 32))]
    return worst(
        _compared(build, layers.items(), 61_706),
        require(sizes == [(6, 28, 28), (16, 10, 10), (16, 5, 5)]),
    )


def _two_towers(**options: Any) -> nn.Module:
    """Convolutions in two groups, as the network was split over two devices in 2012."""
    net = models.alexnet(**options)
    for index in (3, 8, 10):
        plain: Any = net.features[index]
        size, padding = plain.kernel_size, plain.padding
        net.features[index] = nn.Conv2d(
            plain.in_channels, plain.out_channels, size, padding=padding, groups=2
        )
    return net


@entry(
    "convnets/alexnet",
    "AlexNet",
    r"\text{11×11/4, 64; 5×5, 192; 3×3, 384; 3×3, 256; 3×3, 256; 4096; 4096; 1000}: \quad "
    r"61{,}100{,}840 \text{ parameters}",
    code=models.alexnet,
    wrong=_two_towers,
    tolerance=0.0,
)
def _alexnet(build: Code) -> float:
    layers = {
        "features.0": _convolution(64, 11, 3, bias=True),
        "features.3": _convolution(192, 5, 64, bias=True),
        "features.6": _convolution(384, 3, 192, bias=True),
        "features.8": _convolution(256, 3, 384, bias=True),
        "features.10": _convolution(256, 3, 256, bias=True),
        "classifier.1": _dense(256 * 6 * 6, 4096),
        "classifier.4": _dense(4096, 4096),
        "classifier.6": _dense(4096, 1000),
    }
    return _compared(build, layers.items(), 61_100_840)


def _vgg_layers(convolutions: Sequence[int], norm: bool) -> Iterator[tuple[str, int]]:
    index, inputs = 0, 3
    for width, count in zip((64, 128, 256, 512, 512), convolutions, strict=True):
        for _ in range(count):
            yield f"features.{index}", _convolution(width, 3, inputs, bias=True)
            if norm:
                yield f"features.{index + 1}", _norm(width)
            index, inputs = index + (3 if norm else 2), width  # with its rectifier
        index += 1  # the pooling
    yield "classifier.0", _dense(512 * 7 * 7, 4096)
    yield "classifier.3", _dense(4096, 4096)
    yield "classifier.6", _dense(4096, 1000)


_VGG = (models.vgg11, models.vgg13, models.vgg16, models.vgg19)
_VGG_BN = (models.vgg11_bn, models.vgg13_bn, models.vgg16_bn, models.vgg19_bn)


@entry(
    "convnets/vgg",
    "VGG-11 to VGG-19",
    r"\sum_{b=1}^{5} \sum_{i=1}^{n_b} \left( 9\, C_{b,i-1} + 1 \right) C_b + \text{dense}: \quad "
    r"\text{VGG-16 } 138{,}357{,}544 \text{ parameters}",
    code=(*_VGG, *_VGG_BN),
    wrong=(
        *(partial(build, batch_norm=True) for build in _VGG),
        *(partial(build, batch_norm=False) for build in _VGG_BN),
    ),
    tolerance=0.0,
)
def _vgg(*builders: Code) -> float:
    depths = [(1, 1, 2, 2, 2), (2, 2, 2, 2, 2), (2, 2, 3, 3, 3), (2, 2, 4, 4, 4)]
    layers = [_vgg_layers(depth, norm) for norm in (False, True) for depth in depths]
    plain = (132_863_336, 133_047_848, 138_357_544, 143_667_240)
    normed = (132_868_840, 133_053_736, 138_365_992, 143_678_248)
    return worst(*map(_compared, builders, layers, plain + normed))


# GoogLeNet ------------------------------------------------------------------------------------

# Channels in and of the four branches, where two have a 1×1 first.
_INCEPTIONS = {
    "3a": (192, 64, (96, 128), (16, 32), 32),
    "3b": (256, 128, (128, 192), (32, 96), 64),
    "4a": (480, 192, (96, 208), (16, 48), 64),
    "4b": (512, 160, (112, 224), (24, 64), 64),
    "4c": (512, 128, (128, 256), (24, 64), 64),
    "4d": (512, 112, (144, 288), (32, 64), 64),
    "4e": (528, 256, (160, 320), (32, 128), 128),
    "5a": (832, 256, (160, 320), (32, 128), 128),
    "5b": (832, 384, (192, 384), (48, 128), 128),
}


def _normed(name: str, filters: int, kernel: int, channels: int) -> Iterator[tuple[str, int]]:
    yield f"{name}.conv", _convolution(filters, kernel, channels)
    yield f"{name}.bn", _norm(filters)


def _googlenet_layers(auxiliary: bool) -> Iterator[tuple[str, int]]:
    yield from _normed("conv1", 64, 7, 3)
    yield from _normed("conv2", 64, 1, 64)
    yield from _normed("conv3", 192, 3, 64)
    for place, (inputs, one, three, five, pooled) in _INCEPTIONS.items():
        name = f"inception{place}"
        yield from _normed(f"{name}.branch1", one, 1, inputs)
        for branch, (reduced, outputs) in ((2, three), (3, five)):
            yield from _normed(f"{name}.branch{branch}.0", reduced, 1, inputs)
            yield from _normed(f"{name}.branch{branch}.1", outputs, 3, reduced)
        yield from _normed(f"{name}.branch4.1", pooled, 1, inputs)
    if auxiliary:
        for name, inputs in (("aux1", 512), ("aux2", 528)):
            yield from _normed(f"{name}.conv", 128, 1, inputs)
            yield f"{name}.fc1", _dense(128 * 4 * 4, 1024)
            yield f"{name}.fc2", _dense(1024, 1000)
    yield "fc", _dense(1024, 1000)


def _with_real_fives(**options: Any) -> nn.Module:
    """The branch that the paper has, of 5×5."""
    net = models.googlenet(**options)
    for module in net.modules():
        if isinstance(module, Inception):
            last: Any = module.branch3[1]
            last.conv = nn.Conv2d(last.conv.in_channels, last.conv.out_channels, 5, padding=2, bias=False)
    return net


@entry(
    "convnets/googlenet",
    "GoogLeNet",
    r"[\,f_{1}(x), \; f_{3}(f_1(x)), \; f_{3}(f_1(x)), \; f_{1}(\max\nolimits_3 x)\,]: \quad "
    r"6{,}624{,}904 \text{ parameters, } 13{,}004{,}888 \text{ with auxiliary heads}",
    code=models.googlenet,
    wrong=_with_real_fives,
    tolerance=0.0,
)
def _googlenet(build: Code) -> float:
    return worst(
        _compared(build, _googlenet_layers(auxiliary=False), 6_624_904, aux_logits=False),
        _compared(build, _googlenet_layers(auxiliary=True), 13_004_888),
    )


# Residual networks ----------------------------------------------------------------------------


def _resnet_layers(
    blocks: Sequence[int],
    *,
    expansion: int,
    groups: int = 1,
    per_group: int = 64,
    planes: int = 64,
    stem: int = 7,
    projections: bool = True,
    classes: int = 1000,
) -> Iterator[tuple[str, int]]:
    yield "conv1", _convolution(planes, stem, 3)
    yield "bn1", _norm(planes)
    inputs = planes
    for stage, count in enumerate(blocks):
        outputs = planes * 2**stage * expansion
        inner = planes * 2**stage * per_group // 64 * groups
        for block in range(count):
            convolutions = [(outputs, 3, inputs, 1), (outputs, 3, outputs, 1)]
            if expansion == 4:
                convolutions = [(inner, 1, inputs, 1), (inner, 3, inner, groups), (outputs, 1, inner, 1)]
            name = f"layer{stage + 1}.{block}"
            for number, (filters, kernel, channels, parts) in enumerate(convolutions, start=1):
                yield f"{name}.conv{number}", _convolution(filters, kernel, channels, parts)
                yield f"{name}.bn{number}", _norm(filters)
            if inputs != outputs and projections:
                yield f"{name}.downsample.0", _convolution(outputs, 1, inputs)
                yield f"{name}.downsample.1", _norm(outputs)
            inputs = outputs
    yield "fc", _dense(inputs, classes)


_RESNETS = (models.resnet18, models.resnet34, models.resnet50, models.resnet101, models.resnet152)
_50, _101, _152 = (3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3)


@entry(
    "convnets/resnet",
    "ResNet-18 to ResNet-152",
    r"h^l = \operatorname{relu}\left( P h^{l-1} + f(h^{l-1}) \right), \quad P = I \text{ or a 1×1 "
    r"projection}: \quad \text{ResNet-50 } 25{,}557{,}032 \text{ parameters}",
    code=_RESNETS,
    wrong=tuple(partial(build, shortcut="pad") for build in _RESNETS),
    tolerance=0.0,
)
def _resnet(*builders: Code) -> float:
    basic = [_resnet_layers(blocks, expansion=1) for blocks in ((2, 2, 2, 2), (3, 4, 6, 3))]
    bottleneck = [_resnet_layers(blocks, expansion=4) for blocks in (_50, _101, _152)]
    published = (11_689_512, 21_797_672, 25_557_032, 44_549_160, 60_192_808)
    return worst(*map(_compared, builders, basic + bottleneck, published))


def _sum_of_paths(block: Any, x: Tensor, groups: int) -> Tensor:
    """Each path by itself: 1×1 to its own few channels, 3×3 among these, 1×1 back; then their sum."""
    scale = 1 / (1 + block.bn1.eps) ** 0.5  # of a batch norm that has seen nothing
    weights = [layer.weight for layer in (block.conv1, block.conv2, block.conv3)]
    paths = zip(weights[0].chunk(groups), weights[1].chunk(groups), weights[2].chunk(groups, 1), strict=True)
    total = torch.zeros((), dtype=x.dtype)
    for enter, inner, leave in paths:
        path = (functional.conv2d(x, enter) * scale).relu()
        path = (functional.conv2d(path, inner, padding=1) * scale).relu()
        total = total + functional.conv2d(path, leave) * scale
    return total


_RESNEXTS = (models.resnext50_32x4d, models.resnext101_32x8d, models.resnext101_64x4d)


@entry(
    "convnets/resnext",
    "ResNeXt-50 and ResNeXt-101",
    r"f(h) = \sum_{g=1}^{G} T_g(h), \quad \text{a 3×3 in } G \text{ groups: } \frac{9 C^2}{G} "
    r"\text{ weights}; \quad \text{32×4d: } 25{,}028{,}904 \text{ parameters}",
    code=_RESNEXTS,
    # One group as wide as all of them together.
    wrong=tuple(
        partial(build, groups=1, width_per_group=width)
        for build, width in zip(_RESNEXTS, (128, 256, 256), strict=True)
    ),
    tolerance=1e-12,
)
def _resnext(*builders: Code) -> float:
    cases = [(_50, 32, 4, 25_028_904), (_101, 32, 8, 88_791_336), (_101, 64, 4, 83_455_272)]
    errors = []
    for build, (blocks, groups, width, published) in zip(builders, cases, strict=True):
        layers = _resnet_layers(blocks, expansion=4, groups=groups, per_group=width)
        errors.append(_compared(build, layers, published))
        block = build(layers=(1,), width=0.125, small=True).double().eval().layer1[0]
        x = torch.randn(1, block.conv1.in_channels, 4, 4, dtype=torch.float64)
        errors.append(require(block.conv2.groups == groups))
        errors.append(gap(block.residual(x), _sum_of_paths(block, x, block.conv2.groups)))
    return worst(*errors)


_CIFAR = (models.resnet20, models.resnet32, models.resnet44, models.resnet56)


@entry(
    "convnets/cifar-resnet",
    "ResNet-20 to ResNet-56 for small images",
    r"\text{depth } 6n + 2: \; n \text{ blocks of 16, 32 and 64 channels; skips } [\,x_{::2,::2}, 0\,]: "
    r"\quad 0.27, 0.46, 0.66, 0.85 \text{ million parameters}",
    code=_CIFAR,
    wrong=tuple(partial(build, shortcut="projection") for build in _CIFAR),
    tolerance=0.0,
)
def _cifar_resnet(*builders: Code) -> float:
    errors = []
    for build, depth, published in zip(builders, (20, 32, 44, 56), (0.27, 0.46, 0.66, 0.85), strict=True):
        blocks = ((depth - 2) // 6,) * 3
        layers = dict(_resnet_layers(blocks, expansion=1, planes=16, stem=3, projections=False, classes=10))
        total = sum(layers.values())
        errors += [_compared(build, layers.items(), total), require(round(total / 1e6, 2) == published)]
    return worst(*errors)


# DenseNet -------------------------------------------------------------------------------------


def _densenet_layers(blocks: Sequence[int], growth: int = 32) -> Iterator[tuple[str, int]]:
    yield "features.conv0", _convolution(64, 7, 3)
    yield "features.norm0", _norm(64)
    width = 64
    for block, count in enumerate(blocks, start=1):
        for layer in range(1, count + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            yield f"{name}.norm1", _norm(width)
            yield f"{name}.conv1", _convolution(4 * growth, 1, width)
            yield f"{name}.norm2", _norm(4 * growth)
            yield f"{name}.conv2", _convolution(growth, 3, 4 * growth)
            width += growth
        if block < len(blocks):
            yield f"features.transition{block}.norm", _norm(width)
            yield f"features.transition{block}.conv", _convolution(width // 2, 1, width)
            width //= 2
    yield "features.norm5", _norm(width)
    yield "classifier", _dense(width, 1000)


_DENSENETS = (models.densenet121, models.densenet169, models.densenet201)


@entry(
    "convnets/densenet",
    "DenseNet-121 to DenseNet-201",
    r"x_l = f_l([x_0, x_1, \ldots, x_{l-1}]), \quad C_l = C_0 + l\,k: \quad "
    r"\text{DenseNet-121 } 7{,}978{,}856 \text{ parameters}",
    code=_DENSENETS,
    wrong=tuple(partial(build, bn_size=2) for build in _DENSENETS),
    tolerance=0.0,
)
def _densenet(*builders: Code) -> float:
    layers = map(_densenet_layers, ((6, 12, 24, 16), (6, 12, 32, 32), (6, 12, 48, 32)))
    return worst(*map(_compared, builders, layers, (7_978_856, 14_149_480, 20_013_928)))


# The derivative of a residual block -----------------------------------------------------------


class _Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def _residual_by_hand(block: Any, x: Tensor) -> Tensor:
    """f from the block's weights: convolutions and norms in turn, a rectifier between them."""
    convolutions = [module for module in block.children() if isinstance(module, nn.Conv2d)]
    norms: list[Any] = [module for module in block.children() if isinstance(module, nn.BatchNorm2d)]
    for index, (layer, norm) in enumerate(zip(convolutions, norms, strict=True)):
        x = functional.conv2d(x.relu() if index else x, layer.weight, None, 1, layer.padding, 1, layer.groups)
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        x = (x - norm.running_mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]
    return x


@entry(
    "convnets/residual",
    "Derivative of a residual block",
    r"h^l = h^{l-1} + f(h^{l-1}) \;\Rightarrow\; \frac{\partial h^l}{\partial h^{l-1}} = "
    r"I + \frac{\partial f}{\partial h}",
    code=(BasicBlock, Bottleneck),
    # Without the way around f, the derivative is that of f alone.
    wrong=(
        lambda *sizes, **options: BasicBlock(*sizes, downsample=_Nothing(), **options),
        lambda *sizes, **options: Bottleneck(*sizes, downsample=_Nothing(), **options),
    ),
    tolerance=1e-11,
)
def _residual(basic: Code, bottleneck: Code) -> float:
    errors = []
    identity = torch.eye(36, dtype=torch.float64)
    for block in (basic(4, 4), bottleneck(4, 6, 4, groups=2)):
        block.double().eval()
        for tensor in (*block.parameters(), *(b for b in block.buffers() if b.is_floating_point())):
            nn.init.uniform_(tensor, 0.1, 0.9)
        # Far on the positive side the rectifier after the sum is open everywhere; near 0 it is D, of 0 and 1.
        for centre in (50.0, 0.0):
            x = torch.randn(1, 4, 3, 3, dtype=torch.float64) + centre
            whole = jacobian(block, x).reshape(36, 36)
            inner = jacobian(partial(_residual_by_hand, block), x).reshape(36, 36)
            out = (x + _residual_by_hand(block, x)).flatten()
            is_open = (out > 0).double()[:, None]
            errors.append(gap(whole, is_open * (identity + inner)))
            errors.append(gap(block(x).flatten(), out.relu()))
            errors.append(require(bool(is_open.all()) or centre == 0.0))
        # Without autograd: where all rectifiers are open the block is linear, a difference its derivative.
        x, direction = x + 50, torch.randn_like(x)
        slope = (block(x + direction) - block(x - direction)) / 2
        inner = jacobian(partial(_residual_by_hand, block), x).reshape(36, 36)
        errors.append(gap(slope.flatten(), direction.flatten() + inner @ direction.flatten()))
    return worst(*errors)
