"""Images as they were found, before anything is decoded: where their pixels are, what they show.

N images, M annotated objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from PIL import Image

from quire.data.columns import Labels
from quire.data.images.decode import Header, Shape, decode, read_header, to_channels, to_shape
from quire.options import Images

Form = Literal["pixels from 1", "corner and sides", "corners"]
"""Pascal VOC: x₁, y₁, x₂, y₂ of the first and last pixel, counted from 1. COCO: x, y, width, height. Both
become corners x₁, y₁, x₂, y₂ counted from 0, the second of which is no part of the box."""

FEW = 3
"""Places that a message names before it says how many more there are."""


class Pixels(Protocol):
    """N images that can be read one by one, from any thread."""

    def __len__(self) -> int: ...

    def header(self, row: int) -> Header: ...

    def read(self, row: int, shape: Shape) -> np.ndarray:
        """(C, H, W) uint8; a DataError that names the file where it is broken."""

    def whole(self, shape: Shape) -> np.ndarray | None:
        """All of them, (N, C, H, W), where they lie in memory in this shape."""

    def take(self, rows: np.ndarray) -> Pixels: ...


@dataclass(frozen=True, eq=False)
class Files:
    """A file for each image."""

    paths: np.ndarray
    """(N,) of str, which takes a fraction of the memory of Path."""
    most_pixels: int
    upright: np.ndarray
    """(N,) whether the orientation noted by the camera is applied."""

    def __len__(self) -> int:
        return len(self.paths)

    def header(self, row: int) -> Header:
        return read_header(Path(self.paths[row]), self.most_pixels)

    def read(self, row: int, shape: Shape) -> np.ndarray:
        return decode(Path(self.paths[row]), shape, self.most_pixels, upright=bool(self.upright[row]))

    def whole(self, shape: Shape) -> None:
        return None

    def take(self, rows: np.ndarray) -> Files:
        return replace(self, paths=self.paths[rows], upright=self.upright[rows])


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images of one size that lie in memory."""

    pixels: np.ndarray
    """(N, C, H, W) uint8."""

    def __len__(self) -> int:
        return len(self.pixels)

    def header(self, row: int) -> Header:
        _, channels, height, width = self.pixels.shape
        return Header(width, height, grey=channels == 1)

    def read(self, row: int, shape: Shape) -> np.ndarray:
        pixels = self.pixels[row]
        if pixels.shape == shape.dimensions:
            return pixels
        image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
        return to_shape(to_channels(image, shape.channels, f"image {row}"), shape)

    def whole(self, shape: Shape) -> np.ndarray | None:
        return self.pixels if self.pixels.shape[1:] == shape.dimensions else None

    def take(self, rows: np.ndarray) -> Arrays:
        return Arrays(self.pixels[rows])


@dataclass(frozen=True, eq=False)
class Objects:
    """The boxes of all images one after the other, as they are written."""

    image: np.ndarray
    """(M,) int64, the image that each stands in."""
    written: np.ndarray
    """(M, 4) float64, the four numbers of the file, NaN where one is missing or no number."""
    form: Form
    code: np.ndarray
    """(M,) int64 among the source's labels, -1 where the class is not known."""
    crowd: np.ndarray
    """(M,) bool."""
    number: np.ndarray
    """(M,) int64: the line of the annotation file, or the annotation's id."""
    number_is: Literal["", " annotation "]
    files: tuple[str, ...]
    """(N,) the annotation file of each image."""
    annotated: np.ndarray
    """(N,) bool, False for an image whose annotation file is missing."""
    stated: np.ndarray
    """(N, 2) int64 width and height that the annotations say an image has, 0 where they say nothing."""

    def __len__(self) -> int:
        return len(self.image)

    def place(self, row: int) -> str:
        """Where a box is written."""
        return f"{self.files[self.image[row]]}:{self.number_is}{self.number[row]}"

    def keep(self, mask: np.ndarray) -> Objects:
        """The objects where `mask` (M,) is true."""
        return replace(
            self,
            image=self.image[mask],
            written=self.written[mask],
            code=self.code[mask],
            crowd=self.crowd[mask],
            number=self.number[mask],
        )

    def take(self, rows: np.ndarray) -> Objects:
        """The objects of the given images, which are numbered anew in that order."""
        new = np.full(len(self.annotated), -1)
        new[rows] = np.arange(len(rows))
        kept = self.keep(new[self.image] >= 0)
        files = tuple(self.files[row] for row in rows)
        image = new[kept.image]
        order = np.argsort(image, kind="stable")
        kept = replace(kept, image=image).keep(order)
        return replace(kept, files=files, annotated=self.annotated[rows], stated=self.stated[rows])


@dataclass(frozen=True, eq=False)
class ImageSource:
    """N images with what is known of each."""

    source: str
    """The path, or what messages call a set that came from none."""
    pixels: Pixels
    names: np.ndarray
    """(N,) of str: the path below the source, or the file and the image's number in it from 1."""
    options: Images
    labels: Labels | None = None
    codes: np.ndarray | None = None
    """(N,) int64 among the labels; None where images have no class."""
    parts: np.ndarray | None = None
    """(N,) "train", "validation" or "test" where the data says so itself."""
    objects: Objects | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: np.ndarray) -> ImageSource:
        return replace(
            self,
            pixels=self.pixels.take(rows),
            names=self.names[rows],
            codes=None if self.codes is None else self.codes[rows],
            parts=None if self.parts is None else self.parts[rows],
            objects=None if self.objects is None else self.objects.take(rows),
        )

    def noting(self, *notes: str) -> ImageSource:
        return replace(self, notes=(*self.notes, *notes))


def files(paths: Sequence[Path], options: Images) -> Files:
    return Files(object_array([str(path) for path in paths]), options.most_pixels, np.ones(len(paths), bool))


def object_array(values: Sequence[object]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def some(places: Sequence[object]) -> str:
    """The first few, and how many there are besides."""
    shown = "; ".join(str(place) for place in places[:FEW])
    return shown + (f"; and {len(places) - FEW} more" if len(places) > FEW else "")


def counted(count: int, noun: str) -> str:
    """ "1 box", "2 boxes"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('x') else 's'}"


def is_dir(path: Path) -> bool:
    """Whether it is a folder that is not hidden."""
    return path.is_dir() and not path.name.startswith(".")
