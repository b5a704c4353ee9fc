"""What kind of set a path is, by the names of its files; anything else is refused with the list of kinds."""

from __future__ import annotations

from pathlib import Path

from quire.data.images import coco, voc
from quire.data.images.builtin import IMAGES, SCENES, builtin_images, builtin_scenes
from quire.data.images.cifar import find_layout, read_cifar
from quire.data.images.decode import is_image
from quire.data.images.folders import read_folder, read_plain
from quire.data.images.idx import find_images, is_idx, read_idx
from quire.data.images.source import ImageSource
from quire.data.known import to_download
from quire.errors import DataError, nearest
from quire.options import Images, Scenes

KINDS = (
    "a folder with one sub-folder for each class (also below train/, val/ and test/), MNIST's IDX files, "
    "CIFAR-10's or CIFAR-100's binary files, or to predict on one image or a folder of images"
)
SCENE_KINDS = (
    "a folder with Annotations/ and JPEGImages/ (Pascal VOC), a folder with annotations/instances_….json "
    "(COCO), or one such JSON file with its images beside it"
)


def open_images(path: Path | str, options: Images) -> ImageSource:
    """Images of any kind, with their classes where they have some."""
    if isinstance(path, str) and path in IMAGES and not Path(path).exists():
        return builtin_images(path, options)
    path = _existing(path, KINDS, list(IMAGES))
    if layout := find_layout(path):
        return read_cifar(path, layout, options)
    if not path.is_dir():
        if is_image(path):
            return read_plain(path, options)
        if is_idx(path):
            return read_idx(path, options)
        raise DataError(
            f"a file of kind '{path.suffix}'", path=path, expected=KINDS,
            fix="give the folder of the images; for a table use a recipe such as mlp",
        )  # fmt: skip
    if find_images(path):
        return read_idx(path, options)
    if voc.find_root(path) or coco.find_files(path):
        raise DataError(
            "images annotated with boxes", path=path, expected=KINDS,
            fix="train a detector on them, as 'quire train ssd' does",
        )  # fmt: skip
    return read_folder(path, options)


def open_scenes(path: Path | str, options: Scenes, *, plain: bool = False) -> ImageSource:
    """Annotated images; with `plain` also images without annotations."""
    if isinstance(path, str) and path in SCENES and not Path(path).exists():
        return builtin_scenes(path, options)
    path = _existing(path, SCENE_KINDS, list(SCENES))
    if root := voc.find_root(path):
        return voc.read_voc(root, options)
    if found := coco.find_files(path):
        return coco.read_coco(path, found, options)
    if plain and (path.is_dir() or is_image(path)):
        return read_plain(path, options)
    beside = sorted(path.glob("*.json")) if path.is_dir() else []
    raise DataError(
        "a folder without annotations" if path.is_dir() else f"a file of kind '{path.suffix}'",
        path=path,
        expected=SCENE_KINDS,
        fix=f"give the file with the annotations: {beside[0]}" if beside else "",
    )


def _existing(path: Path | str, kinds: str, builtin: list[str]) -> Path:
    found = Path(path)
    if not found.exists():
        hint = to_download(found) if kinds is KINDS else ""
        siblings = [p.name for p in found.parent.iterdir()] if found.parent.is_dir() else []
        raise DataError(
            "no such file, folder or built-in set", path=path,
            expected=f"{kinds}; or one of the built-in sets {', '.join(builtin)}",
            fix=hint or nearest(found.name, [*siblings, *builtin]) or "check the path",
        )  # fmt: skip
    return found
