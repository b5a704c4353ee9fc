"""A table in memory that remembers where it came from, so that every complaint can name its cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from quire.errors import DataError

MOST_COLUMNS = 2**18
"""Each takes a few hundred bytes besides its values."""


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of N rows.

    Made by `quire.data.read_table`, `table_from_arrays`, `from_dataframe` or `quire.data.builtin.builtin`.
    """

    data: pa.Table
    source: str
    """The file, or what messages call a table that came from none."""
    lines: np.ndarray
    """(N,) line of each row in the file; where a file has no lines, its row number from 1."""
    named: bool = True
    """Whether the names come from the source; otherwise columns are matched by position."""
    typed: bool = True
    """Whether text is meant as text; otherwise numbers, booleans and dates are looked for in it."""

    def __len__(self) -> int:
        return int(self.data.num_rows)

    @cached_property
    def names(self) -> list[str]:
        return list(self.data.column_names)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Where each column stands, from 0. Arrow's own look-up by name goes over all columns."""
        return {name: position for position, name in enumerate(self.names)}

    def column(self, name: str) -> pa.ChunkedArray:
        return self.data.column(self.positions[name])

    def take(self, rows: np.ndarray) -> Table:
        """The given rows, in the given order."""
        picked = self.data.take(pa.array(rows, type=pa.int64()))
        return Table(picked, self.source, self.lines[rows], self.named, self.typed)

    def row(self, row: int) -> dict[str, Any]:
        """One row's cells by column name, as they stand in the source."""
        return {name: self.column(name)[row].as_py() for name in self.names}

    def fault(self, got: str, *, row: int, name: str, expected: str = "", fix: str = "") -> DataError:
        """The error about one cell: ``file:line:column`` and the value."""
        value = self.column(name)[row].as_py()
        return DataError(
            got,
            path=self.source,
            line=int(self.lines[row]),
            column=name,
            value="" if value is None else value,
            expected=expected,
            fix=fix,
        )


def make_table(columns: Mapping[str, Any], source: str, *, named: bool = True, typed: bool = True) -> Table:
    """A table of Arrow columns without lines; NaN in a float column is a missing value."""
    data = pa.table(dict(columns))
    if data.num_rows == 0 or data.num_columns == 0:
        raise DataError(
            f"a table of {data.num_rows} rows and {data.num_columns} columns",
            path=source,
            expected="at least one row and one column",
        )
    return Table(data, source, np.arange(1, data.num_rows + 1), named, typed)


def numbered(prefix: str, count: int) -> list[str]:
    """Names for columns that have none: ``column 1``, ``column 2``, …"""
    return [f"{prefix} {i}" for i in range(1, count + 1)]


def listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def arrow_column(values: Any, name: str, source: str) -> pa.Array:
    """A NumPy column as an Arrow array; anything that would need unpickling or has no order is refused."""
    array = np.asarray(values)
    if array.dtype.kind not in "biufUM":
        raise DataError(
            f"values of type {array.dtype}",
            path=source,
            column=name,
            expected="numbers, booleans, text or dates",
            fix="convert the column, or leave it out",
        )
    if array.ndim != 1:
        raise DataError(
            f"cells of shape {array.shape[1:]}", path=source, column=name, expected="one value in each cell"
        )
    if array.dtype == np.float16:
        array = array.astype(np.float32)
    if array.dtype.kind == "M":
        array = array.astype("datetime64[us]")
    try:
        return pa.array(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (pa.ArrowException, ValueError) as error:  # bytes that are no characters
        raise DataError(
            f"values that cannot be read ({error})",
            path=source,
            column=name,
            expected="numbers, booleans, text or dates",
        ) from None


def in_columns(array: np.ndarray, source: str) -> np.ndarray:
    """(N, C): the parts of each row side by side."""
    columns = math.prod(array.shape[1:])
    if len(array) == 0 or columns > MOST_COLUMNS:
        raise DataError(
            f"{len(array)} rows of {columns} columns",
            path=source,
            expected=f"at least one row, and at most {MOST_COLUMNS} columns",
        )
    return array.reshape(len(array), columns)


def table_from_arrays(
    X: Any, names: Sequence[str] | None = None, *, target: Any = None, source: str = "array"
) -> Table:
    """A table of the columns of `X` (N, C), or of the parts of each row where X has more dimensions,
    followed by `target` (N,) or (N, T) when there is one. Tensors and nested lists work too."""
    if hasattr(X, "detach"):
        X = X.detach().cpu().numpy()
    array = np.asarray(X)
    if array.ndim == 0:
        raise DataError("a single number", path=source, expected="an array of rows and columns")
    flat = array.reshape(len(array), -1) if array.size or array.ndim == 2 else array.reshape(len(array), 0)
    labels = list(names) if names is not None else numbered("column", flat.shape[1])
    check_names(labels, source)
    if len(labels) != flat.shape[1]:
        raise DataError(
            f"{len(labels)} names for {flat.shape[1]} columns", path=source, expected="one name per column"
        )
    columns = {name: arrow_column(flat[:, i], name, source) for i, name in enumerate(labels)}
    if target is not None:
        columns |= split_columns("target", target, source)
    check_lengths(columns, source)
    return make_table(columns, source, named=names is not None, typed=False)


def split_columns(name: str, values: Any, source: str) -> dict[str, pa.Array]:
    """One array as one column, or as several numbered ones where it has more than one dimension."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.ndim == 0:
        raise DataError("a single value", path=source, column=name, expected="one value per row")
    if array.ndim == 1:
        return {name: arrow_column(array, name, source)}
    flat = in_columns(array, source)
    return {
        part: arrow_column(flat[:, i], part, source) for i, part in enumerate(numbered(name, flat.shape[1]))
    }


def check_lengths(columns: Mapping[str, Any], source: str) -> None:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        first = next(iter(lengths.values()))
        odd = next(name for name, length in lengths.items() if length != first)
        raise DataError(
            f"{lengths[odd]} values beside {first} in the first column",
            path=source,
            column=odd,
            expected="the same number of rows in each column",
        )


def check_names(names: Sequence[str], source: str, line: int | None = None) -> None:
    """Refuse a column name that appears twice."""
    seen: dict[str, int] = {}
    for position, name in enumerate(names, 1):
        if name in seen:
            raise DataError(
                f"columns {seen[name]} and {position} have the same name",
                path=source,
                line=line,
                column=position,
                value=name,
                expected="a name of its own for each column",
                fix="rename one of them; if the first line holds no names, use --table.header no",
            )
        seen[name] = position


def from_dataframe(frame: Any, source: str = "data frame") -> Table:
    """A table of a pandas frame, or of any frame that speaks Arrow's stream protocol (polars)."""
    if hasattr(frame, "iloc"):
        names = [str(name) for name in frame.columns]
        check_names(names, source)
        frame = frame.set_axis(names, axis=1)
        try:
            data = pa.Table.from_pandas(frame, preserve_index=False)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"a column that has no single type: {error.args[0]}",
                path=source,
                expected="numbers, booleans, dates or text in each column",
                fix="convert the column with astype, or leave it out",
            ) from None
    elif hasattr(frame, "__arrow_c_stream__"):
        data = pa.table(frame)
        check_names(data.column_names, source)
    else:
        raise DataError(
            f"a {type(frame).__name__}", path=source, expected="a pandas frame or another Arrow table"
        )
    return make_table(dict(zip(data.column_names, data.columns, strict=True)), source)
