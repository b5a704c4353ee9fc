"""Matching of default boxes to true boxes, beside forms that hold all overlaps in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quire.bench.case import SUBJECTS, Bar, Case, Contestant, Place, Work
from quire.functional.boxes import iou_matrix
from quire.functional.detect import match_boxes

THRESHOLD = 0.5


def one_pass(defaults: Tensor, truth: Tensor) -> Tensor:
    """Less than `match_boxes` does: of two true boxes that want one default box, the later takes it."""
    overlap = iou_matrix(truth, defaults, degenerate="zero")
    best, index = overlap.max(0)
    top, chosen = overlap.max(1)
    index = torch.where(best >= THRESHOLD, index, -1)
    own = torch.arange(len(truth), device=truth.device)
    return index.index_put((chosen,), torch.where(top > 0, own, index[chosen]))


def plain(defaults: Tensor, truth: Tensor) -> Tensor:
    return match_boxes(defaults, truth, threshold=THRESHOLD, degenerate="zero", backend="torch")


@SUBJECTS.register("matching")
def matching(place: Place) -> Iterator[Case]:
    """IoU and matching of default boxes, beside torch.compile of the plain form and of a single pass."""
    count, boxes = (100_000, 100) if place.on_gpu else (8732, 20)
    count, boxes = place.size(count, 60), place.size(boxes, 5)
    defaults, truth = (_boxes(number, place) for number in (count, boxes))
    wanted = plain(defaults, truth)

    def run(function: Callable[[Tensor, Tensor], Tensor]) -> Contestant:
        return lambda: function(defaults, truth)

    def fused(defaults: Tensor, truth: Tensor) -> Tensor:
        return match_boxes(defaults, truth, threshold=THRESHOLD, degenerate="zero")

    contestants = {"quire": run(fused)}
    if place.on_gpu:
        contestants["plain form compiled"] = run(torch.compile(plain))
        contestants["single pass compiled"] = run(torch.compile(one_pass))
    contestants["plain form"] = run(plain)
    contestants["single pass"] = run(one_pass)
    rivals = ("plain form compiled", "single pass compiled") if place.on_gpu else ()
    yield Case(
        f"matching, {count:,} default boxes, {boxes} true boxes, float32",
        contestants,
        work=Work(moved=defaults.nbytes + truth.nbytes + wanted.nbytes),
        error=lambda found: float((found != wanted).double().mean()),
        bars=(
            Bar("error", at_most=0.0),
            *(Bar("time", at_most=0.5, rival=rival) for rival in rivals),
        ),
    )


def _boxes(count: int, place: Place) -> Tensor:
    generator = torch.Generator(place.device).manual_seed(count)
    centre, size = torch.rand(2, count, 2, generator=generator, device=place.device).unbind()
    half = 0.01 + 0.14 * size
    return torch.cat([centre - half, centre + half], 1)
