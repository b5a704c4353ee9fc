"""Text: files to tokens, windows, pairs and labelled texts. Names load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "builtin": ("CORPORA", "LABELLED", "PAIRS"),
    "bytepairs": ("BytePairs", "train_byte_pairs"),
    "corpus": ("Corpus", "open_corpus"),
    "labelled": ("open_labelled",),
    "language": ("CorpusData", "load_corpus"),
    "load": ("TextData", "load_labelled", "load_pairs"),
    "pairs": ("open_pairs",),
    "preparation": ("PreparedText", "TextPreparation"),
    "samples": ("Samples",),
    "tokenisers": ("Bytes", "Characters", "TextStream", "Tokeniser"),
    "vocabulary": ("fit_tokeniser", "tokeniser_from_json"),
    "windows": ("IGNORE", "MappedTokens", "TensorTokens", "TokenStreams", "TokenWindows"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"quire.data.text.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'quire.data.text' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__all__)
