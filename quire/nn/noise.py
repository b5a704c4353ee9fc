"""Gaussian noise on inputs, activations and weights while training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quire.errors import InputError
from quire.functional.regularise import gaussian_noise
from quire.nn.activation import Arctan

HIDDEN_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    Arctan, nn.CELU, nn.ELU, nn.GELU, nn.GLU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
    nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.RReLU, nn.SELU, nn.Sigmoid,
    nn.SiLU, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
"""Layers whose outputs are hidden activations. Softmax and its kin are left out: their outputs are
distributions, and noise would make them none."""


class GaussianNoise(nn.Module):
    """x + ε with ε ~ N(0, std²) while training, x in evaluation."""

    def __init__(self, std: float = 0.1) -> None:
        super().__init__()
        gaussian_noise(torch.zeros(0), std)  # refuses a bad std when the layer is built
        self.std = std

    def forward(self, x: Tensor) -> Tensor:
        return gaussian_noise(x, self.std) if self.training else x

    def extra_repr(self) -> str:
        return f"std={self.std}"


class NoiseHooks:
    """Noise at the outputs of a module's activation layers; `remove()` takes it away."""

    def __init__(
        self,
        module: nn.Module,
        std: float,
        generator: torch.Generator | None = None,
        kinds: tuple[type[nn.Module], ...] | None = None,
    ) -> None:
        gaussian_noise(torch.zeros(0), std)
        layers = [layer for layer in module.modules() if _is_activation(layer, kinds)]
        if not layers:
            raise InputError(
                f"noise on the activations of a {type(module).__name__} without activation layers",
                expected="at least one layer such as ReLU or Tanh",
                fix="add noise to the inputs or weights instead, or name the layers with kinds=",
            )
        self.std, self.generator = std, generator
        self.handles: list[RemovableHandle] = [layer.register_forward_hook(self._add) for layer in layers]

    def _add(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return gaussian_noise(output, self.std, self.generator) if layer.training else output

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()


def install(
    module: nn.Module,
    std: float,
    generator: torch.Generator | None = None,
    kinds: tuple[type[nn.Module], ...] | None = None,
) -> NoiseHooks:
    """Add noise to the activations of `module` in each training pass until the handle is removed."""
    return NoiseHooks(module, std, generator, kinds)


@contextmanager
def noisy_activations(
    module: nn.Module,
    std: float,
    generator: torch.Generator | None = None,
    kinds: tuple[type[nn.Module], ...] | None = None,
) -> Iterator[NoiseHooks]:
    """`install` for the length of a with-block."""
    hooks = install(module, std, generator, kinds)
    try:
        yield hooks
    finally:
        hooks.remove()


@contextmanager
def perturbed(
    parameters: Iterable[Tensor], std: float, generator: torch.Generator | None = None
) -> Iterator[Sequence[Tensor]]:
    """w + ε inside the with-block, exactly the old w after it.

    Run forward *and* backward inside: the gradient is then that of the perturbed weights. A graph kept
    until after the block is stale, and autograd refuses it.
    """
    weights = list(parameters)
    with torch.no_grad():
        originals = [weight.clone() for weight in weights]
    try:
        with torch.no_grad():
            for weight in weights:
                weight.copy_(gaussian_noise(weight, std, generator))
        yield weights
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)


def _is_activation(layer: nn.Module, kinds: tuple[type[nn.Module], ...] | None) -> bool:
    return isinstance(layer, HIDDEN_ACTIVATIONS if kinds is None else kinds)
