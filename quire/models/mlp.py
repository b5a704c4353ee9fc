"""The multi-layer perceptron: any depth, width, activation, dropout and norm.

    z^0 = x,   a^l = W^l z^{l−1} + b^l,   z^l = dropout(σ(norm(a^l))),   output = W^L z^{L−1} + b^L

B rows of a batch, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from quire.errors import InputError, unknown_name
from quire.functional.initialise import initialise_
from quire.models.registry import Example, model
from quire.nn.activation import ACTIVATION_LAYERS, activation

Norm = Literal["none", "batch", "layer"]
NORMS = get_args(Norm)


@dataclass(frozen=True)
class MLPConfig:
    in_features: int
    out_features: int
    hidden: tuple[int, ...] = (128,)
    """Widths of the hidden layers; () is the linear (or softmax) model."""
    activation: str = "relu"
    dropout: float = 0.0
    """Probability with which a hidden unit is dropped while training."""
    norm: Norm = "none"

    def __post_init__(self) -> None:
        check_positive_integer("in_features", self.in_features)
        check_positive_integer("out_features", self.out_features)
        check_widths(self.hidden)
        if self.activation not in ACTIVATION_LAYERS:
            raise unknown_name("activation", self.activation, ACTIVATION_LAYERS)
        if self.norm not in NORMS:
            raise unknown_name("norm", self.norm, NORMS)
        number = isinstance(self.dropout, int | float) and not isinstance(self.dropout, bool)
        if not number or not 0.0 <= self.dropout < 1.0:
            raise InputError(
                f"dropout is {self.dropout!r}",
                expected="a probability in [0, 1)",
                fix="set dropout to 0 to switch it off",
            )


@model("mlp", MLPConfig, example=Example({"in_features": 6, "out_features": 2}, (6,)))
class MLP(nn.Module):
    """(B, …) → (B, out_features); trailing dimensions are flattened to in_features.

    `body` is everything before the last linear layer, `head` is that layer, so that another task
    can take over the body.
    """

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        layers: list[nn.Module] = []
        width = config.in_features
        for units in config.hidden:
            layers.append(_linear(width, units, config.activation))
            if config.norm != "none":
                layers.append(nn.BatchNorm1d(units) if config.norm == "batch" else nn.LayerNorm(units))
            layers.append(activation(config.activation))
            if config.dropout:
                layers.append(nn.Dropout(config.dropout))
            width = units
        self.body = nn.Sequential(*layers)
        self.head = _linear(width, config.out_features, "linear")

    @property
    def body_features(self) -> int:
        """How many numbers `body` gives for each row."""
        return self.head.in_features

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 2:
            x = x.flatten(1)
        if x.shape[-1] != self.config.in_features:
            raise InputError(
                f"inputs of shape {tuple(x.shape)}",
                expected=f"rows of {self.config.in_features} features",
                fix="build the model with in_features equal to the number of columns",
            )
        return self.head(self.body(x))


def linear(in_features: int, out_features: int) -> MLP:
    """A single linear layer: least squares, logistic or softmax regression, as the head decides."""
    return MLP(MLPConfig(in_features, out_features, hidden=()))


def check_positive_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}", expected="an integer >= 1", fix=f"set {name} to at least 1")


def check_widths(hidden: object) -> None:
    if not isinstance(hidden, tuple):
        raise InputError(
            f"hidden is {hidden!r}", expected="a tuple of widths such as (128,)", fix="write hidden=(128,)"
        )
    for units in hidden:
        check_positive_integer("a width in hidden", units)


def _linear(in_features: int, out_features: int, activation: str) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    initialise_(layer.weight, activation)
    nn.init.zeros_(layer.bias)
    return layer
