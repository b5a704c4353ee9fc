"""Step sizes as pure functions of the step.

τ step, counted from 0 · K total steps · η₀ initial step size · η_K final step size · s scale · c rate
or exponent · W steps of warm-up
"""

from __future__ import annotations

import math

from quire.errors import InputError, unknown_name
from quire.options import Schedule


def linear(step: float, initial: float, final: float, total: float) -> float:
    """η(τ) = (1−τ/K)·η₀ + (τ/K)·η_K, held at η_K from step K on."""
    done = _progress(step, total)
    return (1 - done) * initial + done * final


def power(step: float, initial: float, scale: float, exponent: float) -> float:
    """η(τ) = η₀·(1+τ/s)^c; c is negative for a step size that shrinks."""
    _check_step(step)
    _check_scale(scale)
    return initial * float((1 + step / scale) ** exponent)


def exponential(step: float, initial: float, scale: float, rate: float) -> float:
    """η(τ) = η₀·c^(τ/s): each s steps multiply the step size by c."""
    _check_step(step)
    _check_scale(scale)
    if rate <= 0:
        raise InputError(
            f"the rate of an exponential schedule is {rate!r}",
            expected="a number > 0",
            fix="give the factor by which the step size changes in `scale` steps, such as 0.5",
        )
    return initial * float(rate ** (step / scale))


def cosine(step: float, initial: float, final: float, total: float) -> float:
    """η(τ) = η_K + ½(η₀−η_K)(1+cos(πτ/K)), held at η_K from step K on."""
    return final + 0.5 * (initial - final) * (1 + math.cos(math.pi * _progress(step, total)))


def warmup(step: float, steps: float) -> float:
    """The factor min(1, (τ+1)/W): above 0 already at step 0, so that no step is spent without moving."""
    _check_step(step)
    return min(1.0, (step + 1) / steps) if steps > 0 else 1.0


def step_size(schedule: Schedule, base: float, step: int, total: int) -> float:
    """The step size of `step` out of `total`: W steps of warm-up to `base`, then the named shape over
    the K−W steps that are left."""
    if step < schedule.warmup:
        return base * warmup(step, schedule.warmup)
    after, left = step - schedule.warmup, total - schedule.warmup
    match schedule.name:
        case "constant":
            return base
        case "linear":
            return linear(after, base, schedule.final, left)
        case "power":
            return power(after, base, schedule.scale, schedule.exponent)
        case "exponential":
            return exponential(after, base, schedule.scale, schedule.rate)
        case "cosine":
            return cosine(after, base, schedule.final, left)
    shapes = ("constant", "linear", "power", "exponential", "cosine")
    raise unknown_name("schedule", schedule.name, shapes)


def _progress(step: float, total: float) -> float:
    """τ/K in [0, 1]; a schedule of no steps is over."""
    _check_step(step)
    return min(step / total, 1.0) if total > 0 else 1.0


def _check_step(step: float) -> None:
    if step < 0:
        raise InputError(f"step {step!r}", expected="a step >= 0", fix="count steps from 0")


def _check_scale(scale: float) -> None:
    if scale <= 0:
        raise InputError(
            f"the scale of a schedule is {scale!r}",
            expected="a number of steps > 0",
            fix="give the number of steps in which the step size changes noticeably, such as 1000",
        )
