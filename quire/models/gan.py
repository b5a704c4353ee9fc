"""The two networks of adversarial training, dense or convolutional, for one distribution or one per class.

    generator       G(z, y) = decoder([z, e_y])
    discriminator   a(x, y) = wᵀφ(x) + b + ⟨v_y, φ(x)⟩,   D = sigmoid(a)

e_y is the one-hot vector of a class, v_y a learned one (the projection of Miyato and Koyama, 2018). A row
whose class is not known (a negative number) has e_y = 0 and no projection. Both come from the coders that
autoencoders are made of.

B rows of a batch, Z noise, C classes, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from quire.errors import InputError, unknown_name
from quire.models.coders import CoderConfig, CoderNorm, Decoder, Encoder
from quire.models.conditional import check_classes, indicators, joined
from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model
from quire.nn.activation import activation

Output = Literal["linear", "tanh"]


@dataclass(frozen=True)
class GeneratorConfig(CoderConfig):
    hidden: tuple[int, ...] = (256, 256)
    latent: int = 64
    """Numbers of noise."""
    classes: int = 0
    """Classes that can be asked for; 0 for none."""
    norm: CoderNorm = "batch"
    output: Output = "linear"
    """tanh for pixels that are scaled to −1 … 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer("latent", self.latent)
        check_classes(self.classes)
        if self.output not in get_args(Output):
            raise unknown_name("output", self.output, get_args(Output))


@final
@model("generator", GeneratorConfig, example=Example({"shape": (3,), "hidden": (8,), "latent": 4}, (4,)))
class Generator(nn.Module):
    """Noise (B, Z) and classes (B,) to samples (B, *shape)."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config, config.latent + config.classes)

    def forward(self, noise: Tensor, label: Tensor | None = None) -> Tensor:
        made: Tensor = self.decoder(joined(noise, indicators(self.config.classes, label, noise)))
        return made.tanh() if self.config.output == "tanh" else made


@dataclass(frozen=True)
class DiscriminatorConfig(CoderConfig):
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the dense layers; the last are the features φ."""
    classes: int = 0
    activation: str = "leaky_relu"
    spectral: bool = True
    """Divide each weight of φ by its largest singular value, so that its slope stays bounded; only w and v_y
    choose the scale. Without it the discriminator of eight Gaussians on a circle soon leaves the generator
    with two of them; with it all eight are found."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_classes(self.classes)
        if not self.hidden:
            raise InputError(
                "hidden is ()",
                expected="at least one width: the features that the discriminator decides by",
                fix="write hidden=(256,)",
            )


@final
@model("discriminator", DiscriminatorConfig, example=Example({"shape": (3,), "hidden": (8,)}, (3,)))
class Discriminator(nn.Module):
    """Samples (B, *shape) and classes (B,) to logits (B,) of being data."""

    def __init__(self, config: DiscriminatorConfig) -> None:
        super().__init__()
        self.config = config
        *hidden, width = config.hidden
        body = CoderConfig(
            config.shape, config.kind, tuple(hidden), config.channels, config.activation, config.norm
        )
        self.features = nn.Sequential(Encoder(body, width), activation(config.activation))
        self.head = nn.Linear(width, 1)
        self.projection = nn.Linear(config.classes, width, bias=False) if config.classes else None
        if config.spectral:
            for layer in list(self.features.modules()):
                if isinstance(layer, nn.Linear | nn.Conv2d):
                    spectral_norm(layer)

    def forward(self, inputs: Tensor, label: Tensor | None = None) -> Tensor:
        features = self.features(inputs)
        logits: Tensor = self.head(features).squeeze(1)
        told = indicators(self.config.classes, label, features)
        return logits if self.projection is None else logits + (self.projection(told) * features).sum(1)

    def class_logits(self, inputs: Tensor) -> Tensor:
        """(B, C): the logit of each row as if it were of each class."""
        assert self.projection is not None
        features = self.features(inputs)
        logits: Tensor = self.head(features) + features @ self.projection.weight
        return logits
