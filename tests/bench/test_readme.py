"""README's table is that of the newest results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.readme import HERE, README, newest, with_table

RESULTS = sorted((HERE / "results").glob("*.json"))


def test_the_table_is_of_the_newest_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert with_table(text) == text, "run python -m benchmarks.readme"


def test_newest_is_the_last_date() -> None:
    for (_, subject), content in newest().items():
        dates = [path.name[:10] for path in RESULTS if f"-{subject}-" in path.name]
        assert content["date"] in dates


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_names_its_machine(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert "torch" in content["machine"]
    assert "Python" in content["machine"]
