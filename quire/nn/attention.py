"""Attention layers with state.

B batch, N queries, M keys and values, E width of the model, H heads, D = E/H width of a head.

Masks, lengths and causality are those of `quire.functional.masks`: a boolean mask is true where looking is
allowed. A query that may see no key pools zeros, so its output is what the layer makes of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import InputError
from quire.functional.attention import (
    attention,
    attention_pooling,
    bmm,
    hard_softmax,
    masked_softmax,
    projected_score,
    scaled_dot_score,
)
from quire.functional.regularise import check_rate
from quire.functional.streaming import additive_attention


class KeyValueCache:
    """Keys and values (B, H, M, D) of the tokens so far, to which each call of a layer appends.

    Room is doubled when it runs out, so that T single steps copy O(T) in all. With static=True the first call
    fills it and later ones read it: the keys of an encoder, which do not change while a decoder writes.
    """

    def __init__(self, *, static: bool = False) -> None:
        self.static = static
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def key(self) -> Tensor:
        return self._held(self._key)

    @property
    def value(self) -> Tensor:
        return self._held(self._value)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, the new ones behind the others."""
        if self._key is not None and (
            key.shape[0] != self._key.shape[0] or key.shape[1] != self._key.shape[1]
        ):
            raise InputError(
                f"keys of shape {tuple(key.shape)} behind cached ones of shape {tuple(self.key.shape)}",
                expected="the same batch and heads",
                fix="start a new cache for a new batch, or call reorder to choose its rows",
            )
        self._key = self._joined(self._key, key)
        self._value = self._joined(self._value, value)
        self._length += key.shape[-2]
        return self.key, self.value

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row rows[i], as beam search and finished sequences need it."""
        self._key = None if self._key is None else self._key.index_select(0, rows)
        self._value = None if self._value is None else self._value.index_select(0, rows)

    def trim(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        if not 0 <= length <= self._length:
            raise InputError(
                f"a cache of {self._length} tokens trimmed to {length}", expected=f"0 to {self._length}"
            )
        self._length = length

    def _held(self, buffer: Tensor | None) -> Tensor:
        if buffer is None:
            raise InputError("an empty cache", expected="keys", fix="run the layer with this cache first")
        return buffer[..., : self._length, :]

    def _joined(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        if buffer is None:
            return new
        if buffer.requires_grad or new.requires_grad:
            # Written in place, the steps before would lose what their backward needs.
            return torch.cat([buffer[..., : self._length, :], new], -2)
        needed = self._length + new.shape[-2]
        if needed > buffer.shape[-2]:
            roomier = buffer.new_empty(*buffer.shape[:-2], 2 * needed, buffer.shape[-1])
            roomier[..., : self._length, :] = buffer[..., : self._length, :]
            buffer = roomier
        elif buffer.is_inference() and not torch.is_inference_mode_enabled():
            buffer = buffer.clone()
        buffer[..., self._length : needed, :] = new
        return buffer


class MultiHeadAttention(nn.Module):
    """Concat(head_1, …, head_H) W_O with head_i = softmax(q W_i^Q (k W_i^K)ᵀ/√D) v W_i^V, batch first.

    Parameters have the names, shapes and first values of `nn.MultiheadAttention`, whose state dicts fit:
    in_proj_weight (3E, E) and in_proj_bias, or q_proj_weight, k_proj_weight and v_proj_weight where keys or
    values have widths of their own, and out_proj. With hard=True each head takes the value of its best
    key, with the soft weights' gradient.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        hard: bool = False,
    ) -> None:
        super().__init__()
        check_rate(dropout, "attention dropout")
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise InputError(
                f"{num_heads} heads for a width of {embed_dim}",
                expected="a width that the number of heads divides",
                fix=f"a width of {max(1, num_heads) * max(1, round(embed_dim / max(1, num_heads)))}",
            )
        self.embed_dim, self.num_heads, self.dropout, self.hard = embed_dim, num_heads, dropout, hard
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        shared = self.kdim == self.vdim == embed_dim
        widths = {"q_proj_weight": embed_dim, "k_proj_weight": self.kdim, "v_proj_weight": self.vdim}
        for name, width in widths.items():
            weight = None if shared else nn.Parameter(torch.empty(embed_dim, width))
            self.register_parameter(name, weight)
        whole = nn.Parameter(torch.empty(3 * embed_dim, embed_dim)) if shared else None
        self.register_parameter("in_proj_weight", whole)
        self.register_parameter("in_proj_bias", nn.Parameter(torch.zeros(3 * embed_dim)) if bias else None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's uniform weights, and biases of zero."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    @overload
    def forward(
        self, query: Tensor, key: Tensor | None = ..., value: Tensor | None = ..., *,
        mask: Tensor | None = ..., lengths: Tensor | None = ..., causal: bool = ...,
        key_padding_mask: Tensor | None = ..., cache: KeyValueCache | None = ...,
        need_weights: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, query: Tensor, key: Tensor | None = ..., value: Tensor | None = ..., *,
        mask: Tensor | None = ..., lengths: Tensor | None = ..., causal: bool = ...,
        key_padding_mask: Tensor | None = ..., cache: KeyValueCache | None = ...,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        causal: bool = False,
        key_padding_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(B, N, E), (B, M, kdim), (B, M, vdim) → (B, N, E), and the weights (B, H, N, M) if needed.

        Keys are the queries unless given (self-attention), values are the keys unless given. `mask` is
        (N, M), (B, N, M) for all heads alike, or (B, H, N, M). `key_padding_mask` (B, M) is true at keys that
        are padding, as in PyTorch. With a cache, M counts the cached keys too.
        """
        q, k, v = self._project(query, key, value, cache)
        queries, keys = q.shape[-2], k.shape[-2]
        if mask is not None and mask.dim() == 3:
            mask = mask[:, None]
        if key_padding_mask is not None:
            mask = self._without_padding(mask, key_padding_mask, (q.shape[0], keys))
        rate = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if self.hard or need_weights:
            weigh = hard_softmax if self.hard else masked_softmax
            weights = weigh(scaled_dot_score(q, k), mask, lengths, causal)
            pooled = bmm(functional.dropout(weights, rate), v)
        else:
            pooled = attention(q, k, v, mask, lengths, causal, rate)
        joined = pooled.transpose(1, 2).reshape(
            q.shape[0], queries, self.embed_dim
        )  # (B, H, N, D) → (B, N, E)
        output = self.out_proj(joined)
        return (output, weights) if need_weights and weights is not None else output

    def _project(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by heads: (B, H, N, D), (B, H, M, D), (B, H, M, D)."""
        filled = cache is not None and cache.static and len(cache) > 0
        key = query if key is None else key
        value = key if value is None else value
        self._check_input(query, *((key, value) if not filled else ()))
        weights: Sequence[Tensor]
        if self.in_proj_weight is None:
            assert self.q_proj_weight is not None
            assert self.k_proj_weight is not None
            assert self.v_proj_weight is not None
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif key is query and value is query and not filled:
            # One product instead of three.
            together = functional.linear(query, self.in_proj_weight, self.in_proj_bias)
            q, k, v = (self._by_heads(part) for part in together.chunk(3, -1))
            return (q, k, v) if cache is None else (q, *cache.append(k, v))
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q = self._by_heads(functional.linear(query, weights[0], biases[0]))
        if cache is not None and filled:
            return q, cache.key, cache.value
        k = self._by_heads(functional.linear(key, weights[1], biases[1]))
        v = self._by_heads(functional.linear(value, weights[2], biases[2]))
        return (q, k, v) if cache is None else (q, *cache.append(k, v))

    def _by_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, N, E) → (B, H, N, D)

    def _without_padding(self, mask: Tensor | None, padding: Tensor, shape: tuple[int, int]) -> Tensor:
        if padding.dtype != torch.bool or tuple(padding.shape) != shape:
            raise InputError(
                f"a key padding mask of shape {tuple(padding.shape)} and type {padding.dtype}",
                expected=f"booleans of shape {shape}, true at keys that are padding",
            )
        real = ~padding[:, None, None, :]
        if mask is None:
            return real
        return mask & real if mask.dtype == torch.bool else mask.masked_fill(~real, -torch.inf)

    def _check_input(self, query: Tensor, *sources: Tensor) -> None:
        widths = (self.embed_dim, self.kdim, self.vdim)
        shapes = [tuple(part.shape) for part in (query, *sources)]
        fits = all(
            len(shape) == 3 and shape[2] == width for shape, width in zip(shapes, widths, strict=False)
        )
        if not fits or (sources and not shapes[0][0] == shapes[1][0] == shapes[2][0]):
            raise InputError(
                f"attention of shapes {', '.join(map(str, shapes))}",
                expected="(B, N, {}), (B, M, {}) and (B, M, {}), batch first".format(*widths),
            )

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"


class AdditiveAttention(nn.Module):
    """Σ_m softmax_m(w_v·tanh(W_q q + W_k k_m)) v_m, for queries and keys of any two widths.

    Streamed: extra memory is O((N + M)·hidden), where all tanh at once would be N·M·hidden numbers.
    """

    def __init__(self, query_size: int, key_size: int, hidden: int) -> None:
        super().__init__()
        self.query_projection = nn.Linear(query_size, hidden, bias=False)
        self.key_projection = nn.Linear(key_size, hidden, bias=False)
        self.vector = nn.Parameter(torch.empty(hidden))
        nn.init.uniform_(self.vector, -(hidden**-0.5), hidden**-0.5)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """(B, N, query_size), (B, M, key_size), (B, M, V) → (B, N, V); values are the keys unless given."""
        return additive_attention(
            self.query_projection(query), self.key_projection(key), key if value is None else value,
            self.vector, mask=mask, lengths=lengths, causal=causal,
        )  # fmt: skip

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """(B, N, M), to be looked at; this holds N·M·hidden numbers."""
        scores = projected_score(self.query_projection(query), self.key_projection(key), self.vector)
        return masked_softmax(scores, mask, lengths, causal)


class AttentionPooling(nn.Module):
    """A sequence as one vector (or several) by learned queries: Σ_m softmax_m(q·x_m/√E) x_m.

    The queries start at zero, and the layer as the plain average of the valid places.
    """

    def __init__(self, embed_dim: int, num_queries: int = 1) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(num_queries, embed_dim))

    def forward(
        self, sequence: Tensor, *, mask: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """(B, M, E) → (B, E), or (B, num_queries, E) if there are several; mask is (B, 1, M)."""
        if sequence.dim() != 3 or sequence.shape[-1] != self.query.shape[-1]:
            raise InputError(
                f"a sequence of shape {tuple(sequence.shape)}",
                expected=f"(B, M, {self.query.shape[-1]})",
            )
        query = self.query.expand(sequence.shape[0], -1, -1)
        pooled = attention_pooling(query, sequence, sequence, mask=mask, lengths=lengths)
        return pooled[:, 0] if len(self.query) == 1 else pooled
