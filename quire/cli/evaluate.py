"""`quire evaluate RUN`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from quire.cli.parse import parse
from quire.cli.paths import require_file, require_run
from quire.cli.predict import ReadImages
from quire.cli.show import print_json, print_measures, print_notes
from quire.errors import InputError


@dataclass(frozen=True)
class EvaluateOptions:
    """The measures of a run, on its own data or on another file with the same columns."""

    run: Positional[Path]
    """Run folder."""
    data: Path | None = None
    """A file to judge the model on; without it the run's own data."""
    split: Literal["all", "train", "validation", "test"] = "all"
    """Which part of the run's own data; a file of yours is judged whole."""
    images: ReadImages = field(default_factory=ReadImages)
    json: bool = False
    """Print one object: run, measures by split, seconds."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.data is not None and self.split != "all":
            raise InputError(
                f"--split {self.split} with --data {self.data}",
                expected="one of them: a file of yours has no parts and is judged whole",
                fix="leave one of them out",
            )


def main(words: Sequence[str]) -> int:
    options = parse(EvaluateOptions, words, prog="quire evaluate")
    require_run(options.run)
    if options.data is not None:
        require_file(options.data)
    start = time.perf_counter()
    from quire.runs import load

    run = load(options.run)
    measures = run.evaluate(options.data, broken=options.images.broken)
    if options.split != "all":
        if options.split not in measures:
            raise InputError(
                f"the run has no {options.split} part",
                expected=f"--split with one of {', '.join(measures)}, all",
            )
        measures = {options.split: measures[options.split]}
    if options.json:
        seconds = time.perf_counter() - start
        print_json({"run": str(options.run), "measures": measures, "seconds": seconds})
    else:
        print_measures(measures)
    print_notes(run.notes)
    return 0
