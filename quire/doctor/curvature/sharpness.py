"""λmax of the loss while a model is trained, at a bounded share of the time.

    sharpness = Sharpness(model, loss, every=100)
    for inputs, target in loader:
        …                                  # the step
        sharpness.step(inputs, target)
    sharpness.history                      # (step, λmax, 2/λmax, error)

A look starts Lanczos' method from the eigenvector that the last one found: the point has moved little since,
so that two products with the Hessian are enough. Gradient descent with a constant step η drives λmax up to
2/η and stays there (J. Cohen et al., 2021); far above it, it diverges.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.doctor.curvature.hessian import (
    Hessian,
    LossFunction,
    largest_eigenvalue,
    random_direction,
    twice_differentiable,
)
from quire.errors import InputError

FIRST_PRODUCTS = 8
"""Of the first look, which has no vector to start from."""
PRODUCT_COST = 3.0
"""Of a product in steps on as many rows, until it is measured."""
TOLERANCE = 1e-6
"""No product is saved: where the old direction has converged, the rest search for one that overtakes it."""
NOISE = 0.05
"""Share of a new random direction in the start, without which a new one would never be found."""


class Look(NamedTuple):
    """What a look saw."""

    step: int
    value: float
    """λmax of the loss on the rows that were looked at."""
    limit: float
    """2/λmax: gradient descent is stable below it; infinite where nothing curves upwards."""
    error: float
    """An eigenvalue lies at most this far from `value`."""


class Sharpness:
    """Follows λmax in anybody's loop: call `step` after each step, or `due` and `look` with any loss.

    A look comes `every` steps at most, and only where the time spent on looks stays below `budget` of all
    time since the first step. It reads the first `rows` rows of a batch, in the mode that the model is in;
    parameters, gradients, buffers and random numbers are left as they were.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None = None,
        *,
        every: int = 100,
        budget: float = 0.02,
        rows: int = 64,
        products: int = 2,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every < 1 or rows < 1 or products < 1 or not budget > 0:
            raise InputError(
                f"every = {every}, rows = {rows}, products = {products}, budget = {budget:g}",
                expected="at least 1 each, and a budget above 0",
                fix="budget is a share of the time: 0.02 for 2%, math.inf for no bound",
            )
        self.model, self.loss, self.every, self.budget = model, loss, every, budget
        self.rows, self.products, self.seed, self.clock = rows, products, seed, clock
        self.history: list[Look] = []
        self.steps = 0
        self.spent = 0.0
        """Seconds in looks."""
        self._vector: Tensor | None = None
        self._began: float | None = None
        self._last_step = 0
        self._last_cost: float | None = None

    @property
    def value(self) -> float:
        """The latest λmax; NaN before the first look."""
        return self.history[-1].value if self.history else math.nan

    @property
    def share(self) -> float:
        """Part of the time since the first step that looks took."""
        elapsed = self.clock() - self._began if self._began is not None else 0.0
        return self.spent / elapsed if elapsed > 0 else 0.0

    def step(self, inputs: Tensor, target: Tensor) -> Look | None:
        """To be called after each step of the training; looks at this batch where a look is due."""
        if self.loss is None:
            raise InputError(
                "no loss to look at",
                expected="Sharpness(model, loss), or due() and look(function)",
            )
        loss, share = self.loss, min(1.0, self.rows / max(len(target), 1))
        if not self.due(share):
            return None
        return self.look(lambda: loss(self.model(inputs[: self.rows]), target[: self.rows]))

    def due(self, share_of_rows: float = 1.0) -> bool:
        """Counts a step, and says whether a look is due that reads this share of a batch."""
        now = self.clock()
        if self._began is None:
            self._began = now
        self.steps += 1
        if self.steps - self._last_step < self.every:
            return False
        elapsed = now - self._began
        if math.isinf(self.budget):
            return True
        if elapsed <= 0:
            return False
        if self._last_cost is None:
            a_step = (elapsed - self.spent) / max(self.steps - 1, 1)
            cost = FIRST_PRODUCTS * PRODUCT_COST * a_step * share_of_rows
        else:
            cost = self._last_cost
        return self.spent + cost <= self.budget * (elapsed + cost)

    def look(self, function: Callable[[], Tensor]) -> Look:
        """λmax, now, of the loss that `function()` computes with the model's parameters."""
        began = self._now()
        first = self._vector is None
        with _untouched(self.model), twice_differentiable(self.model):
            hessian = Hessian(lambda: [(1.0, function())], self.model.parameters(), keep=True)
            start = random_direction(hessian, self.seed + self.steps)
            if self._vector is not None:
                start = self._vector + NOISE * start / start.norm()
            most = FIRST_PRODUCTS if first else self.products
            found = largest_eigenvalue(hessian, TOLERANCE, most, start=start)
        self._vector = found.vector
        limit = 2 / found.value if found.value > 0 else math.inf
        self.history.append(Look(self.steps, found.value, limit, found.error))
        cost = self._now() - began
        self.spent += cost
        self._last_cost = cost
        self._last_step = self.steps
        return self.history[-1]

    def _now(self) -> float:
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self.clock()


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Random numbers and buffers (the statistics of batch norm) are put back afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
