"""What the convolutional networks share: their options, how they are cut into stages, and their builders.

N samples, C channels, H height, W width
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, get_type_hints

from torch import Tensor, nn

from quire.errors import InputError
from quire.models.mlp import check_positive_integer
from quire.models.registry import BUILDERS, check_options
from quire.models.weights import load_weights


@dataclass(frozen=True)
class VisionConfig:
    """Options of every convolutional network; the defaults are torchvision's network."""

    num_classes: int = 1000
    in_channels: int = 3
    width: float = 1.0
    """Factor of all numbers of channels, which are rounded to multiples of 8."""
    small: bool = False
    """For images of 8 to 64 pixels: without the stride of 4 by which the first layers shrink a photograph,
    so that 8×8 pixels become 1×1 where 32×32 would, and with a small classifier."""

    def __post_init__(self) -> None:
        check_positive_integer("num_classes", self.num_classes)
        check_positive_integer("in_channels", self.in_channels)
        if not self.width > 0:
            raise InputError(f"width is {self.width!r}", expected="a factor > 0", fix="set width to 1")

    @property
    def stem(self) -> tuple[int, int, int]:
        """Kernel, stride and padding of the first convolution of most networks."""
        return (3, 1, 1) if self.small else (7, 2, 3)

    def channels(self, count: int, multiple: int = 8) -> int:
        """`count` times the width, as a positive multiple of `multiple`."""
        if self.width == 1:
            return count
        return max(round(count * self.width / multiple), 1) * multiple


def check_probability(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise InputError(
            f"{name} is {value!r}",
            expected="a probability in [0, 1)",
            fix=f"set {name} to 0 to switch it off",
        )


class ConvNet(nn.Module):
    """(N, C, H, W) → (N, num_classes): a chain of named modules, in sections of one resolution and a head.

    A network makes its modules, under torchvision's names, and then says in what order they follow each
    other: `sections` up to the map that the classifier pools, `head` from there to the logits, its last
    linear layer at the end. All else follows from that. Modules are looked up as they are needed, so that
    one that was replaced takes part.
    """

    sections: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    smallest: int = 1
    """Shortest side of an image, in pixels, of which something is left at the end."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return self._follow(chain(*self.sections, self.head), x)

    def stages(self, x: Tensor) -> list[Tensor]:
        """The last feature map of each resolution, fine to coarse; the classifier pools the last of them."""
        self._check(x)
        maps = []
        for names in self.sections:
            x = self._follow(names, x)
            maps.append(x)
        return maps

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Beginnings of parameters' names in groups from input to output; the last is the layer of logits."""
        *body, last = (self._prefixes(names) for names in (*self.sections, self.head[:-1], self.head[-1:]))
        return (*(group for group in body if group), last)

    def _prefixes(self, names: Iterable[str]) -> tuple[str, ...]:
        """``NAME.`` of those modules that have parameters."""
        return tuple(f"{name}." for name in names if any(True for _ in self.get_submodule(name).parameters()))

    def _follow(self, names: Iterable[str], x: Tensor) -> Tensor:
        for name in names:
            x = self.get_submodule(name)(x)
        return x

    def _check(self, x: Tensor) -> None:
        channels, smallest = self.config.in_channels, self.smallest
        if x.dim() != 4:
            fix = "give a batch of images"
        elif x.shape[1] != channels:
            fix = f"build the network with in_channels={x.shape[1]}"
        elif min(x.shape[2:]) < smallest:
            fix = "enlarge the images" if self.config.small else "build the network with small=True"
        else:
            return
        raise InputError(
            f"images of shape {tuple(x.shape)}",
            expected=f"(N, {channels}, height, width) with sides of at least {smallest} pixels",
            fix=fix,
        )


def draw_(weight: Tensor, draw: Callable[..., Tensor], **options: Any) -> None:
    """Random first weights by one of the functions of nn.init."""
    # On the meta device there is nothing to draw, and PyTorch would import its compiler for doing so.
    if not weight.is_meta:
        draw(weight, **options)


def named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def cut_at_poolings(name: str, layers: nn.Sequential) -> tuple[tuple[str, ...], ...]:
    """The names of the layers, with a new section at each pooling."""
    sections: list[tuple[str, ...]] = [()]
    for index, layer in enumerate(layers):
        if isinstance(layer, nn.MaxPool2d):
            sections.append(())
        sections[-1] += (f"{name}.{index}",)
    return tuple(sections)


# Builders -------------------------------------------------------------------------------------

Network = TypeVar("Network", bound=ConvNet)
Built = TypeVar("Built", bound=ConvNet, covariant=True)


class Builder(Protocol[Built]):
    """A function that builds a network by its published name."""

    __name__: str

    def __call__(
        self,
        num_classes: int = ...,
        *,
        in_channels: int = ...,
        weights: Path | str | None = None,
        **config: Any,
    ) -> Built: ...


def builder(name: str, network: type[Network], variant: VisionConfig, summary: str) -> Builder[Network]:
    """The function `name`, which builds `network` as `variant` says unless it is told otherwise."""

    def build(
        num_classes: int = variant.num_classes,
        *,
        in_channels: int = variant.in_channels,
        weights: Path | str | None = None,
        **config: Any,
    ) -> Network:
        check_options(name, config, vars(variant))
        built = network(
            dataclasses.replace(variant, num_classes=num_classes, in_channels=in_channels, **config)
        )
        if weights is not None:
            load_weights(built, weights)
        return built

    build.__name__ = build.__qualname__ = name
    build.__module__ = network.__module__
    build.__doc__ = (
        f"{summary}\n\n`weights` is a file in torchvision's format, read by `quire.models.load_weights`. All "
        f"other options are those of `{type(variant).__name__}`."
    )
    build.__signature__ = _signature(network, variant)  # type: ignore[attr-defined]
    BUILDERS.register(name)(build)
    return cast(Builder[Network], build)


def _signature(network: type[nn.Module], variant: VisionConfig) -> inspect.Signature:
    """num_classes, then every other option by keyword, with the variant's own values as defaults."""
    keyword, hints = inspect.Parameter.KEYWORD_ONLY, get_type_hints(type(variant))
    first, second, *others = (
        inspect.Parameter(name, keyword, default=value, annotation=hints[name])
        for name, value in vars(variant).items()
    )
    first = first.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    weights = inspect.Parameter("weights", keyword, default=None, annotation=Path | str | None)
    return inspect.Signature([first, second, weights, *others], return_annotation=network)
