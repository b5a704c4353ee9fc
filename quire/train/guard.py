"""When a step is not finite: find out which rows, which tensor, and say so.

This runs once, after the fact and slowly; the check in the loop is one norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.errors import NonFiniteError
from quire.train.task import Task

SHOWN = 8


def explain_non_finite(task: Task, batch: Batch, step: int, player: str) -> NonFiniteError:
    """The error for a step whose loss or gradient is not finite; weights are as before the step."""
    evidence: list[str] = []
    rows: list[int] = []
    fix = "lower --optim.lr or set --optim.clip_norm 1"

    for name, value in batch.fields.items():
        bad = _bad_rows(value)
        if bad.any():
            rows += batch.rows[bad.cpu()].tolist()
            evidence.append(f"the data has non-finite values in '{name}'")
            fix = "remove or repair these rows"
    for name, parameter in task.named_parameters():
        if not _finite(parameter):
            evidence.append(f"the weights '{name}' are not finite already")

    module = _first_bad_module(task, batch, player)
    if module:
        evidence.append(f"the first layer with a non-finite output is '{module}'")
    bad_terms = _bad_terms(task, batch, player)
    if bad_terms:
        evidence.append(f"the loss term {', '.join(repr(name) for name in bad_terms)} is not finite")
        rows = rows or _rows_with_bad_terms(task, batch, player)
    else:
        bad_gradients = [
            name
            for name, parameter in task.player_parameters(player).items()
            if parameter.grad is not None and not _finite(parameter.grad)
        ]
        if bad_gradients:
            evidence.append(f"the gradient of '{bad_gradients[0]}' is not finite")
            if len(bad_gradients) > 1:
                evidence[-1] += f" (nor of {len(bad_gradients) - 1} others)"
            rows = rows or _rows_with_bad_gradient(task, batch, player)
        else:
            evidence.append("the norm of the gradient overflowed")
    rows = sorted(set(rows))
    shown = ", ".join(str(row) for row in rows[:SHOWN]) + (
        f" and {len(rows) - SHOWN} more" if rows[SHOWN:] else ""
    )
    where = f"rows {shown} of the training data" if rows else "no single row"
    error = NonFiniteError(
        f"step {step}: {'; '.join(evidence)}; caused by {where}. The step was not applied",
        expected="finite data, loss and gradients",
        fix=fix,
    )
    error.step, error.rows = step, rows  # type: ignore[attr-defined]
    return error


def _finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(torch.isfinite(value).all())


def _bad_rows(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return torch.zeros(len(value), dtype=torch.bool)
    return ~torch.isfinite(value).reshape(len(value), -1).all(dim=1)


def _bad_terms(task: Task, batch: Batch, player: str) -> list[str]:
    with torch.no_grad():
        return [name for name, value in task.terms(batch, player).items() if not _finite(value)]


def _first_bad_module(task: Task, batch: Batch, player: str) -> str:
    found: list[str] = []
    handles = []

    def watch(name: str) -> None:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if not found and isinstance(output, Tensor) and not _finite(output):
                found.append(name)

        handles.append(task.get_submodule(name).register_forward_hook(hook))

    for name, module in task.named_modules():
        if name and not any(module.children()):
            watch(name)
    try:
        with torch.no_grad():
            task.terms(batch, player)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def _single(batch: Batch, i: int) -> Batch:
    return Batch({name: value[i : i + 1] for name, value in batch.fields.items()}, batch.rows[i : i + 1])


def _rows_with_bad_terms(task: Task, batch: Batch, player: str) -> list[int]:
    rows = []
    mode = task.training
    task.eval()  # a batch of one has no batch statistics
    for i in range(len(batch)):
        if _bad_terms(task, _single(batch, i), player):
            rows.append(int(batch.rows[i]))
    task.train(mode)
    return rows


def _rows_with_bad_gradient(task: Task, batch: Batch, player: str) -> list[int]:
    rows = []
    parameters = list(task.player_parameters(player).values())
    mode = task.training
    task.eval()
    for i in range(len(batch)):
        total = torch.stack([value.sum() for value in task.terms(_single(batch, i), player).values()]).sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        if any(g is not None and not _finite(g) for g in gradients):
            rows.append(int(batch.rows[i]))
    task.train(mode)
    return rows
