"""Tables in binary files: Parquet, and NumPy's .npz and .npy without objects."""

from __future__ import annotations

import math
import re
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from quire.data.table import (
    Table,
    arrow_column,
    check_lengths,
    check_names,
    make_table,
    numbered,
    split_columns,
)
from quire.errors import DataError
from quire.files import PACKED, is_bomb

PANDAS_INDEX = re.compile(r"__index_level_\d+__")


def read_parquet(path: Path) -> Table:
    """A Parquet file; an index that pandas wrote beside the columns is left out."""
    try:
        file = parquet.ParquetFile(path)
        # By the types of its columns: how well constant columns are packed is not known before.
        width = sum(getattr(field.type, "byte_width", 8) for field in file.schema_arrow if _is_plain(field))
        if is_bomb(path, file.metadata.num_rows * width):
            raise _bomb(path, file.metadata.num_rows * width)
        data = file.read()
    except (pa.ArrowException, OSError, MemoryError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"not a readable Parquet file ({reason})", path=path) from None
    check_names(data.column_names, str(path))
    columns = {
        name: column
        for name, column in zip(data.column_names, data.columns, strict=True)
        if not PANDAS_INDEX.fullmatch(name)
    }
    return make_table(columns, str(path))


def read_numpy(path: Path) -> Table:
    """Arrays of equal length. In an .npz each array is a column, or several numbered ones if it has
    more dimensions; a `y` comes last, so that it is the target unless another is named. An .npy holds
    rows and columns, or records with named fields."""
    magic = b"PK" if path.suffix.lower() == ".npz" else b"\x93NUMPY"
    try:
        with path.open("rb") as file:
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
            flat = array.reshape(len(array), -1)
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
        with path.open("rb") as file:
            _check_header(file, path.stat().st_size)


def _check_header(file: IO[bytes], size: int) -> None:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"its header says {shape} of {dtype}, which is more than the file holds")


def _is_plain(field: pa.Field) -> bool:
    return pa.types.is_primitive(field.type) and not pa.types.is_boolean(field.type)


def _bomb(path: Path, unpacked: int) -> DataError:
    return DataError(
        f"a file of {path.stat().st_size} bytes that unpacks to {unpacked}",
        path=path,
        expected=f"at most {PACKED} times the size of the file",
        fix="if you trust it, save it again without compression",
    )
