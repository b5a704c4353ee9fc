"""A request to stop that comes in the last step, or while the end is saved, is heeded as well: everything is
saved, and nobody waits for a report."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.data.batch import TensorData
from quire.options import Optim
from quire.tasks.kmeans import KMeansTask
from quire.train import Interrupted, fit, fit_statistics
from quire.train.checkpoints import Checkpoint, newest_checkpoint
from quire.train.folder import RunFolder
from tests.train.examples import classes, classifier, folder, often


class Asking:
    """A store during whose last save, or during whose records, somebody asks to stop."""

    def __init__(self, inner: RunFolder, where: str) -> None:
        self.inner, self.resume, self.where = inner, inner.resume, where

    def record(self, record: dict[str, Any]) -> None:
        self.inner.record(record)
        if self.where == "records":
            os.kill(os.getpid(), signal.SIGINT)
            self.where = ""

    def save(self, checkpoint: Checkpoint, *, keep: int) -> None:
        if self.where == "end" and checkpoint.name.endswith("-final"):
            os.kill(os.getpid(), signal.SIGINT)
        self.inner.save(checkpoint, keep=keep)


def train(kind: str, store: Any) -> Any:
    if kind == "descent":
        train = often(validate_every=4)
        data, validation = classes(), classes(30, 2)
        return fit(classifier(), data, validation, steps=4, optim=Optim(), train=train, store=store)
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    return fit_statistics(KMeansTask(3, 2), TensorData({"inputs": rows}), sweeps=1, store=store)


@pytest.mark.parametrize("where", ["records", "end"])
@pytest.mark.parametrize("kind", ["descent", "statistics"])
def test_late_requests_to_stop(kind: str, where: str, tmp_path: Path) -> None:
    store = folder(tmp_path / "run")
    with pytest.raises(Interrupted, match="everything is saved") as caught:
        train(kind, Asking(store, where))
    store.close()
    assert caught.value.exit_code == 130
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").name.endswith("-final")
    store = folder(tmp_path / "run", resume=True)
    assert train(kind, store).steps == (4 if kind == "descent" else 1)
    store.close()
