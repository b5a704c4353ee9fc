"""Chapter 12: what the networks compute, from nothing but the published names of their weights.

Counts of parameters say nothing of strides, poolings and the order of layers. Here every family is written
out, one operation of torch.nn.functional after the other, with weights by torchvision's names, and must give
the same logits, in float64 and on images whose sides no stride divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire import models
from quire.sheet.registry import entry, gap, require, worst

Code = Callable[..., Any]
Formula = Callable[["_Weights", Tensor], Tensor]

SIZE = (2, 3, 79, 66)
"""79 rows are such that every pooling of GoogLeNet, which rounds up, stands over the edge."""


class _Weights:
    """The tensors of a network by name, and the layers that can be made from them."""

    def __init__(self, state: dict[str, Tensor], eps: float = 1e-5) -> None:
        self.state, self.eps = state, eps

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def conv(self, name: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        weight = self.state[f"{name}.weight"]
        groups = x.shape[1] // weight.shape[1]
        return F.conv2d(x, weight, self.state.get(f"{name}.bias"), stride, padding, groups=groups)

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale, shift, mean, variance = (
            self.state[f"{name}.{part}"][:, None, None]
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / (variance + self.eps).sqrt() * scale + shift

    def dense(self, name: str, x: Tensor) -> Tensor:
        return x @ self.state[f"{name}.weight"].mT + self.state[f"{name}.bias"]


# The networks, written out --------------------------------------------------------------------


def _classified(w: _Weights, x: Tensor, side: int, names: Sequence[int]) -> Tensor:
    """Three dense layers over side×side averages, a rectifier after the first two."""
    z = F.adaptive_avg_pool2d(x, side).flatten(1)
    first, second, last = (f"classifier.{index}" for index in names)
    return w.dense(last, w.dense(second, w.dense(first, z).relu()).relu())


def _alexnet(w: _Weights, x: Tensor) -> Tensor:
    x = F.max_pool2d(w.conv("features.0", x, 4, 2).relu(), 3, 2)
    x = F.max_pool2d(w.conv("features.3", x, 1, 2).relu(), 3, 2)
    for index in (6, 8, 10):
        x = w.conv(f"features.{index}", x, 1, 1).relu()
    return _classified(w, F.max_pool2d(x, 3, 2), 6, (1, 4, 6))


def _vgg11(w: _Weights, x: Tensor) -> Tensor:
    normed, index = "features.1.weight" in w, 0
    for count in (1, 1, 2, 2, 2):
        for _ in range(count):
            x = w.conv(f"features.{index}", x, 1, 1)
            x = (w.norm(f"features.{index + 1}", x) if normed else x).relu()
            index += 3 if normed else 2
        x, index = F.max_pool2d(x, 2), index + 1
    return _classified(w, x, 7, (0, 3, 6))


def _googlenet(w: _Weights, x: Tensor) -> Tensor:
    def layer(name: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        return w.norm(f"{name}.bn", w.conv(f"{name}.conv", x, stride, padding)).relu()

    def pool(x: Tensor, kernel: int) -> Tensor:
        return F.max_pool2d(x, kernel, 2, ceil_mode=True)

    x = pool(layer("conv1", x, 2, 3), 3)
    x = pool(layer("conv3", layer("conv2", x), 1, 1), 3)
    for block in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        name = f"inception{block}"
        if block in ("4a", "5a"):
            x = pool(x, 3 if block == "4a" else 2)
        branches = [
            layer(f"{name}.branch1", x),
            layer(f"{name}.branch2.1", layer(f"{name}.branch2.0", x), 1, 1),
            layer(f"{name}.branch3.1", layer(f"{name}.branch3.0", x), 1, 1),
            layer(f"{name}.branch4.1", F.max_pool2d(x, 3, 1, 1)),
        ]
        x = torch.cat(branches, 1)
    return w.dense("fc", x.mean((2, 3)))


def _resnet(w: _Weights, x: Tensor) -> Tensor:
    """Of 7×7 and a pooling, or of 3×3 for small images; the stride of a bottleneck is in its 3×3."""
    stem = w.state["conv1.weight"].shape[-1]
    x = w.norm("bn1", w.conv("conv1", x, stem // 3, stem // 2)).relu()
    x = F.max_pool2d(x, 3, 2, 1) if stem == 7 else x
    for name, first in _blocks(w):
        stride = 2 if first and not name.startswith("layer1.") else 1
        names = [f"{name}.conv{i}" for i in (1, 2, 3) if f"{name}.conv{i}.weight" in w]
        kernels = [w.state[f"{one}.weight"].shape[-1] for one in names]
        inner = x
        for i, (one, kernel) in enumerate(zip(names, kernels, strict=True)):
            step = stride if i == kernels.index(3) else 1
            inner = w.conv(one, inner.relu() if i else inner, step, kernel // 2)
            inner = w.norm(f"{name}.bn{i + 1}", inner)
        if f"{name}.downsample.0.weight" in w:
            skip = w.norm(f"{name}.downsample.1", w.conv(f"{name}.downsample.0", x, stride))
        else:
            skip = torch.zeros_like(inner)
            skip[:, : x.shape[1]] = x[:, :, ::stride, ::stride]
        x = (skip + inner).relu()
    return w.dense("fc", x.mean((2, 3)))


def _blocks(w: _Weights) -> Iterator[tuple[str, bool]]:
    """Names of the blocks in order, and whether each is the first of its stage."""
    stage = 1
    while f"layer{stage}.0.conv1.weight" in w:
        block = 0
        while f"layer{stage}.{block}.conv1.weight" in w:
            yield f"layer{stage}.{block}", block == 0
            block += 1
        stage += 1


def _densenet(w: _Weights, x: Tensor) -> Tensor:
    x = w.norm("features.norm0", w.conv("features.conv0", x, 2, 3)).relu()
    x, block = F.max_pool2d(x, 3, 2, 1), 1
    while f"features.denseblock{block}.denselayer1.conv1.weight" in w:
        layer = 1
        while f"features.denseblock{block}.denselayer{layer}.conv1.weight" in w:
            name = f"features.denseblock{block}.denselayer{layer}"
            inner = w.conv(f"{name}.conv1", w.norm(f"{name}.norm1", x).relu())
            added = w.conv(f"{name}.conv2", w.norm(f"{name}.norm2", inner).relu(), 1, 1)
            x, layer = torch.cat([x, added], 1), layer + 1
        name = f"features.transition{block}"
        if f"{name}.conv.weight" in w:
            x = F.avg_pool2d(w.conv(f"{name}.conv", w.norm(f"{name}.norm", x).relu()), 2)
        block += 1
    return w.dense("classifier", w.norm("features.norm5", x).relu().mean((2, 3)))


# Wrong versions: the same weights, otherwise put together -------------------------------------


def _changed(build: Code, change: Callable[[nn.Module], None]) -> Code:
    def changed(**options: Any) -> nn.Module:
        net: nn.Module = build(**options)
        for module in net.modules():
            change(module)
        return net

    return changed


def _padded(module: nn.Module) -> None:
    """Pools from one pixel before the edge on."""
    if isinstance(module, nn.MaxPool2d):
        module.padding = 1


def _floor(module: nn.Module) -> None:
    """Leaves out what stands over the edge."""
    if isinstance(module, nn.MaxPool2d):
        module.ceil_mode = False


def _stride_first(module: nn.Module) -> None:
    """The stride in the first convolution of a bottleneck, as in the paper."""
    first, second = getattr(module, "conv1", None), getattr(module, "conv2", None)
    if isinstance(first, nn.Conv2d) and isinstance(second, nn.Conv2d) and hasattr(module, "conv3"):
        first.stride, second.stride = second.stride, first.stride


def _stride_last(module: nn.Module) -> None:
    """The stride in the second convolution of a basic block."""
    first, second = getattr(module, "conv1", None), getattr(module, "conv2", None)
    if isinstance(first, nn.Conv2d) and isinstance(second, nn.Conv2d):
        first.stride, second.stride = second.stride, first.stride


def _largest(module: nn.Module) -> None:
    """A maximum between the blocks of a DenseNet instead of the mean."""
    if isinstance(module, nn.Sequential) and hasattr(module, "pool"):
        module.pool = nn.MaxPool2d(2)


_NETWORKS: tuple[tuple[Code, Formula, dict[str, Any], Callable[[nn.Module], None]], ...] = (
    (models.alexnet, _alexnet, {}, _padded),
    (models.vgg11, _vgg11, {}, _padded),
    (models.vgg11_bn, _vgg11, {}, _padded),
    (models.googlenet, _googlenet, {}, _floor),
    (models.resnet18, _resnet, {"layers": (2, 1, 2)}, _stride_last),
    (models.resnet50, _resnet, {"layers": (1, 2, 2)}, _stride_first),
    (models.resnext50_32x4d, _resnet, {"layers": (1, 2)}, _stride_first),
    (models.resnet20, _resnet, {}, _stride_last),
    (models.densenet121, _densenet, {"block_config": (2, 3, 2)}, _largest),
)


@entry(
    "convnets/wiring",
    "What the networks compute from published weights",
    r"f(x; \theta) = \text{the same logits from } \{\text{name} \mapsto \theta_{\text{name}}\} "
    r"\text{ by } x * W,\; \gamma \tfrac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta,\; \max(0, x),\; "
    r"\max\nolimits_K x,\; \tfrac{1}{|K|} \textstyle\sum_K x",
    code=tuple(build for build, *_ in _NETWORKS),
    wrong=tuple(_changed(build, change) for build, _, _, change in _NETWORKS),
    tolerance=1e-10,
)
@torch.no_grad()
def _wiring(*builders: Code) -> float:
    errors = []
    x = torch.randn(SIZE, dtype=torch.float64)
    for build, (_, formula, options, _) in zip(builders, _NETWORKS, strict=True):
        net = build(num_classes=7, width=0.125, **options).double().eval()
        for name, tensor in net.state_dict().items():
            if tensor.dim() > 1:
                nn.init.kaiming_normal_(tensor)
            elif name.endswith("running_var") or name.endswith("weight"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point():
                tensor.normal_(0, 0.3)
        logits = net(x)
        wanted = formula(_Weights(net.state_dict(), 1e-3 if formula is _googlenet else 1e-5), x)
        # Images must matter: constant logits would hide what lies before the biases.
        errors += [gap(logits, wanted), require((logits[0] - logits[1]).abs().max() > 1e-3)]
    return worst(*errors)
