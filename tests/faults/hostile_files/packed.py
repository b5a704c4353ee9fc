"""Files that are small until they are read."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.faults import bombs
from tests.faults.hostile_files.case import Case, image, lay


def packed() -> Iterator[Case]:
    for make in (bombs.texts, bombs.categories, bombs.nothing, bombs.lists):
        yield Case(f"table.parquet of {make.__name__}", "table", partial(_alone, make))
    jpeg = image("bomb.jpg", partial(bombs.progressive_jpeg, 9_000))
    yield Case("JPEG of 81 million pixels, progressive", "images", jpeg)
    yield Case("weights.pt of packed tensors", "weights", lay("weights.pt", bombs.packed_tensor))
    yield Case("weights.pt of a terabyte by its strides", "weights", lay("weights.pt", bombs.shared_tensor))
    most = bombs.UNPACKED
    yield Case(
        "table.npz within bounds",
        "table",
        lay("table.npz", bombs.packed_array),
        False,
        most,
        ("train", "read_table"),
    )
    yield Case("IDX in gzip within bounds", "images", _with_classes, False, most)
    yield Case("PNG within bounds", "images", image("large.png", bombs.packed_png), False, most)


def _alone(make: Callable[[Path], Path], folder: Path, _: Path) -> Path:
    return make(folder)


def _with_classes(folder: Path, runs: Path) -> Path:
    labels = bytes([0, 0, 8, 1]) + struct.pack(">I", bombs.PACKED_IMAGES)
    labels += bytes(number % 2 for number in range(bombs.PACKED_IMAGES))
    lay("set/train-labels-idx1-ubyte", labels)(folder, runs)
    return lay("set/train-images-idx3-ubyte.gz", bombs.packed_idx)(folder, runs).parent
