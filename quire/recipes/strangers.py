"""Models that Quire has not made: what a user's function returns, and batches of a user's file for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.doctor.case import Case, Loss
from quire.doctor.curvature import StepAdvice
from quire.doctor.curvature.bounded import Optimiser, case_spectrum, case_step
from quire.doctor.curvature.density import Spectrum
from quire.errors import InputError

LOSSES: dict[str, Loss] = {
    "cross-entropy": F.cross_entropy,
    "squared-error": lambda output, target: F.mse_loss(output, target),
    "absolute-error": lambda output, target: F.l1_loss(output, target),
    "binary-cross-entropy": lambda output, target: F.binary_cross_entropy_with_logits(output, target),
}
RETURNS = "a torch.nn.Module, or (model, loss, batches), or (model, loss, batches, optimiser)"


@dataclass(frozen=True)
class Subject:
    """What the doctor needs of a model."""

    model: nn.Module
    loss: Loss
    batches: Iterable[Any]
    optimisers: Sequence[torch.optim.Optimizer] = ()
    validation: Sequence[Any] = ()
    kind: str = ""
    """Of the target, where it was read from a file: "classification" or "regression"."""

    def on(self, batches: Sequence[Any], validation: Sequence[Any], kind: str) -> Subject:
        return replace(self, batches=batches, validation=validation, kind=kind)

    def with_loss(self, name: str) -> Subject:
        """The loss of that name; auto keeps the one that came with the model, or goes by the target."""
        given = self.loss is not missing
        if name == "auto" and given:
            return self
        if not self.batches:
            raise InputError(
                "a model without batches",
                expected=f"--data FILE, or a function that returns {RETURNS}",
                fix="return (model, loss, batches) from the function",
            )
        chosen = {"classification": "cross-entropy", "regression": "squared-error"}.get(self.kind)
        wanted = chosen if name == "auto" else name
        if wanted is None:
            raise InputError(
                "a model without its loss",
                expected="--loss NAME, or a function that returns it",
                fix="return (model, loss, batches) from the function",
            )
        return replace(self, loss=LOSSES[wanted])

    def by(self, optimiser: torch.optim.Optimizer) -> Subject:
        return replace(self, optimisers=(optimiser,))

    def curvature(self, seconds: float = 10.0) -> Spectrum | None:
        return case_spectrum(Case(self.model, self.loss, self.batches), seconds)

    def step(self, steps: int, optimiser: Optimiser) -> StepAdvice | None:
        return case_step(Case(self.model, self.loss, self.batches), steps, optimiser)


def missing(output: Any, target: Any) -> Tensor:
    raise AssertionError("a loss is chosen before it is asked for")


def subject_of(found: Any, word: str) -> Subject:
    """From what was named: a model, or a function that makes one."""
    made = found() if callable(found) and not isinstance(found, nn.Module) else found
    if isinstance(made, nn.Module):
        return Subject(made, missing, ())
    if isinstance(made, Mapping) and "model" in made:
        made = tuple(made[name] for name in ("model", "loss", "batches", "optimiser") if name in made)
    if isinstance(made, tuple | list) and len(made) in (3, 4) and isinstance(made[0], nn.Module):
        model, loss, batches, *optimisers = made
        if callable(loss) and isinstance(batches, Iterable):
            # Several checks go through them: an iterator would be used up by the first.
            kept = batches if hasattr(batches, "__len__") else list(_some(batches))
            return Subject(model, loss, kept, tuple(optimisers))
    raise InputError(
        f"{word} gives {type(made).__name__}",
        expected=RETURNS,
        fix="write a function without arguments that builds and returns them",
    )


def _some(batches: Iterable[Any]) -> Iterable[Any]:
    for number, batch in enumerate(batches):
        if number == 64:
            return
        yield batch


def optimiser_for(model: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError(
            "a model without trainable parameters",
            expected="at least one parameter that requires a gradient",
            fix="call requires_grad_() on what should learn",
        )
    return makers[name](parameters, lr=lr)


def batches_of(
    path: Path, target: str | None, rows: int, seed: int
) -> tuple[str, list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """The kind of the target, and batches of the training and the validation part, prepared as for the
    recipes: columns standardised, classes numbered, pixels from 0 to 1."""
    if path.is_dir():
        from quire.data.images import load_images

        images = load_images(path, seed=seed)
        train, validation = (_pairs(part, rows, pixels=True) for part in (images.train, images.validation))
        return "classification", train, validation
    from quire.data.load import load_table

    table = load_table(path, targets=target, seed=seed)
    if len(table.preparation.targets) != 1:
        raise InputError(
            f"{len(table.preparation.targets)} targets", expected="one column", fix="--target COLUMN"
        )
    kind = table.preparation.targets[0].kind
    return kind, _pairs(table.train, rows), _pairs(table.validation, rows)


def _pairs(part: Any, rows: int, *, pixels: bool = False) -> list[tuple[Tensor, Tensor]]:
    if part is None or not len(part):
        return []
    found = []
    for batch in part.batches(torch.arange(min(len(part), 64 * rows)), rows):
        inputs = batch.inputs.float() / 255 if pixels else batch.inputs
        found.append((inputs, batch.target))
    return found
