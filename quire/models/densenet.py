"""DenseNet (Huang et al. 2016): every layer of a block reads the outputs of all layers before it.

x_l = f_l([x_0, x_1, …, x_{l−1}]),   f_l = 3×3 ∘ relu ∘ norm ∘ 1×1 ∘ relu ∘ norm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model
from quire.models.vision import Builder, ConvNet, VisionConfig, builder, check_probability, draw_, named
from quire.nn.stem import Stem


@dataclass(frozen=True)
class DenseNetConfig(VisionConfig):
    growth_rate: int = 32
    """Channels that each layer adds."""
    block_config: tuple[int, ...] = (6, 12, 24, 16)
    """How many layers each block has."""
    num_init_features: int = 64
    bn_size: int = 4
    """Channels of a layer's 1×1 convolution, in units of the growth rate."""
    drop_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("growth_rate", "num_init_features", "bn_size"):
            check_positive_integer(name, getattr(self, name))
        for count in self.block_config or (0,):
            check_positive_integer("a number in block_config", count)
        check_probability("drop_rate", self.drop_rate)


class DenseBlock(nn.Sequential):
    """x ← [x, f_l(x)] for each layer in turn."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.cat([x, layer(x)], dim=1)
        return x


def dense_block(inputs: int, layers: int, growth: int, inner: int, drop_rate: float) -> DenseBlock:
    block = DenseBlock()
    for index in range(layers):
        block.add_module(
            f"denselayer{index + 1}",
            named(
                norm1=nn.BatchNorm2d(inputs + index * growth),
                relu1=nn.ReLU(inplace=True),
                conv1=nn.Conv2d(inputs + index * growth, inner, 1, bias=False),
                norm2=nn.BatchNorm2d(inner),
                relu2=nn.ReLU(inplace=True),
                conv2=nn.Conv2d(inner, growth, 3, padding=1, bias=False),
                dropout=nn.Dropout(drop_rate),
            ),
        )
    return block


def transition(inputs: int, outputs: int) -> nn.Sequential:
    """Between two blocks: fewer channels, half the resolution."""
    return named(
        norm=nn.BatchNorm2d(inputs),
        relu=nn.ReLU(inplace=True),
        conv=nn.Conv2d(inputs, outputs, 1, bias=False),
        pool=nn.AvgPool2d(2),
    )


@final
@model(
    "densenet",
    DenseNetConfig,
    example=Example({"small": True, "width": 0.125, "num_classes": 3, "block_config": (2, 2)}, (3, 8, 8)),
)
class DenseNet(ConvNet):
    """Images of at least 29 pixels. The small variant begins with 3×3 at stride 1 and without pooling.

    The stages are the blocks' outputs, before the transition to the next resolution.
    """

    def __init__(self, config: DenseNetConfig) -> None:
        super().__init__(config)
        growth, width = config.channels(config.growth_rate), config.channels(config.num_init_features)
        self.features = named(
            conv0=Stem(config.in_channels, width, *config.stem, bias=False),
            norm0=nn.BatchNorm2d(width),
            relu0=nn.ReLU(inplace=True),
        )
        if not config.small:
            self.features.add_module("pool0", nn.MaxPool2d(3, 2, 1))
        for index, layers in enumerate(config.block_config):
            if index:
                self.features.add_module(f"transition{index}", transition(width, width // 2))
                width //= 2
            block = dense_block(width, layers, growth, config.bn_size * growth, config.drop_rate)
            self.features.add_module(f"denseblock{index + 1}", block)
            width += layers * growth
        self.features.add_module("norm5", nn.BatchNorm2d(width))
        self.relu = nn.ReLU(inplace=True)
        self.avgpool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.classifier = nn.Linear(width, config.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                draw_(module.weight, nn.init.kaiming_normal_)
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # A section begins with each module that shrinks.
        sections: list[tuple[str, ...]] = [()]
        for name, _ in self.features.named_children():
            if name.startswith(("pool", "transition")):
                sections.append(())
            sections[-1] += (f"features.{name}",)
        self.sections = (*sections[:-1], (*sections[-1], "relu"))
        self.head = ("avgpool", "flatten", "classifier")
        coarsest = 2 ** (len(config.block_config) - 1)
        self.smallest = coarsest if config.small else 4 * coarsest - 3


def _densenet(depth: int, millions: float, layers: tuple[int, ...]) -> Builder[DenseNet]:
    summary = f"DenseNet-{depth}, {millions} million parameters."
    return builder(f"densenet{depth}", DenseNet, DenseNetConfig(block_config=layers), summary)


densenet121 = _densenet(121, 8.0, (6, 12, 24, 16))
densenet169 = _densenet(169, 14.1, (6, 12, 32, 32))
densenet201 = _densenet(201, 20.0, (6, 12, 48, 32))
