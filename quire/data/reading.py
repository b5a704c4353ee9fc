"""Saved preparations of every kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.data.loaded import Prepares
from quire.data.preparation import FORMAT, Preparation


def read_preparation(entry: Mapping[str, Any]) -> Prepares:
    """The preparation that `to_json` wrote, of the kind that its format says."""
    from quire.data.images import preparation as images
    from quire.data.text import preparation as text

    kinds: dict[Any, Any] = {
        FORMAT: Preparation,
        images.FORMAT: images.ImagePreparation,
        text.FORMAT: text.TextPreparation,
    }
    kind = next((kind for format_, kind in kinds.items() if format_ == entry.get("format")), Preparation)
    found: Prepares = kind.from_json(entry)
    return found
