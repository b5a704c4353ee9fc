"""MNIST's IDX files, plain or compressed by gzip, and the sets that are named like them.

A file is a magic number (0, 0, type, dimensions), each dimension as 4 bytes with the highest first, and the
values. Images are unsigned bytes in three dimensions, labels in one.
"""

from __future__ import annotations

import gzip
import math
import re
import struct
import zlib
from pathlib import Path

import numpy as np

from quire.data.columns import Labels
from quire.data.images.source import Arrays, ImageSource, object_array
from quire.data.opening import opened
from quire.errors import DataError
from quire.files import is_bomb
from quire.options import Images

IMAGES_NAME = re.compile(r"(?P<set>.*?)(?P<part>train|t10k|test)-images[-.]idx3-ubyte(\.gz)?", re.IGNORECASE)
UNSIGNED_BYTES = 0x08
CHUNK = 2**20


def is_idx(path: Path) -> bool:
    """Whether a file is named or begins like one of images."""
    if IMAGES_NAME.fullmatch(path.name):
        return True
    with opened(path) as file:
        return file.read(4) == bytes([0, 0, UNSIGNED_BYTES, 3])


def find_images(folder: Path) -> list[Path]:
    """The files of images in a folder, one for each part; a plain file before its compressed twin."""
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.iterdir(), key=lambda p: (p.suffix == ".gz", p.name)):
        if match := IMAGES_NAME.fullmatch(path.name):
            found.setdefault((match["set"], match["part"].lower()), path)
    return list(found.values())


def read_idx(path: Path, options: Images) -> ImageSource:
    """The set of a folder, t10k being its test part, or the images of one file."""
    paths = find_images(path) if path.is_dir() else [path]
    sets = sorted({match["set"] for p in paths if (match := IMAGES_NAME.fullmatch(p.name))})
    if len(sets) > 1:
        raise DataError(
            f"several sets in one folder: {', '.join(repr(name) for name in sets)}", path=path,
            expected="one training and one test file of images", fix="move each set to a folder of its own",
        )  # fmt: skip
    pixels = [read_array(p, 3) for p in paths]
    if len({images.shape[1:] for images in pixels}) > 1:
        sizes = ", ".join(f"{p.name} {i.shape[2]} × {i.shape[1]}" for p, i in zip(paths, pixels, strict=True))
        raise DataError(f"images of different sizes: {sizes}", path=path, expected="one size in all files")
    codes, labels = _read_labels(paths, pixels)
    names: list[str] = []
    parts: list[str] = []
    for p, images in zip(paths, pixels, strict=True):
        match = IMAGES_NAME.fullmatch(p.name)
        title = re.split(r"[-.]idx3", p.name, flags=re.IGNORECASE)[0]
        names += [f"{title} {row}" for row in range(1, len(images) + 1)]
        parts += ["train" if match and match["part"].lower() == "train" else "test"] * len(images)
    own = np.array(parts) if path.is_dir() else None
    images = (pixels[0] if len(pixels) == 1 else np.concatenate(pixels))[:, None]
    return ImageSource(str(path), Arrays(images), object_array(names), options, labels, codes, own)


def _read_labels(paths: list[Path], pixels: list[np.ndarray]) -> tuple[np.ndarray | None, Labels | None]:
    """Class numbers and classes, None where no file of labels lies beside; for all files or none."""
    beside = [_labels_file(path) for path in paths]
    if all(labels is None for labels in beside):
        return None, None
    found = []
    for path, labels, images in zip(paths, beside, pixels, strict=True):
        if labels is None:
            raise DataError(
                "its labels are missing", path=path,
                expected=f"{_labels_name(path.name)} beside it, plain or with .gz",
            )  # fmt: skip
        values = read_array(labels, 1)
        if len(values) != len(images):
            raise DataError(
                f"{len(values)} labels for the {len(images)} images of {path.name}", path=labels,
                expected="one label for each image",
            )  # fmt: skip
        found.append(values)
    classes, codes = np.unique(np.concatenate(found), return_inverse=True)
    return codes.astype(np.int64), Labels("integer", tuple(int(value) for value in classes))


def _labels_name(images: str) -> str:
    name = re.sub("images", "labels", images, flags=re.IGNORECASE)
    return re.sub(r"idx3", "idx1", name, flags=re.IGNORECASE)


def _labels_file(images: Path) -> Path | None:
    plain = _labels_name(images.name).removesuffix(".gz")
    names = {plain, plain + ".gz", plain.replace("-idx1", ".idx1"), plain.replace("-idx1", ".idx1") + ".gz"}
    names -= {images.name}  # a file whose name says nothing of images
    return next((images.with_name(name) for name in sorted(names) if images.with_name(name).exists()), None)


def read_array(path: Path, dimensions: int) -> np.ndarray:
    """The unsigned bytes of an IDX file; every byte of the file is accounted for."""
    header = 4 + 4 * dimensions
    content = _content(path, header)
    if len(content) < header:
        raise DataError(
            f"the file ends at byte {len(content)}, inside its header", path=path,
            expected=f"an IDX file, whose header has {header} bytes",
        )  # fmt: skip
    magic = bytes([0, 0, UNSIGNED_BYTES, dimensions])
    if content[:4] != magic:
        raise DataError(
            f"it begins with the bytes {content[:4].hex(' ')}", path=path,
            expected=f"{magic.hex(' ')}, an IDX file of unsigned bytes in {dimensions} dimensions",
        )  # fmt: skip
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    size = header + math.prod(shape)
    if path.suffix.lower() == ".gz" and is_bomb(path, size):
        raise DataError(
            f"{' × '.join(map(str, shape))} values in {path.stat().st_size} bytes", path=path,
            expected="values that their file can hold", fix="if you trust it, unpack it first",
        )  # fmt: skip
    content = _content(path, size)
    if len(content) < size:
        raise DataError(
            f"the file ends at byte {len(content)}", path=path,
            expected=f"{size} bytes for {' × '.join(map(str, shape))} values",
            fix="get the file again; it is cut off",
        )  # fmt: skip
    if len(content) > size:
        raise DataError(
            f"more bytes after the last value, from byte {size} on", path=path,
            expected=f"{size} bytes for {' × '.join(map(str, shape))} values",
        )  # fmt: skip
    if not math.prod(shape):
        raise DataError("a file of no values", path=path, expected="at least one")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _content(path: Path, size: int) -> bytes | bytearray:
    """The first `size` bytes, and one more where there are more, of the plain or compressed file."""
    found = bytearray()
    with opened(path) as file:
        if path.suffix.lower() != ".gz":
            return file.read(min(size + 1, path.stat().st_size))
        try:
            with gzip.open(file) as unpacked:
                # Piece by piece, so that a lie in the header costs no more than the file holds.
                while len(found) <= size and (piece := unpacked.read(min(CHUNK, size + 1 - len(found)))):
                    found += piece
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"damaged after byte {len(found)} of its content ({error})", path=path,
                expected="a whole gzip file", fix="get the file again",
            ) from None  # fmt: skip
    return found
