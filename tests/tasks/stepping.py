"""One step of the trainer, for what tests of tasks ask of it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from quire.data.batch import Batch
from quire.options import Optim, Train
from quire.train.step import Stepper
from quire.train.task import Task


def gradient_of_step(task: Task, batch: Batch, micro_batches: int) -> Tensor:
    """As the trainer computes it, from a batch that is augmented already."""
    task = copy.deepcopy(task)
    task.augment = lambda given: given  # type: ignore[method-assign]
    train = Train(micro_batches=micro_batches)
    stepper = Stepper(task, Optim("sgd", lr=1.0), train, torch.device("cpu"), total_steps=1)
    stepper.step(batch, 0)
    found = torch.cat([group.grad.clone() for group in stepper.players[0].groups])
    stepper.close()
    return found
