"""Pictures and measures of models without a target: what comes back, where codes lie, what is made.

Numbers are computed here; `quire.report` draws them.

N rows, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from quire.data.preparation import Preparation
from quire.data.undo import rows_in_units
from quire.recipes.plan import Picture
from quire.recipes.sight import on_device, spread
from quire.recipes.unlabelled import Unlabelled
from quire.report.adversarial import players_figure, surface_figure
from quire.report.images import filter_figure
from quire.report.latent import kl_figure, samples_grid_figure, traversal_figure
from quire.report.marginals import Column, marginals_figure
from quire.report.reconstructions import latent_figure, reconstruction_figure
from quire.tasks.adversarial import Adversarial
from quire.tasks.generating import LABEL
from quire.tasks.reconstruction import Reconstruction
from quire.tasks.variational import Variational

FEW_IMAGES, FEW_ROWS = 20, 6
"""Shown with what comes back of them."""
CODES = 1000
"""Rows whose codes are drawn."""
AT_ONCE = 250
ACROSS = 10
"""Samples side by side."""
MOST_CLASSES = 12
"""Classes of which samples are shown."""
TRAVERSED = 8
"""Latent dimensions that are gone through, those that carry most."""
STEPS, SPAN = 11, 2.5
JUDGED, KNOWN = 1000, 5000
"""Samples that are recognised, and rows of the training part that they are compared with."""
PLANE = 60
"""Places along either side of a surface."""


# -- Autoencoders ------------------------------------------------------------------------------


def code_pictures(task: Reconstruction, found: Unlabelled) -> list[Picture]:
    rules = task.rules
    batch = on_device(task, found.shown.take(spread(found.shown, FEW_IMAGES if found.images else FEW_ROWS)))
    seen, read = None, batch.inputs
    if rules.noise != "none":
        seen = read = task.damage(read, torch.Generator(read.device).manual_seed(0))
    elif rules.masked:
        seen = task.damage(read)
    back = task.predict(read)["reconstruction"]
    said = "What comes back of what was not trained on."
    if seen is not None:
        noise = rules.noise.replace("_", " ")
        how = "partly hidden" if rules.masked else f"damaged by {noise} noise"
        said = f"What was not trained on, as the network was shown it, {how}, and what it made of that."
    pictures = [*_filters(task), _given_back(batch.inputs, back, found, said, seen)]
    codes, labels = codes_of(task, found)
    return [*pictures, _plane(codes, labels, found)]


def _given_back(
    inputs: Tensor, back: Tensor, found: Unlabelled, caption: str, seen: Tensor | None = None
) -> Picture:
    figure = reconstruction_figure(
        _numbers(inputs), _numbers(back), damaged=None if seen is None else _numbers(seen),
        features=found.data.preparation.feature_names,
    )  # fmt: skip
    return Picture("reconstructions", "Reconstructions", caption, figure)


def _filters(task: Reconstruction) -> list[Picture]:
    """What each number of the code looks for, where a single dense layer reads images."""
    shape = task.shape
    layers = [layer for layer in task.model.encoder.layers if not isinstance(layer, nn.Flatten)]
    if len(shape) != 3 or len(layers) != 1 or not isinstance(layers[0], nn.Linear):
        return []
    weights = layers[0].weight.detach().float().cpu().view(-1, *shape)
    # The liveliest first, as only some are shown.
    order = weights.flatten(1).norm(dim=1).argsort(descending=True)
    figure = filter_figure(weights[order].numpy(), "the code, the largest first")
    return [Picture("filters", "Filters", "What each number of the code looks for, and gives back.", figure)]


@torch.no_grad()
def codes_of(task: Reconstruction | Variational, found: Unlabelled) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes of some rows of the most trusted part, and their classes where there are any."""
    part, codes, labels = found.shown, [], []
    for batch in part.batches(spread(part, CODES), AT_ONCE):
        batch = on_device(task, batch)
        label = batch.fields.get(LABEL) if found.classes else None
        told: dict[str, Any] = {"label": label} if task.needs_target else {}
        codes.append(task.predict(batch.inputs, **told)["code"].float().cpu())
        labels += [] if label is None else label.tolist()
    return torch.cat(codes).numpy(), np.array(labels) if labels else None


def _plane(codes: np.ndarray, labels: np.ndarray | None, found: Unlabelled) -> Picture:
    figure = latent_figure(codes, labels, found.classes if labels is not None else ())
    return Picture("latent-plane", "Latent plane", "Where the codes of rows lie.", figure)


# -- Models that make something ----------------------------------------------------------------


def generative_pictures(
    task: Variational | Adversarial, found: Unlabelled, history: Sequence[Mapping[str, Any]]
) -> list[Picture]:
    pictures = [_samples(task, found)]
    if isinstance(task, Variational):
        return [*pictures, *_variational(task, found)]
    return [*pictures, *_players(task, history), *_surface(task, found)]


def _samples(task: Variational | Adversarial, found: Unlabelled) -> Picture:
    if not found.images:
        return _marginals(task, found)
    names: list[str] = []
    asked = None
    count = ACROSS * 5
    if task.classes:
        names = [str(name) for name in found.classes[:MOST_CLASSES]]
        asked = torch.arange(len(names)).repeat_interleave(ACROSS)
        count = len(asked)
    figure = samples_grid_figure(task.sample(count, asked).cpu().numpy(), ACROSS, names)
    said = "Images that the model made" + (", a class in each row." if names else ".")
    return Picture("samples", "Samples", said, figure)


def _marginals(task: Variational | Adversarial, found: Unlabelled) -> Picture:
    preparation = found.data.preparation
    assert isinstance(preparation, Preparation)
    rows = on_device(task, found.shown.take(spread(found.shown, JUDGED)))
    asked = None
    if task.classes:  # as often as in the data
        asked = rows.fields[LABEL].clamp(min=0)[torch.arange(JUDGED, device=task.device) % len(rows)]
    made = task.sample(JUDGED, asked)
    data, samples = (rows_in_units(preparation, part) for part in (rows.inputs, made))
    columns = [Column(name, _values(data[name]), _values(samples[name])) for name in data.column_names]
    said = f"How the values of each column are spread: rows that were not trained on, and {JUDGED:,} samples."
    return Picture("samples", "Data and samples", said, marginals_figure(columns))


def _values(column: pa.ChunkedArray) -> np.ndarray:
    """Numbers and dates as they are; anything else as texts."""
    if pa.types.is_floating(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    if pa.types.is_date(column.type):
        return np.array(column.to_pylist(), dtype="datetime64[D]")
    return np.array(["missing" if value is None else str(value) for value in column.to_pylist()])


def _variational(task: Variational, found: Unlabelled) -> list[Picture]:
    batch = on_device(task, found.shown.take(spread(found.shown, FEW_IMAGES if found.images else FEW_ROWS)))
    told: dict[str, Any] = {"label": batch.fields[LABEL]} if task.classes else {}
    back = task.predict(batch.inputs, **told)["reconstruction"]
    said = "What the mean code of what was not trained on gives back."
    kl = task.kl_by_dimension(found.shown)
    carried = Picture(
        "kl", "Latent dimensions",
        "How far the codes of rows differ from their prior, dimension by dimension: what a code carries.",
        kl_figure(kl.numpy()),
    )  # fmt: skip
    pictures = [_given_back(batch.inputs, back, found, said), carried, _plane(*codes_of(task, found), found)]
    if not found.images:
        return pictures
    order = kl.argsort(descending=True)[:TRAVERSED].tolist()
    made = task.traverse(order, steps=STEPS, span=SPAN)
    names = [f"z{place}: {float(kl[place]):.2f} nats" for place in order]
    figure = traversal_figure(made.cpu().numpy(), np.linspace(-SPAN, SPAN, STEPS), names)
    of = f", of class {found.classes[0]}" if task.classes else ""
    said = f"What is made{of} while one number of the code changes and the others stay 0."
    return [*pictures, Picture("traversal", "Latent traversal", said, figure)]


def _players(task: Adversarial, history: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """Losses and accuracies of the two players, by the validations of training."""
    records = [record for record in history if record["split"] == "validation"]
    names = ("discriminator", "generator", "real_accuracy", "fake_accuracy")
    if not records:
        return []
    steps = np.array([record["step"] for record in records], dtype=float)
    lines = [
        np.array([np.nan if (v := record["values"].get(name)) is None else v for record in records])
        for name in names
    ]
    said = "How the players stand on rows that were not trained on. Neither wins where both are equally good."
    figure = players_figure(steps, *lines, minimax=task.loss == "min-max")
    return [Picture("players", "The two players", said, figure)]


@torch.no_grad()
def _surface(task: Adversarial, found: Unlabelled) -> list[Picture]:
    """What the discriminator takes for data, where rows have two features."""
    if found.shape != (2,):
        return []
    rows = on_device(task, found.shown.take(spread(found.shown, JUDGED)))
    made = task.sample(len(rows), rows.fields[LABEL].clamp(min=0) if task.classes else None)
    low, high = rows.inputs.amin(0), rows.inputs.amax(0)
    margin = 0.2 * (high - low).clamp(min=0.5)
    ends = torch.stack([low - margin, high + margin], 1).tolist()
    sides = [torch.linspace(first, last, PLANE) for first, last in ends]
    across, down = torch.meshgrid(sides[0], sides[1], indexing="xy")
    places = torch.stack([across, down], -1).view(-1, 2).to(task.device)
    scores = task.predict(places)["score"].view(PLANE, PLANE)
    names = found.data.preparation.feature_names
    figure = surface_figure(
        sides[0].numpy(), sides[1].numpy(), _numbers(scores), _numbers(rows.inputs), _numbers(made),
        columns=(f"{names[0]} (deviations)", f"{names[1]} (deviations)"),
    )  # fmt: skip
    return [Picture("surface", "The discriminator", "Where it expects data rather than samples.", figure)]


@torch.no_grad()
def recognised(task: Variational | Adversarial, found: Unlabelled) -> dict[str, float]:
    """How many samples are of the class that was asked for, by the nearest row of the training part; and how
    many rows that were not trained on are, so that the judge is known as well."""
    train, shown = found.data.train, found.shown
    known = on_device(task, train.take(spread(train, KNOWN)))
    rows = on_device(task, shown.take(spread(shown, JUDGED)))
    asked = torch.arange(JUDGED, device=task.device) % task.classes
    measures = {}
    for name, inputs, label in (
        ("recognised", task.sample(JUDGED, asked), asked),
        ("recognised_data", rows.inputs, rows.target),
    ):
        right = [
            known.target[torch.cdist(part.flatten(1).float(), known.inputs.flatten(1).float()).argmin(1)]
            == own
            for part, own in zip(inputs.split(AT_ONCE), label.split(AT_ONCE), strict=True)
        ]
        measures[name] = float(torch.cat(right).double().mean())
    return measures


def _numbers(values: Tensor) -> np.ndarray:
    return values.detach().float().cpu().numpy()
