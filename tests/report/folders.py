"""Run folders in the formats of the report's inputs, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CONFIG = """\
format = 1
recipe = "{recipe}"
command = "quire train {recipe} --optim.lr {lr} --seed 0"

[versions]
quire = "0.1.0"
torch = "2.13.0"
python = "3.11.4"

[options]
seed = 0
device = "auto"
epochs = 20
out = "runs/{name}"
hidden = [128, 64]

[options.optim]
name = "adam"
lr = {lr}

[options.optim.schedule]
name = "cosine"
warmup = 50

[options.train]
batch_size = 64
shuffle = true
"""


def config(folder: Path, recipe: str = "mlp", lr: float = 0.001) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = CONFIG.format(recipe=recipe, lr=lr, name=folder.name)
    (folder / "config.toml").write_text(text, encoding="utf-8")
    return folder


def line(step: int, split: str, **values: float | None) -> str:
    record = {"format": 1, "step": step, "epoch": step / 20, "split": split, "values": values, "seconds": 0.1}
    return json.dumps(record) + "\n"


def metrics(folder: Path, lines: list[str]) -> None:
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def learning(measure: str = "accuracy", steps: int = 400) -> list[str]:
    """Loss falls from 2.3 by more than two decades; the measure rises to 0.98."""
    generator = np.random.default_rng(0)
    lines = []
    for step in range(20, steps + 1, 20):
        decay = float(np.exp(-step / 60))
        noise = float(generator.uniform(0.9, 1.1))
        lines.append(line(step, "train", loss=2.3 * decay * noise, lr=0.001, gradient_norm=decay + 0.1))
        shown = {"loss": 2.3 * decay + 0.07, measure: 0.98 - 0.8 * decay}
        lines.append(line(step, "validation", **shown))
    return lines


def result(folder: Path, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "format": 1,
        "recipe": "mlp",
        "summary": "a dense network on handwritten digits",
        "measures": {
            "train": {"loss": 0.0123, "accuracy": 0.9992},
            "validation": {"loss": 0.0811, "accuracy": 0.9741},
            "test": {"loss": 0.0905, "accuracy": 0.9778},
        },
        "seconds": 3.217,
        "steps": 400,
        "epochs": 20.0,
        "best_step": 360,
        "samples_per_second": 251234.5,
        "peak_memory_bytes": 312 * 2**20,
        "device": "cpu",
        "threads": 2,
        "layers": [
            {"name": "layers.0", "kind": "Linear", "output_shape": [128], "parameters": 8320},
            {"name": "layers.1", "kind": "ReLU", "output_shape": [128], "parameters": 0},
            {"name": "head", "kind": "Linear", "output_shape": [10], "parameters": 1290},
        ],
        "parameters": 9610,
        "expected": {"text": "test accuracy ≥ 0.97", "met": True},
        "targets": [
            {"name": "digit", "kind": "classification", "classes": [str(d) for d in range(10)], "prefix": ""}
        ],
        "rows": {"train": 1257, "validation": 270, "test": 270},
        "features": [f"pixel {i}" for i in range(64)],
        "warnings": [],
        "stopped": "finished",
        "data": "built-in digits (1,797 images of 8 × 8 pixels)",
    }
    content.update(changes)
    (folder / "result.json").write_text(json.dumps(content), encoding="utf-8")
    return content


def predictions(folder: Path, columns: dict[str, Any], level: bytes | None = None) -> None:
    table = pa.table(columns)
    if level is not None:
        table = table.replace_schema_metadata({b"level": level})
    pq.write_table(table, folder / "predictions.parquet")


def class_columns(classes: list[Any], rows: int, *, wrong: float = 0.05, prefix: str = "") -> dict[str, Any]:
    """Mistakes go to the next class; the probability of the prediction is between 0.3 and 1."""
    generator = np.random.default_rng(1)
    truth = generator.integers(0, len(classes), rows)
    is_wrong = generator.random(rows) < wrong
    prediction = (truth + is_wrong) % len(classes)
    probability = np.where(
        is_wrong, generator.uniform(0.3, 0.9, rows), generator.beta(12, 1, rows) * 0.6 + 0.4
    )
    truth_probability = np.where(is_wrong, (1 - probability) * 0.8, probability)
    return {
        "row": np.sort(generator.choice(np.arange(1, 5 * rows + 1), rows, replace=False)),
        prefix + "truth": [classes[i] for i in truth],
        prefix + "prediction": [classes[i] for i in prediction],
        prefix + "loss": -np.log(truth_probability),
        prefix + "probability": probability,
        prefix + "truth_probability": truth_probability,
    }


def value_columns(rows: int, *, prefix: str = "", intervals: bool = True) -> dict[str, Any]:
    """A heteroscedastic regressor with exact 90% intervals."""
    generator = np.random.default_rng(2)
    mean = generator.uniform(50, 350, rows)
    spread = 8 + 0.12 * mean
    truth = mean + spread * generator.standard_normal(rows)
    columns = {
        "row": np.arange(1, rows + 1),
        prefix + "truth": truth,
        prefix + "prediction": mean,
        prefix + "loss": 0.5 * ((truth - mean) / spread) ** 2 + np.log(spread),
    }
    if intervals:
        columns[prefix + "low"] = mean - 1.6449 * spread
        columns[prefix + "high"] = mean + 1.6449 * spread
    return columns


def classifier(folder: Path, classes: list[Any] | None = None, samples: int = 270, **changes: Any) -> Path:
    classes = [str(d) for d in range(10)] if classes is None else classes
    config(folder)
    metrics(folder, learning())
    target = {"name": "digit", "kind": "classification", "classes": classes, "prefix": ""}
    result(folder, **{"targets": [target], **changes})
    predictions(folder, class_columns(classes, samples))
    return folder


def regressor(folder: Path, rows: int = 300, *, level: bytes | None = b"0.9", **changes: Any) -> Path:
    config(folder, "heteroscedastic")
    metrics(folder, learning("r2"))
    shown = {"rmse": 31.25, "r2": 0.8765, "coverage": 0.9033, "loss": 4.32}
    entries: dict[str, Any] = {
        "recipe": "heteroscedastic",
        "summary": "a regressor with calibrated intervals",
        "measures": {"train": shown, "validation": shown, "test": shown},
        "expected": {"text": "test coverage ≥ 0.87 and ≤ 0.93", "met": True},
        "targets": [{"name": "price", "kind": "regression", "classes": None, "prefix": ""}],
    }
    result(folder, **{**entries, **changes})
    predictions(folder, value_columns(rows, intervals=level is not None), level)
    return folder


def several(folder: Path) -> Path:
    config(folder, "multitask")
    lines = [
        line(s, "validation", **{"loss": 1 / s, "kind.accuracy": 0.9, "price.rmse": 5 / s}) for s in (1, 2, 3)
    ]
    metrics(folder, lines)
    shown = {"loss": 0.5, "kind.accuracy": 0.9321, "price.rmse": 12.5, "price.r2": 0.8123}
    result(
        folder,
        recipe="multitask",
        measures={"validation": shown, "test": shown},
        expected={"text": "test kind.accuracy ≥ 0.9", "met": True},
        targets=[
            {"name": "kind", "kind": "classification", "classes": ["ash", "oak"], "prefix": "kind."},
            {"name": "price", "kind": "regression", "classes": None, "prefix": "price."},
        ],
    )
    columns = class_columns(["ash", "oak"], 120, prefix="kind.")
    columns.update({k: v for k, v in value_columns(120, prefix="price.").items() if k != "row"})
    predictions(folder, columns, b"0.9")
    return folder
