"""AlexNet in the form of one tower (Krizhevsky 2014): five convolutions, three dense layers with dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn

from quire.models.registry import Example, model
from quire.models.vision import ConvNet, VisionConfig, builder, check_probability, cut_at_poolings


@dataclass(frozen=True)
class AlexNetConfig(VisionConfig):
    dropout: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("dropout", self.dropout)


@final
@model(
    "alexnet", AlexNetConfig, example=Example({"small": True, "width": 0.125, "num_classes": 3}, (3, 8, 8))
)
class AlexNet(ConvNet):
    """Images of at least 63 pixels. The small variant begins with 3×3 at stride 1 instead of 11×11 at stride
    4, its poolings are padded, and its dense layers have 512 units that read one place."""

    def __init__(self, config: AlexNetConfig) -> None:
        super().__init__(config)
        widths = [config.channels(count) for count in (64, 192, 384, 256, 256)]
        units = config.channels(512 if config.small else 4096)
        side = 1 if config.small else 6
        # So that 8×8 pixels become 4×4, 2×2 and 1×1; without padding there would be none left.
        padding = 1 if config.small else 0
        windows = [(3, 1, 1) if config.small else (11, 4, 2), (5, 1, 2), *[(3, 1, 1)] * 3]
        layers: list[nn.Module] = []
        inputs = config.in_channels
        for index, (outputs, window) in enumerate(zip(widths, windows, strict=True)):
            layers += [nn.Conv2d(inputs, outputs, *window), nn.ReLU(inplace=True)]
            if index in (0, 1, 4):
                layers.append(nn.MaxPool2d(3, 2, padding))
            inputs = outputs
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Dropout(config.dropout),
            nn.Linear(inputs * side**2, units),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(units, units),
            nn.ReLU(inplace=True),
            nn.Linear(units, config.num_classes),
        )
        self.sections = cut_at_poolings("features", self.features)
        self.head = ("avgpool", "flatten", *(f"classifier.{index}" for index in range(7)))
        self.smallest = 1 if config.small else 63


alexnet = builder("alexnet", AlexNet, AlexNetConfig(), "AlexNet, 61.1 million parameters.")
