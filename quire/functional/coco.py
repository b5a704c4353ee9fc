"""Average precision by COCO's rules, for all images, classes, thresholds and area ranges at once.

D detections, G true boxes, P pairs of a detection and a true box of its image and class that overlap enough;
T thresholds of IoU, R recall points, K classes, A area ranges, M limits on detections per image and class.

The rules: in each image and class detections are taken by falling score (the first given first among equal
ones), at most the largest limit of them, and each takes the free true box that it overlaps most, the last
one among equals, if the IoU reaches the threshold. True boxes that are crowds or outside the area range are
ignored: they are taken only where no other is left, and what takes them counts neither way. A crowd can be
taken many times, and its overlap is the share of the detection inside it. A detection that takes nothing and
is outside the area range counts neither way. Precision is made non-increasing in recall and read off at 101
recall points. Where a class has nothing to find, precision and recall are −1 and stay out of every mean.

Greedy choice is sequential in an image only: the n-th detections of all images and classes are matched
together, so the Python loop is as long as the fullest image, not as long as the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.boxes import box_area, intersection, require_boxes

CHUNK = 2_000_000
"""Pairs whose overlap is computed at once: about 200 MB."""
NEARLY_ONE = 1 - 1e-10
"""A threshold of 1 must survive rounding."""


def evenly(start: float, stop: float, points: int) -> tuple[float, ...]:
    """start + i (stop − start)/(points − 1), rounded as NumPy does: IoU 0.6 must meet the same 0.6."""
    step = (stop - start) / (points - 1)
    return (*(i * step + start for i in range(points - 1)), stop)


THRESHOLDS = evenly(0.5, 0.95, 10)
RECALLS = evenly(0.0, 1.0, 101)
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
LIMITS = (1, 10, 100)


@dataclass(frozen=True)
class Detections:
    """Boxes (D, 4) as corners, with the score, class and image number of each."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    images: Tensor


@dataclass(frozen=True)
class Truth:
    """True boxes (G, 4) as corners, with class and image number, whether each is a crowd, and its area.

    The area decides the area range. It is the box's own where none is given; COCO gives that of the outline.
    """

    boxes: Tensor
    labels: Tensor
    images: Tensor
    crowd: Tensor | None = None
    areas: Tensor | None = None


@dataclass(frozen=True)
class CocoCurves:
    """Precision (T, R, K, A, M) at each recall point and the largest recall (T, K, A, M), in float64."""

    precision: Tensor
    recall: Tensor
    thresholds: tuple[float, ...]
    areas: tuple[str, ...]
    limits: tuple[int, ...]

    def average_precision(self, threshold: float | None = None, area: str = "all") -> float:
        """Mean over recall points, classes and thresholds, or at one threshold; −1 with nothing to find."""
        values = self.precision[self._at(threshold), :, :, self.areas.index(area), -1]
        return _mean_found(values)

    def average_recall(self, limit: int | None = None, area: str = "all") -> float:
        """Mean of the largest recall over classes and thresholds; −1 with nothing to find."""
        last = len(self.limits) - 1 if limit is None else self.limits.index(limit)
        return _mean_found(self.recall[:, :, self.areas.index(area), last])

    def by_class(self, threshold: float | None = None) -> Tensor:
        """Average precision of each class over all areas (K,); −1 for a class with nothing to find."""
        return self.precision[self._at(threshold), :, :, 0, -1].mean((0, 1))

    def measures(self) -> dict[str, float]:
        """COCO's summary: ap, ap50, ap75, ap_small …, ar_1, ar_10, ar_100, ar_small …"""
        values = {"ap": self.average_precision()}
        for threshold in (0.5, 0.75):
            if any(abs(threshold - t) < 1e-9 for t in self.thresholds):
                values[f"ap{100 * threshold:.0f}"] = self.average_precision(threshold)
        others = [area for area in self.areas if area != "all"]
        values.update({f"ap_{area}": self.average_precision(area=area) for area in others})
        values.update({f"ar_{limit}": self.average_recall(limit) for limit in self.limits})
        values.update({f"ar_{area}": self.average_recall(area=area) for area in others})
        return values

    def _at(self, threshold: float | None) -> slice:
        if threshold is None:
            return slice(None)
        for i, known in enumerate(self.thresholds):
            if abs(known - threshold) < 1e-9:
                return slice(i, i + 1)
        raise InputError(
            f"average precision at IoU {threshold:g}",
            expected="one of " + ", ".join(f"{known:g}" for known in self.thresholds),
            fix="give the threshold to coco_curves too: thresholds=(…)",
        )


def _mean_found(values: Tensor) -> float:
    found = values[values > -1]
    return found.mean().item() if len(found) else -1.0


# Checks ---------------------------------------------------------------------------------------


def _check(name: str, boxes: Tensor, classes: int, columns: Mapping[str, Tensor | None]) -> None:
    require_boxes(name, boxes)
    for column, values in columns.items():
        if values is not None and (boxes.dim() != 2 or values.shape != boxes.shape[:1]):
            raise InputError(
                f"{name}: {column} of shape {tuple(values.shape)} for boxes of shape {tuple(boxes.shape)}",
                expected="boxes (N, 4) and one number for each",
                fix="concatenate the images, and say in `images` which image a box belongs to",
            )
    bad = ~(boxes[:, 2:] >= boxes[:, :2]).all(1)
    scores, labels = columns.get("scores"), columns["labels"]
    assert labels is not None
    outside = (labels < 0) | (labels >= classes)
    unordered = scores.isnan() if scores is not None else torch.zeros_like(bad)
    if not bool((bad | outside | unordered).any()):
        return
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        shown = ", ".join(f"{value:g}" for value in boxes[row].tolist())
        raise InputError(
            f"{name}: box {row} is ({shown})",
            expected="corners (x₁, y₁, x₂, y₂) with x₂ ≥ x₁ and y₂ ≥ y₁",
            fix='convert boxes with a size: convert_boxes(boxes, "size", "corners")',
        )
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise InputError(
            f"{name}: box {row} is of class {int(labels[row])}",
            expected=f"class numbers from 0 to {classes - 1}",
            fix="number the classes from 0, without the background, and give their number as `classes`",
        )
    raise InputError(
        f"{name}: the score of box {int(unordered.nonzero()[0])} is not a number",
        expected="scores that can be sorted",
        fix="look for NaN in the model's output",
    )


# Matching -------------------------------------------------------------------------------------


class _Ranked(NamedTuple):
    """Detections sorted by image and class, then by falling score; `rank` counts within image and class."""

    order: Tensor
    group: Tensor
    rank: Tensor


def _rank(scores: Tensor, group: Tensor) -> _Ranked:
    order = scores.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    group = group[order]
    position = torch.arange(len(group), device=group.device)
    return _Ranked(order, group, position - torch.searchsorted(group, group))


class _Pairs(NamedTuple):
    """Rows of sorted detections and of sorted true boxes that could be matched, and their overlap."""

    detection: Tensor
    truth: Tensor
    overlap: Tensor


def _pairs(
    boxes: Tensor, group: Tensor, true_boxes: Tensor, true_group: Tensor, crowd: Tensor, least: float
) -> _Pairs:
    """All pairs within a group (both sorted by group) with an overlap of at least `least`."""
    first = torch.searchsorted(true_group, group)
    count = torch.searchsorted(true_group, group, right=True) - first
    parts = [_some_pairs(boxes, true_boxes, crowd, least, first, count, *ends) for ends in _chunks(count)]
    detection, truth, overlap = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return _Pairs(detection, truth, overlap)


def _chunks(count: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of detections with about CHUNK pairs each; one empty range for no detections."""
    total = count.cumsum(0)
    number = int(total[-1]) // CHUNK + 1 if len(total) else 1
    cuts = torch.arange(1, number, device=count.device) * CHUNK
    ends = [0, *torch.searchsorted(total, cuts).tolist(), len(count)]
    return itertools.pairwise(ends)


def _some_pairs(
    boxes: Tensor,
    truth: Tensor,
    crowd: Tensor,
    least: float,
    first: Tensor,
    count: Tensor,
    start: int,
    end: int,
) -> _Pairs:
    count, first = count[start:end], first[start:end]
    row = torch.arange(start, end, device=boxes.device).repeat_interleave(count)
    within = torch.arange(len(row), device=boxes.device) - (count.cumsum(0) - count).repeat_interleave(count)
    column = first.repeat_interleave(count) + within
    here, there = boxes[row], truth[column]
    shared, area = intersection(here, there), box_area(here)
    whole = torch.where(crowd[column], area, area + box_area(there) - shared)
    overlap = torch.where(shared > 0, shared / whole, 0.0)
    kept = overlap >= least
    return _Pairs(row[kept], column[kept], overlap[kept])


def _match(
    pairs: _Pairs, group: Tensor, ignored: Tensor, crowd: Tensor, thresholds: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether each detection takes a true box, and one that is ignored: (D, T, A) each."""
    shape = (len(group), len(thresholds), ignored.shape[1])
    matched = torch.zeros(shape, dtype=torch.bool, device=group.device)
    matched_ignored = torch.zeros_like(matched)
    if not len(pairs.detection):
        return matched, matched_ignored
    # The n-th detection of a group that could take anything is matched in round n.
    rows, row_of_pair = pairs.detection.unique_consecutive(return_inverse=True)
    turn = torch.arange(len(rows), device=rows.device) - torch.searchsorted(group[rows], group[rows])
    by_turn = turn[row_of_pair].argsort(stable=True)
    sizes = turn[row_of_pair].bincount().tolist()
    # One integer orders a detection's choices: not ignored before ignored, then overlap, then the last given.
    number = len(row_of_pair)
    choice = torch.empty_like(row_of_pair)
    choice[pairs.overlap.argsort(stable=True)] = torch.arange(number, device=rows.device)
    truth_of_choice = torch.empty_like(choice)
    truth_of_choice[choice] = pairs.truth
    taken = torch.zeros((len(ignored), *shape[1:]), dtype=torch.bool, device=group.device)
    for part in by_turn.split(sizes):
        truth = pairs.truth[part]
        free = ~taken[truth] | crowd[truth, None, None]
        near = pairs.overlap[part, None] >= thresholds
        value = choice[part, None] + number * (~ignored[truth]).long()
        value = torch.where(free & near[:, :, None], value[:, None, :], -1)
        here, slot = pairs.detection[part].unique_consecutive(return_inverse=True)
        best = value.new_full((len(here), *shape[1:]), -1)
        best = best.scatter_reduce(0, slot[:, None, None].expand_as(value), value, "amax")
        found = best >= 0
        matched[here], matched_ignored[here] = found, found & (best < number)
        _, t, a = found.nonzero(as_tuple=True)
        taken[truth_of_choice[best[found] % number], t, a] = True
    return matched, matched_ignored


# Curves ---------------------------------------------------------------------------------------


def _read_off(hit: Tensor, miss: Tensor, positives: Tensor, recalls: Tensor) -> tuple[Tensor, Tensor]:
    """Precision (T, A, R) at the recall points and the last recall (T, A) from sorted hits (T, A, D)."""
    if not hit.shape[-1]:
        zero = recalls.new_zeros(hit.shape[:2])
        return zero[..., None].expand(*zero.shape, len(recalls)), zero
    hits = hit.cumsum(-1, dtype=torch.float64)
    called = (hit | miss).cumsum(-1, dtype=torch.float64)
    recall = hits / positives[:, None]
    precision = hits.div_(called.clamp_(min=1))
    highest_after = precision.flip(-1).cummax(-1).values.flip(-1)
    place = torch.searchsorted(recall, recalls.expand(*hit.shape[:2], -1).contiguous())
    reached = place < hit.shape[-1]
    read = highest_after.gather(-1, place.clamp(max=hit.shape[-1] - 1))
    return torch.where(reached, read, 0.0), recall[..., -1]


def coco_curves(
    detections: Detections,
    truth: Truth,
    *,
    classes: int,
    thresholds: Sequence[float] = THRESHOLDS,
    areas: Mapping[str, tuple[float, float]] | None = None,
    limits: Sequence[int] = LIMITS,
) -> CocoCurves:
    """Precision and recall by COCO's rules: AP = (1/101) Σ_r max_{r' ≥ r} P(r'), r = 0, 0.01 … 1.

    Classes are numbered from 0 to `classes` − 1, images by any integers. `areas` are named ranges of area in
    the boxes' own units, the first for the total; COCO's small, medium and large are in pixels. `limits` are
    the largest numbers of detections per image and class, rising.
    """
    areas = AREAS if areas is None else areas
    if not (limits and thresholds and areas) or list(limits) != sorted(limits) or limits[0] < 1:
        raise InputError(
            f"coco_curves with limits {tuple(limits)}, {len(thresholds)} thresholds and {len(areas)} areas",
            expected="at least one of each, and limits that rise from 1 or more",
            fix="sort the limits",
        )
    d, g = detections, truth
    _check("detections", d.boxes, classes, {"scores": d.scores, "labels": d.labels, "images": d.images})
    _check(
        "truth",
        g.boxes,
        classes,
        {"labels": g.labels, "images": g.images, "crowd": g.crowd, "areas": g.areas},
    )
    device = d.boxes.device
    bounds = torch.tensor(list(areas.values()), dtype=torch.float64, device=device)
    levels = torch.tensor(thresholds, dtype=torch.float64, device=device).clamp(max=NEARLY_ONE)

    true_group = g.images.long() * classes + g.labels.long()
    true_order = true_group.argsort(stable=True)
    true_group, true_boxes = true_group[true_order], g.boxes.double()[true_order]
    crowd = torch.zeros_like(true_group, dtype=torch.bool) if g.crowd is None else g.crowd.bool()[true_order]
    size = box_area(true_boxes) if g.areas is None else g.areas.double()[true_order]
    ignored = crowd[:, None] | _outside(size, bounds)

    order, group, rank = _rank(d.scores, d.images.long() * classes + d.labels.long())
    kept = rank < limits[-1]
    order, group, rank = order[kept], group[kept], rank[kept]
    boxes = d.boxes.double()[order]
    pairs = _pairs(boxes, group, true_boxes, true_group, crowd, float(levels.min()))
    matched, matched_ignored = _match(pairs, group, ignored, crowd, levels)
    hit = matched & ~matched_ignored
    miss = ~matched & ~_outside(box_area(boxes), bounds)[:, None, :]

    # From image by image to class by class; equal scores stay in the order of the images.
    order = d.scores[order].argsort(descending=True, stable=True)
    order = order[(group[order] % classes).argsort(stable=True)]
    sizes = (group % classes).bincount(minlength=classes).tolist()
    positives = torch.zeros(classes, len(areas), dtype=torch.float64, device=device)
    positives.index_add_(0, true_group % classes, (~ignored).double())

    points = bounds.new_tensor(RECALLS)
    precision = bounds.new_full((len(thresholds), len(points), classes, len(areas), len(limits)), -1.0)
    recall = bounds.new_full((len(thresholds), classes, len(areas), len(limits)), -1.0)
    present = positives.sum(1).tolist()
    for k, part in enumerate(order.split(sizes)):
        if not present[k]:
            continue
        for m, limit in enumerate(limits):
            rows = part[rank[part] < limit]
            read, last = _read_off(
                hit[rows].permute(1, 2, 0).contiguous(),
                miss[rows].permute(1, 2, 0).contiguous(),
                positives[k],
                points,
            )
            something = positives[k] > 0
            precision[:, :, k, :, m] = torch.where(something, read.transpose(1, 2), -1.0)
            recall[:, k, :, m] = torch.where(something, last, -1.0)
    return CocoCurves(precision, recall, tuple(thresholds), tuple(areas), tuple(limits))


def _outside(size: Tensor, bounds: Tensor) -> Tensor:
    return (size[:, None] < bounds[:, 0]) | (size[:, None] > bounds[:, 1])


def coco_measures(detections: Detections, truth: Truth, *, classes: int) -> dict[str, float]:
    """COCO's twelve numbers: ap, ap50, ap75, ap by size, ar with 1, 10 and 100 detections, ar by size."""
    return coco_curves(detections, truth, classes=classes).measures()
