"""From one sequence of tokens to another: p(y | x) = Π_l p(y_l | y_1 … y_{l−1}, x).

B pairs, S source tokens, T target tokens, V words of the target, L tokens that are decoded. A batch holds

    "inputs"  (B, S)   source tokens, padded as the model's config says
    "target"  (B, T)   target tokens with the end token as the last, and `IGNORE` after it

The decoder reads the begin token and then the target itself, one place behind (teacher forcing). Any model
with the methods of `EncoderDecoder` can be trained and decoded so.

A sequence that teacher forcing guesses right at each place is what greedy decoding gives, because the decoder
has then read its own choices. So exact matches cost nothing beyond the loss, and only the other sequences are
decoded to be judged by BLEU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self, cast, final

import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.errors import InputError, unknown_name
from quire.functional.bleu_score import bleu_from_statistics, bleu_statistics
from quire.functional.losses import cross_entropy
from quire.functional.sampling import Hypothesis, beam_search, sample
from quire.models.registry import build_model, model_spec
from quire.nn.head import full_precision
from quire.nn.heads import IGNORE
from quire.tasks.common import as_weight
from quire.train.task import TASKS, Task, Weight

MODES = ("mode", "sample", "beam")
TERM = "target"


class EncoderDecoder(Protocol):
    """What a model of pairs can do. Its state is a nest of tuples, lists and dicts of tensors with B rows."""

    @property
    def begin(self) -> int:
        """The token that stands before each target."""

    @property
    def end(self) -> int:
        """The token that each target ends with."""

    def __call__(self, source: Tensor, target_in: Tensor, /) -> Tensor:
        """(B, S) and (B, T) → logits (B, T, V), of which position l has read no more than l target tokens."""

    def encode(self, source: Tensor, /) -> Any:
        """(B, S) → the state before the first token."""

    def step(self, tokens: Tensor, state: Any, /) -> tuple[Tensor, Any]:
        """One more token of each row (B,) → logits of the next (B, V), and the state after it."""


class Decoded(NamedTuple):
    tokens: Tensor
    """(B, L); the end token stands after a sequence as well. A sequence that was cut off has none."""
    log_probability: Tensor
    """log p(y | x) of each sequence, its end token included, (B,)."""


# Parts ----------------------------------------------------------------------------------------


def shift_target(target: Tensor, begin: int, end: int) -> Tensor:
    """What the decoder reads to give `target`: the begin token, and the target without its last place."""
    if target.dim() != 2 or target.is_floating_point():
        raise InputError(
            f"targets of shape {tuple(target.shape)} and type {target.dtype}",
            expected="token numbers (B, T)",
            fix="give each row its tokens with the end token, padded with IGNORE to a common length",
        )
    first = target.new_full((len(target), 1), begin)
    # Whatever stands in ignored places is read after the last token that counts.
    return torch.cat([first, target.masked_fill(target == IGNORE, end)], dim=1)[:, : target.shape[1]]


def log_likelihood(model: EncoderDecoder, source: Tensor, target: Tensor) -> Tensor:
    """log p(y | x) = Σ_l log p(y_l | y_1 … y_{l−1}, x) of each pair (B,), without ignored places."""
    logits = model(source, shift_target(target, model.begin, model.end))
    return -_losses(logits, target).sum(1)


def exact_matches(logits: Tensor, target: Tensor) -> Tensor:
    """Whether each token of a target, the end token included, is the best one (B,): from the logits (B, T, V)
    of teacher forcing, yet equal to comparing what greedy decoding gives. No tokens are no match."""
    ignored = target == IGNORE
    return ((logits.argmax(-1) == target) | ignored).all(1) & ~ignored.all(1)


def _losses(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """−log p of each token (B, T), 0 where it is ignored."""
    return cross_entropy(
        full_precision(logits).reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        ignore_index=IGNORE,
        label_smoothing=label_smoothing,
        reduction="none",
    ).reshape(target.shape)


# Decoding -------------------------------------------------------------------------------------


@torch.no_grad()
def decode(
    model: EncoderDecoder,
    source: Tensor,
    *,
    max_length: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Decoded:
    """The best token at each step (greedy), or with a temperature above 0 a draw from p^(1/τ), until each row
    has ended or has `max_length` tokens, the end token included."""
    _require_length(max_length)
    state = model.encode(source)
    tokens = source.new_full((len(source),), model.begin)
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    total: Tensor | float = 0.0
    chosen = []
    for _ in range(max_length):
        logits, state = model.step(tokens, state)
        logits = full_precision(logits)
        drawn = sample(logits, temperature=temperature, generator=generator)
        each = logits.log_softmax(-1).gather(1, drawn.unsqueeze(1)).squeeze(1)
        total = total + each.masked_fill(ended, 0.0)
        tokens = drawn.masked_fill(ended, model.end)
        chosen.append(tokens)
        ended = ended | (tokens == model.end)
        if bool(ended.all()):
            break
    return Decoded(torch.stack(chosen, 1), cast(Tensor, total))


@torch.no_grad()
def decode_beam(
    model: EncoderDecoder,
    source: Tensor,
    *,
    max_length: int,
    beams: int = 4,
    length_penalty: float = 0.0,
) -> Decoded:
    """The sequence with the best log p(y | x) / |y|^α that beam search or greedy decoding finds.

    Beam search alone can lose the greedy sequence on its way, and end below it.
    """
    start = source.new_full((len(source),), model.begin)
    found = beam_search(
        model.step, model.encode(source), start,
        beams=beams, steps=max_length, end=model.end, length_penalty=length_penalty, select=select_rows,
    )  # fmt: skip
    greedy = decode(model, source, max_length=max_length)
    best: list[Hypothesis] = []
    for others, tokens, total in zip(
        found, unpad(greedy.tokens, model.end, keep=True), greedy.log_probability.tolist(), strict=True
    ):
        own = Hypothesis(tuple(tokens), total, total / len(tokens) ** length_penalty)
        best.append(max([*others, own], key=lambda one: one.score))
    longest = max((len(one.tokens) for one in best), default=1)
    rows = [[*one.tokens, *[model.end] * (longest - len(one.tokens))] for one in best]
    scores = [one.log_probability for one in best]
    return Decoded(
        torch.tensor(rows, dtype=source.dtype, device=source.device).reshape(len(rows), longest),
        greedy.log_probability.new_tensor(scores),
    )


def select_rows(state: Any, rows: Tensor) -> Any:
    """The given rows of each tensor in a nest of tuples, lists and dicts; anything else stays."""
    if isinstance(state, Tensor):
        return state.index_select(0, rows)
    if isinstance(state, Mapping):
        return {name: select_rows(part, rows) for name, part in state.items()}
    if isinstance(state, list | tuple):
        parts = [select_rows(part, rows) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state


def unpad(tokens: Tensor, end: int, *, keep: bool = False) -> list[list[int]]:
    """The tokens of each row before its first end token or ignored place; `keep` also takes the end token."""
    rows = []
    for row in tokens.tolist():
        length = next((i for i, token in enumerate(row) if token in (end, IGNORE)), len(row))
        rows.append(row[: length + (keep and length < len(row) and row[length] == end)])
    return rows


def _require_length(max_length: int) -> None:
    if max_length < 1:
        raise InputError(f"max_length is {max_length}", expected="at least 1", fix="count the end token too")


# The task -------------------------------------------------------------------------------------


@final
@TASKS.register("translation")
class Translation(Task):
    """−log p(y | x), summed over the real tokens of the targets."""

    higher_is_better: ClassVar[frozenset[str]] = frozenset({"accuracy", "exact_match", "bleu"})
    evaluation_numbers: ClassVar[int] = 2**16

    def __init__(
        self,
        model: nn.Module,
        *,
        max_length: int,
        label_smoothing: float = 0.0,
        step_factors: Mapping[str, float] | None = None,
        frozen: Mapping[str, float] | None = None,
    ) -> None:
        """`max_length` is how many tokens are decoded at most, the end token included; `step_factors` and
        `frozen` are those of `Supervised`."""
        super().__init__()
        missing = [name for name in ("begin", "end", "encode", "step") if not hasattr(model, name)]
        if missing:
            raise InputError(
                f"a {type(model).__name__} without {', '.join(missing)}",
                expected="an encoder-decoder, with what quire.tasks.translation.EncoderDecoder lists",
                fix="take a model of pairs, such as seq2seq or transformer",
            )
        _require_length(max_length)
        if not 0.0 <= label_smoothing < 1.0:
            raise InputError(f"label_smoothing is {label_smoothing!r}", expected="a share in [0, 1)")
        self.model = model
        self.max_length, self.label_smoothing = max_length, label_smoothing
        self.step_factors, self.frozen = dict(step_factors or {}), dict(frozen or {})

    @property
    def pairs(self) -> EncoderDecoder:
        """The model, by what it can do."""
        return cast(EncoderDecoder, self.model)

    # -- Loss ----------------------------------------------------------------------------------

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        if batch.complete:
            return {TERM: float(batch.target.numel())}
        return {TERM: as_weight((batch.target != IGNORE).sum(dtype=torch.float64))}

    def output(self, batch: Batch) -> Tensor:
        """Logits (B, T, V) under teacher forcing."""
        return self.pairs(batch.inputs, shift_target(batch.target, self.pairs.begin, self.pairs.end))

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return self._terms(self.output(batch), batch)

    def _terms(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {TERM: _losses(logits, batch.target, self.label_smoothing).sum()}

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        return {TERM: _losses(self.output(batch), batch.target, self.label_smoothing).sum(1)}

    # -- Measures ------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        logits, target = self.output(batch), batch.target
        real = target != IGNORE
        exact = exact_matches(logits, target)
        there = real.any(1)
        tallies = {
            "log_loss": _losses(logits, target).sum(dtype=torch.float64),
            "right": (logits.argmax(-1) == target).sum(),
            "tokens": real.sum(),
            "exact": exact.sum(),
            "sequences": there.sum(),
            "bleu": self._bleu(batch, exact, there).to(target.device),
        }
        return self._terms(logits, batch), tallies

    def _bleu(self, batch: Batch, exact: Tensor, there: Tensor) -> Tensor:
        """The statistics of greedy decoding; only what is not exact has to be decoded."""
        references = unpad(batch.target[there], self.pairs.end)
        candidates = list(references)
        wrong = (~exact & there).nonzero().squeeze(1)
        if len(wrong):
            length = max(self.max_length, batch.target.shape[1])
            found = decode(self.pairs, batch.inputs[wrong], max_length=length)
            place = (there.cumsum(0) - 1)[wrong].tolist()
            for i, tokens in zip(place, unpad(found.tokens, self.pairs.end), strict=True):
                candidates[i] = tokens
        return bleu_statistics(candidates, [[reference] for reference in references])

    def tally(self, batch: Batch) -> dict[str, Tensor]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        """Accuracy of single tokens and perplexity under teacher forcing; exact matches and BLEU of what
        greedy decoding gives, the end token left out of BLEU."""
        tokens, sequences = tallies["tokens"].clamp(min=1), tallies["sequences"].clamp(min=1)
        return {
            "accuracy": (tallies["right"].double() / tokens).item(),
            "perplexity": (tallies["log_loss"].double() / tokens).exp().item(),
            "exact_match": (tallies["exact"].double() / sequences).item(),
            "bleu": bleu_from_statistics(tallies["bleu"]).item(),
        }

    # -- Predictions ---------------------------------------------------------------------------

    @torch.no_grad()
    def predict(
        self,
        inputs: Tensor,
        mode: str = "mode",
        *,
        temperature: float = 1.0,
        beams: int = 4,
        length_penalty: float = 0.0,
        seed: int = 0,
        generator: torch.Generator | None = None,
        max_length: int | None = None,
    ) -> dict[str, Tensor]:
        """`tokens` (B, L), with the end token after each sequence, and their `log_probability` (B,).

        "mode" decodes greedily, "sample" draws at `temperature`, by `generator` or from `seed`, and "beam"
        looks for the best log p(y | x) / |y|^length_penalty with `beams` sequences at a time.
        """
        length = max_length or self.max_length
        if mode == "mode":
            found = decode(self.pairs, inputs, max_length=length)
        elif mode == "sample":
            generator = generator or torch.Generator(inputs.device).manual_seed(seed)
            found = decode(
                self.pairs, inputs, max_length=length, temperature=temperature, generator=generator
            )
        elif mode == "beam":
            found = decode_beam(
                self.pairs, inputs, max_length=length, beams=beams, length_penalty=length_penalty
            )
        else:
            raise unknown_name("mode of translation", mode, MODES)
        return {"tokens": found.tokens, "log_probability": found.log_probability}

    # -- Saving --------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        return {
            "task": "translation",
            "model": model_spec(self.model),
            "max_length": self.max_length,
            "label_smoothing": self.label_smoothing,
            "step_factors": self.step_factors,
            "frozen": self.frozen,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        return cls(
            build_model(spec["model"]), max_length=spec["max_length"],
            label_smoothing=spec["label_smoothing"],
            step_factors=spec["step_factors"], frozen=spec["frozen"],
        )  # fmt: skip
