"""Tables of numbers that are larger than memory: .npy and Parquet files, read stretch by stretch.

A part of the data is a set of *stretches* of rows that lie side by side in the file, so that a sweep reads
the file in its order. Nothing is mapped: what has been read and used is gone, whatever the size of the file.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from torch import Tensor

from quire.data.batch import Batch, TensorData
from quire.data.binary import check_groups
from quire.data.columns import Input
from quire.data.loaded import Split
from quire.data.opening import opened, require_plain
from quire.data.preparation import Preparation
from quire.data.splits import split_rows
from quire.data.table import MOST_COLUMNS, check_names, listed, numbered
from quire.errors import DataError, nearest
from quire.files import is_bomb
from quire.options import Rows as RowOptions
from quire.options import Table as TableOptions

STRETCH = 2**16
"""Most rows that stay together when the data is split."""
READ_NUMBERS = 2**22
"""Numbers that are read at once: 32 MiB in float64."""


class Rows(Protocol):
    """A file of numbers in rows and columns."""

    path: Path
    columns: tuple[str, ...]
    named: bool

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start … stop − 1, (n, D)."""


class NumpyRows:
    """An .npy file of a plain type, rows first."""

    named = False

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            self.shape, columns_first, self.dtype = read(file)
            self.offset = file.tell()
        plain = self.dtype.kind in "fiub" and not columns_first and len(self.shape) == 2
        if not plain or not 1 <= self.shape[1] <= MOST_COLUMNS:
            raise DataError(
                f"an array of type {self.dtype} and shape {self.shape}" + ", columns first" * columns_first,
                path=path,
                expected="numbers in rows and columns, rows first, in a file that is read in pieces",
                fix="save it with numpy.save(FILE, numpy.ascontiguousarray(array)), or raise --table.memory",
            )
        self.columns = tuple(numbered("column", self.shape[1]))
        needed = self.offset + len(self) * self.shape[1] * self.dtype.itemsize
        if path.stat().st_size < needed:
            raise DataError(
                f"{path.stat().st_size} bytes", path=path, expected=f"{needed}, as the header says",
                fix="copy the file again: it was cut off",
            )  # fmt: skip

    def __len__(self) -> int:
        return int(self.shape[0])

    def read(self, start: int, stop: int) -> np.ndarray:
        width = self.shape[1]
        place = self.offset + start * width * self.dtype.itemsize
        found = np.fromfile(self.path, self.dtype, (stop - start) * width, offset=place)
        return found.reshape(-1, width)


class ParquetRows:
    """The numeric columns of a Parquet file."""

    named = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = parquet.ParquetFile(path.absolute())
        schema = self.file.schema_arrow
        check_names(schema.names, str(path))  # columns are read by their names
        self.columns = tuple(
            field.name
            for field in schema
            if pa.types.is_integer(field.type)
            or pa.types.is_floating(field.type)
            or pa.types.is_boolean(field.type)
        )
        self.left_out = [field.name for field in schema if field.name not in self.columns]
        if not self.columns:
            raise DataError("no column of numbers", path=path, expected="numbers in rows and columns")
        counts = [self.file.metadata.row_group(i).num_rows for i in range(self.file.num_row_groups)]
        check_groups(counts, self.file.metadata.num_rows)
        if is_bomb(path, max(counts, default=0) * len(self.columns) * 8):
            raise DataError(
                f"{max(counts)} rows of {len(self.columns)} numbers in a group of rows", path=path,
                expected="groups of rows that fit in memory", fix="write it again with smaller groups",
            )  # fmt: skip
        self.ends = list(itertools.accumulate(counts))
        self._kept: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        parts = [np.empty((0, len(self.columns)))] if start >= stop else []
        while start < stop:
            group = bisect.bisect_right(self.ends, start)
            first = self.ends[group - 1] if group else 0
            end = min(stop, self.ends[group])
            parts.append(self._group(group)[start - first : end - first])
            start = end
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def _group(self, number: int) -> np.ndarray:
        """A row group; the last one is kept, as the next rows are likely in it."""
        if self._kept is None or self._kept[0] != number:
            try:
                table = self.file.read_row_group(number, columns=list(self.columns), use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise _unreadable(self.path, error) from None
            columns = [column.to_numpy().astype(np.float64) for column in table.columns]
            self._kept = (number, np.stack(columns, 1))
        return self._kept[1]


class Chosen:
    """Some columns of a file, in an order of their own."""

    def __init__(self, rows: Rows, names: Sequence[str]) -> None:
        self.rows, self.path, self.named = rows, rows.path, rows.named
        self.columns = tuple(names)
        self.places = [rows.columns.index(name) for name in names]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.rows.read(start, stop)[:, self.places]


def open_rows(path: Path) -> Rows:
    require_plain(path)
    try:
        return ParquetRows(path) if path.suffix.lower() in (".parquet", ".pq") else NumpyRows(path)
    except DataError:
        raise
    except Exception as error:  # Arrow's and NumPy's readers fail in as many ways as a header can lie
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"a file that cannot be read ({reason})", path=path, fix="copy the file again")


def is_large(path: Path | str, options: RowOptions) -> bool:
    """Whether a file has to be read in pieces."""
    path = Path(path)
    known = path.suffix.lower() in (".npy", ".parquet", ".pq")
    return known and path.is_file() and path.stat().st_size > options.memory * 2**30


class StreamedRows:
    """Stretches of a file as prepared inputs; a `Data`."""

    def __init__(
        self, rows: Rows, stretches: Sequence[tuple[int, int]], center: np.ndarray, scale: np.ndarray
    ) -> None:
        self.source, self.stretches = rows, list(stretches)
        self.center, self.scale = center, scale
        self.ends = list(itertools.accumulate(stop - start for start, stop in self.stretches))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def row_size(self) -> int:
        return len(self.source.columns)

    def to(self, device: torch.device | str) -> StreamedRows:
        """Batches go to the device, the file stays where it is."""
        return self

    def take(self, rows: Tensor) -> Batch:
        wanted = rows.tolist()
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        found = np.empty((len(wanted), self.row_size), np.float32)
        for run in _runs([wanted[i] for i in order]):
            places = order[run.start : run.stop]
            first = wanted[places[0]]
            found[places] = self._read(first, first + len(places))
        return Batch({"inputs": torch.from_numpy(found)}, rows)

    def subset(self, rows: Tensor) -> TensorData:
        return TensorData(dict(self.take(rows).fields))

    def batches(self, rows: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """The next batch is read while the last one is used."""
        parts = torch.split(rows, batch_size)[start:]
        with ThreadPoolExecutor(1) as reader:
            waiting = [reader.submit(self._batch, part) for part in parts[:1]]
            for following in [*parts[1:], None]:
                batch = waiting.pop().result()
                if following is not None:
                    waiting.append(reader.submit(self._batch, following))
                yield batch

    def _batch(self, rows: Tensor) -> Batch:
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows) and bool((rows.diff() == 1).all()):
            return Batch({"inputs": torch.from_numpy(self._read(first, last + 1))}, rows)
        return self.take(rows)

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Rows start … stop − 1 of this part as stretches of the file."""
        number = bisect.bisect_right(self.ends, start)
        while start < stop:
            before = self.ends[number - 1] if number else 0
            end = min(stop, self.ends[number])
            offset = self.stretches[number][0] - before
            yield start + offset, end + offset
            start, number = end, number + 1

    def _read(self, start: int, stop: int) -> np.ndarray:
        parts = [self._prepare(a, b) for a, b in self.places(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _prepare(self, start: int, stop: int) -> np.ndarray:
        found = self.source.read(start, stop)
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            row, column = np.argwhere(~np.isfinite(found))[0]
            raise DataError(
                str(found[row, column]),
                path=self.source.path,
                line=start + int(row) + 1,
                column=self.source.columns[int(column)],
                expected="finite numbers in a file that is read in pieces",
                fix="fill in missing values first",
            )
        return ((found - self.center) / self.scale).astype(np.float32)


def _runs(ascending: Sequence[int]) -> Iterator[range]:
    """Positions of numbers that follow each other by one."""
    begin = 0
    for i in range(1, len(ascending) + 1):
        if i == len(ascending) or ascending[i] != ascending[i - 1] + 1:
            yield range(begin, i)
            begin = i


@dataclass(frozen=True, eq=False)
class StreamedData:
    """A file of numbers, split and scaled."""

    source: str
    preparation: Preparation
    train: StreamedRows
    validation: StreamedRows | None
    test: StreamedRows | None

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.preparation.warnings

    def lines(self, split: Split) -> np.ndarray:
        """The row in the file of each row of a part, from 1."""
        part = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        if part is None:
            return np.empty(0, np.int64)
        return np.concatenate([np.arange(start + 1, stop + 1) for start, stop in part.stretches])


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """A file of numbers, scaled as in training."""

    data: StreamedRows
    lines: range
    notes: tuple[str, ...] = ()


def load_streamed(path: Path, options: TableOptions, seed: int = 0) -> StreamedData:
    """Split a file into stretches and scale it by mean and deviation of its training rows, which takes one
    reading of the file."""
    rows = open_rows(path)
    left_out, everything = getattr(rows, "left_out", []), rows.columns
    rows = _without_dropped(rows, left_out, options)
    size = max(1, min(STRETCH, len(rows) // 100))
    stretches = [(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    parts = split_rows(len(stretches), options.validation, options.test, seed)
    width = len(rows.columns)
    plain = [
        StreamedRows(rows, [stretches[i] for i in part.tolist()], np.zeros(width), np.ones(width))
        for part in parts
    ]
    center, scale = _mean_and_deviation(plain[0])
    left_out = [name for name in left_out if name not in options.drop]
    notes = [f"columns that are no numbers are left out: {', '.join(left_out[:10])}"] if left_out else []
    constant = [name for name, value in zip(rows.columns, scale, strict=True) if value == 0]
    if constant:
        notes.append(f"the same value in all training rows of {', '.join(constant[:10])}")
    scale = np.where(scale == 0, 1.0, scale)
    preparation = Preparation(
        tuple(
            Input(name, everything.index(name), "number", missing=False, fill=float(center[i]),
                  center=float(center[i]), scale=float(scale[i]))
            for i, name in enumerate(rows.columns)
        ),
        (), everything, rows.named, "refuse", tuple(notes),
    )  # fmt: skip
    train, validation, test = (
        StreamedRows(rows, part.stretches, center, scale) if len(part) else None for part in plain
    )
    assert train is not None
    return StreamedData(str(path), preparation, train, validation, test)


def _without_dropped(rows: Rows, left_out: Sequence[str], options: TableOptions) -> Rows:
    """The columns that are not dropped; a name that means no column is refused, as are categories."""
    known = [*rows.columns, *left_out]
    for name in options.drop:
        if name not in known:
            raise DataError(
                f"missing column {name!r}, named by --table.drop", path=rows.path,
                expected=f"one of {listed(known, 30)}", fix=nearest(name, known) or "check the name",
            )  # fmt: skip
    if options.categories:
        raise DataError(
            f"--table.categories {options.categories[0]} for a file that is read in pieces", path=rows.path,
            expected="columns of numbers", fix="raise --table.memory, or leave the option out",
        )  # fmt: skip
    kept = [name for name in rows.columns if name not in options.drop]
    if not kept:
        raise DataError(
            "all columns of numbers are dropped", path=rows.path, expected="at least one to learn from"
        )
    return rows if len(kept) == len(rows.columns) else Chosen(rows, kept)


def scaled_rows(path: Path, preparation: Preparation) -> PreparedRows:
    """All of a large file, with the scales of training."""
    rows = open_rows(path)
    wanted = [column.name for column in preparation.inputs]
    as_wide = rows.named or len(rows.columns) == len(preparation.columns)
    if as_wide and set(wanted) <= set(rows.columns):
        rows = rows if list(rows.columns) == wanted else Chosen(rows, wanted)
    else:
        raise DataError(
            f"{len(rows.columns)} columns of numbers, {', '.join(rows.columns[:4])} …", path=path,
            expected=f"the {len(wanted)} of training: {', '.join(wanted[:4])} …",
        )  # fmt: skip
    center = np.array([column.center for column in preparation.inputs])
    scale = np.array([column.scale for column in preparation.inputs])
    whole = StreamedRows(rows, [(0, len(rows))], center, scale)
    return PreparedRows(whole, range(1, len(rows) + 1))


def _mean_and_deviation(part: StreamedRows) -> tuple[np.ndarray, np.ndarray]:
    """By columns, in float64, about the first rows' mean so that large offsets do no harm."""
    count, shift = 0, np.zeros(part.row_size)
    total = squares = np.zeros(part.row_size)
    step = max(1, READ_NUMBERS // max(part.row_size, 1))
    for start in range(0, len(part), step):
        stop = min(start + step, len(part))
        for a, b in part.places(start, stop):
            found = part.source.read(a, b).astype(np.float64)
            if not count:
                shift = np.nan_to_num(found, posinf=0.0, neginf=0.0).mean(0)
            count += len(found)
            found -= shift
            total = total + found.sum(0)
            squares = squares + np.einsum("nd,nd->d", found, found)
    mean = total / count
    variance = np.maximum(squares / count - mean**2, 0.0)
    # What is left of a constant column is rounding.
    variance = np.where(variance < 1e-12 * (squares / count + 1e-300), 0.0, variance)
    return shift + mean, np.sqrt(variance)
