"""Tokens of a text that does not fit in memory: encoded once into a file, then read through a memory map.

    NAME-KEY.bin     the tokens of all parts one after the other, uint16 or uint32, little-endian
    NAME-KEY.json    tokeniser, number of tokens of each part, and the SHA-256 of the other file

KEY is made of the fingerprint of the text and of every option that changes its tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from quire.data.images.hashing import fingerprint
from quire.data.loaded import Split
from quire.data.opening import opened, read_bytes
from quire.data.text.files import BLOCK
from quire.data.text.tokenisers import Tokeniser
from quire.data.text.vocabulary import tokeniser_from_json
from quire.errors import DataError
from quire.files import replacing
from quire.options import Text

FORMAT = "quire.tokens"
VERSION = 1


@dataclass(frozen=True, eq=False)
class TokenFile:
    """What a token file holds; `parts` lie on the disk until they are looked at."""

    tokeniser: Tokeniser
    parts: Mapping[Split, np.ndarray]
    notes: tuple[str, ...]


def key_of(source: Path | str, options: Text, like: Tokeniser | None) -> str:
    """One word for a text and the way it is made into tokens."""
    chosen = {
        "version": VERSION,
        "text": fingerprint(source),
        "tokens": [options.tokens, options.vocabulary, options.unknown, options.on_bad_utf8],
        "suffixes": list(options.suffixes),
        "shares": [options.validation, options.test],
        "like": None if like is None else like.to_json(),
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:24]


def read_token_file(path: Path) -> TokenFile | None:
    """The tokens at `path` (without its ending), or None where there are none or they are damaged."""
    try:
        entry = json.loads(read_bytes(path.with_suffix(".json")))
        counts, kind = entry["counts"], np.dtype({2: "<u2", 4: "<u4"}[entry["bytes"]])
        tokeniser, notes = tokeniser_from_json(entry["tokeniser"]), tuple(map(str, entry["notes"]))
        binary = path.with_suffix(".bin")
        good = (
            (entry["format"], entry["version"]) == (FORMAT, VERSION)
            and "train" in counts
            and counts.keys() <= set(get_args(Split))
            and min(counts.values()) >= 0
            and binary.stat().st_size == sum(counts.values()) * kind.itemsize
            and _has(binary, entry["sha256"], kind, tokeniser.vocab_size)
        )
        if not good:
            return None
        tokens = np.memmap(binary, kind, mode="r")
        ends = np.cumsum(list(counts.values())).tolist()
        parts = {part: tokens[end - counts[part] : end] for part, end in zip(counts, ends, strict=True)}
    except Exception:  # whatever is wrong with it, it is made again
        return None
    return TokenFile(tokeniser, parts, notes)


def write_token_file(
    path: Path, tokeniser: Tokeniser, parts: Iterator[tuple[Split, np.ndarray]], notes: list[str]
) -> TokenFile:
    """Write `parts`, stretch by stretch in their order. The description comes last, so what is described is
    whole. `notes` may grow while the parts are made."""
    kind = np.dtype("<u2" if tokeniser.vocab_size <= 2**16 else "<u4")
    counts: dict[Split, int] = {}
    total = hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path.with_suffix(".bin")) as file:
            for part, tokens in parts:
                content = tokens.astype(kind).tobytes()
                counts[part] = counts.get(part, 0) + len(tokens)
                total.update(content)
                file.write(content)
        entry: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "bytes": kind.itemsize,
            "counts": counts,
            "sha256": total.hexdigest(),
            "tokeniser": tokeniser.to_json(),
            "notes": notes,
        }
        with replacing(path.with_suffix(".json")) as file:
            file.write(json.dumps(entry, ensure_ascii=False).encode())
    except OSError as error:
        raise DataError(
            f"the tokens of a text that is larger than --text.memory cannot be written: {error.strerror}",
            path=error.filename or path,
            expected="a folder that can be written to, with room for two or four bytes a token",
            fix="name one with --text.cache, or raise --text.memory",
        ) from None
    written = read_token_file(path)
    if written is None:
        raise DataError("tokens that were just written cannot be read again", path=path.with_suffix(".bin"))
    return written


def _has(path: Path, digest: str, kind: np.dtype[Any], below: int) -> bool:
    """Whether a file has this SHA-256 and its tokens are all less than `below`."""
    total = hashlib.sha256()
    with opened(path) as file:
        while content := file.read(BLOCK):
            total.update(content)
            if np.frombuffer(content, kind).max() >= below:
                return False
    return total.hexdigest() == digest
