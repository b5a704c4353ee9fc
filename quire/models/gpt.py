"""GPT-2, with the names and layouts of Hugging Face's files.

    h⁰ = wte[x] + wpe[0 … T−1],   h ← h + attn(ln_1(h)),   h ← h + mlp(ln_2(h)),   logits = ln_f(h) wteᵀ

A. Radford et al., "Language models are unsupervised multitask learners" (2019). Residual projections start
smaller by 1/√(2·layers), since that many of them add up on the way.

B rows, T tokens, V vocabulary, D width, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from quire.errors import DataError, InputError, unknown_name
from quire.functional.attention import fused_attention, masked_softmax, scaled_dot_score
from quire.models.generate import Cache
from quire.models.gpt_files import own_weights, read_gpt2, write_gpt2
from quire.models.mlp import check_positive_integer
from quire.models.recurrent import check_tokens
from quire.models.registry import Example, model
from quire.models.vision import check_probability
from quire.models.weights import misfits

Activation = Literal["gelu_new", "gelu"]


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int
    context: int = 1024
    """How many tokens can be read at once."""
    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.0
    """Of embeddings, attention weights and both branches; GPT-2 had 0.1."""
    bias: bool = True
    """In linear layers and layer norms."""
    tied: bool = True
    """The embedding reads tokens out as well; otherwise lm_head does."""
    feedforward: int | None = None
    """4·width unless given."""
    activation: Activation = "gelu_new"
    """GPT-2's is an approximation by tanh; the exact one is several times faster on a CPU."""
    norm_epsilon: float = 1e-5
    checkpoint: bool = False
    """Keep only the inputs of each block in training and compute the rest a second time: less memory, a third
    more work, the same gradients."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "width"):
            check_positive_integer(name, getattr(self, name))
        if self.feedforward is not None:
            check_positive_integer("feedforward", self.feedforward)
        check_probability("dropout", self.dropout)
        if self.activation not in get_args(Activation):
            raise unknown_name("activation", self.activation, get_args(Activation))
        if self.width % self.heads:
            raise InputError(
                f"{self.heads} heads for a width of {self.width}",
                expected="a width that the heads can share equally",
                fix=f"set width to a multiple of {self.heads}",
            )


GPT2_SIZES: Mapping[str, GPTConfig] = {
    "gpt2": GPTConfig(50257, 1024, 12, 12, 768),
    "gpt2-medium": GPTConfig(50257, 1024, 24, 16, 1024),
    "gpt2-large": GPTConfig(50257, 1024, 36, 20, 1280),
    "gpt2-xl": GPTConfig(50257, 1024, 48, 25, 1600),
}
"""The published networks, of 124, 355, 774 and 1558 million parameters."""


class Conv1D(nn.Module):
    """x W + b with W (in, out): a linear layer, stored the other way round than torch.nn's."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        # One call on the weight itself: autocast caches the half of a parameter, not of a transposed view.
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], rows.shape[-1])


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values come from one product."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.layer, self.dropout = config.heads, layer, config.dropout
        self.c_attn = Conv1D(config.width, 3 * config.width, config.bias)
        self.c_proj = Conv1D(config.width, config.width, config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """(B, T, D) → (B, T, D). A cache takes the prompt first, and then one token at a time."""
        rows, length, width = x.shape
        query, key, value = self._split(x)
        mask = None
        if cache is not None:
            key, value = cache.layers[self.layer].append(key, value)
            mask = cache.mask() if length < key.shape[2] else None
        dropout = self.dropout if self.training else 0.0
        causal = length == key.shape[2]  # a single token beside older keys sees them all
        pooled = fused_attention(query, key, value, mask, dropout=dropout, causal=causal)
        return self.resid_dropout(self.c_proj(pooled.transpose(1, 2).reshape(rows, length, width)))

    def weights(self, x: Tensor) -> Tensor:
        """How much each place looks at those up to it, (B, H, T, T)."""
        query, key, _ = self._split(x)
        return masked_softmax(scaled_dot_score(query, key), causal=True)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by heads, (B, H, T, D/H)."""
        rows, length, width = x.shape
        parts = self.c_attn(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value


class FeedForward(nn.Module):
    """W₂ gelu(W₁ x), where gelu_new(a) = ½a(1 + tanh(√(2/π)(a + 0.044715a³))) and gelu(a) = a Φ(a)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        inner = config.feedforward or 4 * config.width
        self.c_fc = Conv1D(config.width, inner, config.bias)
        self.c_proj = Conv1D(inner, config.width, config.bias)
        self.activation = gelu_new if config.activation == "gelu_new" else F.gelu
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


def gelu_new(x: Tensor) -> Tensor:
    """½x(1 + tanh u), u = √(2/π)(x + 0.044715x³)."""
    if not (torch.compiler.is_compiling() and x.is_cuda):
        return F.gelu(x, approximate="tanh")
    # The same number, x σ(2u): PyTorch's compiler makes a tanh of more operations than memory waits for.
    wide = x.float()
    return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)


class Block(nn.Module):
    """h + attn(ln_1(h)), then h + mlp(ln_2(h))."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = _norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = _norm(config)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class Body(nn.Module):
    """Tokens (B, T) → hidden states (B, T, D); the part that Hugging Face calls `transformer`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.ln_f = _norm(config)
        self.checkpoint = config.checkpoint

    def forward(self, tokens: Tensor, places: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(places))
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            # Embeddings come in float32 and would carry every sum of the residual stream in it: twice the
            # bytes of everything between the products.
            x = x.to(torch.get_autocast_dtype(kind))
        for block in self.h:
            if self.checkpoint and self.training and cache is None:
                x = cast(Tensor, checkpoint(block, x, use_reentrant=False))
            else:
                x = block(x, cache)
        return self.ln_f(x)


@model(
    "gpt",
    GPTConfig,
    example=Example({"vocab_size": 11, "context": 8, "layers": 2, "heads": 2, "width": 12}, (6,)),
)
class GPT(nn.Module):
    """Tokens (B, T) → logits (B, T, V) of the next ones, T at most `context`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Body(config)
        self.lm_head = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.register_load_state_dict_pre_hook(_take_over)

    @property
    def context(self) -> int:
        return self.config.context

    @property
    def head_weight(self) -> Tensor:
        """(V, D), from features to logits: the embedding's own matrix if it is tied."""
        return self.transformer.wte.weight if self.lm_head is None else self.lm_head.weight

    def features(self, tokens: Tensor) -> Tensor:
        """(B, T) → (B, T, D), of which the logits are the product with `head_weight`.

        `quire.functional.linear_cross_entropy(features, head_weight, target)` is the loss without the logits.
        """
        self._check(tokens)
        return self.transformer(tokens, torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, tokens: Tensor) -> Tensor:
        return self._read_out(self.features(tokens))

    def _read_out(self, features: Tensor) -> Tensor:
        return F.linear(features, self.head_weight)

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """How much each place looks at those up to it, in each layer and head: (layers, B, H, T, T)."""
        seen: list[Tensor] = []
        watches = [
            block.get_submodule("attn").register_forward_pre_hook(
                lambda attention, inputs: seen.append(attention.weights(inputs[0]))
            )
            for block in self.transformer.h
        ]
        try:
            self.features(tokens)
        finally:
            for watch in watches:
                watch.remove()
        return torch.stack(seen)

    # Generating -----------------------------------------------------------------------------------

    def prefill(self, tokens: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Cache]:
        """Prompts (B, T), of which the first `lengths` (B,) tokens count → the logits (B, V) after their
        last, and the cache. The logits of a prompt without tokens mean nothing."""
        self._check(tokens)
        if not tokens.shape[1]:
            raise InputError(
                f"prompts of shape {tuple(tokens.shape)}",
                expected="at least one token",
                fix="begin with the token that separates texts, or with a line break",
            )
        cache = Cache(self.config.layers, tokens.shape[1], lengths)
        hidden = self.transformer(tokens, torch.arange(tokens.shape[1], device=tokens.device), cache)
        if lengths is None:
            return self._read_out(hidden[:, -1]), cache
        rows = torch.arange(len(tokens), device=tokens.device)
        return self._read_out(hidden[rows, (lengths - 1).clamp(min=0)]), cache

    def advance(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """One more token (B,) of each row → the logits (B, V) after it; the cache is extended in place."""
        if len(cache) >= self.context:
            raise InputError(
                f"a cache of {len(cache)} tokens, and one more",
                expected=f"at most {self.context}, the model's context",
                fix="prefill again with the last tokens, as quire.models.generate does",
            )
        hidden = self.transformer(tokens.unsqueeze(1), cache.places(tokens.device), cache)
        return self._read_out(hidden[:, 0]), cache

    def _check(self, tokens: Tensor) -> None:
        check_tokens(tokens)
        if tokens.shape[1] > self.context:
            raise InputError(
                f"{tokens.shape[1]} tokens",
                expected=f"at most {self.context}, the model's context",
                fix="give shorter rows, or build the model with a longer context",
            )

    # Files ----------------------------------------------------------------------------------------

    @classmethod
    def from_file(cls, path: Path | str, *, dropout: float = 0.0) -> GPT:
        """The network of a GPT-2 file of Hugging Face: model.safetensors, or the folder that holds it.

        Sizes are those of the tensors. The number of heads is in config.json beside the file; without one
        it is width/64, as in all published sizes.
        """
        weights, fields = read_gpt2(Path(path))
        with torch.device("meta"):  # nothing is drawn that would be overwritten at once
            network = cls(GPTConfig(**fields, dropout=dropout))
        if problems := misfits(network.state_dict(), weights):
            raise DataError(
                f"weights that are not those of a GPT-2: {'; '.join(problems)}",
                path=path,
                expected="the names and shapes of Hugging Face's GPT2LMHeadModel or GPT2Model",
                fix="save the whole model with model.save_pretrained(FOLDER)",
            )
        network.to_empty(device="cpu").load_state_dict(weights)
        return network

    def to_file(self, path: Path | str) -> None:
        """Write a file that `from_file` and Hugging Face's GPT2LMHeadModel load, and config.json beside it.

        In a folder, Hugging Face looks for the name model.safetensors. Its networks have biases everywhere:
        those that this one goes without are written as zeros.
        """
        with torch.device("meta"):
            shapes = GPT(replace(self.config, bias=True)).state_dict()
        own = self.state_dict()
        weights = {name: own.get(name, torch.zeros(value.shape)) for name, value in shapes.items()}
        write_gpt2(Path(path), weights, self.config)


def _norm(config: GPTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.width, eps=config.norm_epsilon, bias=config.bias)


def _take_over(network: GPT, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Lets load_state_dict take what Hugging Face's state_dict gives."""
    part = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    kept = own_weights(part, tied=network.lm_head is None)
    state.update({prefix + name: value for name, value in kept.items()})
