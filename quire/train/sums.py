"""Named quantities that add up: weights, terms, tallies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def add_to(total: dict[str, T], part: Mapping[str, T]) -> None:
    """total += part, name by name; a name that is new begins with the part's value."""
    for name, value in part.items():
        total[name] = total[name] + value if name in total else value  # type: ignore[operator]


def add_up(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    total: dict[str, T] = {}
    for part in parts:
        add_to(total, part)
    return total
