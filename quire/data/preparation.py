"""From a table to what a network takes, in two stages, fitted on the training rows.

1. `Preparation.encode` turns cells into one number each (text can only be read here);
2. `PrepareInputs`, pure PyTorch, turns these into features, so that an exported network contains it:

       number, date   x → (x̃ − mean) / std     with x̃ the training median where x is missing
       boolean        x → x̃
       category       code → one-hot            unknown: all zeros
       any of these   → [x is missing]          only where training rows had missing cells

N rows, C input columns, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from quire.data.batch import TensorData
from quire.data.columns import (
    UNKNOWN,
    Input,
    Label,
    Target,
    TargetKind,
    column_from_json,
    fit_input,
    fit_target,
    missing_cell,
    tells_class,
)
from quire.data.readers import read_table
from quire.data.table import Table, from_dataframe, listed, table_from_arrays
from quire.data.targets import Targets, check_columns, kind_of, require_column, resolve_targets
from quire.errors import DataError, InputError, nearest
from quire.options import Table as TableOptions

FORMAT = "quire.preparation"
VERSION = 1


class PrepareInputs(nn.Module):
    """Codes (N, C) of `Preparation.encode` to features (N, D), in `dtype`. Buffers only, nothing learned."""

    source: Tensor
    category: Tensor
    fill: Tensor
    center: Tensor
    scale: Tensor
    is_value: Tensor
    is_missing: Tensor

    def __init__(self, columns: Sequence[Input], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        no_category = float("nan")  # equals nothing
        features: list[tuple[int, float, float, float, float, bool, bool]] = []
        for i, column in enumerate(columns):
            if column.labels is None:
                features.append((i, no_category, column.fill, column.center, column.scale, True, False))
            else:
                count = len(column.labels.values)
                features += [(i, float(code), 0.0, 0.0, 1.0, False, False) for code in range(count)]
            if column.missing:
                features.append((i, no_category, 0.0, 0.0, 1.0, False, True))
        names = ("source", "category", "fill", "center", "scale", "is_value", "is_missing")
        types = (torch.int64, *[torch.float64] * 4, torch.bool, torch.bool)
        for name, kind, values in zip(names, types, zip(*features, strict=True), strict=True):
            self.register_buffer(name, torch.tensor(values, dtype=kind), persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        x = codes.index_select(-1, self.source)  # (N, C) → (N, D)
        missing = torch.isnan(x)
        values = (torch.where(missing, self.fill, x) - self.center) / self.scale
        marks = (missing & self.is_missing) | (x == self.category)
        return torch.where(self.is_value, values, marks.to(values.dtype)).to(self.dtype)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A table ready for a model."""

    data: TensorData
    """"inputs" (N, D) float32; with targets also "target": int64 class numbers or float32 values, (N,),
    or (N, T) for several, float32 where classes and values are mixed."""
    codes: Tensor
    """(N, C) float64, what a network that contains `PrepareInputs` takes."""
    lines: np.ndarray
    """(N,) where each row stands in its file."""
    notes: tuple[str, ...]
    """What was done to cells that training did not prepare for."""


@dataclass(frozen=True)
class Preparation:
    """Everything learned about a table in training; saved with the model and applied at predict."""

    inputs: tuple[Input, ...]
    targets: tuple[Target, ...]
    columns: tuple[str, ...]
    """All columns of the training file, those that are left out included."""
    named: bool
    """Whether the training file had a header; columns are matched by position otherwise."""
    missing: Literal["impute", "refuse"]
    warnings: tuple[str, ...] = ()

    @classmethod
    def fit(
        cls,
        table: Table,
        targets: Targets = None,
        options: TableOptions | None = None,
        train_rows: Tensor | np.ndarray | None = None,
        kind: TargetKind | Literal["auto"] = "auto",
    ) -> Preparation:
        """Learn types from the whole table and statistics from `train_rows` (all without).

        `targets` is a name or position (1 the first, -1 the last) or several; None is the last column
        that is not dropped, and () none at all. `kind` overrides what is inferred of the targets.
        """
        options = options or TableOptions()
        rows = np.arange(len(table)) if train_rows is None else np.asarray(train_rows)
        names = resolve_targets(table, targets, options.drop)
        check_columns(table, options)
        fitted_targets: list[Target] = []
        warnings: list[str] = []
        for name in names:
            target, notes = fit_target(table, name, rows, kind_of(name, kind, options))
            fitted_targets.append(target)
            warnings += notes
        inputs: list[Input] = []
        for name in table.names:
            if name in names or name in options.drop:
                continue
            column, reason = fit_input(table, name, rows, category=name in options.categories)
            if column is not None:
                inputs.append(column)
            else:
                warnings.append(_left_out(name, reason))
        if not inputs:
            raise DataError(
                "no column is left to predict from", path=table.source,
                expected="at least one input column with values beside the target",
                fix="; ".join(warnings) or "add a column, or set --table.delimiter if it was not recognised",
            )  # fmt: skip
        constant = [column.name for column in inputs if column.constant]
        if constant:
            warnings.append(f"the same value in all training rows of {listed(constant)}")
        warnings += [
            f"column '{column.name}' tells '{target.name}' in every training row; if it is the same under "
            f"another name, use --table.drop {column.name!r}"
            for target in fitted_targets
            for column in inputs
            if tells_class(column, target, table, rows)
        ]
        return cls(
            tuple(inputs),
            tuple(fitted_targets),
            tuple(table.names),
            table.named,
            options.missing,
            tuple(warnings),
        )

    def with_inputs_of(self, older: Preparation, table: Table) -> Preparation:
        """These targets with the inputs (columns, scales, categories) of an older preparation: a column is
        the same feature to a model that is taken over only if it is scaled by the old numbers."""
        inputs = older.inputs
        if table.named:
            for column in inputs:
                require_column(table, column.name, "the run that is taken over")
            inputs = tuple(replace(column, position=table.names.index(column.name)) for column in inputs)
        return replace(self, inputs=inputs)

    @property
    def target(self) -> Target:
        """The only target."""
        if len(self.targets) != 1:
            raise InputError(f"{len(self.targets)} targets", expected="exactly one", fix="use .targets")
        return self.targets[0]

    @property
    def feature_names(self) -> list[str]:
        """The D names of the features: ``age``, ``age is missing``, ``island=Biscoe``."""
        return [name for column in self.inputs for name in column.feature_names]

    def module(self, dtype: torch.dtype = torch.float32) -> PrepareInputs:
        """The second stage as a layer."""
        return PrepareInputs(self.inputs, dtype)

    def read(self, path: Any, options: TableOptions | None = None) -> Table:
        """A file to predict on, with a header exactly if the training file had one; or a table, a data frame
        or an array of rows."""
        if not isinstance(path, str | PathLike):
            return as_table(path)
        options = options or TableOptions()
        header: Literal["yes", "no"] = "yes" if self.named else "no"
        return read_table(Path(path), TableOptions(header, options.delimiter, options.decimal))

    def encode(self, table: Table) -> tuple[Tensor, tuple[str, ...]]:
        """The table's cells as numbers (N, C) float64, and notes on those that training did not have."""
        where = self._match(table, self.inputs)
        known = set(self.columns)
        extra = [name for name in table.names if name not in known] if table.named else []
        notes = [f"columns that training did not have are ignored: {listed(extra)}"] if extra else []
        codes = np.empty((len(table), len(self.inputs)))
        for i, (column, name) in enumerate(zip(self.inputs, where, strict=True)):
            values = codes[:, i] = column.encode(table, name)
            gone = np.isnan(values)
            if gone.any() and self.missing == "refuse":
                raise missing_cell(table, name, int(gone.argmax()))
            if gone.any() and not column.missing:
                notes.append(f"column '{name}': {gone.sum()} missing, none in training; {_filled(column)}")
            unknown = int((values == UNKNOWN).sum()) if column.labels is not None else 0
            if unknown:
                first = table.column(name)[int((values == UNKNOWN).argmax())].as_py()
                notes.append(f"column '{name}': {unknown} of categories not in training, such as {first!r}")
        return torch.from_numpy(codes), tuple(notes)

    def encode_targets(self, table: Table) -> Tensor:
        """(N,) or (N, T): int64 class numbers, float32 values, float32 of both where they are mixed."""
        where = self._match(table, self.targets)
        columns = [t.encode(table, name) for t, name in zip(self.targets, where, strict=True)]
        classes = all(target.kind == "classification" for target in self.targets)
        values = torch.from_numpy(np.stack(columns, 1)).to(torch.int64 if classes else torch.float32)
        return values[:, 0] if len(columns) == 1 else values

    def transform(self, table: Table, need_target: bool = False) -> Prepared:
        """Both stages. Columns are matched by name, in any order; extra ones are ignored."""
        codes, notes = self.encode(table)
        fields = {"inputs": self.module()(codes)}
        if need_target and self.targets:
            fields["target"] = self.encode_targets(table)
        return Prepared(TensorData(fields), codes, table.lines, notes)

    def decode_classes(self, indices: Tensor | Sequence[int], target: int = 0) -> list[Label]:
        """Class numbers back to labels of the file's own type."""
        classes = self.targets[target].classes
        numbers = indices.tolist() if isinstance(indices, Tensor) else indices
        return [classes[int(i)] for i in numbers]

    def _match(self, table: Table, fitted: Sequence[Input | Target]) -> list[str]:
        """The table's own names of these columns of training."""
        wanted = [column.name for column in fitted]
        absent = [name for name in wanted if name not in table.positions]
        if table.named and not absent:
            return wanted
        if table.named and self.named and fitted is self.targets:
            raise DataError(
                f"no column {', '.join(map(repr, absent))}", path=table.source,
                expected="the target beside the columns of training, to judge the answers by",
                fix=nearest(absent[0], table.names) or "to have the answers alone, use quire predict",
            )  # fmt: skip
        if table.named and self.named:
            others = [name for name in table.names if name not in wanted]  # which may be misspelt
            hints = [f"{name!r}: {hint}" for name in absent if (hint := nearest(name, others))]
            raise DataError(
                f"missing column{'s' * (len(absent) > 1)} {', '.join(map(repr, absent))}",
                path=table.source,
                expected=f"the columns of training: {listed(wanted, 30)}",
                fix="; ".join(hints)
                or f"add the column{'s' * (len(absent) > 1)}; the first line must hold the names",
            )
        return self._match_positions(table, [column.position for column in fitted])

    def _match_positions(self, table: Table, positions: list[int]) -> list[str]:
        """By position in a table that is as wide as the training file, or lacks its targets, or has
        the inputs alone."""
        width = len(self.columns)
        targets = {target.position for target in self.targets}
        layouts = (
            list(range(width)),
            [p for p in range(width) if p not in targets],
            [column.position for column in self.inputs],
        )
        for layout in layouts:
            if len(layout) == len(table.names) and set(positions) <= set(layout):
                here = dict(zip(layout, table.names, strict=True))
                return [here[position] for position in positions]
        without = f", or {len(layouts[1])} without the target" if len(layouts[1]) < width else ""
        raise DataError(
            f"a table of {len(table.names)} columns",
            path=table.source,
            expected=f"{width} columns as in training{without}",
            fix="give the columns in the order of the training file",
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; every float survives exactly."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "inputs": [asdict(column) for column in self.inputs],
            "targets": [asdict(target) for target in self.targets],
            "columns": list(self.columns),
            "named": self.named,
            "missing": self.missing,
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Preparation:
        check_format(entry, FORMAT, VERSION)
        try:
            inputs = [column_from_json(Input, column) for column in entry["inputs"]]
            targets = [column_from_json(Target, target) for target in entry["targets"]]
            return cls(
                tuple(inputs), tuple(targets), tuple(entry["columns"]), entry["named"], entry["missing"],
                tuple(entry["warnings"]),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise InputError(f"a damaged preparation ({error})", expected="what to_json wrote") from None


def as_table(rows: Any) -> Table:
    """Rows that are in memory already."""
    if isinstance(rows, Table):
        return rows
    if hasattr(rows, "iloc") or hasattr(rows, "__arrow_c_stream__"):
        return from_dataframe(rows)
    if hasattr(rows, "shape") or isinstance(rows, list | tuple):
        return table_from_arrays(rows)
    raise InputError(
        f"a {type(rows).__name__}", expected="a file, a data frame, an Arrow table or an array of rows"
    )


def check_format(entry: Mapping[str, Any], name: str, version: int) -> None:
    """Refuse what another version wrote, or what is no preparation of this kind."""
    if entry.get("format") != name or entry.get("version") != version:
        raise InputError(
            f"a preparation of format {entry.get('format')!r}, version {entry.get('version')!r}",
            expected=f"format {name!r}, version {version}",
            fix="use the version of Quire that wrote it",
        )


def _left_out(name: str, reason: str) -> str:
    keep = f"; to keep it, use --table.categories {name!r}" if "texts" in reason else ""
    return f"column '{name}' is left out: {reason}{keep}"


def _filled(column: Input) -> str:
    return "no one-hot feature is set" if column.labels is not None else "the training median is used"
