"""Predictions in the user's own words: class labels and units instead of numbers and indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from quire.data.columns import Label
from quire.data.loaded import Prepares
from quire.data.preparation import Preparation
from quire.data.undo import rows_in_units

MOST_PROBABILITIES = 50
"""Classes up to which `predict` gives a column of probabilities each."""


def target_prefixes(preparation: Prepares) -> list[str]:
    """ "" for a single target, "NAME." for each of several."""
    targets = preparation.targets
    return [""] if len(targets) == 1 else [f"{target.name}." for target in targets]


def prediction_columns(
    preparation: Prepares, predicted: Mapping[str, Tensor], *, every_class: bool = True
) -> dict[str, list[Label] | np.ndarray]:
    """Columns `prediction`, `probability`, `low`, `high`, … of what a task predicted."""
    columns: dict[str, list[Label] | np.ndarray] = {}
    for i, (target, prefix) in enumerate(zip(preparation.targets, target_prefixes(preparation), strict=True)):
        own = {
            key.removeprefix(prefix): value.detach().cpu()
            for key, value in predicted.items()
            if key.startswith(prefix)
        }
        if target.kind == "regression":
            columns[f"{prefix}prediction"] = own["value"].double().numpy()
            for bound in ("low", "high"):
                if bound in own:
                    columns[prefix + bound] = own[bound].double().numpy()
            continue
        classes, probabilities = own["class"], class_probabilities(own["probabilities"])
        columns[f"{prefix}prediction"] = preparation.decode_classes(classes, i)
        chosen = probabilities.gather(1, classes.unsqueeze(1)).squeeze(1)
        columns[f"{prefix}probability"] = chosen.double().numpy()
        if "set" in own:
            labels = [str(label) for label in target.classes]
            columns[f"{prefix}set"] = [_join(labels, row) for row in own["set"]]
        if every_class and len(target.classes) <= MOST_PROBABILITIES:
            for c, label in enumerate(target.classes):
                columns[f"{prefix}probability of {label}"] = probabilities[:, c].double().numpy()
    return columns


def plain_columns(
    preparation: Prepares, predicted: Mapping[str, Tensor]
) -> dict[str, list[Label] | np.ndarray]:
    """Columns of what a task predicts that answers no target: NAME, or NAME_1, NAME_2, … of short vectors;
    whole images and the like are left out. A `class` has its own name, and a `reconstruction` of a row its
    own columns and units."""
    columns: dict[str, list[Label] | np.ndarray] = {}
    for name, value in predicted.items():
        value = value.detach().cpu()
        if name == "class" and preparation.targets:
            columns[name] = preparation.decode_classes(value)
            continue
        if name == "reconstruction" and isinstance(preparation, Preparation):
            if len(preparation.inputs) <= MOST_PROBABILITIES:
                back = rows_in_units(preparation, value)
                columns |= {f"{name} of {column}": back[column].to_pylist() for column in back.column_names}
            continue
        value = value.double() if value.is_floating_point() else value
        if value.dim() == 1:
            columns[name] = value.numpy()
        elif value.dim() == 2 and value.shape[1] <= MOST_PROBABILITIES:
            columns |= {f"{name}_{i + 1}": value[:, i].numpy() for i in range(value.shape[1])}
    return columns


def truth_columns(
    preparation: Prepares, fields: Mapping[str, Tensor], predicted: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Columns `truth` and, for classes, `truth_probability`."""
    columns: dict[str, Any] = {}
    for i, (target, prefix) in enumerate(zip(preparation.targets, target_prefixes(preparation), strict=True)):
        truth = fields[f"target.{target.name}" if prefix else "target"].cpu()
        if target.kind == "regression":
            columns[f"{prefix}truth"] = truth.double().numpy()
            continue
        columns[f"{prefix}truth"] = preparation.decode_classes(truth, i)
        probabilities = class_probabilities(predicted[f"{prefix}probabilities"].detach().cpu())
        chosen = probabilities.gather(1, truth.long().unsqueeze(1)).squeeze(1)
        columns[f"{prefix}truth_probability"] = chosen.double().numpy()
    return columns


def class_probabilities(probabilities: Tensor) -> Tensor:
    """(N, C); a Bernoulli head gives the probability of the second class alone."""
    if probabilities.dim() == 1:
        probabilities = torch.stack([1 - probabilities, probabilities], 1)
    return probabilities


def _join(labels: list[str], row: Tensor) -> str:
    return " | ".join(label for label, inside in zip(labels, row.tolist(), strict=True) if inside)


CORNERS = ("left", "top", "right", "bottom")


def detection_columns(
    preparation: Prepares, predicted: Mapping[str, Tensor], names: Sequence[Any] | np.ndarray, extent: Tensor
) -> dict[str, Any]:
    """A row for each object found: image, class, score and corners in pixels of the original image."""
    labels = predicted["labels"].cpu()
    scale = extent.cpu().double().repeat(1, 2)  # width, height, width, height
    corners = predicted["boxes"].cpu().double() * scale[:, None]
    image, place = (labels >= 0).nonzero(as_tuple=True)
    columns: dict[str, Any] = {
        "image": pa.array([str(names[i]) for i in image.tolist()], pa.string()),
        "prediction": pa.array(map(str, preparation.decode_classes(labels[image, place])), pa.string()),
        "score": predicted["scores"].cpu().double()[image, place].numpy(),
    }
    found = corners[image, place]
    return columns | {name: found[:, i].numpy() for i, name in enumerate(CORNERS)}
