"""Encoder-decoder of LSTMs with additive attention over the encoder's states.

B pairs, S source tokens, T target tokens, V target words, H width, D width of an encoder state (H, or 2H in
both directions), A width of the scores, L layers.

    states h_1 … h_S of the source; the decoder begins with tanh(W v), v = the encoder's last state(s)
    s_l      = LSTM(y_{l−1}, s_{l−1})
    α_l      = softmax_i w_vᵀ tanh(W_q s_l + W_k h_i)      over the real tokens of the source
    p(y_l)   = softmax(W_o tanh(W_c [s_l; Σ_i α_{l,i} h_i]))

As in Luong, Pham and Manning (2015) attention reads the state after y_{l−1}, and its result does not return
to the LSTM: with teacher forcing all of the target is one call of the LSTM and one of attention. Scores are
those of Bahdanau, Cho and Bengio (2015).

What follows the last real token of a source never enters a state. A source of padding alone has states,
attention and v of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional.attention import masked_softmax, projected_score
from quire.functional.streaming import additive_attention
from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model
from quire.models.vision import check_probability
from quire.nn.attention import AdditiveAttention
from quire.nn.recurrent import LSTM

MOST_HELD = 2**24
"""Numbers B·T·S·A that are held at once, which is faster; more of them are streamed."""


@dataclass(frozen=True)
class Seq2SeqConfig:
    source_vocab: int
    target_vocab: int
    width: int = 128
    layers: int = 1
    dropout: float = 0.0
    bidirectional: bool = True
    attention_width: int = 128
    padding: int = 0
    """The source token that is none. Targets need none: what follows the end is never read."""
    begin: int = 1
    end: int = 2

    def __post_init__(self) -> None:
        for name in ("source_vocab", "target_vocab", "width", "layers", "attention_width"):
            check_positive_integer(name, getattr(self, name))
        check_probability("dropout", self.dropout)
        places = (("padding", "source"), ("begin", "target"), ("end", "target"))
        for name, side in places:
            words = getattr(self, f"{side}_vocab")
            if not 0 <= getattr(self, name) < words:
                raise InputError(
                    f"{name} is {getattr(self, name)!r}",
                    expected=f"a token of the {side}, from 0 to {words - 1}",
                    fix=f"count it into {side}_vocab",
                )


class DecoderState(NamedTuple):
    """All that the next token depends on; the first dimension of each is B."""

    keys: Tensor
    """W_k h, (B, S, A)."""
    values: Tensor
    """h, (B, S, D)."""
    real: Tensor
    """Where the source has a token, (B, S)."""
    hidden: Tensor
    """(B, L, H)."""
    cell: Tensor
    """(B, L, H)."""


@model(
    "seq2seq",
    Seq2SeqConfig,
    example=Example({"source_vocab": 7, "target_vocab": 6, "width": 8, "attention_width": 5}, (5,)),
)
class Seq2Seq(nn.Module):
    """Source tokens (B, S) and target tokens so far (B, T) → logits of the next ones (B, T, V)."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        width, layers = config.width, config.layers
        self.source_embedding = nn.Embedding(config.source_vocab, width)
        self.target_embedding = nn.Embedding(config.target_vocab, width)
        self.encoder = LSTM(width, width, layers, dropout=config.dropout, bidirectional=config.bidirectional)
        self.decoder = LSTM(width, width, layers, dropout=config.dropout)
        states = self.encoder.output_size
        self.bridge = nn.Linear(states, 2 * layers * width)
        self.attention = AdditiveAttention(width, states, config.attention_width)
        self.combine = nn.Linear(width + states, width)
        self.output = nn.Linear(width, config.target_vocab)
        self.dropout = nn.Dropout(config.dropout)

    @property
    def begin(self) -> int:
        return self.config.begin

    @property
    def end(self) -> int:
        return self.config.end

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Teacher forcing: position l has read begin, y_1 … y_{l−1} and scores y_l."""
        return self._decode(target_in, self.encode(source))[0]

    def attend(self, source: Tensor, target_in: Tensor) -> tuple[Tensor, Tensor]:
        """The logits (B, T, V), and the weights α on the source (B, T, S), which `forward` may never hold."""
        state = self.encode(source)
        queries, _ = self._recur(target_in, state)
        weights = self._weights(self.attention.query_projection(queries), state)
        return self._read_out(queries, weights @ state.values), weights

    def encode(self, source: Tensor) -> DecoderState:
        """The state before the first token."""
        _require_tokens("source", source)
        places = torch.arange(1, source.shape[1] + 1, device=source.device)
        lengths = ((source != self.config.padding) * places).amax(1) if source.shape[1] else source.sum(1)
        values, (last, _) = self.encoder(self.dropout(self.source_embedding(source)), lengths=lengths)
        # The last state of the uppermost layer, in each direction: B, D.
        summary = last[-self.encoder.directions :].transpose(0, 1).flatten(1)
        start = self.bridge(summary).tanh().unflatten(1, (2, self.config.layers, self.config.width))
        real = places <= lengths.unsqueeze(1)
        return DecoderState(self.attention.key_projection(values), values, real, start[:, 0], start[:, 1])

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """One more token (B,) → logits of the next (B, V), and the state after it."""
        logits, state = self._decode(tokens.unsqueeze(1), state)
        return logits.squeeze(1), state

    def _decode(self, target_in: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        queries, state = self._recur(target_in, state)
        projected = self.attention.query_projection(queries)
        held = projected.numel() * state.keys.shape[1]
        if torch.compiler.is_exporting() or held <= MOST_HELD:
            context = self._weights(projected, state) @ state.values
        else:
            mask, vector = state.real.unsqueeze(1), self.attention.vector
            context = additive_attention(projected, state.keys, state.values, vector, mask=mask)
        return self._read_out(queries, context), state

    def _read_out(self, queries: Tensor, context: Tensor) -> Tensor:
        combined = self.combine(torch.cat([queries, context], dim=2)).tanh()
        return self.output(self.dropout(combined))

    def _weights(self, projected: Tensor, state: DecoderState) -> Tensor:
        """α (B, T, S) of queries W_q s (B, T, A)."""
        scores = projected_score(projected, state.keys, self.attention.vector)
        return masked_softmax(scores, state.real.unsqueeze(1))

    def _recur(self, target_in: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """s_1 … s_T (B, T, H), and the state after the last."""
        _require_tokens("target", target_in)
        embedded = self.dropout(self.target_embedding(target_in))
        # The LSTM wants its layers first, without gaps in memory.
        before = state.hidden.transpose(0, 1).contiguous(), state.cell.transpose(0, 1).contiguous()
        queries, (hidden, cell) = self.decoder(embedded, before)
        return queries, state._replace(hidden=hidden.transpose(0, 1), cell=cell.transpose(0, 1))


def _require_tokens(name: str, tokens: Tensor) -> None:
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise InputError(
            f"{name} tokens of shape {tuple(tokens.shape)} and type {tokens.dtype}",
            expected="whole numbers (B, length)",
            fix="put a single sequence into a batch of one: tokens[None]",
        )
