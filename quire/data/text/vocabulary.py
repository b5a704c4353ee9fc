"""Tokenisers made from a training text, and made again from what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from quire.data.text.bytepairs import BytePairs, train_byte_pairs
from quire.data.text.tokenisers import (
    Bytes,
    Characters,
    Policy,
    Special,
    Tokeniser,
    code_points,
    special_names,
    specials_for,
)
from quire.errors import InputError
from quire.options import Text

POINTS = 0x110000
"""Code points that Unicode has."""


def fit_tokeniser(texts: Iterable[str], options: Text, needed: Sequence[Special] = ()) -> Tokeniser:
    """The tokeniser of the options, learned from the training texts, which are gone over once."""
    names = specials_for(needed, options.unknown, options.tokens)
    if options.tokens == "bytes":
        return Bytes(names)
    if options.tokens == "bpe":
        return train_byte_pairs(texts, options.vocabulary, names)
    return Characters(find_alphabet(texts), names, options.unknown)


def find_alphabet(texts: Iterable[str]) -> str:
    """The distinct characters in the order of their code points."""
    seen = np.zeros(POINTS, bool)
    for text in texts:
        seen[code_points(text)] = True
    return "".join(map(chr, np.flatnonzero(seen).tolist()))


def _characters(entry: Mapping[str, Any]) -> Tokeniser:
    if entry["policy"] not in get_args(Policy):
        raise TypeError(f"unknown characters {entry['policy']!r}")
    return Characters(entry["alphabet"], special_names(entry), entry["policy"])


def _bytes(entry: Mapping[str, Any]) -> Tokeniser:
    return Bytes(special_names(entry))


def _byte_pairs(entry: Mapping[str, Any]) -> Tokeniser:
    made = BytePairs(entry["model"], special_names(entry))
    if len(made.pieces) < 256:  # reads the model as well, so a damaged one is found here
        raise TypeError("fewer tokens than bytes")
    return made


_READERS: dict[str, Callable[[Mapping[str, Any]], Tokeniser]] = {
    "characters": _characters,
    "bytes": _bytes,
    "bpe": _byte_pairs,
}


def tokeniser_from_json(entry: Mapping[str, Any]) -> Tokeniser:
    """The tokeniser that `to_json` described."""
    try:
        return _READERS[entry["kind"]](entry)
    except Exception as error:  # the library raises Exception itself for a model that it cannot read
        raise InputError(f"a damaged tokeniser ({error})", expected="what to_json wrote") from None


def small_note(tokeniser: Tokeniser, options: Text) -> list[str]:
    """A note where the training text was too short for the vocabulary that was asked for."""
    if options.tokens != "bpe" or len(tokeniser.pieces) >= options.vocabulary:
        return []
    return [
        f"the training text gives {len(tokeniser.pieces)} tokens; --text.vocabulary asks for "
        f"{options.vocabulary}"
    ]
