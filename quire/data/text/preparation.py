"""What was learned about text in training: its tokens, their lengths, its classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from quire.data.batch import Data, TensorData
from quire.data.columns import Label, Target, column_from_json
from quire.data.preparation import check_format
from quire.data.text.corpus import Corpus, Unknown, encode_blocks, open_corpus, unknown_notes, whole_words
from quire.data.text.labelled import open_labelled
from quire.data.text.pairs import open_pairs
from quire.data.text.samples import Column, Samples, cut_note, encode, lengths, pad, translate
from quire.data.text.tokenisers import Tokeniser
from quire.data.text.vocabulary import tokeniser_from_json
from quire.data.text.windows import IGNORE, TensorTokens, TokenWindows
from quire.errors import DataError, InputError
from quire.options import Text

FORMAT = "quire.text"
VERSION = 1
Kind = Literal["language", "pairs", "labelled"]


@dataclass(frozen=True, eq=False)
class PreparedText:
    """Text ready for a model."""

    data: Data
    """"inputs" (N, T) int64. language: also "target" (N, T), the token after each. pairs and labelled: also
    "lengths" (N,), and with targets "target": (N, T) ending in the end token, or (N,) class numbers."""
    lines: np.ndarray
    """(N,) line or file of each text; of a language model the number of the row's first token."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class TextPreparation:
    """Everything learned about text in training; saved with the model and applied at predict."""

    kind: Kind
    tokeniser: Tokeniser
    """Of the source, where there are pairs."""
    length: int
    """Tokens of the context, of the longest source, or of the longest labelled text."""
    target_tokeniser: Tokeniser | None = None
    target_length: int = 0
    """Tokens of the longest target of a pair, its end token included."""
    targets: tuple[Target, ...] = ()
    """The classes of labelled texts; the tokens of other text are no columns."""
    column: Column | None = None
    """Where the texts of a labelled table stood."""
    warnings: tuple[str, ...] = ()

    @property
    def target(self) -> Target:
        if not self.targets:
            raise InputError(f"text of kind '{self.kind}' has no classes", expected="labelled text")
        return self.targets[0]

    @property
    def feature_names(self) -> list[str]:
        """Tokens have no names."""
        return []

    def read(self, path: Path | str, options: Text | None = None) -> Corpus | Samples:
        """Text to predict on or to be judged by: anything that can be trained on, also without targets."""
        options = options or Text()
        if self.kind == "language":
            return open_corpus(path, options)
        if self.kind == "pairs":
            return open_pairs(path, options, plain=True)
        return open_labelled(path, options, None if self.column is None else (self.column, self.target))

    def transform(self, source: Corpus | Samples, need_target: bool = False) -> PreparedText:
        """All of the text, in tokens and classes of training."""
        if self.kind == "language":
            assert isinstance(source, Corpus)
            return self._transform_corpus(source)
        assert isinstance(source, Samples)
        if need_target and (source.answers if self.kind == "pairs" else source.codes) is None:
            raise no_targets(source, self.kind)
        found = {"the texts": Unknown(), "the targets": Unknown()}
        tokens = encode(source, source.texts, self.tokeniser, found["the texts"])
        data = TensorData(text_fields(tokens, self.length, self.tokeniser))
        if need_target and self.kind == "pairs":
            assert source.answers is not None
            assert self.target_tokeniser is not None
            answers = encode(source, source.answers, self.target_tokeniser, found["the targets"])
            width = max(self.target_length, 1 + max(map(len, answers)))
            data.fields["target"] = target_field(answers, width, self.target_tokeniser)
        elif need_target:
            data.fields["target"] = translate(source, self.target.classes)
        notes = [*source.notes, *unknown_notes(self.tokeniser, found)]
        notes += cut_note(tokens, self.length, source.names, "texts")
        return PreparedText(data, source.names, tuple(notes))

    def _transform_corpus(self, corpus: Corpus) -> PreparedText:
        unknown = Unknown()
        blocks = whole_words(corpus.part(0, corpus.characters))
        tokens = np.concatenate(list(encode_blocks(blocks, self.tokeniser, unknown)))
        if len(tokens) < 2:
            raise DataError(
                f"a text of {len(tokens)} tokens", path=corpus.source,
                expected="at least two: one to be predicted from the other",
            )  # fmt: skip
        context = self.length
        windows = TokenWindows(
            TensorTokens.of(tokens, self.tokeniser.vocab_size), context, context, partial=True
        )
        notes = [*corpus.notes, *unknown_notes(self.tokeniser, {"the text": unknown})]
        return PreparedText(windows, windows.places().numpy(), tuple(notes))

    def decode_classes(self, indices: Tensor | Sequence[int], target: int = 0) -> list[Label]:
        """Class numbers back to labels."""
        classes = self.targets[target].classes
        numbers = indices.tolist() if isinstance(indices, Tensor) else indices
        return [classes[int(i)] for i in numbers]

    def decode(self, rows: Tensor) -> list[str]:
        """Rows of tokens (N, T), such as predicted targets, back to texts."""
        tokeniser = self.target_tokeniser or self.tokeniser
        return [tokeniser.decode(row) for row in rows.cpu()]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "tokeniser": self.tokeniser.to_json(),
            "length": self.length,
            "target_tokeniser": None if self.target_tokeniser is None else self.target_tokeniser.to_json(),
            "target_length": self.target_length,
            "targets": [asdict(target) for target in self.targets],
            "column": None if self.column is None else asdict(self.column),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> TextPreparation:
        check_format(entry, FORMAT, VERSION)
        try:
            kind, second, column = entry["kind"], entry["target_tokeniser"], entry["column"]
            targets = tuple(column_from_json(Target, target) for target in entry["targets"])
            good = (
                kind in get_args(Kind)
                and type(entry["length"]) is type(entry["target_length"]) is int
                and entry["length"] > 0
                and (second is not None) == (kind == "pairs") == (entry["target_length"] > 0)
                and (len(targets) == 1 and bool(targets[0].classes)) == (kind == "labelled")
            )
            if not good:
                raise TypeError("a value that cannot be")
            return cls(
                kind,
                tokeniser_from_json(entry["tokeniser"]),
                entry["length"],
                None if second is None else tokeniser_from_json(second),
                entry["target_length"],
                targets,
                None if column is None else Column(**column),
                tuple(entry["warnings"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"a damaged preparation ({error})", expected="what to_json wrote") from None


def text_fields(tokens: Sequence[np.ndarray], length: int, tokeniser: Tokeniser) -> dict[str, Tensor]:
    padded = pad(tokens, length, tokeniser.specials["padding"])
    return {"inputs": padded, "lengths": lengths(tokens, length)}


def target_field(tokens: Sequence[np.ndarray], width: int, tokeniser: Tokeniser) -> Tensor:
    """(N, width): the tokens of each target, the end token, then `IGNORE`."""
    end = np.array([tokeniser.specials["end"]], np.int32)
    return pad([np.concatenate([row, end]) for row in tokens], width, IGNORE)


def no_targets(samples: Samples, kind: Kind) -> DataError:
    if kind == "pairs":
        return DataError(
            "lines without a target", path=samples.source, expected="source, a tab, target on each line"
        )
    return DataError(
        "texts without labels", path=samples.source,
        expected="a column of labels beside the texts, or a folder with one sub-folder for each class",
        fix="name the column of the labels with --text.label",
    )  # fmt: skip
