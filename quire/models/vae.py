"""The variational autoencoder: an encoder that gives a distribution of codes, and a decoder.

    q(z | x, y) = N(μ(x, y), diag σ²(x, y)),   decoder(z, y) → the numbers that p(x | z, y) is made from

With `classes` it is conditional: the class y is joined, one-hot, to what either half reads; a convolutional
encoder reads it as constant maps. A negative class number says that the class is unknown and joins zeros.

B rows of a batch, d latent dimensions, K classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from quire.models.coders import CoderConfig, Decoder, Encoder, check_inputs
from quire.models.conditional import check_classes, indicators, joined
from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model


@dataclass(frozen=True)
class VAEConfig(CoderConfig):
    hidden: tuple[int, ...] = (500, 500)
    latent: int = 20
    """Dimensions d of a code."""
    classes: int = 0
    """Classes of a conditional model; 0 for one without."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer("latent", self.latent)
        check_classes(self.classes)


@final
@model("vae", VAEConfig, example=Example({"shape": (6,), "hidden": (8,), "latent": 2}, (6,)))
class VAE(nn.Module):
    """`encode` gives μ and log σ, `decode` raw numbers: logits or means, as the task sees fit."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(_with_class(config), 2 * config.latent)
        self.decoder = Decoder(config, config.latent + config.classes)
        last = self.encoder.layers[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight[config.latent :] = 0.0  # σ = 1 at first: exp turns a random log σ into any size

    def forward(self, inputs: Tensor, label: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The decoded mean code (B, *shape), μ and log σ (B, d)."""
        mean, log_std = self.encode(inputs, label)
        return self.decode(mean, label), mean, log_std

    def encode(self, inputs: Tensor, label: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """μ and log σ of q(z | x): (B, d) each, from inputs (B, *shape) and class numbers (B,)."""
        told = self._one_hot(label, inputs)
        if told is not None:
            check_inputs(inputs, self.config.shape)
            inputs = joined(inputs if self.config.kind == "convolutional" else inputs.flatten(1), told)
        mean, log_std = self.encoder(inputs).chunk(2, dim=1)
        return mean, log_std

    def decode(self, codes: Tensor, label: Tensor | None = None) -> Tensor:
        """Raw numbers (B, *shape) of p(x | z), from codes (B, d) and class numbers (B,)."""
        decoded: Tensor = self.decoder(joined(codes, self._one_hot(label, codes)))
        return decoded

    def _one_hot(self, label: Tensor | None, rows: Tensor) -> Tensor | None:
        return indicators(self.config.classes, label, rows)


def _with_class(config: VAEConfig) -> CoderConfig:
    """What the encoder reads: a sample with its class joined to it."""
    shape = config.shape
    if config.classes:
        if config.kind == "convolutional":
            shape = (shape[0] + config.classes, *shape[1:])
        else:
            shape = (math.prod(shape) + config.classes,)
    return CoderConfig(shape, config.kind, config.hidden, config.channels, config.activation, config.norm)
