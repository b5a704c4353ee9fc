"""Inputs and targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.doctor.case import NORMS, Case
from quire.doctor.findings import CHECKS, Finding

IGNORED = -100
"""PyTorch's default number of a class that counts nothing."""


def float_inputs(case: Case) -> Iterator[tuple[str, Tensor]]:
    for number, value in enumerate(case.first.inputs):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield ("inputs" if len(case.first.inputs) == 1 else f"inputs {number + 1}"), value.detach()


@CHECKS.register("data-not-finite")
def data_not_finite(case: Case) -> Iterator[Finding]:
    for number, pair in enumerate(case.batches):
        for name, value in [("inputs", v) for v in pair.inputs] + [("target", pair.target)]:
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
                place = tuple((~value.isfinite()).nonzero()[0].tolist())
                yield Finding(
                    "error",
                    f"{name} that are not finite",
                    f"{name}, batch {number + 1}, {place}",
                    f"{int((~value.isfinite()).sum()):,} of {value.numel():,} values",
                    "remove those rows, or fill in what is missing",
                )
                return


@CHECKS.register("inputs-unscaled")
def inputs_unscaled(case: Case) -> Iterator[Finding]:
    if any(isinstance(layer.module, NORMS) for layer in list(case.step.layers.values())[:1]):
        return  # the first layer scales them
    for name, value in float_inputs(case):
        if not bool(value.isfinite().all()) or value.numel() < 2:
            continue
        mean, deviation = float(value.double().mean()), float(value.double().std())
        if deviation > 30 or abs(mean) > max(10 * deviation, 3):
            yield Finding(
                "warning",
                "inputs are not scaled",
                name,
                f"mean {mean:.4g}, standard deviation {deviation:.4g}",
                "subtract the mean and divide by the standard deviation of the training rows",
            )


@CHECKS.register("inputs-constant")
def inputs_constant(case: Case) -> Iterator[Finding]:
    for name, value in float_inputs(case):
        if value.ndim != 2 or len(value) < 8:
            continue
        columns = torch.cat([pair.inputs[0] for pair in case.batches if isinstance(pair.inputs[0], Tensor)])
        same = (columns == columns[0]).all(0).nonzero().flatten().tolist()
        if same:
            yield Finding(
                "note",
                f"{len(same)} columns never change",
                f"{name}, column {same[0]}",
                f"all {len(columns)} rows have {float(columns[0, same[0]]):.4g} there",
                "leave them out",
            )


@CHECKS.register("target-range")
def target_range(case: Case) -> Iterator[Finding]:
    classes = case.classes
    if classes is None:
        return
    for number, pair in enumerate(case.batches):
        target = pair.target
        wrong = ((target < 0) & (target != IGNORED)) | (target >= classes)
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            yield Finding(
                "error",
                "a class that the model has no output for",
                f"target, batch {number + 1}, {place}",
                f"{int(target[place])} where classes are 0 to {classes - 1}",
                "number the classes from 0, and give the model an output for each",
            )
            return


@CHECKS.register("target-dtype")
def target_dtype(case: Case) -> Iterator[Finding]:
    target, output, problem = case.first.target, case.output, case.step.problem
    if not isinstance(target, Tensor) or output is None or case.step.stage != "loss" or problem is None:
        return
    if target.is_floating_point() and output.ndim == 2 and target.ndim == 1:
        yield Finding(
            "error",
            "classes are given as floating-point numbers",
            "target",
            f"{target.dtype} of shape {tuple(target.shape)}, with {output.shape[1]} outputs a row: {problem}",
            "use target.long()",
        )


@CHECKS.register("class-imbalance")
def class_imbalance(case: Case) -> Iterator[Finding]:
    if case.classes is None:
        return
    counts = Counter(int(c) for pair in case.batches for c in pair.target.flatten().tolist() if c != IGNORED)
    total = sum(counts.values())
    label, most = max(counts.items(), key=lambda item: item[1], default=(0, 0))
    if total >= 50 and most / total > 0.95:
        yield Finding(
            "warning",
            "almost all rows are of one class",
            f"target, class {label}",
            f"{most} of {total} rows: always to say {label} is right {100 * most / total:.1f} % of the time",
            "weigh the classes, sample them evenly, and judge by recall as well",
        )
