"""The mode that a network is in while it is looked at, and who looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Evaluation mode inside, and each module's own mode again afterwards; a plain function has none."""
    if not isinstance(model, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def has_hooks(model: nn.Module) -> bool:
    """Whether anybody wants to be called when a module computes; another way to compute calls nobody."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in model.modules() for kind in kinds)
