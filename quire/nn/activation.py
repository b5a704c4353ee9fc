"""Element-wise activations by name, as layers.

Names are those of `quire.functional.activations`, values too. The layers are PyTorch's own wherever it has
one, so that its fused kernels, export and pruning tools know them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn

from quire.functional.activations import SOFTPLUS_THRESHOLD, arctan
from quire.registry import Registry

ACTIVATION_LAYERS: Registry[Callable[[], nn.Module]] = Registry("activation")


class Arctan(nn.Module):
    """z = arctan(a)."""

    def forward(self, a: Tensor) -> Tensor:
        return arctan(a)


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "relu6": nn.ReLU6,
    "softplus": functools.partial(nn.Softplus, threshold=SOFTPLUS_THRESHOLD),
    "sigmoid": nn.Sigmoid,
    "log_sigmoid": nn.LogSigmoid,
    "tanh": nn.Tanh,
    "arctan": Arctan,
}
for _name, _layer in _LAYERS.items():
    ACTIVATION_LAYERS.register(_name)(_layer)


def activation(name: str) -> nn.Module:
    """A new layer that applies the activation `name`; an unknown name is an `InputError`."""
    return ACTIVATION_LAYERS[name]()
