"""CIFAR-10's and CIFAR-100's binary files: records of one or two labels and 3 × 32 × 32 bytes.

CIFAR-10 has one label a record. CIFAR-100 has a coarse and a fine one; the fine one is the class.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.data.columns import Labels
from quire.data.images.source import Arrays, ImageSource, object_array
from quire.data.opening import read_bytes
from quire.errors import DataError
from quire.options import Images

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    train: str
    test: str
    names: str
    labels: int
    """Bytes before the pixels, the last of which is the class."""
    classes: int


CIFAR_10 = Layout("data_batch_*.bin", "test_batch.bin", "batches.meta.txt", labels=1, classes=10)
CIFAR_100 = Layout("train.bin", "test.bin", "fine_label_names.txt", labels=2, classes=100)


def find_layout(path: Path) -> Layout | None:
    """Which of the two a folder or file is named like."""
    for layout in (CIFAR_10, CIFAR_100):
        if path.is_dir():
            if any(path.glob(layout.train)) or (path / layout.test).exists():
                return layout
        elif path.match(layout.train) or path.name == layout.test:
            return layout
    return None


def read_cifar(path: Path, layout: Layout, options: Images) -> ImageSource:
    """The set of a folder with its own test part, or the images of one file."""
    root = path if path.is_dir() else path.parent
    paths = [path]
    if path.is_dir():
        paths = sorted(root.glob(layout.train)) + [p for p in (root / layout.test,) if p.exists()]
    records = [_read_records(p, layout) for p in paths]
    labels = _class_names(root / layout.names, layout)
    codes = np.concatenate([r[:, layout.labels - 1] for r in records]).astype(np.int64)
    names = [f"{p.stem} {row}" for p, r in zip(paths, records, strict=True) for row in range(1, len(r) + 1)]
    kinds = ["test" if p.name == layout.test else "train" for p in paths]
    parts = np.repeat(kinds, [len(r) for r in records])
    pixels = np.concatenate([r[:, layout.labels :] for r in records]).reshape(-1, *SHAPE)
    own = parts if path.is_dir() else None
    return ImageSource(str(path), Arrays(pixels), object_array(names), options, labels, codes, own)


def _read_records(path: Path, layout: Layout) -> np.ndarray:
    """(N, labels + 3072) bytes."""
    content = np.frombuffer(read_bytes(path), np.uint8)
    length = layout.labels + PIXELS
    whole = len(content) // length * length
    if not whole or whole < len(content):
        raise DataError(
            f"{len(content)} bytes, of which the last whole record ends at byte {whole}", path=path,
            expected=f"one or more records of {length} bytes",
            fix="get the file again, in its binary version",
        )  # fmt: skip
    records = content.reshape(-1, length)
    wrong = np.flatnonzero(records[:, layout.labels - 1] >= layout.classes)
    if len(wrong):
        raise DataError(
            f"a class at byte {wrong[0] * length + layout.labels - 1}", path=path,
            value=int(records[wrong[0], layout.labels - 1]), expected=f"0 to {layout.classes - 1}",
            fix="check that this is the binary version of the set",
        )  # fmt: skip
    return records


def _class_names(path: Path, layout: Layout) -> Labels:
    if not path.exists():
        return Labels("integer", tuple(range(layout.classes)))
    names = read_bytes(path).decode("utf-8", "replace").split()
    if len(names) != layout.classes or len(set(names)) != len(names):
        raise DataError(
            f"{len(names)} names of classes", path=path, expected=f"{layout.classes} different names",
        )  # fmt: skip
    return Labels("text", tuple(names))
