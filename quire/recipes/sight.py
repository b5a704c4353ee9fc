"""Pictures of what a network on images sees: its filters, maps and evidence, its mistakes, its boxes.

Numbers are computed here; `quire.report.images` draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.data.batch import Batch, Data
from quire.data.images import ImageData
from quire.functional.evidence import activation_maps, evidence_maps
from quire.recipes.plan import Picture
from quire.report import images as draw
from quire.tasks.detection import Detection
from quire.tasks.supervised import Supervised
from quire.train.evaluate import evaluation_batch
from quire.train.sums import add_up
from quire.train.task import Task

FEW = 4
"""Images whose maps are shown."""
SAMPLES = 6
LAYERS = 3
SURE = 0.4
"""Score from which on a found box is drawn."""


def image_pictures(task: Supervised, data: ImageData) -> Sequence[Picture]:
    """Pictures of a classifier, of the most trusted part."""
    part = data.test or data.validation or data.train
    classes = [str(label) for label in data.classes]
    batch = on_device(task, part.take(spread(part, FEW)))
    pictures = [*filter_picture(task.model), maps_picture(task, batch, classes)]
    pictures += mistakes_picture(task, part, classes)
    pictures += augmented_picture(task, data, classes)
    return pictures


def scene_pictures(task: Detection, data: ImageData) -> Sequence[Picture]:
    """Pictures of a detector, of the most trusted part."""
    part = data.test or data.validation or data.train
    classes = [str(label) for label in data.classes]
    batch = on_device(task, part.take(spread(part, SAMPLES)))
    found = {name: value.cpu().numpy() for name, value in task.predict(batch.inputs).items()}
    boxes, labels = (batch.fields[f"target.{name}"].cpu().numpy() for name in ("boxes", "labels"))
    truth = [draw.Boxes(b[c >= 0], c[c >= 0]) for b, c in zip(boxes, labels, strict=True)]
    sure = (found["scores"] >= SURE) & (found["labels"] >= 0)
    seen = [
        draw.Boxes(found["boxes"][i][keep], found["labels"][i][keep], found["scores"][i][keep])
        for i, keep in enumerate(sure)
    ]
    figure = draw.boxes_figure(batch.inputs.cpu().numpy(), truth, seen, classes)
    caption = (
        f"Images that were not trained on. Dashed: true boxes. Solid: boxes found with a score of at least "
        f"{100 * SURE:.0f} %, which is written beside them."
    )
    pictures = [Picture("boxes", "Objects on images", caption, figure)]
    return [*pictures, precision_recall_picture(task, part, classes), *filter_picture(task.model)]


def precision_recall_picture(task: Detection, part: Data, classes: list[str]) -> Picture:
    parts = part.batches(torch.arange(len(part)), evaluation_batch(task, part))
    curves = task.curves(add_up(task.tally(on_device(task, batch)) for batch in parts))
    areas = curves["average_precision"]
    lines = {
        name: (curves["recall"], curves["precision"][i], float(areas[i]))
        for i, name in enumerate(classes)
        if np.isfinite(areas[i])
    }
    figure = draw.precision_recall_figure(lines, "Precision and recall at IoU 0.5")
    caption = (
        "By COCO's rules: at each recall the best precision that is still reached; the area under a line is "
        f"the average precision (AP) of its class, and their mean is mAP = {np.nanmean(areas):.3f}."
    )
    return Picture("precision-recall", "Precision and recall", caption, figure)


def filter_picture(model: nn.Module) -> Iterator[Picture]:
    """The first convolution, where its windows are large enough to be looked at."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            if min(module.kernel_size) > 1:
                weights = module.weight.detach().float().cpu().numpy()
                figure = draw.filter_figure(weights, f"the first layer, {name}")
                yield Picture("filters", "First filters", "What the first convolution looks for.", figure)
            return


def maps_picture(task: Supervised, batch: Batch, classes: list[str]) -> Picture:
    inputs = batch.inputs if task.inputs is None else task.inputs(batch.inputs)
    evidence = evidence_maps(task.model, inputs)
    sure = evidence.logits.float().softmax(1).gather(1, evidence.classes[:, None]).squeeze(1)
    captions = [
        f"{classes[k]} {100 * p:.0f} %, is {classes[t]}" if k != t else f"{classes[k]} {100 * p:.0f} %"
        for k, p, t in zip(evidence.classes.tolist(), sure.tolist(), batch.target.tolist(), strict=True)
    ]
    layers = shown_layers(task.model)
    maps = {name: m.float().cpu().numpy() for name, m in activation_maps(task.model, inputs, layers).items()}
    figure = draw.maps_figure(
        batch.inputs.cpu().numpy(), maps, evidence.maps.float().detach().cpu().numpy(), captions
    )
    caption = (
        "What channels of a few layers answer to an image, and where the evidence for the predicted class "
        "lies (Grad-CAM)."
    )
    return Picture("maps", "Activations and evidence", caption, figure)


def shown_layers(model: Any) -> list[str]:
    """A layer of each of the first few resolutions: the last convolution there."""
    chosen = []
    for names in model.sections[:LAYERS]:
        convolutions = [
            f"{name}.{inner}".rstrip(".")
            for name in names
            for inner, module in model.get_submodule(name).named_modules()
            if isinstance(module, nn.Conv2d)
        ]
        chosen += convolutions[-1:]
    return chosen


@torch.no_grad()
def mistakes_picture(task: Supervised, part: Data, classes: list[str]) -> list[Picture]:
    """The wrong answers that the network was surest of."""
    images: list[Tensor] = []
    truth: list[str] = []
    said: list[str] = []
    sure: list[float] = []
    for batch in part.batches(torch.arange(len(part)), evaluation_batch(task, part)):
        batch = on_device(task, batch)
        found = task.predict(batch.inputs)
        wrong = (found["class"] != batch.target).nonzero().squeeze(1)
        probability = found["probabilities"][wrong, found["class"][wrong]]
        order = wrong[probability.argsort(descending=True)][: draw.MOST_MISTAKES]
        images.append(batch.inputs[order].cpu())
        truth += [classes[i] for i in batch.target[order].tolist()]
        said += [classes[i] for i in found["class"][order].tolist()]
        sure += found["probabilities"][order, found["class"][order]].tolist()
    figure = draw.mistakes_figure(torch.cat(images).numpy(), truth, said, np.array(sure))
    if figure is None:
        return []
    return [
        Picture("mistakes", "Largest mistakes", "Wrong answers, those given with most trust first.", figure)
    ]


def augmented_picture(task: Supervised, data: ImageData, classes: list[str]) -> list[Picture]:
    """Training images before and after their random changes, where there are any."""
    if task.augmentation is None or not task.augmentation.active:
        return []
    batch = on_device(task, data.train.take(spread(data.train, SAMPLES)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        changed = task.augment(batch)
    labels = [classes[i] for i in batch.target.tolist()]
    after = labels
    if changed.target.is_floating_point():
        shares, places = changed.target.topk(min(2, len(classes)), 1)
        after = [
            " + ".join(f"{100 * s:.0f} % {classes[c]}" for s, c in zip(row, place, strict=True) if s > 0.005)
            for row, place in zip(shares.tolist(), places.tolist(), strict=True)
        ]
    before, now = (
        x.float().clamp(0, 255).round().byte().cpu().numpy() for x in (batch.inputs, changed.inputs)
    )
    figure = draw.samples_figure(before, now, labels, after)
    return [Picture("augmented", "Augmentation", "What the network was trained on.", figure)]


def spread(part: Data, count: int) -> Tensor:
    """Row numbers that are evenly spread over a part."""
    return torch.linspace(0, len(part) - 1, min(count, len(part))).round().long()


def on_device(task: Task, batch: Batch) -> Batch:
    return batch.to(task.device)
