"""The data of recipes with few labels: most labels hidden, views of rows, the shape of the network."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quire.data.few_labels import choose_labelled, hide_labels, with_unlabelled
from quire.errors import InputError
from quire.nn.views import ImageViews, RowViews, Views
from quire.recipes.unlabelled import Unlabelled, is_images, load_unlabelled

if TYPE_CHECKING:
    from quire.recipes.few_labels import FewLabelsOptions

BORDER_SAMPLE = 256
"""Training images that the colour around images is taken from."""
WEAK_NOISE = 0.3
"""Noise of a slightly changed row, as a share of --rows.noise."""


class Few(NamedTuple):
    """Data with few labels, and the labelled rows by themselves."""

    whole: Unlabelled
    rows: Tensor
    """Their numbers in the training part."""
    inputs: Tensor
    target: Tensor
    notes: list[str]


def open_few(options: FewLabelsOptions, *, only_labelled: bool = False) -> Few:
    """The user's data or digits; of the training part most labels are hidden, or the rows without one left
    out."""
    whole = load_unlabelled(options, "digits", need_classes=True)
    data: Any = whole.data
    if data.test is None and data.validation is None:
        part = "images" if whole.images else "table"
        raise InputError(
            "no validation and no test part",
            expected="rows to judge by, since few of the training rows have a class",
            fix=f"leave out --{part}.validation 0 and --{part}.test 0",
        )
    _refuse_other_changes(options, whole)
    train: Any = data.train
    rows = choose_labelled(train.target, len(whole.classes), options.labels, options.seed)
    known = train.take(rows)
    if only_labelled:
        names = data.lines("train")[rows.numpy()]
        train, kept = train.subset(rows), torch.arange(len(rows))
        notes = [f"{len(rows):,} of {len(data.train):,} training rows are used, with their classes"]
        data = replace(data, train=train, **_named(data, names, rows))
    else:
        kept = rows
        train = hide_labels(train, rows)
        if (more := getattr(options, "unlabelled", None)) is not None:
            train = with_unlabelled(train, read_unlabelled(more, options, whole))
        notes = [f"{len(rows):,} of {len(train):,} training rows are used with their classes"]
        data = replace(data, train=train)
    return Few(replace(whole, data=data), kept, known.inputs, known.target, notes)


def _named(data: Any, names: Any, rows: Tensor) -> dict[str, Any]:
    """Where the rows of a smaller training part stand in the source, as a table or images remember it."""
    if hasattr(data, "names"):
        return {"names": {**data.names, "train": names}}
    return {"rows": {**data.rows, "train": data.rows["train"][rows]}}


def read_unlabelled(path: Path, options: FewLabelsOptions, whole: Unlabelled) -> Any:
    """Rows or images beside the data, prepared like it."""
    if not path.exists():
        raise InputError(f"--unlabelled {path}, which does not exist", expected="a file or folder")
    if is_images(path) != whole.images:
        raise InputError(
            f"--unlabelled {path}, {'a table' if whole.images else 'images'}",
            expected="images, like the data" if whole.images else "a table with the columns of the data",
        )
    reading = options.images if whole.images else options.table
    preparation = whole.data.preparation
    return preparation.transform(preparation.read(path, reading)).data


def make_views(options: FewLabelsOptions, whole: Unlabelled) -> tuple[Views, Views]:
    """Slight and strong changes."""
    if not whole.images:
        noise = WEAK_NOISE * options.rows.noise
        return RowViews(noise=noise), RowViews(**asdict(options.rows))
    around, changes = background(whole), options.augment
    weak = ImageViews(around, shift=changes.shift / 2, flip=changes.flip)
    return weak, ImageViews(around, **asdict(changes))


def background(whole: Unlabelled) -> list[float]:
    """The median of the outermost pixels of training images, by channel: paper, or the middle of what
    photographs end in."""
    train: Any = whole.data.train
    rows = torch.linspace(0, len(train) - 1, min(len(train), BORDER_SAMPLE)).long()
    images = train.take(rows).inputs.float().transpose(0, 1)  # (C, N, H, W)
    edges = [images[:, :, 0], images[:, :, -1], images[:, :, :, 0], images[:, :, :, -1]]
    found: list[float] = torch.cat([edge.flatten(1) for edge in edges], 1).median(1).values.tolist()
    return found


def coder_options(options: FewLabelsOptions, whole: Unlabelled) -> dict[str, Any]:
    chosen = asdict(options.model)
    if chosen["kind"] == "auto":
        chosen["kind"] = "convolutional" if whole.images else "dense"
    return {"shape": whole.shape, **chosen}


def _refuse_other_changes(options: FewLabelsOptions, whole: Unlabelled) -> None:
    """Options that would be ignored."""
    name, what = ("rows", "images") if whole.images else ("augment", "a table")
    if getattr(options, name) != getattr(type(options)(), name):
        raise InputError(
            f"--{name} options with {what}",
            expected="changes of the data that is given",
            fix=f"use --{'augment' if whole.images else 'rows'}",
        )
