"""Optimiser updates as pure functions: old values in, new values out, nothing changed in place.

Each update takes one tensor or a list of tensors in each place and returns the same.

w weights · g gradient · η step size · μ momentum · v velocity · λ strength of a penalty · γ bound
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from quire.errors import InputError

Tensors = TypeVar("Tensors", Tensor, list[Tensor])
Part = TypeVar("Part")


# Updates --------------------------------------------------------------------------------------


def gradient_descent_step(weights: Tensors, gradients: Tensors, step_size: float) -> Tensors:
    """w ← w − η·g; weights by their own gradient, biases by theirs."""
    return _each(lambda w, g: w - step_size * g, weights, gradients)


def momentum_step(
    weights: Tensors, gradients: Tensors, velocity: Tensors, step_size: float, momentum: float = 0.9
) -> tuple[Tensors, Tensors]:
    """v ← μ·v + g, w ← w − η·v, from v = 0. Returns (w, v)."""
    velocity = _each(lambda v, g: momentum * v + g, velocity, gradients)
    return gradient_descent_step(weights, velocity, step_size), velocity


def effective_step(step_size: float, momentum: float) -> float:
    """η/(1−μ): what a step becomes under a constant gradient, since Σ_k μ^k = 1/(1−μ)."""
    if not 0 <= momentum < 1:
        raise InputError(
            f"momentum {momentum!r}",
            expected="a number in [0, 1)",
            fix="from 1 on, velocity under a constant gradient grows without bound; 0.9 is usual",
        )
    return step_size / (1 - momentum)


def adam_step(
    weights: Tensors,
    gradients: Tensors,
    first: Tensors,
    second: Tensors,
    step: int,
    step_size: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> tuple[Tensors, Tensors, Tensors]:
    """m ← β₁m+(1−β₁)g, s ← β₂s+(1−β₂)g², w ← w − η·m̂/(√ŝ+ε) with m̂ = m/(1−β₁^t), ŝ = s/(1−β₂^t).

    `step` is t, counted from 1; moments start at 0, which the divisions correct. Returns (w, m, s).
    """
    if step < 1:
        raise InputError(f"step {step!r} of Adam", expected="a step >= 1", fix="count steps from 1")
    first = _each(lambda m, g: beta1 * m + (1 - beta1) * g, first, gradients)
    second = _each(lambda s, g: beta2 * s + (1 - beta2) * g.square(), second, gradients)
    scale, spread = 1 / (1 - beta1**step), 1 / (1 - beta2**step)

    def move(w: Tensor, m: Tensor, s: Tensor) -> Tensor:
        return w - step_size * (scale * m) / ((spread * s).sqrt() + eps)

    return _each(move, weights, first, second), first, second


# Penalties ------------------------------------------------------------------------------------


def decay_weights(weights: Tensors, step_size: float, strength: float) -> Tensors:
    """w ← (1−ηλ)·w, beside the optimiser's step."""
    return _each(lambda w: (1 - step_size * strength) * w, weights)


def add_l2_gradient(gradients: Tensors, weights: Tensors, strength: float) -> Tensors:
    """g ← g + λw, the gradient of ½λ‖w‖². One SGD step on it is `decay_weights` and a plain step;
    for Adam, which rescales gradients, it is not."""
    return _each(lambda g, w: g + strength * w, gradients, weights)


def add_l1_gradient(gradients: Tensors, weights: Tensors, strength: float) -> Tensors:
    """g ← g + λ·sign(w), the gradient of λ‖w‖₁ with 0 at 0."""
    return _each(lambda g, w: g + strength * w.sign(), gradients, weights)


# Clipping -------------------------------------------------------------------------------------


def global_norm(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """‖g‖₂ of all entries together, as if the tensors were one long vector; in float32 at least, since
    half precision has no numbers above 65504 and bfloat16 three digits."""
    parts = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    wide = [torch.promote_types(part.dtype, torch.float32) for part in parts]
    norms = [torch.linalg.vector_norm(g, dtype=dtype) for g, dtype in zip(parts, wide, strict=True)]
    return torch.stack([norm.to(norms[0]) for norm in norms]).norm()


def clip_by_norm(gradients: Tensors, limit: float) -> Tensors:
    """g ← (γ/‖g‖)·g when ‖g‖ > γ, with one norm over all tensors: the direction is kept."""
    _check_limit(limit)
    factor = (limit / global_norm(gradients)).clamp(max=1.0)
    return _each(lambda g: g * factor.to(g), gradients)


def clip_by_value(gradients: Tensors, limit: float) -> Tensors:
    """g_i ← min(max(g_i, −γ), γ): each component by itself, which may turn the direction."""
    _check_limit(limit)
    return _each(lambda g: g.clamp(-limit, limit), gradients)


# Batches --------------------------------------------------------------------------------------


def minibatches(
    rows: int, batch_size: int, generator: torch.Generator | None = None, drop_last: bool = False
) -> Iterator[Tensor]:
    """Row numbers of the batches of one epoch: drawn without replacement, so each row comes once."""
    if rows < 1 or batch_size < 1:
        raise InputError(
            f"batches of {batch_size} out of {rows} rows",
            expected="at least one row, and a batch size of at least 1",
        )
    for batch in torch.randperm(rows, generator=generator).split(batch_size):
        if len(batch) == batch_size or not drop_last:
            yield batch


def accumulate(
    loss: Callable[[Part], tuple[Tensor, Tensor | float]],
    parts: Iterable[Part],
    parameters: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Σ sum/Σ weight over micro-batches, and its gradient: the full batch's, with memory for one part.

    `loss` maps a part to the *sum* of its samples' losses and their weight (how many samples or tokens
    count), never to a mean: a mean of means is wrong as soon as the weights differ. The weight must
    not depend on the parameters.
    """
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    total: Tensor | float = 0.0
    weight: Tensor | float = 0.0
    for part in parts:
        part_sum, part_weight = loss(part)
        for gradient, piece in zip(gradients, _gradients(part_sum, parameters), strict=True):
            gradient += piece
        total, weight = total + part_sum.detach(), weight + part_weight
    if not isinstance(total, Tensor):
        raise InputError("no part to accumulate over", expected="at least one micro-batch")
    if not weight > 0:
        raise InputError(
            f"a total weight of {float(weight):g}",
            expected="a weight above 0",
            fix="leave out steps in which every target is ignored",
        )
    return total / weight, [gradient / weight for gradient in gradients]


def accumulate_coupled(
    represent: Callable[[Part], Tensor],
    loss: Callable[[Tensor], Tensor],
    parts: Iterable[Part],
    parameters: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """The full batch's loss and gradient where samples are compared with each other (InfoNCE).

    Representations r of all parts are computed without a graph, ∂L/∂r is taken on the whole batch, and
    then Σ_parts (∂r/∂w)ᵀ·∂L/∂r with a graph for one part at a time. `represent` runs twice on each
    part, so it must not be random.
    """
    parts = list(parts)
    if not parts:
        raise InputError("no part to accumulate over", expected="at least one micro-batch")
    with torch.no_grad():
        pieces = [represent(part) for part in parts]
    whole = torch.cat(pieces).requires_grad_()
    value = loss(whole)
    (slopes,) = torch.autograd.grad(value, whole)
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    for part, slope in zip(parts, slopes.split([len(piece) for piece in pieces]), strict=True):
        inner = (represent(part) * slope).sum()
        for gradient, piece in zip(gradients, _gradients(inner, parameters), strict=True):
            gradient += piece
    return value.detach(), gradients


# Memory ---------------------------------------------------------------------------------------


def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` (a layer, say) that keeps its inputs only and is computed again in the backward pass:
    the same values and gradients, one more forward pass, less memory. Random masks are redrawn alike."""

    def run(*args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False)

    return run


def saved_bytes(function: Callable[..., Any], *args: Any) -> int:
    """Bytes that autograd keeps for the backward pass of function(*args), parameters left out and a
    storage that is kept twice counted once."""
    # Storages are held, not only their sizes: an address that is freed may be given out again.
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*args)
    return sum(storage.nbytes() for storage in storages.values())


# Helpers --------------------------------------------------------------------------------------


def _each(function: Callable[..., Tensor], first: Tensors, *others: Tensors) -> Tensors:
    """`function` on tensors, or entry by entry on lists of them."""
    if isinstance(first, Tensor):
        return function(first, *others)
    lists = cast("tuple[list[Tensor], ...]", (first, *others))
    lengths = [len(tensors) for tensors in lists]
    if len(set(lengths)) != 1:
        raise InputError(
            f"lists of {', '.join(map(str, lengths))} tensors",
            expected="one gradient (and one state) for each weight",
            fix="pass lists of equal length in the same order",
        )
    return cast("Tensors", [function(*tensors) for tensors in zip(*lists, strict=True)])


def _gradients(value: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """∂value/∂parameters; 0 where it does not depend on one, or on none."""
    if not value.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]
    return torch.autograd.grad(value, parameters, materialize_grads=True)


def _check_limit(limit: float) -> None:
    if not limit > 0:
        raise InputError(f"a gradient bound of {limit!r}", expected="a number > 0")
