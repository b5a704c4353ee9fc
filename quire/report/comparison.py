"""Runs side by side: results, cost, and the options in which they differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.errors import InputError
from quire.report.reading import Run, read_run
from quire.report.summary import SPLITS, duration, flatten, headline, number, option_text

WITHOUT_EFFECT = frozenset({"out", "resume", "overwrite", "json", "quiet", "debug"})
"""Options that change where and how a run reports, not what it computes."""


@dataclass(frozen=True)
class Row:
    """One run of a comparison."""

    name: str
    recipe: str
    date: str
    measure: str
    """Name of the main measure, empty where nothing was recorded yet."""
    values: dict[str, float | None]
    """The main measure by split; None where it is unknown or not finite."""
    seconds: float | None
    parameters: int | None
    stopped: str
    """finished, early, interrupted, or unfinished for a run without a result."""
    options: dict[str, Any] = field(default_factory=dict)
    """Those in which the compared runs differ; None where this run does not have one."""


def compare(run_folders: Iterable[Path]) -> list[Row]:
    """A row for each run, in the order given."""
    runs = [read_run(Path(folder)) for folder in run_folders]
    if not runs:
        raise InputError("no run to compare", expected="one run folder or more", fix="name run folders")
    flat = [flatten(run.config.get("options") or {}) for run in runs]
    names = dict.fromkeys(name for options in flat for name in options if name not in WITHOUT_EFFECT)
    missing = object()
    differing = [n for n in names if any(o.get(n, missing) != flat[0].get(n, missing) for o in flat)]
    return [
        _row(run, {name: options.get(name) for name in differing})
        for run, options in zip(runs, flat, strict=True)
    ]


def _row(run: Run, options: dict[str, Any]) -> Row:
    result = run.result or {}
    main = headline(run)
    found = {split: run.measures.get(split, {}).get(main.measure) if main else None for split in SPLITS}
    return Row(
        name=run.folder.resolve().name,
        recipe=run.recipe,
        date=_date(run),
        measure=main.measure if main else "",
        values={s: found[s] if math.isfinite(found[s] or 0) else None for s in reversed(SPLITS)},
        seconds=result.get("seconds"),
        parameters=result.get("parameters"),
        stopped=str(result.get("stopped", "finished")) if run.result is not None else "unfinished",
        options=options,
    )


def _date(run: Run) -> str:
    """The date that the configuration names, or when it was written: at the start of the run."""
    named = run.config.get("date")
    if named is not None:
        return str(named)
    written = (run.folder / "config.toml").stat().st_mtime
    return datetime.fromtimestamp(written).strftime("%Y-%m-%d %H:%M")


def comparison_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells as text, ready for any table printer."""
    options = list(rows[0].options) if rows else []
    head = ["run", "recipe", "date", "measure", *reversed(SPLITS), "time", "parameters", "end"]
    head += [f"--{name}" for name in options]
    cells = [
        [
            row.name,
            row.recipe,
            row.date,
            row.measure or "–",
            *(number(row.values[split]) for split in reversed(SPLITS)),
            duration(row.seconds),
            number(row.parameters),
            row.stopped,
            *(option_text(row.options[name]) if row.options[name] is not None else "–" for name in options),
        ]
        for row in rows
    ]
    return head, cells
