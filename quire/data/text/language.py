"""One call from a text to the training, validation and test part of a language model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quire.data.loaded import Split
from quire.data.text.corpus import (
    Corpus,
    Unknown,
    bounds,
    encode_blocks,
    open_corpus,
    unknown_notes,
    whole_words,
)
from quire.data.text.preparation import TextPreparation
from quire.data.text.tokenfile import key_of, read_token_file, write_token_file
from quire.data.text.tokenisers import Tokeniser
from quire.data.text.vocabulary import fit_tokeniser, small_note
from quire.data.text.windows import (
    MappedTokens,
    TensorTokens,
    Tokens,
    TokenStreams,
    TokenWindows,
    smallest_type,
)
from quire.errors import DataError, InputError
from quire.options import Text

TOKEN_BYTES = 4
"""Of a token in memory, at most."""
MOST_ROWS = 2**26
"""Training windows, whose order is drawn anew each epoch; a longer text has its windows further apart."""


@dataclass(frozen=True, eq=False)
class CorpusData:
    """A text, split and in tokens."""

    source: str
    preparation: TextPreparation
    train: TokenWindows
    """A row for each place that a whole window can start at."""
    validation: TokenWindows | None
    """Windows side by side, each token predicted once. None when its share is 0."""
    test: TokenWindows | None
    first: Mapping[Split, int]
    """Number of the first token of each part, counted through the whole text."""

    def lines(self, split: Split) -> np.ndarray:
        """The number of the first token of each row, in the whole text."""
        part: TokenWindows | None = getattr(self, split)
        return np.empty(0, np.int64) if part is None else part.places().numpy() + self.first[split]

    def streams(self, split: Split, batch_size: int) -> TokenStreams | None:
        """A part as parallel streams that go on from batch to batch."""
        part: TokenWindows | None = getattr(self, split)
        return None if part is None else part.streams(batch_size)

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.preparation.warnings


def load_corpus(
    source: Path | str | Corpus,
    options: Text | None = None,
    *,
    seed: int = 0,
    like: TextPreparation | None = None,
    cache: Path | None = None,
) -> CorpusData:
    """Read a text, cut it into training, validation and test part in this order, and make it into tokens.

    `source` is a file, a folder or the name of a built-in text. The tokeniser comes from the training part
    alone, or with `like` from an older preparation, whose model is to be taken over. A text larger than
    `options.memory` is encoded once into a file in `cache`, `options.cache`, or a folder beside the text.
    The parts are stretches of the text, so `seed` changes nothing here.
    """
    corpus = open_corpus(source, options or Text())
    options = corpus.options
    given = None if like is None else like.tokeniser
    parts: dict[Split, Tokens]
    if corpus.size * TOKEN_BYTES <= options.memory * 2**30 or not corpus.files:
        tokeniser, notes = _fit(corpus, given)
        collected: dict[Split, list[np.ndarray]] = {}
        kind = smallest_type(tokeniser.vocab_size)
        for split, tokens in _encode(corpus, tokeniser, notes):
            collected.setdefault(split, []).append(tokens.astype(kind))
        parts = {
            split: TensorTokens(torch.from_numpy(np.concatenate(found))) for split, found in collected.items()
        }
    else:
        folder = cache or options.cache or Path(f"{corpus.source.rstrip('/')}.tokens")
        if Path(corpus.source).resolve() in folder.resolve().parents:
            raise InputError(
                f"--text.cache {folder} lies in the folder of the text",
                expected="another folder: what is written there would change the text's fingerprint",
            )
        path = folder / f"{Path(corpus.source).stem}-{key_of(corpus.source, options, given)}.bin"
        file = read_token_file(path)
        if file is None:
            tokeniser, notes = _fit(corpus, given)
            file = write_token_file(path, tokeniser, _encode(corpus, tokeniser, notes), notes)
        tokeniser, notes = file.tokeniser, list(file.notes)
        parts = {split: MappedTokens(tokens) for split, tokens in file.parts.items()}
    return _windows(corpus, parts, tokeniser, notes)


def _fit(corpus: Corpus, given: Tokeniser | None) -> tuple[Tokeniser, list[str]]:
    """The tokeniser of the training part, and what there is to say so far."""
    start, stop = bounds(corpus.characters, corpus.options)["train"]
    if given is not None:
        return given, list(corpus.notes)
    if not stop:
        raise _too_short(corpus, "train", 0, corpus.options.context + 1)
    blocks = whole_words(corpus.part(start, stop))
    tokeniser = fit_tokeniser((block.text for block in blocks), corpus.options)
    return tokeniser, [*corpus.notes, *small_note(tokeniser, corpus.options)]


def _encode(corpus: Corpus, tokeniser: Tokeniser, notes: list[str]) -> Iterator[tuple[Split, np.ndarray]]:
    """Tokens of each part in order; `notes` grow by what was found in them."""
    found: dict[str, Unknown] = {}
    for split, (start, stop) in bounds(corpus.characters, corpus.options).items():
        unknown = found[f"the {'training' if split == 'train' else split} part"] = Unknown()
        yield split, np.empty(0, np.int32)  # a part without characters is a part as well
        for tokens in encode_blocks(whole_words(corpus.part(start, stop)), tokeniser, unknown):
            yield split, tokens
    notes += unknown_notes(tokeniser, found)


def _windows(
    corpus: Corpus, parts: Mapping[Split, Tokens], tokeniser: Tokeniser, notes: list[str]
) -> CorpusData:
    context = corpus.options.context
    made: dict[Split, TokenWindows] = {}
    first: dict[Split, int] = {}
    done = 0
    for split, tokens in parts.items():
        needed = context + 1 if split == "train" else 2
        if len(tokens) < needed:
            raise _too_short(corpus, split, len(tokens), needed)
        first[split] = done
        done += len(tokens)
        stride = min(context, math.ceil((len(tokens) - context) / MOST_ROWS))
        made[split] = (
            TokenWindows(tokens, context, stride)
            if split == "train"
            else TokenWindows(tokens, context, context, partial=True)
        )
    if made["train"].stride > 1:
        notes.append(f"training windows start at each {made['train'].stride}th token: the text is very long")
    preparation = TextPreparation("language", tokeniser, context, warnings=tuple(notes))
    return CorpusData(
        corpus.source, preparation, made["train"], made.get("validation"), made.get("test"), first
    )


def _too_short(corpus: Corpus, split: Split, count: int, needed: int) -> DataError:
    name = "training" if split == "train" else split
    share = f"set --text.{split} to 0" if split != "train" else f"set --text.context to at most {count - 1}"
    return DataError(
        f"{count} token{'s' * (count != 1)} in the {name} part", path=corpus.source,
        expected=f"at least {needed}" + (", a context and the token after it" if split == "train" else ""),
        fix="give more text" + (f", or {share}" if split != "train" or count > 1 else ""),
    )  # fmt: skip
