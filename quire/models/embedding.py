"""Rows to codes that can be compared: near where two rows belong together.

    code        z = f(x), an encoder of `quire.models.coders`
    embedding   z / ‖z‖, what rows are compared by
    projection  g(z) / ‖g(z)‖ with g linear → σ → linear: what views are compared by while training. It may
                forget what differs from view to view, which z then need not.

B rows, D features, C channels, H height, W width, K numbers of a code, P numbers of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from quire.errors import InputError
from quire.models.coders import CoderConfig, Encoder
from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model
from quire.nn.activation import activation


@dataclass(frozen=True)
class EmbeddingConfig(CoderConfig):
    code: int = 64
    """Numbers of a code."""
    projection: int = 0
    """Numbers that views are compared by; 0 compares codes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer("code", self.code)
        if type(self.projection) is not int or self.projection < 0:
            raise InputError(
                f"projection is {self.projection!r}",
                expected="a whole number >= 0",
                fix="0 compares the codes themselves",
            )


@final
@model("embedding", EmbeddingConfig, example=Example({"shape": (6,), "hidden": (5,), "code": 3}, (6,)))
class Embedding(nn.Module):
    """(B, *shape) → unit vectors (B, K)."""

    def __init__(self, config: EmbeddingConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, config.code)
        self.projection: nn.Module = nn.Identity()
        if config.projection:
            self.projection = nn.Sequential(
                nn.Linear(config.code, 2 * config.projection),
                activation(config.activation),
                nn.Linear(2 * config.projection, config.projection),
            )

    def encode(self, inputs: Tensor) -> Tensor:
        """z, (B, K)."""
        codes: Tensor = self.encoder(inputs)
        return codes

    def compare(self, inputs: Tensor) -> Tensor:
        """What views are compared by, unit vectors (B, P); the embedding where there is no projection."""
        return unit(self.projection(self.encode(inputs)))

    def forward(self, inputs: Tensor) -> Tensor:
        return unit(self.encode(inputs))


def unit(vectors: Tensor) -> Tensor:
    """v / ‖v‖ of each row, in float32 at least."""
    wide = vectors.float() if vectors.element_size() < 4 else vectors
    return functional.normalize(wide, dim=-1)
