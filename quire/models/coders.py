"""Encoders and decoders: the two halves of autoencoders, variational autoencoders and adversarial networks.

    dense           flatten → [linear, norm, σ] × hidden → linear
    convolutional   [4×4 convolution of stride 2, norm, σ] × stages, then dense

A decoder is the mirror image of an encoder: the same widths in reverse, and transposed convolutions, each of
which undoes the shape of one stage, odd sizes included. Neither ends in an activation: what comes out are
codes, means or logits, as the task sees fit.

B rows of a batch, D features, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, final, get_args

import torch
from torch import Tensor, nn

from quire.errors import InputError, unknown_name
from quire.functional.initialise import initialise_
from quire.models.mlp import check_positive_integer, check_widths
from quire.nn.activation import ACTIVATION_LAYERS, activation

CoderKind = Literal["dense", "convolutional"]
CoderNorm = Literal["none", "batch"]

KERNEL, STRIDE, PADDING = 4, 2, 1
"""Of every convolution. A kernel that the stride divides covers every pixel equally often, so that transposed
convolutions draw no checkerboard."""
SMALL_MAP = 4
"""Convolutions of stride 2 follow each other until neither side of the map is longer than this."""
MOST_WIDENING = 8
"""Channels double from stage to stage up to this multiple of the first stage's."""


@dataclass(frozen=True)
class CoderConfig:
    """What an encoder and its decoder agree on; a model's own config extends it."""

    shape: tuple[int, ...]
    """Of one sample: (D,) or (C, H, W)."""
    kind: CoderKind = "dense"
    hidden: tuple[int, ...] = (256,)
    """Widths of the dense hidden layers, from the data inwards."""
    channels: int = 32
    """Maps after the first convolution; their number doubles with every stage, up to 8 times as many."""
    activation: str = "relu"
    norm: CoderNorm = "none"

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple) or len(self.shape) not in (1, 3):
            raise InputError(
                f"shape is {self.shape!r}",
                expected="(D,) for rows or (C, H, W) for images",
                fix="give the shape of one sample, without the batch",
            )
        for size in self.shape:
            check_positive_integer("a size in shape", size)
        check_widths(self.hidden)
        check_positive_integer("channels", self.channels)
        for name, value, choices in (
            ("kind of coder", self.kind, get_args(CoderKind)),
            ("activation", self.activation, tuple(ACTIVATION_LAYERS)),
            ("norm", self.norm, get_args(CoderNorm)),
        ):
            if value not in choices:
                raise unknown_name(name, value, choices)
        if self.kind == "convolutional" and len(self.shape) != 3:
            raise InputError(
                f"a convolutional coder of rows of shape {self.shape}",
                expected="images of shape (C, H, W)",
                fix='set kind="dense"',
            )

    @property
    def maps(self) -> list[tuple[int, int, int]]:
        """Shapes (C, H, W) from the image to the smallest map; one of all D features for dense coders."""
        if self.kind == "dense":
            return [(math.prod(self.shape), 1, 1)]
        _, height, width = self.shape
        shapes = [(self.shape[0], height, width)]
        while len(shapes) == 1 or max(height, width) > SMALL_MAP:
            height, width = (height + 1) // 2, (width + 1) // 2
            shapes.append((self.channels * min(2 ** (len(shapes) - 1), MOST_WIDENING), height, width))
        return shapes


@final
class Encoder(nn.Module):
    """(B, *shape) → (B, features)."""

    def __init__(self, config: CoderConfig, features: int) -> None:
        super().__init__()
        check_positive_integer("features", features)
        self.shape = config.shape
        layers: list[nn.Module] = []
        maps = config.maps
        for (inner, height, width), (outer, _, _) in pairwise(maps):
            if height % 2 or width % 2:
                layers.append(nn.ZeroPad2d((0, width % 2, 0, height % 2)))
            layers.append(_convolution(inner, outer, config))
            layers += _after(nn.BatchNorm2d, outer, config)
        layers.append(nn.Flatten())
        widths = (math.prod(maps[-1]), *config.hidden)
        layers += [*_dense(widths, config), _linear(widths[-1], features, "linear")]
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        encoded: Tensor = self.layers(check_inputs(inputs, self.shape))
        return encoded


@final
class Decoder(nn.Module):
    """(B, features) → (B, *shape)."""

    def __init__(self, config: CoderConfig, features: int) -> None:
        super().__init__()
        check_positive_integer("features", features)
        self.features = features
        maps, widths = config.maps[::-1], (features, *config.hidden[::-1])
        flat = math.prod(maps[0])
        layers = _dense(widths, config)
        if config.kind == "dense":
            layers += [_linear(widths[-1], flat, "linear"), nn.Unflatten(1, config.shape)]
        else:
            layers.append(_linear(widths[-1], flat, config.activation, bias=config.norm == "none"))
            layers.append(nn.Unflatten(1, maps[0]))
            layers += _after(nn.BatchNorm2d, maps[0][0], config)
        for stage, ((inner, _, _), (outer, height, width)) in enumerate(pairwise(maps)):
            last = stage == len(maps) - 2
            layers.append(_transposed(inner, outer, config, last))
            if height % 2 or width % 2:
                layers.append(Crop(height, width))
            if not last:
                layers += _after(nn.BatchNorm2d, outer, config)
        self.layers = nn.Sequential(*layers)

    def forward(self, codes: Tensor) -> Tensor:
        decoded: Tensor = self.layers(check_codes(codes, self.features))
        return decoded


@final
class Crop(nn.Module):
    """(B, C, ≥H, ≥W) → (B, C, H, W): the adjoint of padding with zeros below and on the right."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, maps: Tensor) -> Tensor:
        return maps[:, :, : self.height, : self.width]


def check_inputs(inputs: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inputs themselves, if they are (B, *shape)."""
    if inputs.shape[1:] != shape:
        raise InputError(
            f"inputs of shape {tuple(inputs.shape)}",
            expected=f"a batch of shape (B, {', '.join(map(str, shape))})",
            fix="build the network with the shape of one sample",
        )
    return inputs


def check_codes(codes: Tensor, features: int) -> Tensor:
    """The codes themselves, if they are (B, features)."""
    if codes.dim() != 2 or codes.shape[1] != features:
        raise InputError(
            f"codes of shape {tuple(codes.shape)}",
            expected=f"a batch of shape (B, {features})",
            fix="build the decoder with as many features as the codes have",
        )
    return codes


def _dense(widths: Sequence[int], config: CoderConfig) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers.append(_linear(inner, outer, config.activation, bias=config.norm == "none"))
        layers += _after(nn.BatchNorm1d, outer, config)
    return layers


def _after(norm: type[nn.Module], channels: int, config: CoderConfig) -> list[nn.Module]:
    layers = [activation(config.activation)]
    return layers if config.norm == "none" else [norm(channels), *layers]


def _linear(inner: int, outer: int, feeds: str, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inner, outer, bias=bias)
    initialise_(layer.weight, feeds)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _convolution(inner: int, outer: int, config: CoderConfig) -> nn.Conv2d:
    layer = nn.Conv2d(inner, outer, KERNEL, STRIDE, PADDING, bias=config.norm == "none")
    initialise_(layer.weight, config.activation)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _transposed(inner: int, outer: int, config: CoderConfig, last: bool) -> nn.ConvTranspose2d:
    bias = last or config.norm == "none"
    layer = nn.ConvTranspose2d(inner, outer, KERNEL, STRIDE, PADDING, bias=bias)
    initialise_(layer.weight.transpose(0, 1), "linear" if last else config.activation)
    with torch.no_grad():
        # Each output pixel is reached by 2×2 of the 4×4 weights, a quarter of what the fan counts.
        layer.weight.mul_(2.0)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
