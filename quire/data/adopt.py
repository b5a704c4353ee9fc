"""Preparing a table as another one was prepared, for models that are taken over from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.data.load import TableData, load_table
from quire.data.preparation import Preparation
from quire.data.table import Table
from quire.data.targets import Targets, require_column
from quire.options import Table as TableOptions


def load_prepared(
    source: Path | str | Table,
    like: Preparation,
    options: TableOptions | None = None,
    *,
    targets: Targets = None,
    seed: int = 0,
) -> TableData:
    """`load_table`, with the inputs (columns, scales, categories) of an older preparation: a column is
    the same feature to the old model only if it is scaled by the old numbers."""
    loaded = load_table(source, options, targets=targets, seed=seed)
    table = loaded.table
    inputs = []
    for column in like.inputs:
        if table.named:
            require_column(table, column.name, "the run that is taken over")
            column = replace(column, position=table.names.index(column.name))
        inputs.append(column)
    preparation = replace(loaded.preparation, inputs=tuple(inputs))
    prepared = preparation.transform(table, need_target=True)
    train, validation, test = (
        prepared.data.subset(loaded.rows[name]) if len(loaded.rows[name]) else None
        for name in ("train", "validation", "test")
    )
    assert train is not None
    preparation = replace(preparation, warnings=(*preparation.warnings, *prepared.notes))
    return replace(loaded, preparation=preparation, train=train, validation=validation, test=test)
