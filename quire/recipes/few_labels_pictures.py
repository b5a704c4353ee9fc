"""Pictures of learning with few labels: where codes lie, what is found to be alike, what is trained on.

Numbers are computed here; `quire.report` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.data.batch import Data
from quire.nn.views import Views
from quire.recipes.plan import Picture
from quire.recipes.sight import mistakes_picture, on_device, spread
from quire.recipes.unlabelled import Unlabelled
from quire.report import images as draw
from quire.report.reconstructions import MOST_POINTS, latent_figure
from quire.report.retrieval import retrieval_figure
from quire.tasks.embedding import Embedding
from quire.train.task import Task

QUERIES = 6
SAMPLES = 6


@torch.no_grad()
def few_labels_pictures(task: Task, whole: Unlabelled, strong: Views) -> Sequence[Picture]:
    """Pictures of the most trusted part."""
    part, classes = whole.shown, list(whole.classes)
    pictures = [latent_picture(task, part, classes)]
    if not whole.images:
        return pictures
    if isinstance(task, Embedding):
        pictures.append(retrieval_picture(task, whole.data.train, part, classes))
    classifier: Any = task
    pictures += mistakes_picture(classifier, part, classes)
    return [*pictures, views_picture(task, whole.data.train, strong)]


def latent_picture(task: Task, part: Data, classes: list[str]) -> Picture:
    """Codes of rows that were not trained on."""
    batches = part.batches(spread(part, MOST_POINTS), 500)
    found = [
        (task.predict(b.inputs)["code"].cpu(), b.target.cpu()) for b in (on_device(task, b) for b in batches)
    ]
    codes, labels = (torch.cat(values).float().numpy() for values in zip(*found, strict=True))
    figure = latent_figure(codes, labels.astype(int), classes, "Codes of rows that were not trained on")
    caption = (
        "Each point is a row, at its code along the two directions of the codes' largest variance. Classes "
        "that lie apart here are told apart with few labels."
    )
    return Picture("latent", "The latent plane", caption, figure)


def retrieval_picture(task: Embedding, train: Data, part: Data, classes: list[str]) -> Picture:
    """Rows that were not trained on, of as many classes as there is room for, and the labelled rows most like
    them."""
    batch = on_device(task, part.take(one_of_each(part, QUERIES)))
    found = {name: value.cpu() for name, value in task.predict(batch.inputs).items()}
    places = found["neighbour"]  # (Q, k)
    neighbours = train.take(places.flatten()).inputs.cpu().unflatten(0, tuple(places.shape))
    figure = retrieval_figure(
        batch.inputs.cpu().numpy(),
        neighbours.numpy(),
        [classes[i] for i in batch.target.tolist()],
        [[classes[i] for i in row] for row in found["neighbour_class"].tolist()],
        found["likeness"].numpy(),
    )
    caption = (
        "First column: images that were not trained on. Beside each the labelled training images with the "
        "most similar codes, their class and the cosine of the angle between the two codes. A dashed frame "
        "marks another class."
    )
    return Picture("retrieval", "Nearest neighbours", caption, figure)


def one_of_each(part: Data, count: int) -> Tensor:
    """Row numbers: the first of each class, then others in order, up to so many."""
    target = part.take(spread(part, 200)).target.cpu().numpy()
    numbers = spread(part, 200)
    _, firsts = np.unique(target, return_index=True)
    others = np.setdiff1d(np.arange(len(target)), firsts)
    return numbers[torch.from_numpy(np.concatenate([np.sort(firsts), others])[:count])]


def views_picture(task: Task, train: Data, strong: Views) -> Picture:
    """Training images, and one random view of each."""
    batch: Any = on_device(task, train.take(spread(train, SAMPLES)))
    device = batch.inputs.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        changed = strong(batch.inputs)
    before, after = (x.cpu().numpy() for x in (batch.inputs, changed))
    figure = draw.samples_figure(before, after, [""] * len(before))
    return Picture("views", "Views", "Training images, and a random view of each under it.", figure)
