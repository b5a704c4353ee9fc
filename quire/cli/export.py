"""`quire export RUN FILE`."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from quire.cli.parse import parse
from quire.cli.paths import refuse_existing, require_run
from quire.cli.show import number, print_json
from quire.errors import InputError


@dataclass(frozen=True)
class ExportOptions:
    """The trained model as a file for other programs, compared with the original before it is kept."""

    run: Positional[Path]
    """Run folder."""
    file: Positional[Path]
    """The ending decides: .onnx for ONNX, .pt2 for a torch.export program."""
    overwrite: bool = False
    """Replace the file if it exists."""
    json: bool = False
    """Print one object: path, inputs, outputs, largest_difference."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.file.suffix.lower() not in (".onnx", ".pt2"):
            raise InputError(
                f"export to {self.file}",
                expected="a name that ends in .onnx or .pt2",
                fix="change the ending",
            )


@contextlib.contextmanager
def exporters_hushed(debug: bool) -> Iterator[None]:
    """The exporters print, log and warn about their own insides, which helps with --debug alone."""
    before = logging.root.manager.disable
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        if not debug:
            logging.disable(logging.WARNING)
            warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)


def main(words: Sequence[str]) -> int:
    options = parse(ExportOptions, words, prog="quire export")
    require_run(options.run)
    refuse_existing(options.file, options.overwrite)
    from quire.runs import load

    with exporters_hushed(options.debug):
        summary = load(options.run).export(options.file)
    if options.json:
        print_json(summary)
    else:
        for name, value in summary.items():
            print(f"{name.replace('_', ' ')}: {number(value)}")
    return 0
