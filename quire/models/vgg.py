"""VGG (Simonyan and Zisserman 2014): blocks of 3×3 convolutions, a pooling after each, three dense layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from torch import nn

from quire.errors import InputError
from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model
from quire.models.vision import ConvNet, VisionConfig, builder, check_probability, cut_at_poolings, draw_

WIDTHS = (64, 128, 256, 512, 512)


@dataclass(frozen=True)
class VGGConfig(VisionConfig):
    convolutions: tuple[int, int, int, int, int] = (2, 2, 3, 3, 3)
    """How many convolutions each of the five blocks has."""
    batch_norm: bool = False
    dropout: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.convolutions) != len(WIDTHS):
            raise InputError(
                f"convolutions is {self.convolutions!r}",
                expected="one number for each of five blocks",
                fix="write convolutions=(1, 1, 2, 2, 2)",
            )
        for count in self.convolutions:
            check_positive_integer("a number in convolutions", count)
        check_probability("dropout", self.dropout)


@final
@model(
    "vgg",
    VGGConfig,
    example=Example(
        {"small": True, "width": 0.125, "num_classes": 3, "convolutions": (1, 1, 1, 1, 1)}, (3, 8, 8)
    ),
)
class VGG(ConvNet):
    """Images of at least 32 pixels. The small variant leaves out the first two poolings, and its dense layers
    have 512 units that read one place."""

    def __init__(self, config: VGGConfig) -> None:
        super().__init__(config)
        layers: list[nn.Module] = []
        inputs = config.in_channels
        for block, (width, count) in enumerate(zip(WIDTHS, config.convolutions, strict=True)):
            outputs = config.channels(width)
            for _ in range(count):
                layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
                if config.batch_norm:
                    layers.append(nn.BatchNorm2d(outputs))
                layers.append(nn.ReLU(inplace=True))
                inputs = outputs
            # A layer that does nothing, where a pooling is left out, keeps the numbers of those after it.
            layers.append(nn.Identity() if config.small and block < 2 else nn.MaxPool2d(2))
        units = config.channels(512 if config.small else 4096)
        side = 1 if config.small else 7
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Linear(inputs * side**2, units),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(units, units),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(units, config.num_classes),
        )
        self.sections = cut_at_poolings("features", self.features)
        self.head = ("avgpool", "flatten", *(f"classifier.{index}" for index in range(7)))
        self.smallest = 8 if config.small else 32
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                draw_(module.weight, nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                # 0.01 is right for 4096 inputs; through few it would let almost no gradient pass.
                std = math.sqrt(2 / module.in_features) if config.small else 0.01
                draw_(module.weight, nn.init.normal_, std=std)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


vgg11 = builder("vgg11", VGG, VGGConfig(convolutions=(1, 1, 2, 2, 2)), "VGG-11, 132.9 million parameters.")
vgg13 = builder("vgg13", VGG, VGGConfig(convolutions=(2, 2, 2, 2, 2)), "VGG-13, 133.0 million parameters.")
vgg16 = builder("vgg16", VGG, VGGConfig(convolutions=(2, 2, 3, 3, 3)), "VGG-16, 138.4 million parameters.")
vgg19 = builder("vgg19", VGG, VGGConfig(convolutions=(2, 2, 4, 4, 4)), "VGG-19, 143.7 million parameters.")
vgg11_bn = builder(
    "vgg11_bn", VGG, VGGConfig(convolutions=(1, 1, 2, 2, 2), batch_norm=True), "VGG-11 with batch norm."
)
vgg13_bn = builder(
    "vgg13_bn", VGG, VGGConfig(convolutions=(2, 2, 2, 2, 2), batch_norm=True), "VGG-13 with batch norm."
)
vgg16_bn = builder(
    "vgg16_bn", VGG, VGGConfig(convolutions=(2, 2, 3, 3, 3), batch_norm=True), "VGG-16 with batch norm."
)
vgg19_bn = builder(
    "vgg19_bn", VGG, VGGConfig(convolutions=(2, 2, 4, 4, 4), batch_norm=True), "VGG-19 with batch norm."
)
