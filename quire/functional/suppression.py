"""From the answers of a detector to a few boxes: the best candidates, thinned by non-maximum suppression.

N images, A default boxes, C classes, K candidates and D detections of an image. Boxes are corners
(x₁, y₁, x₂, y₂), see `quire.functional.boxes`.

`nms` takes any number of boxes and gives as many as stay. `suppress` does the same for a batch of images with
shapes that are known beforehand and without asking the device for anything, so it can be part of an exported
graph; both keep exactly the boxes that the greedy rule keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.boxes import decode_boxes, iou_matrix, require_boxes, valid_boxes

BLOCK = 1024
"""Boxes of NMS that are compared with each other at once: a matrix of a million overlaps."""
NOTHING = -1
"""Row or class number where there is no detection."""


def nms(boxes: Tensor, scores: Tensor, *, threshold: float = 0.5, groups: Tensor | None = None) -> Tensor:
    """Rows of the boxes that stay, by falling score: each whose IoU with no better kept box is > threshold.

    Boxes of different `groups` (N,) do not see each other: give classes for suppression by class, and
    image · (number of classes) + class for several images at once. Equal scores keep their order. A box
    without area suppresses nothing.
    """
    require_boxes("nms", boxes)
    if (
        boxes.dim() != 2
        or scores.shape != boxes.shape[:1]
        or (groups is not None and groups.shape != scores.shape)
    ):
        shapes = ", ".join(str(tuple(t.shape)) for t in (boxes, scores, groups) if t is not None)
        raise InputError(
            f"nms of shapes {shapes}",
            expected="boxes (N, 4) with one score, and one group where groups are given, for each",
            fix="concatenate the images, and tell them apart by their groups",
        )
    wrong = ~(boxes[:, 2:] >= boxes[:, :2]).all(1) | scores.isnan()
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InputError(
            f"nms: box {row} is {tuple(boxes[row].tolist())} with score {scores[row].item():g}",
            expected="corners (x₁, y₁, x₂, y₂) with x₂ ≥ x₁ and y₂ ≥ y₁, and scores that can be sorted",
            fix="convert the boxes to corners, and look for NaN in the model's output",
        )
    order = scores.argsort(descending=True, stable=True)
    if groups is None:
        groups = torch.zeros_like(order)
    order = order[groups[order].argsort(stable=True)]
    boxes, groups = boxes[order], groups[order]
    alive = torch.ones_like(order, dtype=torch.bool)
    # A block decides about itself, then about the rest of its last group.
    starts = range(0, len(order), BLOCK)
    lasts = groups[[min(start + BLOCK, len(order)) - 1 for start in starts]]
    ends = torch.searchsorted(groups, lasts, right=True).tolist()
    for start, end in zip(starts, ends, strict=True):
        block = slice(start, start + BLOCK)
        suppresses = _suppresses(boxes[block], groups[block], boxes[block], groups[block], threshold)
        alive[block] = _settle(suppresses.triu(1), alive[block])
        if end > start + BLOCK:
            rest, kept = slice(start + BLOCK, end), alive[block]
            hit = _suppresses(boxes[block][kept], groups[block][kept], boxes[rest], groups[rest], threshold)
            alive[rest] &= ~hit.any(0)
    kept_rows = order[alive]
    # Input order first, so that equal scores of different groups keep it too.
    kept_rows = kept_rows.sort().values
    return kept_rows[scores[kept_rows].argsort(descending=True, stable=True)]


def _suppresses(first: Tensor, group: Tensor, second: Tensor, other: Tensor, threshold: float) -> Tensor:
    overlap = iou_matrix(first, second, degenerate="zero")
    return (overlap > threshold) & (group[..., :, None] == other[..., None, :])


def _settle(suppresses: Tensor, alive: Tensor) -> Tensor:
    """keep_i = alive_i and no kept j < i suppresses i, for an upper triangular matrix.

    Applying the rule to all boxes at once settles the first box, then those that only settled boxes can
    suppress, and so on: as many rounds as the longest chain of suppression, not as there are boxes.
    """
    keep = alive
    while True:
        settled = alive & ~(suppresses & keep[:, None]).any(0)
        if torch.equal(settled, keep):
            return keep
        keep = settled


# Shapes that are known beforehand -------------------------------------------------------------


def suppress(
    boxes: Tensor, scores: Tensor, groups: Tensor, *, threshold: float = 0.5, most: int = 100
) -> Tensor:
    """Rows (N, D) of the `most` best boxes that NMS keeps in each image, −1 where no more are left.

    `boxes` are (N, K, 4), `scores` and `groups` (N, K); a score of −∞ is no candidate at all. Each step takes
    the best box left, the first among equals, and strikes out those of its group that it overlaps by more
    than the threshold: D steps, however many candidates there are.
    """
    require_boxes("suppress", boxes)
    if boxes.dim() != 3 or scores.shape != boxes.shape[:2] or groups.shape != scores.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (boxes, scores, groups))
        raise InputError(
            f"suppress of shapes {shapes}",
            expected="boxes (N, K, 4) with scores (N, K) and groups (N, K)",
            fix="give a single image as a batch of one: boxes[None]",
        )
    count = boxes.shape[1]
    itself = torch.eye(count, dtype=torch.bool, device=boxes.device)
    strikes = _suppresses(boxes, groups, boxes, groups, threshold) | itself  # N, K, K
    kept, values = [], []
    for _ in range(min(most, count)):
        best = scores.argmax(1, keepdim=True)  # N, 1
        kept.append(best)
        values.append(scores.gather(1, best))
        struck = strikes.gather(1, best[:, :, None].expand(-1, 1, count)).squeeze(1)
        scores = torch.where(struck, -torch.inf, scores)
    return torch.where(torch.cat(values, 1) > -torch.inf, torch.cat(kept, 1), NOTHING)


def read_detections(
    logits: Tensor,
    offsets: Tensor,
    defaults: Tensor,
    *,
    threshold: float = 0.5,
    least_score: float = 0.01,
    candidates: int = 200,
    most: int = 100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (N, D, 4) in shares of the image, scores (N, D) and classes (N, D) by falling score.

    `logits` (N, A, C + 1) have the background first, `offsets` (N, A, 4) are coded relative to `defaults`
    (A, 4). A score is the probability of a class; the `candidates` best scores of an image over all boxes
    and classes are thinned class by class. Classes count from 0 without the background. Where there is no
    detection the class is −1, the score 0 and the box 0.
    """
    classes = logits.shape[2] - 1
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probabilities = logits.softmax(2)[:, :, 1:].flatten(1)  # N, A·C
    place = probabilities.topk(min(candidates, probabilities.shape[1])).indices
    place = place.sort().values  # topk orders equal scores as it likes; the first is to win
    scores, box, label = probabilities.gather(1, place), place // classes, place % classes  # N, K
    # Only the candidates are decoded.
    shifts = offsets.to(logits.dtype).gather(1, _rows(box, 4))
    boxes = decode_boxes(shifts, defaults.to(logits.dtype)[box]).clamp(0.0, 1.0)
    order = log_odds(logits.gather(1, _rows(box, classes + 1)), label + 1)
    order = torch.where((scores >= least_score) & valid_boxes(boxes), order, -torch.inf)
    kept = suppress(boxes, order, label, threshold=threshold, most=most)
    found, kept = kept >= 0, kept.clamp(min=0)
    boxes = torch.where(found[:, :, None], boxes.gather(1, _rows(kept, 4)), 0.0)
    scores = torch.where(found, scores.gather(1, kept), 0.0)
    return boxes, scores, torch.where(found, label.gather(1, kept), NOTHING)


def log_odds(logits: Tensor, classes: Tensor) -> Tensor:
    """log(p/(1 − p)) of one class each, z_c − log Σ_{k≠c} exp z_k: (…, C) and (…) give (…).

    It orders as the probability p does, but tells 1 − 10⁻⁸ from 1 − 10⁻⁹, which are both 1 in float32; the
    best of several boxes that are all but certain is then no matter of rounding.
    """
    own = classes[..., None] == torch.arange(logits.shape[-1], device=logits.device)
    others = torch.where(own, -torch.inf, logits).logsumexp(-1)
    return logits.gather(-1, classes[..., None]).squeeze(-1) - others


def _rows(index: Tensor, width: int) -> Tensor:
    """(N, K) row numbers as an index for `gather` along dimension 1 of (N, A, width)."""
    return index[:, :, None].expand(-1, -1, width)
