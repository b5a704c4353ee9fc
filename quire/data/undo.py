"""Features back to the columns that they were made from, for rows that a model has made.

    number, date   x·std + mean            boolean    x ≥ ½
    category       that of the largest     missing    where the indicator is ≥ ½, or larger than any category

N rows, D features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from quire.data.columns import Input
from quire.data.preparation import Preparation
from quire.errors import InputError

_DAYS = (-7e5, 2.9e6)
"""First and last day since 1970 that a calendar of four-digit years can say."""


def rows_in_units(preparation: Preparation, features: Tensor) -> pa.Table:
    """A column for each input column of training, in its own unit, from features (N, D)."""
    values = features.detach().cpu().double().numpy()
    wanted = len(preparation.feature_names)
    if values.ndim != 2 or values.shape[1] != wanted:
        raise InputError(f"features of shape {values.shape}", expected=f"(N, {wanted}), as in training")
    columns: dict[str, pa.Array] = {}
    place = 0
    for column in preparation.inputs:
        width = len(column.feature_names)
        columns[column.name] = _cells(column, values[:, place : place + width])
        place += width
    return pa.table(columns)


def _cells(column: Input, features: np.ndarray) -> pa.Array:
    """Cells of one column from its features; the last of them says whether a cell is missing."""
    told, gone = features, np.zeros(len(features), dtype=bool)
    if column.missing:
        told, marks = features[:, :-1], features[:, -1]
        gone = marks >= (0.5 if column.labels is None else told.max(1))
    if column.labels is not None:
        labels: list[Any] = [column.labels.values[i] for i in told.argmax(1)]
        return pa.array([None if lost else label for label, lost in zip(labels, gone, strict=True)])
    cells = told[:, 0] * column.scale + column.center
    if column.kind == "boolean":
        return pa.array(cells >= 0.5, mask=gone)
    if column.kind == "date":
        days = np.clip(np.rint(cells + column.origin), *_DAYS).astype(np.int32)
        return pa.array(days, mask=gone).cast(pa.date32())
    # As many digits as the network computed with.
    return pa.array(cells.astype(np.float32), mask=gone)
