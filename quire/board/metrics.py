"""The curves of a run while it is written: each look reads on from where the last one ended.

Steps and values lie in flat arrays, 16 bytes a point, as a thousand runs may be looked at.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter, lt
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, NamedTuple

import numpy as np

from quire.board.layout import ENDS, columns, epoch_at, is_record
from quire.errors import CheckpointError
from quire.report.reading import DRAWABLE, Curve, real

TAIL_BYTES = 1 << 12
_LINES_AT_ONCE = 256
_PIECE = 1 << 20
"""Bytes that are taken in at once: what is made of them on the way is several times as large."""


class Stamp(NamedTuple):
    """By what a change of a file is noticed; a resumed run writes its metrics to a new file."""

    inode: int
    modified: int
    size: int


def stamp(path: Path) -> Stamp | None:
    """None where there is no plain file. A symbolic link is none: it may lead out of the folder."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    if not S_ISREG(found.st_mode):
        return None
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size)


def is_folder(path: Path) -> bool:
    """A folder itself, and no link to one."""
    try:
        return S_ISDIR(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


class Series:
    """One measure of one split."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def extend(self, steps: array[int], values: list[Any] | array[float]) -> None:
        try:
            fresh = array("d", values)
        except (TypeError, OverflowError):
            fresh = array("d", map(real, values))
        last = self.steps[-1] if self.steps else -math.inf
        if steps[0] > last and all(map(lt, steps, steps[1:])):
            self.steps.extend(steps)
            self.values.extend(fresh)
            return
        for step, value in zip(steps, fresh, strict=True):
            self._put(step, value)

    def _put(self, step: int, value: float) -> None:
        """A resumed run records again the steps after its checkpoint; the later line counts."""
        place = bisect_left(self.steps, step)
        if place < len(self.steps) and self.steps[place] == step:
            self.values[place] = value
        else:
            self.steps.insert(place, step)
            self.values.insert(place, value)

    def curve(self) -> Curve:
        values = np.array(self.values, dtype=float)
        values[~(np.abs(values) < DRAWABLE)] = math.nan
        return Curve(np.array(self.steps, dtype=np.int64), values)


class Metrics:
    """What a metrics.jsonl holds so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.series: dict[str, dict[str, Series]] = {}
        """Measure, then split."""
        self.last_step = 0
        self.last_epoch = 0.0
        self.seen: Stamp | None = None
        self._offset = 0

    @property
    def points(self) -> int:
        return sum(len(series.steps) for splits in self.series.values() for series in splits.values())

    def read_on(self) -> bool:
        """Take in what was written since the last look; whether anything has changed."""
        now = stamp(self.path)
        if now == self.seen:
            return False
        if now is None or self.seen is None or now.inode != self.seen.inode or now.size < self._offset:
            self.series, self.last_step, self.last_epoch, self._offset = {}, 0, 0.0, 0
        if now is not None:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                fresh = file.read()
            whole = fresh.rfind(b"\n") + 1  # the rest of a line may still be on its way
            self._take(fresh[:whole])
            self._offset += whole
        self.seen = now
        return True

    def _take(self, text: bytes) -> None:
        start = lines = 0
        while start < len(text):
            end = text.rfind(b"\n", start, start + _PIECE) + 1 or text.index(b"\n", start) + 1
            piece = text[start:end]
            count = piece.count(b"\n")
            if count <= 4 * ENDS or not self._take_columns(piece):
                self._take_records(piece, lines)
            start, lines = end, lines + count

    def _take_columns(self, written: bytes) -> bool:
        """Whether the text has the form that trainers write, and was taken in at once."""
        try:
            text = written.decode()
        except UnicodeDecodeError:
            return False
        found = columns(text)
        if found is None:
            return False
        for split, measure, steps, values in found:
            self.series.setdefault(measure, {}).setdefault(split, Series()).extend(steps, values)
        newest = max((column.steps[-1] for column in found), default=self.last_step)
        if newest >= self.last_step:
            self.last_step, self.last_epoch = newest, epoch_at(text, newest)
        return True

    def _take_records(self, text: bytes, before: int) -> None:
        for some in records(text, self.path, before):
            by_split: dict[str, list[dict[str, Any]]] = {}
            for record in some:
                by_split.setdefault(str(record.get("split", "train")), []).append(record)
            for split, group in by_split.items():
                steps = array("q", [record["step"] for record in group])
                values = [record["values"] for record in group]
                for measure in values[0] if _alike(values) else dict.fromkeys(chain.from_iterable(values)):
                    series = self.series.setdefault(measure, {}).setdefault(split, Series())
                    try:
                        series.extend(steps, [named[measure] for named in values])
                    except KeyError:
                        having = [place for place, named in enumerate(values) if measure in named]
                        few = array("q", [steps[place] for place in having])
                        series.extend(few, [values[place][measure] for place in having])
            newest = max(some, key=itemgetter("step"))
            if newest["step"] >= self.last_step:
                self.last_step, self.last_epoch = newest["step"], real(newest.get("epoch"))


def _alike(values: list[dict[str, Any]]) -> bool:
    """Whether all records have the measures of the first, as nearly always."""
    keys = values[0].keys()
    return all(named.keys() == keys for named in values)


def records(text: bytes, path: Path, before: int = 0) -> Iterator[list[dict[str, Any]]]:
    """The records of whole lines, many at once; CheckpointError for a line that is none. `before` is how many
    lines were read already."""
    lines = [line for line in text.splitlines() if line.strip()]
    for start in range(0, len(lines), _LINES_AT_ONCE):
        some = lines[start : start + _LINES_AT_ONCE]
        try:
            found = json.loads(b"[" + b",".join(some) + b"]")
            good = len(found) == len(some) and all(map(is_record, found))
        except (ValueError, RecursionError):
            good = False
        if not good:
            number = before + start + 1 + next((i for i, line in enumerate(some) if not _reads(line)), 0)
            raise CheckpointError(
                f"{path.parent.name}/{path.name} is damaged: line {number} of those read is no record",
                expected="the file as the run wrote it",
                fix="restore the file from a copy, or train again",
            )
        yield found


def _reads(line: bytes) -> bool:
    try:
        return is_record(json.loads(line))
    except (ValueError, RecursionError):
        return False


def last_values(path: Path, end: int = TAIL_BYTES) -> tuple[int, dict[str, dict[str, Curve]]]:
    """The last step and the newest value of each measure, from the last `end` bytes of the file alone."""
    found: dict[str, dict[str, Curve]] = {}
    last = 0
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - end))
            text = file.read()
    except OSError:
        return last, found
    if size > end:
        text = text[text.find(b"\n") + 1 :]
    newest: dict[tuple[str, str], tuple[int, object]] = {}
    for record in chain.from_iterable(records(text[: text.rfind(b"\n") + 1], path)):
        last = max(last, record["step"])
        split = str(record.get("split", "train"))
        newest |= {(measure, split): (record["step"], value) for measure, value in record["values"].items()}
    for (measure, split), (step, value) in newest.items():
        found.setdefault(measure, {})[split] = Curve(np.array([step]), np.array([real(value)]))
    return last, found


def thin(curve: Curve, points: int) -> Curve:
    """At most `points`, among them the first, the last, and the lowest and the highest of each stretch: no
    peak is lost. A stretch in which nothing is finite keeps a gap."""
    n = len(curve.steps)
    if n <= points:
        return curve
    stretches = max(1, (points - 2) // 2)
    width = -(-n // stretches)
    padded = np.full(stretches * width, np.nan)
    padded[:n] = curve.values
    rows = padded.reshape(stretches, width)
    first = np.arange(stretches) * width
    low = first + np.where(np.isnan(rows), np.inf, rows).argmin(1)
    high = first + np.where(np.isnan(rows), -np.inf, rows).argmax(1)
    kept = np.unique(np.concatenate([[0, n - 1], low, high]))
    kept = kept[kept < n]
    return Curve(curve.steps[kept], curve.values[kept])
