"""One flipped bit anywhere in the files of a finished run: somebody notices, each time.

python -m tests.faults.flips --flips 1000

checkpoints/step-N/*                   who loads it: quire evaluate, predict, export, --resume
config.toml, result.json               quire runs show, and everything that opens the run
metrics.jsonl, predictions.parquet     quire runs show, compare, report
figures/*, report.html, log.txt        quire runs show
sums.json                              the same, as it has a sum over itself
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from quire.cli.main import main as command
from quire.errors import CheckpointError, QuireError
from quire.files import SUMS
from quire.runs import load
from quire.train.checkpoints import list_checkpoints, load_checkpoint
from quire.train.folder import CHECKPOINTS, RunFolder
from tests.recipes.examples import write_csv


def make_run(folder: Path) -> Path:
    """A finished run with several checkpoints and pictures of its own."""
    data, run = write_csv(folder / "mine.csv"), folder / "run"
    words = ["train", "mlp", "--data", str(data), "--out", str(run), "--epochs", "3", "--quiet"]
    words += ["--model.hidden", "4", "--train.checkpoint-every", "2", "--train.checkpoint-seconds", "0"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert command(words) == 0
    return run


def protected(run: Path) -> list[Path]:
    """Every file of the run but the empty lock."""
    return sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def noticed_by(run: Path, path: Path) -> list[str]:
    """Who speaks of the damage, and names the file or its checkpoint."""
    found = []
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = command(["runs", "show", str(run)])
    if code in (1, 2) and path.name in said.getvalue():
        found.append("runs show")
    steps = list_checkpoints(run / CHECKPOINTS)
    if path.parent in steps:
        try:
            load_checkpoint(path.parent)
        except CheckpointError as error:
            if path.parent.name in error.got:
                found.append("whoever loads it")
        if path.parent == steps[0]:
            with contextlib.suppress(QuireError):
                load(run).task  # noqa: B018
                return []
            found.append("evaluate")
            store = RunFolder.reopen(run)
            checkpoint = store.resume()
            store.close()
            assert checkpoint is not None
            if checkpoint.name == path.parent.name:
                return []
            found.append("resume")
    return found


def campaign(flips: int, seed: int, *, quiet: bool = False) -> Counter[str]:
    """Flip bits in files that are chosen alike, whatever their size, and put each back."""
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        run = make_run(Path(temporary))
        assert (run / SUMS).exists()
        whole = {path: path.read_bytes() for path in protected(run)}
        tail = last_line(whole[run / "log.txt"])
        for number in range(flips):
            path = [*whole][number % len(whole)]
            length = len(whole[path]) - (tail if path.name == "log.txt" else 0)
            bit = generator.randrange(8 * length)
            flip(path, bit)
            who = noticed_by(run, path)
            if not who:
                raise SystemExit(f"nobody noticed bit {bit} of {path.relative_to(run)}")
            counts[f"{path.relative_to(run).parts[0]}: {', '.join(who)}"] += 1
            for changed in protected(run):
                if whole.get(changed) != changed.read_bytes():
                    changed.write_bytes(whole[changed])
            if not quiet:
                print(f"\r{number + 1}", end="", file=sys.stderr, flush=True)
    return counts


def last_line(content: bytes) -> int:
    """Bytes of the line that is written after the sums are made."""
    return len(content.splitlines(keepends=True)[-1])


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
