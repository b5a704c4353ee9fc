"""Texts to learn from: as they are, in tokens, in pairs, with labels."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from quire.data.text import load_corpus
from quire.options import Text
from tests.faults import bombs, payloads
from tests.faults.hostile_files.case import Case, Make, endless, lay
from tests.faults.hostile_files.runs import put, signed

WORDS = b"the cat sees water. a dog likes rain.\n" * 40
FROM_DISK = 1e-9
"""GiB of --text.memory, so that every text is made into tokens on the disk."""


def texts() -> Iterator[Case]:
    for name in ("system", "exec", "by hand"):
        content = payloads.pickles()[name]
        yield Case(
            f"text.txt that is a pickle, {name}", "text", lay("text.txt", content), refused=b"\0" in content
        )
    yield from _no_texts("text", "text.txt")
    yield Case("folder with a link to /dev/zero", "text", _linked_text)
    yield from endless("text in a folder", "text", "set/text.txt", "set", lay("set/good.txt", WORDS))


def _no_texts(kind: str, name: str) -> Iterator[Case]:
    yield Case(f"{name} of zero bytes", kind, lay(name, bytes(1000)))
    yield Case(f"{name} of gzip", kind, lay(name, lambda: payloads.gzip_bomb(20)))
    yield Case(f"{name} in UTF-16", kind, lay(name, "text".encode("utf-16")))
    yield Case(f"{name} of surrogates", kind, lay(name, b"\xed\xa0\x80" * 100))
    yield Case(f"{name} of nothing", kind, lay(name, b""))
    yield from endless(name, kind, name)


def _linked_text(folder: Path, _: Path) -> Path:
    (folder / "set").mkdir()
    (folder / "set" / "text.txt").symlink_to("/dev/zero")
    return folder / "set"


def pairs() -> Iterator[Case]:
    for name, content in payloads.pickles().items():
        yield Case(f"pairs.tsv that is a pickle, {name}", "pairs", lay("pairs.tsv", content))
    yield from _no_texts("pairs", "pairs.tsv")
    yield Case("pairs.tsv of a million columns", "pairs", lay("pairs.tsv", b"\t" * 10**6))
    yield Case("pairs.tsv of a million empty sides", "pairs", lay("pairs.tsv", b"\t\n" * 10**6))


def labels() -> Iterator[Case]:
    for name, content in payloads.pickles().items():
        yield Case(f"labels.csv that is a pickle, {name}", "labels", lay("labels.csv", content))
    yield from _no_texts("labels", "labels.csv")
    yield Case("labels.parquet of texts", "labels", lambda folder, _: bombs.texts(folder))
    yield from endless("text of a class", "labels", "set/a/text.txt", "set", lay("set/b/good.txt", WORDS))


# What was once made of a text, beside it; where it is no good it is made again ------------------


def tokens() -> Iterator[Case]:
    again = partial(Case, kind="tokens", refused=False)
    for ending in ("json", "bin"):
        yield again(f"tokens' .{ending} that is a link to /dev/zero", make=_with_tokens(ending, _zeros))
        yield again(f"tokens' .{ending} that is a pipe", make=_with_tokens(ending, _pipe))
    for name, content in {**payloads.bad_json(), **payloads.pickles()}.items():
        write = partial(Path.write_bytes, data=content)
        yield again(f"tokens' description: {name}", make=_with_tokens("json", write))
    changes: dict[str, Callable[[Any], Any]] = {
        "of 2**62 tokens": put("counts", value={"train": 2**62, "validation": -(2**62)}),
        "of no training part": put("counts", value={"test": len(WORDS)}),
        "of parts that are none": put("counts", value={"train": 0, "\0": len(WORDS)}),
        "of a tokeniser that is none": put("tokeniser", value={"kind": "bpe", "model": "[" * 100_000}),
        "of an endless sum": put("counts", value={"train": 0}),
    }
    for name, change in changes.items():
        yield again(f"tokens {name}", make=_with_tokens("json", partial(_rewrite, change)))
    yield again("tokens that their tokeniser does not have", make=_with_tokens("bin", _beyond))


def _with_tokens(ending: str, lay_down: Callable[[Path], object]) -> Make:
    """Good tokens of a good text, of whose two files one has been replaced."""

    def make(folder: Path, runs: Path) -> Path:
        path = lay("text.txt", WORDS)(folder, runs)
        load_corpus(path, Text(context=8, memory=FROM_DISK))
        (found,) = (folder / "text.txt.tokens").glob(f"*.{ending}")
        if lay_down in (_zeros, _pipe):
            found.unlink()
        lay_down(found)
        return path

    return make


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")
    if path.suffix == ".bin":  # a device has no bytes by its size
        _rewrite(put("counts", value={"train": 0}), path.with_suffix(".json"))


def _pipe(path: Path) -> None:
    os.mkfifo(path)
    if path.suffix == ".bin":
        _rewrite(put("counts", value={"train": 0}), path.with_suffix(".json"))


def _rewrite(change: Callable[[Any], Any], path: Path) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _beyond(path: Path) -> None:
    content = b"\xff" * path.stat().st_size
    path.write_bytes(content)
    _rewrite(put("sha256", value=hashlib.sha256(content).hexdigest()), path.with_suffix(".json"))


# Runs that write --------------------------------------------------------------------------------


def writers() -> Iterator[Case]:
    for name, content in payloads.pickles().items():
        made = signed("weights.safetensors", content, run="text")
        yield Case(f"text's weights that are a pickle, {name}", "run of text", made)
    for name, content in payloads.bad_json().items():
        made = signed("preparation.json", content, run="text")
        yield Case(f"text's preparation: {name}", "run of text", made)
