"""Which step size to train with: what the curvature says at the start, and what short trials say after that.

    gradient descent on a quadratic:  stable for η < 2/λmax;  1/λmax removes the steepest direction in one
                                      step;  the flattest one shrinks by 1 − λmin/λmax a step
    with momentum μ:                  stable for η < 2(1 + μ)/λmax
    Adam, preconditioned:             stable for η < 2(1 + β₁)/((1 − β₁) λmax(D^-½ H D^-½)),  D = √v̂ + ε

These hold where the curvature stays what it is. In a network it rises or falls on the way (J. Cohen et al.,
"Gradient descent on neural networks typically occurs at the edge of stability", 2021; for the preconditioned
limit "Adaptive gradient methods at the edge of stability", 2022), so that 1/λmax of the start can be several
times too small or too large for a run. The advice therefore starts from the theory and decides by trials:
copies of the model take steps of different sizes, the worse ones stop early, and what is near the best is
looked at more closely.

λ eigenvalues of the Hessian of the loss in training mode, η step size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from quire.doctor.curvature.hessian import (
    Hessian,
    LossFunction,
    Tridiagonal,
    gradients_of,
    lanczos,
    random_direction,
    twice_differentiable,
)
from quire.errors import InputError, unknown_name

Optimiser = Literal["sgd", "adam"]
WORSE = 1.5
"""A loss this many times the best one's at the same step ends a trial near it."""
MOST_PRODUCTS = 25
PRODUCT_COST = 3
"""In gradients, without anything kept."""
FIRST = range(-3, 5)
"""Exponents of two of the first trials, around 1/λmax."""
SURVIVORS = ((1 / 8, 5), (1 / 4, 4), (1 / 2, 3))
"""After which part of the steps how many trials go on. A large step often looks worse at first."""
HOPELESS = 1e3
"""A loss that grew by more than this (and is not just near zero) counts as diverged."""


@dataclass(frozen=True)
class Trial:
    """How a step size did."""

    step: float
    steps: int
    """How many were taken."""
    loss: float
    """Mean over the last tenth of them; infinite where it diverged."""


@dataclass(frozen=True)
class StepAdvice:
    """A step size, where it comes from, and what finding it cost."""

    step: float
    """The advised step size, for `steps` steps."""
    optimiser: Optimiser
    steps: int
    """The horizon T."""
    largest: float
    """λmax at the start; for Adam of the preconditioned Hessian D^-½ H D^-½."""
    largest_error: float
    smallest: float
    smallest_error: float
    momentum: float
    """μ, or Adam's β₁."""
    start_loss: float
    end_loss: float
    """Of the advised step size, mean over the last tenth of the steps."""
    trials: tuple[Trial, ...] = field(repr=False)
    """By step size."""
    gradients: int
    """What the advice cost, in gradients of a batch; a product with the Hessian counts as three."""

    @property
    def first_step(self) -> float:
        """1/λmax."""
        return 1 / self.largest if self.largest > 0 else math.inf

    @property
    def limit(self) -> float:
        """Above this the quadratic model of the start diverges."""
        return stable_limit(self.largest, self.momentum, self.optimiser)

    @property
    def condition_number(self) -> float:
        """κ = λmax/λmin; infinite where λmin is not positive beyond its error."""
        positive = self.smallest > self.smallest_error and self.largest > 0
        return self.largest / self.smallest if positive else math.inf

    @property
    def slowest_rate(self) -> float:
        """1 − λmin/λmax: what a step of 1/λmax leaves of the flattest direction; 1 where κ is infinite."""
        return 1 - 1 / self.condition_number

    def __str__(self) -> str:
        kind = " preconditioned by Adam's second moments" if self.optimiser == "adam" else ""
        lines = [
            f"Step size {self.step:.3g} for {self.steps} steps of {self.optimiser}: the loss went from "
            f"{self.start_loss:.4g} to {self.end_loss:.4g} in trials that cost {self.gradients} gradients."
        ]
        if self.largest > 0:
            lines.append(
                f"The curvature{kind} at the start, λmax = {self.largest:.3g}, gives 1/λmax = "
                f"{self.first_step:.3g} and a limit of {self.limit:.3g}."
            )
            if self.step > self.limit:
                lines.append("More than the limit works here: the curvature falls on the way.")
            elif self.step < self.first_step / 2 and self.optimiser == "sgd":
                lines.append("Less than that works better: the curvature rises on the way.")
        if math.isfinite(self.condition_number):
            lines.append(
                f"The condition number {self.condition_number:.3g} leaves {self.slowest_rate:.4g} of the "
                "flattest direction after a step of 1/λmax."
            )
        return " ".join(lines)


def stable_limit(largest: float, momentum: float, optimiser: Optimiser) -> float:
    """2(1 + μ)/λmax, and by 1/(1 − β₁) more for Adam, whose momentum is an average of gradients, no sum."""
    if largest <= 0:
        return math.inf
    return 2 * (1 + momentum) / largest / (1 - momentum if optimiser == "adam" else 1)


def advise_step(
    model: nn.Module,
    loss: LossFunction,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    steps: int = 100,
    optimiser: Optimiser = "sgd",
    momentum: float | None = None,
    seed: int = 0,
) -> StepAdvice:
    """The constant step size with which `steps` steps over `batches`, taken in turn, end at the lowest loss.

    The end is the mean over the last tenth of the steps: at the edge of stability, where the best step size
    often lies, the loss goes up and down from one step to the next.

    `momentum` is 0 for "sgd" and 0.9 (β₁) for "adam" unless given. The model is left as it is: trials go on
    copies of it in training mode, about ten at a time, with random numbers of their own. The batches are kept
    in memory. The cost, some 6 to 9 runs of `steps` steps, stands in the advice.
    """
    if optimiser not in get_args(Optimiser):
        raise unknown_name("optimiser", optimiser, get_args(Optimiser))
    if steps < 8:
        raise InputError(
            f"{steps} steps", expected="at least 8", fix="give the length of the run, or 100 for a long one"
        )
    kept = list(batches)
    if not kept:
        raise InputError("no batch to compute a loss from", expected="at least one (inputs, target) pair")
    if momentum is None:
        momentum = 0.9 if optimiser == "adam" else 0.0
    search = Search(model, loss, kept, steps, optimiser, momentum, seed)
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        start_loss = search.first_loss()
        if not math.isfinite(start_loss):
            raise InputError(
                f"a loss of {start_loss} before the first step",
                expected="a finite one",
                fix="quire.doctor.examine(model, loss, batches) names the layer it comes from",
            )
        ends = search.curvature()
        values, vectors = ends.ritz()
        errors = ends.errors(values, vectors)
        largest = values[-1].item()
        limit = stable_limit(largest, momentum, optimiser)
        best = search.run(largest, limit, start_loss)
    runners = sorted(search.runners.values(), key=lambda runner: runner.step)
    return StepAdvice(
        step=best.step, optimiser=optimiser, steps=steps,
        largest=largest, largest_error=errors[-1].item(),
        smallest=values[0].item(), smallest_error=errors[0].item(),
        momentum=momentum, start_loss=start_loss, end_loss=best.score,
        trials=tuple(Trial(runner.step, len(runner.losses), runner.score) for runner in runners),
        gradients=search.gradients,
    )  # fmt: skip


class Runner:
    """A copy of the model on its way with one step size."""

    def __init__(self, search: Search, step: float) -> None:
        self.search, self.step = search, step
        self.model: nn.Module | None = copy.deepcopy(search.model).train()
        self.optimiser: torch.optim.Optimizer | None = search.make_optimiser(self.model, step)
        self.losses: list[float] = []
        """Before each step."""
        self.diverged = False

    @property
    def score(self) -> float:
        """`score_at` the present step; infinite where it diverged."""
        return math.inf if self.diverged else self.score_at(len(self.losses))

    def score_at(self, steps: int) -> float:
        """Mean loss over the last tenth of the first `steps` steps, or over one pass where that is longer."""
        number = max(steps // 10, min(steps, len(self.search.batches)))
        return sum(self.losses[steps - number : steps]) / number

    def stop(self) -> None:
        self.model = self.optimiser = None

    def go(self, until: int) -> None:
        """On to step `until`, unless it diverges on the way."""
        search = self.search
        torch.manual_seed(search.seed + len(self.losses))
        while self.model is not None and self.optimiser is not None and len(self.losses) < until:
            inputs, target = search.batches[len(self.losses) % len(search.batches)]
            value = search.loss(self.model(inputs), target)
            self.losses.append(value.item())
            parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            for parameter, gradient in zip(parameters, gradients_of(value, parameters), strict=True):
                parameter.grad = gradient
            self.optimiser.step()
            search.gradients += 1
            if not self.losses[-1] <= search.hopeless:
                self.diverged = True
                self.stop()


class Search:
    """The trials of one advice."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        batches: Sequence[tuple[Tensor, Tensor]],
        steps: int,
        optimiser: Optimiser,
        momentum: float,
        seed: int,
    ) -> None:
        self.model, self.loss, self.batches, self.steps = model, loss, batches, steps
        self.name, self.momentum, self.seed = optimiser, momentum, seed
        self.gradients = 0
        self.hopeless = math.inf
        self.unit = 1.0
        self.runners: dict[float, Runner] = {}
        """By the exponent of two over `unit`."""

    def make_optimiser(self, model: nn.Module, step: float) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.name == "adam":
            return torch.optim.Adam(parameters, lr=step, betas=(self.momentum, 0.999))
        return torch.optim.SGD(parameters, lr=step, momentum=self.momentum)

    def first_loss(self) -> float:
        """Mean over the batches, by rows, before any step."""
        model, total = copy.deepcopy(self.model).train(), 0.0
        torch.manual_seed(self.seed)
        with torch.no_grad():
            for inputs, target in self.batches:
                total += len(target) * float(self.loss(model(inputs), target))
        self.gradients += len(self.batches)
        return total / sum(len(target) for _, target in self.batches)

    def curvature(self) -> Tridiagonal:
        """Lanczos' method on H of the loss in training mode, or on D^-½ H D^-½ for Adam."""
        model = copy.deepcopy(self.model).train()

        def losses() -> Iterator[tuple[float, Tensor]]:
            torch.manual_seed(self.seed)
            with twice_differentiable(model):
                for inputs, target in self.batches:
                    yield len(target), self.loss(model(inputs), target)

        hessian = Hessian(losses, model.parameters())
        start = random_direction(hessian, self.seed)
        cost = PRODUCT_COST * len(self.batches)
        if self.name == "sgd":
            result = lanczos(hessian, start, MOST_PRODUCTS)
        else:
            # v̂ after the first step is g², coordinate by coordinate.
            root = (hessian.gradient().abs() + 1e-8).rsqrt()
            result = lanczos(lambda vector: root * hessian(root * vector), start, MOST_PRODUCTS)
        self.gradients += cost * len(result.diagonal)
        return result

    def run(self, largest: float, limit: float, start_loss: float) -> Runner:
        """The race: a ladder of powers of two, thinned out on the way, then finer steps around the best."""
        self.hopeless = HOPELESS * max(abs(start_loss), 1e-3)
        self.unit = 1 / largest if largest > 0 else 1.0
        if self.name == "adam":  # at the start every coordinate moves by the step size: a hundredth is much
            self.unit = min(limit / 2, 1e-2)
        first = max(1, round(self.steps * SURVIVORS[0][0]))
        # Just below the limit, where the steepest direction has died away by the end, to e^-12 in the loss.
        edge = math.log2(limit / self.unit * (1 - 3 / self.steps)) if math.isfinite(limit) else 0.0
        self.race([*FIRST, edge], first)
        # The best of the first round must have a neighbour on both sides.
        for _ in range(40):
            best = self.best()
            ends = {min(self.runners): -1, max(self.runners): 1}
            if best not in ends:
                break
            self.race([best + ends[best]], first)
        if (smallest := self.runners[self.best()]).diverged:
            raise InputError(
                f"a loss that grows without bound even at a step size of {smallest.step:.1g}",
                expected="a loss that some step along −∇E lowers",
                fix="check its sign and scale: quire.doctor.examine(model, loss, batches)",
            )
        for (_, number), (share, _) in zip(SURVIVORS, [*SURVIVORS[1:], (1.0, 0)], strict=True):
            alive = sorted((k for k, runner in self.runners.items() if runner.model), key=self.score)
            for k in alive[number:]:
                self.runners[k].stop()
            self.race(alive[:number], max(1, round(self.steps * share)))
        # All may diverge late: then from the beginning with less.
        lowest = min(alive[:number])
        while len(self.runners[self.best()].losses) < self.steps:
            lowest -= 1
            self.runners.pop(lowest, None)
            self.race([lowest], self.steps)
        for width in (0.5, 0.25):
            best = self.best()
            for k in (best - width, best + width):
                for share in (0.25, 0.5, 1.0):
                    until = round(self.steps * share)
                    self.race([k], until)
                    # Above a loss of zero alone does a ratio say which is worse.
                    if self.score(k) > WORSE * max(self.runners[best].score_at(until), 0.0) > 0:
                        self.runners[k].stop()
                        break
        return self.runners[self.best()]

    def race(self, exponents: Iterable[float], until: int) -> None:
        for k in exponents:
            if k not in self.runners:
                self.runners[k] = Runner(self, self.unit * 2.0**k)
            self.runners[k].go(until)

    def score(self, exponent: float) -> float:
        return self.runners[exponent].score

    def best(self) -> float:
        """The best of those that went furthest; the smallest step where all diverged."""
        going = {k: len(runner.losses) for k, runner in self.runners.items() if not runner.diverged}
        furthest = max(going.values(), default=0)
        return min((k for k in going if going[k] == furthest), key=self.score, default=min(self.runners))
