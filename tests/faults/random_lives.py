"""Random lives of a run of the command: trained, killed, damaged, moved, resumed and used in any order.

A kill is the state in which it leaves the disk: at a random write or step of the command the folder is copied
as it is, the command is stopped, and the copy takes the folder's place. (`kill.py` sends the signal itself.)
What nobody damaged must go on, to the bits of a run that nobody touched; whatever fails says so in words of
ours.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire.errors import QuireError
from quire.train.checkpoints import list_checkpoints, newest_checkpoint
from quire.train.folder import CHECKPOINTS, CONFIG, RunFolder
from quire.train.statistics import Sweeps, fit_statistics
from quire.train.step import Stepper
from tests.faults.flips import flip
from tests.faults.lives import check_same
from tests.faults.random_words import UNFORESEEN, Said, call
from tests.recipes.examples import undrawn, write_csv

WORDS = {
    "mlp": ("--model.hidden", "4", "--model.dropout", "0.2", "--train.micro-batches", "2", "--steps", "6",
            "--train.batch-size", "16", "--train.validate-every", "2"),
    "gan": ("--model.hidden", "4", "--model.latent", "2", "--steps", "5", "--train.batch-size", "16"),
    "kmeans": ("--clusters", "7", "--starts", "1", "--init", "random"),
}  # fmt: skip
KEPT = 99
NEVER = 10**9
OTHERS = itertools.count(1)
"""Numbers of processes."""
EVENTS = 100
"""What a command does inside its folder until it has ended, at least."""
STOP = st.integers(0, EVENTS + 20).map(lambda number: number if number <= EVENTS else None)


class Killed(BaseException):
    """Nobody catches it."""


class Watch:
    """Counts what a command does inside a folder, by files and steps, and stops it at one of them."""

    def __init__(self) -> None:
        self.folder = self.photograph = Path()
        self.left = -1
        """Until it is stopped; below 0 while nobody watches."""
        self.count = 0

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.left < 0 or event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        # Whoever removes a folder names what is in it from there.
        if path.startswith(str(self.folder)) or (path and not path.startswith("/")):
            self.note()

    def note(self) -> None:
        if self.left < 0:
            return
        self.count += 1
        self.left -= 1
        if self.left < 0:
            shutil.copytree(self.folder, self.photograph)
            raise Killed


WATCH = Watch()


@functools.cache
def listen() -> None:
    """For the rest of the process, as such a listener cannot be taken away."""
    sys.addaudithook(WATCH.hear)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Steps are noted, and sweeps are saved as often as they are taken."""
    step, sweep = Stepper.step, Sweeps._take_sweep

    def noted_step(self: Stepper, *given: Any) -> Any:
        WATCH.note()
        return step(self, *given)

    def noted_sweep(self: Sweeps) -> None:
        WATCH.note()
        sweep(self)

    assert fit_statistics.__kwdefaults__ is not None
    with undrawn(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "step", noted_step)
        patch.setattr(Sweeps, "_take_sweep", noted_sweep)
        patch.setitem(fit_statistics.__kwdefaults__, "checkpoint_seconds", 0.0)
        yield


def killed(words: list[str], folder: Path, after: int) -> Said | None:
    """What the command says, or None where it was killed; the folder is then as the kill left it."""
    listen()
    WATCH.folder, WATCH.photograph = folder, folder.with_name(f"{folder.name}-killed")
    WATCH.left, WATCH.count = after, 0
    try:
        return call(words)
    except Killed:
        pass
    finally:
        WATCH.left = -1
    gc.collect()  # of what was open nothing may be written any more
    shutil.rmtree(folder)
    WATCH.photograph.rename(folder)
    # Whoever goes on is another process.
    for left in sorted(folder.rglob(f"*.{os.getpid()}.tmp"), reverse=True):
        left.rename(left.with_name(left.name.replace(f".{os.getpid()}.", f".{next(OTHERS)}.")))
    return None


class Undisturbed(NamedTuple):
    """A run that nobody touched, which keeps every checkpoint; and what each of them answers."""

    path: Path
    data: Path
    answers: dict[str, tuple[str, str]]


def train_undisturbed(recipe: str, folder: Path) -> Undisturbed:
    folder = folder / recipe
    folder.mkdir(parents=True)
    data, path = write_csv(folder / "mine.csv", rows=60), folder / "run"
    save = RunFolder.save
    with watched():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                RunFolder, "save", lambda self, checkpoint, *, keep: save(self, checkpoint, keep=KEPT)
            )
            said = killed(words_of(recipe, data, path, 1, KEPT), folder, NEVER)
            assert WATCH.count > EVENTS
        assert said is not None
        assert said.code == 0, said
        answers = {}
        part = folder / "part"
        shutil.copytree(path, part)
        for checkpoint in list_checkpoints(part / CHECKPOINTS):
            answers[checkpoint.name] = ask(part, data)
            shutil.rmtree(checkpoint)
    assert len(set(answers.values())) > 2, f"{recipe}: {len(answers)} checkpoints that answer alike"
    return Undisturbed(path, data, answers)


def words_of(recipe: str, data: Path, path: Path, interval: int, keep: int) -> list[str]:
    words = ["train", recipe, "--data", str(data), "--out", str(path), "--quiet", *WORDS[recipe]]
    if recipe != "kmeans":
        words += ["--train.checkpoint-every", str(interval), "--train.keep", str(keep)]
    return words


def ask(path: Path, data: Path) -> tuple[str, str]:
    """Predictions and measures of a run."""
    said = [call(["predict", str(path), str(data)]), call(["evaluate", str(path), "--json"])]
    assert [one.code for one in said] == [0, 0], said
    return said[0].out, json.dumps(json.loads(said[1].out)["measures"])


class Life(RuleBasedStateMachine):
    """No rule has a precondition: whether a run exists depends on when it was killed, and rules must not
    depend on that."""

    wholes: dict[str, Undisturbed]
    """Of each recipe."""

    @initialize(
        recipe=st.sampled_from(["mlp", "mlp", "gan", "kmeans"]),
        seed=st.integers(0, 2**16),
        interval=st.integers(1, 4),
        keep=st.integers(1, 3),
        stop=STOP,
    )
    def begin(self, recipe: str, seed: int, interval: int, keep: int, stop: int | None) -> None:
        self.recipe, self.whole = recipe, self.wholes[recipe]
        self.random = random.Random(seed)
        self.outer = Path(tempfile.mkdtemp())
        self.folder = self.outer / "runs"
        self.folder.mkdir()
        self.path = self.folder / "run"
        self.config = b""
        self.damaged = False
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(watched())
        self.train(interval, keep, False, stop)

    def give(self, words: list[str], stop: int | None) -> Said | None:
        said = killed(words, self.folder, NEVER if stop is None else stop)
        if said is not None:
            self.judge(said)
            half = [*self.path.rglob("*.tmp")]
            assert said.code or not half, (words, half)
        return said

    def judge(self, said: Said) -> None:
        assert said.code in (0, 1, 2), said
        assert "Traceback" not in said.out + said.error, said
        assert UNFORESEEN not in said.error, said
        assert said.code == 0 or said.error.startswith("error: "), said
        if said.code and self.is_whole_config():
            assert str(self.path) in said.error, said

    def is_whole_config(self) -> bool:
        config = self.path / CONFIG
        return config.is_file() and config.read_bytes() == self.config

    @rule(
        interval=st.integers(1, 4),
        keep=st.integers(1, 3),
        overwrite=st.booleans(),
        stop=st.none() | STOP,
    )
    def train(self, interval: int, keep: int, overwrite: bool, stop: int | None) -> None:
        there = self.path.exists()
        before = contents(self.path)
        words = words_of(self.recipe, self.whole.data, self.path, interval, keep)
        said = self.give([*words, *(["--overwrite"] if overwrite else [])], stop)
        if there and not overwrite:
            assert contents(self.path) == before
            assert said is None or said.code == 2, said
            return
        if there and (said is None or said.code):  # stopped while it took the old run away, or refused to
            self.damaged = True
            return
        if self.path.exists():
            self.config, self.damaged = (self.path / CONFIG).read_bytes(), False
        if said is not None:
            assert said.code == 0, said
            check_same(self.path, self.whole.path)

    @rule(stop=STOP)
    def resume(self, stop: int | None) -> None:
        said = self.give(["train", self.recipe, "--resume", str(self.path), "--quiet"], stop)
        if said is None:
            return
        if not self.damaged:
            assert said.code == (0 if self.path.exists() else 2), said
        if said.code == 0:
            check_same(self.path, self.whole.path)

    @rule(where=st.floats(0, 1, exclude_max=True), cut=st.booleans(), weights=st.booleans())
    def corrupt(self, where: float, cut: bool, weights: bool) -> None:
        """A file of the run, or one of what its newest checkpoint computes with."""
        newest = list_checkpoints(self.path / CHECKPOINTS)[:1]
        places = newest[0].glob("*.safetensors") if weights and newest else self.path.rglob("*")
        files = sorted(path for path in places if path.is_file() and path.stat().st_size)
        if not files:
            return
        path = self.random.choice(files)
        size = path.stat().st_size
        if cut:
            os.truncate(path, int(where * size))
        else:
            flip(path, int(where * 8 * size))
        self.damaged = True

    @rule()
    def move(self) -> None:
        if self.path.exists():
            self.path = self.path.rename(self.folder / f"run{self.random.randrange(10**9)}")

    @rule(evaluate=st.booleans())
    def predict(self, evaluate: bool) -> None:
        if evaluate:
            said = call(["evaluate", str(self.path), "--json"])
            self.compare(said, 1, json.dumps(json.loads(said.out)["measures"]) if said.code == 0 else "")
        else:
            said = call(["predict", str(self.path), str(self.whole.data)])
            self.compare(said, 0, said.out)

    def compare(self, said: Said, which: int, answer: str) -> None:
        """With what the undisturbed run answers from the same checkpoint."""
        self.judge(said)
        try:
            newest = newest_checkpoint(self.path / CHECKPOINTS).name
        except QuireError:
            assert said.code, said
            return
        if said.code:
            assert self.damaged, said
        else:
            assert answer == self.whole.answers[newest][which], newest

    @rule(words=st.sampled_from([("runs", "show"), ("report",), ("runs", "list", "--folder")]))
    def look(self, words: tuple[str, ...]) -> None:
        said = call([*words, str(self.folder if "list" in words else self.path)])
        if said.error.startswith("left out: "):
            assert self.damaged, said
            return
        self.judge(said)
        assert said.code == 0 or self.damaged or not self.path.exists(), said

    def teardown(self) -> None:
        if not hasattr(self, "outer"):
            return
        try:
            self.resume(None)
            self.predict(False)
        finally:
            self.stack.close()
            shutil.rmtree(self.outer)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
