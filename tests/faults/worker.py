"""A small training run for the random lives of `test_random`: saves at every step, resumes if it was begun.

It prints "saving" and "saved" around each save, so that a killer can aim at the inside of one, and is forked
from a process that has everything imported.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from pathlib import Path

import torch

from quire.options import Optim, Train
from quire.train import fit
from quire.train.checkpoints import Checkpoint, list_checkpoints, load_checkpoint
from quire.train.folder import RunFolder
from tests.train.examples import classes, classifier, folder

STEPS = 30


class Announcing:
    """A store that tells when it saves."""

    def __init__(self, inner: RunFolder) -> None:
        self.record, self.resume, self._inner = inner.record, inner.resume, inner

    def save(self, checkpoint: Checkpoint, *, keep: int) -> None:
        print("saving", flush=True)
        self._inner.save(checkpoint, keep=keep)
        print("saved", flush=True)


def run(path: Path) -> None:
    torch.set_num_threads(1)
    store = folder(path, resume=path.exists())
    fit(
        classifier(dropout=0.2),
        classes(),
        classes(30, 2),
        steps=STEPS,
        optim=Optim(lr=0.01),
        train=Train(batch_size=20, checkpoint_every=1, checkpoint_seconds=0.0, micro_batches=2),
        store=Announcing(store),
    )
    store.close()
    print("done", flush=True)


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


def check_between(path: Path) -> None:
    """After a kill: each checkpoint with its final name loads whole, unless it was being deleted."""
    found = list_checkpoints(path / "checkpoints")
    for checkpoint in found[:1]:
        load_checkpoint(checkpoint)
