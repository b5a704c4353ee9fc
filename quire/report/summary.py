"""Which number of a run is shown first, and how numbers are written for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.report.reading import Run, Target

SPLITS = ("test", "validation", "train")
"""In the order in which they are trusted."""

_USUAL = (
    "perplexity", "accuracy", "r2", "rmse", "agreement", "explained_share", "elbo", "recognised",
    "sliced_wasserstein", "restored_mse", "mse", "bic",
)  # fmt: skip
"""Measures of runs that have no target, the most telling first."""
_PREFERRED = {"classification": ("accuracy",), "regression": ("r2", "rmse", "mae"), "boxes": ("map50",)}


@dataclass(frozen=True)
class Headline:
    measure: str
    split: str
    value: float


def headline(run: Run, target: Target | None = None) -> Headline | None:
    """The main measure of a run, or of one of its targets, on the most trusted split that has it.

    The expected result names the measure where there is one ("test accuracy ≥ 0.97").
    """
    measures = run.measures
    expected = str(((run.result or {}).get("expected") or {}).get("text", ""))
    for split in SPLITS if target is None else ():
        for name, value in measures.get(split, {}).items():
            if expected.startswith(f"{split} {name} "):
                return Headline(name, split, value)
    if target is None and run.targets:
        target = run.targets[0]
    split = next((name for name in SPLITS if measures.get(name)), "")
    if not split:
        return None
    prefix, kind = (target.prefix, target.kind) if target else ("", "")
    # A run of several targets has prefixed measures and, without a prefix, those of them all together.
    own = [name for name in measures[split] if name.startswith(prefix)] or list(measures[split])
    preferred = [prefix + name for name in _PREFERRED.get(kind, _USUAL)]
    candidates = [name for name in preferred if name in own]
    candidates += [name for name in own if name != prefix + "loss"] + own
    return Headline(candidates[0], split, measures[split][candidates[0]])


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share, Wilson's: within [0, 1] and honest for few samples."""
    if total == 0:
        return 0.0, 1.0
    share = hits / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def number(value: object) -> str:
    """A number with four significant digits; counts in full."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size != 0 and (size >= 1e6 or size < 1e-4):
        text = f"{value:.3e}"
    elif size >= 1000:
        text = f"{value:,.1f}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", "−", 1) if value < 0 else text


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def duration(seconds: object) -> str:
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(count: object) -> str:
    """Bytes in binary units."""
    if not isinstance(count, int | float) or not math.isfinite(count):
        return "–"
    for unit in ("bytes", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{int(count)} bytes"
        count /= 1024
    return f"{count:.3g} GiB"


_WORDS = {
    "lr": "learning rate",
    "r2": "R²",
    "rmse": "RMSE",
    "mse": "MSE",
    "restored_mse": "MSE after restoring",
    "kl": "KL divergence",
    "elbo": "ELBO",
    "bic": "BIC",
    "aic": "AIC",
    "mae": "MAE",
    "bits_per_token": "bits per token",
    "map": "mAP (IoU 0.5 to 0.95)",
    "map50": "mAP at IoU 0.5",
    "map75": "mAP at IoU 0.75",
    "recall100": "recall of 100 boxes",
}


def wording(measure: str) -> str:
    """A measure's name as it is read: "price.mean_error" is "price: mean error"."""
    target, dot, name = measure.rpartition(".")
    name = _WORDS.get(name, name.replace("_", " "))
    return f"{target}: {name}" if dot else name


def flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def option_text(value: object) -> str:
    """An option's value as it is written in config.toml."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(option_text(entry) for entry in value) or "(none)"
    return str(value) if value != "" else "(empty)"
