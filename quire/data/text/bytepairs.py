"""Byte pair encoding, trained on the spot by the `tokenizers` library.

The text is first cut into words with their leading space, numbers, signs and white space; a token never
reaches over such a cut, which is always one where white space follows something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.data.text.tokenisers import Special, Tokeniser, to_bytes
from quire.errors import InputError

PIECE = 2**16
"""Characters that are encoded at once: the library's time and memory grow with the length of a text."""
_CUT = re.compile(r"(?<=\S)[ \t\r\n]")


@dataclass(frozen=True)
class BytePairs(Tokeniser):
    """Tokens of one byte or several, joined pair by pair in the order of how often they stood together."""

    model: str
    """What `tokenizers` writes: JSON, with the tokens and the pairs in order."""
    special_names: tuple[Special, ...] = ()

    kind = "bpe"

    def __post_init__(self) -> None:
        entry = json.loads(self.model)
        if entry["model"]["type"] != "BPE" or entry["added_tokens"]:
            raise InputError("a tokeniser that is no plain byte pair encoding", expected="what to_json wrote")

    @cached_property
    def _tokenizer(self) -> Any:
        return Tokenizer.from_str(self.model)

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        byte_of = {sign: value for value, sign in enumerate(byte_signs())}
        tokens = [self._tokenizer.id_to_token(i) for i in range(self._tokenizer.get_vocab_size())]
        return tuple(bytes(byte_of[sign] for sign in token) for token in tokens)

    def encode_array(self, text: str) -> np.ndarray:
        to_bytes(text)  # what is no character is refused in the same words as elsewhere
        parts = self._tokenizer.encode_batch_fast(list(cut(text, PIECE)), add_special_tokens=False)
        return np.concatenate([np.array(part.ids, np.int32) for part in parts] or [np.empty(0, np.int32)])

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "model": self.model, "specials": list(self.special_names)}


def train_byte_pairs(texts: Iterable[str], size: int, special_names: tuple[Special, ...] = ()) -> BytePairs:
    """At most `size` tokens learned from the texts; the same texts give the same tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    # With every single byte among the tokens, any text can be written.
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=byte_signs(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator((part for text in texts for part in cut(text, PIECE)), trainer)
    return BytePairs(tokenizer.to_str(), special_names)


def cut(text: str, size: int) -> Iterator[str]:
    """Parts of about `size` characters, cut before white space that follows something else, where encoding
    the parts and encoding the whole are the same; anywhere in a text that has no such place."""
    start = 0
    while len(text) - start > size:
        stop = last_cut(text, start + 1, start + size) or start + size
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def last_cut(text: str, start: int, stop: int) -> int | None:
    """The last place in [start, stop] before which a text may be cut, None where there is none."""
    width = 256
    while True:  # most texts have one near the end
        low = max(start, stop - width)
        found = [match.start() for match in _CUT.finditer(text, low, min(stop + 1, len(text)))]
        if found:
            return found[-1]
        if low == start:
            return None
        width *= 8


def byte_signs() -> list[str]:
    """The printable sign that stands for each byte in the library's byte-level vocabulary: itself where it is
    printable in Latin-1, the code points from 256 on for the others, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(spare)) for value in range(256)]
