"""One dense layer with its activation."""

from __future__ import annotations

from torch import Tensor, nn

from quire.functional.initialise import initialise_
from quire.nn.activation import activation as activation_layer


class Dense(nn.Module):
    """z ← σ(W z + b) for each row: (…, in_features) → (…, out_features).

    `weight` and `bias` are named as in `nn.Linear`; the initial weights are He's for rectifiers and
    Xavier's for the others, the initial biases are zero.
    """

    def __init__(
        self, in_features: int, out_features: int, activation: str = "relu", *, bias: bool = True
    ) -> None:
        super().__init__()
        plain = nn.Linear(in_features, out_features, bias)
        initialise_(plain.weight, activation)
        if bias:
            nn.init.zeros_(plain.bias)
        self.weight = plain.weight
        self.bias = plain.bias
        self.in_features, self.out_features = in_features, out_features
        self.activation = activation_layer(activation)

    def forward(self, z: Tensor) -> Tensor:
        return self.activation(nn.functional.linear(z, self.weight, self.bias))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )
