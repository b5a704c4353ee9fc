"""Curves of whole runs: what was learned, and whether it holds for rows that were not seen."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quire.doctor.course import Course, Curve, falls, finite
from quire.doctor.findings import SIGNS, Finding

LEARNED = 0.02
"""Of the first loss, what has to go for anything to have been learned."""


@SIGNS.register("failed")
def failed(course: Course) -> Iterator[Finding]:
    if not course.failed:
        return
    step = re.match(r"step \d+(?=: )", course.failed)
    if "the data has non-finite values" in course.failed:
        fix = "remove or repair these rows"
    elif step:
        fix = "lower --optim.lr, and --optim.weight-decay where there is any, or set --optim.clip-norm 1"
    else:
        fix = "mend what is said there; quire train RECIPE --resume RUN goes on"
    yield Finding("error", "training failed", step[0] if step else "log.txt", course.failed, fix)


@SIGNS.register("plateau")
def plateau(course: Course) -> Iterator[Finding]:
    values = finite(course.train)
    if not course.ended or len(values) < 5 or course.players != 1:
        return
    if course.baseline is None and falls(values) < LEARNED and values[0][1] > 1e-6:
        yield Finding(
            "warning",
            "nothing was learned: the training loss has hardly moved",
            f"steps {values[0][0]} to {values[-1][0]}",
            f"from {values[0][1]:.4g} to {min(v for _, v in values):.4g} at its lowest",
            "overfit one batch first; then try ten times the step size, and look at the gradients by layer",
        )
        return
    half = len(values) // 2
    early, late = min(v for _, v in values[:half]), min(v for _, v in values[half:])
    whole = values[0][1] - min(early, late)
    if whole > 0 and early - late < 0.005 * whole and half >= 5:
        yield Finding(
            "note",
            "the second half of training brought nothing",
            f"from step {values[half][0]}",
            f"training loss {early:.4g} before, {late:.4g} after",
            "stop earlier, let the step size fall, or take a larger model",
        )


@SIGNS.register("underfit")
def underfit(course: Course) -> Iterator[Finding]:
    baseline = course.baseline
    if baseline is None or not course.ended:
        return
    gain = baseline.reached - baseline.trivial
    gain = gain if baseline.higher_is_better else -gain
    if gain < 0.02 * max(abs(baseline.trivial), 0.1):
        yield Finding(
            "warning",
            "the model is no better than the simplest answer",
            f"training {baseline.measure}",
            f"{baseline.reached:.4g}; {baseline.answer} reaches {baseline.trivial:.4g}",
            "check that inputs and targets belong together; then train longer, with a larger step or model",
        )


@SIGNS.register("overfit")
def overfit(course: Course) -> Iterator[Finding]:
    values, train = finite(course.validation), finite(course.train)
    if not course.ended or len(values) < 4 or len(train) < 4 or course.players != 1:
        return
    step, best = min(values, key=lambda pair: pair[1])
    last = values[-1][1]
    before = nearest(train, step)
    if step < values[-1][0] and last > best + 0.1 * abs(best) and train[-1][1] < before:
        # A classifier that grows too sure of itself may still be right more often.
        judged = [value for _, value in finite(course.judged)]
        still = bool(judged) and judged[-1] > max(judged) - 0.02 * abs(max(judged))
        yield Finding(
            "note" if course.keeps_best or still else "warning",
            "the model learns its training rows by heart",
            f"from step {step}",
            f"validation loss {best:.4g} there and {last:.4g} at the end, while the training loss falls from "
            f"{before:.4g} to {train[-1][1]:.4g}",
            "the weights of that step are kept; more data, augmentation, weight decay or dropout would help"
            if course.keeps_best
            else "keep the best weights (--train.restore best), or add data, augmentation, decay, dropout",
        )


@SIGNS.register("unfinished")
def unfinished(course: Course) -> Iterator[Finding]:
    values = finite(course.validation or course.train)
    if not course.ended or len(values) < 8 or course.players != 1:
        return
    tail = values[-max(2, len(values) // 5) :]
    whole = values[0][1] - min(v for _, v in values)
    gained = tail[0][1] - tail[-1][1]
    if whole > 0 and gained > 0.1 * whole and tail[-1][1] == min(v for _, v in values):
        yield Finding(
            "note",
            "the loss was still falling at the end",
            f"steps {tail[0][0]} to {tail[-1][0]}",
            f"{100 * gained / whole:.0f} % of the whole fall came in the last fifth",
            "train longer: quire train RECIPE --resume RUN --epochs N",
        )


def nearest(curve: Curve, step: int) -> float:
    return min(curve, key=lambda pair: abs(pair[0] - step))[1]
