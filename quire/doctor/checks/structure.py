"""What targets and inputs of several parts are made of: masks, boxes, padding, and rows of two splits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.doctor.case import Case, Pair
from quire.doctor.findings import CHECKS, Finding

SECONDS = 0.5
"""For comparing the rows of two parts."""


@CHECKS.register("rows-in-both-splits")
def rows_in_both_splits(case: Case) -> Iterator[Finding]:
    if not case.validation:
        return
    training = list(fingerprints(case.batches, case.source))
    known = dict(training)
    judged = list(fingerprints(case.validation, case.validation_source))
    shared = [(place, known[key]) for key, place in judged if key in known]
    # Where rows are equal within the training part as well, some are equal by chance.
    repeated = 1 - len(known) / max(len(training), 1)
    if len(shared) > (0.02 + 2 * repeated) * len(judged):
        there, here = shared[0]
        yield Finding(
            "error",
            "rows of the validation part are also trained on",
            f"validation, batch {there[0]}, row {there[1]}",
            f"{len(shared)} of {len(judged)} rows that were compared with {len(training)}; this one is batch "
            f"{here[0]}, row {here[1]} of the training part",
            "split before rows are repeated, augmented or windowed, and keep groups together",
        )


def fingerprints(pairs: list[Pair], source: Any) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Of the inputs of each row, and its batch and place; all batches of what can be gone through again, as
    long as that takes no time."""
    until = time.perf_counter() + SECONDS
    again = source is not None and not isinstance(source, Iterator)
    for number, batch in enumerate(source if again else pairs):
        pair = batch if isinstance(batch, Pair) else Pair.of(batch)
        if not pair.rows or (number >= len(pairs) and time.perf_counter() > until):
            return
        for place, row in enumerate(pair.inputs[0].detach().cpu().contiguous()):
            numbers = (row.float() if row.dtype == torch.bfloat16 else row).numpy()
            yield hashlib.blake2b(numbers.tobytes(), digest_size=16).digest(), (number + 1, place)


@CHECKS.register("rows-masked")
def rows_masked(case: Case) -> Iterator[Finding]:
    for number, pair in enumerate(case.batches):
        for part, value in enumerate(pair.inputs):
            for row, kind in masked_rows(value):
                yield Finding(
                    "error",
                    "a row is masked as a whole: attention has nothing to look at",
                    f"inputs {part + 1}, batch {number + 1}, row {row}",
                    f"all {value[row].numel()} places are {kind}; the softmax of nothing is not a number",
                    "leave out empty rows, or keep one place of each",
                )
                return


def masked_rows(value: Any) -> Iterator[tuple[int, str]]:
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] < 2 or not len(value):
        return
    flat = value.detach().flatten(1)
    if value.dtype == torch.bool:
        # True keeps a place in one convention and hides it in the other: what most places have is no hiding.
        hides = bool(flat.double().mean() < 0.5)
        hidden = flat if hides else ~flat
        word = str(hides)
    elif value.is_floating_point() and bool(flat.isneginf().any()):
        hidden, word = flat.isneginf(), "−∞"
    else:
        return
    for row in hidden.all(1).nonzero().flatten().tolist():
        yield row, word


@CHECKS.register("boxes")
def boxes(case: Case) -> Iterator[Finding]:
    for number, pair in enumerate(case.batches):
        for place, found in box_sets(pair.target):
            if found.ndim != 2 or found.shape[-1] != 4:
                continue
            finite = found.isfinite().all(1)
            flat = (found[:, 2:] <= found[:, :2]).any(1) | ~finite
            for box in flat.nonzero().flatten().tolist():
                yield Finding(
                    "error",
                    "a box without area",
                    f"target, batch {number + 1}, {place}box {box}",
                    f"({', '.join(f'{float(side):g}' for side in found[box])}): the second corner has to lie "
                    "below and to the right of the first",
                    "drop it, and check whether boxes are corners or a corner with width and height",
                )
                return


def box_sets(target: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors under the name "boxes", with where they stand."""
    if isinstance(target, Mapping) and isinstance(target.get("boxes"), Tensor):
        yield "", target["boxes"].detach()
    elif isinstance(target, list | tuple):
        for image, one in enumerate(target):
            if isinstance(one, Mapping) and isinstance(one.get("boxes"), Tensor):
                yield f"image {image}, ", one["boxes"].detach()


@CHECKS.register("padding-counts")
def padding_counts(case: Case) -> Iterator[Finding]:
    """Rows that end with a run of one token, in inputs and target alike, whose target the loss looks at."""
    pair = case.first
    target, given = pair.target, pair.inputs[0]
    tokens = isinstance(target, Tensor) and not target.is_floating_point() and target.ndim == 2
    if not tokens or not isinstance(given, Tensor) or case.step.stage != "done" or case.step.loss is None:
        return
    if given.is_floating_point() or given.shape != target.shape or target.shape[1] < 3:
        return
    last = target[:, -1]
    token = int(last.mode().values)
    tail = (target == token).flip(1).cumprod(1).flip(1).bool() & (given == given[:, -1:])
    padded = (tail.sum(1) >= 2) & (last == token)
    if token < 0 or int(padded.sum()) < max(2, len(target) // 4) or bool(padded.all() & tail.all()):
        return
    places = tail & padded[:, None]
    others = target.clone()
    others[places] = (token + 1) if bool((target == token + 1).any()) else int(target[~places].min())
    before = case.step.loss.detach()
    with torch.no_grad():
        after = case.loss(case.step.output, others)
    if abs(float(after - before)) > 1e-6 * max(1.0, abs(float(before))):
        yield Finding(
            "warning",
            "the loss counts padding",
            f"target, token {token}",
            f"{int(places.sum())} of {target.numel()} places are a run of it at a row's end, and the loss "
            "changes with them",
            f"give the loss ignore_index={token}, or set those targets to -100",
        )
