"""Copies of many tensors in one call are the tensors as they were, however they change afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.functional import copies
from quire.functional.copies import Copies

WAYS = ["one call", "one by one"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "one by one":
        monkeypatch.setattr(copies.host, "library", lambda: None)
    elif copies.host.library() is None:
        pytest.skip("no compiler when Quire was installed")
    return str(request.param)


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(), (3,), (2, 5), (0,), (1,)]
    made = [torch.randn(shape, dtype=kind) for shape in shapes for kind in (torch.float32, torch.float64)]
    return [*made, torch.tensor(7), torch.tensor([True, False, True]), torch.randn(2, dtype=torch.complex128)]


def agree(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        for one, other in zip(found, wanted, strict=True)
    )


def test_copies_stay_while_tensors_are_written_to(way: str) -> None:
    given, kept = tensors(), Copies()
    for _ in range(3):
        kept.take(given)
        wanted = [tensor.clone() for tensor in given]
        for tensor in given:
            tensor.copy_(tensor.logical_not())
        assert agree(kept.saved(), wanted)


def test_what_is_replaced_or_moved_is_copied_from_where_it_is(way: str) -> None:
    given, kept = tensors(), Copies()
    kept.take(given)
    given[1] = torch.arange(4.0)  # another tensor, of another shape
    given[2].data = torch.full((3,), 5.0)  # the same one, elsewhere
    kept.take(given)
    assert agree(kept.saved(), given)
    whole = torch.arange(6.0)
    given[0] = whole[:2]
    kept.take(given)
    given[0] = whole[:5]  # longer, in the same place
    kept.take(given)
    assert agree(kept.saved(), given)


def test_some_can_be_kept_as_they_were_copied(way: str) -> None:
    given, kept = tensors(), Copies()
    kept.take(given)
    wanted = [given[i].clone() for i in (4, 2, 10)]
    for tensor in given:
        tensor.zero_()
    kept.keep([4, 2, 10])
    assert agree(kept.saved(), wanted)
    kept.take([given[i] for i in (4, 2, 10)])
    assert agree(kept.saved(), [torch.zeros_like(tensor) for tensor in wanted])


@pytest.mark.parametrize("name", ["data", "another"])
def test_what_was_replaced_or_moved_at_first_is_looked_for_ever_after(way: str, name: str) -> None:
    given, kept = tensors(), Copies()
    for turn in range(4):
        kept.take(given)
        wanted = [tensor.clone() for tensor in given]
        if name == "data":
            given[2].data = torch.full((3,), float(turn))
        else:
            given[2] = torch.full((3,), float(turn))
        if turn == 1:
            kept.keep(range(len(given)))
        assert agree(kept.saved(), wanted)


@pytest.mark.parametrize("how", ["shared", "resized", "elsewhere"])
def test_memory_that_goes_away_under_a_tensor_is_left_alone(way: str, how: str) -> None:
    """Sharing it with other processes moves it, and frees what it was."""
    given, kept = [torch.full((100_000,), float(i)) for i in range(3)], Copies()
    kept.take(given)
    kept.keep(range(3))
    if how == "shared":
        given[1].share_memory_()
    elif how == "resized":
        given[1].resize_(400_000).fill_(8.0)
    else:
        given[1].data = torch.full((5,), 8.0)
    given[1].add_(1)
    others = [torch.full((100_000,), 7.0) for _ in range(9)]
    kept.take(given)
    assert agree(kept.saved(), given)
    assert others


def test_tensors_that_are_not_in_one_piece(way: str) -> None:
    given, kept = [torch.randn(4, 3).t(), torch.randn(6)[::2]], Copies()
    for _ in range(2):
        kept.take(given)
        wanted = [tensor.clone() for tensor in given]
        for tensor in given:
            tensor.add_(1)
        assert agree(kept.saved(), wanted)


def test_nothing_to_copy(way: str) -> None:
    kept = Copies()
    kept.take([])
    assert kept.saved() == []
