"""COCO's twelve measures on a case of COCO's size, side by side with pycocotools, in one run.

5,000 images, 36,000 true boxes (1 % of them crowds) of 80 classes, 100 detections an image. Half of the
detections lie near a true box. Both sides start from arrays and lists in memory: pycocotools' own
`loadRes` and `createIndex` are part of its way in and are timed apart, so that the ratio which counts is
that of the judging alone (`evaluate`, `accumulate`, `summarize`).

    python -m benchmarks.average_precision [--images 5000] [--repetitions 3] [--device cpu]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time

import numpy as np
import torch

from benchmarks.machine import describe, machine
from quire.functional.coco import Detections, Truth, coco_measures

CLASSES = 80
BAR = 5.0


def random_case(images: int, seed: int = 0) -> tuple[Detections, Truth]:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int, high: float) -> torch.Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64) * high

    def boxes(count: int) -> torch.Tensor:
        corner = torch.stack([draw(count, 500), draw(count, 400)], 1)
        return torch.cat([corner, corner + torch.stack([10 + draw(count, 130), 10 + draw(count, 130)], 1)], 1)

    number = images * 36 // 5
    image = torch.randint(images, (number,), generator=generator).sort().values
    truth = Truth(
        boxes(number),
        torch.randint(CLASSES, (number,), generator=generator),
        image,
        draw(number, 1) < 0.01,
    )
    found = images * 100
    found_image = torch.arange(images).repeat_interleave(100)
    found_boxes = boxes(found)
    labels = torch.randint(CLASSES, (found,), generator=generator)
    # A detection near a true box of its image: the box moved by up to a fifth of a typical side.
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
    """pycocotools on the same case."""

    def __init__(self, found: Detections, truth: Truth, images: int) -> None:
        from pycocotools.coco import COCO

        sizes = torch.cat([truth.boxes[:, :2], truth.boxes[:, 2:] - truth.boxes[:, :2]], 1)
        assert truth.crowd is not None
        self.coco = COCO()
        self.coco.dataset = {
            "images": [{"id": i} for i in range(images)],
            "categories": [{"id": c} for c in range(CLASSES)],
            "annotations": [
                {"id": i + 1, "image_id": image, "category_id": label, "bbox": box, "iscrowd": int(crowd),
                 "area": box[2] * box[3]}
                for i, (box, label, image, crowd) in enumerate(
                    zip(sizes.tolist(), truth.labels.tolist(), truth.images.tolist(), truth.crowd.tolist(),
                        strict=True)
                )
            ],
        }  # fmt: skip
        corner, size = found.boxes[:, :2], found.boxes[:, 2:] - found.boxes[:, :2]
        self.rows = np.column_stack(
            [found.images.numpy(), corner.numpy(), size.numpy(), found.scores.numpy(), found.labels.numpy()]
        )

    def load(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.coco.createIndex()
            self.results = self.coco.loadRes(self.rows)

    def judge(self) -> np.ndarray:
        from pycocotools.cocoeval import COCOeval

        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(self.coco, self.results, "bbox")
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return evaluation.stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    found, truth = random_case(options.images)
    peer = Peer(found, truth, options.images)
    start = time.perf_counter()
    peer.load()
    loading = time.perf_counter() - start

    def move(case: Detections | Truth) -> dict[str, torch.Tensor]:
        return {n: v.to(options.device) for n, v in vars(case).items() if v is not None}

    here, there = Detections(**move(found)), Truth(**move(truth))
    ours, theirs = [], []
    for _ in range(options.repetitions):
        start = time.perf_counter()
        measures = coco_measures(here, there, classes=CLASSES)
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        expected = peer.judge()
        theirs.append(time.perf_counter() - start)
    gap = max(abs(a - b) for a, b in zip(measures.values(), expected, strict=True))
    print(describe(machine(("pycocotools", "numpy"))))
    print(f"{options.images} images, {len(truth.boxes)} true boxes, {len(found.boxes)} detections")
    mine, peers = statistics.median(ours), statistics.median(theirs)
    print(f"quire        {mine:7.2f} s   ap {measures['ap']:.6f}")
    print(f"pycocotools  {peers:7.2f} s   ap {expected[0]:.6f}   (and {loading:.2f} s to load)")
    print(f"pycocotools / quire {peers / mine:.1f} (bar: at least {BAR:g})")
    print(f"largest difference of the twelve measures {gap:.1e}")


if __name__ == "__main__":
    main()
