"""`quire bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Quire


def test_the_list_has_every_subject(quire: Quire) -> None:
    answer = quire("bench", "--list")
    assert answer.code == 0
    assert "kmeans" in answer.out
    assert "linear-cross-entropy" in answer.out


def test_a_subject_is_measured_shown_and_saved(quire: Quire, tmp_path: Path) -> None:
    answer = quire("bench", "linear-cross-entropy", "--small", "--rounds", "1", "--save", str(tmp_path))
    assert answer.code == 0
    assert "× Quire's time" in answer.out
    assert "of the limit" in answer.out
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".txt"]


def test_one_object_with_json(quire: Quire) -> None:
    answer = quire("bench", "linear-cross-entropy", "--small", "--rounds", "1", "--json")
    found = json.loads(answer.out)
    assert list(found["subjects"]) == ["linear-cross-entropy"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("kmean",), "kmeans"),
        (("kmeans", "--rounds", "0"), "1 or more"),
        (("kmeans", "--growth"), "add --save FOLDER"),
        (("kmeans", "--data", "nowhere.txt"), "no such file"),
        (("kmeans", "--threads", "0"), "1 or more"),
    ],
)
def test_mistakes_are_named_before_anything_runs(quire: Quire, words: tuple[str, ...], message: str) -> None:
    answer = quire("bench", *words)
    assert answer.code == 2
    assert message in answer.error
