"""Pascal VOC: JPEGImages/, Annotations/ with an XML file for each image, ImageSets/Main/ with the parts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

import numpy as np

from quire.data.columns import Labels
from quire.data.images.decode import is_image
from quire.data.images.source import ImageSource, Objects, counted, files, is_dir, object_array
from quire.data.opening import read_bytes
from quire.errors import DataError
from quire.options import Scenes

PARTS = {"train": "train", "val": "validation", "test": "test"}
CORNERS = ("xmin", "ymin", "xmax", "ymax")
DEEPEST = 100
ENCODINGS = ("utf-8", "us-ascii", "ascii", "iso-8859-1", "windows-1252", "utf-16")


@dataclass
class Node:
    """An element with the line that it begins in."""

    name: str
    line: int
    text: str = ""
    children: list[Node] = field(default_factory=list)

    def all(self, name: str) -> list[Node]:
        return [child for child in self.children if child.name == name]

    def find(self, *names: str) -> Node | None:
        """The first element down this path of names."""
        node: Node | None = self
        for name in names:
            node = next(iter(node.all(name)), None) if node else None
        return node

    def number(self, *names: str) -> float:
        """The number down this path, NaN where there is none."""
        node = self.find(*names)
        try:
            value = float(node.text) if node else math.nan
        except ValueError:
            return math.nan
        return value if math.isfinite(value) else math.nan


def parse_xml(path: Path) -> Node:
    """The tree of a file. Document types, with which a small file can grow without bound or name other
    files, are refused."""
    root = Node("", 0)
    open_nodes = [root]
    # With an encoding of its own expat does not ask Python for a codec by the name that the file gives.
    parser = expat.ParserCreate("UTF-8")

    def start(name: str, attributes: dict[str, str]) -> None:
        if len(open_nodes) > DEEPEST:
            raise _bad_xml(path, parser.CurrentLineNumber, "elements nested too deeply")
        node = Node(name, parser.CurrentLineNumber)
        open_nodes[-1].children.append(node)
        open_nodes.append(node)

    def text(data: str) -> None:
        open_nodes[-1].text += data

    def doctype(*_: object) -> None:
        raise _bad_xml(path, parser.CurrentLineNumber, "a document type (DOCTYPE)")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda name: open_nodes.pop()
    parser.CharacterDataHandler = text
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(_decoded(path), True)
    except expat.ExpatError as error:
        raise _bad_xml(path, error.lineno, f"not well-formed XML ({error})") from None
    top = root.children[0]
    if top.name != "annotation":
        raise _bad_xml(path, top.line, f"an element <{top.name}>")
    return top


def _decoded(path: Path) -> str:
    """The text of a file in one of the encodings that are known here."""
    content = read_bytes(path)
    wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    stated = re.match(rb"\s*<\?xml[^>]*?encoding\s*=\s*['\"]([^'\"]*)", content[:200])
    name = "utf-16" if wide else stated[1].decode("ascii", "replace").lower() if stated else "utf-8"
    if name not in ENCODINGS:
        raise _bad_xml(path, 1, f"the encoding {name!r}")
    try:
        return content.decode("utf-8-sig" if name == "utf-8" else name)
    except UnicodeDecodeError as error:
        raise _bad_xml(path, content.count(b"\n", 0, error.start) + 1, f"bytes that are not {name}") from None


def _bad_xml(path: Path, line: int, got: str) -> DataError:
    return DataError(got, path=path, line=line, expected="plain XML of Pascal VOC, an <annotation>")


def find_root(path: Path) -> Path | None:
    """The folder that holds Annotations/: this one, or the only one of its sub-folders that does."""
    if not path.is_dir():
        return None
    if (path / "Annotations").is_dir():
        return path
    below = [p for p in sorted(path.iterdir()) if is_dir(p) and (p / "Annotations").is_dir()]
    if len(below) > 1:
        raise DataError(
            f"several sets of Pascal VOC: {', '.join(p.name for p in below)}", path=path,
            expected="one of them", fix=f"give {below[0]}",
        )  # fmt: skip
    return below[0] if below else None


def read_voc(root: Path, options: Scenes) -> ImageSource:
    """All images of the lists train, val and test, or of the folder where there are no lists."""
    folder = root / "JPEGImages"
    if not folder.is_dir():
        raise DataError("Annotations/ without JPEGImages/", path=root, expected="both, as in Pascal VOC")
    images = {p.stem: p for p in sorted(folder.iterdir(), reverse=True) if is_image(p)}
    annotations = {p.stem: p for p in sorted((root / "Annotations").glob("*.xml")) if p.name[0] != "."}
    lists = _read_lists(root / "ImageSets" / "Main")
    stems = list(lists) if lists else sorted({*images, *annotations})
    if not stems:
        raise DataError("a folder without images", path=folder, expected="images with annotations")
    notes = []
    if lists and (unlisted := len({*images} - {*lists})):
        notes.append(f"{counted(unlisted, 'image')} in no list of ImageSets/Main, left out")

    paths = [images.get(stem, folder / f"{stem}.jpg") for stem in stems]
    where = [annotations.get(stem, root / "Annotations" / f"{stem}.xml") for stem in stems]
    annotated = np.array([stem in annotations for stem in stems])
    image: list[int] = []
    written: list[list[float]] = []
    names: list[str] = []
    crowd: list[bool] = []
    lines: list[int] = []
    stated = np.zeros((len(stems), 2), np.int64)
    for row in np.flatnonzero(annotated):
        tree = parse_xml(where[row])
        size = [tree.number("size", side) for side in ("width", "height")]
        if all(1 <= side < 2**31 for side in size):  # some tools write 0 for an unknown size
            stated[row] = size
        for node in tree.all("object"):
            name = node.find("name")
            image.append(int(row))
            written.append([node.number("bndbox", corner) for corner in CORNERS])
            names.append(name.text.strip() if name else "")
            crowd.append(node.number("difficult") == 1)
            lines.append(node.line)
    labels = Labels("text", tuple(sorted({*names} - {""})))
    codes = {name: code for code, name in enumerate(labels.values)}
    objects = Objects(
        np.array(image, np.int64),
        np.array(written, np.float64).reshape(-1, 4),
        "pixels from 1",
        np.array([codes.get(name, -1) for name in names], np.int64),
        np.array(crowd, bool),
        np.array(lines, np.int64),
        "",
        tuple(str(p) for p in where),
        annotated,
        stated,
    )
    shown = object_array([p.relative_to(root).as_posix() for p in paths])
    parts = np.array(list(lists.values())) if lists else None
    pixels = files(paths, options)
    return ImageSource(str(root), pixels, shown, options, labels, None, parts, objects, tuple(notes))


def _read_lists(folder: Path) -> dict[str, str]:
    """The part of each image that is listed. `trainval` counts where there is no `train`."""
    parts = dict(PARTS)
    if not (folder / "train.txt").exists():
        parts = {"trainval": "train", "test": "test"}
    found: dict[str, str] = {}
    for name, part in parts.items():
        path = folder / f"{name}.txt"
        if not path.exists():
            continue
        lines = read_bytes(path).decode("utf-8", "replace").splitlines()
        for number, line in enumerate(lines, 1):
            words = line.split()
            if words and words[0] in found:
                raise DataError(
                    "an image that is listed twice", path=path, line=number, value=words[0],
                    expected="each image in one of train, val and test, once",
                )  # fmt: skip
            if words and (Path(words[0]).name != words[0] or "\0" in words[0]):
                raise DataError(
                    "a name that leads out of JPEGImages/", path=path, line=number, value=words[0],
                    expected="the name of an image, without folder and ending",
                )  # fmt: skip
            if words:
                found[words[0]] = part
        if part not in found.values():
            raise DataError("an empty list of images", path=path, expected="a name a line, or no such file")
    return found
