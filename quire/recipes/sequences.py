"""Recipes of sequences with an answer: seq2seq and transformer translate, textclass names a class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from quire.options import Optim, Schedule, Text, Train, check_range
from quire.recipes.base import DescentOptions, Expectation, recipe, refuse_input_noise

if TYPE_CHECKING:
    from torch import nn

    from quire.data.text import TextData
    from quire.recipes.plan import Plan

SHOWN = 6
"""Pairs in the report."""


@dataclass(frozen=True, kw_only=True)
class Seq2SeqNet:
    """The network."""

    width: int = 128
    layers: int = 1
    attention_width: int = 64
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_range(self, "--model.", width=">= 1", layers=">= 1", attention_width=">= 1", dropout="[0, 1)")


@dataclass(frozen=True, kw_only=True)
class TransformerNet:
    """The network."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    feedforward: int = 128
    dropout: float = 0.0
    norm: Literal["pre", "post"] = "pre"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"

    def __post_init__(self) -> None:
        check_range(
            self, "--model.", width=">= 1", heads=">= 1", layers=">= 1", feedforward=">= 1", dropout="[0, 1)"
        )


@dataclass(frozen=True, kw_only=True)
class ClassifierNet:
    """The network."""

    kind: Literal["lstm", "gru", "rnn", "transformer"] = "lstm"
    width: int = 96
    layers: int = 1
    heads: int = 4
    """Of a transformer."""
    dropout: float = 0.2

    def __post_init__(self) -> None:
        check_range(self, "--model.", width=">= 1", heads=">= 1", layers=">= 1", dropout="[0, 1)")


def _optim() -> Optim:
    return Optim(lr=3e-3, clip_norm=1.0, schedule=Schedule("cosine", warmup=100))


@dataclass(frozen=True, kw_only=True)
class PairOptions(DescentOptions):
    """Options of the recipes that learn from pairs of texts, one a line, a tab between source and target."""

    text: Text = field(default_factory=Text)
    model: Seq2SeqNet = field(default_factory=Seq2SeqNet)
    optim: Optim = field(default_factory=_optim)
    train: Train = field(default_factory=lambda: Train(batch_size=64))

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_input_noise(self.train, "text")


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(PairOptions):
    model: TransformerNet = field(default_factory=TransformerNet)  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class TextClassOptions(DescentOptions):
    """Options of the recipe that learns from texts with a label: a table, or a folder for each class."""

    text: Text = field(default_factory=lambda: Text(validation=0.15, test=0.15))
    model: ClassifierNet = field(default_factory=ClassifierNet)
    optim: Optim = field(default_factory=_optim)
    train: Train = field(default_factory=lambda: Train(batch_size=64))

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_input_noise(self.train, "text")


@recipe(
    "seq2seq",
    summary="LSTM encoder and decoder with additive attention: number words and dates to digits",
    expected=Expectation("exact_match", at_least=0.99),
    targets="pairs",
    options=PairOptions,
)
def seq2seq(options: PairOptions) -> Plan:
    def build(data: TextData) -> nn.Module:
        from quire.models.seq2seq import Seq2Seq, Seq2SeqConfig

        chosen = options.model
        return Seq2Seq(
            Seq2SeqConfig(
                width=chosen.width, layers=chosen.layers, dropout=chosen.dropout,
                attention_width=chosen.attention_width, **vocabularies(data),
            )
        )  # fmt: skip

    return pair_plan(options, build, epochs=2, builtin_epochs=1)


@recipe(
    "transformer",
    summary="Transformer encoder and decoder: number words and dates to digits",
    expected=Expectation("exact_match", at_least=0.99),
    targets="pairs",
    options=TransformerOptions,
)
def transformer(options: TransformerOptions) -> Plan:
    def build(data: TextData) -> nn.Module:
        from quire.models.transformer import Transformer, TransformerConfig

        chosen = options.model
        return Transformer(
            TransformerConfig(
                width=chosen.width, heads=chosen.heads, layers=chosen.layers, feedforward=chosen.feedforward,
                dropout=chosen.dropout, norm=chosen.norm, positions=chosen.positions, **vocabularies(data),
            )
        )  # fmt: skip

    return pair_plan(options, build, epochs=6, builtin_epochs=4)


@recipe(
    "textclass",
    summary="Classes of short texts, by an LSTM, a GRU or a Transformer",
    expected=Expectation("accuracy", at_least=0.75),
    targets="labelled",
    options=TextClassOptions,
)
def textclass(options: TextClassOptions) -> Plan:
    import torch

    from quire.data.text import TextPreparation, load_labelled
    from quire.models.recurrent import RecurrentClassifier, RecurrentClassifierConfig
    from quire.models.transformer import TransformerClassifier, TransformerClassifierConfig
    from quire.nn.heads import Categorical
    from quire.recipes.plan import Plan, base_preparation
    from quire.recipes.reading import classifier_pictures
    from quire.tasks.supervised import Supervised

    data = load_labelled(
        options.data or "python-lines",
        options.text,
        seed=options.seed,
        like=base_preparation(options, TextPreparation, "labelled"),
    )
    tokeniser, chosen = data.preparation.tokeniser, options.model
    classes, padding = len(data.classes), tokeniser.specials["padding"]
    torch.manual_seed(options.seed)
    model: nn.Module
    if chosen.kind == "transformer":
        model = TransformerClassifier(
            TransformerClassifierConfig(
                vocab_size=tokeniser.vocab_size, num_classes=classes, padding=padding, width=chosen.width,
                heads=chosen.heads, layers=chosen.layers, feedforward=2 * chosen.width,
                dropout=chosen.dropout,
            )
        )  # fmt: skip
    else:
        model = RecurrentClassifier(
            RecurrentClassifierConfig(
                tokeniser.vocab_size, chosen.kind, chosen.width, chosen.layers, chosen.dropout,
                num_classes=classes, padding=padding, bidirectional=True, reading="mean",
            )
        )  # fmt: skip
    task = Supervised(model, Categorical(classes))
    return Plan(task, data, options, epochs=8, pictures=lambda: classifier_pictures(task, data))


def vocabularies(data: TextData) -> dict[str, Any]:
    """Sizes and special tokens of both languages, as the configs of encoder-decoders call them."""
    source, target = data.preparation.tokeniser, data.preparation.target_tokeniser
    assert target is not None
    return {
        "source_vocab": source.vocab_size,
        "target_vocab": target.vocab_size,
        "padding": source.specials["padding"],
        "begin": target.specials["begin"],
        "end": target.specials["end"],
    }


def pair_plan(
    options: PairOptions, build: Callable[[TextData], nn.Module], *, epochs: float, builtin_epochs: float
) -> Plan:
    import torch

    from quire.data.text import TextPreparation, load_pairs
    from quire.recipes.plan import Plan, Sample, base_preparation
    from quire.recipes.reading import translation_pictures
    from quire.tasks.translation import Translation

    data = load_pairs(
        options.data or "numbers-and-dates",
        options.text,
        seed=options.seed,
        like=base_preparation(options, TextPreparation, "pairs"),
    )
    torch.manual_seed(options.seed)
    task = Translation(build(data), max_length=data.preparation.target_length + 1)

    def samples() -> list[Sample]:
        split = "test" if data.test is not None else "train"
        part, texts = data.test or data.train, data.samples[split]
        device = task.device
        found = task.predict(part.inputs[:SHOWN].to(device))["tokens"]
        said = data.preparation.decode(found)
        answers = texts.answers
        assert answers is not None
        lines = [
            f"{texts.texts[i]}\n→ {said[i]}" + ("" if said[i] == answers[i] else f"   (is {answers[i]})")
            for i in range(len(said))
        ]
        return [Sample(f"Pairs of the {split} part, by greedy decoding", "\n\n".join(lines))]

    return Plan(
        task,
        data,
        options,
        epochs if options.data else builtin_epochs,
        samples=samples,
        pictures=lambda: translation_pictures(task, data),
    )
