"""`quire predict RUN FILE`."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from csv import writer
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from quire.cli.parse import parse
from quire.cli.paths import refuse_existing, require_file, require_run
from quire.cli.show import print_json, print_notes
from quire.errors import InputError
from quire.options import check_range

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class ReadImages:
    """How images are read; what is not said is as in training."""

    broken: Literal["refuse", "skip"] | None = None
    """What to do with files that are truncated, no image, or too large."""


@dataclass(frozen=True)
class PredictOptions:
    """Predictions for the rows of a table or for images: as CSV on standard output, or in a file (--out)."""

    run: Positional[Path]
    """Run folder."""
    file: Positional[Path]
    """Table with the columns that the run was trained on, where the target may be missing; or an image, a
    folder of images, IDX or CIFAR files."""
    out: Path | None = None
    """Write to this file; its ending, .csv or .parquet, decides the format."""
    mode: Literal["mode", "mean", "sample", "interval"] = "mode"
    """The most probable value, the mean, a random draw, or an interval; which exist depends on the model."""
    level: float | None = None
    """Probability that an interval should hold, 0.9 unless you say; only for models with a distribution."""
    score: float | None = None
    """Least score of an object that is found on an image, 0.3 unless you say; only for detectors."""
    seed: int | None = None
    """Seed of the random draw, 0 unless you say; only for models that draw."""
    images: ReadImages = field(default_factory=ReadImages)
    overwrite: bool = False
    """Replace the file of --out if it exists."""
    json: bool = False
    """Print one object: run, rows, and out or the predictions."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        check_range(self, "--", level="(0, 1)", score="(0, 1)", seed=">= 0")
        if self.out is not None and self.out.suffix.lower() not in (".csv", ".parquet"):
            raise InputError(
                f"--out {self.out}", expected="a name that ends in .csv or .parquet", fix="change the ending"
            )


def main(words: Sequence[str]) -> int:
    options = parse(PredictOptions, words, prog="quire predict")
    require_run(options.run)
    require_file(options.file)
    if options.out is not None:
        refuse_existing(options.out, options.overwrite)
    from quire.runs import load

    run = load(options.run)
    parts = run.predict_parts(
        options.file, mode=options.mode, level=options.level, score=options.score, seed=options.seed,
        broken=options.images.broken,
    )  # fmt: skip
    if options.out is not None:
        rows = write_parts(parts, options.out)
        if options.json:
            print_json({"run": str(options.run), "rows": rows, "out": str(options.out)})
        else:
            print(f"{rows} predictions: {options.out}")
    elif options.json:
        found = [row for part in parts for row in part.to_pylist()]
        print_json({"run": str(options.run), "rows": len(found), "predictions": found})
    else:
        for number, part in enumerate(parts):
            sys.stdout.write(as_csv(part, header=not number).decode())
    print_notes(run.notes)
    return 0


def as_csv(table: pyarrow.Table, *, header: bool = True) -> bytes:
    import pyarrow
    from pyarrow import csv

    names = io.StringIO()  # pyarrow quotes every column name, needed or not
    if header:
        writer(names, lineterminator="\n").writerow(table.column_names)
    sink = pyarrow.BufferOutputStream()
    csv.write_csv(table, sink, csv.WriteOptions(include_header=False, quoting_style="needed"))
    return names.getvalue().encode() + bytes(sink.getvalue().to_pybytes())


def write_table(table: pyarrow.Table, path: Path) -> None:
    write_parts(iter([table]), path)


def write_parts(parts: Iterator[pyarrow.Table], path: Path) -> int:
    """The whole file or none: written to a temporary sibling part by part, then renamed. Returns its rows."""
    from pyarrow import parquet

    from quire.files import replacing

    rows = 0
    with replacing(path) as file:
        if path.suffix.lower() == ".csv":
            for number, part in enumerate(parts):
                file.write(as_csv(part, header=not number))
                rows += part.num_rows
            return rows
        target = None
        for part in parts:
            target = target or parquet.ParquetWriter(file, part.schema)
            target.write_table(part)
            rows += part.num_rows
        if target is not None:
            target.close()
    return rows
