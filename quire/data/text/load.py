"""One call from many short texts to prepared training, validation and test data: pairs, labelled texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quire.data.batch import TensorData
from quire.data.columns import Label, Target
from quire.data.loaded import Split
from quire.data.text.corpus import Unknown, unknown_notes
from quire.data.text.labelled import open_labelled
from quire.data.text.pairs import conflicts, open_pairs
from quire.data.text.preparation import TextPreparation, no_targets, target_field, text_fields
from quire.data.text.samples import SPLITS, Samples, cut_note, describe, encode, repeated, split_samples
from quire.data.text.tokenisers import Special
from quire.data.text.vocabulary import fit_tokeniser, small_note
from quire.errors import DataError
from quire.options import Text

COVERED = 0.95
"""Share of the training texts that are not cut."""
PAIR_SPECIALS: tuple[Special, ...] = ("padding", "begin", "end")


@dataclass(frozen=True, eq=False)
class TextData:
    """Pairs or labelled texts, split and in tokens."""

    source: str
    preparation: TextPreparation
    train: TensorData
    validation: TensorData | None
    """None when its share is 0."""
    test: TensorData | None
    samples: Mapping[Split, Samples]
    """The texts of each part as they were read."""

    def lines(self, split: Split) -> np.ndarray:
        """The line or file of each text."""
        return self.samples[split].names if split in self.samples else np.empty(0, np.int64)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.preparation.warnings

    @property
    def classes(self) -> list[Label]:
        return self.preparation.target.classes


def load_pairs(
    source: Path | str | Samples,
    options: Text | None = None,
    *,
    seed: int = 0,
    like: TextPreparation | None = None,
) -> TextData:
    """Read, split and prepare pairs of texts, for translation.

    Pairs with the same source, of a built-in set those of the same number or date, are in the same part.
    """
    samples = open_pairs(source, options or Text())
    options = samples.options
    if samples.answers is None:
        raise no_targets(samples, "pairs")
    answers = samples.answers
    rows = split_samples(samples, seed)
    first, second = (like.tokeniser, like.target_tokeniser) if like is not None else (None, None)
    first = first or fit_tokeniser(samples.texts[rows["train"]], options, PAIR_SPECIALS)
    second = second or fit_tokeniser(answers[rows["train"]], options, PAIR_SPECIALS)
    found = {"the sources": Unknown(), "the targets": Unknown()}
    tokens = encode(samples, samples.texts, first, found["the sources"])
    targets = encode(samples, answers, second, found["the targets"])
    notes = [*samples.notes, *small_note(first, options), *conflicts(samples), *unknown_notes(first, found)]

    most = options.length or max(map(len, [*tokens, *targets]))
    short = np.array([max(len(a), len(b)) <= most for a, b in zip(tokens, targets, strict=True)])
    if not short.all():
        notes.append(
            f"{(~short).sum()} of {len(samples)} pairs are longer than --text.length {most} and are left "
            f"out, the first {describe(samples.names[int((~short).argmax())])}"
        )
        rows = {split: part[short[part]] for split, part in rows.items() if short[part].any()}
        if "train" not in rows:
            raise DataError("no training pair is left", path=samples.source, fix="raise --text.length")
    kept = np.concatenate(list(rows.values()))
    length, target_length = (
        max(1, *(len(side[row]) + more for row in kept)) for side, more in ((tokens, 0), (targets, 1))
    )
    if like is not None:
        length, target_length = max(length, like.length), max(target_length, like.target_length)
    parts = {}
    for split, part in rows.items():
        fields = text_fields([tokens[row] for row in part], length, first)
        fields["target"] = target_field([targets[row] for row in part], target_length, second)
        parts[split] = TensorData(fields)
    preparation = TextPreparation(
        "pairs", first, length, second, target_length, warnings=tuple(notes)
    )  # fmt: skip
    return _text_data(samples, preparation, parts, rows)


def load_labelled(
    source: Path | str | Samples,
    options: Text | None = None,
    *,
    seed: int = 0,
    like: TextPreparation | None = None,
) -> TextData:
    """Read, split and prepare texts with a label each.

    Parts that the data has itself are kept; others are taken from its training part, stratified by class,
    and no text is in two of them.
    """
    samples = open_labelled(source, options or Text())
    options = samples.options
    if samples.codes is None or samples.labels is None:
        raise no_targets(samples, "labelled")
    target = Target(samples.label, samples.label_position, "classification", samples.labels)
    samples = _without_empty(samples)
    assert samples.codes is not None
    rows = split_samples(samples, seed)
    notes = [*samples.notes, *_check_classes(samples, target, rows), *repeated(samples, rows)]
    tokeniser = like.tokeniser if like is not None else None
    tokeniser = tokeniser or fit_tokeniser(samples.texts[rows["train"]], options, ("padding",))
    found = {"the texts": Unknown()}
    tokens = encode(samples, samples.texts, tokeniser, found["the texts"])
    notes += [*small_note(tokeniser, options), *unknown_notes(tokeniser, found)]

    training = [len(tokens[row]) for row in rows["train"]]
    length = options.length or max(1, int(np.quantile(training, COVERED, method="inverted_cdf")))
    length = like.length if like is not None else length
    notes += cut_note(tokens, length, samples.names, "texts")
    parts = {}
    for split, part in rows.items():
        fields = text_fields([tokens[row] for row in part], length, tokeniser)
        parts[split] = TensorData({**fields, "target": torch.from_numpy(samples.codes[part])})
    preparation = TextPreparation(
        "labelled", tokeniser, length, targets=(target,), column=samples.column, warnings=tuple(notes)
    )
    return _text_data(samples, preparation, parts, rows)


def _text_data(
    samples: Samples,
    preparation: TextPreparation,
    parts: Mapping[Split, TensorData],
    rows: Mapping[Split, np.ndarray],
) -> TextData:
    return TextData(
        samples.source,
        preparation,
        parts["train"],
        parts.get("validation"),
        parts.get("test"),
        {split: samples.take(rows[split]) for split in SPLITS if split in rows},
    )


def _without_empty(samples: Samples) -> Samples:
    empty = np.array([not text.strip() for text in samples.texts])
    if not empty.any():
        return samples
    if empty.all():
        raise DataError("every text is empty", path=samples.source, expected="texts with some characters")
    place = describe(samples.names[int(empty.argmax())])
    kept = samples.take(np.flatnonzero(~empty))
    return kept.noting(f"{empty.sum()} of {len(samples)} texts are empty and are left out, the first {place}")


def _check_classes(samples: Samples, target: Target, rows: Mapping[Split, np.ndarray]) -> list[str]:
    """Notes on classes with one training text; an error where there is only one class, or one that only
    other parts have."""
    assert samples.codes is not None
    everywhere, training = (
        np.bincount(codes, minlength=len(target.classes))
        for codes in (samples.codes, samples.codes[rows["train"]])
    )
    if (everywhere > 0).sum() < 2:
        raise DataError(
            f"one class only: {target.classes[int(everywhere.argmax())]!r}", path=samples.source,
            expected="at least two", fix="name the column of the labels with --text.label",
        )  # fmt: skip
    lost = [repr(target.classes[i]) for i in np.flatnonzero((training == 0) & (everywhere > 0))]
    if lost:
        raise DataError(
            f"no training text of class {', '.join(lost)}", path=samples.source,
            expected="each class of the other parts in the training part as well",
        )  # fmt: skip
    rare = [repr(target.classes[i]) for i in np.flatnonzero(training == 1)]
    return [f"one training text only of class {', '.join(rare[:10])}"] if rare else []
