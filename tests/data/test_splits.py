from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.data import split_rows
from quire.errors import InputError


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6).filter(lambda c: max(c) >= 8),
    validation=st.sampled_from([0.0, 0.1, 0.15, 0.3]),
    test=st.sampled_from([0.0, 0.05, 0.15, 0.4]),
    seed=st.integers(0, 2**31),
)
@example(counts=[8, 1], validation=0.0, test=0.4, seed=0)  # the remainder would go to the lone row
def test_stratified_parts(counts: list[int], validation: float, test: float, seed: int) -> None:
    classes = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    classes = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed + 1))]
    n = len(classes)
    parts = split_rows(n, validation, test, seed, classes)
    assert torch.cat(parts).sort().values.tolist() == list(range(n))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    train, valid, held = ([int((classes[part] == k).sum()) for k in range(len(counts))] for part in parts)
    assert min(train) >= 1
    for part, share in ((valid, validation), (held, test)):
        assert (sum(part) > 0) == (share > 0)
        if min(counts) >= 10:  # with few members, "one stays to train" goes before the share
            assert sum(part) == max(1, round(n * share)) if share else sum(part) == 0
            assert all(abs(k - count * share) <= 1.001 for k, count in zip(part, counts, strict=True))
    again = split_rows(n, validation, test, seed, classes)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_by_hand() -> None:
    """12 rows of class 0 and 4 of class 1 with a quarter held out twice: 3 and 1 in each part."""
    classes = torch.tensor([0, 0, 0, 1] * 4)
    train, validation, test = split_rows(16, 0.25, 0.25, 7, classes)
    for part, expected in ((train, [6, 2]), (validation, [3, 1]), (test, [3, 1])):
        assert classes[part].bincount().tolist() == expected


def test_seed_decides() -> None:
    first, second = split_rows(100, 0.2, 0.2, 0), split_rows(100, 0.2, 0.2, 1)
    assert [len(part) for part in first] == [60, 20, 20]
    assert not torch.equal(first[2], second[2])


def test_rows_are_drawn_evenly() -> None:
    """Over 400 seeds each of 20 rows is in the test part (a quarter) about 100 times: 5 standard errors."""
    drawn = torch.zeros(20)
    for seed in range(400):
        drawn[split_rows(20, 0.0, 0.25, seed)[2]] += 1
    assert (drawn - 100).abs().max() < 5 * (400 * 0.25 * 0.75) ** 0.5


def test_too_few_rows() -> None:
    with pytest.raises(InputError) as caught:
        split_rows(2, 0.1, 0.1, 0)
    assert str(caught.value) == (
        "2 rows for 3 parts (validation 0.1, test 0.1)\n"
        "  expected: at least 3 rows, and one left to train on\n"
        "  fix: give more rows, or set --table.validation or --table.test to 0"
    )
    with pytest.raises(InputError, match="5 rows in 5 classes, none with a row to spare"):
        split_rows(5, 0.1, 0.1, 0, torch.arange(5))
    assert [len(part) for part in split_rows(5, 0, 0, 0, torch.arange(5))] == [5, 0, 0]
