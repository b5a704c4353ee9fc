"""The Transformer: encoder, decoder, both together, and a classifier of text.

    pre-norm   x ← x + f(norm(x)),   post-norm   x ← norm(x + f(x))
    encoder    f = self-attention, feed-forward
    decoder    f = causal self-attention, attention over the encoder's states, feed-forward
    feed-forward(x) = W₂ σ(W₁ x + b₁) + b₂, at each place by itself

A. Vaswani et al., "Attention is all you need" (2017). Names of parameters are those of torch.nn.Transformer,
whose weights fit: encoder.layers.0.self_attn.in_proj_weight, …, decoder.norm.weight. Masks are those of
`quire.functional.masks`, true where looking is allowed. What may see nothing pools zeros: a source of padding
alone, or without tokens, gives finite numbers and gradients.

B rows, S source tokens, T target tokens, V target words, L layers, H heads, E width, D = E/H.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.errors import InputError, unknown_name
from quire.models.mlp import check_positive_integer
from quire.models.recurrent import check_tokens
from quire.models.registry import Example, model
from quire.models.vision import check_probability
from quire.nn.attention import KeyValueCache, MultiHeadAttention
from quire.nn.position import LearnedPosition, SinusoidalPosition

Norm = Literal["pre", "post"]
Activation = Literal["relu", "gelu"]
Positions = Literal["sinusoidal", "learned"]
KeysAndValues = tuple[tuple[Tensor, Tensor], ...]
"""Of each layer, (B, H, tokens, D)."""


@dataclass(frozen=True)
class BlockConfig:
    """What all models of this file share."""

    width: int = 128
    heads: int = 4
    layers: int = 3
    """Of the encoder, and as many of the decoder."""
    feedforward: int = 512
    dropout: float = 0.1
    """Of embeddings, attention weights, inner units of the feed-forward and each branch."""
    activation: Activation = "relu"
    norm: Norm = "pre"
    positions: Positions = "sinusoidal"
    context: int = 512
    """Places that learned positions have; sinusoidal ones go on for ever."""

    def __post_init__(self) -> None:
        for name in ("width", "heads", "layers", "feedforward", "context"):
            check_positive_integer(name, getattr(self, name))
        check_probability("dropout", self.dropout)
        for name, kinds in (("activation", Activation), ("norm", Norm), ("positions", Positions)):
            if getattr(self, name) not in get_args(kinds):
                raise unknown_name(name, getattr(self, name), get_args(kinds))

    def check_token(self, name: str, words: int) -> None:
        token = getattr(self, name)
        if token is not None and not 0 <= token < words:
            raise InputError(
                f"{name} is {token}",
                expected=f"a token of the vocabulary, 0 to {words - 1}",
                fix="count the tokens that begin, end and fill up a sequence into the vocabulary",
            )


# Layers ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """What both kinds of layers have: self-attention, feed-forward, residuals and their norms."""

    looks_outside: ClassVar[bool]
    """Whether there is attention over a memory between the two."""
    multihead_attn: MultiHeadAttention

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.activation: Callable[[Tensor], Tensor] = F.relu if config.activation == "relu" else F.gelu
        self.self_attn = MultiHeadAttention(config.width, config.heads, config.dropout)
        if self.looks_outside:
            self.multihead_attn = MultiHeadAttention(config.width, config.heads, config.dropout)
        self.linear1 = nn.Linear(config.width, config.feedforward)
        self.linear2 = nn.Linear(config.feedforward, config.width)
        for number in (1, 2, 3) if self.looks_outside else (1, 2):
            self.add_module(f"norm{number}", nn.LayerNorm(config.width))
        self.dropout = nn.Dropout(config.dropout)

    def add(self, number: int, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """x + f(norm(x)), or norm(x + f(x)), with the norm of this number."""
        norm: nn.Module = getattr(self, f"norm{number}")
        if self.pre:
            return x + self.dropout(function(norm(x)))
        return norm(x + self.dropout(function(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        """W₂ σ(W₁ x + b₁) + b₂."""
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class EncoderLayer(Layer):
    """torch.nn.TransformerEncoderLayer, batch first."""

    looks_outside = False

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """(B, S, E) → (B, S, E); the mask is (S, S), (B, S, S) or (B, H, S, S), or has one row for all."""
        x = self.add(1, x, lambda y: self.self_attn(y, mask=mask, causal=causal))
        return self.add(2, x, self.feed_forward)


class DecoderLayer(Layer):
    """torch.nn.TransformerDecoderLayer, batch first, and causal unless told otherwise."""

    looks_outside = True

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        causal: bool = True,
        past: KeyValueCache | None = None,
        kept: KeyValueCache | None = None,
    ) -> Tensor:
        """(B, T, E), (B, S, E) → (B, T, E). `past` has keys and values of x, `kept` those of the memory."""
        x = self.add(1, x, lambda y: self.self_attn(y, mask=mask, causal=causal, cache=past))
        x = self.add(2, x, lambda y: self.multihead_attn(y, memory, mask=memory_mask, cache=kept))
        return self.add(3, x, self.feed_forward)


class Encoder(nn.Module):
    """Layers in a row and a norm: torch.nn.TransformerEncoder."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        initialise_(self)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, causal)
        return self.norm(x)


class Decoder(nn.Module):
    """Layers in a row and a norm: torch.nn.TransformerDecoder."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        initialise_(self)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask, causal)
        return self.norm(x)


class Embedding(nn.Module):
    """√E · (a row for each token) + its position, with dropout: (B, T) → (B, T, E)."""

    def __init__(self, words: int, config: BlockConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, config.width))
        nn.init.normal_(self.weight, std=config.width**-0.5)
        learned = config.positions == "learned"
        self.position: nn.Module = (
            LearnedPosition(config.context, config.width) if learned else SinusoidalPosition(config.width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, offset: int = 0) -> Tensor:
        check_tokens(tokens)
        x = F.embedding(tokens, self.weight) * math.sqrt(self.weight.shape[1])
        return self.dropout(self.position(x, offset))


def initialise_(module: nn.Module) -> None:
    """Xavier's uniform weights for all matrices, as torch.nn.Transformer begins."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)


# Encoder and decoder --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(BlockConfig):
    source_vocab: int
    target_vocab: int
    padding: int | None = 0
    """The source token that nobody sees."""
    target_padding: int | None = None
    """The target token that nobody sees. What follows the end is not seen anyway."""
    begin: int = 1
    end: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("source_vocab", "target_vocab"):
            check_positive_integer(name, getattr(self, name))
        self.check_token("padding", self.source_vocab)
        for name in ("target_padding", "begin", "end"):
            self.check_token(name, self.target_vocab)


class TransformerState(NamedTuple):
    """All that the next token depends on. Nothing writes to it, so it can go on in several ways."""

    memory: KeysAndValues
    """What the decoder looks at in the source."""
    memory_mask: Tensor
    """(B, 1, S), true at tokens."""
    past: KeysAndValues
    """Of the target so far."""
    past_mask: Tensor
    """(B, 1, T), true at tokens."""


@model(
    "transformer",
    TransformerConfig,
    example=Example(
        {"source_vocab": 7, "target_vocab": 6, "width": 8, "heads": 2, "layers": 2, "feedforward": 12}, (5,)
    ),
)
class Transformer(nn.Module):
    """Source tokens (B, S) and target tokens so far (B, T) → logits of the next ones (B, T, V)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.source_embedding = Embedding(config.source_vocab, config)
        self.target_embedding = Embedding(config.target_vocab, config)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.output = readout(config.width, config.target_vocab)

    @property
    def begin(self) -> int:
        return self.config.begin

    @property
    def end(self) -> int:
        return self.config.end

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: place l has read target tokens 0 … l and scores the one that follows."""
        memory, memory_mask = self._read_source(source)
        mask = real_tokens(target, self.config.target_padding)
        return self.output(self.decoder(self.target_embedding(target), memory, mask, memory_mask))

    def attend(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The logits (B, T, V), and the last layer's weights on the source (B, T, S), averaged over heads."""
        asked: list[Tensor] = []
        last = self.decoder.layers[-1].get_submodule("multihead_attn")
        watch = last.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0]))
        try:
            logits = self(source, target)
        finally:
            watch.remove()
        memory, mask = self._read_source(source)
        return logits, last(asked[0], memory, mask=mask, need_weights=True)[1].mean(1)

    def encode(self, source: Tensor) -> TransformerState:
        """The state before the first token."""
        memory, mask = self._read_source(source)
        attentions = [layer.get_submodule("multihead_attn") for layer in self.decoder.layers]
        kept = tuple(_keys_and_values(cast(MultiHeadAttention, one), memory) for one in attentions)
        seen = torch.ones_like(source, dtype=torch.bool).unsqueeze(1) if mask is None else mask
        nothing = tuple((key[:, :, :0], value[:, :, :0]) for key, value in kept)
        return TransformerState(kept, seen, nothing, seen[:, :, :0])

    def step(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """One more token (B,) → logits of the next (B, V), and the state after it."""
        tokens = tokens.unsqueeze(1)
        x = self.target_embedding(tokens, state.past_mask.shape[2])
        padding = self.config.target_padding
        real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else tokens != padding
        past_mask = torch.cat([state.past_mask, real.unsqueeze(1)], 2)
        masks = (
            None if padding is None else past_mask,
            None if self.config.padding is None else state.memory_mask,
        )
        past = []
        for layer, old, memory in zip(self.decoder.layers, state.past, state.memory, strict=True):
            own, kept = KeyValueCache(), KeyValueCache(static=True)
            own.append(*old)
            kept.append(*memory)
            # The memory itself is not needed beside its keys and values, unless it has no tokens.
            x = layer(x, x[:, :0], *masks, past=own, kept=kept)
            past.append((own.key, own.value))
        logits = self.output(self.decoder.norm(x)).squeeze(1)
        return logits, state._replace(past=tuple(past), past_mask=past_mask)

    def _read_source(self, source: Tensor) -> tuple[Tensor, Tensor | None]:
        mask = real_tokens(source, self.config.padding)
        return self.encoder(self.source_embedding(source), mask), mask


def real_tokens(tokens: Tensor, padding: int | None) -> Tensor | None:
    """(B, 1, T), true where a token is no padding: a mask for any number of queries."""
    return None if padding is None else (tokens != padding).unsqueeze(1)


def readout(width: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(width, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _keys_and_values(attention: MultiHeadAttention, memory: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer looks at in a memory (B, S, E): twice (B, H, S, D)."""
    assert attention.in_proj_weight is not None
    assert attention.in_proj_bias is not None
    width = attention.embed_dim
    both = F.linear(memory, attention.in_proj_weight[width:], attention.in_proj_bias[width:])
    key, value = both.unflatten(-1, (2, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return key, value


# Classifier -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TransformerClassifierConfig(BlockConfig):
    vocab_size: int
    num_classes: int
    padding: int = 0
    """The token that fills rows up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocab_size", "num_classes"):
            check_positive_integer(name, getattr(self, name))
        self.check_token("padding", self.vocab_size)


@model(
    "transformer-classifier",
    TransformerClassifierConfig,
    example=Example(
        {"vocab_size": 11, "num_classes": 3, "width": 8, "heads": 2, "layers": 2, "feedforward": 12}, (6,)
    ),
)
class TransformerClassifier(nn.Module):
    """Tokens (B, T) with padding → logits (B, num_classes), from the mean of the encoder's states.

    A row of nothing but padding is classified by the biases.
    """

    def __init__(self, config: TransformerClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config)
        self.encoder = Encoder(config)
        self.dropout = nn.Dropout(config.dropout)
        self.output = readout(config.width, config.num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens != self.config.padding
        states = self.encoder(self.embedding(tokens), real.unsqueeze(1))
        total = (states * real.unsqueeze(-1)).sum(1)
        mean = total / real.sum(1, keepdim=True).clamp(min=1)
        return self.output(self.dropout(mean))
