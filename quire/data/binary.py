"""Tables in binary files: Parquet, and NumPy's .npz and .npy without objects."""

from __future__ import annotations

import math
import re
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from quire.data.opening import opened, require_plain
from quire.data.table import (
    Table,
    arrow_column,
    check_lengths,
    check_names,
    in_columns,
    make_table,
    numbered,
    split_columns,
)
from quire.errors import DataError
from quire.files import PACKED, is_bomb

OFFSET = 4
"""Bytes that a text takes besides its characters, and a missing one alone."""
PANDAS_INDEX = re.compile(r"__index_level_\d+__")


def read_parquet(path: Path) -> Table:
    """A Parquet file; an index that pandas wrote beside the columns is left out. Columns of lists and the
    like are there by name and type alone, so that they can be dropped or ignored; using one is an error."""
    require_plain(path)
    try:
        plain = parquet.ParquetFile(path.absolute())
        names = plain.schema_arrow.names
        check_names(names, str(path))
        nested = {field.name: field.type for field in plain.schema_arrow if pa.types.is_nested(field.type)}
        flat = [name for name in names if name not in nested]
        room = _room(plain)
        if is_bomb(path, room):
            raise _bomb(path, room)
        # A text that is written once may stand in any number of rows: they are numbers until it is known
        # what they will take.
        texts = {field.name: field.type for field in plain.schema_arrow if _is_text(field.type)}
        file = parquet.ParquetFile(path.absolute(), read_dictionary=[*texts])
        data = file.read(columns=flat) if nested else file.read()
        if data.column_names != flat:  # Arrow takes a point in a name for a way into a record
            raise ValueError(f"columns {', '.join(data.column_names)} where {', '.join(flat)} were asked for")
        room += sum(_characters(column) for column in data.columns)
        if is_bomb(path, room):
            raise _bomb(path, room)
    except DataError:
        raise
    except Exception as error:  # Arrow's own, and those of names that are no text
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"not a readable Parquet file ({reason})", path=path) from None
    found = {
        name: column.cast(texts[name]) if pa.types.is_dictionary(column.type) and name in texts else column
        for name, column in zip(flat, data.columns, strict=True)
    }
    columns = {
        name: _unread(nested[name], plain.metadata.num_rows) if name in nested else found[name]
        for name in names
        if not PANDAS_INDEX.fullmatch(name)
    }
    return make_table(columns, str(path))


def _room(file: parquet.ParquetFile) -> int:
    """Bytes of the columns in memory by what the file says, but for the characters of texts that stand in
    many rows. How well constant columns are packed is not known before."""
    metadata, width = file.metadata, 0
    for field in file.schema_arrow:
        plain = pa.types.is_primitive(field.type) and not pa.types.is_boolean(field.type)
        width += field.type.byte_width if plain else 1 if pa.types.is_boolean(field.type) else OFFSET
    # What single columns say is left alone: Arrow ends the process where that is damaged.
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    check_groups([group.num_rows for group in groups], metadata.num_rows)
    return int(max(metadata.num_rows * width, sum(group.total_byte_size for group in groups)))


def check_groups(counts: list[int], rows: int) -> None:
    """The rows of a Parquet file's groups, for which room is made, are those of the file."""
    if sum(counts) != rows or min(counts, default=0) < 0:
        raise ValueError(f"groups of {counts[:3]} rows in a file of {rows}")


def _unread(kind: pa.DataType, rows: int) -> pa.Array:
    """Empty cells of a nested type: how many values its cells have is not known before they are read. Kinds
    that make room for their parts in an empty cell too are told by less than their whole type."""
    if pa.types.is_struct(kind):
        kind = pa.struct([])
    elif pa.types.is_fixed_size_list(kind):
        kind = pa.list_(kind.value_field)
    return pa.nulls(rows, kind)


def _is_text(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary))


def _characters(column: pa.ChunkedArray) -> int:
    """Bytes of texts that are kept once, if each row had its own."""
    if not pa.types.is_dictionary(column.type) or not _is_text(column.type.value_type):
        return 0
    lengths = (
        compute.sum(compute.binary_length(chunk.dictionary).take(chunk.indices), min_count=0).as_py()
        for chunk in column.chunks
    )
    return sum(lengths)


def read_numpy(path: Path) -> Table:
    """Arrays of equal length. In an .npz each array is a column, or several numbered ones if it has
    more dimensions; a `y` comes last, so that it is the target unless another is named. An .npy holds
    rows and columns, or records with named fields."""
    magic = b"PK" if path.suffix.lower() == ".npz" else b"\x93NUMPY"
    try:
        with opened(path) as file:
            if not file.read(len(magic)) == magic:
                raise ValueError(f"it does not begin with {magic!r}")
        _check_size(path)
        loaded = np.load(path, allow_pickle=False)
        arrays = {None: loaded} if isinstance(loaded, np.ndarray) else {key: loaded[key] for key in loaded}
    except DataError:
        raise
    # A header of few bytes can say anything; NumPy's reader has no error of its own.
    except Exception as error:
        pickled = "pickle" in str(error)
        raise DataError(
            "arrays of Python objects" if pickled else f"not a readable NumPy file ({error})",
            path=path,
            expected="arrays of numbers, booleans, text or dates",
            fix="save with a plain type, such as array.astype(float)" if pickled else "",
        ) from None
    columns: dict[str, pa.Array] = {}
    for key in sorted(arrays, key=lambda key: key == "y"):
        array = arrays[key]
        if key is None and array.dtype.names:
            columns |= {name: arrow_column(array[name], name, str(path)) for name in array.dtype.names}
        elif key is None:
            if array.ndim == 0:
                raise DataError("a single value", path=path, expected="rows and columns")
            flat = in_columns(array, str(path))
            names = numbered("column", flat.shape[1])
            columns |= {name: arrow_column(flat[:, i], name, str(path)) for i, name in enumerate(names)}
        else:
            columns |= split_columns(key, array, str(path))
    check_lengths(columns, str(path))
    named = None not in arrays or bool(arrays[None].dtype.names)
    return make_table(columns, str(path), named=named, typed=False)


def _check_size(path: Path) -> None:
    """Refuse arrays that are larger than their file, before anything is made room for."""
    if path.suffix.lower() == ".npz":
        with zipfile.ZipFile(path) as archive:
            total = sum(member.file_size for member in archive.infolist())
            if is_bomb(path, total):
                raise _bomb(path, total)
            for member in archive.infolist():
                with archive.open(member) as inner:
                    _check_header(inner, member.file_size)
    else:
        with opened(path) as file:
            _check_header(file, path.stat().st_size)


def _check_header(file: IO[bytes], size: int) -> None:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"its header says {shape} of {dtype}, which is more than the file holds")


def _bomb(path: Path, unpacked: int) -> DataError:
    return DataError(
        f"a file of {path.stat().st_size} bytes that unpacks to {unpacked}",
        path=path,
        expected=f"at most {PACKED} times the size of the file",
        fix="if you trust it, save it again without compression",
    )
