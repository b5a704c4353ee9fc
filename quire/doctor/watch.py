"""What one pass through a model shows, layer by layer: how large activations and gradients are, which units
are dead or saturated, and what became not finite first.

Nothing is changed: gradients are returned and not left in the parameters, and hooks are taken away again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
SQUASHERS: dict[type[nn.Module], float] = {nn.Sigmoid: 0.0, nn.Tanh: -1.0, nn.Hardsigmoid: 0.0}
"""With their lower bounds; the upper one is 1."""
RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
TINY = 1e-8
"""Weights that are smaller have no size that a gradient could be compared with."""
NEAR = 0.01
"""How near to a bound a value is saturated."""


@dataclass
class Activation:
    """The output of a module without children, in all of its calls together."""

    name: str
    kind: str
    rows: int
    size: float
    """√ of the mean square; not a number where it is not finite."""
    spread: float
    """Of this, how much differs between rows: 0 where all rows give the same, 1 where they have no mean."""
    dead: float | None = None
    """Share of units that give 0 for every row; None where that is not asked of this kind."""
    saturated: float | None = None
    """Share of values near a bound; likewise."""
    gradient: float | None = None
    """√ of the mean square of the loss's gradient with respect to it."""
    reach: float | None = None
    """Of a recurrent layer: the gradient at the first place of its input, as a share of the last's."""
    places: int = 0
    """Of a recurrent layer: T."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.size)


@dataclass(frozen=True)
class Weights:
    """A parameter beside its gradient, each by √ of its mean square."""

    name: str
    size: float
    gradient: float | None
    """None where the loss does not depend on it."""
    matrix: bool

    @property
    def relative(self) -> float | None:
        """The gradient in units of the weights; None where one of them is missing."""
        return None if self.gradient is None or self.size < TINY else self.gradient / self.size


@dataclass
class Look:
    """One pass."""

    step: int
    loss: float
    layers: list[Activation] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    norm: float = 0.0
    """Of the whole gradient."""

    def broken(self) -> str | None:
        """The first tensor that is not finite."""
        for layer in self.layers:
            if not layer.finite:
                return f"output of {layer.name}"
        if not math.isfinite(self.loss):
            return "loss"
        for weights in self.weights:
            if not math.isfinite(weights.size):
                return weights.name
        # Gradients are made from the end backwards.
        for weights in reversed(self.weights):
            if weights.gradient is not None and not math.isfinite(weights.gradient):
                return f"gradient of {weights.name}"
        return None


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """Modules without children, by name; the model itself where it has none."""
    found = {name: m for name, m in model.named_modules() if name and not any(True for _ in m.children())}
    return found or {"model": model}


class Seen(NamedTuple):
    """One call of a module without children."""

    name: str
    module: nn.Module
    output: Tensor
    given: Tensor | None
    """What a recurrent module was given."""


@contextmanager
def watched(model: nn.Module, *, copy: bool = False) -> Iterator[list[Seen]]:
    """What modules without children give within the with-block, call by call. A `copy` is safe from what is
    overwritten later, and has no gradient."""
    seen: list[Seen] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, given: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                first = given[0] if given and isinstance(module, RECURRENT) else None
                kept = tensor.detach().clone() if copy else tensor
                seen.append(Seen(name, module, kept, first if isinstance(first, Tensor) else None))

        return keep

    def with_gradient(module: nn.Module, given: Any) -> Any:
        first, *rest = given
        known = not isinstance(first, Tensor) or first.requires_grad or not torch.is_grad_enabled()
        return None if known else (first.detach().requires_grad_(), *rest)

    found = leaves(model)
    hooks = [module.register_forward_hook(watch(name)) for name, module in found.items()]
    if not copy:
        recurrent = [module for module in found.values() if isinstance(module, RECURRENT)]
        hooks += [module.register_forward_pre_hook(with_gradient) for module in recurrent]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def look(model: nn.Module, loss: Callable[[], Tensor], step: int = 0) -> tuple[Look, list[Tensor | None]]:
    """Activations and gradients of ``loss()``, which runs the model; and the gradients of its parameters that
    require one, in their order."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with torch.enable_grad(), watched(model) as seen:
        value = loss()
        wanted = [p for _, p in named]
        outputs = [output for _, _, output, _ in seen if output.requires_grad]
        inputs = [given for _, _, _, given in seen if given is not None and given.requires_grad]
        asked = [*wanted, *outputs, *inputs]
        found: list[Tensor | None] = [None] * len(asked)
        if value.requires_grad and asked:
            # In-place layers overwrite what they were given, whose gradient then has no place: leave it out.
            found = list(torch.autograd.grad(value, asked, allow_unused=True))
    gradients = found[: len(wanted)]
    by_output = dict(zip(map(id, outputs), found[len(wanted) :], strict=False))
    by_input = dict(zip(map(id, inputs), found[len(wanted) + len(outputs) :], strict=True))
    numbers = [value.detach().double().reshape(-1)[0]]
    for _, module, output, given in seen:
        numbers += measure(module, output.detach(), by_output.get(id(output)), given, by_input)
    for (_, p), gradient in zip(named, gradients, strict=True):
        numbers += [size(p.detach()), size(gradient)]
    values = iter(torch.stack([number.to(numbers[0].device) for number in numbers]).tolist())
    result = Look(step, next(values))
    for name, module, output, _ in seen:
        result.layers.append(activation(name, module, output, [next(values) for _ in range(6)]))
    squares = 0.0
    for (name, p), gradient in zip(named, gradients, strict=True):
        large, slope = next(values), next(values)
        squares += slope**2 * p.numel() if gradient is not None else 0.0
        result.weights.append(Weights(name, large, None if gradient is None else slope, p.ndim > 1))
    result.norm = math.sqrt(squares) if squares >= 0 else math.nan
    return result, gradients


def measure(
    module: nn.Module, output: Tensor, gradient: Tensor | None, given: Tensor | None, slopes: Any
) -> list[Tensor]:
    """Size, spread, dead, saturated, gradient and reach, on the device; −1 for what is not asked."""
    none = output.new_tensor(-1.0, dtype=torch.float64)
    values = output.double() if output.numel() <= 2**22 else output.flatten()[: 2**22].double()
    large = values.square().mean().sqrt() if output.numel() else none * 0
    spread = none
    if output.ndim > 1 and len(output) > 1:
        rows = output.flatten(1)[:256]
        spread = (rows.var(0, correction=0).mean() / rows.square().mean().clamp_min(1e-30)).double().sqrt()
    dead, saturated, reach = dead_share(module, output), saturated_share(module, output), none
    slope = slopes.get(id(given)) if given is not None else None
    if slope is not None and slope.ndim == 3:
        along = slope.movedim(1, 0) if getattr(module, "batch_first", False) else slope
        reach = (along[0].norm() / along[-1].norm().clamp_min(1e-30)).double()
    found = (dead, saturated, None if gradient is None else size(gradient))
    return [large, spread, *(none if value is None else value for value in found), reach]


def dead_share(module: nn.Module, output: Tensor) -> Tensor | None:
    """Of the units of a rectifier, those that give 0 for every row; None of others, or of too few rows."""
    if not isinstance(module, RECTIFIERS) or len(output) < 8:
        return None
    return (by_unit(output) == 0).all(0).double().mean()


def saturated_share(module: nn.Module, output: Tensor) -> Tensor | None:
    """Of the values of a bounded activation, those near a bound; None of others."""
    low = SQUASHERS.get(type(module))
    return None if low is None else ((output > 1 - NEAR) | (output < low + NEAR)).double().mean()


def activation(name: str, module: nn.Module, output: Tensor, numbers: list[float]) -> Activation:
    large, spread, dead, saturated, gradient, reach = numbers

    def asked(value: float) -> float | None:
        return None if value < 0 else value

    places = 0
    if isinstance(module, RECURRENT) and output.ndim == 3:
        places = output.shape[1 if module.batch_first else 0]
    return Activation(
        name, type(module).__name__, len(output) if output.ndim else 1, large, spread if spread >= 0 else 1.0,
        asked(dead), asked(saturated), asked(gradient), asked(reach), places,
    )  # fmt: skip


def size(tensor: Tensor | None) -> Tensor:
    """√ of the mean square."""
    if tensor is None:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) / max(tensor.numel(), 1) ** 0.5


def by_unit(output: Tensor) -> Tensor:
    """(rows, units): the channels of a feature map are units that are seen at many places."""
    if output.ndim <= 2:
        return output.flatten(1)
    moved: Any = output.movedim(1, -1) if output.ndim > 3 else output
    return moved.reshape(-1, moved.shape[-1])
