"""The trained task of a run folder, with the preparation of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quire.data.loaded import Prepares
from quire.data.reading import read_preparation
from quire.errors import CheckpointError, InputError
from quire.files import names_its_file
from quire.train.checkpoints import Checkpoint, list_checkpoints, load_checkpoint, newest_checkpoint
from quire.train.folder import CHECKPOINTS
from quire.train.task import Task, build_task
from quire.tuning import Adapters

TUNING = "tuning"
"""The document of a checkpoint that describes adapters."""
RESULT = "result.json"
SLACK = 32 * 2**20
"""Bytes, and as many numbers, that a model may have besides those of its checkpoint: masks, positions, ..."""
QUANTISED = 8
"""How much larger a weight in full is than in four bits."""
MOST_TENSORS = 100
"""Tensors that may be made for each one in the checkpoint, while a model is built."""


class Trained(NamedTuple):
    task: Task
    preparation: Prepares
    step: int
    adapters: Adapters | None = None
    """Those that lie over the task's model."""


def load_trained(run: Path) -> Trained:
    """The weights that training ended with, or of an unfinished run the best so far, in the newest checkpoint
    that verifies."""
    newest = list_checkpoints(run / CHECKPOINTS)[:1]
    # The result of a finished run is that of its last weights; older ones are no substitute.
    finished = (run / RESULT).exists() and newest
    checkpoint = load_checkpoint(newest[0]) if finished else newest_checkpoint(run / CHECKPOINTS)
    return _build(run / CHECKPOINTS / checkpoint.name, checkpoint)


@names_its_file
def _build(path: Path, checkpoint: Checkpoint) -> Trained:
    tensors = checkpoint.tensors
    weights = tensors.get("final") or tensors.get("best") or tensors["weights"]
    adapters = None
    try:
        with Bounded(weights, path, quantised=TUNING in checkpoint.documents):
            task = build_task(checkpoint.documents["task"])
            if TUNING in checkpoint.documents:
                model: nn.Module = getattr(task, "model")  # noqa: B009
                adapters = Adapters.from_spec(model, checkpoint.documents[TUNING])
        task.load_state_dict(dict(weights))
        preparation = read_preparation(checkpoint.documents["preparation"])
    except InputError as problem:  # which knows the name that is wrong, but not where it stands
        raise CheckpointError(f"{path}: {problem.got}", expected=problem.expected) from problem
    return Trained(task.eval(), preparation, checkpoint.step, adapters)


class Bounded(TorchDispatchMode):
    """Building a model takes no more memory than the weights that it will be given: a description of a few
    bytes could ask for any number of layers of any width."""

    def __init__(self, weights: Mapping[str, Tensor], path: Path, *, quantised: bool) -> None:
        super().__init__()
        stored = sum(value.numel() * value.element_size() for value in weights.values())
        self.path = path
        self.numbers = (stored * (QUANTISED if quantised else 1) + SLACK) // 4
        self.count = MOST_TENSORS * (len(weights) + MOST_TENSORS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = args[0] if args else None
        if isinstance(sizes, list | tuple) and all(isinstance(size, int) for size in sizes):
            self.count -= 1
            if prod(sizes) > self.numbers or self.count < 0:
                raise CheckpointError(
                    f"{self.path}: its description asks for a model that is larger than its weights",
                    expected="a description that fits the weights beside it",
                    fix="restore it from a copy, or train again",
                )
        return func(*args, **(kwargs or {}))
