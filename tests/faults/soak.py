"""A long run with one fault after another: it ends with the bits of a run without them, its memory does not
grow, and its log tells the story.

    python -m tests.faults.soak --minutes 30

Faults come in random order every few seconds: SIGKILL, SIGTERM, a full disk, a row that is not a number for a
while, no memory for a single row for a while. Only a kill ends the process; after all others it goes on with
the run by itself, so that memory is looked at over many resumptions in one process as well as over processes.
In the middle third nobody kills.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.data.batch import TensorData
from quire.errors import NonFiniteError, QuireError, WriteError
from quire.options import Optim, Train
from quire.train import Interrupted, fit
from quire.train.checkpoints import newest_checkpoint
from quire.train.descent import Callback, Descent
from quire.train.folder import CHECKPOINTS
from quire.train.memory import OutOfMemory
from tests.faults.disks import can_mount, disk, fill, run_inside
from tests.faults.lives import check_bits
from tests.faults.watch import status
from tests.train.examples import classes, classifier, folder

PACE = 0.01
"""Seconds that a step waits, so that there are not millions of them; the run to compare with does not."""
SAVES = 150
"""Steps between saves."""
GROWTH = 8 * 2**20
"""Bytes by which memory may differ: what a checkpoint and its history take, several times over."""
PAGES = 1500
ENDLESS = 10**9
SCARCE = "scarce"
"""While there is a file of this name beside the data, there is no memory for gradients."""
STOPS = {NonFiniteError: "not a number", OutOfMemory: "no memory", WriteError: "full"}


class Paced(Callback):
    """Takes its time, and tells once that it is under way."""

    def __init__(self) -> None:
        self.told = False

    def on_step(self, descent: Descent, step: int) -> None:
        if not self.told:
            tell("going")
            self.told = True
        time.sleep(PACE)


# -- The run ---------------------------------------------------------------------------------------


def train(path: Path, data: Path, steps: int, callbacks: Sequence[Callback] = ()) -> None:
    """Until it ends, or something stops it that is then logged."""
    given = TensorData({**classes().fields, "inputs": torch.from_numpy(np.load(data))})
    task, scarce = classifier(dropout=0.2), data.with_name(SCARCE)

    def allocate(*_: object) -> None:
        if torch.is_grad_enabled() and scarce.exists():
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    next(layer for layer in task.modules() if isinstance(layer, nn.Linear)).register_forward_hook(allocate)
    store = folder(path, resume=path.exists())
    options = Train(batch_size=20, checkpoint_every=SAVES, validate_every=5 * SAVES, micro_batches=2)
    try:
        fit(task, given, classes(30, 2), steps=steps, optim=Optim(lr=0.001), train=options, store=store,
            callbacks=callbacks)  # fmt: skip
    except Interrupted as stop:
        store.log(f"stopped: {stop.got}")
        raise
    except (NonFiniteError, OutOfMemory, WriteError) as problem:
        tell(STOPS[type(problem)], said=problem.got)
        sys.stdin.readline()  # somebody has seen to it
        store.log(f"failed: {problem.got}")
        raise
    finally:
        store.close()


def tell(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, "memory": status("VmRSS"), **more}), flush=True)


def work(path: Path, data: Path) -> None:
    """The run in one process, as long as that lives."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # but while it trains
    while True:
        try:
            train(path, data, ENDLESS, [Paced()])
        except QuireError as problem:
            tell(type(problem).__name__)
        gc.collect()


# -- The faults ------------------------------------------------------------------------------------


class Soak:
    """The run from outside."""

    def __init__(self, place: Path, work: Path, seed: int, *, mounted: bool) -> None:
        self.place, self.path, self.data = place, place / "run", work / "rows.npy"
        self.mounted = mounted
        self.random = random.Random(seed)
        self.rows = classes().fields["inputs"].numpy()
        np.save(self.data, self.rows)
        self.counts: Counter[str] = Counter()
        self.memory: list[list[tuple[float, int]]] = []
        """Of each process: age in seconds and bytes whenever it has told something."""
        self.start()

    def start(self) -> None:
        words = ["--worker", str(self.path), str(self.data)]
        self.running = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.soak", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.born = time.monotonic()
        self.memory.append([])
        self.hear("going")

    @property
    def age(self) -> float:
        return time.monotonic() - self.born

    def hear(self, *wanted: str) -> dict[str, Any]:
        """What the run tells next, which must be one of these."""
        assert self.running.stdout is not None
        line = self.running.stdout.readline()
        assert line, f"it ended with code {self.running.wait()} instead of telling of {wanted}"
        told: dict[str, Any] = json.loads(line)
        assert told["what"] in wanted, told
        self.memory[-1].append((self.age, told["memory"]))
        return told

    def mended(self, error: str) -> None:
        """What was wrong is right again: the run goes on by itself."""
        assert self.running.stdin is not None
        self.running.stdin.write("\n")
        self.running.stdin.flush()
        self.hear(error)
        self.hear("going")

    def terminate(self) -> None:
        self.running.send_signal(signal.SIGTERM)
        self.hear("Interrupted")
        self.hear("going")

    def kill(self) -> None:
        self.running.kill()
        self.running.communicate()
        self.start()

    def fill_disk(self) -> None:
        ballast = fill(self.place, self.random.randint(0, 3))
        told = self.hear("full")
        assert str(self.path) in told["said"], told
        assert "bytes" in told["said"], told
        ballast.unlink()
        self.mended("WriteError")

    def take_memory(self) -> None:
        """Parts of a batch are halved until there is no smaller one."""
        scarce = self.data.with_name(SCARCE)
        scarce.touch()
        told = self.hear("no memory")
        assert "out of memory" in told["said"], told
        scarce.unlink()
        self.mended("OutOfMemory")

    def spoil(self) -> None:
        """A row is not a number from the next resumption on, until somebody mends it."""
        row = self.random.randrange(len(self.rows))
        spoilt = self.rows.copy()
        spoilt[row, self.random.randrange(spoilt.shape[1])] = self.random.choice([np.nan, np.inf])
        np.save(self.data, spoilt)
        self.running.send_signal(signal.SIGTERM)
        self.hear("Interrupted")
        told = self.hear("going", "not a number")
        if told["what"] == "going":  # until the row's turn comes
            told = self.hear("not a number")
        assert re.search(rf"\b{row}\b", told["said"]), (row, told)
        np.save(self.data, self.rows)
        self.mended("NonFiniteError")

    def soak(self, minutes: float) -> None:
        begun = time.monotonic()
        kinds = {"SIGTERM": self.terminate, "not a number": self.spoil, "no memory": self.take_memory}
        if self.mounted:
            kinds["full disk"] = self.fill_disk
        deck: list[str] = []
        while time.monotonic() - begun < 60 * minutes:
            share = (time.monotonic() - begun) / (60 * minutes)
            calm = 1 / 3 < share < 2 / 3
            if not calm and self.age > max(15.0, 2 * minutes) and self.random.random() < 0.3:
                name, fault = "SIGKILL", self.kill
            else:
                deck = deck or self.random.sample([*kinds], len(kinds))
                name = deck.pop()
                fault = kinds[name]
            time.sleep(self.random.uniform(1.0, 6.0))
            assert self.running.poll() is None, f"it ended by itself with code {self.running.returncode}"
            fault()
            self.counts[name] += 1
            print(f"\r{share:4.0%} {dict(self.counts)}", end="", file=sys.stderr, flush=True)
        self.running.kill()
        self.running.communicate()
        self.counts["SIGKILL"] += 1


# -- What is left ----------------------------------------------------------------------------------


def check_log(path: Path, counts: Counter[str]) -> None:
    """Each fault has its line, each resumption too, and a kill is a resumption that nothing announces."""
    log = [line.partition(" ")[2] for line in (path / "log.txt").read_text().splitlines()]
    stopped = [line for line in log if line.startswith("stopped: interrupted after step")]
    failed = [line for line in log if line.startswith("failed: ")]
    resumed = [place for place, line in enumerate(log) if line.startswith("resumed at step")]
    unannounced = [place for place in resumed if not log[place - 1].startswith(("stopped", "failed"))]
    assert len(stopped) >= counts["SIGTERM"] + counts["not a number"], log
    assert sum("cannot be written" in line for line in failed) >= counts["full disk"]
    assert sum("row" in line and "finite" in line for line in failed) >= counts["not a number"]
    assert sum("out of memory" in line for line in failed) >= counts["no memory"]
    around = [log[max(0, place - 4) : place + 4] for place in unannounced]
    assert len(unannounced) == counts["SIGKILL"], around
    assert len(resumed) >= sum(counts.values())


def check_memory(memory: list[list[tuple[float, int]]]) -> Iterator[str]:
    """Within a process from its first quarter to its last, and from the first process to the last."""
    settled = []
    for life in memory:
        sizes = [size for _, size in life[2:]]  # the first times round fill caches
        if len(sizes) >= 8:
            quarter = len(sizes) // 4
            first, last = sorted(sizes[:quarter])[quarter // 2], sorted(sizes[-quarter:])[quarter // 2]
            yield f"{len(life)} times in {life[-1][0]:.0f} s: {first / 2**20:.1f} to {last / 2**20:.1f} MB"
            assert last - first < GROWTH, sizes
        if sizes:
            settled.append(sizes[0])
    yield "processes, once settled: " + ", ".join(f"{size / 2**20:.0f}" for size in settled) + " MB"
    assert settled[-1] - settled[0] < GROWTH, settled


def run(minutes: float, seed: int, *, mounted: bool) -> None:
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        place = Path(temporary, "disk")
        place.mkdir()
        if mounted:
            stack.enter_context(disk(place, PAGES))
        whole = Path(temporary, "whole")
        begun = time.monotonic()
        soak = Soak(place, Path(temporary), seed, mounted=mounted)
        soak.soak(minutes)
        took = time.monotonic() - begun
        torch.set_num_threads(1)
        steps = newest_checkpoint(soak.path / CHECKPOINTS).step + 10  # the end, which nobody disturbs
        for path in (soak.path, whole):
            train(path, soak.data, steps)
        log = (soak.path / "log.txt").read_text()
        check_bits(soak.path, whole)
        check_log(soak.path, soak.counts)
        print(f"\n{steps} steps in {took / 60:.1f} minutes: {dict(soak.counts)}")
        print(*check_memory(soak.memory), sep="\n")
        print(
            f"log of {len(log.splitlines())} lines, of which the last are:", *log.splitlines()[-8:], sep="\n"
        )
        shutil.rmtree(soak.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--inside", action="store_true", help="in the private mounts already")
    parser.add_argument("--allow-skip", action="store_true", help="no full disks where none can be mounted")
    parser.add_argument("--worker", nargs=2, metavar=("RUN", "DATA"))
    arguments = parser.parse_args()
    if arguments.worker:
        path, data = arguments.worker
        work(Path(path), Path(data))
        return
    if not arguments.inside and can_mount(allow_skip=arguments.allow_skip):
        run_inside("tests.faults.soak", *sys.argv[1:])
    print(f"seed {arguments.seed}")
    run(arguments.minutes, arguments.seed, mounted=arguments.inside)


if __name__ == "__main__":
    main()
