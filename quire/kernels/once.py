"""Backwards that have a first derivative alone, and refuse to be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.errors import InputError

Backward = Callable[..., tuple[Any, ...]]


def differentiable_once(name: str, instead: str) -> Callable[[Backward], Backward]:
    """Of the backward of an autograd.Function that has saved its inputs: a second derivative is refused.

    PyTorch's own decorator refuses one only with respect to the gradient that arrives. A penalty of the
    gradient, ‖∂L/∂w‖², asks for it with respect to the inputs, and would be left out without a word.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def checked(ctx: Any, *arriving: Tensor) -> tuple[Any, ...]:
            with torch.no_grad():
                found = backward(ctx, *arriving)
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return found
            depends = [
                one for one in (*ctx.saved_tensors, *arriving) if one is not None and one.requires_grad
            ]
            return tuple(
                None if one is None else _Refusal.apply(name, instead, one, *depends) for one in found
            )

        return checked

    return decorate


class _Refusal(torch.autograd.Function):
    """A gradient as it is, which depends on tensors that it cannot be differentiated by."""

    @staticmethod
    def forward(ctx: Any, name: str, instead: str, gradient: Tensor, *depends: Tensor) -> Tensor:
        ctx.name, ctx.instead = name, instead
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Any, ...]:
        raise InputError(
            f"a second derivative of {ctx.name}", expected="the first one alone", fix=f"use {ctx.instead}"
        )
