"""What a hostile file is, and how one is laid down: in a folder of its own, for every reader of its kind.

Kinds of readers: table, images, scenes, text, tokens, pairs, labels, weights, adapter, config, run, run of
text, run of images.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
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
    """Bytes that a packed file says it holds, where that is within what is allowed: who takes it may take the
    room of these, who refuses it may not."""
    readers: tuple[str, ...] = ()
    """Those of the kind that are asked, where not all of them could take it."""


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


def nothing(folder: Path, _: Path) -> Path:
    return folder


def endless(what: str, kind: str, place: str, given: str = "", around: Make = nothing) -> Iterator[Case]:
    """A link to a device and a pipe at this place, among what lies `around` it."""

    def linked(path: Path) -> None:
        path.symlink_to("/dev/zero")

    def in_place(lay_down: Callable[[Path], None]) -> Make:
        def make(folder: Path, runs: Path) -> Path:
            around(folder, runs)
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).unlink(missing_ok=True)
            lay_down(folder / place)
            return folder / (given or place)

        return make

    yield Case(f"{what} that is a link to /dev/zero", kind, in_place(linked))
    yield Case(f"{what} that is a pipe", kind, in_place(os.mkfifo))
