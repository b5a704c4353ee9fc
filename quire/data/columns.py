"""Fitted columns: what an input or target column of the training file was, and its numbers.

Whether a column holds numbers, booleans, dates or categories is inferred from the whole file; every
statistic (median, mean, standard deviation, labels) comes from the training rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire.data.table import Table
from quire.data.types import CellKind, infer, plain, read_booleans, read_dates, read_labels, read_numbers
from quire.errors import DataError

InputKind = Literal["number", "boolean", "date", "category"]
TargetKind = Literal["classification", "regression"]
LabelKind = Literal["text", "integer", "number", "boolean"]
Label = str | int | float | bool
_LABEL_TYPES = (str, int, float, bool)

MOST_LABELS = 200
"""Text with more distinct values is left out unless the column is named among the categories."""
FEW_LABELS = 20
"""Text with more distinct values than this, and than half its rows, identifies rows."""
MOST_CLASSES = 20
ROWS_PER_CLASS = 5

UNKNOWN = -1.0
"""Code of a category that the training rows did not have; it matches no one-hot feature."""


@dataclass(frozen=True)
class Labels:
    """The distinct values of a category or class, in ascending order, with their type."""

    kind: LabelKind
    values: tuple[Label, ...]

    def codes(self, table: Table, name: str) -> np.ndarray:
        """(N,) float64 position of each cell among the values, NaN where missing, -1 where unknown."""
        if self.kind == "text":
            text = read_labels(table, name)
            found = pc.fill_null(pc.index_in(text, value_set=pa.array(self.values, pa.string())), -1)
            return np.where(text.is_null().to_numpy(), np.nan, found.to_numpy().astype(np.float64))
        cells = read_booleans(table, name) if self.kind == "boolean" else read_numbers(table, name)
        known = np.array(self.values, dtype=np.float64)
        where = np.searchsorted(known, cells).clip(max=len(known) - 1)
        codes = np.where(known[where] == cells, where.astype(np.float64), UNKNOWN)
        return np.where(np.isnan(cells), np.nan, codes)


def find_labels(table: Table, name: str, kind: CellKind, rows: np.ndarray | None = None) -> Labels:
    """The distinct values in the given rows (all without)."""
    part = Table(table.data.select([table.positions[name]]), table.source, table.lines, typed=table.typed)
    part = part if rows is None else part.take(rows)
    if kind in ("text", "date"):
        values = pc.unique(read_labels(part, name).drop_null()).to_pylist()
        return Labels("text", tuple(sorted(values)))
    if kind == "boolean":
        booleans = read_booleans(part, name)
        return Labels("boolean", tuple(bool(v) for v in np.unique(booleans[~np.isnan(booleans)])))
    numbers = read_numbers(part, name)
    numbers = np.unique(numbers[~np.isnan(numbers)]) + 0.0  # no negative zero
    # The type of a label is that of the source: a typed column of floats keeps floats.
    floats = pa.types.is_floating(table.column(name).type)
    if not floats and (numbers == np.round(numbers)).all():
        return Labels("integer", tuple(int(v) for v in numbers))
    return Labels("number", tuple(float(v) for v in numbers))


@dataclass(frozen=True)
class Input:
    """An input column: how its cells become one number each, and that number features."""

    name: str
    position: int
    """Position in the training file, from 0."""
    kind: InputKind
    missing: bool
    """Whether cells of the training rows were missing; an indicator feature exists only then."""
    constant: bool = False
    """Whether all training rows had the same value."""
    fill: float = 0.0
    """What stands for a missing number: the training median."""
    center: float = 0.0
    scale: float = 1.0
    origin: float = 0.0
    """Day that dates are counted from, in days since 1970-01-01."""
    labels: Labels | None = None

    def encode(self, table: Table, name: str) -> np.ndarray:
        """(N,) float64: numbers as they are, booleans 0 and 1, dates in days since the origin,
        categories as codes (-1 unknown); NaN where missing."""
        if self.labels is not None:
            return self.labels.codes(table, name)
        if self.kind == "boolean":
            return read_booleans(table, name)
        if self.kind == "date":
            return read_dates(table, name) - self.origin
        return read_numbers(table, name)

    @property
    def feature_names(self) -> list[str]:
        values = [self.name] if self.labels is None else [f"{self.name}={v}" for v in self.labels.values]
        return values + [f"{self.name} is missing"] * self.missing


@dataclass(frozen=True)
class Target:
    """A column to predict."""

    name: str
    position: int
    kind: TargetKind
    labels: Labels | None = None
    """The classes; None for regression."""
    mean: float = 0.0
    std: float = 1.0
    """Of the training rows, for regression; the values themselves stay in the file's unit."""

    @property
    def classes(self) -> list[Label]:
        return [] if self.labels is None else list(self.labels.values)

    def encode(self, table: Table, name: str) -> np.ndarray:
        """(N,) float64 class numbers or values; a missing or unknown one is an error with its place."""
        values = read_numbers(table, name) if self.labels is None else self.labels.codes(table, name)
        gone = np.isnan(values)
        if gone.any():
            raise missing_cell(table, name, int(gone.argmax()), "the target is missing")
        if self.labels is not None and (values == UNKNOWN).any():
            known = ", ".join(map(str, self.classes[:20])) + (", …" if len(self.classes) > 20 else "")
            row = int((values == UNKNOWN).argmax())
            raise table.fault(
                "a class that was not in training", row=row, name=name, expected=f"one of {known}"
            )
        large = np.abs(values) > np.finfo(np.float32).max
        if large.any():
            raise table.fault(
                "a number too large for float32", row=int(large.argmax()), name=name,
                expected="numbers below 3.4e38", fix="change the unit of the column",
            )  # fmt: skip
        return values


def tells_class(column: Input, target: Target, table: Table, rows: np.ndarray) -> bool:
    """Whether a column of as many values as there are classes has one value to each class."""
    values = 2 if column.kind == "boolean" else len(column.labels.values) if column.labels else 0
    if values != len(target.classes) or column.missing or column.constant:
        return False
    pairs = np.stack([c.encode(table, c.name)[rows] for c in (column, target)], 1)
    return len(np.unique(pairs, axis=0)) == values


def missing_cell(table: Table, name: str, row: int, got: str = "a missing value") -> DataError:
    return table.fault(
        got,
        row=row,
        name=name,
        expected="a value in each cell",
        fix="fill the cell in or remove the row",
    )


def fit_input(table: Table, name: str, train_rows: np.ndarray, *, category: bool) -> tuple[Input | None, str]:
    """The fitted column; or None with the reason, for a column that cannot help and is left out."""
    kind = infer(table, name, strict=not category)
    if kind == "empty":
        return None, "it has no values"
    if category or kind == "text":
        reason = "" if category else _why_no_category(table, name)
        column = None if reason else _fit_category(table, name, kind, train_rows)
    elif kind == "number" and is_unnamed(table, name) and _numbers_rows(read_numbers(table, name)):
        reason, column = "it has no name and numbers the rows", None
    else:
        reason, column = "", _fit_quantity(table, name, kind, train_rows)
    return column, reason or ("" if column else "it has no values in the training rows")


def is_unnamed(table: Table, name: str) -> bool:
    """Whether the table has names, but none for this column."""
    return table.named and name == f"column {table.positions[name] + 1}"


def _numbers_rows(values: np.ndarray) -> bool:
    """Whether each cell is another whole number, as in the index that pandas writes before the columns."""
    return bool((values == np.round(values)).all()) and len(np.unique(values)) == len(values)


def _fit_category(table: Table, name: str, kind: CellKind, train_rows: np.ndarray) -> Input | None:
    labels = find_labels(table, name, kind, train_rows)
    if not labels.values:
        return None
    missing = bool(np.isnan(labels.codes(table, name)[train_rows]).any())
    constant = len(labels.values) == 1 and not missing
    return Input(name, table.positions[name], "category", missing, constant, labels=labels)


def _fit_quantity(table: Table, name: str, kind: InputKind, train_rows: np.ndarray) -> Input | None:
    column = Input(name, table.positions[name], kind, missing=False)
    values = column.encode(table, name)[train_rows]
    present = values[~np.isnan(values)]
    if not len(present):
        return None
    origin = float(np.floor(present.mean())) if kind == "date" else 0.0
    center, scale = mean_and_std(present - origin)
    fill = float(np.median(present - origin))
    column = replace(column, missing=len(present) < len(values), constant=scale == 0, origin=origin)
    if kind == "boolean":  # 0 and 1 are a good scale already
        return replace(column, fill=float(round(fill)))
    return replace(column, fill=fill, center=center, scale=scale or 1.0)


def _why_no_category(table: Table, name: str) -> str:
    column = plain(table, name)
    present = len(column) - column.null_count
    distinct = len(pc.unique(column.drop_null()))
    if distinct == present > 2:
        return f"each of its {present} texts is different, so it identifies rows"
    if distinct > max(FEW_LABELS, present / 2):
        return f"{distinct} different texts in {present} rows nearly identify them"
    return f"{distinct} different texts are more than {MOST_LABELS}" if distinct > MOST_LABELS else ""


def mean_and_std(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation (with 1/n), exactly 0 for a constant column, without overflow."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return low, 0.0
    unit = max(abs(low), abs(high))
    scaled = values / unit
    center, spread = float(scaled.mean()), float(scaled.std())
    return center * unit, spread * unit


def fit_target(
    table: Table, name: str, train_rows: np.ndarray, kind: TargetKind | Literal["auto"]
) -> tuple[Target, list[str]]:
    """The fitted target. With `auto`, text and booleans are classes; whole numbers are classes when they
    take two values, or at most 20 with five rows or more to each on average; other numbers are values."""
    cells = infer(table, name, strict=kind != "classification")
    position = table.positions[name]
    warnings: list[str] = []
    if cells == "empty":
        raise DataError(
            "the target has no values", path=table.source, column=name, expected="numbers or classes",
            fix="choose another column with --target",
        )  # fmt: skip
    if cells == "date" and kind != "classification":
        raise DataError(
            "the target holds dates", path=table.source, column=name, expected="numbers or classes",
            fix="turn the dates into numbers, or choose another target",
        )  # fmt: skip
    if cells == "text" and kind == "regression":
        raise DataError(
            "the target holds text", path=table.source, column=name, expected="numbers",
            fix="choose another target, or a recipe for classes such as mlp",
        )  # fmt: skip
    if kind == "auto":
        kind = "classification"
        if cells == "number":
            values = read_numbers(table, name)
            values = values[~np.isnan(values)]
            distinct = len(np.unique(values))
            few = distinct <= min(MOST_CLASSES, len(values) / ROWS_PER_CLASS) or distinct == 2
            if not (few and (values == np.round(values)).all()):
                kind = "regression"
            elif distinct > 2:
                warnings.append(f"target '{name}': its {distinct} whole numbers are taken as classes")
    if kind == "regression":
        values = Target(name, position, kind).encode(table, name)[train_rows]
        mean, std = mean_and_std(values)
        if std == 0:
            warnings.append(f"target '{name}' has the same value in all training rows")
        return Target(name, position, kind, mean=mean, std=std or 1.0), warnings
    labels = find_labels(table, name, cells)
    if len(labels.values) < 2:
        raise DataError(
            "the target has one class only",
            path=table.source,
            column=name,
            value=labels.values[0],
            expected="at least two classes",
            fix="choose another target, or add rows of another class",
        )
    return Target(name, position, kind, labels), warnings


FittedColumn = TypeVar("FittedColumn", Input, Target)


def column_from_json(kind: type[FittedColumn], entry: Mapping[str, Any]) -> FittedColumn:
    """The column of a saved description (`dataclasses.asdict`); TypeError or KeyError where it is none."""
    labels = entry["labels"]
    if labels is not None:
        if labels["kind"] not in get_args(LabelKind) or not all(
            type(v) in _LABEL_TYPES for v in labels["values"]
        ):
            raise TypeError(f"labels of kind {labels['kind']!r}")
        labels = Labels(labels["kind"], tuple(labels["values"]))
    column = kind(**{**entry, "labels": labels})
    if column.kind not in get_args(InputKind if kind is Input else TargetKind):
        raise TypeError(f"a column of kind {column.kind!r}")
    numbers = [value for value in entry.values() if isinstance(value, float)]
    if not np.isfinite(numbers).all():
        raise TypeError("a number that is not finite")
    return column
