"""Numbers that steps leave on a device, a row each, until somebody asks for them.

To take the numbers of a step out of a recording would be one more launch a step. So a recording writes them
into the next row of a page by itself, and only full pages are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Page:
    """Rows of numbers: the device's own memory until the page is full, then a copy."""

    values: Tensor


@dataclass(slots=True)
class Row:
    """What one step has left."""

    page: Page
    number: int
    columns: Mapping[str, int]
    """Which number is called what."""

    def values(self) -> Tensor:
        return self.page.values[self.number]


def alone(numbers: Tensor) -> tuple[Page, int]:
    """A page of one row, and its number."""
    return Page(numbers.unsqueeze(0)), 0
