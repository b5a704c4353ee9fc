from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recipes.examples import undrawn


@pytest.fixture
def unseen() -> Iterator[None]:
    """For a test that reads no report: see `undrawn`."""
    with undrawn():
        yield
