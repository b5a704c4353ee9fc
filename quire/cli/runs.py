"""`quire runs` (list, show, compare) and `quire report`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from quire.cli.flags import HELP, is_flag
from quire.cli.parse import parse
from quire.cli.paths import require_run
from quire.cli.show import print_json, print_measures, print_table
from quire.errors import InputError, QuireError, unknown_name


@dataclass(frozen=True)
class RunsListOptions:
    """The runs of a folder, newest last."""

    folder: Path = Path("runs")
    """Where the runs lie."""
    json: bool = False
    """Print a list of objects."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class RunsShowOptions:
    """One run: how it was made and what came out."""

    run: Positional[Path]
    """Run folder."""
    json: bool = False
    """Print one object."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class RunsCompareOptions:
    """Runs side by side: options that differ, and measures."""

    runs: Positional[tuple[Path, ...]] = ()
    """Two or more run folders."""
    json: bool = False
    """Print a list of objects."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise InputError(f"{len(self.runs)} run to compare", expected="two or more run folders")


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html of a run again from what lies in its folder."""

    run: Positional[Path]
    """Run folder."""
    json: bool = False
    """Print one object: run, report."""
    debug: bool = False
    """Show the traceback of an error."""


REPORTED = ("config.toml", "result.json", "metrics.jsonl", "predictions.parquet", "samples.json")
"""What a report is made from."""
USAGE = """usage: quire runs [list | show RUN | compare RUN RUN ...] [OPTIONS]

  list           the runs of a folder (--folder, default runs); also without a word
  show RUN       how a run was made and what came out
  compare        runs side by side

quire runs list --help"""


def main(words: Sequence[str]) -> int:
    actions = {"list": list_runs, "show": show, "compare": compare_runs}
    if words and words[0] in HELP:
        print(USAGE)
        return 0
    if not words or is_flag(words[0]):
        return list_runs(words)
    if words[0] not in actions:
        raise unknown_name("action of quire runs", words[0], actions)
    return actions[words[0]](words[1:])


def list_runs(words: Sequence[str]) -> int:
    options = parse(RunsListOptions, words, prog="quire runs list")
    if not options.folder.is_dir() and options.folder != Path("runs"):
        raise InputError(f"--folder {options.folder}: no such folder", expected="a folder of runs")
    folders = [config.parent for config in options.folder.glob("*/config.toml")]
    from quire.report import Row, compare, comparison_table

    rows: list[Row] = []
    for folder in folders:
        try:
            rows += compare([folder])
        except QuireError as error:  # one damaged run must not hide the others
            print(f"left out: {error.got}", file=sys.stderr)
    rows.sort(key=lambda row: row.date)
    if options.json:
        print_json([asdict(row) for row in rows])
    elif rows:
        print_table(*comparison_table(rows))
    else:
        print(f"no runs in {options.folder}; quire train mlp makes one")
    return 0


def show(words: Sequence[str]) -> int:
    options = parse(RunsShowOptions, words, prog="quire runs show")
    require_run(options.run)
    from quire.files import check_sums
    from quire.report.reading import read_run

    run = read_run(options.run)
    check_sums(options.run)
    facts = {
        "run": str(options.run),
        "recipe": run.recipe,
        "command": run.config.get("command"),
        "finished": run.result is not None,
        "step": run.last_step,
        "measures": run.measures,
        "seconds": (run.result or {}).get("seconds"),
        "options": run.config.get("options", {}),
        "versions": run.config.get("versions", {}),
    }
    if options.json:
        print_json(facts)
        return 0
    for name in ("run", "recipe", "command", "finished", "step"):
        print(f"{name}: {facts[name]}")
    if facts["seconds"] is not None:
        print(f"seconds: {facts['seconds']:.1f}")
    if run.measures:
        print_measures(run.measures)
    print_table(["option", "value"], list(flatten(facts["options"]).items()))
    return 0


def compare_runs(words: Sequence[str]) -> int:
    options = parse(RunsCompareOptions, words, prog="quire runs compare")
    for folder in options.runs:
        require_run(folder)
    from quire.report import compare, comparison_table

    rows = compare(options.runs)
    if options.json:
        print_json([asdict(row) for row in rows])
    else:
        print_table(*comparison_table(rows))
    return 0


def report(words: Sequence[str]) -> int:
    options = parse(ReportOptions, words, prog="quire report")
    require_run(options.run)
    from quire.files import check_sums
    from quire.report import write

    check_sums(options.run, *REPORTED)
    path = write(options.run)
    if options.json:
        print_json({"run": str(options.run), "report": str(path)})
    else:
        print(f"report: {path}")
    return 0


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names as dotted ones, spelt as the flags are."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
