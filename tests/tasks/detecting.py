"""Small detectors and scenes that the tests of detection share."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor, nn

from quire.data.batch import Batch, TensorData
from quire.functional.boxes import encode_boxes
from quire.models.ssd import SSD, SSDConfig
from quire.nn.images import Augmentation, ImageInputs
from quire.options import Augment
from quire.tasks.detection import Detection, DetectionRules

BACKBONE = {"model": "resnet", "small": True, "planes": 8, "block": "basic", "layers": [1, 1, 1]}
SIDE = 32


def detector(
    rules: DetectionRules | None = None, *, augment: Augment | None = None, seed: int = 0, **options: object
) -> Detection:
    torch.manual_seed(seed)
    config = SSDConfig(
        BACKBONE, num_classes=2, in_channels=1, size=(SIDE, SIDE), levels=2, stride=4, width=16,
        scales=tuple(0.25 * 1.7**k for k in range(3)), ratios=(1.0,),
    )  # fmt: skip
    augmentation = None if augment is None else Augmentation(augment, None, [60.0])
    return Detection(
        SSD(config),
        rules,
        inputs=ImageInputs([60.0], [50.0]),
        augmentation=augmentation,
        **options,  # type: ignore[arg-type]
    )


def scenes(
    images: int = 24,
    seed: int = 0,
    most: int = 3,
    empty: Collection[int] = (),
    crowd: Collection[tuple[int, int]] = (),
) -> TensorData:
    """Bright (class 0) and dark (class 1) rectangles on noise."""
    g = np.random.default_rng(seed)
    pixels = g.normal(100, 10, (images, 1, SIDE, SIDE))
    boxes, labels = np.zeros((images, most, 4), np.float32), np.full((images, most), -1)
    for n in range(images):
        taken = np.zeros((SIDE, SIDE), bool)
        for k in range(0 if n in empty else most):
            w, h = g.integers(7, 16, 2)
            x, y = g.integers(0, SIDE - w), g.integers(0, SIDE - h)
            if taken[y : y + h, x : x + w].any():
                continue
            taken[y : y + h, x : x + w] = True
            labels[n, k] = g.integers(2)
            pixels[n, 0, y : y + h, x : x + w] = 220 if labels[n, k] == 0 else 20
            boxes[n, k] = np.array([x, y, x + w, y + h]) / SIDE
    flags = np.zeros((images, most), bool)
    for n, k in crowd:
        flags[n, k] = True
    fields = {
        "inputs": torch.tensor(pixels.clip(0, 255)).to(torch.uint8),
        "target.boxes": torch.tensor(boxes),
        "target.labels": torch.tensor(labels),
        "target.crowd": torch.tensor(flags),
        "target.extent": torch.tensor(g.integers(30, 90, (images, 2))).float(),
    }
    return TensorData(fields)


def whole(data: TensorData) -> Batch:
    return data.take(torch.arange(len(data)))


def judged(seed: int = 3, images: int = 10) -> tuple[Detection, TensorData]:
    """A detector without training, whose boxes are moved near the true ones often enough to count."""
    task, data = (
        detector(DetectionRules(score=1e-4), seed=seed).eval(),
        scenes(images, seed, crowd=((1, 0), (4, 1))),
    )
    fields = data.fields
    with torch.no_grad():
        boxes, labels = fields["target.boxes"], fields["target.labels"]
        matched = task.match(whole(data))
        g = torch.Generator().manual_seed(seed)
        logits = torch.randn(*matched.shape, 3, generator=g)
        rows = matched.clamp(min=0)
        right = torch.nn.functional.one_hot(labels.gather(1, rows).clamp(min=0) + 1, 3)
        logits = logits + 2.5 * right * (matched >= 0)[..., None]
        true = boxes.gather(1, rows[..., None].expand(-1, -1, 4))
        true = torch.where((matched >= 0)[..., None], true, task.model.defaults)
        offsets = encode_boxes(true, task.model.defaults) + 0.4 * torch.randn(true.shape, generator=g)
    # The network is replaced by a table of answers; what it is asked for is the row of the image.
    task.model = Table(task.model, logits, offsets)
    task.inputs = None
    return task, TensorData({**fields, "inputs": torch.arange(images)[:, None]})


class Table(nn.Module):
    def __init__(self, model: nn.Module, logits: Tensor, offsets: Tensor) -> None:
        super().__init__()
        self.config, self.defaults = model.config, model.defaults
        self.anything = nn.Parameter(torch.zeros(1))
        self.logits, self.offsets = logits, offsets

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits[rows[:, 0]], self.offsets[rows[:, 0]]
