"""Why a model does not learn: what was found before the first step and in a few steps, or in a run's records,
the gravest first and one of them in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from quire.doctor import signs  # noqa: F401  they register themselves
from quire.doctor.case import Case, Loss
from quire.doctor.course import Course, finite
from quire.doctor.examine import examine_case, given_optimisers
from quire.doctor.findings import CHECKS, SIGNS, Diagnosis, Finding, require_known
from quire.doctor.probe import probe

TWINS = {
    "vanishing-gradients": "gradient-flow",
    "exploding-gradients": "gradient-flow",
    "units-die": "dead-units",
    "units-saturate": "saturated-units",
    "not-finite": "loss-not-finite",
}
"""Signs that say again what a check has said."""


@dataclass(frozen=True)
class Verdict:
    findings: Diagnosis
    course: Course = field(repr=False)

    @property
    def sentence(self) -> str:
        """What matters most."""
        grave = [finding for finding in self.findings if finding.severity != "note"]
        if grave:
            worst = grave[0]
            more = f" ({len(grave) - 1} more)" if len(grave) > 1 else ""
            return f"{upper(worst.what)}, at {worst.where}: {worst.fix}{more}."
        return f"{upper(progress(self.course))}, and nothing was found that stands in its way."

    def __str__(self) -> str:
        return "\n".join([self.sentence, *map(str, self.findings)])


def diagnose(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    optimisers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    validation: Iterable[Any] = (),
    steps: int = 30,
    seconds: float = 20.0,
    silence: Sequence[str] = (),
    seed: int = 0,
) -> Verdict:
    """Examine `model` as `examine` does, then train a copy of it for a few `steps` and say how that went.

        print(diagnose(model, torch.nn.functional.cross_entropy, loader, optimisers=optimiser))

    `seconds` bounds the steps; where the step size of a given optimiser learns nothing, others are tried.
    """
    check_silenced(silence)
    case = Case(model, loss, batches, given_optimisers(optimisers), seed, validation)
    return diagnose_case(case, steps=steps, seconds=seconds, silence=silence)


def diagnose_case(
    case: Case, *, steps: int = 30, seconds: float = 20.0, silence: Sequence[str] = ()
) -> Verdict:
    before = examine_case(case, silence)
    course = probe(case, steps=steps, seconds=seconds) if case.trains and steps > 0 else Course()
    return judge(course, silence=silence, before=before)


def judge(course: Course, *, silence: Sequence[str] = (), before: Iterable[Finding] = ()) -> Verdict:
    """The verdict on a course: all signs, behind what was found `before`."""
    check_silenced(silence)
    known = list(before)
    said = {finding.code for finding in known}
    found = [
        replace(finding, code=name)
        for name, sign in SIGNS.items()
        if name not in silence and TWINS.get(name) not in said
        for finding in sign(course)
    ]
    found.sort(key=lambda finding: finding.code != "step-too-large")  # a cause before what comes of it
    return Verdict(Diagnosis([*known, *found]), course)


def check_silenced(names: Sequence[str]) -> None:
    require_known(names, [*CHECKS, *SIGNS])


def progress(course: Course) -> str:
    values = finite(course.train)
    if len(values) < 2:
        return "the model can be trained"
    if course.players > 1:
        return f"{course.players} players have trained against each other for {values[-1][0]:,} steps"
    (_, first), (last_step, last) = values[0], values[-1]
    lowest = min(value for _, value in values)
    return f"it learns: the loss went from {first:.4g} to {min(last, lowest):.4g} by step {last_step}"


def upper(text: str) -> str:
    return text[:1].upper() + text[1:]
