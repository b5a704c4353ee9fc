"""Folders of images: one sub-folder a class, also below train/, val/ and test/; or images without classes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from quire.data.columns import Labels
from quire.data.images.decode import is_image
from quire.data.images.source import ImageSource, counted, files, is_dir, object_array, some
from quire.errors import DataError
from quire.options import Images

PART_FOLDERS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def read_folder(root: Path, options: Images) -> ImageSource:
    """Images with classes where the folder has sub-folders alone, and without where images lie in it."""
    folders = sorted((p for p in root.iterdir() if is_dir(p)), key=lambda p: p.name)
    if not folders or any(is_image(p) for p in root.iterdir()):
        return read_plain(root, options)
    own = {p: PART_FOLDERS[p.name.lower()] for p in folders if p.name.lower() in PART_FOLDERS}
    if any(is_dir(p) for folder in own for p in folder.iterdir()):
        if len(set(own.values())) < len(own):
            raise DataError(
                f"two folders for one part: {', '.join(p.name for p in own)}", path=root,
                expected="one of each: train, val, test",
            )  # fmt: skip
        kinds = [(part, folder) for top, part in own.items() for folder in sorted(top.iterdir())]
        classes = [(part, folder) for part, folder in kinds if is_dir(folder)]
        others = [p.name for p in folders if p not in own]
        notes = [f"folders beside the parts are ignored: {', '.join(others)}"] if others else []
    else:
        classes, notes = [("", folder) for folder in folders], []
    return _read_classes(root, classes, options, notes)


def _read_classes(
    root: Path, folders: list[tuple[str, Path]], options: Images, notes: list[str]
) -> ImageSource:
    labels = Labels("text", tuple(sorted({folder.name for _, folder in folders})))
    numbers = {name: code for code, name in enumerate(labels.values)}
    paths: list[Path] = []
    codes: list[int] = []
    parts: list[str] = []
    ignored: list[Path] = []
    for part, folder in folders:
        found, others = images_below(folder)
        if not found:
            raise DataError(
                "a class folder without images", path=folder,
                expected="at least one image in each folder of a class",
                fix="add images to it or remove it",
            )  # fmt: skip
        paths += found
        codes += [numbers[folder.name]] * len(found)
        parts += [part] * len(found)
        ignored += others
    if ignored:
        names = [str(p.relative_to(root)) for p in ignored]
        notes.append(f"{counted(len(names), 'file')} other than images, ignored: {some(names)}")
    own = np.array(parts) if any(parts) else None
    return ImageSource(
        str(root),
        files(paths, options),
        _names(paths, root),
        options,
        labels,
        np.array(codes, np.int64),
        own,
        notes=tuple(notes),
    )


def read_plain(path: Path, options: Images) -> ImageSource:
    """One image file, or all images of a folder, without classes."""
    if not path.is_dir():
        return ImageSource(str(path), files([path], options), object_array([path.name]), options)
    paths, ignored = images_below(path)
    if not paths:
        raise DataError("a folder without images", path=path, expected="image files, also in sub-folders")
    names = [str(p.relative_to(path)) for p in ignored]
    notes = (f"{counted(len(names), 'file')} other than images, ignored: {some(names)}",) if names else ()
    return ImageSource(str(path), files(paths, options), _names(paths, path), options, notes=notes)


def images_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Images of a folder and the folders in it, sorted, and the files that are none."""
    images: list[Path] = []
    others: list[Path] = []
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(top, name)
            (images if is_image(path) else others).append(path)
    return sorted(images), sorted(others)


def _names(paths: list[Path], root: Path) -> np.ndarray:
    return object_array([p.relative_to(root).as_posix() for p in paths])
