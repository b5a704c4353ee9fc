"""From images to batches: decoded once into one tensor where they fit in memory, ahead of use otherwise.

N images of a set, B of a batch; C, H, W channels, rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.data.batch import Batch, Data, TensorData
from quire.data.images.decode import Shape
from quire.data.images.parallel import count_workers, ordered
from quire.data.images.source import Pixels
from quire.errors import DataError
from quire.options import Images

AHEAD = 2
"""Batches that are decoded before they are asked for."""
PIECE = 8
"""Images that a thread decodes at a time, at most."""

Progress = Callable[[int, int], None]
"""Called with the number of images done and of all."""


class Piece(NamedTuple):
    """Rows of the set to decode into a place of their own."""

    rows: Tensor
    into: Tensor
    """(rows, C, H, W)."""
    last: bool
    """Of its batch."""
    batch: tuple[Tensor, Tensor]
    """All rows of the batch, and its pixels (B, C, H, W)."""


class ImageStream:
    """A data set whose pixels are decoded batch by batch, by threads, a few batches ahead, in order.
    Everything else of it lies in memory."""

    def __init__(
        self,
        pixels: Pixels,
        fields: Mapping[str, Tensor],
        shape: Shape,
        workers: int = 0,
        *,
        pinned: bool = False,
    ) -> None:
        self.pixels, self.fields, self.shape = pixels, dict(fields), shape
        self.workers, self.pinned = count_workers(workers), pinned
        whole = [t for name, t in fields.items() if name.startswith("target") and not t.is_floating_point()]
        self.complete = not any(bool((t < 0).any()) for t in whole)

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def target(self) -> Tensor:
        return self.fields["target"]

    @property
    def row_size(self) -> int:
        return self.shape.numbers

    def to(self, device: torch.device | str) -> ImageStream:
        """Batches stay on the CPU; for a GPU in pinned memory, from which copies are not waited for."""
        pinned = torch.device(device).type == "cuda"
        return ImageStream(self.pixels, self.fields, self.shape, self.workers, pinned=pinned)

    def subset(self, rows: Tensor) -> ImageStream:
        rows = rows.cpu()
        fields = {name: value[rows] for name, value in self.fields.items()}
        pixels = self.pixels.take(rows.numpy())
        return ImageStream(pixels, fields, self.shape, self.workers, pinned=self.pinned)

    def take(self, rows: Tensor) -> Batch:
        rows = rows.cpu()
        if not len(rows):
            return self._batch(rows, self._empty(0))
        return next(self.batches(rows, len(rows)))

    def batches(self, rows: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        parts = torch.split(rows.cpu(), batch_size)[start:] if len(rows) else ()
        size = max(1, min(PIECE, batch_size // self.workers))
        ahead = max(AHEAD * -(-batch_size // size), self.workers + 1)
        with closing(ordered(self._decode, self._pieces(parts, size), self.workers, ahead)) as pieces:
            for piece in pieces:
                if piece.last:
                    yield self._batch(*piece.batch)

    def _pieces(self, parts: tuple[Tensor, ...], size: int) -> Iterator[Piece]:
        for part in parts:
            pixels = self._empty(len(part))
            rows, places = part.split(size), pixels.split(size)
            for i in range(len(rows)):
                yield Piece(rows[i], places[i], i == len(rows) - 1, (part, pixels))

    def _decode(self, piece: Piece) -> Piece:
        into = piece.into.numpy()
        for place, row in enumerate(piece.rows.tolist()):
            into[place] = self.pixels.read(row, self.shape)
        return piece

    def _empty(self, count: int) -> Tensor:
        return torch.empty((count, *self.shape.dimensions), dtype=torch.uint8, pin_memory=self.pinned)

    def _batch(self, rows: Tensor, pixels: Tensor) -> Batch:
        others = {name: value[rows] for name, value in self.fields.items()}
        if self.pinned:
            others = {name: value.pin_memory() for name, value in others.items()}
        return Batch({"inputs": pixels, **others}, rows, self.complete)


class Gathered(NamedTuple):
    """Data, and what of it could not be decoded and was left out."""

    data: Data
    kept: np.ndarray
    """Rows of the images that are left, ascending."""
    errors: list[DataError]


def fits(count: int, shape: Shape, options: Images) -> bool:
    """Whether so many images may be kept in memory."""
    return count * shape.numbers <= options.memory * 2**30


def gather(
    pixels: Pixels,
    fields: Mapping[str, Tensor],
    shape: Shape,
    options: Images,
    *,
    in_memory: bool,
    progress: Progress | None = None,
) -> Gathered:
    """Tensors in memory or a stream. What cannot be decoded is an error, or left out by the option; a
    stream is then decoded once for nothing, because an epoch cannot lose rows on the way."""
    every = np.arange(len(pixels))
    whole = pixels.whole(shape) if in_memory else None
    if whole is not None:
        ready = torch.from_numpy(whole if whole.flags.writeable else whole.copy())
        return Gathered(TensorData({"inputs": ready, **fields}), every, [])
    count = len(pixels) if in_memory else 0
    images = torch.empty((count, *shape.dimensions), dtype=torch.uint8)
    errors: dict[int, DataError] = {}
    if in_memory or options.broken == "skip":
        errors = _decode_all(pixels, shape, options, images.numpy() if in_memory else None, progress)
    kept = np.setdiff1d(every, list(errors))
    if errors:
        rows = torch.from_numpy(kept)
        fields = {name: value[rows] for name, value in fields.items()}
        images = images[rows] if in_memory else images
        pixels = pixels.take(kept)
    broken = list(errors.values())
    if in_memory:
        return Gathered(TensorData({"inputs": images, **fields}), kept, broken)
    return Gathered(ImageStream(pixels, fields, shape, options.workers), kept, broken)


def _decode_all(
    pixels: Pixels, shape: Shape, options: Images, into: np.ndarray | None, progress: Progress | None
) -> dict[int, DataError]:
    """Decode every image into its place; the errors by row, where the option leaves broken images out."""

    def decode(rows: range) -> tuple[int, dict[int, DataError]]:
        errors = {}
        for row in rows:
            try:
                image = pixels.read(row, shape)
            except DataError as error:
                if options.broken == "refuse":
                    raise
                errors[row] = error
                continue
            if into is not None:
                into[row] = image
        return rows.stop, errors

    workers = count_workers(options.workers)
    pieces = (range(low, min(low + PIECE, len(pixels))) for low in range(0, len(pixels), PIECE))
    found: dict[int, DataError] = {}
    with closing(ordered(decode, pieces, workers, 4 * workers)) as decoded:
        for done, errors in decoded:
            found |= errors
            if progress is not None:
                progress(done, len(pixels))
    return found
