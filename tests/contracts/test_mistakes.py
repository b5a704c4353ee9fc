"""docs/errors.md is what the mistakes of `tests.contracts.mistakes` answer."""

from __future__ import annotations

import re

import pytest

from tests.contracts.mistakes import PAGE, SECTIONS, mistakes, page


def plain(text: str) -> list[str]:
    """Without what depends on the machine."""
    return re.sub(r"a machine with \d+ CUDA", "a machine with 0 CUDA", text).splitlines()


@pytest.mark.slow
def test_the_page_is_what_the_mistakes_answer() -> None:
    made, shown = page(), PAGE.read_text(encoding="utf-8")
    assert plain(made) == plain(shown), "write it again with python -m tests.contracts.mistakes"
    assert "Traceback" not in made
    assert "run again with --debug" not in made, "an exception that is none of ours"
    assert made.count("expected:") > 0.8 * len(mistakes())


def test_there_are_enough_of_every_kind() -> None:
    made = mistakes()
    assert len(made) >= 60
    assert {mistake.section for mistake in made} == set(SECTIONS)
    assert len({(mistake.section, mistake.what) for mistake in made}) == len(made)
