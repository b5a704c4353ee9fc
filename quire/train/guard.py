"""When a step is not finite: find out which rows, which tensor, and say so.

This runs once, after the fact and slowly; the check in the loop is one number, which any value that is not
finite spoils.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.errors import NonFiniteError
from quire.train.player import Player
from quire.train.task import Task

SHOWN = 8
SMALLER = "lower --optim.lr or set --optim.clip-norm 1"


def quick_norm(player: Player) -> float:
    """√Σg² of a player's gradient on the host. PyTorch's norm takes half as long again in the middle of a
    step, so it is asked only where the squares overflow."""
    squares = 0.0
    for group in player.groups:
        squares += group.grad.dot(group.grad).item()
    return math.sqrt(squares) if math.isfinite(squares) else player.norm().item()


def non_finite_weights(players: Sequence[Player], step: int) -> NonFiniteError | None:
    """The error for weights that a step has left. A layer that saturates goes on with infinite ones, and
    neither loss nor gradient shows it."""
    for player in players:
        for group in player.groups:
            if _finite(group.flat):
                continue
            named = group.named(group.flat).items()
            name = group.names[0] if group.split else next(name for name, part in named if not _finite(part))
            error = NonFiniteError(
                f"step {step}: the weights '{name}' are not finite any more, though loss and gradient are",
                expected="finite weights wherever they are judged or saved",
                fix=f"{SMALLER}; what was saved before goes on with --resume",
            )
            error.step, error.rows = step, []  # type: ignore[attr-defined]
            return error
    return None


def explain_non_finite(
    task: Task, batch: Batch, step: int, player: str, parts: Sequence[Batch] = ()
) -> NonFiniteError:
    """The error for a step whose loss or gradient is not finite; weights are as before the step. `parts` are
    those of the batch that there is memory for."""
    evidence: list[str] = []
    rows: list[int] = []
    fix = SMALLER
    parts = parts or [batch]

    for name, value in batch.fields.items():
        bad = _bad_rows(value)
        if bad.any():
            rows += batch.rows[bad.cpu()].tolist()
            evidence.append(f"the data has non-finite values in '{name}'")
            fix = "remove or repair these rows"
    for name, parameter in task.named_parameters():
        if not _finite(parameter):
            evidence.append(f"the weights '{name}' are not finite already")
    for name, buffer in task.named_buffers():
        if buffer.is_floating_point() and bool(buffer.isnan().any()):  # masks may be infinite
            evidence.append(f"the buffer '{name}' is not a number already")

    looks = [_look(task, part, player) for part in parts]
    module = next((module for module, _ in looks if module), "")
    if module:
        evidence.append(f"the first layer with a non-finite output is '{module}'")
    bad_terms = list(dict.fromkeys(name for _, names in looks for name in names))
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


@torch.no_grad()
def _bad_terms(task: Task, batch: Batch, player: str) -> list[str]:
    return [name for name, value in task.terms(batch, player).items() if not _finite(value)]


def _look(task: Task, batch: Batch, player: str) -> tuple[str, list[str]]:
    """The first module whose output is not finite, and the terms that are not. What is inside a module is
    done before it."""
    found: list[str] = []
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            outputs = output if isinstance(output, tuple | list) else (output,)
            if not found and any(isinstance(value, Tensor) and not _finite(value) for value in outputs):
                found.append(name)

        handles.append(module.register_forward_hook(hook))

    for name, module in task.named_modules():
        if name:
            watch(name, module)
    try:
        terms = _bad_terms(task, batch, player)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "", terms


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
