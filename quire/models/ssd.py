"""A single-shot detector on any registered network with `stages`.

N images, C classes of objects, L feature maps (levels), B boxes a cell, A = Σ rows·columns·B default boxes.

    features of the backbone → 1×1 convolutions to one width → a path from coarse to fine → 3×3 heads

The method is SSD's (Liu et al., 2016): every cell of every map holds default boxes of a few shapes and
predicts for each of them the class, background first, and how the object's box differs from it. Small objects
are read from the finest map, which alone has seen too little to name them; the path from coarse to fine (Lin
et al., 2017) adds to each map what the coarser ones know. Batch norms bring all maps to one scale, for which
SSD had an L2 norm on its first map.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.errors import InputError, unknown_name
from quire.functional.detect import default_boxes, default_scales
from quire.models.registry import MODELS, Example, build_model, model

Neck = Literal["none", "top-down"]
NECKS = get_args(Neck)
HEAD_DEVIATION = 0.01


@dataclass(frozen=True)
class SSDConfig:
    backbone: Mapping[str, Any]
    """Description of the network that sees, {"model": NAME, …}; its classifier is left out."""
    num_classes: int = 20
    """Kinds of objects, without the background."""
    in_channels: int = 3
    size: tuple[int, int] = (320, 320)
    """Height and width of the images in pixels."""
    levels: int = 3
    """Feature maps that are read; where the backbone has fewer, convolutions with stride 2 add them."""
    stride: int = 8
    """Pixels between the cells of the finest map; half the side of the smallest object is fine enough."""
    scales: tuple[float, ...] = ()
    """Sides of the default boxes by level, then one more, as shares of the image. None: 0.1 to 0.9."""
    ratios: tuple[float, ...] = (1.0, 2.0, 0.5)
    """Width over height of the boxes in a cell; one more square lies between this scale and the next."""
    neck: Neck = "top-down"
    """top-down: finer maps learn from coarser ones. none: each map stands for itself."""
    width: int = 128
    """Channels of the maps from which boxes are read."""
    prior: float = 0.75
    """Probability of the background before anything is learned; three negatives for each match make it so."""

    def __post_init__(self) -> None:
        # As JSON would give it back, so that equal descriptions are equal.
        object.__setattr__(self, "backbone", _plain(self.backbone))
        numbers = {
            "num_classes": self.num_classes, "in_channels": self.in_channels, "levels": self.levels,
            "stride": self.stride, "width": self.width, "height in size": self.size[0],
            "width in size": self.size[-1],
        }  # fmt: skip
        for name, value in numbers.items():
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}", expected="an integer >= 1")
        if self.neck not in NECKS:
            raise unknown_name("neck", self.neck, NECKS)
        if len(self.scales) not in (0, self.levels + 1):
            raise InputError(
                f"{len(self.scales)} scales for {self.levels} levels",
                expected="one for each level and one more, or none",
                fix="use quire.functional.fit_scales(boxes, levels)",
            )
        if not 0 < self.prior < 1:
            raise InputError(f"prior is {self.prior!r}", expected="a probability in (0, 1)")


@final
@model(
    "ssd",
    SSDConfig,
    example=Example(
        {
            "backbone": {"model": "resnet", "small": True, "planes": 8, "block": "basic", "layers": [1, 1]},
            "num_classes": 2, "size": (16, 24), "levels": 3, "stride": 2, "width": 8,
        },
        (3, 16, 24),
    ),
)  # fmt: skip
class SSD(nn.Module):
    """(N, in_channels, H, W) → logits (N, A, C + 1) and offsets (N, A, 4), in the order of `defaults`."""

    defaults: Tensor
    """(A, 4), corners in shares of the image."""

    def __init__(self, config: SSDConfig) -> None:
        super().__init__()
        self.config = config
        found = examine(config)
        self.first, self._parts = found.first, found.parts
        self.backbone = build_model(_backbone_spec(config))
        leave_out(self.backbone, found.unused)
        width, boxes = config.width, len(config.ratios) + 1
        self.lateral = nn.ModuleList([_convolution(channels, width, 1) for channels, _, _ in found.maps])
        sizes = [(rows, columns) for _, rows, columns in found.maps]
        self.extra = nn.ModuleList()
        while len(sizes) < config.levels:
            sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
            if sizes[-1] == (1, 1):  # of which a batch norm could make nothing, were it the only image
                raise InputError(
                    f"{config.levels} levels from images of {config.size[0]}×{config.size[1]} pixels",
                    expected=f"at most {len(sizes) - 1}: the next map would have a single cell",
                    fix=f"set levels to {len(sizes) - 1}, or take larger images or a smaller stride",
                )
            self.extra.append(nn.Sequential(nn.ReLU(), _convolution(width, width, 3, stride=2)))
        self.sizes = tuple(sizes)
        joined = config.neck == "top-down"
        self.smooth = nn.ModuleList([_convolution(width, width, 3) for _ in sizes] if joined else [])
        self.classes = nn.ModuleList([_head(width, boxes * (config.num_classes + 1)) for _ in sizes])
        self.offsets = nn.ModuleList([_head(width, boxes * 4) for _ in sizes])
        # Softmax over this bias and C zeros gives the background its prior.
        odds = config.num_classes * config.prior / (1 - config.prior)
        for head in self.classes:
            head.bias.data.view(boxes, -1)[:, 0] = math.log(odds)  # type: ignore[operator]
        scales = config.scales or default_scales(config.levels, 0.1, 0.9)
        made = default_boxes(self.sizes, scales, [config.ratios] * config.levels)
        self.register_buffer("defaults", made, persistent=False)

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Prefixes of parameter names from input to output; what is new in a detector comes last."""
        return (*self._parts, ("lateral.", "extra.", "smooth.", "classes.", "offsets."))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        if x.dim() != 4 or x.shape[1:] != (config.in_channels, *config.size):
            raise InputError(
                f"images of shape {tuple(x.shape)}",
                expected=f"(N, {config.in_channels}, {config.size[0]}, {config.size[1]})",
                fix="bring the images to the size of the detector, or build it for theirs",
            )
        maps = self.maps(x)
        logits = [_rows(head(m), config.num_classes + 1) for head, m in zip(self.classes, maps, strict=True)]
        offsets = [_rows(head(m), 4) for head, m in zip(self.offsets, maps, strict=True)]
        return torch.cat(logits, 1), torch.cat(offsets, 1)

    def maps(self, x: Tensor) -> list[Tensor]:
        """The feature maps that the heads read, fine to coarse, each with `width` channels."""
        stages = self.backbone.stages(x)[self.first :]  # type: ignore[operator]
        maps = [layer(stage) for layer, stage in zip(self.lateral, stages, strict=False)]
        for layer in self.extra:
            maps.append(layer(maps[-1]))
        if not self.smooth:
            return [F.relu(m) for m in maps]
        for k in range(len(maps) - 2, -1, -1):
            maps[k] = maps[k] + F.interpolate(maps[k + 1], size=self.sizes[k])
        return [F.relu(layer(m)) for layer, m in zip(self.smooth, maps, strict=True)]


# Parts ----------------------------------------------------------------------------------------


def _convolution(in_channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(in_channels, width, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(width))


def _head(width: int, out_channels: int) -> nn.Conv2d:
    layer = nn.Conv2d(width, out_channels, 3, padding=1)
    nn.init.normal_(layer.weight, std=HEAD_DEVIATION)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def _rows(prediction: Tensor, numbers: int) -> Tensor:
    """(N, B·n, rows, columns) → (N, rows·columns·B, n), the order of `default_boxes`."""
    channels, rows, columns = prediction.shape[1:]
    boxes = rows * columns * channels // numbers
    # Not len(prediction): it would fix N in an exported graph.
    return prediction.permute(0, 2, 3, 1).reshape(-1, boxes, numbers)


# Backbone -------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _backbone_spec(config: SSDConfig) -> dict[str, Any]:
    return {**config.backbone, "in_channels": config.in_channels}


class Examined(NamedTuple):
    """What is known of a backbone before anything is computed."""

    maps: list[tuple[int, int, int]]
    """Channels, rows and columns of the maps to read."""
    first: int
    """Place of the first of them among the stages."""
    unused: set[str]
    """Parameters that none of them depends on: the classifier, coarser stages."""
    parts: tuple[tuple[str, ...], ...]


@torch.enable_grad()
@torch.enable_grad()  # whatever mode a detector is built in
def examine(config: SSDConfig) -> Examined:
    """Choose among the backbone's stages, on the meta device, where tensors have shapes and no values."""
    name, (height, width) = config.backbone.get("model"), config.size
    with torch.device("meta"):
        twin: Any = build_model(_backbone_spec(config)).eval()
        image = torch.empty(1, config.in_channels, height, width)
    if not hasattr(twin, "stages"):
        able = [name for name, entry in MODELS.items() if hasattr(entry.module, "stages")]
        raise InputError(
            f"the model '{name}' under a detector",
            expected=f"one that gives its feature maps: {', '.join(sorted(able))}",
            fix="choose a convolutional network as backbone",
        )
    stages: list[Tensor] = twin.stages(image)
    rows, columns = math.ceil(height / config.stride), math.ceil(width / config.stride)
    coarse = [stage.shape[2] <= rows and stage.shape[3] <= columns for stage in stages]
    if not any(coarse):
        raise InputError(
            f"stride is {config.stride}, and the coarsest map of '{name}' has "
            f"{stages[-1].shape[2]}×{stages[-1].shape[3]} cells",
            expected=f"a map of at most {rows}×{columns}",
            fix="set a smaller stride, or take a deeper backbone",
        )
    first = coarse.index(True)
    chosen = stages[first : first + config.levels]
    parameters = dict(twin.named_parameters())
    reached = torch.autograd.grad([m.sum() for m in chosen], list(parameters.values()), allow_unused=True)
    unused = {key for key, gradient in zip(parameters, reached, strict=True) if gradient is None}
    used = parameters.keys() - unused
    parts = (tuple(p for p in part if any(key.startswith(p) for key in used)) for part in twin.parts)
    return Examined(
        [(m.shape[1], m.shape[2], m.shape[3]) for m in chosen],
        first,
        unused,
        tuple(tuple(f"backbone.{prefix}" for prefix in part) for part in parts if part),
    )


def leave_out(module: nn.Module, unused: set[str], prefix: str = "") -> None:
    """Replace by the identity every part of `module` none of whose parameters is used."""
    for name, child in module.named_children():
        own = [f"{prefix}{name}.{parameter}" for parameter, _ in child.named_parameters()]
        if own and unused.issuperset(own):
            setattr(module, name, nn.Identity())
        else:
            leave_out(child, unused, f"{prefix}{name}.")
