"""GoogLeNet (Szegedy et al. 2014) with batch norm, as torchvision has it.

Two things differ from the paper there and hence here: the branch that is called 5×5 is 3×3, and batch norm
(with eps 0.001) stands after every convolution.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.models.registry import Example, model
from quire.models.vision import ConvNet, VisionConfig, builder, check_probability, draw_, named

# Channels of the 1×1 branch, of the 3×3 branch (reduced, then out), of the 5×5 branch, of the pooled branch.
INCEPTIONS = {
    "inception3a": (64, 96, 128, 16, 32, 32),
    "inception3b": (128, 128, 192, 32, 96, 64),
    "inception4a": (192, 96, 208, 16, 48, 64),
    "inception4b": (160, 112, 224, 24, 64, 64),
    "inception4c": (128, 128, 256, 24, 64, 64),
    "inception4d": (112, 144, 288, 32, 64, 64),
    "inception4e": (256, 160, 320, 32, 128, 128),
    "inception5a": (256, 160, 320, 32, 128, 128),
    "inception5b": (384, 192, 384, 48, 128, 128),
}
AUXILIARY = {"inception4a": "aux1", "inception4d": "aux2"}
"""The blocks that an auxiliary head reads."""


@dataclass(frozen=True)
class GoogLeNetConfig(VisionConfig):
    aux_logits: bool = True
    """With two more classifiers halfway up, which take part in training only."""
    transform_input: bool = False
    """Take images standardised by the colours of ImageNet and bring them to mean and deviation ½, as the
    published weights were trained."""
    dropout: float = 0.2
    dropout_aux: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("dropout", self.dropout)
        check_probability("dropout_aux", self.dropout_aux)
        if self.transform_input and self.in_channels != 3:
            raise InputError(
                f"transform_input with in_channels={self.in_channels}",
                expected="three channels: red, green and blue",
                fix="leave transform_input out",
            )


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Sequential:
    """Convolution, batch norm, rectifier."""
    return named(
        conv=nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        bn=nn.BatchNorm2d(outputs, eps=0.001),
        relu=nn.ReLU(inplace=True),
    )


@final
class Inception(nn.Module):
    """Four branches that look through windows of 1, 3, "5" and a pooled 3, joined along the channels."""

    def __init__(
        self, inputs: int, one: int, reduced3: int, three: int, reduced5: int, five: int, pooled: int
    ) -> None:
        super().__init__()
        self.outputs = one + three + five + pooled
        self.branch1 = convolution(inputs, one, 1)
        self.branch2 = nn.Sequential(convolution(inputs, reduced3, 1), convolution(reduced3, three, 3, 1, 1))
        self.branch3 = nn.Sequential(convolution(inputs, reduced5, 1), convolution(reduced5, five, 3, 1, 1))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), convolution(inputs, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], dim=1)


class Recolour(nn.Module):
    """From (x − m)/s with the colours' means m and deviations s of ImageNet to (x − ½)/½."""

    factor: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        # Not part of the weights: torchvision's files do not have them.
        self.register_buffer("factor", (deviation / 0.5).reshape(3, 1, 1), persistent=False)
        self.register_buffer("shift", ((mean - 0.5) / 0.5).reshape(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.shift


@final
@model(
    "googlenet",
    GoogLeNetConfig,
    example=Example({"small": True, "width": 0.125, "num_classes": 3}, (3, 8, 8)),
)
class GoogLeNet(ConvNet):
    """Images of at least 15 pixels. The small variant begins with 3×3 at stride 1 and without pooling.

    In training with auxiliary heads (logits, of the first, of the second); otherwise the logits alone.
    """

    config: GoogLeNetConfig

    def __init__(self, config: GoogLeNetConfig) -> None:
        super().__init__(config)
        width, wider = config.channels(64), config.channels(192)
        if config.transform_input:
            self.transform = Recolour()
        self.conv1 = convolution(config.in_channels, width, *config.stem)
        if not config.small:
            self.maxpool1 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2 = convolution(width, width, 1)
        self.conv3 = convolution(width, wider, 3, 1, 1)
        self.maxpool2 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.maxpool3 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.maxpool4 = nn.MaxPool2d(2, 2, ceil_mode=True)
        inputs = wider
        for name, counts in INCEPTIONS.items():
            block = Inception(inputs, *map(config.channels, counts))
            self.add_module(name, block)
            inputs = block.outputs
            if config.aux_logits and name in AUXILIARY:
                self.add_module(AUXILIARY[name], auxiliary_head(config, inputs))
        self.avgpool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.dropout = nn.Dropout(config.dropout)
        self.fc = nn.Linear(inputs, config.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                draw_(module.weight, nn.init.trunc_normal_, std=0.01)

        entry = ("transform", "conv1") if config.transform_input else ("conv1",)
        third, fourth, fifth = (
            [name for name in INCEPTIONS if f"inception{number}" in name] for number in (3, 4, 5)
        )
        later = ("maxpool2", *third), ("maxpool3", *fourth), ("maxpool4", *fifth)
        first = ("conv2", "conv3")
        self.sections = ((*entry, *first), *later) if config.small else (entry, ("maxpool1", *first), *later)
        self.head = ("avgpool", "flatten", "dropout", "fc")
        self.smallest = 4 if config.small else 15

    @property
    def has_auxiliaries(self) -> bool:
        """Whether training gives more than the logits."""
        return bool(self.config.aux_logits)

    def forward(self, x: Tensor) -> Any:
        if not (self.training and self.config.aux_logits):
            return super().forward(x)
        self._check(x)
        auxiliary = []
        for name in itertools.chain(*self.sections):
            x = self.get_submodule(name)(x)
            if name in AUXILIARY:
                auxiliary.append(self.get_submodule(AUXILIARY[name])(x))
        return (self._follow(self.head, x), *auxiliary)

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        if not self.config.aux_logits:
            return super().parts
        *body, last = super().parts
        auxiliary = ("aux1.conv.", "aux1.fc1.", "aux2.conv.", "aux2.fc1.")
        body = [(*group, *auxiliary) if "inception4d." in group else group for group in body]
        return (*body, ("aux1.fc2.", "aux2.fc2.", *last))


def auxiliary_head(config: GoogLeNetConfig, inputs: int) -> nn.Sequential:
    width, units = config.channels(128), config.channels(1024)
    return named(
        pool=nn.AdaptiveAvgPool2d(4),
        conv=convolution(inputs, width, 1),
        flatten=nn.Flatten(),
        fc1=nn.Linear(width * 4**2, units),
        relu=nn.ReLU(inplace=True),
        dropout=nn.Dropout(config.dropout_aux),
        fc2=nn.Linear(units, config.num_classes),
    )


googlenet = builder(
    "googlenet",
    GoogLeNet,
    GoogLeNetConfig(),
    "GoogLeNet, 6.6 million parameters, and 6.4 million in its auxiliary heads.",
)
