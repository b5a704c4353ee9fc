"""Cross-entropy of a linear layer without its logits: −log softmax(W h + b)_y for large vocabularies.

N rows, D features, V classes, R rows of a chunk.

The logits of N rows are N·V numbers, and autograd keeps their log-probabilities and makes their gradient
besides. Here R rows are done at a time. The gradient of a sum over rows waits for nothing from above but one
factor, so it is taken in the same pass, while the chunk's probabilities are there:

    P = softmax(H Wᵀ + b) − onehot(y),   ∂/∂H = P W,   ∂/∂W = Pᵀ H,   ∂/∂b = Pᵀ 1

Operations: 6·N·V·D, as many as with all logits. With `reduction="none"` each row has a factor of its own, and
backward makes the logits a second time: 8·N·V·D.

Numbers in memory, beside the arguments: 2·R·V for a chunk's logits and log-probabilities, N·D + V·D (+ V)
for the gradients; ∂/∂W is added up in float32 or better. Chunks of the vocabulary as well would cost more
than they save: the normaliser would need a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name
from quire.functional.losses import IGNORE_INDEX
from quire.functional.reduction import mean_of
from quire.kernels import refusal
from quire.kernels.once import differentiable_once

CHUNK_NUMBERS = {"cuda": 11 * 2**23, "cpu": 2**23}
"""R·V unless `chunk` says otherwise. Each chunk reads and writes all of ∂/∂W, which takes as long as the
products of a few rows on a CPU and of some 200 on an H200; chunks of ten times as many make that small."""

TILE = 256
"""Rows of which chunks are multiples: tensor cores leave no part of a tile idle."""

ALIGNED = 64
"""Classes of which a GPU's products are done in multiples: GPT-2's 50,257 would be five times as slow, as
hardly a row begins where a tensor core can read."""

INSTEAD = "cross_entropy of the logits, which holds them all"

Arguments = tuple[Tensor, Tensor, Tensor | None, Tensor, int, int, torch.dtype]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """cross_entropy(hidden Wᵀ + b, target) for hidden (…, D), weight (V, D), bias (V,) and classes (…).

    Rows whose target is `ignore_index` count nothing; where nothing counts, the mean is 0. Products are in
    the type of `hidden`, or in autocast's; the loss is float32 or better. `chunk` is the number of rows whose
    logits exist at a time. The result can be differentiated once.
    """
    _check(hidden, weight, target, bias, ignore_index, reduction, chunk)
    device = hidden.device.type
    if chunk is None:
        chunk = max(1, CHUNK_NUMBERS.get(device, CHUNK_NUMBERS["cuda"]) // max(1, len(weight)))
        chunk = chunk // TILE * TILE or chunk
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    function = _Each if reduction == "none" else _Total
    with torch.autocast(device, enabled=False):  # inside, each product has its type already
        loss = cast(Tensor, function.apply(rows, weight, bias, labels, ignore_index, chunk, product))
    if reduction == "none":
        return loss.view(target.shape)
    return loss if reduction == "sum" else mean_of(loss, (target != ignore_index).sum())


class _Total(torch.autograd.Function):
    """Σ −log p over the rows that count. Its gradients are there when the sum is."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        losses, gradients = _losses_and_gradients(cast(Arguments, arguments), None, ctx.needs_input_grad)
        counted = arguments[3] != arguments[4]
        ctx.save_for_backward(*arguments[:3], *gradients, counted)
        ctx.types = [None if one is None else one.dtype for one in arguments[:3]]
        return (losses * counted).sum()

    @staticmethod
    @differentiable_once("linear_cross_entropy", INSTEAD)
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, counted = ctx.saved_tensors[3:]
        factors = ((counted * factor).unsqueeze(1), factor, factor)
        found = [
            None if one is None else _scaled(one, each, dtype)
            for one, each, dtype in zip(gradients, factors, ctx.types, strict=True)
        ]
        return *found, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient·factor rounded to `dtype`, without a copy in the wider type."""
    out = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    return torch.mul(gradient, factor.to(gradient.dtype), out=out)


class _Each(torch.autograd.Function):
    """−log p of each row, 0 where it does not count. Backward makes the logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:4])
        ctx.options = arguments[4:]
        losses, _ = _losses_and_gradients(cast(Arguments, arguments), None, (False, False, False))
        return losses * (arguments[3] != arguments[4])

    @staticmethod
    @differentiable_once("linear_cross_entropy", INSTEAD)
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:
        arguments = (*ctx.saved_tensors, *ctx.options)
        counted = arguments[3] != arguments[4]
        _, gradients = _losses_and_gradients(arguments, factors * counted, ctx.needs_input_grad)
        given = zip(gradients, arguments[:3], strict=True)
        found = [None if one is None else one.to(argument.dtype) for one, argument in given]
        return *found, None, None, None, None


def _losses_and_gradients(
    arguments: Arguments, factors: Tensor | None, needed: Sequence[bool]
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """−log p of each row, and the gradients that are needed of Σ factor · (−log p).

    Without factors, rows that do not count are left out of ∂/∂W and ∂/∂b alone; their losses and ∂/∂H are
    whatever they are.
    """
    rows, weight, bias, target, ignore_index, chunk, product = arguments
    wide = torch.promote_types(product, torch.float32)
    counted = target != ignore_index
    rows, matrix = rows.to(product), weight.to(product)
    classes = len(weight)
    in_place = _kernel(matrix[:1]) if any(needed) and bias is None else None
    if in_place is None:
        # A row of zeros adds nothing to ∂/∂W, so that nobody has to pass over the chunk's N·V numbers for it.
        rows = rows.masked_fill(~counted.unsqueeze(1), 0)
        target = target.masked_fill(~counted, 0)
    if in_place is not None and classes % ALIGNED:
        # A class of zeros has a surplus of 0, and so adds nothing to any product.
        matrix = torch.nn.functional.pad(matrix, (0, 0, 0, -classes % ALIGNED))
    shift = None if bias is None else bias.to(product)
    losses = torch.empty(len(rows), dtype=wide, device=rows.device)
    of_rows = torch.empty_like(rows) if needed[0] else None
    of_weight: Tensor | None = None
    of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        some = rows[part]
        logits = some @ matrix.t() if shift is None else torch.addmm(shift, some, matrix.t())
        if in_place is not None:
            losses[part] = in_place(logits, target[part], classes, ignore_index)
            surplus = logits
        else:
            label = target[part].unsqueeze(1)
            log_probability = logits.log_softmax(1, dtype=wide)
            losses[part] = -log_probability.gather(1, label).squeeze(1)
            if not any(needed):
                continue
            surplus = _surplus(log_probability, label)
            if of_bias is not None:
                of_bias += (counted if factors is None else factors)[part].to(wide) @ surplus
            surplus = surplus.to(product)
        column = None if factors is None else factors[part].to(product).unsqueeze(1)
        if of_rows is not None:
            of_rows[part] = surplus @ matrix if column is None else surplus @ matrix * column
        if needed[1]:
            some = some if column is None else some * column
            of_weight = _added(of_weight, surplus, some, wide, alone=len(rows) <= chunk)
        del logits, surplus  # before the next chunk's are made
    if needed[1] and of_weight is None:
        of_weight = torch.zeros_like(matrix)
    return losses, (of_rows, None if of_weight is None else of_weight[:classes], of_bias)


def _surplus(log_probability: Tensor, label: Tensor) -> Tensor:
    """softmax − onehot; the array that is given may be overwritten."""
    if torch.compiler.is_compiling():
        # Nothing but element by element, so that it is fused: no array of the wide type is written.
        here = torch.arange(log_probability.shape[1], device=label.device) == label
        return torch.where(here, log_probability.exp() - 1, log_probability.exp())
    surplus = log_probability.exp_()
    return surplus.scatter_add_(1, label, torch.full_like(label, -1, dtype=surplus.dtype))


def _added(total: Tensor | None, surplus: Tensor, some: Tensor, wide: torch.dtype, *, alone: bool) -> Tensor:
    """total + Pᵀ H in the wide type; of a chunk that is `alone`, the product, which adds up inside."""
    if alone:
        return surplus.t() @ some
    if total is None:
        total = torch.zeros(surplus.shape[1], some.shape[1], dtype=wide, device=some.device)
    if wide == surplus.dtype:
        return total.addmm_(surplus.t(), some)
    if not total.is_cuda:
        return total.add_(surplus.t() @ some)
    add_product_(total, surplus, some)
    return total


@torch.library.custom_op("quire::add_product_", mutates_args=("total",))
def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += leftᵀ right, rounded to the type of `total` alone. PyTorch's compiler would round the product
    to the narrow type, write it, and add it in a second pass."""
    torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)


@add_product_.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    return None


def _kernel(matrix: Tensor) -> Callable[[Tensor, Tensor, int, int], Tensor] | None:
    """The kernel that makes a chunk's surplus in one pass, where it can run."""
    if refusal(matrix):
        return None
    from quire.kernels.surplus import surplus_

    return cast(Callable[[Tensor, Tensor, int, int], Tensor], surplus_)


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    chunk: int | None,
) -> None:
    if reduction not in ("none", "sum", "mean"):
        raise unknown_name("reduction", reduction, ("none", "sum", "mean"))
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk is {chunk}", expected="a number of rows >= 1", fix="leave chunk out")
    fits = weight.dim() == 2 and hidden.dim() and hidden.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = ", ".join(str(tuple(one.shape)) for one in (hidden, weight, bias) if one is not None)
        raise InputError(
            f"linear_cross_entropy of hidden, weight (and bias) of shapes {shapes}",
            expected="hidden (…, D), weight (V, D) and bias (V,)",
            fix="give the weight of the last linear layer, and what goes into that layer",
        )
    if target.is_floating_point() or target.shape != hidden.shape[:-1]:
        raise InputError(
            f"a {target.dtype} target of shape {tuple(target.shape)} for hidden {tuple(hidden.shape)}",
            expected=f"class indices (torch.int64) of shape {tuple(hidden.shape[:-1])}",
            fix="give one class for each row of hidden",
        )
    # On a GPU the same check would wait for the device, whose kernel asserts; a compiled graph would break.
    if target.device.type == "cpu" and target.numel() and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in torch.aminmax(target.masked_fill(target == ignore_index, 0)))
        if low < 0 or high >= len(weight):
            raise InputError(
                f"class {low if low < 0 else high} in the target",
                expected=f"classes from 0 to {len(weight) - 1}, or ignore_index ({ignore_index})",
                fix="number the classes from 0, or give the weight more rows",
            )
