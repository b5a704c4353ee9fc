"""Batches, and data that lies on the device as whole tensors.

N rows of a data set, B rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.errors import InputError

# Rows are gathered for many batches at once: one large copy instead of many small ones,
# bounded so that a shuffled epoch never doubles the memory that a large set needs.
GATHER_BYTES = 64 * 2**20
SWEEP_NUMBERS = 2**22
"""Inputs that a sweep over a file reads at once."""
ORDER_NUMBERS = 2**20
"""Row numbers that are made at a time."""


def field(fields: Mapping[str, Tensor], name: str) -> Tensor:
    try:
        return fields[name]
    except KeyError:
        raise InputError(
            f"data with the fields {', '.join(fields)}",
            expected=f"also the field '{name}'",
            fix='for rows with answers: TensorData({"inputs": x, "target": y})',
        ) from None


def as_tensor(name: str, values: Tensor | np.ndarray) -> Tensor:
    if isinstance(values, Tensor):
        return values
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the field '{name}' is a {type(values).__name__} that is no array of numbers ({error})",
            expected="a tensor, or a NumPy array of numbers",
            fix="texts and dates are read by quire.data.load_table",
        ) from None


class Whole:
    """Tensors that many batches are cut out of."""

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        self.fields = fields
        self.size = len(next(iter(fields.values())))
        self.kind = tuple((name, value.shape[1:], value.dtype) for name, value in fields.items())


@dataclass(frozen=True, slots=True)
class Batch:
    """Named tensors with the same first dimension B, and where their rows stand in the data set."""

    fields: Mapping[str, Tensor]
    rows: Tensor
    complete: bool = False
    """True where it is known that no target is ignored, so that nothing has to be counted."""
    whole: Whole | None = None
    """What the rows were cut out of, one after the other from the row `first` on, if it is known."""
    first: int = 0

    @property
    def inputs(self) -> Tensor:
        return field(self.fields, "inputs")

    @property
    def target(self) -> Tensor:
        return field(self.fields, "target")

    def __len__(self) -> int:
        return self.rows.size(0)  # len(rows) would run Python of PyTorch's, for a microsecond

    def replace(self, **fields: Tensor) -> Batch:
        return Batch(
            {**self.fields, **fields},
            self.rows,
            self.complete and not any(n.startswith("target") for n in fields),
        )

    def to(self, device: torch.device) -> Batch:
        if self.inputs.device == device:
            return self
        fields = {name: value.to(device, non_blocking=True) for name, value in self.fields.items()}
        return Batch(fields, self.rows, self.complete)

    def split(self, parts: int) -> list[Batch]:
        """At most `parts` micro-batches whose sizes differ by at most one."""
        if parts == 1 or len(self) <= 1:
            return [self]
        sizes = [len(piece) for piece in torch.tensor_split(self.rows, min(parts, len(self)))]
        pieces = {name: torch.split(value, sizes) for name, value in self.fields.items()}
        rows = torch.split(self.rows, sizes)
        return [
            Batch({name: pieces[name][i] for name in pieces}, rows[i], self.complete)
            for i in range(len(sizes))
        ]


class Data(Protocol):
    """What the trainer needs of a data set."""

    def __len__(self) -> int: ...

    @property
    def row_size(self) -> int:
        """Input numbers of one row."""

    def take(self, rows: Tensor) -> Batch: ...

    def subset(self, rows: Tensor) -> Data: ...

    def to(self, device: torch.device | str) -> Data: ...

    def batches(self, rows: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Batches of the row numbers `rows`, in that order, without the first `start` batches."""


class TensorData:
    """A data set held as whole tensors on one device; no Python runs per sample. Arrays become tensors."""

    def __init__(self, fields: Mapping[str, Tensor | np.ndarray]) -> None:
        if not fields:
            raise InputError("a data set without any tensor", expected="at least the field 'inputs'")
        self.fields = {name: as_tensor(name, value) for name, value in fields.items()}
        lengths = {name: len(value) for name, value in self.fields.items()}
        if len(set(lengths.values())) != 1:
            raise InputError(
                f"tensors of different lengths: {lengths}",
                expected="the same number of rows in each",
                fix="drop the rows that have no partner",
            )

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    @property
    def inputs(self) -> Tensor:
        return field(self.fields, "inputs")

    @property
    def target(self) -> Tensor:
        return field(self.fields, "target")

    @property
    def row_size(self) -> int:
        return self.inputs[:1].numel()

    @property
    def device(self) -> torch.device:
        return next(iter(self.fields.values())).device

    @cached_property
    def numbers(self) -> Tensor:
        """Of all rows, in their order. On the CPU NumPy's: PyTorch would wake its threads for them."""
        if self.device.type != "cpu":
            return torch.arange(len(self), device=self.device)
        return torch.from_numpy(np.arange(len(self)))

    @cached_property
    def complete(self) -> bool:
        """Whether every class number is one: ignored targets are negative."""
        targets = [value for name, value in self.fields.items() if name.startswith("target")]
        return not any(bool((t < 0).any()) for t in targets if not t.is_floating_point())

    def to(self, device: torch.device | str) -> TensorData:
        return TensorData({name: value.to(device) for name, value in self.fields.items()})

    def take(self, rows: Tensor) -> Batch:
        return self._take(rows, rows.to(self.device))

    def _take(self, rows: Tensor, where: Tensor) -> Batch:
        """`where` is `rows` on the device of the data."""
        return Batch({name: value[where] for name, value in self.fields.items()}, rows, self.complete)

    def subset(self, rows: Tensor) -> TensorData:
        return TensorData(dict(self.take(rows).fields))

    def batches(self, rows: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        bytes_per_row = sum(value[:1].nbytes for value in self.fields.values()) or 1
        batches_at_once = max(1, GATHER_BYTES // (bytes_per_row * batch_size))
        size = batches_at_once * batch_size
        # All of the order goes to the device at once, from pinned memory: a GPU that has to be waited for
        # at each batch would run dry.
        pinned = rows.pin_memory() if self.device.type == "cuda" and not rows.is_cuda else rows
        places = pinned.to(self.device, non_blocking=True)
        for chunk, where in zip(torch.split(rows, size), torch.split(places, size), strict=True):
            parts = torch.split(chunk, batch_size)
            if start >= len(parts):
                start -= len(parts)
                continue
            # The chunk is gathered whole even if some of it is skipped: a batch then lies at the same
            # alignment in memory as without skipping, and its products round alike.
            gathered = self._take(chunk, where)
            whole = Whole(gathered.fields)
            pieces = {name: torch.split(value, batch_size) for name, value in gathered.fields.items()}
            for i in range(start, len(parts)):
                fields = {name: pieces[name][i] for name in pieces}
                yield Batch(fields, parts[i], self.complete, whole, i * batch_size)
            start = 0


def in_order(data: Data, numbers: int = SWEEP_NUMBERS) -> Iterator[Batch]:
    """All rows in their order: what lies in memory as one batch that copies nothing, anything else in batches
    of about `numbers` inputs."""
    if isinstance(data, TensorData):
        yield Batch(data.fields, data.numbers, data.complete)
        return
    yield from ordered(data, max(1, numbers // max(data.row_size, 1)))


def ordered(data: Data, batch_size: int, rows: int | None = None) -> Iterator[Batch]:
    """Batches of all rows, or of the first `rows`, in their order; their numbers are made as they are needed,
    since those of a large file alone would fill a memory."""
    count = len(data) if rows is None else min(rows, len(data))
    step = batch_size * max(1, ORDER_NUMBERS // batch_size)
    for start in range(0, count, step):
        yield from data.batches(torch.arange(start, min(start + step, count)), batch_size)


def as_judged(data: Data) -> Data:
    """What a whole part is judged on: a text in windows side by side, where it is learned from windows that
    start at each of its tokens."""
    judged = getattr(data, "judged", None)
    return data if judged is None else judged()


def steps_per_epoch(rows: int, batch_size: int) -> int:
    """Batches in which all rows are seen once; 0 takes them all at once."""
    return math.ceil(rows / (batch_size or rows))


def epoch_order(n: int, seed: int, epoch: int, *, shuffle: bool = True) -> Tensor:
    """The order of `n` rows in one epoch: a pure function of (seed, epoch), so a position in the
    data is two integers and resuming needs no replay."""
    if not shuffle:
        return torch.arange(n)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(n, generator=generator)
