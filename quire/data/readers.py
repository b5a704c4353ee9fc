"""Files to tables: CSV and TSV, JSON lines, Parquet, .npz and .npy. Nothing that is read is unpickled.

Text is read whole by Arrow with every cell kept as it stands; when something is wrong, Python's own
csv reader goes over the file a second time to find the line.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from quire.data.binary import read_numpy, read_parquet
from quire.data.jsonlines import read_json_lines
from quire.data.opening import read_bytes
from quire.data.table import Table, check_names
from quire.data.types import MISSING, is_missing, looks_typed
from quire.errors import DataError, InputError, nearest
from quire.options import Table as TableOptions

DELIMITERS = {"comma": ",", "tab": "\t", "semicolon": ";"}
KINDS = "a CSV, TSV, JSON lines, Parquet, .npz or .npy file"
JSON_SUFFIXES = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".csv", ".tsv", ".tab", ".txt", ".data", "")
SAMPLE_CHARACTERS = 2**16
SAMPLE_ROWS = 200
COMMA_DECIMAL = r"^[+-]?(\d{1,3}(\.\d{3})+|\d+)(,\d+)?([eE][+-]?\d+)?$"
_COMMA = re.compile(COMMA_DECIMAL, re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+")
LONG = 10
"""Columns from which on a record that counts them is hardly ever a row."""


def read_table(path: Path | str, options: TableOptions | None = None) -> Table:
    """The table in a file; its kind is told by the name's ending, and an unknown ending is read as text."""
    path, options = Path(path), options or TableOptions()
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            "no such file", path=path, expected=KINDS,
            fix=nearest(path.name, siblings) or "check the path",
        )  # fmt: skip
    if path.is_dir():
        raise DataError(
            "a folder", path=path, expected=KINDS, fix="for a folder of images use a recipe such as lenet"
        )
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq"):
        return read_parquet(path)
    if suffix in (".npz", ".npy"):
        return read_numpy(path)
    if suffix in JSON_SUFFIXES:
        return read_json_lines(path, decode(_without_mark(path), path))
    if suffix not in TEXT_SUFFIXES:
        raise DataError(
            f"a file of kind '{suffix}'",
            path=path,
            expected="one of .csv, .tsv, .tab, .txt, .data, .jsonl, .ndjson, .parquet, .pq, .npz, .npy",
            fix="convert the table, or rename the file if it is one of these",
        )
    return read_text(path, options)


def read_text(path: Path, options: TableOptions) -> Table:
    """A delimited text file: UTF-8, with or without header, quotes as in RFC 4180."""
    data = _without_mark(path)
    text = decode(data, path)
    if not text.strip():
        raise DataError("the file is empty", path=path, expected="a table with at least one row")
    if len(text) > SAMPLE_CHARACTERS and "\n" not in text[:SAMPLE_CHARACTERS].replace("\r", "\n"):
        raise DataError(
            f"a first line of more than {SAMPLE_CHARACTERS} characters", path=path, line=1,
            expected="a line for each row", fix="save a table of so many columns as Parquet",
        )  # fmt: skip
    delimiter = choose_delimiter(path, text, options)
    sample = sample_records(text, delimiter)
    first_line, first = sample[0]
    point = from_comma if options.decimal == "comma" else str
    typed = [(line, [point(cell) for cell in cells]) for line, cells in sample]
    header = options.header == "yes" or (
        options.header == "auto" and has_header(typed, cut=len(text) > SAMPLE_CHARACTERS)
    )
    names = header_names(first) if header else [f"column {i}" for i in range(1, len(first) + 1)]
    check_names(names, str(path), first_line)

    columns = parse(data, text, delimiter, names, path)
    rows = columns.num_rows
    lines = record_lines(data, text, delimiter, rows, path)
    if header:
        columns, lines = columns.slice(1), lines[1:]
    if options.decimal == "comma":
        columns = with_points(columns)
    if columns.num_rows == 0:
        raise DataError(
            "a header but no rows below it", path=path, line=first_line, expected="at least one row",
            fix="if the first line is a row, use --table.header no",
        )  # fmt: skip
    return Table(columns, str(path), lines, named=header, typed=False)


def _without_mark(path: Path) -> bytes:
    """The file without its byte order mark."""
    return read_bytes(path).removeprefix(b"\xef\xbb\xbf")


def decode(data: bytes, path: Path) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(
            "the file is UTF-16", path=path, line=1, expected="text in UTF-8", fix="save it again as UTF-8"
        )
    if data[:2] == b"\x1f\x8b" or data[:4] == b"PK\x03\x04":
        raise DataError(
            "a compressed file under the name of a text file", path=path, expected="plain text in UTF-8",
            fix="unpack it first; a spreadsheet must be saved as CSV",
        )  # fmt: skip
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        start = data.rfind(b"\n", 0, error.start) + 1
        raise DataError(
            f"bytes that are not UTF-8, at byte {error.start - start + 1} of the line",
            path=path,
            line=data.count(b"\n", 0, error.start) + 1,
            value=data[error.start : error.end],
            expected="text in UTF-8",
            fix="save the file as UTF-8 (it may be Latin-1 or Windows-1252)",
        ) from None


def records(text: str, delimiter: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and cells of each record that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"a quoted cell that cannot be read ({error})",
            path=path,
            line=line,
            expected='quotes that close, and "" for a quote inside them',
        ) from None


def sample_records(text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """The first records, read leniently: a cut or broken quote is judged when the whole file is read."""
    reader = csv.reader(io.StringIO(text[:SAMPLE_CHARACTERS], newline=""), delimiter=delimiter)
    found: list[tuple[int, list[str]]] = []
    line = 1
    try:
        for cells in reader:
            if cells:
                found.append((line, cells))
            line = reader.line_num + 1
            if len(found) == SAMPLE_ROWS:
                break
    except csv.Error:
        pass
    if len(text) > SAMPLE_CHARACTERS and len(found) > 1:
        found = found[:-1]  # the last record may have been cut
    return found or [(1, [""])]


def choose_delimiter(path: Path, text: str, options: TableOptions) -> str:
    if options.delimiter != "auto":
        return DELIMITERS[options.delimiter]
    if path.suffix.lower() in (".tsv", ".tab"):
        return "\t"

    def score(delimiter: str) -> tuple[bool, int]:
        widths = [len(cells) for _, cells in sample_records(text, delimiter)[:20]]
        return min(widths) == max(widths) > 1, widths[0]

    return max(DELIMITERS.values(), key=score)


def has_header(sample: list[tuple[int, list[str]]], *, cut: bool = False) -> bool:
    """Whether the first record names the columns.

    It does not when one of its cells is a number, boolean or date, unless it counts the columns. It does when
    a column below is of such a type. In a table of text alone it does unless a cell of it stands below again.
    A sample that is `cut` is not the whole table.
    """
    first, below = sample[0][1], [cells for _, cells in sample[1:]]
    if counts_columns(first, below, cut=cut):
        return True
    if any(looks_typed(cell) for cell in first):
        return False
    if not below:
        return True
    for position in range(len(first)):
        if is_missing(first[position]):
            continue
        values = {cells[position].strip() for cells in below if len(cells) > position} - {""}
        if values and sum(looks_typed(value) for value in values) > len(values) / 2:
            return True
    return not any(
        not is_missing(cell) and any(len(cells) > position and cells[position] == cell for cells in below)
        for position, cell in enumerate(first)
    )


def counts_columns(first: list[str], below: list[list[str]], *, cut: bool = False) -> bool:
    """Whether the first record is 0, 1, 2 …, as libraries write it above columns without names, and no row:
    with nothing before it, where the numbers of rows stand below; above cells that are no whole numbers; or
    long, and not a row in another order."""
    numbered = not first[0]
    cells = first[1:] if numbered else first
    if len(cells) < (2 if numbered else 3) or cells != [str(i) for i in range(len(cells))]:
        return False
    if not below:
        return cut
    if numbered:
        return any(row[0] for row in below if row)
    if any(not _WHOLE.fullmatch(cell.strip()) for row in below for cell in row if not is_missing(cell)):
        return True
    return len(cells) >= LONG and all(sorted(row) != sorted(cells) for row in below)


def from_comma(cell: str) -> str:
    """A number with a comma before its decimals, and points between thousands, as one with a point."""
    return cell.replace(".", "").replace(",", ".") if _COMMA.match(cell.strip()) else cell


def with_points(columns: pa.Table) -> pa.Table:
    """`from_comma` of the columns in which each cell that is not missing is such a number."""
    for position, name in enumerate(columns.column_names):
        cells = columns.column(position)
        text = pc.utf8_trim_whitespace(cells)
        missing = pc.is_in(pc.utf8_lower(text), value_set=pa.array(MISSING))
        if pc.all(pc.or_(missing, pc.match_substring_regex(text, COMMA_DECIMAL))).as_py():
            points = pc.replace_substring(pc.replace_substring(cells, ".", ""), ",", ".")
            columns = columns.set_column(position, name, points)
    return columns


def header_names(cells: list[str]) -> list[str]:
    return [cell.strip() or f"column {i}" for i, cell in enumerate(cells, 1)]


def parse(data: bytes, text: str, delimiter: str, names: list[str], path: Path) -> pa.Table:
    """All records, the header's included, as columns of text."""
    types = {name: pa.string() for name in names}
    try:
        return arrow_csv.read_csv(
            pa.BufferReader(data),
            read_options=arrow_csv.ReadOptions(column_names=names, block_size=2**24),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=b'"' in data),
            convert_options=arrow_csv.ConvertOptions(
                column_types=types, null_values=[], strings_can_be_null=False, check_utf8=False
            ),
        )
    except pa.ArrowInvalid as error:
        for line, cells in records(text, delimiter, path):
            if len(cells) != len(names):
                raise ragged(cells, names, line, path) from None
        raise DataError(f"cannot be read as a table: {error}", path=path) from None


def ragged(cells: list[str], names: list[str], line: int, path: Path) -> DataError:
    short = len(cells) < len(names)
    return DataError(
        f"a row of {len(cells)} cell{'s' * (len(cells) != 1)} where the first has {len(names)}",
        path=path,
        line=line,
        column=names[len(cells)] if short else len(names) + 1,
        value=None if short else cells[len(names)],
        expected=f"{len(names)} cell{'s' * (len(names) != 1)}",
        fix="add the missing cell"
        if short
        else "put a cell that contains the delimiter in quotes"
        if len(names) > 1
        else "remove lines above the table, such as a title; or name the delimiter with --table.delimiter",
    )


def record_lines(data: bytes, text: str, delimiter: str, rows: int, path: Path) -> np.ndarray:
    """(rows,) the line on which each record starts."""
    line_count = data.count(b"\n") + (not data.endswith(b"\n"))
    if line_count == rows and data.count(b"\r") == data.count(b"\r\n"):
        return np.arange(1, rows + 1)
    lines = np.fromiter((line for line, _ in records(text, delimiter, path)), dtype=np.int64)
    if len(lines) != rows:
        raise InputError(
            f"{path}: {rows} or {len(lines)} rows, depending on how its quotes are read",
            expected='cells that contain quotes to be quoted, and "" for a quote inside them',
        )
    return lines
