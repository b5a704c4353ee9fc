"""Residual networks: ResNet (He et al. 2015), its small form for CIFAR, and ResNeXt (Xie et al. 2016).

    h^l = relu(h^{l−1} + f(h^{l−1})),   ∂h^l/∂h^{l−1} = I + ∂f/∂h   where the rectifier is open

The stride of a bottleneck is in its 3×3 convolution, as in torchvision, not in the first 1×1 of the paper.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

from torch import Tensor, nn
from torch.nn import functional

from quire.errors import InputError, unknown_name
from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model
from quire.models.vision import Builder, ConvNet, VisionConfig, builder, draw_
from quire.nn.stem import Stem

BlockName = Literal["basic", "bottleneck"]
Shortcut = Literal["projection", "pad"]


class ResidualBlock(nn.Module, ABC):
    """relu(skip(x) + f(x)); the skip is `downsample` where the shape changes, the identity elsewhere."""

    def __init__(self, downsample: nn.Module | None) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    @abstractmethod
    def residual(self, x: Tensor) -> Tensor:
        """f(x), what the block adds."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.residual(x)
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


@final
class BasicBlock(ResidualBlock):
    """Two 3×3 convolutions."""

    def __init__(
        self, inputs: int, outputs: int, *, stride: int = 1, downsample: nn.Module | None = None
    ) -> None:
        super().__init__(downsample)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def residual(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.bn2(self.conv2(x))


@final
class Bottleneck(ResidualBlock):
    """1×1 to `inner` channels, 3×3 in `groups` there, 1×1 back."""

    def __init__(
        self,
        inputs: int,
        inner: int,
        outputs: int,
        *,
        stride: int = 1,
        groups: int = 1,
        downsample: nn.Module | None = None,
    ) -> None:
        super().__init__(downsample)
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)

    def residual(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))


class PadChannels(nn.Module):
    """A skip without weights: every `stride`-th pixel, and zeros in the channels that are new."""

    def __init__(self, new: int, stride: int) -> None:
        super().__init__()
        self.new, self.stride = new, stride

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new))


@dataclass(frozen=True)
class ResNetConfig(VisionConfig):
    block: BlockName = "bottleneck"
    layers: tuple[int, ...] = (3, 4, 6, 3)
    """How many blocks each stage has; from stage to stage the resolution is halved and the width doubled."""
    groups: int = 1
    width_per_group: int = 64
    """Channels of each group of a bottleneck's 3×3 convolution, in the first stage of 64."""
    planes: int = 64
    """Channels of the stem and of the first stage, which a bottleneck expands fourfold."""
    shortcut: Shortcut = "projection"
    """How a skip changes its shape: by a 1×1 convolution, or by leaving out pixels and adding zeros."""
    zero_init_residual: bool = False
    """Begin with blocks that add nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("groups", "width_per_group", "planes"):
            check_positive_integer(name, getattr(self, name))
        for count in self.layers or (0,):
            check_positive_integer("a number in layers", count)
        if self.block not in get_args(BlockName):
            raise unknown_name("block", self.block, get_args(BlockName))
        if self.shortcut not in get_args(Shortcut):
            raise unknown_name("shortcut", self.shortcut, get_args(Shortcut))
        if self.block == "basic" and (self.groups, self.width_per_group) != (1, 64):
            raise InputError(
                f"basic blocks with groups={self.groups} and width_per_group={self.width_per_group}",
                expected="groups=1 and width_per_group=64, as basic blocks have none",
                fix="choose block='bottleneck'",
            )

    def outputs(self, stage: int) -> int:
        """Channels of a stage, counted from 0; those of the stem for −1."""
        if stage < 0:
            return self.channels(self.planes)
        return self.channels(self.planes * 2**stage) * (1 if self.block == "basic" else 4)

    def inner(self, stage: int) -> int:
        """Channels of the 3×3 convolutions of a stage of bottlenecks."""
        of_group = max(self.planes * 2**stage * self.width_per_group // 64, 1)
        return self.channels(of_group * self.groups, multiple=math.lcm(8, self.groups))


@final
@model(
    "resnet",
    ResNetConfig,
    example=Example(
        {"small": True, "planes": 8, "num_classes": 3, "block": "basic", "layers": (1, 1)}, (3, 8, 8)
    ),
)
class ResNet(ConvNet):
    """Images of any size. The small variant begins with 3×3 at stride 1 and without pooling."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        width = config.outputs(-1)
        self.conv1 = Stem(config.in_channels, width, *config.stem, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        if not config.small:
            self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages = range(len(config.layers))
        for stage in stages:
            self.add_module(f"layer{stage + 1}", residual_stage(config, stage))
        self.avgpool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.fc = nn.Linear(config.outputs(stages[-1]), config.num_classes)
        entry = ("conv1", "bn1", "relu")
        first, *later = ((f"layer{stage + 1}",) for stage in stages)
        self.sections = ((*entry, *first), *later) if config.small else (entry, ("maxpool", *first), *later)
        self.head = ("avgpool", "flatten", "fc")
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                draw_(module.weight, nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock) and config.zero_init_residual:
                nn.init.zeros_(module.bn2.weight)
            elif isinstance(module, Bottleneck) and config.zero_init_residual:
                nn.init.zeros_(module.bn3.weight)


def residual_stage(config: ResNetConfig, stage: int) -> nn.Sequential:
    """The blocks of one resolution; those of all stages but the first begin with a stride of 2."""
    inputs, inner, outputs = config.outputs(stage - 1), config.inner(stage), config.outputs(stage)
    blocks: list[nn.Module] = []
    for index in range(config.layers[stage]):
        stride = 2 if stage and not index else 1
        skip = changed_skip(config, inputs, outputs, stride) if stride > 1 or inputs != outputs else None
        if config.block == "basic":
            blocks.append(BasicBlock(inputs, outputs, stride=stride, downsample=skip))
        else:
            blocks.append(
                Bottleneck(inputs, inner, outputs, stride=stride, groups=config.groups, downsample=skip)
            )
        inputs = outputs
    return nn.Sequential(*blocks)


def changed_skip(config: ResNetConfig, inputs: int, outputs: int, stride: int) -> nn.Module:
    if config.shortcut == "pad":
        return PadChannels(outputs - inputs, stride)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


# Builders -------------------------------------------------------------------------------------


def _imagenet(name: str, title: str, millions: float, **config: Any) -> Builder[ResNet]:
    return builder(name, ResNet, ResNetConfig(**config), f"{title}, {millions} million parameters.")


def _cifar(depth: int, thousands: int) -> Builder[ResNet]:
    """Depth 6n + 2: three stages of n blocks, skips without weights, as in the paper's section 4.2."""
    count = (depth - 2) // 6
    config = ResNetConfig(
        num_classes=10, small=True, block="basic", layers=(count,) * 3, planes=16, shortcut="pad"
    )
    summary = f"ResNet-{depth} for 32×32 images such as CIFAR-10's, {thousands} thousand parameters."
    return builder(f"resnet{depth}", ResNet, config, summary)


resnet18 = _imagenet("resnet18", "ResNet-18", 11.7, block="basic", layers=(2, 2, 2, 2))
resnet34 = _imagenet("resnet34", "ResNet-34", 21.8, block="basic", layers=(3, 4, 6, 3))
resnet50 = _imagenet("resnet50", "ResNet-50", 25.6, layers=(3, 4, 6, 3))
resnet101 = _imagenet("resnet101", "ResNet-101", 44.5, layers=(3, 4, 23, 3))
resnet152 = _imagenet("resnet152", "ResNet-152", 60.2, layers=(3, 8, 36, 3))
resnext50_32x4d = _imagenet(
    "resnext50_32x4d", "ResNeXt-50 32×4d", 25.0, layers=(3, 4, 6, 3), groups=32, width_per_group=4
)
resnext101_32x8d = _imagenet(
    "resnext101_32x8d", "ResNeXt-101 32×8d", 88.8, layers=(3, 4, 23, 3), groups=32, width_per_group=8
)
resnext101_64x4d = _imagenet(
    "resnext101_64x4d", "ResNeXt-101 64×4d", 83.5, layers=(3, 4, 23, 3), groups=64, width_per_group=4
)
resnet20, resnet32 = _cifar(20, 270), _cifar(32, 464)
resnet44, resnet56 = _cifar(44, 659), _cifar(56, 853)
