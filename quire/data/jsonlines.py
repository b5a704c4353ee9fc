"""Tables in JSON lines: an object on each line, whose names are the columns.

Cells are numbers, booleans, text or null; a name that an object lacks is a missing value. Columns with lists
or objects in them are there by name alone, so that they can be dropped. Rows become Arrow's columns a stretch
at a time, as Python's objects take many times the room.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from quire.data.table import MOST_COLUMNS, Table, make_table
from quire.errors import DataError
from quire.files import is_bomb

STRETCH = 2**13
"""Rows that are Python's objects at once."""
NESTED = pa.list_(pa.null())
CELL = 8
"""Bytes of a cell, at least, also where it is missing."""


def read_json_lines(path: Path, text: str) -> Table:
    """The objects in the lines of `text`, the content of the file `path`."""
    pieces: dict[str, list[pa.Array]] = {}
    waiting: list[dict[str, Any]] = []
    lines: list[int] = []
    done = 0
    for line, record in enumerate(text.split("\n"), 1):
        if not record.strip():
            continue
        waiting.append(_record(path, line, record))
        lines.append(line)
        if len(waiting) == STRETCH:
            _add(path, pieces, waiting, done)
            done, waiting = len(lines), []
    if not lines:
        raise DataError("the file is empty", path=path, expected="an object on each line")
    if waiting:
        _add(path, pieces, waiting, done)
    table = make_table({name: _joined(parts) for name, parts in pieces.items()}, str(path), typed=False)
    return Table(table.data, table.source, np.array(lines), typed=False)


def _record(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        "".join(found if isinstance(found, dict) else ()).encode()  # names may be halves of characters
    except json.JSONDecodeError as error:
        raise DataError(
            f"no JSON ({error.msg})", path=path, line=line, column=error.colno,
            expected='an object on each line, such as {"size": 3.5, "colour": "red"}',
            fix="a file that is one JSON value must be written again, an object a line" if line == 1 else "",
        ) from None  # fmt: skip
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets without end
        raise DataError(f"no JSON that can be read ({error})", path=path, line=line) from None
    if not isinstance(found, dict):
        raise DataError(
            f"a {type(found).__name__}", path=path, line=line,
            expected='an object on each line, such as {"size": 3.5, "colour": "red"}',
        )  # fmt: skip
    return found


def _add(path: Path, pieces: dict[str, list[pa.Array]], rows: Sequence[dict[str, Any]], done: int) -> None:
    """The rows as one more piece of each column; a new column is missing in the `done` rows before."""
    for row in rows:
        for name in row:
            pieces.setdefault(name, [pa.nulls(done)] if done else [])
    cells = len(pieces) * (done + len(rows))
    if len(pieces) > MOST_COLUMNS or is_bomb(path, CELL * cells):
        raise DataError(
            f"{len(pieces)} different names in {done + len(rows)} lines", path=path,
            expected="the same names in each line", fix="write a column for the names and one for the values",
        )  # fmt: skip
    for name, parts in pieces.items():
        parts.append(_piece(path, name, [row.get(name) for row in rows]))


def _piece(path: Path, name: str, values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values} - {type(None)}
    if not kinds:
        return pa.nulls(len(values))
    if kinds & {list, dict}:
        return pa.nulls(len(values), NESTED)
    try:
        if kinds == {bool}:
            return pa.array(values, pa.bool_())
        if kinds == {int} and all(abs(value) < 2**63 for value in values if value is not None):
            return pa.array(values, pa.int64())
        if kinds <= {int, float}:
            return pa.array([None if value is None else float(value) for value in values], pa.float64())
        return pa.array([_as_text(value) for value in values], pa.string())
    except (OverflowError, UnicodeError) as error:
        raise DataError(
            f"values that cannot be read ({error})", path=path, column=name,
            expected="numbers, booleans or text",
        ) from None  # fmt: skip


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _joined(parts: list[pa.Array]) -> pa.ChunkedArray:
    """The pieces as one column of the least type that holds them all."""
    kinds = {part.type for part in parts} - {pa.null()}
    kind = pa.null() if not kinds else next(iter(kinds)) if len(kinds) == 1 else pa.string()
    if kinds == {pa.int64(), pa.float64()}:
        kind = pa.float64()
    if NESTED in kinds:
        return pa.chunked_array([pa.nulls(len(part), NESTED) for part in parts])
    return pa.chunked_array([part.cast(kind) for part in parts], kind)
