"""Which keys a query may look at: masks, valid lengths and causality, whole or block by block.

B batch (the first dimension), N queries, M keys; scores are (…, N, M).

A mask is boolean, true where looking is allowed, or a float that is added to the scores, −∞ where it is
not. Lengths count the valid keys: one number for each entry of the first dimension (B,), or one for
each of its queries (B, N). Causal means that a query sees no key after its own place, where the last query
stands beside the last key: with as many queries as keys that is the usual triangle, and new queries beside
older, cached keys see all of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import InputError


@dataclass(frozen=True)
class MaskRule:
    """Everything that limits the keys of a query, for scores of one shape (…, N, M)."""

    shape: tuple[int, ...]
    mask: Tensor | None = None
    lengths: Tensor | None = None
    causal: bool = False
    exclude_self: bool = False
    """Query n does not see key n: leave-one-out."""

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        causal: bool = False,
        *,
        exclude_self: bool = False,
    ) -> MaskRule:
        """The rule, once it is known to fit the shape."""
        shape = tuple(shape)
        _check_mask(mask, shape)
        if exclude_self and shape[-1] != shape[-2]:
            raise InputError(
                f"exclude_self with {shape[-2]} queries and {shape[-1]} keys",
                expected="the queries to be the keys, in the same order",
            )
        return cls(shape, mask, _aligned_lengths(lengths, shape), causal, exclude_self)

    @property
    def is_open(self) -> bool:
        """Every query sees every key, and nothing is added to a score."""
        return self.mask is None and self.lengths is None and not self.causal and not self.exclude_self

    def block(self, rows: slice, columns: slice, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """(allowed, added) for these queries and keys, each broadcastable to their scores, or None."""
        queries, keys = self.shape[-2:]
        allowed: Tensor | None = None
        added: Tensor | None = None
        column = torch.arange(*columns.indices(keys), device=device)
        row = torch.arange(*rows.indices(queries), device=device)[:, None]
        if self.mask is not None:
            part = _cut(_cut(self.mask, -2, rows), -1, columns)
            if part.dtype == torch.bool:
                allowed = part
            else:
                added, allowed = part, part != -torch.inf
        if self.lengths is not None:
            allowed = _both(allowed, column < _cut(self.lengths, -2, rows))
        if self.causal:
            allowed = _both(allowed, column <= row + (keys - queries))
        if self.exclude_self:
            allowed = _both(allowed, column != row)
        return allowed, added

    def whole(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """(allowed, added) for all scores, no larger than the masks themselves have to be."""
        return (None, None) if self.is_open else self.block(slice(None), slice(None), device)

    def apply(self, scores: Tensor) -> Tensor:
        """Scores with what the rule adds to them, −∞ where looking is forbidden."""
        return applied(scores, *self.whole(scores.device))


def applied(scores: Tensor, allowed: Tensor | None, added: Tensor | None) -> Tensor:
    """scores + added, and −∞ where not allowed."""
    scores = scores if added is None else scores + added.to(scores.dtype)
    # Filled rather than added: a score may be infinite itself, and ∞ − ∞ is no number.
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def causal_mask(queries: int, keys: int | None = None, device: torch.device | None = None) -> Tensor:
    """(N, M), true where key m ≤ n + (M − N): the last query stands beside the last key."""
    keys = queries if keys is None else keys
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def length_mask(lengths: Tensor, keys: int) -> Tensor:
    """(…, M), true at the first `lengths` of M keys."""
    return torch.arange(keys, device=lengths.device) < lengths[..., None]


def _cut(tensor: Tensor, dim: int, part: slice) -> Tensor:
    """A slice along one dimension, which is left alone where it is to be broadcast or is not there."""
    if tensor.dim() < -dim or tensor.shape[dim] == 1:
        return tensor
    start, stop, _ = part.indices(tensor.shape[dim])
    return tensor.narrow(dim, start, stop - start)


def _both(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one & other


def _check_mask(mask: Tensor | None, shape: tuple[int, ...]) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            f"a mask of type {mask.dtype}",
            expected="booleans, true where looking is allowed, or floats that are added to the scores",
            fix="use mask.bool() for a mask of ones and zeros",
        )
    try:
        fits = torch.broadcast_shapes(mask.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise InputError(
            f"a mask of shape {tuple(mask.shape)} for scores of shape {shape}",
            expected="a shape that can be broadcast to (…, queries, keys)",
            fix="give a mask of keys (B, M) as mask[:, None, :], or lengths instead",
        )


def _aligned_lengths(lengths: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Lengths as (…, N or 1, 1), to be compared with the number of a key."""
    if lengths is None:
        return None
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise InputError(
            f"lengths of type {lengths.dtype}", expected="whole numbers", fix="use lengths.long()"
        )
    inner = len(shape) - 2
    if lengths.dim() == 0:
        return lengths.reshape(1, 1)
    if lengths.shape == shape[:1]:
        return lengths.reshape(shape[0], *[1] * inner, 1)
    if inner and lengths.shape == (shape[0], shape[-2]):
        return lengths.reshape(shape[0], *[1] * (inner - 1), shape[-2], 1)
    raise InputError(
        f"lengths of shape {tuple(lengths.shape)} for scores of shape {shape}",
        expected=f"({shape[0]},)" + (f" or ({shape[0]}, {shape[-2]})" if inner else ""),
        fix="give one length for each sequence, or one for each query of each sequence",
    )
