"""What `fit` is called with, looked at before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quire.data.batch import Data
from quire.errors import InputError
from quire.options import Optim, Train
from quire.train.task import Task


def check_fit(
    task: Task,
    parts: dict[str, Data | None],
    epochs: float | None,
    steps: int | None,
    optim: Optim | None,
    train: Train | None,
    callbacks: Iterable[object],
) -> None:
    """Refuse what is no task, no data or no option, in the words of who gave it."""
    if (epochs is None) == (steps is None):
        raise InputError(f"epochs {epochs} and steps {steps}", expected="one of the two", fix="give one")
    length = epochs if epochs is not None else steps
    if length is not None and not length > 0:
        name = "epochs" if epochs is not None else "steps"
        raise InputError(f"{name} {length}", expected="a number above 0", fix=f"set {name} to at least 1")
    if not isinstance(task, Task):
        raise InputError(
            f"a {type(task).__name__} as the task",
            expected="a task, which joins a model to its objective",
            fix="for ten classes: quire.tasks.Supervised(model, quire.nn.heads.Categorical(10))",
        )
    for name, given, kind in (("optim", optim, Optim), ("train", train, Train)):
        if given is not None and not isinstance(given, kind):
            raise InputError(
                f"{name} is a {type(given).__name__}",
                expected=f"a quire.options.{kind.__name__}",
                fix=f"{name}={kind.__name__}({'lr=0.001' if kind is Optim else 'batch_size=64'})",
            )
    if not isinstance(callbacks, Iterable) or not all(hasattr(one, "on_step") for one in callbacks):
        raise InputError(
            "callbacks that are no list of quire.train.Callback",
            expected="objects of a class that inherits from Callback",
            fix="override on_step or on_record in a class of yours, and give callbacks=[Yours()]",
        )
    for name, data in parts.items():
        if data is not None and not all(hasattr(data, wanted) for wanted in ("take", "batches", "to")):
            raise InputError(
                f"a {type(data).__name__} as the {name}",
                expected="rows that can be asked for by number, in any order",
                fix='wrap the tensors: quire.data.TensorData({"inputs": x, "target": y})',
            )


def resolve_device(device: torch.device | str) -> torch.device:
    """The device of that name, where this machine has it; a GPU by its number, as tensors name theirs."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InputError(
            f"device {device!r}", expected="cpu, cuda, cuda:1 or the like", fix="leave it out for the CPU"
        ) from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        raise InputError(
            f"device {device} on a machine with {count} CUDA devices",
            expected="a device that is there",
            fix="use device='cpu' or leave it out",
        )
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
