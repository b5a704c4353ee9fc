"""Pairs of texts: a line for each, its two sides parted by a tab."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quire.data.text.builtin import PAIRS
from quire.data.text.files import empty_text, existing, read_whole
from quire.data.text.samples import Samples, object_array
from quire.errors import DataError
from quire.options import Text

KINDS = "a text file with a pair on each line, its two sides parted by a tab"


def open_pairs(source: Path | str | Samples, options: Text, *, plain: bool = False) -> Samples:
    """Pairs of a file or a built-in set; with `plain` also a file of one side alone."""
    if isinstance(source, Samples):
        return source
    if isinstance(source, str) and source in PAIRS and not Path(source).exists():
        pairs = PAIRS[source]()
        return Samples(
            f"{source} (built in)", options, object_array([pair.source for pair in pairs]),
            np.arange(1, len(pairs) + 1), object_array([pair.target for pair in pairs]),
            groups=object_array([pair.group for pair in pairs]),
        )  # fmt: skip
    path = existing(source, KINDS, list(PAIRS))
    if path.is_dir():
        raise DataError("a folder", path=path, expected=KINDS)
    return read_pairs(path, options, plain=plain)


def read_pairs(path: Path, options: Text, *, plain: bool = False) -> Samples:
    """Blank lines are passed over; a line with an empty side or without exactly one tab is an error."""
    rows: list[list[str]] = []
    numbers: list[int] = []
    for number, line in enumerate(read_whole(path, options.on_bad_utf8).split("\n"), 1):
        sides = line.removesuffix("\r").split("\t")
        if sides == [""]:
            continue
        if len(sides) != 2 and not (plain and len(sides) == 1):
            raise DataError(
                f"a line of {len(sides)} column{'s' * (len(sides) > 1)}", path=path, line=number,
                expected="two: source, a tab, target", fix="write one tab between the sides and none in them",
            )  # fmt: skip
        empty = next((i for i, side in enumerate(sides, 1) if not side.strip()), 0)
        if empty:
            raise DataError(
                f"an empty {('source', 'target')[empty - 1]}", path=path, line=number, column=empty,
                expected="text on both sides of the tab", fix="fill the side in or remove the line",
            )  # fmt: skip
        if rows and len(sides) != len(rows[0]):
            raise DataError(
                f"a line of {len(sides)} columns", path=path, line=number,
                expected=f"{len(rows[0])}, as in line {numbers[0]}",
            )  # fmt: skip
        rows.append(sides)
        numbers.append(number)
    if not rows:
        raise empty_text(path)
    columns = [object_array(side) for side in zip(*rows, strict=True)]
    answers = columns[1] if len(columns) == 2 else None
    return Samples(str(path), options, columns[0], np.array(numbers), answers)


def conflicts(samples: Samples) -> list[str]:
    """A note on sources that have several targets, of which no model can know the right one."""
    assert samples.answers is not None
    seen: dict[str, str] = {}
    both = [
        row
        for row, (source, target) in enumerate(zip(samples.texts, samples.answers, strict=True))
        if seen.setdefault(source, target) != target
    ]
    if not both:
        return []
    return [f"{len(both)} sources have another target before, the first in line {samples.names[both[0]]}"]
