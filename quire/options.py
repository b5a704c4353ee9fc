"""Typed options of training, shared by the trainer, the estimators and the command.

Nothing heavy is imported here: the command builds its flags (`--optim.lr 0.1`) from these
dataclasses before PyTorch is loaded, so a wrong option fails at once. Each class checks its values
when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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
        good = (
            math.isfinite(value)
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


@dataclass(frozen=True)
class Schedule:
    """Step size as a function of the step τ: warm-up first, then the named shape."""

    name: Literal["constant", "linear", "power", "exponential", "cosine"] = "constant"
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
    average: float | None = None
    """Decay of the moving average of weights, which is then what is judged and kept."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 computes in mixed precision; weights and optimiser stay float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    noise: Noise = field(default_factory=Noise)

    def __post_init__(self) -> None:
        check_range(
            self, "--train.", batch_size=">= 0", micro_batches=">= 1", validate_every=">= 1",
            checkpoint_every=">= 1", checkpoint_seconds=">= 0", keep=">= 1", patience=">= 1",
            min_delta=">= 0", average="(0, 1)",
        )  # fmt: skip
        check(self.restore in ("best", "last"), "--train.restore", self.restore, "best or last")
        good = self.precision in ("float32", "bfloat16")
        check(good, "--train.precision", self.precision, "float32 or bfloat16")


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
