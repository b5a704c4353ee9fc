"""Attention over sequences of different lengths that lie one behind the other, without padding.

B sequences, T longest length, P = Σ lengths packed places, H heads, D width.

Nothing is computed for padding, and no mask is held. On a GPU in half precision all sequences go through one
variable-length kernel of PyTorch; elsewhere each has a call of its own.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError
from quire.functional.attention import attention
from quire.functional.masks import length_mask


def pack(padded: Tensor, lengths: Tensor) -> Tensor:
    """The valid places of (B, T, …), one sequence after the other: (P, …)."""
    if lengths.shape != padded.shape[:1] or bool(((lengths < 0) | (lengths > padded.shape[1])).any()):
        raise InputError(
            f"lengths {lengths.tolist()} for sequences of shape {tuple(padded.shape)}",
            expected=f"{len(padded)} whole numbers from 0 to {padded.shape[1]}",
        )
    return padded[length_mask(lengths, padded.shape[1])]


def unpack(packed: Tensor, lengths: Tensor, length: int | None = None) -> Tensor:
    """(P, …) as (B, T, …) with zeros behind each sequence; T is `length`, or the longest there is."""
    longest = int(lengths.max()) if lengths.numel() else 0
    length = longest if length is None else length
    if int(lengths.sum()) != len(packed) or longest > length:
        raise InputError(
            f"{len(packed)} packed places for lengths {lengths.tolist()}",
            expected=f"{int(lengths.sum())} places, in sequences of at most {length}",
        )
    padded = packed.new_zeros(len(lengths), length, *packed.shape[1:])
    return padded.masked_scatter(
        length_mask(lengths, length).reshape(len(lengths), length, *[1] * (packed.dim() - 1)), packed
    )


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: Tensor,
    key_lengths: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """softmax(q·k/√D) v inside each sequence: (P, H, D), (P', H, D), (P', H, D) → (P, H, D).

    `key_lengths` are the queries' own unless given. Causal is that of `quire.functional.masks`; a sequence
    without keys gives zeros.
    """
    key_lengths = query_lengths if key_lengths is None else key_lengths
    places = int(query_lengths.sum()), int(key_lengths.sum())
    if len(query_lengths) != len(key_lengths) or places != (len(query), len(key)) or len(value) != len(key):
        raise InputError(
            f"{len(query)} queries, {len(key)} keys and {len(value)} values for lengths "
            f"{query_lengths.tolist()} and {key_lengths.tolist()}",
            expected=f"{places[0]} queries, and {places[1]} keys and values",
            fix="pack each with its own lengths",
        )
    kernel = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if kernel and min(places) and query.shape[-1] == value.shape[-1]:
        return _by_kernel(query, key, value, query_lengths, key_lengths, causal)
    pieces = zip(
        *(t.split(n.tolist()) for t, n in ((query, query_lengths), (key, key_lengths), (value, key_lengths))),
        strict=True,
    )
    pooled = [
        attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), causal=causal).transpose(0, 1)
        for q, k, v in pieces
    ]
    return torch.cat(pooled) if pooled else query.new_zeros(0, *value.shape[1:])


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, query_lengths: Tensor, key_lengths: Tensor, causal: bool
) -> Tensor:
    # Imported here: the module needs a build of PyTorch with CUDA.
    from torch.nn.attention.varlen import varlen_attn

    def starts(lengths: Tensor) -> Tensor:
        ends = lengths.to(query.device, torch.int32).cumsum(0, dtype=torch.int32)
        return functional.pad(ends, (1, 0))

    # Earlier versions of PyTorch say is_causal, later ones an open window to the left.
    window = "window_size" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if causal:
        options = {"window_size": (-1, 0)} if window else {"is_causal": True}
    pooled: Any = varlen_attn(
        query, key, value, starts(query_lengths), starts(key_lengths),
        int(query_lengths.max()), int(key_lengths.max()), **options,
    )  # fmt: skip
    alive = key_lengths.to(query.device).repeat_interleave(query_lengths.to(query.device)) > 0
    return torch.where(alive[:, None, None], pooled, 0.0)
