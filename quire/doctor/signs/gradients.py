"""Gradients on their way back through the layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from quire.doctor.course import Course, falls, finite
from quire.doctor.findings import SIGNS, Finding
from quire.doctor.flow import EXPLODED, exploding, vanishing

FORGOTTEN = 1e-6
"""Share of the last place's gradient that reaches the first one."""
LEARNED = 0.1
"""Of the first loss, what has to go in a probe for shattered gradients to do no harm."""
SHATTERED = 0.3
"""Cosine between neighbours below which a gradient says nothing of the place beside it."""


@SIGNS.register("not-finite")
def not_finite(course: Course) -> Iterator[Finding]:
    places = [(number, place) for number, seen in enumerate(course.looks) if (place := seen.broken())]
    curves = {"training loss": course.train, "gradient norm": course.norms}
    steps = [
        (name, step) for name, curve in curves.items() for step, value in curve if not math.isfinite(value)
    ]
    if places:
        number, where = places[0]
        before = course.looks[max(0, number - 1)]
        evidence = (
            f"first at step {course.looks[number].step}; the loss before it was {before.loss:.4g}, the "
            f"gradient's norm {before.norm:.3g}"
        )
    elif steps:
        where, evidence = steps[0][0], f"first at step {steps[0][1]}"
    else:
        return
    yield Finding(
        "error",
        "a number became infinite, or none at all",
        where,
        evidence,
        "lower the step size, clip gradients by their norm, or keep logarithms and divisions from 0",
    )


@SIGNS.register("vanishing-gradients")
def vanishing_gradients(course: Course) -> Iterator[Finding]:
    yield from vanishing(relative_gradients(course))


@SIGNS.register("exploding-gradients")
def exploding_gradients(course: Course) -> Iterator[Finding]:
    steady = list(exploding(relative_gradients(course)))
    yield from steady
    norms = [(step, value) for step, value in finite(course.norms) if value > 0]
    sizes = [value for _, value in norms]
    if not steady and len(sizes) >= 4 and max(sizes[1:]) > EXPLODED * median(sizes):
        step, largest = max(norms, key=lambda pair: pair[1])
        yield Finding(
            "warning",
            "gradients explode now and then",
            f"step {step}",
            f"a norm of {largest:.3g}, where {median(sizes):.3g} is usual",
            "clip gradients by their norm, at a few times the usual one",
        )


@SIGNS.register("shattered-gradients")
def shattered(course: Course) -> Iterator[Finding]:
    if course.likeness is not None and course.likeness < SHATTERED:
        learns = falls(course.train) > LEARNED
        yield Finding(
            "note" if learns else "warning",
            "gradients are shattered: at a place nearby they point elsewhere",
            "inputs",
            f"the mean cosine between gradients a thirty-second of the way between two rows is "
            f"{course.likeness:.2f}",
            "add residual connections, normalise, or use fewer layers",
        )


@SIGNS.register("recurrent-reach")
def recurrent_reach(course: Course) -> Iterator[Finding]:
    for layer in course.looks[0].layers if course.looks else []:
        if layer.reach is None or layer.places < 10:
            continue
        sizes = [
            f"{key} {size:.2f}" for key, size in course.recurrent.items() if key.startswith(f"{layer.name}.")
        ]
        singular = f"largest singular values: {', '.join(sizes)}" if sizes else "its weights are not known"
        if layer.reach < FORGOTTEN:
            yield Finding(
                "warning",
                "what came first is forgotten: the gradient does not reach back through time",
                layer.name,
                f"over {layer.places} places it shrinks to {layer.reach:.1e}; {singular}",
                "use an LSTM or GRU with a forget bias of 1, orthogonal weights, or attention",
            )
        elif layer.reach > EXPLODED:
            yield Finding(
                "warning",
                "the gradient explodes through time",
                layer.name,
                f"over {layer.places} places it grows {layer.reach:.1e} times; {singular}",
                "clip gradients by their norm, use orthogonal weights, or an LSTM or GRU",
            )


def relative_gradients(course: Course) -> list[tuple[str, float]]:
    """Of each matrix the gradient relative to the weights, in the first look; later ones may have learned."""
    if not course.looks or course.looks[0].broken() is not None:
        return []
    return [(w.name, w.relative) for w in course.looks[0].weights if w.matrix and w.relative is not None]
