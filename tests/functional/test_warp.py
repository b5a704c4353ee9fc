"""Warps of images against rotations, shifts and sums that can be told pixel by pixel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.warp import Warps, draw_warps, take_warps


def images(count: int = 3, channels: int = 2, height: int = 6, width: int = 6) -> Tensor:
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8)


def same(count: int, matrix: list[list[float]], offset: tuple[float, float] = (0.0, 0.0)) -> Warps:
    return Warps(torch.tensor(matrix).expand(count, 2, 2), torch.tensor(offset).expand(count, 2))


IDENTITY = [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_the_identity_changes_nothing(dtype: torch.dtype) -> None:
    x = images(height=5, width=8).to(dtype)
    found = take_warps(x, same(3, IDENTITY), 9.0)
    assert found.dtype == dtype
    torch.testing.assert_close(found, x, rtol=0, atol=1e-4)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_quarter_turn_is_a_quarter_turn(times: int) -> None:
    angle = times * math.pi / 2
    turn = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    x = images()
    assert torch.equal(take_warps(x, same(3, turn)), torch.rot90(x, times, (2, 3)))


def test_turning_an_oblong_image_keeps_its_pixels_square() -> None:
    """A quarter turn of a bar that lies across stands upright and is as long, where there is room."""
    x = torch.zeros(1, 1, 5, 9)
    x[0, 0, 2, 2:7] = 100.0
    found = take_warps(x, same(1, [[0.0, -1.0], [1.0, 0.0]]))
    wanted = torch.zeros(1, 1, 5, 9)
    wanted[0, 0, :, 4] = 100.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("across", "down"), [(2, 0), (0, 1), (-1, 3)])
def test_a_shift_by_whole_pixels_moves_them_and_fills_the_rest(across: int, down: int) -> None:
    x = images(height=6, width=8)
    # In units of half the longer side, of 8 pixels.
    found = take_warps(x, same(3, IDENTITY, (across / 4, down / 4)), [7.0, 200.0])
    for c, fill in enumerate((7, 200)):
        for row in range(6):
            for column in range(8):
                i, j = row + down, column + across
                inside = 0 <= i < 6 and 0 <= j < 8
                wanted = x[:, c, i, j] if inside else torch.full((3,), fill, dtype=torch.uint8)
                assert torch.equal(found[:, c, row, column], wanted)


def test_shrinking_by_two_shows_the_image_in_the_middle_with_its_surroundings() -> None:
    x = torch.full((1, 1, 8, 8), 50.0)
    found = take_warps(x, same(1, [[2.0, 0.0], [0.0, 2.0]]), 10.0)
    assert torch.equal(found[0, 0, 2:6, 2:6], torch.full((4, 4), 50.0))
    found[0, 0, 2:6, 2:6] = 10.0
    assert torch.equal(found, torch.full_like(found, 10.0))


def test_a_slant_moves_each_row_by_its_distance_from_the_middle() -> None:
    x = torch.arange(49.0).reshape(1, 1, 7, 7)
    found = take_warps(x, same(1, [[1.0, 1.0], [0.0, 1.0]]), 0.0)
    for row in range(7):
        for column in range(7):
            place = column + row - 3
            wanted = x[0, 0, row, place] if 0 <= place < 7 else 0.0
            assert found[0, 0, row, column] == pytest.approx(float(wanted), abs=1e-4)


def test_equal_pulls_are_a_shift_and_a_pull_reaches_its_corner() -> None:
    x = images(2, 1, 8, 8).float()
    pulls = torch.zeros(2, 2, 4, 4)
    pulls[:, 0] = 0.25
    pulled = take_warps(x, same(2, IDENTITY)._replace(pulls=pulls))
    torch.testing.assert_close(pulled, take_warps(x, same(2, IDENTITY, (0.25, 0.0))), rtol=0, atol=1e-3)
    corner = torch.zeros(2, 2, 4, 4)
    corner[:, :, 0, 0] = 0.5  # two pixels at the upper left, nothing at the lower right
    found = take_warps(x, same(2, IDENTITY)._replace(pulls=corner))
    torch.testing.assert_close(found[:, :, 0, 0], x[:, :, 2, 2], rtol=0, atol=1e-3)
    torch.testing.assert_close(found[:, :, 5:, 5:], x[:, :, 5:, 5:], rtol=0, atol=40.0)
    assert not torch.allclose(found[:, :, :4, :4], x[:, :, :4, :4], atol=1.0)


def test_draws_stay_within_their_bounds_and_reach_them() -> None:
    x = images(5000, 1, 4, 4)
    generator = torch.Generator().manual_seed(0)
    warps = draw_warps(x, shift=0.1, zoom=1.5, rotate=30.0, shear=0.2, bend=0.05, generator=generator)
    # A = slant · turn · zoom, so det A is the product of both factors, and a column's angle the turn.
    area = torch.linalg.det(warps.matrix)
    assert 1 / 1.5**2 <= area.min() < 0.5
    assert 2.0 < area.max() <= 1.5**2
    assert 0.19 < warps.offset.abs().max() <= 0.2, "in halves of the longer side"
    # Every number is drawn by itself: across and down, wide and high.
    sides = warps.matrix.square().sum(1).log()
    for across, down in (warps.offset.unbind(1), sides.unbind(1)):
        assert torch.corrcoef(torch.stack([across, down]))[0, 1].abs() < 0.2
    assert warps.pulls is not None
    assert warps.pulls.std().item() == pytest.approx(0.1, rel=0.02)
    # The lower row is that of turn · zoom: (sin·a, cos·b).
    turned = draw_warps(x, rotate=30.0, generator=generator).matrix
    angles = torch.atan2(turned[:, 1, 0], turned[:, 1, 1]).rad2deg()
    assert 29.5 < angles.max() <= 30.001
    assert -30.001 <= angles.min() < -29.5
    assert abs(angles.mean()) < 1.0
    slanted = draw_warps(x, shear=0.2, generator=generator).matrix
    assert torch.equal(slanted[:, 1], torch.tensor([[0.0, 1.0]]).expand(5000, 2))
    assert 0.199 < slanted[:, 0, 1].abs().max() <= 0.2


def test_the_same_generator_draws_the_same_warps() -> None:
    x = images()
    one, other, third = (
        draw_warps(x, rotate=20.0, bend=0.1, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(one.matrix, other.matrix)
    assert torch.equal(one.pulls, other.pulls)  # type: ignore[arg-type]
    assert not torch.equal(one.matrix, third.matrix)


@pytest.mark.parametrize("wrong", [{"zoom": 0.5}, {"shift": -0.1}, {"rotate": math.inf}])
def test_what_cannot_be_drawn_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"(?s)warps with.*zoom >= 1 and all others >= 0"):
        draw_warps(images(), **wrong)


@pytest.mark.gpu
def test_warps_are_the_same_on_the_gpu() -> None:
    x = images()
    warps = draw_warps(x, shift=0.1, zoom=1.2, rotate=20.0, shear=0.2, bend=0.05)
    there = take_warps(x.cuda(), Warps(*(part.cuda() for part in warps if part is not None)), [3.0, 4.0])
    torch.testing.assert_close(there.cpu().int(), take_warps(x, warps, [3.0, 4.0]).int(), rtol=0, atol=1)
