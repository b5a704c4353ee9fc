"""Annotated objects: what is wrong with them is named and counted, then refused, left out or repaired.

N images, M objects, G the largest number of objects of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.data.images.source import Files, ImageSource, Objects, counted, some
from quire.data.images.survey import Survey
from quire.errors import DataError
from quire.options import Scenes

ROUNDING = 0.5
"""Pixels by which a box may reach out of its image; it is cut without a word."""
THINNEST = 0.01
"""Pixels that a side must be longer than; less cannot be told from nothing in float32 shares."""


def settle(survey: Survey) -> Survey:
    """The images whose annotations can be used, with faultless boxes in pixels (form "corners").

    An image is turned upright unless its annotations were made on the file as it is stored.
    """
    return _empty(_boxes(_frames(_annotated(survey))))


def _options(survey: Survey) -> tuple[ImageSource, Objects, Scenes]:
    source = survey.source
    assert source.objects is not None
    options = source.options
    return source, source.objects, options if isinstance(options, Scenes) else Scenes()


def _annotated(survey: Survey) -> Survey:
    source, objects, options = _options(survey)
    missing = np.flatnonzero(~objects.annotated)
    if not len(missing):
        return survey
    what = f"{counted(len(missing), 'image')} without annotation file"
    places = some([objects.files[row] for row in missing])
    if options.missing == "refuse":
        raise DataError(
            f"{what}: {places}", path=source.source, expected="an annotation file for each image",
            fix="add them, or use --images.missing skip to leave the images out, or empty to take them as "
            "without objects",
        )  # fmt: skip
    if options.missing == "empty":
        return survey.noting(f"{what}, taken as without objects: {places}")
    return survey.take(np.flatnonzero(objects.annotated)).noting(f"{what}, left out: {places}")


def _frames(survey: Survey) -> Survey:
    """Settle width and height that boxes are measured in: those that the annotations state, where they
    are those of the file as stored or as shown."""
    source, objects, options = _options(survey)
    stated, raw = objects.stated, survey.raw
    silent = (stated == 0).any(1)
    as_stored = (stated == raw).all(1)
    as_shown = (stated == survey.size).all(1) & ~as_stored
    wrong = np.flatnonzero(~(silent | as_stored | as_shown))
    pixels = source.pixels
    if isinstance(pixels, Files):
        source = replace(source, pixels=replace(pixels, upright=~as_stored))
    size = np.where(as_stored[:, None], raw, survey.size)
    survey = replace(survey, source=source, size=size)
    if not len(wrong):
        return survey
    what = f"{counted(len(wrong), 'image')} of another size than annotated"
    sizes = [f"{raw[r, 0]} × {raw[r, 1]}, not {stated[r, 0]} × {stated[r, 1]}" for r in wrong]
    places = some([f"{source.names[r]} is {size}" for r, size in zip(wrong, sizes, strict=True)])
    if options.boxes == "refuse":
        raise DataError(
            f"{what}: {places}", path=source.source, expected="annotations made on these very images",
            fix="correct them, or use --images.boxes skip to leave the images out, or repair to scale boxes",
        )  # fmt: skip
    if options.boxes == "skip":
        kept = np.setdiff1d(np.arange(len(source)), wrong)
        return survey.take(kept).noting(f"{what}, left out: {places}")
    size = survey.size.copy()
    size[wrong] = stated[wrong]
    return replace(survey, size=size).noting(f"{what}, boxes scaled: {places}")


def _boxes(survey: Survey) -> Survey:
    source, objects, options = _options(survey)
    notes: list[str] = []
    if options.crowd == "skip" and objects.crowd.any():
        notes.append(f"{counted(int(objects.crowd.sum()), 'box')} marked as crowd or difficult, left out")
        objects = objects.keep(~objects.crowd)
    corners, sides = to_corners(objects)
    frame = survey.size[objects.image].astype(np.float64)
    limits = np.concatenate([frame, frame], 1)
    cut = np.clip(corners, 0, limits)
    faults = {
        "no class": objects.code < 0,
        "no numbers": ~np.isfinite(corners).all(1),
        "corners in the wrong order": (sides < 0).any(1),
        "outside its image": ((corners < -ROUNDING) | (corners > limits + ROUNDING)).any(1),
        "no area": (np.minimum(np.abs(sides), cut[:, 2:] - cut[:, :2]) <= THINNEST).any(1),
    }
    kind = np.full(len(objects), -1)
    for number, wrong in enumerate(faults.values()):
        kind[(kind < 0) & wrong] = number
    faulty = np.flatnonzero(kind >= 0)
    if len(faulty) and options.boxes == "refuse":
        raise DataError(
            f"{counted(len(faulty), 'faulty box')}: {some(_described(objects, faulty, kind, list(faults)))}",
            path=source.source,
            expected="boxes of a known class, with an area, inside their image",
            fix="correct them, or use --images.boxes skip to leave them out, or repair to order corners "
            "and cut at the border",
        )
    lost = kind >= 0
    if options.boxes == "repair":
        lost = faults["no class"] | faults["no numbers"] | faults["no area"]
        mended = np.flatnonzero((kind >= 0) & ~lost)
        if len(mended):
            places = some(_described(objects, mended, kind, list(faults)))
            notes.append(f"{counted(len(mended), 'faulty box')}, repaired: {places}")
    if lost.any():
        places = some(_described(objects, np.flatnonzero(lost), kind, list(faults)))
        notes.append(f"{counted(int(lost.sum()), 'faulty box')}, left out: {places}")
    objects = replace(objects, written=cut, form="corners").keep(~lost)
    return replace(survey, source=replace(source, objects=objects)).noting(*notes)


def _described(objects: Objects, rows: np.ndarray, kind: np.ndarray, names: Sequence[str]) -> list[str]:
    written = [", ".join(f"{value:g}" for value in objects.written[row]) for row in rows]
    pairs = zip(rows, written, strict=True)
    return [f"{names[kind[row]]} at {objects.place(row)} ({box})" for row, box in pairs]


def to_corners(objects: Objects) -> tuple[np.ndarray, np.ndarray]:
    """Corners (M, 4) in order, from 0 with the last pixel excluded, and the sides (M, 2) as written, which
    are negative where corners were in the wrong order.

    Pascal VOC names the first and last pixel from 1, so x₁ − 1, y₁ − 1, x₂, y₂. There, equal corners would
    be one pixel; they are an annotator's slip and count as no area.
    """
    first, second = objects.written[:, :2], objects.written[:, 2:]
    if objects.form == "corner and sides":
        second = first + second
    low, high = np.minimum(first, second), np.maximum(first, second)
    if objects.form == "pixels from 1":
        low = low - 1
    return np.concatenate([low, high], 1), second - first


def _empty(survey: Survey) -> Survey:
    source, objects, options = _options(survey)
    counts = np.bincount(objects.image, minlength=len(source))
    empty = np.flatnonzero(counts == 0)
    if not len(empty):
        return survey
    what, places = f"{counted(len(empty), 'image')} without boxes", some(source.names[empty].tolist())
    if options.empty == "refuse":
        raise DataError(
            f"{what}: {places}", path=source.source, expected="at least one box in each image",
            fix="use --images.empty keep to train on them as background, or skip to leave them out",
        )  # fmt: skip
    if options.empty == "keep":
        return survey.noting(f"{what}, kept as background: {places}")
    return survey.take(np.flatnonzero(counts)).noting(f"{what}, left out: {places}")


def object_fields(objects: Objects, size: np.ndarray) -> dict[str, Tensor]:
    """Of settled objects in images of width and height `size` (N, 2): boxes as shares of their image
    (N, G, 4), classes (N, G) with -1 where there is no box, and which are crowds (N, G)."""
    images = len(size)
    counts = np.bincount(objects.image, minlength=images)
    most = max(1, int(counts.max(initial=0)))
    order = np.argsort(objects.image, kind="stable")
    image = objects.image[order]
    slot = np.arange(len(image)) - (np.cumsum(counts) - counts)[image]
    boxes = np.zeros((images, most, 4), np.float32)
    labels = np.full((images, most), -1, np.int64)
    crowd = np.zeros((images, most), bool)
    boxes[image, slot] = objects.written[order] / np.concatenate([size, size], 1)[image]
    labels[image, slot] = objects.code[order]
    crowd[image, slot] = objects.crowd[order]
    return {
        "target.boxes": torch.from_numpy(boxes),
        "target.labels": torch.from_numpy(labels),
        "target.crowd": torch.from_numpy(crowd),
    }
