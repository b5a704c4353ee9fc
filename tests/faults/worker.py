"""A small training run for the fault tests: saves at every step, resumes if it was begun.

Prints "saving" and "saved" around each save, so that a killer can aim at the inside of one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from quire.options import Optim, Train
from quire.train import fit
from quire.train.checkpoints import Checkpoint
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


if __name__ == "__main__":
    run(Path(sys.argv[1]))
