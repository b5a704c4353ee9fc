"""What the commands print: tables on a terminal, plain aligned text or JSON elsewhere."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One JSON value on standard output; NaN and infinity, which JSON lacks, become null."""
    print(json.dumps(plain(value), ensure_ascii=False))


def plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)


def print_notes(notes: Sequence[str]) -> None:
    """Beside standard output, which holds what was asked for."""
    sys.stdout.flush()
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def number(value: object) -> str:
    """A value as a person reads it: four digits of a number, a list without brackets."""
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(number(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """A table drawn by rich on a terminal, columns of plain text elsewhere."""
    cells = [[number(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, cells, title)
        return
    if title:
        print(title)
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    for line in [list(columns), *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _draw(columns: Sequence[str], cells: Sequence[Sequence[str]], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=box.SIMPLE_HEAD, title=title or None, title_justify="left")
    colours = {"pass": "green", "yes": "green", "FAIL": "bold red", "no": "yellow"}
    for line in cells:
        table.add_row(*(Text(text, style=colours.get(text, "")) for text in line))
    Console().print(table)


def print_measures(measures: Mapping[str, Mapping[str, float]]) -> None:
    """One line a split, one column a measure."""
    known = [split for split in ("train", "validation", "test") if split in measures]
    splits = dict.fromkeys([*known, *measures])
    names = dict.fromkeys(name for split in splits for name in measures[split])
    rows = [[split, *(measures[split].get(name) for name in names)] for split in splits]
    print_table(["split", *names], rows)
