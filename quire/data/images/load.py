"""One call from a path or built-in set to prepared training, validation and test images."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.data.batch import Data, TensorData, epoch_order
from quire.data.columns import Label, Target
from quire.data.images.objects import settle
from quire.data.images.preparation import ImagePreparation, channel_moments, no_classes, target_fields
from quire.data.images.recognise import open_images, open_scenes
from quire.data.images.source import ImageSource, counted, some
from quire.data.images.stream import Progress, fits, gather
from quire.data.images.survey import LARGEST, Survey, broken_note, choose_shape, resized_note, survey
from quire.data.load import Split
from quire.data.splits import split_rows
from quire.errors import DataError, InputError
from quire.options import Images, Scenes

SAMPLE = 2000
"""Training images of a stream that its mean and standard deviation are taken from."""
SAMPLE_BATCH = 64
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images, split and prepared."""

    source: str
    preparation: ImagePreparation
    train: Data
    validation: Data | None
    """None when its share is 0."""
    test: Data | None
    names: Mapping[Split, np.ndarray]
    """Name of each image of a part: its path below the source, or its file and number in it."""

    def lines(self, split: Split) -> np.ndarray:
        """The names of a part's images."""
        return self.names[split]

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.preparation.warnings

    @property
    def classes(self) -> list[Label]:
        return self.preparation.target.classes


def load_images(
    source: Path | str | ImageSource,
    options: Images | None = None,
    *,
    seed: int = 0,
    like: ImagePreparation | None = None,
    largest: int = LARGEST,
    need_classes: bool = True,
    progress: Progress | None = None,
) -> ImageData:
    """Read, split and prepare images of classes; without `need_classes` also images of one or of none.

    `source` is a path, the name of a built-in set, or what `open_images` gave. Parts that the data has
    itself are kept; others are taken from its training part, stratified by class. Statistics come from the
    training part alone, or with `like` from an older preparation, whose model is to be taken over.
    `largest` is the side of images that differ or are larger, where the options do not say it.
    """
    opened = source if isinstance(source, ImageSource) else open_images(source, options or Images())
    if opened.codes is None and need_classes:
        raise no_classes(opened)
    return _load(survey(opened), "class", seed, like, progress, largest, need_classes)


def load_scenes(
    source: Path | str | ImageSource,
    options: Scenes | None = None,
    *,
    seed: int = 0,
    like: ImagePreparation | None = None,
    progress: Progress | None = None,
) -> ImageData:
    """Read, split and prepare images whose objects have boxes and classes, like `load_images`."""
    opened = source if isinstance(source, ImageSource) else open_scenes(source, options or Scenes())
    return _load(settle(survey(opened)), "object", seed, like, progress)


def _load(
    seen: Survey,
    name: str,
    seed: int,
    like: ImagePreparation | None,
    progress: Progress | None,
    largest: int = LARGEST,
    need_classes: bool = True,
) -> ImageData:
    source, options = seen.source, seen.source.options
    boxes = source.objects is not None
    target = None if source.labels is None else Target(name, 0, "classification", source.labels)
    if target is not None and need_classes and len(target.classes) < (1 if boxes else 2):
        raise DataError(
            f"one class only: {target.classes[0]!r}" if target.classes else "no classes", path=source.source,
            expected=f"at least {'one' if boxes else 'two'}",
            fix="" if boxes else "give the folder whose sub-folders are the classes",
        )  # fmt: skip
    shape = like.shape if like is not None else choose_shape(seen, options, largest)
    if options.size is None:
        seen = seen.noting(*resized_note(seen, shape))
        source = seen.source
    fields: dict[str, Tensor] = {}
    if target is not None:
        fields = target_fields(seen, target, boxes=boxes, need_target=True)
    labels = fields.get("target.labels" if boxes else "target")
    rows = split_source(source, seed)
    class_notes = _check_classes(source.source, target, labels, rows)
    in_memory = fits(len(source), shape, options)

    parts: dict[Split, Data] = {}
    errors: list[DataError] = []
    done = 0
    for split, chosen in rows.items():
        own = {key: value[torch.from_numpy(chosen)] for key, value in fields.items()}
        pixels, report = source.pixels.take(chosen), _shifted(progress, done, len(source))
        found = gather(pixels, own, shape, options, in_memory=in_memory, progress=report)
        done += len(chosen)
        errors += found.errors
        rows[split] = chosen[found.kept]
        if len(found.data):
            parts[split] = found.data
    if "train" not in parts:
        raise DataError("no training image can be decoded", path=source.source, expected="at least one")

    names = {split: source.names[rows.get(split, [])] for split in SPLITS}
    if errors:
        class_notes = _check_classes(source.source, target, labels, rows)
        class_notes.append(broken_note(errors, len(source)))
    notes = [*source.notes, *class_notes, *_leaks(parts, names)]
    mean, std = (like.mean, like.std) if like is not None else _moments(parts["train"], seed)
    preparation = ImagePreparation(
        (shape.height, shape.width), shape.channels, shape.fit, mean, std,
        () if target is None else (target,), boxes, tuple(notes),
    )  # fmt: skip
    return ImageData(
        source.source, preparation, parts["train"], parts.get("validation"), parts.get("test"), names
    )


def split_source(source: ImageSource, seed: int) -> dict[Split, np.ndarray]:
    """Row numbers of each part that is not empty: the data's own parts, and shares of its training part
    for those that it has not."""
    own = source.parts if source.parts is not None else np.repeat("train", len(source))
    rows = {split: np.flatnonzero(own == split) for split in SPLITS}
    train, options = rows["train"], source.options
    validation = 0.0 if len(rows["validation"]) else options.validation
    test = 0.0 if len(rows["test"]) else options.test
    stratify = None if source.codes is None else torch.from_numpy(source.codes[train])
    if not len(train):
        raise DataError(
            f"parts {' and '.join(repr(str(part)) for part in np.unique(own))}, but no training part",
            path=source.source, expected="training images",
        )  # fmt: skip
    try:
        parts = split_rows(len(train), validation, test, seed, stratify)
    except InputError as error:
        fix = error.fix.replace("--table", "--images").replace("rows", "images")
        got, expected = error.got.replace("rows", "images"), error.expected.replace("row", "image")
        raise DataError(got, path=source.source, expected=expected, fix=fix) from None
    for split, part in zip(SPLITS, parts, strict=True):
        rows[split] = train[part.numpy()] if split == "train" or len(part) else rows[split]
    return {split: part for split, part in rows.items() if len(part)}


def _check_classes(
    source: str, target: Target | None, labels: Tensor | None, rows: Mapping[Split, np.ndarray]
) -> list[str]:
    """Notes on classes that training has little or nothing of. One that only another part has cannot be
    learned; that is an error where each image has a class, (N,), and a note where boxes have, (N, G)."""
    if target is None or labels is None:
        return []
    boxes = labels.ndim == 2
    classes = target.classes
    training = labels[torch.from_numpy(rows["train"])]
    train, everywhere = (torch.bincount(x[x >= 0], minlength=len(classes)) for x in (training, labels))

    def named(mask: Tensor) -> str:
        return some([repr(classes[i]) for i in mask.nonzero()[:, 0].tolist()])

    lost = (train == 0) & (everywhere > 0)
    if bool(lost.any()) and not boxes:
        raise DataError(
            f"no training image of class {named(lost)}", path=source,
            expected="each class of the other parts in the training part as well",
        )  # fmt: skip
    what = "box" if boxes else "image"
    kinds = {f"no training {what}": train == 0, f"one training {what} only": train == 1}
    return [f"{few} of class {named(mask)}" for few, mask in kinds.items() if bool(mask.any())]


def _leaks(parts: Mapping[Split, Data], names: Mapping[Split, np.ndarray]) -> list[str]:
    """Notes on images of one part that are in another as well, pixel for pixel."""
    known: dict[bytes, str] = {}
    notes = []
    for split, part in parts.items():
        if not isinstance(part, TensorData):
            continue
        digests = [hashlib.blake2b(image, digest_size=16).digest() for image in part.inputs.numpy()]
        here = list(zip(digests, names[split], strict=True))
        same = [f"{name} is {known[digest]}" for digest, name in here if digest in known]
        if same:
            notes.append(
                f"{counted(len(same), f'{split} image')} also in another part, pixel for pixel: {some(same)}"
            )
        known = dict(here) | known
    return notes


def _moments(train: Data, seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if isinstance(train, TensorData):
        return channel_moments([train.inputs])
    rows = epoch_order(len(train), seed, 0)[:SAMPLE].sort().values
    return channel_moments(batch.inputs for batch in train.batches(rows, SAMPLE_BATCH))


def _shifted(progress: Progress | None, done: int, total: int) -> Progress | None:
    return None if progress is None else lambda here, _: progress(done + here, total)
