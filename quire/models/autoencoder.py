"""The autoencoder: h = f(x), x̂ = g(h), two coders with a narrow or penalised code h between them.

    dense, convolutional   as in `quire.models.coders`
    linear                 no hidden layers and no activation: x̂ = V(Wx + b) + c
    tied                   the decoder's weights are the encoder's, transposed: x̂ = Wᵀf(Wx + b) + c

B rows, D features, C channels, H height, W width, K numbers of a code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import InputError, unknown_name
from quire.functional.autoencode import contractive_layer, contractive_penalty
from quire.models.coders import PADDING, STRIDE, CoderConfig, Decoder, Encoder, check_codes
from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model
from quire.nn.activation import ACTIVATION_LAYERS, activation


@dataclass(frozen=True)
class AutoencoderConfig(CoderConfig):
    code: int = 16
    """Numbers of a code."""
    code_activation: str = "linear"
    tied: bool = False
    """Whether the decoder takes the encoder's weights, transposed. A penalty of the code cannot then be got
    around by small codes and a large decoder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer("code", self.code)
        if self.code_activation not in ACTIVATION_LAYERS:
            raise unknown_name("activation", self.code_activation, ACTIVATION_LAYERS)
        if self.tied and self.norm != "none":
            raise InputError(
                f"tied weights with norm={self.norm!r}",
                expected='norm="none", since a norm has weights that cannot be transposed',
                fix="leave one of the two out",
            )


@final
class TiedDecoder(nn.Module):
    """(B, K) → (B, *shape) by an encoder's layers in reverse, each transposed; its biases are its own."""

    def __init__(self, config: AutoencoderConfig, encoder: Encoder) -> None:
        super().__init__()
        self.features = config.code
        self.inner = config.maps[-1] if config.kind == "convolutional" else config.shape
        weighted = [layer for layer in encoder.layers if isinstance(layer, nn.Linear | nn.Conv2d)]
        self.biases = nn.ParameterList(torch.zeros(layer.weight.shape[1]) for layer in reversed(weighted))

    def forward(self, codes: Tensor, encoder: Encoder) -> Tensor:
        """`encoder` comes with every call: held here, its weights would be saved and stepped on twice."""
        z, biases = check_codes(codes, self.features), iter(self.biases)
        for layer in reversed(encoder.layers):
            if isinstance(layer, nn.Linear):
                z = functional.linear(z, layer.weight.mT, next(biases))
            elif isinstance(layer, nn.Flatten):
                z = z.unflatten(1, self.inner)
            elif isinstance(layer, nn.Conv2d):
                z = functional.conv_transpose2d(z, layer.weight, next(biases), STRIDE, PADDING)
            elif isinstance(layer, nn.ZeroPad2d):
                _, right, _, below = layer.padding
                z = z[:, :, : z.shape[2] - below, : z.shape[3] - right]
            else:
                z = layer(z)
        return z


@final
@model("autoencoder", AutoencoderConfig, example=Example({"shape": (6,), "hidden": (5,), "code": 3}, (6,)))
class Autoencoder(nn.Module):
    """(B, *shape) → (B, *shape), through codes (B, K)."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, config.code)
        self.activation = activation(config.code_activation)
        self.decoder: Decoder | TiedDecoder
        self.decoder = TiedDecoder(config, self.encoder) if config.tied else Decoder(config, config.code)

    def encode(self, inputs: Tensor) -> Tensor:
        """h = f(x), (B, K)."""
        codes: Tensor = self.activation(self.encoder(inputs))
        return codes

    def decode(self, codes: Tensor) -> Tensor:
        """x̂ = g(h), (B, *shape), without a last activation."""
        tied = isinstance(self.decoder, TiedDecoder)
        decoded: Tensor = self.decoder(codes, self.encoder) if tied else self.decoder(codes)
        return decoded

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decode(self.encode(inputs))

    def contraction(self, inputs: Tensor) -> Tensor:
        """Σ_i ‖∇_x h_i‖² of each row (B,): in closed form for one layer, by differentiation for more."""
        config, last = self.config, self.encoder.layers[-1]
        if config.kind == "dense" and not config.hidden:
            assert isinstance(last, nn.Linear)
            return contractive_layer(inputs.flatten(1), last.weight, last.bias, config.code_activation)
        if config.norm == "batch":
            raise InputError(
                "the contraction of an encoder with batch norm",
                expected="an encoder in which a row's code does not depend on the other rows",
                fix='set norm="none"',
            )
        return contractive_penalty(self.encode, inputs)


def linear_autoencoder(features: int, code: int) -> Autoencoder:
    """x̂ = V(Wx + b) + c; at its best, V spans the first K principal directions."""
    return Autoencoder(AutoencoderConfig((features,), hidden=(), activation="linear", code=code))
