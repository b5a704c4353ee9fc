"""The headers of all images: what can be known of a set before anything is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from quire.data.images.decode import Header, Shape
from quire.data.images.parallel import count_workers, ordered
from quire.data.images.source import Arrays, ImageSource, counted, some
from quire.errors import DataError
from quire.options import Images

LARGEST = 224
"""Side in pixels that images are brought to where they differ in size or are larger."""


@dataclass(frozen=True, eq=False)
class Survey:
    """N images with their sizes, width and height."""

    source: ImageSource
    raw: np.ndarray
    """(N, 2) int64, as stored in the files."""
    size: np.ndarray
    """(N, 2) int64, as the images are used: upright, or as their boxes are measured."""
    grey: np.ndarray
    """(N,) bool."""

    def take(self, rows: np.ndarray) -> Survey:
        return Survey(self.source.take(rows), self.raw[rows], self.size[rows], self.grey[rows])

    def noting(self, *notes: str) -> Survey:
        return replace(self, source=self.source.noting(*notes))


def survey(source: ImageSource) -> Survey:
    """Read every header. A file that is no image or too large is an error, or left out by the option."""
    pixels = source.pixels
    if isinstance(pixels, Arrays):
        header = pixels.header(0)
        size = np.tile(np.array(header.size, np.int64), (len(pixels), 1))
        return Survey(source, size, size, np.full(len(pixels), header.grey))
    headers = _read_headers(source)
    kept = [row for row, header in enumerate(headers) if isinstance(header, Header)]
    errors = [header for header in headers if isinstance(header, DataError)]
    if not kept:
        raise DataError(
            f"none of {len(headers)} images can be used: {some([error.got for error in errors])}",
            path=source.source, expected="at least one",
        )  # fmt: skip
    if errors:
        source = source.take(np.array(kept)).noting(broken_note(errors, len(headers)))
    good = [header for header in headers if isinstance(header, Header)]
    raw = np.array([header.size for header in good], np.int64)
    size = np.array([header.upright_size for header in good], np.int64)
    return Survey(source, raw, size, np.array([header.grey for header in good]))


def _read_headers(source: ImageSource) -> list[Header | DataError]:
    def look(row: int) -> Header | DataError:
        try:
            return source.pixels.header(row)
        except DataError as error:
            if source.options.broken == "refuse":
                raise
            return error

    workers = count_workers(source.options.workers)
    with closing(ordered(look, range(len(source)), workers, 8 * workers)) as headers:
        return list(headers)


def broken_note(errors: Sequence[DataError], total: int) -> str:
    reasons = some([error.got for error in errors])
    return f"{len(errors)} of {counted(total, 'image')} unusable, left out: {reasons}"


def resized_note(survey: Survey, shape: Shape) -> list[str]:
    """A word on images that are brought to another size without having been asked to."""
    low, high = survey.size.min(0), survey.size.max(0)
    if (low == (shape.width, shape.height)).all() and (low == high).all():
        return []
    found = f"{low[0]} × {low[1]}" + ("" if (low == high).all() else f" to {high[0]} × {high[1]}")
    said = f"{shape.width} × {shape.height}; --images.size and --images.fit say otherwise"
    return [f"images of {found} pixels are brought to {said}"]


def choose_shape(survey: Survey, options: Images, largest: int = LARGEST) -> Shape:
    """The shape that the options ask for; without them the size and colours that all images share, and
    `largest` where they differ or are larger."""
    height = width = options.size or largest
    if options.size is None:
        shared = survey.size[0]
        if (survey.size == shared).all() and (shared <= largest).all():
            width, height = int(shared[0]), int(shared[1])
    grey = options.colour == "grey" or (options.colour == "auto" and bool(survey.grey.all()))
    return Shape(height, width, 1 if grey else 3, options.fit)
