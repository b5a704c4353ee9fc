"""One call from a file or built-in set to prepared training, validation and test data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from quire.data.batch import TensorData
from quire.data.builtin import BUILTIN, builtin
from quire.data.columns import Target, TargetKind, fit_target, missing_cell
from quire.data.loaded import Split
from quire.data.preparation import Preparation
from quire.data.readers import read_table
from quire.data.splits import split_rows
from quire.data.table import Table
from quire.data.targets import Targets, check_columns, kind_of, resolve_targets
from quire.data.types import plain
from quire.errors import DataError, InputError, nearest
from quire.options import Table as TableOptions


@dataclass(frozen=True, eq=False)
class TableData:
    """A table, split and prepared."""

    table: Table
    preparation: Preparation
    train: TensorData
    validation: TensorData | None
    """None when its share is 0."""
    test: TensorData | None
    rows: Mapping[Split, Tensor]
    """Row numbers of each part in `table`, from 0."""

    def lines(self, split: Split) -> np.ndarray:
        """The line (or row, from 1) of the file on which each sample of a part stands."""
        return self.table.lines[self.rows[split].numpy()]

    @property
    def source(self) -> str:
        return str(self.table.source)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.preparation.warnings


def load_table(
    source: Path | str | Table,
    options: TableOptions | None = None,
    *,
    targets: Targets = None,
    kind: TargetKind | Literal["auto"] = "auto",
    seed: int = 0,
    like: Preparation | None = None,
) -> TableData:
    """Read, split and prepare a table.

    `source` is a file, the name of a built-in set, or a table. `targets` is a column's name or position
    (1 the first, -1 the last) or several of them; None is the last column, () no target. `kind` says
    whether targets are classes or values; see `fit_target` for how `auto` decides. With one target of
    classes the split is stratified. Statistics come from the training part alone, or with `like` from an
    older preparation, whose model is to be taken over.
    """
    options = options or TableOptions()
    table = open_source(source, options)
    check_columns(table, options)
    names = resolve_targets(table, targets, options.drop)
    if names and len(table.names) == len(names):
        raise DataError(
            f"no column beside the target '{names[0]}'", path=table.source,
            expected="at least one column to predict from",
            fix="separate columns by commas, tabs or semicolons, or name the one with --table.delimiter",
        )  # fmt: skip
    chosen_here = targets is None and Path(table.source).is_file()
    notes = [f"the target is '{names[0]}', the last column; --target names another"] if chosen_here else []
    table, dropped = without_missing_targets(table, names, options)

    stratify, warnings = None, notes + dropped
    if len(names) == 1:
        chosen = kind_of(names[0], kind, options)
        target, _ = fit_target(table, names[0], np.arange(len(table)), chosen)
        if target.kind == "classification":
            codes = target.encode(table, names[0]).astype(np.int64)
            stratify = torch.from_numpy(codes)
            warnings = warnings + _rare_classes(target, codes)
    try:
        train, validation, test = split_rows(len(table), options.validation, options.test, seed, stratify)
    except InputError as error:
        raise DataError(error.got, path=table.source, expected=error.expected, fix=error.fix) from None

    preparation = Preparation.fit(table, names, options, train, kind)
    if like is not None:
        preparation = preparation.with_inputs_of(like, table)
    prepared = preparation.transform(table, need_target=True)
    preparation = replace(preparation, warnings=(*warnings, *preparation.warnings, *prepared.notes))
    return TableData(
        table,
        preparation,
        prepared.data.subset(train),
        prepared.data.subset(validation) if len(validation) else None,
        prepared.data.subset(test) if len(test) else None,
        {"train": train, "validation": validation, "test": test},
    )


def open_source(source: Path | str | Table, options: TableOptions) -> Table:
    """The table itself, the file, or the built-in set of that name where no such file exists."""
    if isinstance(source, Table):
        return source
    if isinstance(source, str) and source in BUILTIN and not Path(source).exists():
        return builtin(source)
    if isinstance(source, str) and not Path(source).exists() and nearest(source, BUILTIN):
        raise DataError(
            "no such file or built-in data set",
            path=source,
            expected=f"a file, or one of {', '.join(BUILTIN)}",
            fix=nearest(source, BUILTIN),
        )
    return read_table(source, options)


def without_missing_targets(table: Table, names: list[str], options: TableOptions) -> tuple[Table, list[str]]:
    """The rows whose targets are all there, and a note on the others; with ``missing="refuse"`` the
    first such row is an error."""
    keep = np.ones(len(table), dtype=bool)
    for name in names:
        gone = plain(table, name).is_null().to_numpy()
        if gone.any() and options.missing == "refuse":
            raise missing_cell(table, name, int(gone.argmax()), "the target is missing")
        keep &= ~gone
    if keep.all() or not keep.any():
        return table, []
    first = int(table.lines[(~keep).argmax()])
    note = f"{(~keep).sum()} of {len(table)} rows have no target and are left out, the first in line {first}"
    return table.take(np.flatnonzero(keep)), [note]


def _rare_classes(target: Target, codes: np.ndarray) -> list[str]:
    counts = np.bincount(codes, minlength=len(target.classes))
    rare = [repr(label) for label, count in zip(target.classes, counts, strict=True) if count == 1]
    if not rare:
        return []
    return [f"target '{target.name}': one row only of class {', '.join(rare[:10])}; it is used to train"]
