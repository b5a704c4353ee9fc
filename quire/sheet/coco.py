"""Chapter 23: average precision by COCO's rules, against an explicit loop over images and boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.functional.boxes import box_area
from quire.functional.coco import AREAS, CocoCurves, Detections, Truth, coco_curves
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMITS = (1, 3, 100)
THRESHOLDS = (0.5, 0.75)


def _case(images: int = 4, classes: int = 2) -> tuple[Detections, Truth]:
    """True boxes, some of them crowds, and detections near them, with equal scores and equal overlaps."""
    n, found = 7 * images, 14 * images
    corner = torch.randint(0, 80, (n, 2)).double()
    boxes = torch.cat([corner, corner + torch.randint(8, 120, (n, 2))], 1)
    labels, places = torch.randint(0, classes, (n,)), torch.randint(0, images, (n,))
    truth = Truth(boxes, labels, places, torch.rand(n) < 0.2, box_area(boxes) * 0.9)
    of = torch.randint(0, n, (found,))
    moved = boxes[of] + torch.randint(-3, 4, (found, 4))
    guesses = torch.where(torch.rand(found) < 0.8, labels[of], torch.randint(0, classes, (found,)))
    return Detections(moved, torch.randint(0, 10, (found,)) / 10, guesses, places[of]), truth


def _overlap(a: list[float], b: list[float], crowd: bool) -> float:
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if wide <= 0 or high <= 0:
        return 0.0
    area = (a[2] - a[0]) * (a[3] - a[1])
    return wide * high / (area if crowd else area + (b[2] - b[0]) * (b[3] - b[1]) - wide * high)


def _judge_image(
    found: list[list[float]], truth: list[tuple[list[float], bool, bool]], threshold: float
) -> list[str]:
    """What each detection in turn takes: "hit" or "ignored" for a true box, "out" for nothing."""
    taken = [False] * len(truth)
    verdicts = []
    for box in found:
        chosen = None
        for wanted in (False, True):  # true boxes that count, then ignored ones
            best = threshold
            for j, (true_box, crowd, ignored) in enumerate(truth):
                share = _overlap(box, true_box, crowd)
                if ignored == wanted and (crowd or not taken[j]) and share >= best:
                    best, chosen = share, j
            if chosen is not None:
                break
        if chosen is None:
            verdicts.append("out")
        else:
            taken[chosen] = True
            verdicts.append("ignored" if truth[chosen][2] else "hit")
    return verdicts


def _precisions(
    found: Detections, truth: Truth, label: int, threshold: float, bounds: tuple[float, float], limit: int
) -> tuple[list[float], float]:
    """Precision at 101 recall points and the last recall, box by box."""
    assert truth.crowd is not None
    assert truth.areas is not None
    low, high = bounds
    judged: list[tuple[float, str]] = []
    positives = 0
    for image in sorted({*found.images.tolist(), *truth.images.tolist()}):
        here = ((truth.images == image) & (truth.labels == label)).nonzero().flatten().tolist()
        there = ((found.images == image) & (found.labels == label)).nonzero().flatten().tolist()
        there = sorted(there, key=lambda i: -found.scores[i].item())[:limit]
        known = []
        for j in here:
            crowd = bool(truth.crowd[j])
            known.append((truth.boxes[j].tolist(), crowd, crowd or not low <= truth.areas[j].item() <= high))
        positives += sum(not ignored for *_, ignored in known)
        boxes = [found.boxes[i].tolist() for i in there]
        for i, box, verdict in zip(there, boxes, _judge_image(boxes, known, threshold), strict=True):
            inside = low <= (box[2] - box[0]) * (box[3] - box[1]) <= high
            if verdict == "out":
                verdict = "miss" if inside else "ignored"
            judged.append((found.scores[i].item(), verdict))
    if not positives:
        return [-1.0] * 101, -1.0
    judged.sort(key=lambda pair: -pair[0])
    curve, hits, called = [], 0, 0
    for _, verdict in judged:
        hits, called = hits + (verdict == "hit"), called + (verdict != "ignored")
        curve.append((hits / positives, hits / max(called, 1)))
    points = [max((p for r, p in curve if r >= k * 0.01), default=0.0) for k in range(100)]
    return [*points, max((p for r, p in curve if r >= 1), default=0.0)], hits / positives


def _picture() -> Figure:
    from quire.report.style import figure

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        curves = coco_curves(*_case(images=30, classes=1), classes=1)
    fig = figure(4.6, 3.2)
    axes = fig.subplots()
    recall = torch.linspace(0, 1, 101)
    for i, style in zip((0, 5, 8), ("-", "--", ":"), strict=True):
        threshold = curves.thresholds[i]
        area = curves.average_precision(threshold)
        line = curves.precision[i, :, 0, 0, -1]
        axes.step(recall, line, style, where="pre", label=f"IoU ≥ {threshold:.2f}, AP {area:.2f}")
    axes.set(title="Precision at 101 recall points", xlabel="recall", ylabel="precision", ylim=(0, 1.05))
    axes.legend(fontsize=7)
    return fig


def _crowds_as_boxes(detections: Detections, truth: Truth, **options: Any) -> CocoCurves:
    """Asks for one detection of each crowd, and counts all others in it as wrong."""
    return coco_curves(detections, Truth(truth.boxes, truth.labels, truth.images), **options)


@entry(
    "measure/coco-ap",
    "Average precision by COCO's rules",
    r"\mathrm{AP} = \frac{1}{101} \sum_{r \in \{0, 0.01, \dots, 1\}} \max_{r' \ge r} P(r'), \quad "
    r"\mathrm{mAP} = \frac{1}{TK} \sum_{t, k} \mathrm{AP}_{t, k}, \; t \in \{0.5, 0.55, \dots, 0.95\}",
    code=coco_curves,
    wrong=_crowds_as_boxes,
    tolerance=1e-12,
    picture=_picture,
)
def _coco(curves: Callable[..., CocoCurves]) -> float:
    found, truth = _case()
    areas = {name: AREAS[name] for name in ("all", "medium")}
    ours = curves(found, truth, classes=3, thresholds=THRESHOLDS, areas=areas, limits=LIMITS)
    errors = []
    for k in range(3):  # the last class never occurs
        for t, threshold in enumerate(THRESHOLDS):
            for a, bounds in enumerate(areas.values()):
                for m, limit in enumerate(LIMITS):
                    points, last = _precisions(found, truth, k, threshold, bounds, limit)
                    errors.append(
                        gap(ours.precision[t, :, k, a, m], torch.tensor(points, dtype=torch.float64))
                    )
                    errors.append(gap(ours.recall[t, k, a, m], last))
    return worst(*errors, _by_hand(curves), require(0.1 < ours.average_precision() < 0.9))


def _by_hand(curves: Callable[..., CocoCurves]) -> float:
    """Right, wrong, right, of two true boxes: P = 1 at recall 0 … 0.50, and 2/3 at 0.51 … 1."""
    boxes: Tensor = torch.tensor([[0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10]]).double()
    zeros = torch.zeros(3, dtype=torch.long)
    found = Detections(boxes, torch.tensor([0.9, 0.8, 0.7]), zeros, zeros)
    ours = curves(found, Truth(boxes[::2], zeros[:2], zeros[:2]), classes=1)
    return gap(ours.average_precision(), (51 + 50 * 2 / 3) / 101)
