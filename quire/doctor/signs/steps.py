"""The step size and the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from quire.doctor.course import Course, Trial, finite
from quire.doctor.findings import SIGNS, Finding

BETTER = 5.0
"""How much more of the loss another step size has to take away to be worth a word."""
ALTERNATES = 0.7
"""Share of the steps in which an oscillating loss turns round."""


@SIGNS.register("step-too-large")
def step_too_large(course: Course) -> Iterator[Finding]:
    given, other, limit = first(course), better(course), stability_limit(course)
    if given is not None and given.change < 0 and other is not None and other.factor < 1:
        beyond = f"; λmax allows {limit:.3g}" if limit is not None else ""
        went = f"goes from {given.before:.4g} to {given.after:.4g}"
        yield Finding(
            "error",
            "the step is too large",
            f"{course.optimiser}, step size {course.step_size:g}",
            f"the loss {went if math.isfinite(given.after) else 'diverges'}; with {other.factor:g} times the "
            f"step it goes from {other.before:.4g} to {other.after:.4g}{beyond}",
            f"use a step size of about {other.factor * (course.step_size or 0.0):.1g}",
        )
    elif course.ended and course.players == 1 and (rise := risen(course)) is not None:
        yield Finding(
            "error",
            "training diverged: the step is too large",
            f"step {rise[0]}",
            f"the training loss rose from {rise[1]:.4g} to {rise[2]:.4g}",
            "use a tenth of the step size, a warm-up, or clip gradients by their norm",
        )


@SIGNS.register("step-too-small")
def step_too_small(course: Course) -> Iterator[Finding]:
    given, other = first(course), better(course)
    if given is not None and other is not None and other.factor > 1 and other.change > BETTER * given.change:
        yield Finding(
            "warning",
            "the step is too small",
            f"{course.optimiser}, step size {course.step_size:g}",
            f"{len(course.train)} steps take {100 * given.change:.2g} % of the loss away; with "
            f"{other.factor:g} times the step {100 * other.change:.2g} %",
            f"use a step size of about {other.factor * (course.step_size or 0.0):.1g}",
        )


@SIGNS.register("oscillation")
def oscillation(course: Course) -> Iterator[Finding]:
    # Of one batch that comes again: the differences between batches are no oscillation.
    values = [value for _, value in course.train][:: course.batches] if course.batches else []
    if len(values) < 12 or not all(map(math.isfinite, values)):
        return
    values = values[len(values) // 2 :]
    changes = [b - a for a, b in pairwise(values)]
    turns = sum(a * b < 0 for a, b in pairwise(changes)) / max(len(changes) - 1, 1)
    amplitude = sum(map(abs, changes)) / len(changes)
    level = sum(map(abs, values)) / len(values)
    net = abs(values[-1] - values[0])
    if turns >= ALTERNATES and amplitude > 0.05 * level and net < 2 * amplitude:
        limit = stability_limit(course)
        beyond = f"; λmax allows {limit:.3g}" if limit is not None else ""
        size = "" if course.step_size is None else f", step size {course.step_size:g}"
        yield Finding(
            "warning",
            "the loss swings to and fro over a valley",
            f"{course.optimiser or 'optimiser'}{size}",
            f"it turns round in {100 * turns:.0f} % of the steps, by {100 * amplitude / level:.0f} % of its "
            f"height{beyond}",
            "halve the step size, or add momentum",
        )


@SIGNS.register("noisy-gradients")
def noisy_gradients(course: Course) -> Iterator[Finding]:
    noise = course.noise
    if noise is None or noise.variance == 0:
        return
    share = noise.signal / (noise.signal + noise.variance / noise.rows)
    given = first(course)
    stuck = given is not None and given.change < 0.01
    if share < 0.05:
        yield Finding(
            "warning" if stuck else "note",
            "gradients of single batches are mostly noise",
            f"batch of {noise.rows} rows",
            f"{100 * share:.1f} % of a batch's squared gradient is signal; signal and noise would be equal "
            + (f"at {noise.scale:,.0f} rows" if math.isfinite(noise.scale) else "at no batch"),
            "use larger batches or accumulation, momentum, or a smaller step",
        )


def first(course: Course) -> Trial | None:
    """With the step size that is given."""
    return next((found for found in course.trials if found.factor == 1), None)


def better(course: Course) -> Trial | None:
    """The other step size that did best, if it learned more."""
    given = first(course)
    others = [found for found in course.trials if found.factor != 1 and found.change > 0.005]
    best = min(others, key=lambda found: found.after, default=None)
    return best if given is not None and best is not None and best.change > given.change else None


def stability_limit(course: Course) -> float | None:
    """2(1 + momentum)/λmax of gradient descent; None for others, or where nobody looked."""
    if course.optimiser != "SGD" or not course.curvatures or course.curvatures[-1][1] <= 0:
        return None
    return 2 * (1 + course.momentum) / course.curvatures[-1][1]


def risen(course: Course) -> tuple[int, float, float] | None:
    """Step, lowest and last value, where the training loss ended far above both its start and its lowest."""
    values = finite(course.train)
    if len(values) < 3:
        return None
    lowest, first = min(value for _, value in values), values[0][1]
    step, last = values[-1]
    if last > first and last - lowest > max(abs(first), abs(lowest)):
        return step, lowest, last
    return None
