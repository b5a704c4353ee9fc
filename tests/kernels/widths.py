"""The loops in C++ as processors with other registers run them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.kernels import host

WIDTHS = ["plain", "wider", "widest"]


@contextmanager
def limited(width: str) -> Iterator[None]:
    """With registers of no more than this width, where the loops were compiled."""
    library = host.library()
    if library is None:
        pytest.skip("no compiler when Quire was installed")
    if library.quire_width() < WIDTHS.index(width):
        pytest.skip(f"this processor does not have the {width} registers")
    library.quire_limit_width(WIDTHS.index(width))
    try:
        yield
    finally:
        library.quire_limit_width(len(WIDTHS) - 1)
