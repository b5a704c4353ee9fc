"""SIGKILL at random moments, many of them inside a save: no run that cannot be resumed, no checkpoint
that loads wrong.

A run is started, killed and resumed until it ends; then its weights, optimiser and metrics must equal
those of a run that nobody touched. Python's start-up costs more than the run, so the worker forks
from a process that has everything imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from quire.train.checkpoints import list_checkpoints, load_checkpoint, newest_checkpoint
from tests.faults.worker import run


def start(path: Path) -> tuple[int, int]:
    """A forked worker and the reading end of what it prints."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        os.close(reading)
        code = 1
        try:
            run(path)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def attempt(path: Path, generator: random.Random, inside_save: bool) -> tuple[bool, bool]:
    """One life of the run; (whether it ended by itself, whether the kill fell inside a save)."""
    child, reading = start(path)
    output = b""
    deadline = time.monotonic() + 60
    target = generator.randint(1, 12)  # kill in this save from here, or after this time
    patience = generator.uniform(0.0, 0.12)
    begun = time.monotonic()
    while True:
        wait = 0.05 if inside_save else max(0.0, begun + patience - time.monotonic())
        ready, _, _ = select.select([reading], [], [], wait)
        if ready:
            chunk = os.read(reading, 4096)
            if not chunk:
                break
            output += chunk
        if inside_save and output.count(b"saving") >= target:
            time.sleep(generator.uniform(0.0, 0.003))  # a save takes a few milliseconds
            break
        if not inside_save and time.monotonic() - begun >= patience:
            break
        assert time.monotonic() < deadline, "the worker hangs"
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    while chunk := os.read(reading, 4096):
        output += chunk
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise AssertionError(f"the worker failed by itself with code {os.WEXITSTATUS(status)}")
    ended = b"done" in output
    return ended, not ended and output.count(b"saving") > output.count(b"saved")


def check(path: Path, whole: Path) -> None:
    """The finished run equals the undisturbed one."""
    ours, theirs = newest_checkpoint(path / "checkpoints"), newest_checkpoint(whole / "checkpoints")
    assert ours.step == theirs.step
    for kind in theirs.tensors:
        for name, value in theirs.tensors[kind].items():
            same = torch.allclose(ours.tensors[kind][name], value, rtol=0, atol=0, equal_nan=True)
            assert same, f"{kind}: {name}"

    def metrics(folder: Path) -> list[dict[str, object]]:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]

    assert metrics(path) == metrics(whole)


def check_between(path: Path) -> None:
    """After a kill: each checkpoint with its final name loads whole, unless it was being deleted."""
    found = list_checkpoints(path / "checkpoints")
    for checkpoint in found[:1]:
        load_checkpoint(checkpoint)


def campaign(kills: int, seed: int, *, quiet: bool = False) -> dict[str, int]:
    """Kill until `kills` kills have been survived, at least a third of them inside a save."""
    generator = random.Random(seed)
    counts = {"kills": 0, "inside a save": 0, "runs": 0}
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary) / "whole"
        child, reading = start(whole)
        while os.read(reading, 4096):
            pass
        os.close(reading)
        assert os.waitpid(child, 0)[1] == 0
        path = Path(temporary) / "run"
        while counts["kills"] < kills:
            aim = 2 * counts["inside a save"] < counts["kills"] + 1
            ended, inside = attempt(path, generator, inside_save=aim)
            if ended:
                check(path, whole)
                counts["runs"] += 1
                shutil.rmtree(path)
                continue
            counts["kills"] += 1
            counts["inside a save"] += inside
            if path.exists():
                check_between(path)
            if not quiet:
                print(f"\r{counts}", end="", file=sys.stderr, flush=True)
        if path.exists():  # the last one must still come to its end
            run(path)
            check(path, whole)
            counts["runs"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    counts = campaign(arguments.kills, arguments.seed)
    print("\n" + ", ".join(f"{name}: {value}" for name, value in counts.items()))
    need = min(50, arguments.kills // 4)
    if counts["inside a save"] < need:
        raise SystemExit(f"only {counts['inside a save']} kills fell inside a save, {need} are wanted")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
