"""A text of any length: files read block by block, cut into parts, turned into tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from quire.data.loaded import Split
from quire.data.text.builtin import CORPORA
from quire.data.text.bytepairs import last_cut
from quire.data.text.files import Block, empty_text, existing, files_below, no_files, read_blocks
from quire.data.text.tokenisers import Tokeniser, named
from quire.errors import DataError
from quire.options import Text

SEPARATOR = "\n\n"
"""Between the files of a folder."""
MOST_HELD = 2**24
"""Characters without white space after which a text is cut anywhere."""
KINDS = "a text file in UTF-8, or a folder of such files"
FEW = 3


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text that has not been read yet, or that lies in memory."""

    source: str
    options: Text
    files: tuple[Path, ...] = ()
    text: str = ""
    """Where there are no files."""
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes, and so at least as many as there are tokens."""
        return sum(path.stat().st_size for path in self.files) or len(self.text.encode())

    def blocks(self) -> Iterator[Block]:
        """All of the text in order, each time anew."""
        if not self.files:
            yield Block(self.text, self.source, 1)
        for number, path in enumerate(self.files):
            if number:
                yield Block(SEPARATOR, str(path), 1 - SEPARATOR.count("\n"))
            yield from read_blocks(path, self.options.on_bad_utf8)

    def part(self, start: int, stop: int) -> Iterator[Block]:
        """The characters from `start` to `stop`."""
        done = 0
        for block in self.blocks():
            low, high = max(start - done, 0), min(stop - done, len(block.text))
            if low < high:
                line = block.line + block.text.count("\n", 0, low)
                yield Block(block.text[low:high], block.path, line)
            done += len(block.text)
            if done >= stop:
                return

    @cached_property
    def characters(self) -> int:
        """How many there are. Everything is read, so what is wrong with the text is found here."""
        count, blank = 0, True
        for block in self.blocks():
            count += len(block.text)
            blank = blank and not block.text.strip()
        if blank:
            raise empty_text(self.source)
        return count


def open_corpus(source: Path | str | Corpus, options: Text) -> Corpus:
    """A file, a folder, or a built-in text where no such file exists."""
    if isinstance(source, Corpus):
        return source
    if isinstance(source, str) and source in CORPORA and not Path(source).exists():
        return Corpus(f"{source} (built in)", options, text=CORPORA[source]())
    path = existing(source, KINDS, list(CORPORA))
    if not path.is_dir():
        return Corpus(str(path), options, (path,))
    files, others = files_below(path, options.suffixes)
    if not files:
        raise no_files(path, options, others)
    empty = [str(file.relative_to(path)) for file in files if not file.stat().st_size]
    notes = [f"empty files are left out: {_some(empty)}"] if empty else []
    if others:
        ignored = _some([str(file.relative_to(path)) for file in others])
        notes.append(
            f"{len(others)} of {len(files) + len(others)} files end otherwise than in "
            f"{', '.join(options.suffixes)} and are ignored: {ignored}"
        )
    files = [file for file in files if file.stat().st_size]
    if not files:
        raise empty_text(path)
    return Corpus(str(path), options, tuple(files), notes=tuple(notes))


def bounds(characters: int, options: Text) -> dict[Split, tuple[int, int]]:
    """First character, and the one after the last, of each part that is asked for."""
    first = int(characters * (1 - options.validation - options.test))
    second = characters - round(characters * options.test) if options.validation else first
    parts: dict[Split, tuple[int, int]] = {"train": (0, first)}
    if options.validation:
        parts["validation"] = (first, second)
    if options.test:
        parts["test"] = (second, characters)
    return parts


def whole_words(blocks: Iterator[Block]) -> Iterator[Block]:
    """The same text in blocks that end where it may be cut without another token coming of it, or with their
    file."""
    held: Block | None = None
    for block in blocks:
        if held is not None and held.path != block.path:
            yield held
        elif held is not None:
            block = Block(held.text + block.text, held.path, held.line)
        at = last_cut(block.text, 1, len(block.text))
        at = len(block.text) if at is None and len(block.text) > MOST_HELD else at or 0
        if at:
            yield Block(block.text[:at], block.path, block.line)
        line = block.line + block.text.count("\n", 0, at)
        held = Block(block.text[at:], block.path, line) if at < len(block.text) else None
    if held is not None:
        yield held


@dataclass
class Unknown:
    """Characters without a token, counted as they are found."""

    count: int = 0
    first: str = ""


def encode_blocks(blocks: Iterator[Block], tokeniser: Tokeniser, found: Unknown) -> Iterator[np.ndarray]:
    """Tokens of each block. Characters that there is no token for are counted, or an error with a line."""
    for block in blocks:
        places = tokeniser.unknown_places(block.text)
        if len(places):
            place = int(places[0])
            character = block.text[place]
            line = block.line + block.text.count("\n", 0, place)
            if tokeniser.policy == "refuse":
                raise DataError(
                    f"{named(character)} is not in the training part", path=block.path, line=line,
                    expected="characters that the model is trained on",
                    fix="train with --text.unknown replace or skip, or with --text.tokens bytes",
                )  # fmt: skip
            found.first = found.first or f"{named(character)} in line {line} of {block.path}"
            found.count += len(places)
        yield tokeniser.encode_array(block.text)


def unknown_notes(tokeniser: Tokeniser, found: Mapping[str, Unknown]) -> list[str]:
    """`found` by what has them, such as "the test part"."""
    done = "left out" if tokeniser.policy == "skip" else "replaced by the token for unknown ones"
    return [
        f"{unknown.count} characters of {where} that training does not have are {done}: {unknown.first} is "
        "the first"
        for where, unknown in found.items()
        if unknown.count
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")
