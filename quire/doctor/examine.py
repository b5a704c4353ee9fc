"""Why a model will not learn, before it is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.doctor import checks  # noqa: F401  they register themselves
from quire.doctor.case import Case, Loss
from quire.doctor.findings import CHECKS, Diagnosis, require_known


def examine(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    optimisers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    validation: Iterable[Any] = (),
    silence: Sequence[str] = (),
    seed: int = 0,
) -> Diagnosis:
    """What speaks against training `model` with `loss(output, target)` on `batches` of (inputs, target).

    A few batches are looked at, and one step is taken on a copy: model, optimisers and random numbers stay as
    they are. Batches of `validation` are compared with them. `silence` names findings that are not wanted.

        print(examine(model, torch.nn.functional.cross_entropy, loader))
    """
    require_known(silence, CHECKS)
    return examine_case(Case(model, loss, batches, given_optimisers(optimisers), seed, validation), silence)


def given_optimisers(
    optimisers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, ...]:
    return (optimisers,) if isinstance(optimisers, torch.optim.Optimizer) else tuple(optimisers)


def examine_case(case: Case, silence: Sequence[str] = ()) -> Diagnosis:
    found = [
        replace(finding, code=name)
        for name, check in CHECKS.items()
        if name not in silence
        for finding in check(case)
    ]
    # A step that fails for a reason with a name of its own is named once.
    named = [finding for finding in found if finding.severity == "error" and finding.code != "step-fails"]
    return Diagnosis(finding for finding in found if finding.code != "step-fails" or not named)
