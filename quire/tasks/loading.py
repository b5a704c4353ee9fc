"""The trained task of a run folder, with the preparation of its inputs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from quire.data.loaded import Prepares
from quire.data.reading import read_preparation
from quire.train.checkpoints import newest_checkpoint
from quire.train.folder import CHECKPOINTS
from quire.train.task import Task, build_task
from quire.tuning import Adapters

TUNING = "tuning"
"""The document of a checkpoint that describes adapters."""


class Trained(NamedTuple):
    task: Task
    preparation: Prepares
    step: int
    adapters: Adapters | None = None
    """Those that lie over the task's model."""


def load_trained(run: Path) -> Trained:
    """The newest checkpoint that verifies, with the weights that training ended with, or the best so
    far of an unfinished run."""
    checkpoint = newest_checkpoint(run / CHECKPOINTS)
    task = build_task(checkpoint.documents["task"])
    adapters = None
    if TUNING in checkpoint.documents:
        adapters = Adapters.from_spec(getattr(task, "model"), checkpoint.documents[TUNING])  # noqa: B009
    tensors = checkpoint.tensors
    weights = tensors.get("final") or tensors.get("best") or tensors["weights"]
    task.load_state_dict(dict(weights))
    preparation = read_preparation(checkpoint.documents["preparation"])
    return Trained(task.eval(), preparation, checkpoint.step, adapters)
