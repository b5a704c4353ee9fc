"""Chapter 17: the Transformer, GPT, and how tokens are drawn from it.

B rows, S source tokens, T target tokens, V words, E width, H heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.functional import sampling
from quire.models.generate import Cache
from quire.models.gpt import GPT, GPTConfig
from quire.models.transformer import (
    BlockConfig,
    Decoder,
    Encoder,
    EncoderLayer,
    Transformer,
    TransformerConfig,
)
from quire.sheet.registry import entry, gap, require, worst

Code = Callable[..., Any]
WIDTH, HEADS, LAYERS, INNER = 8, 2, 2, 12
PADDED = torch.tensor([[3, 4, 5, 2], [5, 3, 0, 0], [0, 0, 0, 0]])
"""Source tokens; 0 is padding, and the last row has nothing else."""
TARGET = torch.tensor([[1, 4, 3], [1, 2, 2], [1, 3, 4]])


def _config(norm: Any = "pre", activation: Any = "relu") -> BlockConfig:
    return BlockConfig(WIDTH, HEADS, LAYERS, INNER, 0.0, activation, norm)


def _peer(norm: str, activation: str = "relu") -> nn.Transformer:
    """PyTorch's, with random norms and biases too: ones and zeros would hide a wrong place."""
    sizes: dict[str, Any] = {"dropout": 0.0, "activation": activation, "batch_first": True}
    sizes["norm_first"] = norm == "pre"
    encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, **sizes)
    decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, **sizes)
    stacks = (
        nn.TransformerEncoder(encoder, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False),
        nn.TransformerDecoder(decoder, LAYERS, nn.LayerNorm(WIDTH)),
    )
    peer = nn.Transformer(WIDTH, HEADS, custom_encoder=stacks[0], custom_decoder=stacks[1], batch_first=True)
    _randomise(peer)
    return peer.double()


def _randomise(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.6, 0.6)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _differences(own: Tensor, wanted: Tensor, *inputs: Tensor) -> float:
    """In values, and in the gradients of an uneven combination of them."""
    if own.shape != wanted.shape:
        return math.inf
    factors = torch.linspace(-1, 2, own.numel(), dtype=own.dtype).reshape(own.shape)
    pair = [torch.autograd.grad((one * factors).sum(), inputs, retain_graph=True) for one in (own, wanted)]
    return worst(gap(own, wanted), *(gap(a, b) for a, b in zip(*pair, strict=True)))


# Layers ---------------------------------------------------------------------------------------


class _MixesPlaces(EncoderLayer):
    def feed_forward(self, x: Tensor) -> Tensor:
        return super().feed_forward(x.roll(1, -2))


@entry(
    "transformer/feed-forward",
    "Point-wise feed-forward",
    r"\mathrm{FFN}(x_t) = W_2\, \sigma(W_1 x_t + b_1) + b_2 \quad \text{at each place } t \text{ by itself}",
    code=EncoderLayer,
    wrong=_MixesPlaces,
    tolerance=1e-12,
)
@torch.no_grad()
def _feed_forward(build: Code) -> float:
    layer = build(_config()).double()
    _randomise(layer)
    x = _random(2, 3, WIDTH)
    wanted = torch.zeros_like(x)
    first, second = layer.linear1, layer.linear2
    for row, place in itertools.product(range(2), range(3)):
        inner = [
            max(0.0, float(first.bias[j] + sum(first.weight[j, i] * x[row, place, i] for i in range(WIDTH))))
            for j in range(INNER)
        ]
        for k in range(WIDTH):
            wanted[row, place, k] = second.bias[k] + sum(second.weight[k, j] * inner[j] for j in range(INNER))
    return gap(layer.feed_forward(x), wanted)


def _other_norm(config: BlockConfig) -> Encoder:
    return Encoder(replace(config, norm="post" if config.norm == "pre" else "pre"))


@entry(
    "transformer/encoder",
    "Transformer encoder",
    r"\text{pre: } x \leftarrow x + f(\mathrm{norm}(x)), \quad \text{post: } "
    r"x \leftarrow \mathrm{norm}(x + f(x)); \qquad f = \text{self-attention, then feed-forward}",
    code=Encoder,
    wrong=_other_norm,
    tolerance=1e-10,
)
def _encoder(build: Code) -> float:
    errors = []
    for norm, activation in itertools.product(("pre", "post"), ("relu", "gelu")):
        peer, own = _peer(norm, activation).encoder, build(_config(norm, activation)).double()
        own.load_state_dict(peer.state_dict())
        x = _random(2, 4, WIDTH)
        padding = torch.tensor([[False, False, False, False], [False, False, True, True]])
        wanted = peer(x, src_key_padding_mask=padding)
        errors.append(_differences(own(x, ~padding[:, None]), wanted, x))
        # Without positions, permuting the places permutes the states.
        order = torch.randperm(4)
        errors.append(gap(own(x[:, order]), own(x)[:, order]))
        # Rows that may see nothing are numbers.
        alone = own(x, torch.zeros(2, 1, 4, dtype=torch.bool))
        gradient = torch.autograd.grad(alone.sum(), x)[0]
        errors.append(require(alone.isfinite().all() and gradient.isfinite().all()))
    return worst(*errors)


class _SeesTheFuture(Decoder):
    def forward(self, x: Tensor, memory: Tensor, *masks: Any) -> Tensor:
        return super().forward(x, memory, masks[0], masks[1], False)


@entry(
    "transformer/decoder",
    "Transformer decoder",
    r"f = \text{causal self-attention}, \quad \mathrm{softmax}(Q(x) K(m)^\top / \sqrt{D})\, V(m) "
    r"\text{ over the encoder's states } m, \quad \text{feed-forward}",
    code=Decoder,
    wrong=_SeesTheFuture,
    tolerance=1e-10,
)
def _decoder(build: Code) -> float:
    errors = []
    for norm in ("pre", "post"):
        peer, own = _peer(norm).decoder, build(_config(norm)).double()
        own.load_state_dict(peer.state_dict())
        x, memory = _random(2, 3, WIDTH), _random(2, 4, WIDTH)
        padding = torch.tensor([[False, False, False, True], [False, True, False, False]])
        later = torch.ones(3, 3).triu(1).bool()
        wanted = peer(x, memory, tgt_mask=later, memory_key_padding_mask=padding)
        own_out = own(x, memory, None, ~padding[:, None])
        errors.append(_differences(own_out, wanted, x, memory))
        # No place depends on a later one.
        for place in range(3):
            gradient = torch.autograd.grad(own_out[:, place].sum(), x, retain_graph=True)[0]
            errors.append(gap(gradient[:, place + 1 :], torch.zeros(2, 2 - place, WIDTH)))
    return worst(*errors)


def _embed(tokens: Tensor, part: Any) -> Tensor:
    """√E times the token's row, plus sin and cos of n / 10000^(i/E), one number at a time."""
    found = torch.zeros(*tokens.shape, WIDTH, dtype=torch.float64)
    for row, n, i in itertools.product(range(tokens.shape[0]), range(tokens.shape[1]), range(WIDTH)):
        angle = n / 10_000 ** (i // 2 * 2 / WIDTH)
        wave = math.cos(angle) if i % 2 else math.sin(angle)
        found[row, n, i] = math.sqrt(WIDTH) * part.weight[tokens[row, n], i] + wave
    return found


def _translator(build: Code, **changes: Any) -> Any:
    options: dict[str, Any] = {"source_vocab": 6, "target_vocab": 5, "begin": 1, "end": 2, "dropout": 0.0}
    sizes = {"width": WIDTH, "heads": HEADS, "layers": LAYERS, "feedforward": INNER}
    model = build(TransformerConfig(**{**options, **sizes, **changes})).double()
    _randomise(model)
    return model


def _looks_at_padding(config: TransformerConfig) -> Transformer:
    return Transformer(replace(config, padding=None))


@entry(
    "transformer/encoder-decoder",
    "Transformer: encoder and decoder",
    r"p(y_l \mid y_{<l}, x) = \mathrm{softmax}(W\, \mathrm{dec}(y_{<l}, \mathrm{enc}(x)) + b)_{y_l}, \qquad "
    r"\text{inputs } \sqrt{E}\, e_{x_n} + r_n",
    code=Transformer,
    wrong=_looks_at_padding,
    tolerance=1e-10,
)
def _encoder_decoder(build: Code) -> float:
    errors = []
    for norm in ("pre", "post"):
        model, peer = _translator(build, norm=norm), _peer(norm)
        stacks = {name: value for name, value in model.state_dict().items() if name in peer.state_dict()}
        peer.load_state_dict(stacks)
        source, padding = PADDED[:2], PADDED[:2] == 0
        hidden = peer(
            _embed(source, model.source_embedding), _embed(TARGET[:2], model.target_embedding),
            tgt_mask=torch.ones(3, 3).triu(1).bool(),
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
        wanted = hidden @ model.output.weight.t() + model.output.bias
        logits = model(PADDED, TARGET)
        errors += [gap(logits[:2], wanted), require(logits.isfinite().all())]
        # One token at a time gives the same.
        state = model.encode(PADDED)
        for place in range(3):
            one, state = model.step(TARGET[:, place], state)
            errors.append(gap(one, logits[:, place]))
    return worst(*errors)


# GPT ------------------------------------------------------------------------------------------


def _small(build: Code, vocab_size: int = 3, context: int = 6) -> Any:
    model = build(GPTConfig(vocab_size, context, LAYERS, HEADS, WIDTH)).double()
    _randomise(model)
    return model


class _SeesWhatItPredicts(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.roll(-1, 1))


def _by_hand(model: Any, tokens: list[int]) -> Tensor:
    """The logits after the last token, by loops over layers, heads and places."""
    body, width = model.transformer, WIDTH // HEADS
    states = [body.wte.weight[token] + body.wpe.weight[n] for n, token in enumerate(tokens)]

    def norm(x: Tensor, layer: Any) -> Tensor:
        centred = x - x.mean()
        return centred / (centred.square().mean() + layer.eps).sqrt() * layer.weight + layer.bias

    def gelu(a: Tensor) -> Tensor:
        return a / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))

    for block in body.h:
        attention, mlp = block.attn, block.mlp
        projected = [norm(x, block.ln_1) @ attention.c_attn.weight + attention.c_attn.bias for x in states]
        triples = [row.split(WIDTH) for row in projected]
        for n in range(len(states)):
            heads: list[Tensor] = []
            for head in range(HEADS):
                part = slice(head * width, (head + 1) * width)
                scores = [triples[n][0][part] @ triples[m][1][part] / math.sqrt(width) for m in range(n + 1)]
                weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
                heads.append(torch.stack([weights[m] * triples[m][2][part] for m in range(n + 1)]).sum(0))
            x = states[n] + torch.cat(heads) @ attention.c_proj.weight + attention.c_proj.bias
            inner = gelu(norm(x, block.ln_2) @ mlp.c_fc.weight + mlp.c_fc.bias)
            states[n] = x + inner @ mlp.c_proj.weight + mlp.c_proj.bias
    return body.wte.weight @ norm(states[-1], body.ln_f)


@entry(
    "transformer/gpt",
    "GPT",
    r"p(x) = \prod_n p(x_n \mid x_{<n}), \quad p(x_{n+1} \mid x_{\le n}) = "
    r"\mathrm{softmax}(E\, \mathrm{norm}(h_n)), \quad h_n \text{ sees no } x_m \text{ with } m > n",
    code=GPT,
    wrong=_SeesWhatItPredicts,
    tolerance=1e-10,
)
def _gpt(build: Code) -> float:
    model = _small(build)
    tokens = torch.tensor([[0, 2, 1, 1, 2]])
    logits = model(tokens)
    errors = [gap(logits[0, n], _by_hand(model, tokens[0, : n + 1].tolist())) for n in range(5)]
    # No logit depends on a token that comes later.
    for n in range(4):
        changed = tokens.clone()
        changed[:, n + 1 :] = (changed[:, n + 1 :] + 1) % 3
        errors.append(gap(model(changed)[:, : n + 1], logits[:, : n + 1]))
    # The probabilities of all sequences of a length sum to 1, after any first token.
    everything = torch.tensor(list(itertools.product(range(3), repeat=4)))
    for first in range(3):
        whole = torch.cat([torch.full((81, 1), first), everything], 1)
        each = model(whole)[:, :-1].log_softmax(-1).gather(2, everything.unsqueeze(2))
        errors.append(gap(each.sum((1, 2)).exp().sum(), 1.0))
    return worst(*errors)


class _ForgetsPlaces(GPT):
    def advance(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        cache.prompt = len(cache)  # as if nothing had been read since the prompt
        return super().advance(tokens, cache)


@entry(
    "transformer/kv-cache",
    "Cache of keys and values",
    r"\mathrm{attn}(q_n, k_{\le n}, v_{\le n}) \text{ needs of } x_{<n} \text{ only } k, v\!: \quad "
    r"\text{a token costs } O(n) \text{ instead of } O(n^2), \text{ with the same logits}",
    code=GPT,
    wrong=_ForgetsPlaces,
    tolerance=1e-10,
)
def _kv_cache(build: Code) -> float:
    model = _small(build, 7, 12)
    tokens = torch.randint(0, 7, (3, 12))
    wanted = model(tokens)
    errors = []
    for lengths in (torch.tensor([4, 4, 4]), torch.tensor([2, 5, 1])):
        longest = int(lengths.max())
        even = bool((lengths == longest).all())
        logits, cache = model.prefill(tokens[:, :longest], None if even else lengths)
        rows = torch.arange(3)
        errors.append(gap(logits, wanted[rows, lengths - 1]))
        for step in range(12 - longest):
            logits, cache = model.advance(tokens[rows, lengths + step], cache)
            errors.append(gap(logits, wanted[rows, lengths + step]))
    return worst(*errors)


# Drawing a token ------------------------------------------------------------------------------


@entry(
    "transformer/temperature",
    "Temperature of a draw",
    r"p_\tau(v) = \frac{e^{a_v / \tau}}{\sum_u e^{a_u / \tau}} \propto p(v)^{1/\tau}, \qquad "
    r"\tau \to 0\!: \arg\max",
    code=sampling.temperature,
    wrong=lambda logits, value: logits * value,
    tolerance=1e-12,
)
def _temperature(function: Code) -> float:
    logits = _random(4, 9)
    errors = []
    for value in (0.3, 1.0, 2.5):
        powers = logits.softmax(-1) ** (1 / value)
        errors.append(gap(function(logits, value).softmax(-1), powers / powers.sum(-1, keepdim=True)))
    best = nn.functional.one_hot(logits.argmax(-1), 9)
    errors += [gap(function(logits, value).softmax(-1), best) for value in (0.0, 1e-4)]
    return worst(*errors)


def _kept_by(logits: Tensor, count: Callable[[list[float]], int]) -> Tensor:
    """Probabilities when only the best tokens stay, as many as `count` makes of them all, the best first."""
    rows = []
    for row in logits.softmax(-1).tolist():
        kept = sorted(row, reverse=True)[: count(sorted(row, reverse=True))]
        rows.append([p / sum(kept) if p in kept else 0.0 for p in row])
    return torch.tensor(rows, dtype=torch.float64)


@entry(
    "transformer/top-k",
    "Top-k",
    r"p_k(v) = \frac{p(v)\,[v \in K]}{\sum_{u \in K} p(u)}, \qquad K = \text{the } k \text{ most probable}",
    code=sampling.top_k,
    wrong=lambda logits, k: sampling.top_k(logits, k + 1),
    tolerance=1e-12,
)
def _top_k(function: Code) -> float:
    logits = _random(5, 8).detach()
    pairs = [(function(logits, k), _kept_by(logits, lambda _, k=k: k)) for k in (1, 3, 7, 8, 20)]  # type: ignore[misc]
    return worst(*(gap(own.softmax(-1), wanted) for own, wanted in pairs))


def _stops_before_p(logits: Tensor, p: float) -> Tensor:
    """Without the token that crosses p, as the rule is often misread."""
    ordered, order = logits.sort(-1, descending=True)
    gone = ordered.softmax(-1).cumsum(-1) > p
    gone[..., 0] = False
    return logits.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), -torch.inf)


@entry(
    "transformer/top-p",
    "Top-p (nucleus)",
    r"P = \text{the fewest of the most probable with } \sum_{v \in P} p(v) \ge p, \qquad "
    r"p_P(v) = \frac{p(v)\,[v \in P]}{\sum_{u \in P} p(u)}",
    code=sampling.top_p,
    wrong=_stops_before_p,
    tolerance=1e-12,
)
def _top_p(function: Code) -> float:
    logits = _random(5, 8).detach()

    def nucleus(p: float) -> Callable[[list[float]], int]:
        # The smallest number of the best whose sum reaches p.
        return lambda best: next(n for n in range(1, len(best) + 1) if sum(best[:n]) >= p)

    values = (1e-9, 0.2, 0.5, 0.9, 0.999)
    errors = [gap(function(logits, p).softmax(-1), _kept_by(logits, nucleus(p))) for p in values]
    return worst(*errors, gap(function(logits, 1.0), logits))
