"""`quire download NAME [FOLDER]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from quire.cli.parse import parse
from quire.cli.show import print_json

if TYPE_CHECKING:
    from quire.data.known import Shown


@dataclass(frozen=True)
class DownloadOptions:
    """A well-known set of images, checked against sums that are known: mnist, fashion-mnist, cifar-10.

    This alone opens a connection to the internet; to train needs none.
    """

    name: Positional[str]
    """Of the set."""
    folder: Positional[Path | None] = None
    """Where to; the default is data/NAME."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print one object: folder, files, bytes."""
    debug: bool = False
    """Show the traceback of an error."""


def main(words: Sequence[str]) -> int:
    options = parse(DownloadOptions, words, prog="quire download")
    from quire.data.known import KNOWN, download

    known = KNOWN[options.name]
    folder = options.folder or Path("data", options.name)
    with progress(quiet=options.quiet or options.json) as shown:
        download(options.name, folder, shown)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    size = sum(path.stat().st_size for path in files)
    if options.json:
        print_json({"folder": str(folder), "files": [path.name for path in files], "bytes": size})
        return 0
    print(f"{folder}: {known.summary}; {len(files)} files, {size / 1e6:.1f} MB")
    print(f"quire train {known.recipe} --data {folder}")
    return 0


@contextmanager
def progress(*, quiet: bool) -> Iterator[Shown]:
    """A bar on a terminal, a line for each file elsewhere."""
    if quiet:
        yield lambda name, done, whole: None
        return
    if not sys.stderr.isatty():

        def line(name: str, done: int, whole: int) -> None:
            if done == whole:
                print(f"{name}: {whole:,} bytes", file=sys.stderr)

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        begun: dict[str, TaskID] = {}

        def bar(name: str, done: int, whole: int) -> None:
            if name not in begun:
                begun[name] = bars.add_task(name, total=whole)
            bars.update(begun[name], completed=done)

        yield bar
