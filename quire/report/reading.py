"""A run folder as it lies on the disk, finished or not, read without PyTorch.

Only the last line of ``metrics.jsonl`` may be damaged: a run that is killed while it writes leaves it so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import CheckpointError
from quire.files import names_its_file, parse_toml, read_file

FORMAT = 1
DRAWABLE = 1e300
"""Differences of larger numbers overflow; they count as not finite."""
Array = NDArray[Any]


@dataclass(frozen=True)
class Curve:
    """One measure of one split over the steps; values that are not finite are NaN."""

    steps: Array
    values: Array


@dataclass(frozen=True)
class Target:
    """What a run predicts. `prefix` stands before its columns and measures where there are several."""

    name: str
    kind: str
    classes: tuple[str, ...] = ()
    prefix: str = ""


@dataclass(frozen=True)
class Predictions:
    """The predictions of one target, a row per sample; columns that the file lacks are None."""

    row: Array
    truth: Array
    prediction: Array
    loss: Array | None = None
    probability: Array | None = None
    truth_probability: Array | None = None
    low: Array | None = None
    high: Array | None = None
    level: float | None = None
    left_out: int = 0
    """Rows without a truth or a usable prediction."""

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class Run:
    folder: Path
    config: Mapping[str, Any]
    result: Mapping[str, Any] | None = None
    """None while the run is unfinished."""
    curves: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)
    """Measure, then split."""
    last_step: int = 0
    last_epoch: float = 0.0
    cut_off: bool = False
    """Whether the last line of the metrics was damaged and left out."""

    @property
    def recipe(self) -> str:
        return str((self.result or {}).get("recipe") or self.config.get("recipe") or "run")

    @property
    def targets(self) -> list[Target]:
        return [
            Target(
                name=str(entry.get("name", "target")),
                kind=str(entry.get("kind", "")),
                classes=tuple(label(value) for value in entry.get("classes") or ()),
                prefix=str(entry.get("prefix", "")),
            )
            for entry in (self.result or {}).get("targets") or []
        ]

    @property
    def measures(self) -> dict[str, dict[str, float]]:
        """Split, then measure: the result's, or the last recorded values of an unfinished run."""
        if self.result is not None:
            splits = (self.result.get("measures") or {}).items()
            return {split: {k: real(v) for k, v in values.items()} for split, values in splits if values}
        last: dict[str, dict[str, float]] = {}
        for measure, by_split in self.curves.items():
            for split, curve in by_split.items():
                if measure not in TRAINER_VALUES:
                    last.setdefault(split, {})[measure] = float(curve.values[-1])
        return last


TRAINER_VALUES = ("lr", "gradient_norm", "micro_batches")
"""Recorded beside the measures, but about the trainer rather than the model."""


def real(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def label(value: object) -> str:
    """A class as text, the same whether it was read from JSON or from Parquet: 3, 3.0 and "3" agree."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


# What is taken apart later; a wrong shape is found here, where the file can be named.
_SHAPES: dict[str, tuple[type, Any]] = {
    "measures": (dict, dict | None),
    "rows": (dict, int | None),
    "expected": (dict, object),
    "layers": (list, dict),
    "targets": (list, dict),
    "features": (list, object),
    "warnings": (list, object),
}


@names_its_file
def read_run(folder: Path) -> Run:
    """Read all but the predictions; they may be large, and `read_predictions` takes a target at a time."""
    folder = Path(folder)
    config_path = folder / "config.toml"
    if not config_path.exists():
        what = "there is no such folder" if not folder.exists() else "there is no config.toml in it"
        raise CheckpointError(
            f"{folder} is no run folder: {what}",
            expected="a folder that `quire train` made, with config.toml and metrics.jsonl",
            fix="give the folder of a run; `quire runs` lists them",
        )
    try:
        config = parse_toml(read_file(config_path))
    except (ValueError, RecursionError) as error:
        raise damaged(config_path, str(error)) from error
    check_format(config_path, config)
    result = read_result(folder / "result.json")
    lines, cut_off = read_metrics(folder / "metrics.jsonl")
    return Run(
        folder=folder,
        config=config,
        result=result,
        curves=_curves(lines),
        last_step=max((line["step"] for line in lines), default=0),
        last_epoch=max((real(line.get("epoch")) for line in lines), default=0.0),
        cut_off=cut_off,
    )


def damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: {why}",
        expected="the file as the run wrote it",
        fix="restore the file from a copy, or train again",
    )


def check_format(path: Path, content: Mapping[str, Any]) -> None:
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r}",
            expected=f"format {FORMAT}",
            fix="read it with the version of Quire that wrote it, named in config.toml under [versions]",
        )


@names_its_file
def read_result(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        result = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(result, dict):
        raise damaged(path, f"it holds a {type(result).__name__}, not an object")
    check_format(path, result)
    for name, (kind, entry_kind) in _SHAPES.items():
        value = result.get(name)
        if value is None:
            continue
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not isinstance(value, kind) or not all(isinstance(entry, entry_kind) for entry in entries):
            raise damaged(path, f"'{name}' has another shape than Quire writes")
    return result


@names_its_file
def read_metrics(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The lines, and whether a damaged last line was left out."""
    if not path.exists():
        return [], False
    lines: list[dict[str, Any]] = []
    raw = read_file(path).splitlines()
    for number, text in enumerate(raw, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            lines.append({**line, "step": int(line["step"]), "values": dict(line["values"])})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(raw):
                return lines, True
            raise damaged(path, f"line {number} is not a record of metrics ({error})") from error
        check_format(path, line)
    return lines, False


def _curves(lines: list[dict[str, Any]]) -> dict[str, dict[str, Curve]]:
    # A resumed run records again the steps after its checkpoint; the later line counts.
    points: dict[str, dict[str, dict[int, float]]] = {}
    for line in lines:
        for measure, value in line["values"].items():
            number = real(value)
            by_split = points.setdefault(measure, {}).setdefault(str(line.get("split", "train")), {})
            by_split[line["step"]] = number if abs(number) < DRAWABLE else math.nan
    return {
        measure: {
            split: Curve(np.array(sorted(found)), np.array([found[step] for step in sorted(found)], float))
            for split, found in splits.items()
        }
        for measure, splits in points.items()
    }


def read_samples(run: Run) -> list[tuple[str, str]]:
    """Names and texts of what a language model made; nothing where a run makes no text."""
    path = run.folder / "samples.json"
    if not path.is_file():
        return []
    try:
        return [(str(entry["name"]), str(entry["text"])) for entry in json.loads(read_file(path))]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, str(error)) from error


def read_predictions(run: Run, target: Target) -> Predictions | None:
    """The predictions of one target, or None where the run has none."""
    path = run.folder / "predictions.parquet"
    if not path.is_file():
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = path.absolute()  # Arrow takes a folder called ~ for another
    try:
        schema = pq.read_schema(whole)
        optional = ("loss", "probability", "truth_probability", "low", "high")
        names = ["row", *(target.prefix + name for name in ("truth", "prediction"))]
        if not set(names) <= set(schema.names):
            return None
        names += [target.prefix + name for name in optional if target.prefix + name in schema.names]
        table = pq.read_table(whole, columns=names)
    except (pa.ArrowException, OSError, ValueError) as error:  # and names that are no text
        raise damaged(path, str(error)) from error
    try:
        return _predictions(table, target, _level(schema.metadata or {}))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise damaged(path, f"its columns are not those of predictions ({error})") from error


def _predictions(table: Any, target: Target, level: float | None) -> Predictions:
    columns = {name.removeprefix(target.prefix): table[name] for name in table.column_names if name != "row"}
    if target.kind == "classification":
        truth, prediction = (_texts(columns.pop(name).to_pylist()) for name in ("truth", "prediction"))
        good = (truth != None) & (prediction != None)  # noqa: E711 (elementwise)
    else:
        truth, prediction = (_numbers(columns.pop(name)) for name in ("truth", "prediction"))
        good = (np.abs(truth) < DRAWABLE) & (np.abs(prediction) < DRAWABLE)
    return Predictions(
        row=table["row"].to_numpy()[good],
        truth=truth[good],
        prediction=prediction[good],
        level=level,
        left_out=int((~good).sum()),
        **{name: _numbers(column)[good] for name, column in columns.items()},
    )


def _numbers(column: Any) -> Array:
    return np.asarray(column.to_numpy(), dtype=float)


def _texts(values: list[object]) -> Array:
    texts = np.empty(len(values), dtype=object)
    texts[:] = [None if value is None else label(value) for value in values]
    return texts


def _level(metadata: Mapping[bytes, bytes]) -> float | None:
    try:
        level = float(metadata.get(b"level", b""))
    except ValueError:
        return None
    return level if 0 < level < 1 else None
