"""Recurrent language model and recurrent classifier of text.

    language model   h_t, s_t = layer(E x_t, s_{t−1}),   p(x_{t+1} | x_1 … x_t) = softmax(V h_t + b)
    classifier       logits = W u + b, where u is the last state or the mean of the outputs

Dropout is on the ways in, out and between layers, never from step to step (W. Zaremba et al., 2014). A tied
model reads words out with the matrix that reads them in, V = E (O. Press and L. Wolf, 2017).

B sequences, T steps, V words, L layers, R directions, H width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from quire.errors import InputError, unknown_name
from quire.functional.initialise import xavier_
from quire.functional.recurrent import Keeps, Reset, check_convention
from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model
from quire.models.vision import check_probability
from quire.nn.recurrent import GRU, LSTM, RNN, Recurrent, State

Kind = Literal["rnn", "lstm", "gru"]
Reading = Literal["last", "mean"]


@dataclass(frozen=True)
class RecurrentConfig:
    """What both models share."""

    vocab_size: int
    kind: Kind = "lstm"
    width: int = 256
    """Of the embedding and of each layer and direction."""
    layers: int = 1
    dropout: float = 0.0
    nonlinearity: Literal["tanh", "relu"] = "tanh"
    """Of the rnn."""
    reset: Reset = "after"
    """Of the gru: "after" the matrix product (PyTorch, cuDNN) or "before" it (Cho)."""
    keeps: Keeps = "z"
    """Of the gru: the share of the old state."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers"):
            check_positive_integer(name, getattr(self, name))
        check_probability("dropout", self.dropout)
        if self.kind not in LAYERS:
            raise unknown_name("kind", self.kind, LAYERS)
        if self.nonlinearity not in ("tanh", "relu"):
            raise unknown_name("nonlinearity", self.nonlinearity, ("tanh", "relu"))
        check_convention(self.reset, self.keeps)
        for name, kind, plain in (
            ("nonlinearity", "rnn", "tanh"),
            ("reset", "gru", "after"),
            ("keeps", "gru", "z"),
        ):
            if self.kind != kind and getattr(self, name) != plain:
                raise InputError(
                    f"{name}={getattr(self, name)!r} with kind={self.kind!r}",
                    expected=f"{name} with kind={kind!r} only",
                    fix=f"set kind to {kind!r}, or leave {name} out",
                )

    def layer(self, bidirectional: bool = False) -> Recurrent:
        own = {name: getattr(self, name) for name in OPTIONS[self.kind]}
        return LAYERS[self.kind](
            self.width, self.width, self.layers, dropout=self.dropout, bidirectional=bidirectional, **own
        )


LAYERS: dict[str, type[Recurrent]] = {"rnn": RNN, "lstm": LSTM, "gru": GRU}
OPTIONS: dict[str, tuple[str, ...]] = {"rnn": ("nonlinearity",), "lstm": (), "gru": ("reset", "keeps")}


# Language model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecurrentLMConfig(RecurrentConfig):
    tie_weights: bool = False
    """Read words out with the embedding's matrix."""


@model("recurrent", RecurrentLMConfig, example=Example({"vocab_size": 11, "width": 8, "layers": 2}, (6,)))
class RecurrentLM(nn.Module):
    """tokens (B, T) → logits (B, T, V) of the next tokens.

    With `state`, or with return_state=True, the state after the last token comes back as well, to be handed
    in with the tokens that follow.
    """

    def __init__(self, config: RecurrentLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.recurrent = config.layer()
        self.dropout = nn.Dropout(config.dropout)
        if config.tie_weights:
            self.head: nn.Module = TiedReadout(config.vocab_size)
            # As a readout, entries of size 1 would start with logits of size √H.
            nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        else:
            self.head = _readout(config.width, config.vocab_size)

    def forward(
        self, tokens: Tensor, state: State | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, State]:
        hidden, last = self.hidden(tokens, state)
        logits = self.readout(hidden)
        return logits if state is None and not return_state else (logits, last)

    def hidden(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """What the logits are read from, (B, T, H), and the state after the last token."""
        check_tokens(tokens)
        output, last = self.recurrent(self.dropout(self.embedding(tokens)), state)
        return self.dropout(output), last

    def readout(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) of hidden (…, H)."""
        tied = self.config.tie_weights
        logits: Tensor = self.head(hidden, self.embedding.weight) if tied else self.head(hidden)
        return logits

    def step(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits and state after some more tokens: (B,) → (B, V), or (B, T) → (B, T, V)."""
        rows = tokens.unsqueeze(1) if tokens.dim() == 1 else tokens
        hidden, last = self.hidden(rows, state)
        logits = self.readout(hidden)
        return (logits.squeeze(1) if tokens.dim() == 1 else logits), last


class TiedReadout(nn.Module):
    """V h + b, where V is the embedding's matrix: it stands once among the parameters and in a file."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return linear(hidden, weight, self.bias)


# Classifier -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecurrentClassifierConfig(RecurrentConfig):
    num_classes: int
    bidirectional: bool = False
    reading: Reading = "last"
    """What is classified: the state after the last token (of both directions), or the mean of the outputs."""
    padding: int = 0
    """The token that fills rows up at their end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer("num_classes", self.num_classes)
        if self.reading not in ("last", "mean"):
            raise unknown_name("reading", self.reading, ("last", "mean"))
        if not 0 <= self.padding < self.vocab_size:
            raise InputError(
                f"padding is {self.padding}",
                expected=f"a token, 0 to {self.vocab_size - 1}",
                fix="set padding to the vocabulary's padding token",
            )


@model(
    "recurrent-classifier",
    RecurrentClassifierConfig,
    example=Example({"vocab_size": 11, "num_classes": 3, "width": 8, "bidirectional": True}, (6,)),
)
class RecurrentClassifier(nn.Module):
    """tokens (B, T), filled up with padding at their end → logits (B, num_classes).

    A row of nothing but padding is classified by the biases.
    """

    def __init__(self, config: RecurrentClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width, padding_idx=config.padding)
        self.recurrent = config.layer(config.bidirectional)
        self.dropout = nn.Dropout(config.dropout)
        self.head = _readout(self.recurrent.output_size, config.num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        check_tokens(tokens)
        lengths = self.lengths(tokens)
        x = self.dropout(self.embedding(tokens))
        output, state = self.recurrent(x, None, lengths)
        if self.config.reading == "mean":
            read = output.sum(1) / lengths.clamp(min=1).unsqueeze(-1).to(output.dtype)
        else:
            last = (state if isinstance(state, Tensor) else state[0])[-self.recurrent.directions :]
            read = torch.cat(last.unbind(0), -1)
        return self.head(self.dropout(read))

    def lengths(self, tokens: Tensor) -> Tensor:
        """Tokens up to the last one that is not padding, (B,)."""
        places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        found = torch.where(tokens != self.config.padding, places, 0)
        return pad(found, (1, 0)).amax(1)  # there is a largest one even where T is 0


def _readout(width: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(width, outputs)
    xavier_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def check_tokens(tokens: Tensor) -> None:
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"tokens of shape {tuple(tokens.shape)} and type {tokens.dtype}".replace("torch.", ""),
            expected="integers (B, T)",
            fix="give token numbers, one row for each sequence",
        )
