"""Typed options of training, shared by the trainer, the estimators and the command.

Nothing heavy is imported here: the command builds its flags (`--optim.lr 0.1`) from these
dataclasses before PyTorch is loaded, so a wrong option fails at once. Each class checks its values
when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from quire.errors import InputError, unknown_name


def check(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise InputError(f"{name} is {value!r}", expected=expected, fix=f"set {name} to {expected}")


def check_range(options: Any, prefix: str, **bounds: str) -> None:
    """Check numeric fields against bounds such as ``"> 0"``, ``">= 0"`` or ``"[0, 1)"``; None is skipped."""
    for name, bound in bounds.items():
        value = getattr(options, name)
        if value is None:
            continue
        number = isinstance(value, Real)
        good = (
            number
            and math.isfinite(value)
            and {
                "> 0": value > 0,
                ">= 0": value >= 0,
                ">= 1": value >= 1,
                "[0, 1)": 0 <= value < 1,
                "(0, 1)": 0 < value < 1,
                "[0, 1]": 0 <= value <= 1,
            }[bound]
        )
        check(good, f"{prefix}{name}", value, f"a number {'in ' if bound[0] in '[(' else ''}{bound}")


ScheduleName = Literal["constant", "linear", "power", "exponential", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """Step size as a function of the step τ: warm-up first, then the named shape."""

    name: ScheduleName = "constant"
    warmup: int = 0
    """Steps over which the step size grows linearly from 0."""
    final: float = 0.0
    """Step size at the end, for linear and cosine."""
    scale: float = 1000.0
    """s in power η₀(1+τ/s)^c and exponential η₀·c^(τ/s)."""
    rate: float = 0.5
    """c of the exponential schedule."""
    exponent: float = -1.0
    """c of the power schedule."""

    def __post_init__(self) -> None:
        check_range(self, "--optim.schedule.", warmup=">= 0", final=">= 0", scale="> 0", rate="> 0")
        names = get_args(ScheduleName)
        check(self.name in names, "--optim.schedule.name", self.name, f"one of {', '.join(names)}")


@dataclass(frozen=True)
class Optim:
    """The optimiser."""

    name: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    """Step size η."""
    momentum: float = 0.0
    """μ of sgd."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    """λ; biases and norm parameters are decayed too unless decay_biases is false."""
    decay: Literal["decoupled", "l2"] = "decoupled"
    """decoupled: w ← (1−ηλ)w. l2: λw is added to the gradient. Equal for sgd, not for adam."""
    decay_biases: bool = True
    l1: float = 0.0
    """Strength of the L1 penalty; adds l1·sign(w) to the gradient."""
    clip_norm: float | None = None
    """Scale the gradient down to this norm when it is longer."""
    clip_value: float | None = None
    """Clamp each component of the gradient to ± this value."""
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        check_range(
            self, "--optim.", lr="> 0", momentum="[0, 1)", beta1="[0, 1)", beta2="[0, 1)", eps="> 0",
            weight_decay=">= 0", l1=">= 0", clip_norm="> 0", clip_value="> 0",
        )  # fmt: skip
        check(self.name in ("adam", "sgd"), "--optim.name", self.name, "adam or sgd")
        check(self.decay in ("decoupled", "l2"), "--optim.decay", self.decay, "decoupled or l2")


@dataclass(frozen=True)
class Noise:
    """Standard deviations of Gaussian noise added while training."""

    inputs: float = 0.0
    activations: float = 0.0
    weights: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "--train.noise.", inputs=">= 0", activations=">= 0", weights=">= 0")


@dataclass(frozen=True)
class Train:
    """The loop."""

    batch_size: int = 64
    """Samples in one step; 0 takes the whole training set."""
    micro_batches: int = 1
    """Parts that a step's batch is computed in; the gradient is that of the whole batch."""
    shuffle: bool = True
    validate_every: int | None = None
    """Validate every n steps instead of at the end of each epoch."""
    checkpoint_every: int | None = None
    """Also save every n steps. Otherwise at validations, no more often than checkpoint_seconds."""
    checkpoint_seconds: float = 20.0
    keep: int = 2
    """Checkpoints kept; each holds the last and the best weights."""
    monitor: str = "loss"
    """The validation measure that decides which weights are best."""
    restore: Literal["best", "last"] = "best"
    """Which weights the run ends with: the best on the validation rows, or the last."""
    patience: int | None = None
    """Stop after this many validations without an improvement."""
    min_delta: float = 0.0
    """What counts as an improvement."""
    carry: bool = False
    """Read a text in streams and carry a recurrent model's state from batch to batch; the gradient ends at
    the batch (truncated backpropagation through time)."""
    average: float | None = None
    """Decay of the moving average of weights, which is then what is judged and kept."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 computes in mixed precision; weights and optimiser stay float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    capture: bool = True
    """On a GPU, record a step that is alike from batch to batch and replay it as one, where launching its
    kernels would take longer than running them."""
    noise: Noise = field(default_factory=Noise)

    def __post_init__(self) -> None:
        check_range(
            self, "--train.", batch_size=">= 0", micro_batches=">= 1", validate_every=">= 1",
            checkpoint_every=">= 1", checkpoint_seconds=">= 0", keep=">= 1", patience=">= 1",
            min_delta=">= 0", average="(0, 1)",
        )  # fmt: skip
        check(self.restore in ("best", "last"), "--train.restore", self.restore, "best or last")
        if self.carry and self.compile:
            raise InputError("--train.carry with --train.compile", expected="one of them")
        good = self.precision in ("float32", "bfloat16")
        check(good, "--train.precision", self.precision, "float32 or bfloat16")


@dataclass(frozen=True)
class Sharing:
    """What several processes share."""

    shard: bool = False
    """Split weights, gradients and the optimiser's state among the processes that train together, for models
    that do not fit otherwise. Without it each has the whole model and its share of the rows."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How many processes train together."""

    nproc: int = 1
    """Processes on this machine that train together, each with a GPU of its own or with its share of the
    cores; the result is that of one. On several machines use torchrun."""
    parallel: Sharing = field(default_factory=Sharing)

    def __post_init__(self) -> None:
        check(1 <= self.nproc <= 1024, "--nproc", self.nproc, "a whole number from 1 to 1024")
        parent = getattr(super(), "__post_init__", None)
        if parent is not None:
            parent()


def to_dict(options: Any) -> Any:
    """Nested dataclasses as plain dictionaries, without the fields that are None (TOML has no null)."""
    if hasattr(options, "__dataclass_fields__"):
        pairs = ((f.name, to_dict(getattr(options, f.name))) for f in fields(options))
        return {name: value for name, value in pairs if value is not None}
    if isinstance(options, tuple | list):
        return [to_dict(value) for value in options]
    return str(options) if hasattr(options, "__fspath__") else options


@dataclass(frozen=True)
class Table:
    """How a table is read and split."""

    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first line holds column names; auto looks at the types below it."""
    delimiter: Literal["auto", "comma", "tab", "semicolon"] = "auto"
    decimal: Literal["point", "comma"] = "point"
    """What stands before the decimals of a number in a text file: 1234.5 or 1.234,5."""
    missing: Literal["impute", "refuse"] = "impute"
    """impute: the training median or a category of its own, with an indicator column."""
    drop: tuple[str, ...] = ()
    """Columns to leave out."""
    categories: tuple[str, ...] = ()
    """Columns to read as categories even though they look like numbers."""
    validation: float = 0.15
    """Share of the rows held out to choose the best weights."""
    test: float = 0.15
    """Share of the rows held out for the final result."""

    def __post_init__(self) -> None:
        check_range(self, "--table.", validation="[0, 1)", test="[0, 1)")
        held_out = self.validation + self.test
        check(held_out < 0.95, "--table.validation + --table.test", held_out, "a sum below 0.95")


@dataclass(frozen=True)
class Rows(Table):
    """How rows are read that are learned from without a target."""

    memory: float = 4.0
    """GiB of a file that may be read whole; larger .npy and Parquet files are read in pieces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--table.", memory="> 0")


@dataclass(frozen=True)
class Images:
    """How images are read and split."""

    size: int | None = None
    """Side in pixels that every image is brought to; without it the size that all of them share, up to
    224, and 224 where they differ or are larger."""
    fit: Literal["crop", "pad", "stretch"] = "crop"
    """How an image of another shape becomes a square: its middle, all of it with a border, or distorted."""
    colour: Literal["auto", "grey", "rgb"] = "auto"
    """auto: grey where every image is grey."""
    broken: Literal["refuse", "skip"] = "refuse"
    """What to do with files that are truncated, no image, or larger than most_pixels."""
    most_pixels: int = 100_000_000
    memory: float = 4.0
    """GiB of pixels that may be kept in memory; a larger set is decoded batch by batch while training."""
    workers: int = 0
    """Threads that decode; 0 is one for each core."""
    validation: float = 0.15
    """Share of the training images held out to choose the best weights, where the data has no such part."""
    test: float = 0.15
    """Share of the images held out for the final result, where the data has no test part of its own."""

    def __post_init__(self) -> None:
        check_range(
            self, "--images.", size=">= 1", most_pixels=">= 1", memory="> 0", workers=">= 0",
            validation="[0, 1)", test="[0, 1)",
        )  # fmt: skip
        held_out = self.validation + self.test
        check(held_out < 0.95, "--images.validation + --images.test", held_out, "a sum below 0.95")


@dataclass(frozen=True)
class Scenes(Images):
    """How annotated images are read and split."""

    fit: Literal["stretch"] = "stretch"
    """Every image is brought to the size of the network as a whole; its boxes follow."""
    boxes: Literal["refuse", "skip", "repair"] = "refuse"
    """What to do with boxes of no area, with corners in the wrong order or reaching out of the image. skip
    leaves them out; repair orders corners and cuts at the border, and leaves out what has no area then."""
    missing: Literal["refuse", "skip", "empty"] = "refuse"
    """What to do with an image whose annotation file is missing; empty takes it as one without objects."""
    empty: Literal["keep", "skip", "refuse"] = "keep"
    """What to do with an image that has no boxes; keep trains on it as background."""
    crowd: Literal["keep", "skip"] = "keep"
    """Boxes marked as crowd or difficult; kept, they are not learned and not counted as misses."""


@dataclass(frozen=True)
class Augment:
    """Random changes of training images, made on the device, batch by batch."""

    shift: float = 0.0
    """Move by up to this share of the image's longer side, in whole pixels; zeros come in."""
    flip: float = 0.0
    """Probability of mirroring left to right."""
    crop: float = 1.0
    """Shortest side of a random window, as a share of the image; the window is scaled to full size."""
    zoom_out: float = 1.0
    """Longest side of the window: above 1 the image becomes smaller, with its mean colour around it."""
    aspect: float = 1.0
    """Largest ratio by which the window's sides may differ."""
    colour: float = 0.0
    """Brightness, contrast and saturation are multiplied by factors from 1 − colour to 1 + colour."""
    cut_out: float = 0.0
    """Side of a square that is blanked, as a share of the image's side."""
    mixup: float = 0.0
    """α of mixup: pairs of images and their targets are blended by a share λ ~ Beta(α, α)."""
    cutmix: float = 0.0
    """α of cutmix: a window of area 1 − λ is pasted from another image, and the targets are blended so."""

    def __post_init__(self) -> None:
        check_range(
            self, "--augment.", shift="[0, 1)", flip="[0, 1]", zoom_out=">= 1", aspect=">= 1",
            colour="[0, 1]", cut_out="[0, 1)", mixup=">= 0", cutmix=">= 0",
        )  # fmt: skip
        check(0 < self.crop <= 1, "--augment.crop", self.crop, "a number in (0, 1]")

    @property
    def mixes(self) -> bool:
        """Whether targets are blended."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class Text:
    """How text is read, cut into tokens and split."""

    tokens: Literal["characters", "bytes", "bpe"] = "characters"
    """bpe: byte pairs, joined where the training part has them most often."""
    vocabulary: int = 1024
    """Tokens of bpe, the 256 single bytes included."""
    context: int = 128
    """Tokens that a language model sees at once."""
    length: int | None = None
    """Most tokens of a text with a label, or of either side of a pair. Without it texts are cut where 95% of
    the training texts have ended, and pairs are kept whole."""
    suffixes: tuple[str, ...] = (".txt",)
    """Endings of the files of a folder that are read."""
    on_bad_utf8: Literal["refuse", "replace"] = "refuse"
    """What to do with bytes that are no text; replace puts U+FFFD in their place."""
    unknown: Literal["refuse", "skip", "replace"] = "replace"
    """What to do with characters that the training part does not have; replace has a token for them."""
    column: str | None = None
    """Column of a table that holds the text, by name or position; the wordiest without it."""
    label: str | None = None
    """Column of a table that holds the label; the last without it."""
    memory: float = 4.0
    """GiB of tokens that may be kept in memory; a longer text is read through a memory map."""
    cache: Path | None = None
    """Folder for the token files of a text that does not fit; beside the text without it."""
    validation: float = 0.1
    """Share held out to choose the best weights. A text is cut in order: training part, validation, test."""
    test: float = 0.1
    """Share held out for the final result."""

    def __post_init__(self) -> None:
        check_range(
            self, "--text.", context=">= 1", length=">= 1", memory="> 0", validation="[0, 1)", test="[0, 1)"
        )
        for name, choices in (
            ("tokens", ("characters", "bytes", "bpe")),
            ("on_bad_utf8", ("refuse", "replace")),
            ("unknown", ("refuse", "skip", "replace")),
        ):
            value = getattr(self, name)
            check(value in choices, f"--text.{name}", value, " or ".join(choices))
        check(self.vocabulary >= 256, "--text.vocabulary", self.vocabulary, "a whole number from 256 on")
        dotted = bool(self.suffixes) and all(s.startswith(".") and len(s) > 1 for s in self.suffixes)
        check(dotted, "--text.suffixes", self.suffixes, "endings that begin with a dot, such as .txt .md")
        held_out = self.validation + self.test
        check(held_out < 0.95, "--text.validation + --text.test", held_out, "a sum below 0.95")


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Adapters W = W₀ + (alpha/rank)·L R, which are trained while W₀ stays as it is."""

    rank: int = 0
    """0 trains without adapters."""
    alpha: float | None = None
    """The change is scaled by alpha/rank; without it the scale is 1."""
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all",)
    """Which weights: all, attention, dense, convolution, recurrent, embedding, or names and patterns."""
    full: tuple[str, ...] = ()
    """Names or patterns of weights that are trained as a whole beside the adapters."""

    def __post_init__(self) -> None:
        check_range(self, "--tune.lora.", rank=">= 0", alpha="> 0", dropout="[0, 1)")
        given = [f"--tune.lora.{name}" for name in ("alpha", "dropout", "full") if getattr(self, name)]
        if given and not self.rank:
            raise InputError(
                f"{given[0]} without --tune.lora.rank", expected="adapters", fix="add --tune.lora.rank 8"
            )
        check(bool(self.targets), "--tune.lora.targets", self.targets, "at least one target")


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Fine-tuning of a trained model."""

    base: Path | None = None
    """A run whose trained model is gone on from, with its preparation. Without adapters all of it is
    trained."""
    quantise: Literal["none", "nf4"] = "none"
    """nf4 keeps the weights of dense layers in 4.127 bits each (QLoRA); only adapters are trained."""
    lora: LoRA = field(default_factory=LoRA)

    def __post_init__(self) -> None:
        check(self.quantise in ("none", "nf4"), "--tune.quantise", self.quantise, "none or nf4")
        if self.quantise != "none" and not self.lora.rank:
            raise InputError(
                f"--tune.quantise {self.quantise} without adapters",
                expected="something that can be trained: weights in 4 bits are frozen",
                fix="add --tune.lora.rank 8",
            )


def from_dict(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """The options that `to_dict` wrote; lists become tuples and texts become paths again."""
    hints = get_type_hints(kind)
    made = {}
    for name, value in values.items():
        if name not in hints:
            raise unknown_name(f"option of {kind.__name__}", name, hints)
        hint = hints[name]
        if isinstance(value, Mapping):
            value = from_dict(hint, value)
        elif isinstance(value, list):
            value = tuple(value)
        elif Path in (hint, *get_args(hint)) and isinstance(value, str):
            value = Path(value)
        made[name] = value
    return kind(**made)
