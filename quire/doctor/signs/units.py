"""Units that take no part."""

from __future__ import annotations

from collections.abc import Iterator

from quire.doctor.course import Course, falls
from quire.doctor.findings import SIGNS, Finding
from quire.doctor.flow import IDLE, NEARLY_ALL
from quire.doctor.watch import NEAR, Activation

LEARNED = 0.2
"""Of the first loss, what has to go for dead units to do no harm."""
SAME = 1e-3
"""Of a layer's size, what has to differ between rows."""


@SIGNS.register("units-die")
def units_die(course: Course) -> Iterator[Finding]:
    for first, last in layers(course):
        if last.dead is not None and last.dead > IDLE:
            before = f", {100 * first.dead:.0f} % at first" if first.dead is not None else ""
            harmless = last.dead < NEARLY_ALL and falls(course.train) > LEARNED
            yield Finding(
                "note" if harmless else "warning",
                "most units give 0 for every row",
                last.name,
                f"{100 * last.dead:.0f} % of the units of this {last.kind}{before}; {last.rows} rows",
                "lower the step size, start with biases near 0, or use leaky ReLU",
            )
            return


@SIGNS.register("units-saturate")
def units_saturate(course: Course) -> Iterator[Finding]:
    for first, last in layers(course)[:-1]:
        if last.saturated is not None and last.saturated > IDLE:
            yield Finding(
                "warning",
                "most units are saturated, and pass no gradient",
                last.name,
                f"{100 * last.saturated:.0f} % of all values lie within {NEAR} of a bound, "
                f"{100 * (first.saturated or 0.0):.0f} % at first",
                "scale the inputs, start with smaller weights, and lower the step size",
            )
            return


@SIGNS.register("collapse")
def collapse(course: Course) -> Iterator[Finding]:
    for warning in course.warnings:
        said, _, advice = warning.partition("; ")
        what, _, evidence = said.partition(": ")
        yield Finding("warning", what, "model", evidence or said, advice or "see the report of the run")
    found = layers(course)
    for first, last in found:
        # Only where rows differed before: a layer that is given the same each time can give nothing else.
        if last.rows >= 8 and last.spread < SAME < first.spread and last.size > 0:
            yield Finding(
                "warning",
                "the model has collapsed: what it gives is the same for every row",
                last.name,
                f"rows differ by {last.spread:.1e} of the size of this {last.kind}'s output, by "
                f"{first.spread:.1e} at first",
                "lower the step size; where nothing but likeness is learned, add pairs that must differ",
            )
            return


def layers(course: Course) -> list[tuple[Activation, Activation]]:
    """Each layer in the first look and in the last one that is finite."""
    whole = [seen for seen in course.looks if seen.broken() is None]
    if not whole or len(whole[0].layers) != len(whole[-1].layers):
        return []
    return list(zip(whole[0].layers, whole[-1].layers, strict=True))
