"""Parameters laid out flat, so that the optimiser, the guard and clipping are one call each.

A group is a run of parameters of one player that share hyper-parameters. Their values become views
into one buffer, their gradients views into another. For small models a step then costs one kernel
instead of one per tensor: 12 µs against 32 µs for two dense layers on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from quire.errors import InputError


class Group:
    """Some parameters of a player in one buffer `flat`, with their gradients in `grad`."""

    split = False
    """Whether each process has its own part of them, and nobody the whole."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, decays: bool, step_factor: float, joins: int = 0
    ) -> None:
        self.names = list(parameters)
        self.counted_as = self.names[0]
        """What the count of its steps is called in a checkpoint."""
        self.parameters = list(parameters.values())
        self.decays = decays
        self.step_factor = step_factor
        self.joins = joins
        """The step from which on these parameters move."""
        self.active = True
        first = self.parameters[0]
        size = sum(p.numel() for p in self.parameters)
        self.flat = torch.empty(size, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros_like(self.flat)
        views = zip(self.parameters, self.views(self.flat), self.views(self.grad), strict=True)
        for parameter, value, gradient in views:
            value.copy_(parameter.detach())
            parameter.data = value
            parameter.grad = gradient

    def views(self, flat: Tensor) -> list[Tensor]:
        """Slices of a buffer in the shapes of the parameters, and in their order in memory: channels of a
        convolution may come last."""
        pieces = flat.split([p.numel() for p in self.parameters])
        return [
            piece.view(p.shape) if p.is_contiguous() else _channels_last(piece, p)
            for piece, p in zip(pieces, self.parameters, strict=True)
        ]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, self.views(flat), strict=True))

    def loosen(self) -> None:
        """Before a backward by autograd: it hands over new gradients, which costs less than adding them
        to the buffer one by one."""
        for parameter in self.parameters:
            parameter.grad = None

    def gather(self) -> None:
        """After it: all gradients into the buffer in one call."""
        parts = [
            p.new_zeros(p.numel()) if p.grad is None else _in_order_of(p, p.grad).reshape(-1)
            for p in self.parameters
        ]
        torch.cat(parts, out=self.grad)

    def set_active(self, active: bool) -> None:
        """Whether the parameters move; those that wait get no gradient."""
        self.active = active
        for parameter in self.parameters:
            parameter.requires_grad_(active)
        self.grad.zero_()

    def release(self) -> None:
        """Give each parameter memory of its own again, so that nothing of the layout outlives training."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
            parameter.grad = None
            parameter.requires_grad_(True)  # what has not joined yet was frozen for the time of training


def _channels_last(piece: Tensor, parameter: Tensor) -> Tensor:
    out, channels, rows, columns = parameter.shape
    return piece.view(out, rows, columns, channels).permute(0, 3, 1, 2)


def _in_order_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with its dimensions as the parameter has them in memory."""
    return gradient if parameter.is_contiguous() else gradient.permute(0, 2, 3, 1)


def make_whole(
    parameters: Mapping[str, nn.Parameter], *, decays: bool, step_factor: float, joins: int = 0
) -> list[Group]:
    """One group of all of them."""
    return [Group(parameters, decays=decays, step_factor=step_factor, joins=joins)]


def make_groups(
    parameters: Mapping[str, nn.Parameter],
    *,
    undecayed: Collection[str],
    step_factors: Mapping[str, float],
    joins: Mapping[str, int] | None = None,
    make: Callable[..., list[Group]] = make_whole,
) -> list[Group]:
    """Groups by type, device, decay, step factor and the step from which on they move."""
    joins = joins or {}
    if not parameters:
        raise InputError(
            "a player without trainable parameters",
            expected="at least one parameter with requires_grad=True",
            fix="unfreeze a layer, or remove the player",
        )
    found: dict[tuple[object, ...], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        when = joins.get(name, 0)
        key = (parameter.dtype, parameter.device, name not in undecayed, step_factors.get(name, 1.0), when)
        found.setdefault(key, {})[name] = parameter
    return [
        group
        for key, members in found.items()
        for group in make(members, decays=key[2], step_factor=key[3], joins=key[4])
    ]
