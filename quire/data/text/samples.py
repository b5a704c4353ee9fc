"""Many short texts: with a label each, or in pairs. How they are split, encoded and padded.

N texts, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.data.columns import Label, Labels
from quire.data.loaded import Split
from quire.data.splits import split_rows
from quire.data.text.corpus import Unknown, encode_blocks
from quire.data.text.files import Block
from quire.data.text.tokenisers import Tokeniser
from quire.errors import DataError, InputError
from quire.options import Text

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Column:
    """Where the texts of a table stand."""

    name: str
    position: int
    named: bool
    """Whether the table had a header; otherwise the position counts."""
    width: int
    """Columns of the table."""


@dataclass(frozen=True, eq=False)
class Samples:
    """N texts with what is known of each. Row for row, so `take` picks from all."""

    source: str
    options: Text
    texts: np.ndarray
    """(N,) of str."""
    names: np.ndarray
    """(N,) line of each text in its file, or the name of its file below the folder."""
    answers: np.ndarray | None = None
    """(N,) of str: the other side of each pair."""
    labels: Labels | None = None
    codes: np.ndarray | None = None
    """(N,) int64 among the labels."""
    label: str = "class"
    """What the labels are called."""
    label_position: int = 0
    column: Column | None = None
    groups: np.ndarray | None = None
    """(N,) of str: texts of one group are never split; without it those that are the same."""
    parts: np.ndarray | None = None
    """(N,) "train", "validation" or "test" where the data says so itself."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: np.ndarray) -> Samples:
        def pick(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[rows]

        return replace(
            self,
            texts=self.texts[rows],
            names=self.names[rows],
            answers=pick(self.answers),
            codes=pick(self.codes),
            groups=pick(self.groups),
            parts=pick(self.parts),
        )

    def noting(self, *notes: str) -> Samples:
        return replace(self, notes=(*self.notes, *notes))

    def place(self, row: int) -> dict[str, Any]:
        """Of a text, as the arguments of a DataError."""
        name = self.names[row]
        if isinstance(name, str):
            return {"path": f"{self.source}/{name}", "line": 1}
        return {"path": self.source, "line": int(name)}

    def blocks(self, texts: np.ndarray) -> Iterator[Block]:
        for row, text in enumerate(texts):
            place = self.place(row)
            yield Block(text, place["path"], place["line"])


def object_array(values: Sequence[object]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def split_samples(samples: Samples, seed: int) -> dict[Split, np.ndarray]:
    """Row numbers of each part that is not empty: the data's own parts, and shares of the groups of its
    training part for those that it has not, stratified by class."""
    options = samples.options
    own = samples.parts if samples.parts is not None else np.repeat("train", len(samples))
    rows = {split: np.flatnonzero(own == split) for split in SPLITS}
    train = rows["train"]
    if not len(train):
        raise DataError("no training part", path=samples.source, expected="texts to train on")
    keys = samples.groups if samples.groups is not None else samples.texts
    _, first, group = np.unique(keys[train].astype(str), return_index=True, return_inverse=True)
    # A group goes where its first text belongs.
    stratify = None if samples.codes is None else torch.from_numpy(samples.codes[train][first])
    validation = 0.0 if len(rows["validation"]) else options.validation
    test = 0.0 if len(rows["test"]) else options.test
    try:
        parts = split_rows(len(first), validation, test, seed, stratify)
    except InputError as error:
        what = "groups" if samples.groups is not None else "different texts"
        got, expected, fix = (
            text.replace("--table", "--text").replace("rows", what).replace("row", what[:-1])
            for text in (error.got, error.expected, error.fix)
        )
        raise DataError(got, path=samples.source, expected=expected, fix=fix) from None
    for split, chosen in zip(SPLITS, parts, strict=True):
        if split == "train" or len(chosen):
            rows[split] = train[np.isin(group, chosen.numpy())]
    return {split: part for split, part in rows.items() if len(part)}


def encode(samples: Samples, texts: np.ndarray, tokeniser: Tokeniser, found: Unknown) -> list[np.ndarray]:
    """The tokens of each of the texts, or of each of the answers, of all samples."""
    return list(encode_blocks(samples.blocks(texts), tokeniser, found))


def pad(rows: Sequence[np.ndarray], width: int, filler: int) -> Tensor:
    """(N, width) int64, cut or filled up at the end."""
    padded = np.full((len(rows), max(width, 1)), filler, np.int64)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens[:width]
    return torch.from_numpy(padded)


def lengths(rows: Sequence[np.ndarray], width: int) -> Tensor:
    """(N,) int64, of the padded rows."""
    return torch.tensor([min(len(tokens), width) for tokens in rows], dtype=torch.int64)


def cut_note(rows: Sequence[np.ndarray], width: int, names: np.ndarray, what: str) -> list[str]:
    """A note on texts that lose their end."""
    long = [row for row, tokens in enumerate(rows) if len(tokens) > width]
    if not long:
        return []
    return [
        f"{len(long)} of {len(rows)} {what} are longer than {width} tokens and are cut there, the first "
        f"{describe(names[long[0]])}"
    ]


def describe(name: object) -> str:
    return f"being {name}" if isinstance(name, str) else f"in line {name}"


def translate(samples: Samples, classes: Sequence[Label]) -> Tensor:
    """(N,) class number in training of each sample; 7 in one and "7" in the other are alike."""
    assert samples.labels is not None
    assert samples.codes is not None
    numbers = {str(label): number for number, label in enumerate(classes)}
    known = np.array([numbers.get(str(label), -1) for label in samples.labels.values] or [-1])
    found = known[samples.codes]
    if (found < 0).any():
        row = int((found < 0).argmax())
        shown = ", ".join(map(str, classes[:20])) + (", …" if len(classes) > 20 else "")
        raise DataError(
            "a class that was not in training", **samples.place(row),
            value=samples.labels.values[samples.codes[row]], expected=f"one of {shown}",
        )  # fmt: skip
    return torch.from_numpy(found)


def repeated(samples: Samples, rows: Mapping[Split, np.ndarray]) -> list[str]:
    """Notes on texts of other parts that training has as well, word for word."""
    training = set(samples.texts[rows["train"]])
    notes = []
    for split in ("validation", "test"):
        same = [row for row in rows.get(split, ()) if samples.texts[row] in training]
        if same:
            notes.append(
                f"{len(same)} {split} texts are in the training part as well, the first "
                f"{describe(samples.names[same[0]])}"
            )
    return notes
