"""COCO: annotations/instances_*.json with folders of images, or one such file with its images beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from quire.data.columns import Labels
from quire.data.images.source import ImageSource, Objects, counted, files, object_array, some
from quire.data.opening import read_bytes
from quire.errors import DataError
from quire.options import Scenes

LISTS = ("images", "annotations", "categories")
PREFIX = "instances_"
LONGEST = 1000
"""Characters of a path."""


def find_files(path: Path) -> dict[str, Path]:
    """Part → file: of a folder those in annotations/, told apart by their names; "" for a single file."""
    if path.is_file():
        return {"": path} if path.suffix.lower() == ".json" else {}
    found: dict[str, Path] = {}
    for file in sorted((path / "annotations").glob(f"{PREFIX}*.json")):
        title = file.stem.removeprefix(PREFIX).lower()
        part = next((p for p in ("train", "val", "test") if title.startswith(p)), "")
        part = {"val": "validation"}.get(part, part)
        if part in found:
            raise DataError(
                f"two files for one part: {found[part].name} and {file.name}", path=file.parent,
                expected="one of train, val and test each", fix="move one of them away",
            )  # fmt: skip
        found[part] = file
    if "" in found and len(found) > 1:
        raise DataError(
            "a part that is neither train, val nor test", path=found[""],
            expected="instances_train….json, instances_val….json or instances_test….json",
        )  # fmt: skip
    return found


def read_coco(path: Path, found: dict[str, Path], options: Scenes) -> ImageSource:
    """The sets of all parts as one; categories are numbered in the order of their ids."""
    sets = [(part, file, _read_json(file)) for part, file in found.items()]
    numbers, labels = _categories([(file, entry) for _, file, entry in sets])
    sources = [_read_part(path, part, file, entry, numbers, options) for part, file, entry in sets]
    paths = [p for source in sources for p in source[0]]
    parts = [part for (part, *_), source in zip(sets, sources, strict=True) for _ in source[0]]
    root = path if path.is_dir() else path.parent
    names = [p.relative_to(root).as_posix() if p.is_relative_to(root) else p.name for p in paths]
    objects = _join([objects for _, objects in sources])
    own = None if "" in found else np.array(parts)
    pixels = files(paths, options)
    return ImageSource(str(path), pixels, object_array(names), options, labels, None, own, objects)


def _read_json(path: Path) -> dict[str, list[dict[str, Any]]]:
    content = read_bytes(path)
    try:
        entry = json.loads(content)
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error.msg})", path=path, line=error.lineno, column=error.colno) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON ({error})", path=path) from None
    for name in LISTS:
        rows = entry.get(name) if isinstance(entry, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DataError(
                f"no list '{name}'", path=path,
                expected="annotations of COCO: an object with the lists images, annotations and categories",
            )  # fmt: skip
    return dict(entry)


def _categories(sets: list[tuple[Path, dict[str, list[dict[str, Any]]]]]) -> tuple[dict[int, int], Labels]:
    """Id → class number, and the classes in the order of the ids."""
    named: dict[int, str] = {}
    for path, entry in sets:
        for row in entry["categories"]:
            number, name = _whole(row, "id", path, "a category"), row.get("name")
            if not isinstance(name, str) or named.setdefault(number, name) != name:
                raise DataError(
                    f"category {number}",
                    path=path,
                    value=name,
                    expected="one name for each id, the same in every file",
                )
    ids = sorted(named)
    names = tuple(named[number] for number in ids)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError("a name for two categories", path=sets[0][0], value=twice, expected="different names")
    return {number: code for code, number in enumerate(ids)}, Labels("text", names)


def _read_part(
    root: Path,
    part: str,
    path: Path,
    entry: dict[str, list[dict[str, Any]]],
    numbers: dict[int, int],
    options: Scenes,
) -> tuple[list[Path], Objects]:
    names: list[str] = []
    rows: dict[int, int] = {}
    stated = np.zeros((len(entry["images"]), 2), np.int64)
    for row, image in enumerate(entry["images"]):
        number = _whole(image, "id", path, "an image")
        name = image.get("file_name")
        if not isinstance(name, str) or not name or not _is_below(name):
            raise DataError(
                f"image {number}: its file_name",
                path=path,
                value=name,
                expected="a path below the images' folder",
            )
        if number in rows:
            raise DataError(f"image {number} is there twice", path=path, expected="an id for each image")
        rows[number] = row
        names.append(name)
        sides = [image.get("width"), image.get("height")]
        stated[row] = [s if type(s) is int and 1 <= s < 2**31 else 0 for s in sides]
    if not names:
        raise DataError("no images", path=path, expected="at least one entry in the list 'images'")
    base = _image_folder(root, path, names[0])

    annotations = entry["annotations"]
    ids = np.array([_whole(row, "id", path, "an annotation") for row in annotations], np.int64)
    objects = Objects(
        np.array([_known(rows, row.get("image_id")) for row in annotations], np.int64),
        np.array([_box(row.get("bbox")) for row in annotations], np.float64).reshape(-1, 4),
        "corner and sides",
        np.array([_known(numbers, row.get("category_id")) for row in annotations], np.int64),
        np.array([row.get("iscrowd") in (1, True) for row in annotations], bool),
        ids,
        " annotation ",
        (str(path),) * len(names),
        np.ones(len(names), bool),
        stated,
    )
    return [base / name for name in names], _with_images(objects, path, options)


def _is_below(name: str) -> bool:
    """Whether a path stays in its folder, and can be one."""
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name and len(name) < LONGEST


def _with_images(objects: Objects, path: Path, options: Scenes) -> Objects:
    """Without the annotations of images that are not in the file, which are refused or left out."""
    lost = objects.image < 0
    if lost.any() and options.boxes == "refuse":
        raise DataError(
            f"{counted(int(lost.sum()), 'annotation')} whose image is not in the list 'images': "
            + some([f"annotation {number}" for number in objects.number[lost]]),
            path=path,
            expected="the id of an image in each image_id",
            fix="correct them, or leave them out with --images.boxes skip",
        )
    return objects.keep(~lost)


def _image_folder(root: Path, path: Path, name: str) -> Path:
    """Where the images of an annotation file are: the first likely folder that has the first image."""
    top = root if root.is_dir() else path.parent
    title = path.stem.removeprefix(PREFIX)
    likely = [top / title, top / "images" / title, top / "images", top]
    if root.is_file():
        likely += [top.parent / title, top.parent / "images" / title, top.parent / "images", top.parent]
    otherwise = top / title if root.is_dir() else top
    return next((folder for folder in likely if (folder / name).exists()), otherwise)


def _box(values: object) -> list[float]:
    """Four numbers, NaN where they are not."""
    given: list[Any] = values if isinstance(values, list) and len(values) == 4 else [None]
    good = all(type(v) in (int, float) and abs(v) < 2**63 for v in given)
    return [float(v) for v in given] if good else [math.nan] * 4


def _whole(row: dict[str, Any], key: str, path: Path, what: str) -> int:
    value = row.get(key)
    if type(value) is not int or abs(value) >= 2**63:
        raise DataError(f"{what} whose {key} is no whole number", path=path, value=value)
    return value


def _known(numbers: dict[int, int], key: object) -> int:
    """-1 for a key that is not there or is no number."""
    return numbers.get(key, -1) if type(key) is int else -1


def _join(parts: list[Objects]) -> Objects:
    starts = np.cumsum([0, *(len(objects.annotated) for objects in parts[:-1])])
    return Objects(
        np.concatenate([o.image + start for o, start in zip(parts, starts, strict=True)]),
        np.concatenate([o.written for o in parts]),
        "corner and sides",
        np.concatenate([o.code for o in parts]),
        np.concatenate([o.crowd for o in parts]),
        np.concatenate([o.number for o in parts]),
        " annotation ",
        tuple(file for o in parts for file in o.files),
        np.concatenate([o.annotated for o in parts]),
        np.concatenate([o.stated for o in parts]),
    )
