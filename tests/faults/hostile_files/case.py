"""What a hostile file is, and how one is laid down: in a folder of its own, for every reader of its kind.

Kinds of readers: table, images, scenes, text, weights, adapter, config, run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from PIL import Image

Make = Callable[[Path, Path], Path]
"""From an empty folder and the folder of good runs to the path that is given to the readers."""


class Case(NamedTuple):
    name: str
    kind: str
    make: Make
    refused: bool = True
    """Whether at least one reader has to refuse it; otherwise it may also be read, without harm."""
    unpacked: int = 0
    """Bytes that a packed file says it holds, where that is within what is allowed: then it may take the room
    of these."""


Content = bytes | Callable[[], bytes]
"""What is large is made when it is needed."""


def lay(name: str, content: Content) -> Make:
    def make(folder: Path, _: Path) -> Path:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content())
        return folder / name

    return make


def lay_all(files: Mapping[str, bytes], given: str = "") -> Make:
    def make(folder: Path, runs: Path) -> Path:
        for name, content in files.items():
            lay(name, content)(folder, runs)
        return folder / given

    return make


def image(name: str, content: Content) -> Make:
    """A folder of two classes with this image among good ones."""

    def make(folder: Path, _: Path) -> Path:
        for part in "ab":
            (folder / "set" / part).mkdir(parents=True)
            for number in range(4):
                Image.new("L", (16, 16), 40 * number).save(folder / "set" / part / f"good{number}.png")
        return lay(f"a/{name}", content)(folder / "set", folder).parents[1]

    return make
