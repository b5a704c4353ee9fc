"""LeNet-5 (LeCun et al. 1998): two convolutions, two poolings, three dense layers.

    1×32×32 → C1 6@28×28 → S2 6@14×14 → C3 16@10×10 → S4 16@5×5 → C5 120 → F6 84 → logits

In today's form: rectifiers instead of scaled tanh, max pooling without weights, every map of C3 reads every
map of S2, and a linear output instead of distances to drawn digits. 61,706 parameters for ten classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from quire.errors import InputError
from quire.models.registry import Example, model
from quire.models.vision import ConvNet, VisionConfig, builder


@dataclass(frozen=True)
class LeNetConfig(VisionConfig):
    num_classes: int = 10
    in_channels: int = 1


class Enlarge(nn.Module):
    """Repeats the border of images, equally on both sides, up to `side` pixels."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (self.side - size for size in x.shape[2:])
        if min(rows, columns) < 0:
            raise InputError(
                f"images of {x.shape[2]}×{x.shape[3]} pixels",
                expected=f"at most {self.side}×{self.side}",
                fix=f"bring the images to {self.side} pixels a side",
            )
        if rows == columns == 0:
            return x
        # The border of a drawing is its background, whatever number that is by now.
        sides = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
        return functional.pad(x, sides, mode="replicate")


@final
@model("lenet", LeNetConfig, example=Example({"small": True, "num_classes": 3}, (1, 8, 8)))
class LeNet(ConvNet):
    """Images of 20 to 32 pixels, enlarged to 32 by their border.

    The small variant takes images of 8 pixels and more: its convolutions keep the size, it leaves S2 out, and
    C5 reads 4×4 places.
    """

    def __init__(self, config: LeNetConfig) -> None:
        super().__init__(config)
        c1, c3, c5, f6 = (config.channels(count) for count in (6, 16, 120, 84))
        padding, side = (2, 4) if config.small else (0, 5)
        self.c1 = nn.Conv2d(config.in_channels, c1, 5, padding=padding)
        self.c3 = nn.Conv2d(c1, c3, 5, padding=padding)
        self.s4 = nn.MaxPool2d(2)
        self.c5 = nn.Linear(c3 * side**2, c5)
        self.f6 = nn.Linear(c5, f6)
        self.output = nn.Linear(f6, config.num_classes)
        self.relu, self.flatten = nn.ReLU(inplace=True), nn.Flatten()
        dense = ("flatten", "c5", "relu", "f6", "relu", "output")
        if config.small:
            self.pool = nn.AdaptiveAvgPool2d(side)
            self.sections = (("c1", "relu", "c3", "relu"), ("s4",))
            self.head = ("pool", *dense)
            self.smallest = 8
        else:
            self.enlarge = Enlarge(32)
            self.s2 = nn.MaxPool2d(2)
            self.sections = (("enlarge", "c1", "relu"), ("s2", "c3", "relu"), ("s4",))
            self.head = dense
            self.smallest = 20


lenet5 = builder("lenet5", LeNet, LeNetConfig(), "LeNet-5 for 32×32 images, 61,706 parameters.")
