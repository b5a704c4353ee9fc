"""One flipped bit anywhere in the files of a run: somebody notices, each time.

python -m tests.faults.flips --flips 1000

checkpoints/step-N/*                   who loads it: quire evaluate, predict, export, --resume
config.toml, result.json               quire runs show, and everything that opens the run
metrics.jsonl, predictions.parquet     quire runs show, compare, report
figures/*, report.html, log.txt        quire runs show
sums.json                              the same, as it has a sum over itself

A third of them fall into a run that was interrupted, which has no sums of its metrics and its log yet:

metrics.jsonl                          who goes on with the run, and puts it right from the checkpoint
log.txt                                nobody: nothing reads it
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from quire.cli.main import main as command
from quire.errors import CheckpointError, QuireError
from quire.report.reading import read_metrics
from quire.runs import load
from quire.train.checkpoints import list_checkpoints, load_checkpoint
from quire.train.folder import CHECKPOINTS, CONFIG, LOG, METRICS, RunFolder
from quire.train.step import Stepper
from tests.recipes.examples import write_csv

KINDS = ("ended", "stopped")


def make_run(folder: Path, name: str = "run", *, interrupted: bool = False) -> Path:
    """A run with several checkpoints, and where it has ended pictures of its own."""
    data, run = write_csv(folder / "mine.csv"), folder / name
    words = ["train", "mlp", "--data", str(data), "--out", str(run), "--steps", "9", "--quiet"]
    words += ["--train.batch-size", "20", "--train.validate-every", "3"]
    words += ["--model.hidden", "4", "--train.checkpoint-every", "2", "--train.checkpoint-seconds", "0"]
    step = Stepper.step

    def asking(self: Stepper, *values: Any) -> Any:
        if interrupted and values[-1] == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *values)

    Stepper.step = asking  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert command(words) == (143 if interrupted else 0)
    finally:
        Stepper.step = step  # type: ignore[method-assign]
    assert (run / "result.json").exists() != interrupted
    return run


def protected(run: Path) -> list[Path]:
    """Every file of the run but the empty lock, and the log of one that goes on."""
    spared = set() if (run / "result.json").exists() else {run / LOG}
    return sorted(
        path for path in run.rglob("*") if path.is_file() and path.stat().st_size and path not in spared
    )


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def names_it(path: Path, *words: str) -> bool:
    """Whether a command refuses, and names the file."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = command(words)
    return code in (1, 2) and path.name in said.getvalue()


def tells_who_goes_on(run: Path, path: Path, whole: bytes) -> bool:
    """Whether the log of a run that is gone on with names the file, which is as it was again, or its
    checkpoint, which is left alone."""
    store = RunFolder.reopen(run)
    checkpoint = store.resume()
    store.close()
    said = (run / LOG).read_text().splitlines()[-2]
    if path.name == METRICS:  # in another order of their names
        wanted = [json.loads(line) for line in whole.splitlines()]
        return read_metrics(path)[0] == wanted and path.name in said
    assert checkpoint is not None
    return checkpoint.name != path.parent.name and path.parent.name in said


def noticed_by(run: Path, path: Path, whole: bytes) -> list[str]:
    """Who speaks of the damage, and names the file or its checkpoint."""
    found = []
    ended = (run / "result.json").exists()
    if names_it(path, "runs", "show", str(run)):
        found.append("runs show")
    if path.name == CONFIG and not names_it(path, "train", "mlp", "--resume", str(run), "--quiet"):
        return []
    if path.name == METRICS and not ended and tells_who_goes_on(run, path, whole):
        found.append("resume")
    steps = list_checkpoints(run / CHECKPOINTS)
    if path.parent in steps:
        with contextlib.suppress(CheckpointError):
            load_checkpoint(path.parent)
            return []
        found.append("whoever loads it")
        if path.parent == steps[0]:
            if ended:
                with contextlib.suppress(QuireError):
                    load(run).task  # noqa: B018
                    return []
                found.append("evaluate")
            if not tells_who_goes_on(run, path, whole):
                return []
            found.append("resume")
    return found


def campaign(flips: int, seed: int, *, quiet: bool = False) -> Counter[str]:
    """Flip bits in files that are chosen alike, whatever their size, and put each back."""
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        ended, stopped = (make_run(Path(temporary), name, interrupted=name == "stopped") for name in KINDS)
        turns = {run: itertools.count() for run in (ended, stopped)}
        for number in range(flips):
            run = (ended, ended, stopped)[number % 3]
            flip_one(run, next(turns[run]), generator, counts)
            if not quiet:
                print(f"\r{number + 1}", end="", file=sys.stderr, flush=True)
    return counts


def flip_one(run: Path, number: int, generator: random.Random, counts: Counter[str]) -> None:
    whole = {path: path.read_bytes() for path in protected(run)}
    path = [*whole][number % len(whole)]
    bit = generator.randrange(8 * len(whole[path]))
    flip(path, bit)
    who = noticed_by(run, path, whole[path])
    if not who:
        raise SystemExit(f"nobody noticed bit {bit} of {path.relative_to(run.parent)}")
    counts[f"{run.name}, {path.relative_to(run).parts[0]}: {', '.join(who)}"] += 1
    for changed in protected(run):
        if changed not in whole:
            changed.unlink()
        elif whole[changed] != changed.read_bytes():
            changed.write_bytes(whole[changed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    counts = campaign(arguments.flips, arguments.seed)
    print()
    for name, count in sorted(counts.items()):
        print(f"{count:5d}  {name}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
