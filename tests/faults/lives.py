"""Lives of a run: `quire train` in a process of its own, alone or with the processes that it starts, which
can be watched, killed and asked to stop.

Starting Python and PyTorch costs more than a small run, so each process is a fork of this one, which has all
imported and has started no thread. All else is the command itself: the words, the processes of --nproc, what
it writes. What it is doing stands in memory that all share: steps taken, saves begun and ended, processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow.parquet as parquet
import torch

import quire.cli.launch
from quire.cli.main import main as command
from quire.train.checkpoints import list_checkpoints, newest_checkpoint
from quire.train.folder import CHECKPOINTS, RunFolder
from quire.train.statistics import Sweeps, fit_statistics
from quire.train.step import Stepper
from tests.recipes.examples import write_csv, write_text

INTERVAL = 3
"""Steps between saves; statistics are saved after each sweep."""
SECONDS = 30.0
"""In which all processes have to end once one of them has."""
CLEANER = "jemalloc_bg_thd"
"""Arrow's allocator has a thread, and knows of forks."""


class Kind(NamedTuple):
    """A way to learn, as words of the command."""

    words: tuple[str, ...]
    interval: int = INTERVAL
    together: tuple[str, ...] = ()
    """Words of several processes, which are no part of a run."""


def prepare(folder: Path, names: Sequence[str] = ()) -> dict[str, Kind]:
    """Every kind of task or those of these names, on small files that are written here. From now on this
    process can fork runs of them, and takes notes."""
    kinds = _kinds(folder)
    chosen = {name: kinds[name] for name in names or [*kinds]}
    _import_all({**({"base": kinds["base"]} if "tuned" in chosen else {}), **chosen}, folder)
    _take_notes()
    chosen.pop("base", None)
    return chosen


def _kinds(folder: Path) -> dict[str, Kind]:
    table, text = str(write_csv(folder / "mine.csv", rows=120)), str(write_text(folder / "mine.txt"))
    often = ("--train.checkpoint-every", str(INTERVAL), "--steps", "24")
    on_table = ("mlp", "--data", table, "--train.batch-size", "9")
    mlp = (*on_table, "--model.hidden", "4", "--model.dropout", "0.2")
    reads = ("--data", text, "--text.context", "8", "--model.width", "8", "--train.batch-size", "8")
    reads += ("--train.validate-every", "7", *often)
    players = ("--model.hidden", "8", "--model.latent", "4", "--train.batch-size", "20")
    players += ("--train.validate-every", "10")
    made = {
        "mlp": Kind((*mlp, "--train.micro-batches", "2", *often)),
        "base": Kind((*mlp, "--steps", "2")),
        "split": Kind((*on_table, "--model.hidden", "200", "200", *often), together=("--parallel.shard",)),
        "tuned": Kind((*on_table, *often, "--tune.base", str(folder / "base"), "--tune.lora.rank", "2")),
        "gan": Kind(("gan", "--data", table, *players, *often)),
        "gru": Kind(("gru", *reads)),
        "lstm": Kind(("lstm", *reads)),
        "kmeans": Kind(("kmeans", "--data", table, "--starts", "2", "--clusters", "9"), 1),
        "gmm": Kind(("gmm", "--data", table, "--starts", "2", "--clusters", "4", "--sweeps", "20"), 1),
        "pca": Kind(("pca", "--data", table, "--components", "2"), 1),
    }
    return {
        name: kind._replace(words=(*kind.words, "--quiet", "--device", "cpu")) for name, kind in made.items()
    }


# -- What a run is doing ---------------------------------------------------------------------------


class Notes:
    """Whole numbers in shared memory."""

    NAMES = ("step", "saving", "saved", "ended", "slow", "starter", "member0", "member1")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(self.NAMES))

    def __getitem__(self, name: str) -> int:
        found: int = struct.unpack_from("q", self._memory, 8 * self.NAMES.index(name))[0]
        return found

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * self.NAMES.index(name), value)

    def clear(self) -> None:
        for name in self.NAMES:
            self[name] = 0

    @property
    def inside_a_save(self) -> bool:
        return self["saving"] != self["saved"]


NOTES = Notes()


def _take_notes() -> None:
    """From now on this process, and whatever it forks, notes its steps and saves. Sweeps, which are saved
    once a minute, are saved each time. A step takes a minute where `slow` says so."""
    step, sweep, save = Stepper.step, Sweeps._take_sweep, RunFolder.save

    def noted_step(self: Stepper, *values: Any) -> Any:
        if NOTES["slow"]:
            _stay_in_c()
        found = step(self, *values)
        NOTES["step"] = values[-1] + 1
        return found

    def noted_sweep(self: Sweeps) -> None:
        if NOTES["slow"]:
            _stay_in_c()
        before = self.sweep
        try:
            sweep(self)
        finally:
            NOTES["step"] = max(before, self.sweep)

    def noted_save(self: RunFolder, checkpoint: Any, *, keep: int) -> None:
        NOTES["saving"] += 1
        save(self, checkpoint, keep=keep)
        NOTES["ended"] += checkpoint.name.endswith("-final")
        NOTES["saved"] += 1

    Stepper.step, Sweeps._take_sweep = noted_step, noted_sweep  # type: ignore[method-assign]
    RunFolder.save = noted_save  # type: ignore[method-assign]
    assert fit_statistics.__kwdefaults__ is not None
    fit_statistics.__kwdefaults__["checkpoint_seconds"] = 0.0
    quire.cli.launch.subprocess = _Forking  # type: ignore[assignment]


def _stay_in_c() -> None:
    """One call that takes a minute, in which Python hears of no signal."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)


# -- Processes -------------------------------------------------------------------------------------


def fork(work: Callable[[], int], *, stdin: int, out: int, session: bool = True) -> int:
    """A child that does this and ends with its code, as if it had been started anew: no signal is handled,
    and of what is open it has these two alone."""
    stops = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        return child
    code = 1
    try:
        if session:
            os.setsid()
        for number, to in ((stdin, 0), (out, 1), (out, 2)):
            os.dup2(number, to)
        os.closerange(3, 512)
        files = [io.FileIO(to, "w", closefd=False) for to in (1, 2)]
        sys.stdout, sys.stderr = (io.TextIOWrapper(file, write_through=True) for file in files)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        code = work()
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Forked:
    """What `quire.cli.launch` wants of a subprocess.Popen."""

    def __init__(
        self, words: Sequence[str], stderr: IO[bytes] | None = None, stdout: int | None = None, **_: Any
    ) -> None:
        reading, writing = os.pipe()
        words = words[words.index("train") :]
        number = int(words[2])

        def work() -> int:
            NOTES[f"member{number}"] = os.getpid()
            return command(words)

        self.pid = fork(work, stdin=reading, out=stderr.fileno() if stderr else 2)
        NOTES[f"member{number}"] = self.pid
        os.close(reading)
        self.stdin = os.fdopen(writing, "wb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._take(os.WNOHANG)

    def wait(self) -> int | None:
        return self._take(0)

    def _take(self, how: int) -> int | None:
        if self.returncode is None:
            child, status = os.waitpid(self.pid, how)
            if child:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forking:
    PIPE, DEVNULL, Popen = subprocess.PIPE, subprocess.DEVNULL, _Forked


class Life:
    """`quire train` with these words, under way."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        NOTES.clear()
        self.said = folder / "said.txt"
        with self.said.open("wb") as file, open(os.devnull, "rb") as nothing:
            self.pid = fork(lambda: command(["train", *words]), stdin=nothing.fileno(), out=file.fileno())
        NOTES["starter"] = self.pid
        self.begun = time.monotonic()
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            child, status = os.waitpid(self.pid, os.WNOHANG)
            if child:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait_for(self, true: Callable[[], bool], seconds: float = 120.0) -> bool:
        """Until this is so; False where the run ends before."""
        end = time.monotonic() + seconds
        while not true():
            if self.poll() is not None:
                return False
            assert time.monotonic() < end, f"it hangs: {self.words()}"
            time.sleep(0.0002)
        return True

    def send(self, number: int, *to: str) -> bool:
        """A signal to some of its processes by their names; whether there were any."""
        sent = False
        for name in to:
            if NOTES[name] and (name != "starter" or self.poll() is None):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(NOTES[name], number)
                    sent = True
        return sent

    def end(self, seconds: float = SECONDS) -> int:
        """The exit code, once all processes are gone; they have this long."""
        end = time.monotonic() + seconds
        while self.poll() is None or any(is_running(NOTES[name]) for name in ("member0", "member1")):
            assert time.monotonic() < end, f"processes are left after {seconds} s: {self.words()}"
            time.sleep(0.002)
        assert self.code is not None
        if self.code < 0:  # what it was about to start notes itself first, and then that nobody is there
            time.sleep(0.02)
            while any(is_running(NOTES[name]) for name in ("member0", "member1")):
                assert time.monotonic() < end, f"processes are left after {seconds} s: {self.words()}"
                time.sleep(0.002)
        return self.code

    def words(self) -> str:
        return self.said.read_text(errors="replace")


def is_running(process: int) -> bool:
    try:
        return process > 0 and Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _import_all(kinds: dict[str, Kind], folder: Path) -> None:
    """Whatever a run of each kind imports, so that forks find it: each is tried in a child, which tells."""
    torch.set_num_threads(1)
    told = folder / "modules.json"
    for name, kind in kinds.items():
        out = folder / f"trial-{name}"

        def work(words: tuple[str, ...] = (*kind.words, "--out", str(out))) -> int:
            code = command(["train", *words])
            told.write_text(json.dumps([*sys.modules]))
            return code

        with (folder / "said.txt").open("wb") as file:
            _, status = os.waitpid(fork(work, stdin=0, out=file.fileno()), 0)
        assert status == 0, (folder / "said.txt").read_text()
        if name == "base":
            out.rename(folder / "base")
        for module in json.loads(told.read_text()):
            if module not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
    threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    others = threads - {Path("/proc/self/comm").read_text().strip(), CLEANER}
    assert not others, f"a fork would be without the threads {others}"


# -- What is left of it ----------------------------------------------------------------------------


def line(kind: Kind, path: Path, count: int) -> list[str]:
    """The words that begin a run, or go on with one that was begun."""
    words = [*kind.words, "--out", str(path)]
    if path.exists():
        words = [kind.words[0], "--resume", str(path), "--quiet"]
    return [*words, *(("--nproc", str(count), *kind.together) if count > 1 else ())]


def newest_step(path: Path) -> int:
    """Of the newest checkpoint that verifies; 0 where there is none yet."""
    if not list_checkpoints(path / CHECKPOINTS):
        return 0
    return newest_checkpoint(path / CHECKPOINTS).step


def check_bits(path: Path, whole: Path) -> None:
    """The newest checkpoints of two runs are the same but for their seconds."""
    ours, theirs = (newest_checkpoint(run / CHECKPOINTS) for run in (path, whole))
    assert (ours.name, ours.tensors.keys()) == (theirs.name, theirs.tensors.keys())
    for part, tensors in theirs.tensors.items():
        for name, value in tensors.items():
            mine = ours.tensors[part][name]
            same = mine.dtype == value.dtype and torch.allclose(mine, value, rtol=0, atol=0, equal_nan=True)
            assert same, f"{path.name}, {part}: {name}"
    assert timeless(ours.documents["progress"]) == timeless(theirs.documents["progress"]), path.name


def check_same(path: Path, whole: Path) -> None:
    """A finished run has the bits of one that nobody touched."""
    check_bits(path, whole)
    metrics, wanted = ((run / "metrics.jsonl").read_text().splitlines() for run in (path, whole))
    assert [timeless(json.loads(line)) for line in metrics] == [timeless(json.loads(li)) for li in wanted]
    results = [json.loads((run / "result.json").read_text()) for run in (path, whole)]
    measures = [result["measures"] for result in results]
    assert measures[0] == measures[1], f"{path.name}: {measures}"
    if (whole / "predictions.parquet").exists():
        predicted = [parquet.read_table(run / "predictions.parquet") for run in (path, whole)]
        assert predicted[0].equals(predicted[1])
    assert not [file for file in path.rglob("*.tmp") if "checkpoints" in file.parts]


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(entry) for key, entry in value.items() if key != "seconds"}
    return [timeless(entry) for entry in value] if isinstance(value, list) else value
