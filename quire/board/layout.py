"""Many records of few forms at once: less than half of the time that JSON takes, for what trainers write.

Nearly all lines of a split differ in their numbers alone. So one is read as JSON, and becomes a pattern in
which the numbers may be others; what the pattern finds in a text are columns. A text with anything else in
it, or with a step twice in a split, is to be read line by line.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from quire.report.reading import FORMAT, real

ENDS = 16
"""Lines at the beginning and at the end whose forms are looked at first."""
FORMS = 12
"""Of one text at most."""
_NUMBER = r"[-+.0-9eENaInfity]+"
"""NaN and Infinity too; whether it is a number is seen where it becomes one."""
_SURELY = r"(?:-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|NaN|-?Infinity)"
"""One that nobody looks at again."""


def is_record(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and found.get("format") == FORMAT
        and type(found.get("step")) is int
        and abs(found["step"]) < 1 << 62
        and isinstance(found.get("values"), dict)
    )


class Column(NamedTuple):
    """One measure of one split, with its steps in order."""

    split: str
    measure: str
    steps: array[int]
    values: array[float]


class Form(NamedTuple):
    """Lines of one split: what matches them, and the measures they hold."""

    split: str
    measures: tuple[str, ...]
    lines: re.Pattern[str]


def columns(text: str) -> list[Column] | None:
    """The columns of whole lines; None where they must be read one by one."""
    broken, count = f"\n{text}", text.count("\n")
    forms: list[Form] = []
    lines: Iterable[str] = _ends(text)
    while True:
        for line in lines:
            if not any(form.lines.match(f"\n{line}\n") for form in forms):
                made = _form(line)
                if made is None or len(forms) == FORMS:
                    return None
                forms.append(made)
        found = [form.lines.findall(broken) for form in forms]
        if sum(map(len, found)) == count:
            break
        left = broken
        for form in forms:
            left = form.lines.sub("", left)
        lines = left.split("\n")[1:-1]
    try:
        return list(_merged([_Part(form, rows) for form, rows in zip(forms, found, strict=True)]))
    except ValueError:
        return None  # characters of numbers that make none, or a step twice


class _Part:
    """The lines of one form, as numbers."""

    def __init__(self, form: Form, rows: list[Any]) -> None:
        """A row is its step, and after it the values of the measures."""
        self.split = form.split
        self.steps, *values = _numbers("\n".join(map(",".join, rows)), 1 + len(form.measures))
        self.values = dict(zip(form.measures, values, strict=True))


def _merged(parts: list[_Part]) -> Iterator[Column]:
    for split in dict.fromkeys(part.split for part in parts):
        own = [part for part in parts if part.split == split]
        _ordered(np.concatenate([part.steps for part in own]))
        for measure in dict.fromkeys(name for part in own for name in part.values):
            having = [part for part in own if measure in part.values]
            steps = np.concatenate([part.steps for part in having])
            values = np.concatenate([part.values[measure] for part in having])
            order = _ordered(steps)
            if order is not None:
                steps, values = steps[order], values[order]
            yield Column(split, measure, array("q", steps.tobytes()), array("d", values.tobytes()))


def _ordered(steps: Any) -> Any:
    """What puts steps in order, None where they are; ValueError where one is there twice."""
    if (steps[1:] > steps[:-1]).all():
        return None
    order = np.argsort(steps, kind="stable")
    if not (np.diff(steps[order]) > 0).all():
        raise ValueError("a step twice")  # the later line counts, and forms do not know which that is
    return order


def _numbers(text: str, count: int) -> list[Any]:
    """Columns of numbers with commas between them, the first of whole ones."""
    # A seventh of the time that Python takes to make a number of seventeen digits.
    import pyarrow as pa
    from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

    kinds = {str(place): pa.float64() if place else pa.int64() for place in range(count)}
    table = read_csv(
        pa.py_buffer(text.encode()),
        ReadOptions(use_threads=False, column_names=list(kinds), block_size=max(len(text), 1)),
        ParseOptions(quote_char=False),
        ConvertOptions(column_types=kinds, null_values=[]),
    )
    return [column.to_numpy() for column in table.columns]


def prepare() -> None:
    """The first numbers of all take a fifth of a second, which nobody need wait for."""
    _numbers("1,0.5", 2)


def _form(line: str) -> Form | None:
    try:
        record = json.loads(line)
        if not is_record(record) or not record["values"] or json.dumps(record, ensure_ascii=False) != line:
            return None
        others = {key: value for key, value in record.items() if key not in ("format", "split", "values")}
        if not all(type(value) in (int, float) for value in (*others.values(), *record["values"].values())):
            return None
        return Form(record["split"], tuple(record["values"]), re.compile(pattern(record)))
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def pattern(record: dict[str, Any]) -> str:
    """Matches a line break and a line that has other numbers; its groups are the step and the values."""
    parts = []
    for key, value in record.items():
        if key == "step":
            shown = r"(-?[0-9]{1,18})"
        elif key == "values":
            inner = (f"{_quoted(name)}: ({_NUMBER})" for name in value)
            shown = r"\{" + ", ".join(inner) + r"\}"
        elif key in ("format", "split"):
            shown = re.escape(json.dumps(value, ensure_ascii=False))
        else:
            shown = _SURELY
        parts.append(f"{_quoted(key)}: {shown}")
    return r"\n\{" + ", ".join(parts) + r"\}(?=\n)"


def _quoted(name: str) -> str:
    return re.escape(json.dumps(name, ensure_ascii=False))


def epoch_at(text: str, step: int) -> float:
    """What the last line of this step says; NaN where none does."""
    place = text.rfind(f'"step": {step},')
    start, end = text.rfind("\n", 0, max(place, 0)) + 1, text.find("\n", place)
    return real(json.loads(text[start:end]).get("epoch")) if place >= 0 else real(None)


def _ends(text: str) -> Iterator[str]:
    yield from text.split("\n", ENDS)[:ENDS]
    yield from text.rsplit("\n", ENDS + 1)[1:-1]
