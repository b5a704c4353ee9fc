"""Attention pooling that never holds all N×M scores: blocks of keys pass by, the backward recomputes them.

N queries, M keys, D width of queries and keys, V width of values, h hidden width; leading dimensions (…)
are shared. L is their product.

For each block of queries a running maximum m, the sum z = Σ exp(s − m) and Σ exp(s − m) v are carried over
the blocks of keys; when m rises, both sums are scaled by exp(old m − new m). What is kept for the backward
is q, k, v, the result and log Σ exp s: O((N + M)(D + V)) numbers. With p = softmax(s) the backward is

    ∂v = pᵀ g,   ∂s = p ⊙ (g vᵀ − Σ_v g ⊙ out),

and the score itself is differentiated block by block by autograd. Second derivatives are not provided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name
from quire.functional.attention import check_values, check_widths, masked_softmax, projected_score
from quire.functional.masks import MaskRule, applied
from quire.kernels import BACKENDS, Backend, refusal, use_triton
from quire.kernels.once import differentiable_once

BlockScore = Callable[..., Tensor]
"""(queries, keys, *parameters) → scores, for any block of queries and of keys; −∞ forbids a key."""

# Numbers in one block. A block should lie in a core's cache on the CPU and fill a GPU.
_BLOCK_CPU = 1 << 18
_BLOCK_OTHER = 1 << 22
_SMALLEST_AREA = 1 << 10


class Pooled(NamedTuple):
    """What came out of the keys that a query saw."""

    value: Tensor
    """(…, N, V), zeros where no key was seen."""
    log_total: Tensor
    """log Σ_m exp score (…, N), −∞ where no key was seen; it has no gradient."""


def streamed_pooling(
    score: BlockScore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: Sequence[Tensor] = (),
    *,
    hidden: int = 1,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    exclude_self: bool = False,
    block: tuple[int, int] | None = None,
) -> Pooled:
    """Σ_m softmax_m(score(q, k_m, *parameters)) v_m in blocks: (…, N, D), (…, M, D), (…, M, V) → (…, N, V).

    The score must look at pairs of one query and one key only. `hidden` is how many numbers it holds for
    each pair, which the size of the blocks depends on; `block` gives that size, (queries, keys), outright.
    Half precision is computed in float32. Gradients go to everything but the mask.
    """
    check_values(key, value)
    if mask is not None and mask.requires_grad:
        raise InputError(
            "a mask with a gradient in streamed attention",
            expected="a mask that is not learned",
            fix="use attention_pooling, which holds all scores, or make it part of the score",
        )
    batch = shared_batch(query, key, value)
    rule = MaskRule.of(
        (*batch, query.shape[-2], key.shape[-2]), mask, lengths, causal, exclude_self=exclude_self
    )
    if block is None:
        block = block_size(rule.shape, hidden, query.device)
    dtype = value.dtype
    query, key, value, *parameters = (
        t if t.dtype in (torch.float32, torch.float64) else t.float()
        for t in (query, key, value, *parameters)
    )
    query, key, value = (t.expand(*batch, *t.shape[-2:]) for t in (query, key, value))
    pooled, total = _Streamed.apply(score, rule, block, query, key, value, *parameters)
    return Pooled(pooled.to(dtype), total)


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Σ_m softmax_m(w_v·tanh(q + k_m)) v_m, of queries W_q q (…, N, h) and keys W_k k (…, M, h).

    Held at once it would be N·M·h numbers, which is far more than even the scores. Extra memory here is
    O((N + M)·h). backend="auto" computes what fits in one block in one go, with autograd; "triton" is a
    kernel for CUDA, which "auto" takes for anything larger there; "torch" always streams.
    """
    check_widths("additive attention", query, key)
    check_values(key, value)
    if vector.shape != query.shape[-1:]:
        raise InputError(
            f"a vector of shape {tuple(vector.shape)} for hidden width {query.shape[-1]}",
            expected=f"({query.shape[-1]},)",
        )
    hidden = query.shape[-1]
    size = query.shape[:-1].numel() * key.shape[-2] * hidden
    learned = mask is not None and mask.requires_grad
    reason = refusal(query, key, value, vector) or ("a mask with a gradient" if learned else "")
    small = size <= _budget(query.device)
    if use_triton(backend, reason, worth=not small, takes=", and a mask that is not learned") and size:
        return _additive_kernel(query, key, value, vector, mask, lengths, causal)
    if backend == "auto" and small:
        return masked_softmax(projected_score(query, key, vector), mask, lengths, causal) @ value
    return streamed_pooling(
        projected_score, query, key, value, (vector,),
        hidden=hidden, mask=mask, lengths=lengths, causal=causal,
    ).value  # fmt: skip


def _additive_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    causal: bool,
) -> Tensor:
    from quire.kernels.additive import additive_pooling

    batch = shared_batch(query, key, value)
    rule = MaskRule.of((*batch, query.shape[-2], key.shape[-2]), mask, lengths, causal)

    def limit(scores: Tensor, rows: slice) -> None:
        scores = scores.view(*batch, *scores.shape[-2:])
        allowed, added = rule.block(rows, slice(None), scores.device)
        if added is not None:
            scores += added.to(scores.dtype)
        if allowed is not None:
            scores.masked_fill_(~allowed, -torch.inf)

    queries, keys, values = flattened(batch, query, key, value)
    pooled = additive_pooling(queries, keys, values, vector, None if rule.is_open else limit)
    return pooled.view(*batch, *pooled.shape[-2:]).to(value.dtype)


def shared_batch(*tensors: Tensor) -> tuple[int, ...]:
    """The leading dimensions (…) of tensors (…, n, w), broadcast."""
    batches = [tuple(tensor.shape[:-2]) for tensor in tensors]
    # Mostly they are equal, and broadcasting takes as long as starting a kernel.
    equal = all(batch == batches[0] for batch in batches[1:])
    return batches[0] if equal else tuple(torch.broadcast_shapes(*batches))


def flattened(batch: tuple[int, ...], *tensors: Tensor) -> list[Tensor]:
    """Leading dimensions expanded to `batch` and made one: (…, n, w) → (L, n, w)."""
    return [
        t if t.dim() == 3 and len(batch) == 1 and len(t) == batch[0]
        else t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:])
        for t in tensors
    ]  # fmt: skip


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)


def _budget(device: torch.device) -> int:
    return _BLOCK_CPU if device.type == "cpu" else _BLOCK_OTHER


def block_size(shape: tuple[int, ...], hidden: int, device: torch.device) -> tuple[int, int]:
    """(queries, keys) of a block: near square, within the budget unless the batch alone exceeds it."""
    *batch, queries, keys = shape
    area = max(_SMALLEST_AREA, _budget(device) // max(1, math.prod(batch) * hidden))
    columns = max(1, min(keys, math.isqrt(area)))
    rows = max(1, min(queries, area // columns))
    return rows, max(1, min(keys, area // rows))


def slices(total: int, size: int) -> list[slice]:
    """0 … total in steps of `size`."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


class _Streamed(torch.autograd.Function):
    """(score, rule, block, q, k, v, *parameters) → pooled values and log Σ exp score."""

    @staticmethod
    def forward(
        ctx: Any,
        score: BlockScore,
        rule: MaskRule,
        block: tuple[int, int],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        pooled = value.new_zeros(*query.shape[:-1], value.shape[-1])
        total = query.new_full(query.shape[:-1], -torch.inf)
        columns = slices(key.shape[-2], block[1])
        with torch.autocast(query.device.type, enabled=False):
            for rows in slices(query.shape[-2], block[0]):
                some = query[..., rows, :]
                out = pooled[..., rows, :]
                top = total[..., rows].clone()
                weight = value.new_zeros(top.shape)
                for part in columns:
                    scores = applied(
                        score(some, key[..., part, :], *parameters), *rule.block(rows, part, query.device)
                    )
                    new = torch.maximum(top, scores.amax(-1))
                    # Rows that have seen no key yet: any finite number does, exp(−∞ − 0) is 0.
                    base = torch.where(new == -torch.inf, 0.0, new)
                    # Subtracted at the width of the scores, where far queries still tell keys apart.
                    p = (scores - base[..., None]).to(value.dtype).exp_()
                    fade = (top - base).to(value.dtype).exp_()
                    weight.mul_(fade).add_(p.sum(-1))
                    out.mul_(fade[..., None]).add_(p @ value[..., part, :])
                    top = new
                out.div_(torch.where(weight > 0, weight, 1.0)[..., None])
                total[..., rows] = top + weight.log()
        ctx.score, ctx.rule, ctx.block = score, rule, block
        ctx.save_for_backward(query, key, value, pooled, total, *parameters)
        ctx.mark_non_differentiable(total)
        return pooled, total

    @staticmethod
    @differentiable_once("streamed attention", "attention_pooling, which holds all scores")
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
        query, key, value, pooled, total, *parameters = ctx.saved_tensors
        rule, (height, width) = ctx.rule, ctx.block
        inputs = (query, key, *parameters)
        wanted = [ctx.needs_input_grad[3], ctx.needs_input_grad[4], *ctx.needs_input_grad[6:]]
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in inputs]
        grad_value = torch.zeros_like(value, memory_format=torch.contiguous_format)
        # Σ_m p_m (g·v_m) is g·out, so it needs no second pass over the keys.
        mean = (gradient * pooled).sum(-1, keepdim=True)
        # Rows that saw no key: exp(s − ∞) is 0 whatever s is.
        total = torch.where(total == -torch.inf, torch.inf, total)[..., None]
        with torch.autocast(query.device.type, enabled=False):
            for part in slices(key.shape[-2], width):
                for rows in slices(query.shape[-2], height):
                    places = (rows, part)
                    leaves = [
                        (t[..., places[i], :] if i < 2 else t).detach().requires_grad_(wanted[i])
                        for i, t in enumerate(inputs)
                    ]
                    with torch.enable_grad():
                        raw = ctx.score(*leaves)
                    scores = applied(raw.detach(), *rule.block(rows, part, query.device))
                    p = (scores - total[..., rows, :]).to(value.dtype).exp_()
                    g = gradient[..., rows, :]
                    grad_value[..., part, :].add_(p.mT @ g)
                    if not raw.requires_grad:
                        continue
                    slope = p.mul_((g @ value[..., part, :].mT).sub_(mean[..., rows, :])).to(raw.dtype)
                    asked = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
                    found = torch.autograd.grad(
                        raw, [leaves[i] for i in asked], slope, allow_unused=True, materialize_grads=True
                    )
                    for i, piece in zip(asked, found, strict=True):
                        (grads[i][..., places[i], :] if i < 2 else grads[i]).add_(piece)
        own = [grad if need else None for grad, need in zip(grads, wanted, strict=True)]
        return None, None, None, own[0], own[1], grad_value if ctx.needs_input_grad[5] else None, *own[2:]
