from __future__ import annotations

import contextlib
import io
import sys

import numpy as np
import pytest
import torch

from quire.errors import InputError
from quire.functional.coco import Detections, Truth, coco_curves, coco_measures

pytestmark = pytest.mark.slow

AP = sys.modules[coco_curves.__module__]  # quire.functional.coco is also the name of a function

NAMES = [
    "ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large",
    "ar_1", "ar_10", "ar_100", "ar_small", "ar_medium", "ar_large",
]  # fmt: skip


def random_case(seed, images=6, classes=3, truths=5, detections=12, size=160.0):
    """Boxes on a grid of quarter pixels, so that overlaps, scores and areas tie; some images stay empty."""
    g = torch.Generator().manual_seed(seed)

    def boxes(n):
        corner = torch.randint(0, int(size * 4), (n, 2), generator=g).double() / 4
        scale = torch.rand(n, 1, generator=g).double() ** 2 * size
        side = ((0.3 + torch.rand(n, 2, generator=g).double()) * scale * 4).floor() / 4
        return torch.cat([corner, corner + side], 1)

    def integers(high, n):
        return torch.randint(0, high, (n,), generator=g)

    n_truth = int(integers(images * truths + 1, 1))
    true_boxes, true_images = boxes(n_truth), integers(images, n_truth)
    true_labels = integers(classes, n_truth)
    crowd = torch.rand(n_truth, generator=g) < 0.2
    areas = AP.box_area(true_boxes) * (0.5 + torch.rand(n_truth, generator=g).double() / 2)
    n = int(integers(images * detections + 1, 1))
    # Most detections are true boxes moved a little; the rest lie anywhere.
    found, found_images, found_labels = boxes(n), integers(images, n), integers(classes, n)
    if n_truth:
        copied, near = integers(n_truth, n), torch.rand(n, generator=g) < 0.8
        moved = true_boxes[copied] + torch.randint(-8, 9, (n, 4), generator=g).double()
        near &= (moved[:, 2:] > moved[:, :2]).all(1)
        found = torch.where(near[:, None], moved, found)
        found_images = torch.where(near, true_images[copied], found_images)
        found_labels = torch.where(near, true_labels[copied], found_labels)
    scores = integers(12, n).double() / 12  # ties
    return Detections(found, scores, found_labels, found_images), Truth(
        true_boxes, true_labels, true_images, crowd, areas
    )


def with_pycocotools(found, truth, images, classes, limits=(1, 10, 100)):
    coco = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")

    def size_form(box):
        return [box[0], box[1], box[2] - box[0], box[3] - box[1]]

    with contextlib.redirect_stdout(io.StringIO()):
        peer = coco.COCO()
        areas = AP.box_area(truth.boxes) if truth.areas is None else truth.areas
        crowd = torch.zeros(len(truth.boxes)) if truth.crowd is None else truth.crowd
        rows = zip(truth.boxes.tolist(), truth.labels, truth.images, crowd, areas, strict=True)
        peer.dataset = {
            "info": {},
            "images": [{"id": i} for i in range(images)],
            "categories": [{"id": k} for k in range(classes)],
            "annotations": [
                {
                    "id": n + 1, "bbox": size_form(b), "category_id": int(k), "image_id": int(i),
                    "iscrowd": int(c), "area": float(a),
                }
                for n, (b, k, i, c, a) in enumerate(rows)
            ],
        }  # fmt: skip
        peer.createIndex()
        rows = zip(found.boxes.tolist(), found.scores.tolist(), found.labels, found.images, strict=True)
        results = [
            {"bbox": size_form(b), "score": s, "category_id": int(k), "image_id": int(i)}
            for b, s, k, i in rows
        ]
        if results:
            theirs = peer.loadRes(results)
        else:  # loadRes cannot read an empty list
            theirs = coco.COCO()
            theirs.dataset = {**peer.dataset, "annotations": []}
            theirs.createIndex()
        judge = evaluation.COCOeval(peer, theirs, "bbox")
        judge.params.maxDets = list(limits)
        judge.evaluate()
        judge.accumulate()
        if tuple(limits) == AP.LIMITS:
            judge.summarize()
    return judge


def test_points_are_those_of_numpy():
    assert np.array_equal(AP.THRESHOLDS, np.linspace(0.5, 0.95, 10))
    assert np.array_equal(AP.RECALLS, np.linspace(0, 1, 101))


def test_curves_equal_pycocotools_on_random_cases():
    found_something = 0
    for seed in range(200):
        images = 1 + seed % 6
        found, truth = random_case(seed, images, classes=1 + seed % 4, truths=1 + seed % 7)
        judge = with_pycocotools(found, truth, images, 1 + seed % 4)
        curves = coco_curves(found, truth, classes=1 + seed % 4)
        np.testing.assert_allclose(curves.precision, judge.eval["precision"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(curves.recall, judge.eval["recall"], rtol=0, atol=1e-12)
        measures = curves.measures()
        assert list(measures) == NAMES
        np.testing.assert_allclose(list(measures.values()), judge.stats, rtol=0, atol=1e-12)
        found_something += 0.05 < measures["ap"] < 0.95
    assert found_something > 100  # the cases are neither hopeless nor trivial


def test_crowded_images_and_other_limits_equal_pycocotools():
    for seed in range(4):
        found, truth = random_case(seed, images=2, classes=1, truths=40, detections=120, size=60.0)
        for limits in ((1, 2, 3), (2, 5, 40), (1, 10, 100)):
            judge = with_pycocotools(found, truth, 2, 1, limits)
            curves = coco_curves(found, truth, classes=1, limits=limits)
            np.testing.assert_allclose(curves.precision, judge.eval["precision"], rtol=0, atol=1e-12)
            np.testing.assert_allclose(curves.recall, judge.eval["recall"], rtol=0, atol=1e-12)


def test_chunks_of_pairs_change_nothing(monkeypatch):
    found, truth = random_case(3, images=4, truths=9)
    whole = coco_curves(found, truth, classes=3)
    monkeypatch.setattr(AP, "CHUNK", 7)
    assert torch.equal(coco_curves(found, truth, classes=3).precision, whole.precision)


def test_the_order_of_images_and_classes_is_free():
    found, truth = random_case(9, images=5, truths=6)
    found = Detections(found.boxes, torch.rand(len(found.boxes)), found.labels, found.images)  # no ties
    mix = torch.randperm(len(found.boxes))
    mixed = Detections(found.boxes[mix], found.scores[mix], 2 - found.labels[mix], 70 - 9 * found.images[mix])
    renamed = Truth(truth.boxes, 2 - truth.labels, 70 - 9 * truth.images, truth.crowd, truth.areas)
    before, after = coco_curves(found, truth, classes=3), coco_curves(mixed, renamed, classes=3)
    assert torch.equal(before.precision.flip(2), after.precision)
    torch.testing.assert_close(before.by_class().flip(0), after.by_class())


def one_image(boxes, scores, true_boxes, **more):
    found = Detections(
        torch.tensor(boxes).view(-1, 4), torch.tensor(scores),
        torch.zeros(len(boxes), dtype=torch.long), torch.zeros(len(boxes), dtype=torch.long),
    )  # fmt: skip
    zeros = torch.zeros(len(true_boxes), dtype=torch.long)
    return found, Truth(torch.tensor(true_boxes).view(-1, 4), zeros, zeros, **more)


def test_solved_by_hand():
    # Right, wrong, right, of two true boxes: P = 1 up to recall 1/2 (points 0 … 0.50), 2/3 after (0.51 … 1).
    square, other, nowhere = [0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0], [50.0, 50.0, 60.0, 60.0]
    case = one_image([square, nowhere, other], [0.9, 0.8, 0.7], [square, other])
    curves = coco_curves(*case, classes=1)
    assert curves.average_precision(0.5) == pytest.approx((51 + 50 * 2 / 3) / 101, abs=1e-12)
    assert curves.average_recall(1) == pytest.approx(1 / 2)
    assert curves.average_recall(100) == 1
    # A second detection of the same box is a false positive, here below the first: P(1) = 1 all the same.
    assert coco_measures(*one_image([square, square], [0.9, 0.8], [square]), classes=1)["ap"] == 1
    # IoU 8/12 = 2/3 reaches the thresholds 0.50, 0.55, 0.60 and 0.65: 4 of 10.
    shifted = [0.0, 2.0, 10.0, 12.0]
    assert coco_measures(*one_image([shifted], [0.9], [square]), classes=1)["ap"] == pytest.approx(0.4)
    # An area range that holds nothing says -1 and stays out of the mean.
    measures = coco_measures(*case, classes=1)
    assert measures["ap_small"] == measures["ap"]
    assert measures["ap_large"] == measures["ar_large"] == -1


def test_the_last_of_equally_near_true_boxes_is_taken():
    left, right, between = [0.0, 0.0, 10.0, 10.0], [4.0, 0.0, 14.0, 10.0], [2.0, 0.0, 12.0, 10.0]
    # `between` overlaps both by 8/12; the next detection fits `left` alone, and needs it to be free.
    free = one_image([between, left], [0.9, 0.8], [left, right])
    assert coco_measures(*free, classes=1)["ap50"] == 1
    gone = one_image([between, left], [0.9, 0.8], [right, left])
    assert coco_measures(*gone, classes=1)["ap50"] == pytest.approx(51 / 101)
    for case in (free, gone):
        expected = with_pycocotools(*case, 1, 1).stats[1]
        assert coco_measures(*case, classes=1)["ap50"] == pytest.approx(expected, abs=1e-12)


def test_a_crowd_is_neither_found_nor_missed():
    square, crowd = [0.0, 0.0, 10.0, 10.0], [100.0, 100.0, 200.0, 200.0]
    inside = [[110.0, 110.0, 120.0, 120.0], [150.0, 150.0, 160.0, 160.0]]
    flags = torch.tensor([False, True])
    case = one_image([*inside, square], [0.9, 0.8, 0.7], [square, crowd], crowd=flags)
    assert coco_measures(*case, classes=1)["ap"] == 1  # the two before it lie in the crowd and do not count
    plain = one_image([*inside, square], [0.9, 0.8, 0.7], [square, crowd])
    assert coco_measures(*plain, classes=1)["ap50"] == pytest.approx(51 / 3 / 101)


def test_a_threshold_of_one_asks_for_the_very_box():
    boxes = torch.tensor([[0.1, 0.2, 10.3, 7.7], [20.0, 0.0, 30.0, 10.0]], dtype=torch.float64)
    zeros = torch.zeros(2, dtype=torch.long)
    moved = boxes + torch.tensor([[0.0], [1e-3]], dtype=torch.float64) * torch.tensor([0.0, 0.0, 0.0, 1.0])
    found = coco_curves(Detections(moved, torch.tensor([0.9, 0.8]), zeros, zeros), Truth(boxes, zeros, zeros),
                        classes=1, thresholds=(1.0,))  # fmt: skip
    assert found.recall[0, 0, 0, -1].item() == 0.5


def test_nothing_given_or_nothing_found():
    square = [0.0, 0.0, 10.0, 10.0]
    assert set(coco_measures(*one_image([], [], []), classes=2).values()) == {-1.0}
    assert coco_measures(*one_image([], [], [square]), classes=2)["ap"] == 0
    assert coco_measures(*one_image([square], [0.5], []), classes=2)["ap"] == -1
    half = one_image([square], [0.5], [square])
    assert coco_curves(*half, classes=2).by_class().tolist() == [1.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_boxes_are_compared_in_float64(dtype):
    found, truth = random_case(5, images=4)
    low = [found.boxes.to(dtype), found.scores.to(dtype), truth.boxes.to(dtype)]
    narrow = Detections(low[0], low[1], found.labels, found.images), Truth(low[2], truth.labels, truth.images)
    wide = (
        Detections(low[0].double(), low[1].double(), found.labels, found.images),
        Truth(low[2].double(), truth.labels, truth.images),
    )
    assert coco_measures(*narrow, classes=3) == coco_measures(*wide, classes=3)


def broken(**changes):
    found, truth = one_image([[0.0, 0.0, 1.0, 1.0]] * 3, [0.9, 0.8, 0.7], [[0.0, 0.0, 1.0, 1.0]])
    return Detections(**{**found.__dict__, **changes}), truth


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: coco_curves(*broken(boxes=torch.tensor([[0.0] * 4] + [[5, 5, 2, 9]] * 2)), classes=1),
            r"detections: box 1 is \(5, 5, 2, 9\)[\s\S]*x₂ ≥ x₁[\s\S]*convert_boxes",
        ),
        (
            lambda: coco_curves(*broken(labels=torch.tensor([0, 0, 3])), classes=3),
            r"box 2 is of class 3[\s\S]*from 0 to 2[\s\S]*without the background",
        ),
        (
            lambda: coco_curves(*broken(scores=torch.tensor([0.1, float("nan"), 0.2])), classes=1),
            r"score of box 1 is not a number",
        ),
        (
            lambda: coco_curves(*broken(images=torch.zeros(2)), classes=1),
            r"images of shape \(2,\) for boxes of shape \(3, 4\)[\s\S]*which image a box belongs to",
        ),
        (lambda: coco_curves(*broken(), classes=1, limits=(10, 1)), r"limits \(10, 1\)[\s\S]*rise"),
        (
            lambda: coco_curves(*broken(), classes=1).average_precision(0.42),
            r"at IoU 0.42[\s\S]*0.5, 0.55[\s\S]*thresholds=",
        ),
    ],
)  # fmt: skip
def test_messages(call, words):
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.gpu
def test_on_the_gpu():
    found, truth = random_case(11, images=6, truths=9)
    there = coco_curves(
        Detections(*(value.cuda() for value in found.__dict__.values())),
        Truth(*(value.cuda() for value in truth.__dict__.values())),
        classes=3,
    )
    here = coco_curves(found, truth, classes=3)
    assert there.precision.is_cuda
    torch.testing.assert_close(there.precision.cpu(), here.precision)
    torch.testing.assert_close(there.recall.cpu(), here.recall)
