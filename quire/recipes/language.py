"""Recipes of language models: rnn, lstm, gru, gpt, and gpt tuned through adapters.

Any text, in characters, bytes or byte pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.errors import InputError
from quire.options import LoRA, Optim, Schedule, Text, Train, Tune, check_range
from quire.recipes.base import DescentOptions, Expectation, recipe, refuse_input_noise

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quire.data.text import TextPreparation
    from quire.recipes.plan import Plan
    from quire.train.progress import Progress

OWN_STEPS, BUILTIN_STEPS = 1000, 500
"""On a text of one's own and on the built-in one, unless --epochs or --steps says otherwise."""


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
class LanguageOptions(DescentOptions):
    """Options of the recipes that learn from a text."""

    text: Text = field(default_factory=lambda: Text(context=64))
    model: Any = field(default_factory=RecurrentNet)
    optim: Optim = field(
        default_factory=lambda: Optim(lr=4e-3, clip_norm=1.0, schedule=Schedule("cosine", warmup=50))
    )
    train: Train = field(default_factory=lambda: _language_train(carry=True))
    prompt: str = ""
    """How the samples of the report begin; without it by a line break, where the text has any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_input_noise(self.train, "text")


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions(LanguageOptions):
    model: RecurrentNet = field(default_factory=RecurrentNet)


@dataclass(frozen=True, kw_only=True)
class GRUOptions(LanguageOptions):
    model: GRUNet = field(default_factory=GRUNet)


def _decayed(**changed: Any) -> Optim:
    """AdamW as GPTs are trained with it."""
    schedule = Schedule("cosine", warmup=100, final=1e-4)
    usual = {"lr": 2e-3, "beta2": 0.99, "weight_decay": 0.1, "decay_biases": False, "clip_norm": 1.0}
    return Optim(**{**usual, "schedule": schedule, **changed})


@dataclass(frozen=True, kw_only=True)
class GPTOptions(LanguageOptions):
    model: GPTNet = field(default_factory=GPTNet)
    optim: Optim = field(default_factory=_decayed)
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
    return language_plan(options, lambda size: recurrent_model("rnn", size, options.model))


@recipe(
    "lstm",
    summary="LSTM: a recurrent language model with a memory cell",
    expected=Expectation("perplexity", at_most=5.5),
    targets="text",
    options=RecurrentOptions,
)
def lstm(options: RecurrentOptions) -> Plan:
    return language_plan(options, lambda size: recurrent_model("lstm", size, options.model))


@recipe(
    "gru",
    summary="GRU: a recurrent language model with two gates, in either convention",
    expected=Expectation("perplexity", at_most=5.5),
    targets="text",
    options=GRUOptions,
)
def gru(options: GRUOptions) -> Plan:
    return language_plan(options, lambda size: recurrent_model("gru", size, options.model))


@recipe(
    "gpt",
    summary="GPT: a Transformer that predicts the next token from all before it",
    expected=Expectation("perplexity", at_most=7.5),
    targets="text",
    options=GPTOptions,
)
def gpt(options: GPTOptions) -> Plan:
    return language_plan(options, lambda size: gpt_model(size, options))


@dataclass(frozen=True, kw_only=True)
class TunedGPTOptions(GPTOptions):
    """Options of a GPT that is tuned through adapters."""

    model: GPTNet = field(default_factory=lambda: GPTNet(layers=2))
    base_steps: int = 400
    """Steps of training a base on the built-in text, where no --tune.base or --model.weights gives one."""
    tune: Tune = field(default_factory=lambda: Tune(lora=LoRA(rank=8, targets=("attention",))))
    optim: Optim = field(default_factory=lambda: _decayed(lr=5e-3, weight_decay=0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", base_steps=">= 1")


@dataclass(frozen=True, kw_only=True)
class QuantisedGPTOptions(TunedGPTOptions):
    tune: Tune = field(default_factory=lambda: Tune(lora=LoRA(rank=8), quantise="nf4"))


@recipe(
    "gpt-lora",
    summary="LoRA: a GPT of English learns source code through adapters of rank 8",
    expected=Expectation("perplexity", at_most=11.5),
    targets="text",
    options=TunedGPTOptions,
)
def gpt_lora(options: TunedGPTOptions) -> Plan:
    return tuned_plan(options)


@recipe(
    "gpt-qlora",
    summary="QLoRA: the same over a base whose weights are kept in 4 bits each",
    expected=Expectation("perplexity", at_most=11.5),
    targets="text",
    options=QuantisedGPTOptions,
)
def gpt_qlora(options: QuantisedGPTOptions) -> Plan:
    return tuned_plan(options)


def tuned_plan(options: TunedGPTOptions) -> Plan:
    """A GPT that is tuned, with the perplexity of its base beside its own."""
    from quire.data.batch import as_judged
    from quire.data.text import load_corpus
    from quire.tasks.language import LanguageModel
    from quire.train import evaluate, fit

    given = options.tune.base is not None or options.model.weights is not None
    first = None if given else load_corpus("python-reference", options.text, seed=options.seed)
    plan = language_plan(
        options, lambda size: gpt_model(size, options), steps=300 if options.data else 200,
        builtin="python-source",
        like=None if first is None else first.preparation,
    )  # fmt: skip
    task = plan.task
    assert isinstance(task, LanguageModel)

    def train_base(device: torch.device, progress: Progress) -> None:
        assert first is not None
        base = LanguageModel(task.model, chunked=task.chunked)
        fit(
            base, first.train, first.validation, steps=options.base_steps, optim=_decayed(),
            train=_language_train(batch_size=12), seed=options.seed, device=device, progress=progress,
        )  # fmt: skip

    def base_perplexity() -> dict[str, float]:
        part = plan.data.test or plan.data.validation or plan.data.train
        if plan.adapters is None:
            return {}
        active = dict(plan.adapters.active)
        plan.adapters.deactivate()
        found = evaluate(task, as_judged(part).to(task.device))["perplexity"]
        plan.adapters.activate(active)
        return {"base_perplexity": found}

    plan.extra_measures = base_perplexity
    if first is not None:
        plan.before = train_base
        plan.notes.append(f"the base was trained on {first.source} for {options.base_steps} steps")
    return plan


def gpt_model(vocab_size: int, options: GPTOptions) -> nn.Module:
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
    options: LanguageOptions,
    build: Callable[[int], nn.Module],
    *,
    steps: int | None = None,
    builtin: str = "python-reference",
    like: TextPreparation | None = None,
) -> Plan:
    """A language model of `--data` or of a built-in text, in the tokens of `like` where that is given."""
    import torch

    from quire.data.batch import steps_per_epoch
    from quire.data.text import TextPreparation, load_corpus
    from quire.recipes.plan import Plan, Sample, base_preparation
    from quire.recipes.reading import language_pictures
    from quire.tasks.language import LanguageModel
    from quire.tasks.samples import opening, prompt_tokens, sample_text

    data = load_corpus(
        options.data or builtin,
        options.text,
        seed=options.seed,
        like=like or base_preparation(options, TextPreparation, "language"),
    )
    prompt = options.prompt or opening(data.preparation)
    prompt_tokens(data.preparation, prompt)  # which may refuse it
    torch.manual_seed(options.seed)
    chunked = bool(getattr(options.model, "chunked", False))
    task = LanguageModel(build(data.preparation.tokeniser.vocab_size), chunked=chunked)
    rows = len(data.train.streams(options.train.batch_size) if options.train.carry else data.train)
    steps = steps or (OWN_STEPS if options.data else BUILTIN_STEPS)
    epochs = steps / steps_per_epoch(rows, options.train.batch_size)

    def samples() -> list[Sample]:
        return [
            Sample(f"temperature {temperature:g}", text)
            for temperature in (0.5, 0.8, 1.0)
            for text in sample_text(
                task, data.preparation, [prompt], length=300, temperature=temperature, seed=options.seed
            )
        ]

    return Plan(task, data, options, epochs, samples=samples, pictures=lambda: language_pictures(task, data))
