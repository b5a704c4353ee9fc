"""Text to token numbers and back: characters, bytes, byte pairs.

Ordinary tokens are numbered from 0; the special ones that a use needs (padding, begin, end, unknown) come
after them, outside the text: no text is ever read as a special token.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from torch import Tensor

from quire.errors import InputError

Special = Literal["padding", "begin", "end", "unknown"]
Policy = Literal["refuse", "skip", "replace"]
REPLACEMENT = "\ufffd"
"""What an unknown token, and bytes that are no text, are shown as."""


class Tokeniser(ABC):
    """One text, one list of whole numbers from 0 to `vocab_size` - 1."""

    kind: ClassVar[str]
    special_names: tuple[Special, ...]
    policy: Policy = "refuse"
    """What is done with characters that there is no token for; bytes know them all."""

    @property
    @abstractmethod
    def pieces(self) -> tuple[bytes, ...]:
        """The UTF-8 bytes that each ordinary token stands for."""

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """(T,) int32."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def unknown_places(self, text: str) -> np.ndarray:
        """Where in the text characters stand that there is no token for."""
        return np.empty(0, np.int64)

    @cached_property
    def specials(self) -> dict[str, int]:
        """Number of each special token by its name."""
        first = len(self.pieces)
        return {name: first + i for i, name in enumerate(self.special_names)}

    @property
    def vocab_size(self) -> int:
        return len(self.pieces) + len(self.special_names)

    def decode(self, tokens: Iterable[int] | Tensor | np.ndarray) -> str:
        """The text of tokens up to the first end token. Padding, begin and negative numbers, which stand for
        ignored targets, say nothing."""
        stream = self.stream()
        return stream.push(tokens) + stream.finish()

    def stream(self) -> TextStream:
        """A decoder that takes tokens as they come."""
        return TextStream(self)

    def token_text(self, token: int) -> str:
        """One token in words a person can read, for pictures and tables."""
        if token < len(self.pieces):
            return self.pieces[token].decode("utf-8", "backslashreplace")
        return f"<{self.special_names[token - len(self.pieces)]}>"


class TextStream:
    """Tokens to text, piece by piece: a character whose bytes are not all there yet is held back."""

    def __init__(self, tokeniser: Tokeniser) -> None:
        self._pieces = tokeniser.pieces
        self._end = tokeniser.specials.get("end")
        self._unknown = tokeniser.specials.get("unknown")
        self._size = tokeniser.vocab_size
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.ended = False
        """Whether an end token has come; nothing is said after it."""

    def push(self, tokens: int | Iterable[int] | Tensor | np.ndarray) -> str:
        """The characters that are complete with these tokens."""
        if isinstance(tokens, Tensor | np.ndarray):
            tokens = tokens.tolist()
        content = bytearray()
        for token in [tokens] if isinstance(tokens, int) else tokens:
            if token >= self._size:
                raise InputError(f"token {token}", expected=f"a number below {self._size}, the vocabulary")
            if self.ended or token == self._end:
                self.ended = True
                break
            if 0 <= token < len(self._pieces):
                content += self._pieces[token]
            elif token == self._unknown:
                content += REPLACEMENT.encode()
        return self._decoder.decode(bytes(content))

    def finish(self) -> str:
        """What was held back, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True)
class Characters(Tokeniser):
    """A token for each character of the training part, in the order of their code points."""

    alphabet: str
    special_names: tuple[Special, ...] = ()
    policy: Policy = "refuse"

    kind = "characters"

    def __post_init__(self) -> None:
        if list(self.alphabet) != sorted(set(self.alphabet)) or not self.alphabet:
            raise InputError("an alphabet that is empty or not in order", expected="each character once")
        if ("unknown" in self.special_names) != (self.policy == "replace"):
            raise InputError(
                f"unknown characters: {self.policy}, special tokens: {self.special_names}",
                expected="a token 'unknown' exactly where unknown characters are replaced",
            )

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        return tuple(character.encode("utf-8", "surrogatepass") for character in self.alphabet)

    @cached_property
    def _numbers(self) -> np.ndarray:
        """Token of each code point up to the last one known, and one beyond; -1 where there is none."""
        points = code_points(self.alphabet)
        table = np.full(int(points[-1]) + 2, -1, np.int32)
        table[points] = np.arange(len(points))
        return table

    def _codes(self, text: str) -> np.ndarray:
        table = self._numbers
        return table[np.minimum(code_points(text), len(table) - 1)]

    def unknown_places(self, text: str) -> np.ndarray:
        return np.flatnonzero(self._codes(text) < 0)

    def encode_array(self, text: str) -> np.ndarray:
        codes = self._codes(text)
        unknown = codes < 0
        if not unknown.any():
            return codes
        if self.policy == "refuse":
            place = int(unknown.argmax())
            raise InputError(
                f"{named(text[place])} {place_in(text, place)} was not in the training text",
                expected="characters that the model was trained on",
                fix="take it out, or train with --text.unknown replace or skip, or with --text.tokens bytes",
            )
        if self.policy == "skip":
            return codes[~unknown]
        return np.where(unknown, np.int32(self.specials["unknown"]), codes)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "alphabet": self.alphabet,
            "specials": list(self.special_names),
            "policy": self.policy,
        }


@dataclass(frozen=True)
class Bytes(Tokeniser):
    """A token for each of the 256 bytes of UTF-8."""

    special_names: tuple[Special, ...] = ()

    kind = "bytes"

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        return tuple(bytes([value]) for value in range(256))

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(to_bytes(text), np.uint8).astype(np.int32)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "specials": list(self.special_names)}


def code_points(text: str) -> np.ndarray:
    """(T,) uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def to_bytes(text: str) -> bytes:
    """UTF-8; half of a surrogate pair, which no file holds, is an error."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{named(text[error.start])} {place_in(text, error.start)} is no character",
            expected="text that can be written in UTF-8",
        ) from None


def named(character: str) -> str:
    """ "the character 'ß' (U+00DF)"."""
    return f"the character {character!r} (U+{ord(character):04X})"


def place_in(text: str, place: int) -> str:
    """ "at character 5", with its line where there are several; both counted from 1."""
    line = text.count("\n", 0, place) + 1
    column = place - (text.rfind("\n", 0, place) + 1) + 1
    return f"in line {line}, at character {column}," if "\n" in text else f"at character {column}"


def special_names(entry: Mapping[str, Any]) -> tuple[Special, ...]:
    """The special tokens of a saved tokeniser; TypeError where they are none."""
    names = tuple(entry["specials"])
    if len(set(names)) < len(names) or not set(names) <= set(get_args(Special)):
        raise TypeError(f"special tokens {names}")
    return names


def specials_for(needed: Sequence[Special], policy: Policy, kind: str) -> tuple[Special, ...]:
    """The special tokens of a use, with one for unknown characters where they are replaced."""
    return (*needed, "unknown") if kind == "characters" and policy == "replace" else tuple(needed)
