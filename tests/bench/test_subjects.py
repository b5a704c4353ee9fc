"""Every subject runs at tiny sizes with every contestant that is installed, and Quire's answer is right."""

from __future__ import annotations

import pytest
import torch

import quire.bench.subjects  # noqa: F401
from quire.bench import measure
from quire.bench.case import GROWTHS, SUBJECTS, Absent, Place
from quire.bench.measure import run_case

TINY = Place(torch.device("cpu"), small=True)
LARGEST_ERROR = 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_subject_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.0)
    seen = 0
    for case in SUBJECTS[name](TINY):
        first, *_ = case.contestants.values()
        assert not isinstance(first, Absent)
        outcome = run_case(case, TINY, rounds=1)
        own = next(iter(outcome.contestants.values()))
        assert own.error is None or own.error < LARGEST_ERROR
        assert all(figures.absent or figures.seconds > 0 for figures in outcome.contestants.values())
        seen += 1
    assert seen, "a subject has something to measure on a CPU at tiny sizes"


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_subject_says_what_it_is(name: str) -> None:
    summary = (SUBJECTS[name].__doc__ or "").splitlines()[0]
    assert summary.endswith(".")
    assert len(summary) <= 110


@pytest.mark.parametrize("name", GROWTHS)
def test_a_growth_has_sizes_and_a_case_at_the_first(name: str) -> None:
    for growth in GROWTHS[name](TINY):
        assert sorted(growth.sizes) == list(growth.sizes)
        assert len(growth.sizes) >= 2
        assert growth.make(growth.sizes[0]).contestants
