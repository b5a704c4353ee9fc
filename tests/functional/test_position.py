"""Positions against their closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from quire.errors import InputError
from quire.functional.position import (
    concatenate_project,
    frequencies,
    relative_dot_product,
    shift_matrix,
    sinusoidal,
)


def test_the_waves_one_by_one() -> None:
    table = sinusoidal(7, 6, 100.0, dtype=torch.float64)
    for n in range(7):
        for i in range(3):
            angle = n / 100 ** (2 * i / 6)
            assert table[n, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-15)
            assert table[n, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-15)
    assert sinusoidal(3, 4).dtype == torch.float32
    assert sinusoidal(3, 4, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert sinusoidal(0, 4).shape == (0, 4)


def test_any_place() -> None:
    places = torch.tensor([[0, 5], [10**7, -3]])
    waves = sinusoidal(places, 8, dtype=torch.float64)
    assert waves.shape == (2, 2, 8)
    assert (waves.abs() <= 1).all()
    torch.testing.assert_close(waves[0, 1], sinusoidal(6, 8, dtype=torch.float64)[5])
    assert waves[1, 0, 0].item() == pytest.approx(math.sin(10**7), abs=1e-8)
    # In float32 too, since angles are taken in float64.
    assert sinusoidal(places, 8)[1, 0, 0].item() == pytest.approx(math.sin(10**7), abs=1e-6)


def test_places_are_told_apart() -> None:
    table = sinusoidal(5000, 16, dtype=torch.float64)
    distances = torch.cdist(table[::7], table[::7]) + 9 * torch.eye(715, dtype=torch.float64)
    assert distances.min() > 0.1


def test_the_dot_product_knows_the_distance_alone() -> None:
    table = sinusoidal(40, 10, dtype=torch.float64)
    places = torch.arange(40)
    torch.testing.assert_close(table @ table.mT, relative_dot_product(places[:, None] - places, 10))
    assert relative_dot_product(torch.tensor(0), 10).item() == 5


@pytest.mark.parametrize("shift", [0, 1, 17, -4, 0.5])
def test_a_shift_is_one_rotation_for_all_places(shift: float) -> None:
    places = torch.arange(30)
    matrix = shift_matrix(shift, 12)
    moved = sinusoidal(places + shift, 12, dtype=torch.float64)
    torch.testing.assert_close(sinusoidal(places, 12, dtype=torch.float64) @ matrix.mT, moved)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(12, dtype=torch.float64))


def test_concatenating_and_projecting_is_adding_projections() -> None:
    x, r, weight = torch.randn(2, 5, 4), torch.randn(5, 6), torch.randn(3, 10)
    both = torch.cat([x, r.expand(2, 5, 6)], -1)
    torch.testing.assert_close(concatenate_project(x, r, weight), both @ weight.mT)


def test_messages() -> None:
    for size in (0, 7):
        with pytest.raises(InputError, match=f"positions of width {size}"):
            frequencies(size)
    with pytest.raises(InputError, match="use a width of 8"):
        sinusoidal(3, 7)
    with pytest.raises(InputError, match="a base of 0"):
        sinusoidal(3, 4, 0)
    with pytest.raises(InputError, match=r"expected: \(O, 10\)"):
        concatenate_project(torch.randn(2, 4), torch.randn(2, 6), torch.randn(3, 9))
