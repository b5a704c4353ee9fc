"""Recipes of language models: rnn, lstm, gru, gpt. Any text, in characters, bytes or byte pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.errors import InputError
from quire.options import Optim, Schedule, Text, Train, check_range
from quire.recipes.base import Expectation, RunOptions, recipe, refuse_input_noise

if TYPE_CHECKING:
    from torch import nn

    from quire.recipes.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RecurrentNet:
    """The network."""

    width: int = 128
    """Of the embedding and of each layer."""
    layers: int = 1
    dropout: float = 0.0
    tie_weights: bool = False
    """Read tokens out with the embedding's matrix."""

    def __post_init__(self) -> None:
        check_range(self, "--model.", width=">= 1", layers=">= 1", dropout="[0, 1)")


@dataclass(frozen=True, kw_only=True)
class GRUNet(RecurrentNet):
    reset: Literal["after", "before"] = "after"
    """Whether the reset gate meets the state after the matrix product (PyTorch) or before it (Cho)."""
    keeps: Literal["z", "1-z"] = "z"
    """The share of the old state."""


@dataclass(frozen=True, kw_only=True)
class GPTNet:
    """The network."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    bias: bool = False
    activation: Literal["gelu", "gelu_new"] = "gelu"
    """gelu_new is GPT-2's approximation, which is slower on a CPU."""
    checkpoint: bool = False
    """Compute a second time what training would have to keep: less memory, a third more work."""
    chunked: bool = False
    """Never hold the logits of all tokens: for large vocabularies."""
    weights: Path | None = None
    """A safetensors file of GPT-2 in Hugging Face's format to start from; it decides the network's size."""

    def __post_init__(self) -> None:
        check_range(self, "--model.", layers=">= 1", heads=">= 1", width=">= 1", dropout="[0, 1)")
        if self.width % self.heads:
            raise InputError(
                f"--model.heads {self.heads} for --model.width {self.width}",
                expected="a width that the heads can share equally",
                fix=f"set --model.width to a multiple of {self.heads}",
            )


def _language_train(**changed: Any) -> Train:
    return Train(**{"batch_size": 32, "validate_every": 250, **changed})


@dataclass(frozen=True, kw_only=True)
class LanguageOptions(RunOptions):
    """Options of the recipes that learn from a text."""

    text: Text = field(default_factory=lambda: Text(context=64))
    model: Any = field(default_factory=RecurrentNet)
    optim: Optim = field(
        default_factory=lambda: Optim(lr=4e-3, clip_norm=1.0, schedule=Schedule("cosine", warmup=50))
    )
    train: Train = field(default_factory=lambda: _language_train(carry=True))
    prompt: str = ""
    """How the samples of the report begin; a line break without it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_input_noise(self.train, "text")


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions(LanguageOptions):
    model: RecurrentNet = field(default_factory=RecurrentNet)


@dataclass(frozen=True, kw_only=True)
class GRUOptions(LanguageOptions):
    model: GRUNet = field(default_factory=GRUNet)


@dataclass(frozen=True, kw_only=True)
class GPTOptions(LanguageOptions):
    model: GPTNet = field(default_factory=GPTNet)
    optim: Optim = field(
        default_factory=lambda: Optim(
            lr=2e-3, beta2=0.99, weight_decay=0.1, decay_biases=False, clip_norm=1.0,
            schedule=Schedule("cosine", warmup=100, final=1e-4),
        )
    )  # fmt: skip
    train: Train = field(default_factory=lambda: _language_train(batch_size=12))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.carry:
            raise InputError(
                "--train.carry with gpt", expected="a recurrent network, which has a state to carry"
            )


@recipe(
    "rnn",
    summary="Elman network: a language model of characters, its state carried from batch to batch",
    expected=Expectation("perplexity", at_most=6.5),
    targets="text",
    options=RecurrentOptions,
)
def rnn(options: RecurrentOptions) -> Plan:
    return language_plan(options, lambda size: recurrent_model("rnn", size, options.model), steps=1000)


@recipe(
    "lstm",
    summary="LSTM: a recurrent language model with a memory cell",
    expected=Expectation("perplexity", at_most=5.5),
    targets="text",
    options=RecurrentOptions,
)
def lstm(options: RecurrentOptions) -> Plan:
    return language_plan(options, lambda size: recurrent_model("lstm", size, options.model), steps=1000)


@recipe(
    "gru",
    summary="GRU: a recurrent language model with two gates, in either convention",
    expected=Expectation("perplexity", at_most=5.5),
    targets="text",
    options=GRUOptions,
)
def gru(options: GRUOptions) -> Plan:
    return language_plan(options, lambda size: recurrent_model("gru", size, options.model), steps=1000)


@recipe(
    "gpt",
    summary="GPT: a Transformer that predicts the next token from all before it",
    expected=Expectation("perplexity", at_most=7.5),
    targets="text",
    options=GPTOptions,
)
def gpt(options: GPTOptions) -> Plan:
    def build(vocab_size: int) -> nn.Module:
        from quire.models.gpt import GPT, GPTConfig

        chosen = options.model
        if chosen.weights is not None:
            return GPT.from_file(chosen.weights, dropout=chosen.dropout)
        return GPT(
            GPTConfig(
                vocab_size, options.text.context, chosen.layers, chosen.heads, chosen.width, chosen.dropout,
                chosen.bias, activation=chosen.activation, checkpoint=chosen.checkpoint,
            )
        )  # fmt: skip

    return language_plan(options, build, steps=1000, chunked=options.model.chunked)


def recurrent_model(kind: Literal["rnn", "lstm", "gru"], vocab_size: int, chosen: RecurrentNet) -> nn.Module:
    from quire.models.recurrent import RecurrentLM, RecurrentLMConfig

    convention: dict[str, Any] = (
        {"reset": chosen.reset, "keeps": chosen.keeps} if isinstance(chosen, GRUNet) else {}
    )
    return RecurrentLM(
        RecurrentLMConfig(
            vocab_size, kind, chosen.width, chosen.layers, chosen.dropout, tie_weights=chosen.tie_weights,
            **convention,
        )
    )  # fmt: skip


def language_plan(
    options: LanguageOptions, build: Callable[[int], nn.Module], *, steps: int, chunked: bool = False
) -> Plan:
    import torch

    from quire.data.batch import steps_per_epoch
    from quire.data.text import load_corpus
    from quire.recipes.plan import Plan, Sample
    from quire.tasks.language import LanguageModel
    from quire.tasks.samples import sample_text

    data = load_corpus(options.data or "python-reference", options.text, seed=options.seed)
    torch.manual_seed(options.seed)
    task = LanguageModel(build(data.preparation.tokeniser.vocab_size), chunked=chunked)
    rows = len(data.train.streams(options.train.batch_size) if options.train.carry else data.train)
    epochs = steps / steps_per_epoch(rows, options.train.batch_size)

    def samples() -> list[Sample]:
        prompt = options.prompt or "\n"
        return [
            Sample(f"temperature {temperature:g}", text)
            for temperature in (0.5, 0.8, 1.0)
            for text in sample_text(
                task, data.preparation, [prompt], length=300, temperature=temperature, seed=options.seed
            )
        ]

    return Plan(task, data, options, epochs, samples=samples)
