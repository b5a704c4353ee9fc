"""What the cells of a column are, and their values.

A column of text is a column of numbers, booleans or dates when every cell that is not missing is one.
Where most are and a few are not, the first that is not is an error with its place: a typing mistake
must not turn a number into thousands of categories.
"""

from __future__ import annotations

import re
import shlex
from datetime import datetime
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire.data.table import Table
from quire.errors import DataError

CellKind = Literal["number", "boolean", "date", "text", "empty"]

MISSING = ("", "na", "n/a", "nan", "null", "?", "-", "#n/a", "<na>")
"""Cells that stand for a missing value, in any case of letters."""

NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:inf|infinity))$"
COMMA_NUMBER = r"^[+-]?\d+(,\d+)*(\.\d+)?$"
MARKED_NUMBER = r"^[€$£¥]? ?[+-]?(\d+([.,]\d+)?|\d{1,3}([., '’]\d{3})+([.,]\d+)?) ?[%€$£¥]?$"
LOCAL_DATE = (
    r"^(\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{1,2}/\d{1,2}/\d{2}|\d{4}[./]\d{1,2}[./]\d{1,2})([T ,]+[\d:.]+)?$"
)
BOOLEAN = r"^(?i:true|false)$"
DATE = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?(Z|[+-]\d{2}:?\d{2})?)?$"
PATTERNS: dict[CellKind, str] = {"number": NUMBER, "boolean": BOOLEAN, "date": DATE}
_TYPED = re.compile("|".join(PATTERNS.values()), re.ASCII)

STRAY_SHARE = 0.05
STRAY_CELLS = 3
MANY_NUMBERS = 20

_MEANING = {
    "number": ("text in a numeric column", "a number"),
    "boolean": ("not a boolean in a column of booleans", "true or false"),
    "date": ("not a date in a column of dates", "a date such as 2024-02-29 or 2024-02-29T13:45:00"),
}
_SECONDS_PER_DAY = 86_400


def looks_typed(cell: str) -> bool:
    """Whether one cell of text is a number, boolean or date."""
    return _TYPED.match(cell.strip()) is not None


def is_missing(cell: str) -> bool:
    """Whether one cell of text stands for a missing value."""
    return cell.strip().lower() in MISSING


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def plain(table: Table, name: str) -> pa.ChunkedArray:
    """The column with dictionaries decoded, text trimmed and null wherever a cell is missing. One with lists
    and the like in its cells is refused."""
    column = table.column(name)
    if pa.types.is_nested(column.type):
        raise _unfit(table, name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_floating(column.type):
        return pc.if_else(pc.is_nan(column), None, column)
    if not is_text(column.type):
        return column
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    # In a typed source null is explicit, and "NA" may well be a label (Namibia).
    gone = pc.equal(text, "") if table.typed else pc.is_in(pc.utf8_lower(text), value_set=pa.array(MISSING))
    return pc.if_else(gone, None, text)


def infer(table: Table, name: str, *, strict: bool = True) -> CellKind:
    """The kind of a column from all of its cells. Unless `strict` is off, cells that do not fit raise."""
    column = plain(table, name)
    kind = column.type
    if column.null_count == len(column) or pa.types.is_null(kind):
        return "empty"
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "date"
    if not is_text(kind):
        raise _unfit(table, name)
    if table.typed:
        return "text"
    present = len(column) - column.null_count
    for candidate, pattern in PATTERNS.items():
        fits = pc.match_substring_regex(column, pattern)
        count = pc.sum(fits).as_py() or 0
        if count == present:
            return candidate
        if strict and _stray(column, fits, count, present):
            row = pc.index(fits, False).as_py()
            fix = f"correct the cell; or read the column as categories with --table.categories {name!r}"
            if row == 0 and not table.named:
                fix = "correct the cell; if the first line holds names, use --table.header yes"
            raise _misfit(table, name, candidate, row, fix)
    if strict:
        _check_habits(table, name, column, present)
    return "text"


def _unfit(table: Table, name: str) -> DataError:
    return DataError(
        f"values of type {table.column(name).type}",
        path=table.source,
        column=name,
        expected="one number, boolean, date or text in each cell",
        fix=f"leave the column out with --table.drop {shlex.quote(name)}",
    )


def _check_habits(table: Table, name: str, column: pa.ChunkedArray, present: int) -> None:
    """Refuse numbers and dates in a way of writing that is not read: as text each would be a label."""
    leave = f"or leave the column out with --table.drop {name!r}"
    habits = {
        COMMA_NUMBER: (
            "a number with a comma",
            "decimals after a point, and no mark between thousands",
            "write 3.5 for 3,5 and 1000 for 1,000; where commas stand before decimals, --table.decimal comma",
        ),
        MARKED_NUMBER: (
            "a number with a mark or a unit",
            "digits, with a point before decimals",
            f"write 5 for 5 % or €5, and 1000.5 for 1.000,5 (or use --table.decimal comma); {leave}",
        ),
        LOCAL_DATE: (
            "a date in another form",
            "a date such as 2024-02-29 or 2024-02-29T13:45:00",
            f"write year, month, day; {leave}; or read it as categories with --table.categories",
        ),
    }
    plain_number = pc.match_substring_regex(column, NUMBER)
    for pattern, (got, expected, fix) in habits.items():
        fits = pc.match_substring_regex(column, pattern)
        if (pc.sum(fits).as_py() or 0) >= (1 - STRAY_SHARE) * present:
            row = pc.index(pc.and_(fits, pc.invert(plain_number)), True).as_py()
            raise table.fault(got, row=row, name=name, expected=expected, fix=fix)


def _stray(column: pa.ChunkedArray, fits: pa.ChunkedArray, count: int, present: int) -> bool:
    """Whether the cells that do not fit look like mistakes rather than like labels: at most 5% of them,
    or fewer than half and either at most three cells or at most three texts among many numbers."""
    if present - count <= STRAY_SHARE * present:
        return True
    if count <= present / 2:
        return False
    if present - count <= STRAY_CELLS:
        return True
    others = len(pc.unique(column.filter(pc.invert(fits))))
    return others <= STRAY_CELLS and len(pc.unique(column.filter(fits))) > MANY_NUMBERS


def _misfit(table: Table, name: str, kind: str, row: int, fix: str = "correct the cell") -> DataError:
    got, expected = _MEANING[kind]
    expected = f"{expected}, or an empty cell for a missing value"
    return table.fault(got, row=row, name=name, expected=expected, fix=fix)


def _check_pattern(table: Table, name: str, text: pa.ChunkedArray, kind: str, pattern: str) -> None:
    row = pc.index(pc.match_substring_regex(text, pattern), False).as_py()
    if row >= 0:
        raise _misfit(table, name, kind, row)


def read_numbers(table: Table, name: str) -> np.ndarray:
    """(N,) float64, NaN where missing; text and infinity are errors with their place."""
    column = plain(table, name)
    if is_text(column.type):
        _check_pattern(table, name, column, "number", NUMBER)
        # Arrow's number parser knows no leading plus sign.
        column = pc.cast(pc.replace_substring_regex(column, r"^\+", ""), pa.float64())
    elif pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        raise _misfit(table, name, "number", pc.index(column.is_valid(), True).as_py())
    else:
        column = _to_float(column)
    values = np.array(column.to_numpy(), dtype=np.float64)
    infinite = np.isinf(values)
    if infinite.any():
        raise table.fault(
            "an infinite number",
            row=int(infinite.argmax()),
            name=name,
            expected="a finite number, or an empty cell for a missing value",
            fix="correct the cell",
        )
    return values


def _to_float(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.int8())
    return pc.cast(column, pa.float64(), safe=False)


def read_booleans(table: Table, name: str) -> np.ndarray:
    """(N,) float64 of 0 and 1, NaN where missing. 0 and 1 are understood beside true and false."""
    column = plain(table, name)
    if is_text(column.type):
        _check_pattern(table, name, column, "boolean", r"^(?i:true|false|0|1)$")
        column = pc.is_in(pc.utf8_lower(column), value_set=pa.array(["true", "1"])).cast(pa.float64())
        column = pc.if_else(plain(table, name).is_null(), None, column)
    values = np.array(_to_float(column).to_numpy(), dtype=np.float64)
    wrong = ~(np.isnan(values) | (values == 0) | (values == 1))
    if wrong.any():
        raise _misfit(table, name, "boolean", int(wrong.argmax()))
    return values


def read_dates(table: Table, name: str) -> np.ndarray:
    """(N,) float64 days since 1970-01-01 UTC, NaN where missing. Dates without a zone are taken as UTC."""
    column = plain(table, name)
    if is_text(column.type):
        _check_pattern(table, name, column, "date", DATE)
        return _days_of_text(table, name, column)
    if not (pa.types.is_date(column.type) or pa.types.is_timestamp(column.type)):
        raise _misfit(table, name, "date", pc.index(column.is_valid(), True).as_py())
    microseconds = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    return np.array(pc.divide(microseconds.cast(pa.float64()), 1e6 * _SECONDS_PER_DAY).to_numpy())


def _days_of_text(table: Table, name: str, text: pa.ChunkedArray) -> np.ndarray:
    encoded = text.combine_chunks().dictionary_encode()
    days = np.empty(len(encoded.dictionary))
    for i, value in enumerate(encoded.dictionary.to_pylist()):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise _misfit(table, name, "date", pc.index(text, value).as_py()) from None
        offset = moment.utcoffset()
        since = moment.replace(tzinfo=None) - datetime(1970, 1, 1)
        days[i] = (since - offset if offset else since).total_seconds() / _SECONDS_PER_DAY
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return np.where(np.isnan(codes), np.nan, days[np.nan_to_num(codes).astype(np.int64)])


def read_labels(table: Table, name: str) -> pa.ChunkedArray:
    """The column as text labels, null where missing."""
    column = plain(table, name)
    return column if is_text(column.type) else column.cast(pa.string())
