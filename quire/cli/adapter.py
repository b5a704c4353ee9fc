"""`quire adapter` (list, merge, unmerge, export): the adapters of a tuned run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from quire.cli.flags import HELP, is_flag
from quire.cli.parse import parse
from quire.cli.paths import refuse_existing, require_run
from quire.cli.show import print_json, print_table
from quire.errors import InputError, unknown_name


@dataclass(frozen=True)
class AdapterListOptions:
    """The adapters of a run: what they change, and how large they are."""

    run: Positional[Path]
    """Run folder."""
    json: bool = False
    """Print a list of objects."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class AdapterMergeOptions:
    """A new run whose weights contain the adapters, and which costs no more than the base."""

    run: Positional[Path]
    """Run folder."""
    out: Path | None = None
    """Folder of the new run; the default is RUN-merged."""
    dequantise: bool = False
    """Give weights in NormalFloat4 back their full size, instead of rounding the sum to four bits again."""
    json: bool = False
    """Print one object: the new run, and the error of each weight."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class AdapterUnmergeOptions:
    """A new run as it was before its adapters were merged, bit by bit."""

    run: Positional[Path]
    """Run folder."""
    out: Path | None = None
    """Folder of the new run; the default is RUN-unmerged."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class AdapterExportOptions:
    """An adapter alone: a folder that PEFT reads, or one .safetensors file."""

    run: Positional[Path]
    """Run folder."""
    path: Positional[Path]
    """Folder or .safetensors file to write."""
    name: str | None = None
    """Which adapter, where there are several."""
    overwrite: bool = False
    """Replace the file if it exists."""
    debug: bool = False
    """Show the traceback of an error."""


def main(words: Sequence[str]) -> int:
    actions = {"list": list_adapters, "merge": merge, "unmerge": unmerge, "export": export}
    if words and words[0] in HELP:
        print("usage: quire adapter list|merge|unmerge|export RUN [OPTIONS]\n")
        print("quire adapter list --help   the options of each")
        return 0
    if not words or is_flag(words[0]):
        raise InputError(
            "no action", expected=f"one of {', '.join(actions)}", fix="for example: quire adapter list RUN"
        )
    if words[0] not in actions:
        raise unknown_name("action of quire adapter", words[0], actions)
    return actions[words[0]](words[1:])


def list_adapters(words: Sequence[str]) -> int:
    options = parse(AdapterListOptions, words, prog="quire adapter list")
    require_run(options.run)
    from quire.runs import load

    run = load(options.run)
    adapters = run.adapters
    found = adapters.summaries() if adapters is not None else []
    rows = [
        {
            "name": one.name,
            "active": one.weight,
            "rank": one.config.rank,
            "scale": one.config.scale,
            "targets": ", ".join(one.config.targets),
            "weights": one.weights,
            "parameters": one.parameters,
        }
        for one in found
    ]
    if options.json:
        print_json(rows)
    elif rows:
        header = [*rows[0]]
        print_table(header, [[f"{row[key]}" for key in header] for row in rows])
    else:
        print(f"{options.run} has no adapters")
    return 0


def merge(words: Sequence[str]) -> int:
    options = parse(AdapterMergeOptions, words, prog="quire adapter merge")
    require_run(options.run)
    out = options.out or options.run.with_name(f"{options.run.name}-merged")
    from quire.recipes.merged import merge_run

    report = merge_run(options.run, out, dequantise=options.dequantise)
    if options.json:
        errors = {
            name: {"largest": error.largest, "relative": error.relative}
            for name, error in report.errors.items()
        }
        print_json({"run": str(out), "errors": errors})
    else:
        print(f"{report}\nrun: {out}")
    return 0


def unmerge(words: Sequence[str]) -> int:
    options = parse(AdapterUnmergeOptions, words, prog="quire adapter unmerge")
    require_run(options.run)
    out = options.out or options.run.with_name(f"{options.run.name}-unmerged")
    from quire.recipes.merged import unmerge_run

    unmerge_run(options.run, out)
    print(f"run: {out}")
    return 0


def export(words: Sequence[str]) -> int:
    options = parse(AdapterExportOptions, words, prog="quire adapter export")
    require_run(options.run)
    single = options.path.suffix == ".safetensors"
    if single:
        refuse_existing(options.path, options.overwrite)
    elif options.path.exists() and not options.overwrite:
        raise InputError(
            f"{options.path} exists already",
            expected="a new folder",
            fix="choose another, or add --overwrite",
        )
    from quire.runs import load

    adapters = load(options.run).adapters
    if adapters is None or not adapters.configs:
        raise InputError(
            f"{options.run} has no adapters", expected="a run that was tuned with --tune.lora.rank"
        )
    (adapters.save if single else adapters.export)(options.path, options.name)
    print(f"wrote {options.path}")
    return 0
