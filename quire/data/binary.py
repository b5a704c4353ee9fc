"""Tables in binary files: Parquet, and NumPy's .npz and .npy without objects."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

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

PANDAS_INDEX = re.compile(r"__index_level_\d+__")


def read_parquet(path: Path) -> Table:
    """A Parquet file; an index that pandas wrote beside the columns is left out."""
    try:
        data = parquet.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
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
        loaded = np.load(path, allow_pickle=False)
        arrays = {None: loaded} if isinstance(loaded, np.ndarray) else {key: loaded[key] for key in loaded}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
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
