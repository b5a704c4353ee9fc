"""The curvature of a case within a bounded time, as many products with the Hessian as fit; and its steps."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.doctor.case import AsModule, Case
from quire.doctor.curvature.density import Spectrum, hessian_spectrum
from quire.doctor.curvature.hessian import Hessian, random_direction, twice_differentiable
from quire.doctor.curvature.steps import Optimiser, StepAdvice, advise_step
from quire.functional.modes import evaluating

ROWS = 128
NUMBERS = 1 << 27
"""Of the vectors that Lanczos' method keeps."""
LEAST, MOST = 8, 30
"""Products of a probe."""
PROBES = 4


def case_spectrum(case: Case, seconds: float = 10.0) -> Spectrum | None:
    """Of the loss over the first batch, as in evaluation; None where there is no second derivative, or not
    the time or the memory for it."""
    if not case.trains:
        return None
    model, pair = copy.deepcopy(case.model), case.first.head(ROWS)
    model.zero_grad(set_to_none=True)

    def losses() -> Iterator[tuple[float, Tensor]]:
        with evaluating(model), twice_differentiable(model):
            yield 1.0, case.loss_of(model, pair)

    with case.drawing():
        hessian = Hessian(losses, model.parameters(), keep=True)
        if LEAST * hessian.size > NUMBERS:
            return None
        vector = random_direction(hessian, case.seed)
        try:
            hessian(vector)
            began = time.perf_counter()
            finite = bool(hessian(vector).isfinite().all())
        except (RuntimeError, NotImplementedError):  # an operation without a second derivative
            return None
        cost = max(time.perf_counter() - began, 1e-6)
        products = min(MOST, NUMBERS // hessian.size, hessian.size)
        if not finite or LEAST * cost > seconds:
            return None
        probes = max(1, min(PROBES, int(seconds / (products * cost))))
        products = max(min(LEAST, hessian.size), min(products, int(seconds / (probes * cost))))
        with torch.no_grad():
            return hessian_spectrum(hessian, k=products, probes=probes, seed=case.seed)


def case_step(
    case: Case, steps: int, optimiser: Optimiser = "sgd", momentum: float | None = None
) -> StepAdvice | None:
    """The step size for so many steps over the case's batches; None where none can be taken."""
    if not case.trains:
        return None
    module = AsModule(case)
    return advise_step(
        module, lambda loss, _: loss, module.batches(), steps=steps, optimiser=optimiser, momentum=momentum,
        seed=case.seed,
    )  # fmt: skip
