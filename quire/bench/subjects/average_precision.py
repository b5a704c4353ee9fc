"""COCO's twelve measures on a case of COCO's size, beside pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from quire.bench.case import SUBJECTS, Bar, Case, Place, peer
from quire.functional.coco import Detections, Truth, coco_measures

CLASSES = 80


@SUBJECTS.register("average-precision")
def average_precision(place: Place) -> Iterator[Case]:
    """COCO's twelve measures of 5,000 images with 100 detections each, beside pycocotools' judging."""
    if place.on_gpu:
        return
    images = place.size(5000, 20)
    found, truth = random_case(images)
    expected: list[float] = []
    rival: list[Peer] = []

    def theirs() -> list[float]:
        if not rival:
            rival.append(Peer(found, truth, images))
        expected[:] = rival[0].judge()
        return expected

    def apart(measures: Any) -> float:
        mine = list(measures.values()) if isinstance(measures, dict) else measures
        return max((abs(a - b) for a, b in zip(mine, expected or mine, strict=True)), default=0.0)

    contestants = {"quire": lambda: coco_measures(found, truth, classes=CLASSES)}
    yield Case(
        f"COCO's measures, {images:,} images, {len(found.boxes):,} detections",
        {**contestants, "pycocotools": peer("pycocotools", theirs)}, error=apart, rounds=1,
        bars=(Bar("time", at_most=0.2, rival="pycocotools"),),
    )  # fmt: skip


def random_case(images: int, seed: int = 0) -> tuple[Detections, Truth]:
    """One box in a hundred is a crowd; half of the detections lie near a true box of their image."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int, high: float) -> torch.Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64) * high

    def boxes(count: int) -> torch.Tensor:
        corner = torch.stack([draw(count, 500), draw(count, 400)], 1)
        return torch.cat([corner, corner + torch.stack([10 + draw(count, 130), 10 + draw(count, 130)], 1)], 1)

    number = images * 36 // 5
    image = torch.randint(images, (number,), generator=generator).sort().values
    labels = torch.randint(CLASSES, (number,), generator=generator)
    truth = Truth(boxes(number), labels, image, draw(number, 1) < 0.01)
    found = images * 100
    found_image = torch.arange(images).repeat_interleave(100)
    found_boxes = boxes(found)
    labels = torch.randint(CLASSES, (found,), generator=generator)
    first = torch.searchsorted(image, found_image)
    count = torch.bincount(image, minlength=images)[found_image]
    near = (draw(found, 1) < 0.5) & (count > 0)
    partner = (first + (draw(found, 1) * count).long()).clamp(max=number - 1)
    moved = truth.boxes[partner] + (draw(found * 4, 30) - 15).view(-1, 4)
    moved[:, 2:] = torch.maximum(moved[:, 2:], moved[:, :2] + 1)
    found_boxes = torch.where(near[:, None], moved, found_boxes)
    labels = torch.where(near, truth.labels[partner], labels)
    return Detections(found_boxes, draw(found, 1), labels, found_image), truth


class Peer:
    """pycocotools on the same case; what it takes to load it is not counted."""

    def __init__(self, found: Detections, truth: Truth, images: int) -> None:
        from pycocotools.coco import COCO  # type: ignore[import-untyped,unused-ignore]

        sizes = torch.cat([truth.boxes[:, :2], truth.boxes[:, 2:] - truth.boxes[:, :2]], 1)
        assert truth.crowd is not None
        self.coco = COCO()
        columns = zip(
            sizes.tolist(), truth.labels.tolist(), truth.images.tolist(), truth.crowd.tolist(), strict=True
        )
        self.coco.dataset = {
            "images": [{"id": i} for i in range(images)],
            "categories": [{"id": c} for c in range(CLASSES)],
            "annotations": [
                {"id": i + 1, "image_id": image, "category_id": label, "bbox": box, "iscrowd": int(crowd),
                 "area": box[2] * box[3]}
                for i, (box, label, image, crowd) in enumerate(columns)
            ],
        }  # fmt: skip
        corner, size = found.boxes[:, :2], found.boxes[:, 2:] - found.boxes[:, :2]
        rows = np.column_stack(
            [found.images.numpy(), corner.numpy(), size.numpy(), found.scores.numpy(), found.labels.numpy()]
        )
        with contextlib.redirect_stdout(io.StringIO()):
            self.coco.createIndex()
            self.results = self.coco.loadRes(rows)

    def judge(self) -> list[float]:
        from pycocotools.cocoeval import COCOeval  # type: ignore[import-untyped,unused-ignore]

        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(self.coco, self.results, "bbox")
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return [float(value) for value in evaluation.stats]
