"""Bytes of files to text, block by block, and every complaint with its file, line and byte."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from quire.data.opening import opened, require_plain
from quire.errors import DataError, nearest
from quire.options import Text

BLOCK = 2**22
"""Bytes that are read at a time."""
OnBad = Literal["refuse", "replace"]
BOM = b"\xef\xbb\xbf"


class Block(NamedTuple):
    """Some text of a file, in order."""

    text: str
    path: str
    line: int
    """Line of the file on which the block begins, from 1."""


def read_blocks(path: Path, on_bad: OnBad = "refuse", size: int = BLOCK) -> Iterator[Block]:
    """The text of a file without its byte order mark. Bytes that are not UTF-8 and zero bytes are errors, or
    become U+FFFD; line ends stay as they are written."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict" if on_bad == "refuse" else "replace")
    offset = line = 0
    try:
        with opened(path) as file:
            while True:
                content = file.read(size)
                last = not content
                if not offset:
                    content = _without_mark(content, path, on_bad)
                    offset = file.tell() - len(content)
                pending = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(content, final=last)
                except UnicodeDecodeError as error:
                    raise _bad_bytes(path, error, offset - pending, line) from None
                if "\0" in text:
                    if on_bad == "refuse":
                        raise _zero_byte(path, text, offset - pending, line)
                    text = text.replace("\0", "\ufffd")
                if text:
                    yield Block(text, str(path), line + 1)
                if last:
                    return
                line += text.count("\n")
                offset += len(content)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=path) from None


def read_whole(path: Path, on_bad: OnBad = "refuse") -> str:
    return "".join(block.text for block in read_blocks(path, on_bad))


def _without_mark(content: bytes, path: Path, on_bad: OnBad) -> bytes:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff") and on_bad == "refuse":
        raise DataError(
            "the file is UTF-16", path=path, line=1, expected="text in UTF-8", fix="save it again as UTF-8"
        )
    return content.removeprefix(BOM)


def _bad_bytes(path: Path, error: UnicodeDecodeError, offset: int, line: int) -> DataError:
    """`offset` and `line` are those of the bytes that were being decoded, both from 0."""
    content = error.object
    start = content.rfind(b"\n", 0, error.start) + 1
    within = f", byte {error.start - start + 1} of the line" if start else ""
    return DataError(
        f"bytes that are not UTF-8, at byte {offset + error.start + 1} of the file{within}",
        path=path,
        line=line + content.count(b"\n", 0, error.start) + 1,
        value=content[error.start : error.end],
        expected="text in UTF-8",
        fix="save the file as UTF-8 (it may be Latin-1 or Windows-1252), or use --text.on-bad-utf8 replace",
    )


def _zero_byte(path: Path, text: str, offset: int, line: int) -> DataError:
    before = text[: text.index("\0")]
    return DataError(
        f"a zero byte, at byte {offset + len(before.encode()) + 1} of the file",
        path=path,
        line=line + before.count("\n") + 1,
        expected="text in UTF-8; a zero byte is a sign of another kind of file",
        fix="give a text file, or use --text.on-bad-utf8 replace",
    )


def files_below(folder: Path, suffixes: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Files of these endings in a folder and the folders in it, and the others; both sorted by path, hidden
    ones left out."""
    wanted: list[Path] = []
    others: list[Path] = []
    endings = {suffix.lower() for suffix in suffixes}
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(top, name) for name in names if not name.startswith(".")):
            found = wanted if path.suffix.lower() in endings else others
            if found is wanted:
                require_plain(path)
            if path.is_file():
                found.append(path)
    # By parts, so that the order is that of the folders whatever signs their names have.
    return sorted(wanted, key=lambda p: p.parts), sorted(others, key=lambda p: p.parts)


def no_files(folder: Path, options: Text, others: Sequence[Path]) -> DataError:
    endings = ", ".join(options.suffixes)
    found = sorted({path.suffix for path in others if path.suffix})
    return DataError(
        "a folder without text files",
        path=folder,
        expected=f"files that end in {endings}, also in sub-folders",
        fix=f"name the endings with --text.suffixes, such as {' '.join(found[:3])}" if found else "",
    )


def existing(path: Path | str, kinds: str, builtin: Sequence[str]) -> Path:
    """The path, or what else the name may have meant."""
    found = Path(path)
    if not found.exists():
        siblings = [p.name for p in found.parent.iterdir()] if found.parent.is_dir() else []
        raise DataError(
            "no such file, folder or built-in text", path=path,
            expected=f"{kinds}; or one of the built-in sets {', '.join(builtin)}",
            fix=nearest(found.name, [*siblings, *builtin]) or "check the path",
        )  # fmt: skip
    return found


def empty_text(path: object) -> DataError:
    return DataError("the text is empty", path=path, expected="some characters besides white space")
