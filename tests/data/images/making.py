"""Tiny sets of every kind, written to a folder."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """(H, W, 3) or (H, W) uint8."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def class_folders(
    root: Path, counts: dict[str, int], side: int = 6, channels: int = 3, seed: int = 0
) -> Path:
    """`counts` maps a path of folders to its number of PNG files."""
    for folder, count in counts.items():
        for i in range(count):
            seed += 1
            save(root / folder / f"{i:03}.png", noise(side, side, channels, seed))
    return root


def idx_bytes(values: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return head + values.astype(np.uint8).tobytes()


def idx_files(
    root: Path, part: str, images: np.ndarray, labels: np.ndarray, *, dot: str = "-", zipped: bool = False
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for what, number, values in (("images", 3, images), ("labels", 1, labels)):
        path = root / f"{part}-{what}{dot}idx{number}-ubyte{'.gz' * zipped}"
        content = idx_bytes(values)
        path.write_bytes(gzip.compress(content) if zipped else content)
    return root


Box = tuple[str, float | str, float | str, float | str, float | str]


def voc_xml(boxes: Sequence[Box], size: tuple[int, int] | None = (40, 30), difficult: bool = False) -> str:
    lines = ["<annotation>"]
    if size:
        lines.append(f"  <size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>")
    for name, *corners in boxes:
        tags = "".join(
            f"<{t}>{v}</{t}>" for t, v in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
        )
        flag = f"<difficult>{int(difficult)}</difficult>"
        lines.append(f"  <object><name>{name}</name>{flag}<bndbox>{tags}</bndbox></object>")
    return "\n".join([*lines, "</annotation>"])


def voc_set(
    root: Path, boxes: dict[str, list[Box]], lists: dict[str, list[str]] | None = None, width: int = 40
) -> Path:
    """An image of `width` × 30 for each name."""
    (root / "Annotations").mkdir(parents=True)
    for seed, (name, own) in enumerate(boxes.items()):
        save(root / "JPEGImages" / f"{name}.png", noise(width, 30, seed=seed))
        (root / "Annotations" / f"{name}.xml").write_text(voc_xml(own, (width, 30)))
    for part, names in (lists or {}).items():
        path = root / "ImageSets" / "Main" / f"{part}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(names) + "\n")
    return root


def coco_entry(
    images: Sequence[tuple[int, str]],
    annotations: Sequence[dict[str, Any]],
    categories: dict[int, str],
    size: tuple[int, int] = (40, 30),
) -> dict[str, Any]:
    return {
        "images": [
            {"id": number, "file_name": name, "width": size[0], "height": size[1]} for number, name in images
        ],
        "annotations": list(annotations),
        "categories": [{"id": number, "name": name} for number, name in categories.items()],
    }


def annotation(number: int, image: int, category: Any, box: Any, **more: Any) -> dict[str, Any]:
    return {"id": number, "image_id": image, "category_id": category, "bbox": box, "iscrowd": 0, **more}


def write_json(path: Path, entry: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entry))
    return path
