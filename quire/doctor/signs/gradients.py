"""Gradients on their way back through the layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from quire.doctor.course import Course, falls
from quire.doctor.findings import SIGNS, Finding

VANISHED, EXPLODED = 1e-5, 1e3
FORGOTTEN = 1e-6
"""Share of the last place's gradient that reaches the first one."""
LEARNED = 0.1
"""Of the first loss, what has to go in a probe for shattered gradients to do no harm."""
SHATTERED = 0.3
"""Cosine between neighbours below which a gradient says nothing of the place beside it."""


@SIGNS.register("not-finite")
def not_finite(course: Course) -> Iterator[Finding]:
    for seen in course.looks:
        if (place := seen.broken()) is not None:
            before = course.looks[max(0, course.looks.index(seen) - 1)]
            yield Finding(
                "error",
                "a number became infinite, or none at all",
                place,
                f"first at step {seen.step}; the loss before it was {before.loss:.4g}, the gradient's norm "
                f"{before.norm:.3g}",
                "lower the step size, clip gradients by their norm, or keep logarithms and divisions from 0",
            )
            return
    for name, curve in (("training loss", course.train), ("gradient norm", course.norms)):
        bad = [step for step, value in curve if not math.isfinite(value)]
        if bad:
            yield Finding(
                "error",
                "a number became infinite, or none at all",
                name,
                f"first at step {bad[0]}",
                "lower the step size, clip gradients by their norm, or keep logarithms and divisions from 0",
            )
            return


@SIGNS.register("vanishing-gradients")
def vanishing(course: Course) -> Iterator[Finding]:
    flow = relative_gradients(course)
    if len(flow) < 4:
        return
    (first, start), (last, end) = flow[0], flow[-1]
    if end > 0 and start < VANISHED * end:
        yield Finding(
            "warning",
            "gradients vanish on the way to the first layers",
            first,
            f"relative to its weights the gradient is {start:.1e} there and {end:.1e} at {last}",
            "use ReLU or GELU with He's initial weights, normalisation, or residual connections",
        )


@SIGNS.register("exploding-gradients")
def exploding(course: Course) -> Iterator[Finding]:
    large = [(name, size) for name, size in relative_gradients(course) if size > EXPLODED]
    norms = [value for _, value in course.norms if math.isfinite(value) and value > 0]
    if large:
        yield Finding(
            "warning",
            "gradients explode",
            large[0][0],
            f"{large[0][1]:.1e} times as large as the weights",
            "start with smaller weights, normalise, and clip gradients by their norm",
        )
    elif len(norms) >= 4 and max(norms[1:]) > EXPLODED * median(norms):
        step = max(course.norms, key=lambda pair: pair[1] if math.isfinite(pair[1]) else 0.0)[0]
        yield Finding(
            "warning",
            "gradients explode now and then",
            f"step {step}",
            f"a norm of {max(norms):.3g}, where {median(norms):.3g} is usual",
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
