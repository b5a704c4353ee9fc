"""Chapter 14: from sequence to sequence. Proofs by enumerating every short sequence of a tiny vocabulary.

B pairs, S source tokens, T target tokens, V words: the tokens are 0, begin, end and one or two more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.models.seq2seq import DecoderState, Seq2Seq, Seq2SeqConfig
from quire.models.transformer import Transformer, TransformerConfig
from quire.nn.heads import IGNORE
from quire.sheet.registry import entry, gap, require, worst
from quire.tasks import translation as T

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]
Sequence = tuple[int, ...]

TOLERANCE = 1e-10
BEGIN, END = 1, 2
WORDS = 4


def _model(kind: Code = Seq2Seq, sharpness: float = 6.0, **options: Any) -> Any:
    """Small, in float64, and with weights so large that its choices depend on what it reads."""
    values = {"source_vocab": 6, "target_vocab": WORDS, "width": 5, "attention_width": 3, **options}
    model = kind(Seq2SeqConfig(**values)).double()
    with torch.no_grad():
        model.target_embedding.weight.mul_(3)
        model.combine.weight.mul_(4)
        model.output.weight.mul_(sharpness)
        model.output.bias.zero_()
    return model


def _transformer(kind: Code = Transformer) -> Any:
    config = TransformerConfig(
        source_vocab=6, target_vocab=WORDS, width=6, heads=2, layers=2, feedforward=8, dropout=0.0
    )
    return kind(config).double()


def _sources(rows: int = 4, length: int = 5) -> Tensor:
    """Sources of several lengths, padded with 0."""
    source = torch.randint(1, 6, (rows, length))
    for row in range(rows):
        source[row, length - row % length :] = 0
    return source


def _sequences(length: int) -> list[Sequence]:
    """Every sequence that ends within `length` tokens, and every one that goes on after them."""
    ended = [
        (*tokens, END)
        for n in range(length)
        for tokens in itertools.product(range(WORDS), repeat=n)
        if END not in tokens
    ]
    return ended + [tokens for tokens in itertools.product(range(WORDS), repeat=length) if END not in tokens]


@torch.no_grad()
def _by_hand(model: Any, source: Tensor, length: int) -> dict[Sequence, float]:
    """log p of each of `_sequences`: the sum over its tokens, each after a prefix that is read anew."""
    after: dict[Sequence, list[float]] = {}
    found = {}
    for tokens in _sequences(length):
        for place in range(len(tokens)):
            if tokens[:place] not in after:
                before = torch.tensor([[BEGIN, *tokens[:place]]])
                after[tokens[:place]] = model(source[None], before)[0, -1].log_softmax(-1).tolist()
        found[tokens] = sum(after[tokens[:place]][token] for place, token in enumerate(tokens))
    return found


def _padded(sequences: list[Sequence]) -> Tensor:
    longest = max(map(len, sequences))
    return torch.tensor([[*tokens, *[IGNORE] * (longest - len(tokens))] for tokens in sequences])


# Likelihood -----------------------------------------------------------------------------------


def _reading_the_answer(model: Any, source: Tensor, target: Tensor) -> Tensor:
    """Without the shift: each place has read the token that it is to guess."""
    read = target.masked_fill(target == IGNORE, END)
    chosen = model(source, read).log_softmax(-1).gather(2, read.unsqueeze(2)).squeeze(2)
    return (chosen * (target != IGNORE)).sum(1)


@entry(
    "seq2seq/likelihood",
    "Likelihood of a sequence",
    r"p(y \mid x) = \prod_{l=1}^{T} p(y_l \mid y_1, \ldots, y_{l-1}, x), \qquad "
    r"\sum_{|y| \le L} p(y \mid x) + \Pr(|y| > L \mid x) = 1",
    code=T.log_likelihood,
    wrong=_reading_the_answer,
    tolerance=TOLERANCE,
)
def _likelihood(log_likelihood: Code) -> float:
    errors = []
    sequences = _sequences(4)  # those that are cut off stand for all that begin like them
    target = _padded(sequences)
    for model, source in zip((_model(), _model(layers=2), _transformer()), _sources(3), strict=True):
        found = log_likelihood(model, source.expand(len(target), -1), target)
        wanted = _by_hand(model, source, 4)
        errors += [gap(found.exp().sum(), 1.0), gap(found, [wanted[tokens] for tokens in sequences])]
    return worst(*errors)


class _Forgetful(Seq2Seq):
    """Hands on the hidden state of a step, but not its cell."""

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        logits, after = super().step(tokens, state)
        return logits, after._replace(cell=state.cell)


@entry(
    "seq2seq/teacher-forcing",
    "Teacher forcing",
    r"p(y_l \mid y_1, \ldots, y_{l-1}, x) \text{ for all } l \text{ at once, from } "
    r"(\text{begin}, y_1, \ldots, y_{T-1})",
    code=(Seq2Seq, Transformer),
    wrong=(_Forgetful, Transformer),
    tolerance=TOLERANCE,
)
def _teacher_forcing(kind: Code, other: Code) -> float:
    errors = []
    variants: tuple[dict[str, Any], ...] = ({}, {"layers": 2}, {"bidirectional": False})
    for model in (*(_model(kind, **options) for options in variants), _transformer(other)):
        source, target = _sources(), torch.randint(0, WORDS, (4, 7))  # T ≠ S
        whole, state = model(source, target), model.encode(source)
        for place in range(7):
            logits, state = model.step(target[:, place], state)
            errors.append(gap(logits, whole[:, place]))
        changed = target.clone()
        changed[:, 4:] = (changed[:, 4:] + 1) % WORDS
        errors.append(gap(model(source, changed)[:, :4], whole[:, :4]))  # no place reads a later one
    return worst(*errors)


# Attention ------------------------------------------------------------------------------------


def _attention_picture() -> Figure:
    from quire.report.style import figure

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        source, target = _reversal(64, 6)
        model = Seq2Seq(Seq2SeqConfig(8, 8, width=32, attention_width=16))
        task = T.Translation(model, max_length=8)
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(80):
            optimiser.zero_grad()
            T.log_likelihood(task.pairs, source, target).mean().neg().backward()
            optimiser.step()
        with torch.no_grad():
            weights = model.attend(source[:1], T.shift_target(target[:1], BEGIN, END))[1][0]
    fig = figure(4.2, 3.6)
    axes = fig.subplots()
    shown = axes.imshow(weights.numpy(), cmap="Blues", vmin=0)
    axes.set(title="Attention of a sequence turned round", xlabel="source token", ylabel="target token")
    axes.set(xticks=range(6), xticklabels=source[0].tolist())
    axes.set(yticks=range(7), yticklabels=[*target[0, :-1].tolist(), "end"])
    fig.colorbar(shown, ax=axes, label="weight")
    return fig


def _reversal(rows: int, length: int) -> tuple[Tensor, Tensor]:
    source = torch.randint(3, 8, (rows, length))
    return source, torch.cat([source.flip(1), torch.full((rows, 1), END)], 1)


class _AttendsToPadding(Seq2Seq):
    """Padding takes part in the softmax."""

    def encode(self, source: Tensor) -> DecoderState:
        state = super().encode(source)
        return state._replace(real=torch.ones_like(state.real))


@entry(
    "seq2seq/additive-attention",
    "Additive attention over the encoder's states",
    r"c_l = \sum_{i=1}^{S} \alpha_{l,i} h_i, \qquad "
    r"\alpha_l = \operatorname{softmax}_i\, w_v^\top \tanh(W_q s_l + W_k h_i)",
    code=Seq2Seq,
    wrong=_AttendsToPadding,
    tolerance=TOLERANCE,
    picture=_attention_picture,
)
@torch.no_grad()
def _additive_attention(kind: Code) -> float:
    model, errors = _model(kind), []
    source, target = _sources(), torch.randint(0, WORDS, (4, 3))
    logits, weights = model.attend(source, target)
    errors.append(gap(model(source, target), logits))
    attention = model.attention
    to_query, to_key = attention.query_projection.weight, attention.key_projection.weight
    encoder, decoder = nn.LSTM(5, 5, bidirectional=True).double(), nn.LSTM(5, 5).double()
    encoder.load_state_dict(model.encoder.state_dict())
    decoder.load_state_dict(model.decoder.state_dict())
    for row in range(4):
        tokens = source[row][source[row] != 0]
        states, (last, _) = encoder(model.source_embedding(tokens))  # S, 2H
        start = (model.bridge.weight @ last.flatten() + model.bridge.bias).tanh()
        queries, _ = decoder(model.target_embedding(target[row]), (start[None, :5], start[None, 5:]))
        for place, query in enumerate(queries):
            hidden = [(to_query @ query + to_key @ state).tanh() for state in states]
            scores = [(attention.vector * part).sum().item() for part in hidden]
            total = sum(map(math.exp, scores))
            shares = torch.tensor([math.exp(score) / total for score in scores], dtype=torch.float64)
            context = sum(share * state for share, state in zip(shares, states, strict=True))
            combined = model.combine(torch.cat([query, context])).tanh()
            errors += [
                gap(weights[row, place, : len(tokens)], shares),
                gap(logits[row, place], model.output(combined)),
            ]
        errors.append(weights[row, :, len(tokens) :].abs().sum().item())
    nothing, zero = model.attend(torch.zeros_like(source), target)
    errors += [require(nothing.isfinite().all()), zero.abs().sum().item()]
    return worst(*errors)


# Decoding -------------------------------------------------------------------------------------


def _never_reads_its_choice(model: Any, source: Tensor, *, max_length: int) -> T.Decoded:
    """The best token of each place after the begin token alone."""
    logits = model(source, torch.full((len(source), max_length), BEGIN)).log_softmax(-1)
    best = logits.max(-1)
    return T.Decoded(best.indices, best.values.sum(1))


@torch.no_grad()
def _greedy_by_hand(model: Any, source: Tensor, length: int) -> tuple[list[int], float]:
    tokens, total = [BEGIN], 0.0
    while len(tokens) <= length and (len(tokens) == 1 or tokens[-1] != END):
        chances = model(source[None], torch.tensor([tokens]))[0, -1].softmax(-1).tolist()
        tokens.append(chances.index(max(chances)))
        total += math.log(max(chances))
    return tokens[1:], total


@entry(
    "seq2seq/greedy",
    "Greedy decoding",
    r"\hat y_l = \arg\max_v\, p(v \mid \hat y_1, \ldots, \hat y_{l-1}, x) \quad \text{until the end token}",
    code=T.decode,
    wrong=_never_reads_its_choice,
    tolerance=TOLERANCE,
)
def _greedy(decode: Code) -> float:
    errors = []
    for _ in range(3):
        model, source = _model(), _sources(6)
        found = decode(model, source, max_length=6)
        for row in range(6):
            tokens, total = _greedy_by_hand(model, source[row], 6)
            filled = [*tokens, *[END] * (found.tokens.shape[1] - len(tokens))]
            errors.append(require(found.tokens[row].tolist() == filled))
            errors.append(gap(found.log_probability[row], total))
    return worst(*errors)


def _times_temperature(
    model: Any, source: Tensor, *, max_length: int, temperature: float, generator: Any = None
) -> T.Decoded:
    """p^τ in the place of p^(1/τ)."""
    other = 1 / max(temperature, 1e-9)
    return T.decode(model, source, max_length=max_length, temperature=other, generator=generator)


@entry(
    "seq2seq/temperature",
    "Decoding by draws at a temperature",
    r"\hat y_l \sim p_\tau(v) \propto p(v \mid \hat y_1, \ldots, \hat y_{l-1}, x)^{1/\tau}, \qquad "
    r"P(\hat y) = \prod_l p_\tau(\hat y_l), \qquad \tau = 0: \text{ greedy}",
    code=T.decode,
    wrong=_times_temperature,
    tolerance=4.5,  # in standard errors, of the largest of some sixty shares
)
@torch.no_grad()
def _draws(decode: Code) -> float:
    count, length, tau = 20_000, 3, 0.6
    model, source = _model(sharpness=2.0), _sources(1)
    sequences = _sequences(length)
    chances = []
    for tokens in sequences:  # each token's chance is p^(1/τ), made to sum to 1 at its own place
        chance = 1.0
        for place, token in enumerate(tokens):
            powers = model(source, torch.tensor([[BEGIN, *tokens[:place]]]))[0, -1].softmax(-1) ** (1 / tau)
            chance *= (powers[token] / powers.sum()).item()
        chances.append(chance)
    generator = torch.Generator().manual_seed(0)
    found = decode(model, source.expand(count, -1), max_length=length, temperature=tau, generator=generator)
    drawn = [tuple(row) for row in T.unpad(found.tokens, END, keep=True)]
    total = _by_hand(model, source[0], length)
    errors = [gap(found.log_probability[:50], [total[tokens] for tokens in drawn[:50]]) / TOLERANCE]
    errors.append(require(abs(sum(chances) - 1) < 1e-9))
    for tokens, chance in zip(sequences, chances, strict=True):
        spread = math.sqrt(max(chance * (1 - chance), 1 / count) / count)
        errors.append(abs(drawn.count(tokens) / count - chance) / spread)
    for frozen in (0.0, 1e-3):
        (cold,) = T.unpad(decode(model, source, max_length=5, temperature=frozen).tokens, END, keep=True)
        errors.append(require(cold == _greedy_by_hand(model, source[0], 5)[0]))
    return worst(*errors)


def _greedy_in_disguise(
    model: Any, source: Tensor, *, max_length: int, beams: int = 1, length_penalty: float = 0.0
) -> T.Decoded:
    return T.decode(model, source, max_length=max_length)


@entry(
    "seq2seq/beam",
    "Beam search",
    r"\hat y = \arg\max_{y \,\in\, \text{beam}}\ |y|^{-\alpha} \log p(y \mid x), \qquad "
    r"\text{exact with } K \ge V^{L-1} \text{ beams, never below greedy}",
    code=T.decode_beam,
    wrong=_greedy_in_disguise,
    tolerance=TOLERANCE,
)
def _beam(decode_beam: Code) -> float:
    errors = []
    for alpha in (0.0, 1.0):
        model, source = _model(sharpness=1.0), _sources(4)  # flat enough for greedy to err
        wide = decode_beam(model, source, max_length=3, beams=WORDS**2, length_penalty=alpha)
        for row in range(4):
            every = _by_hand(model, source[row], 3)
            best = max(every, key=lambda y: every[y] / len(y) ** alpha)
            filled = [*best, *[END] * (wide.tokens.shape[1] - len(best))]
            errors.append(require(wide.tokens[row].tolist() == filled))
            errors.append(gap(wide.log_probability[row], every[best]))
        narrow = decode_beam(model, source, max_length=6, beams=2)
        for row in range(4):
            _, greedy = _greedy_by_hand(model, source[row], 6)
            errors.append(max(0.0, greedy - narrow.log_probability[row].item()))
    return worst(*errors)


# Measures -------------------------------------------------------------------------------------


def _without_the_end(logits: Tensor, target: Tensor) -> Tensor:
    """Does not ask whether the sequence ended where it should."""
    return T.exact_matches(logits, target.masked_fill(target == END, IGNORE))


@entry(
    "seq2seq/exact-match",
    "Exact match",
    r"\hat y = y \iff \arg\max_v\, p(v \mid y_1, \ldots, y_{l-1}, x) = y_l \text{ for } l = 1, \ldots, T",
    code=T.exact_matches,
    wrong=_without_the_end,
    tolerance=0.0,
)
@torch.no_grad()
def _exact_match(exact_matches: Code) -> float:
    errors = []
    for _ in range(5):
        model, source = _model(), _sources(12)
        decoded = [tuple(_greedy_by_hand(model, row, 6)[0]) for row in source]
        wanted = []
        for row, tokens in enumerate(decoded):
            body = tokens[:-1] if tokens[-1] == END else tokens
            changed = (*body[:-1], 3 if body[-1:] != (3,) else 0) if body else (3,)
            # Right, one token wrong, ended too soon, and not yet ended.
            choices = [(*body, END), (*changed, END), (*body[:-1], END), (*body, 3, END)]
            wanted.append(choices[row % 4] if tokens[-1] == END else (3, END))
        target = _padded(wanted)
        found = exact_matches(model(source, T.shift_target(target, BEGIN, END)), target)
        truth = [one == other for one, other in zip(decoded, wanted, strict=True)]
        errors.append(require(found.tolist() == truth))
    return worst(*errors)
