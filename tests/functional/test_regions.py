"""Linear regions: cases by hand, bounds, and the net itself rebuilt from its pieces."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.feedforward import mlp
from quire.functional.regions import line_regions, plane_regions, sawtooth

ZERO, ONE = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)


def net(seed: int, *sizes: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pairs = list(itertools.pairwise(sizes))
    weights = [
        torch.randn(after, before, generator=generator, dtype=torch.float64) for before, after in pairs
    ]
    return weights, [torch.randn(after, generator=generator, dtype=torch.float64) for _, after in pairs]


def test_one_kink_by_hand() -> None:
    # relu(x − 1) on [−1, 3]: flat, then rising by 2 over the second half.
    found = line_regions([ONE[None], ONE[None]], [-ONE, ZERO], -ONE, 3 * ONE)
    assert found.breakpoints.tolist() == [0.0, 0.5, 1.0]
    assert found.slopes.tolist() == [[0.0], [4.0]]


def test_kinks_that_cancel_are_no_regions() -> None:
    # relu(x) − relu(x), and relu(x) − relu(−x) = x: a unit changes state, the net does not bend.
    weight = torch.tensor([[1.0], [1.0]]).double()
    assert (
        len(line_regions([weight, torch.tensor([[1.0, -1.0]]).double()], [torch.zeros(2), ZERO], -ONE, ONE))
        == 1
    )
    weight = torch.tensor([[1.0], [-1.0]]).double()
    assert (
        len(line_regions([weight, torch.tensor([[1.0, -1.0]]).double()], [torch.zeros(2), ZERO], -ONE, ONE))
        == 1
    )


def test_two_units_with_one_kink_count_once() -> None:
    weight = torch.tensor([[1.0], [3.0]]).double()
    bias = torch.tensor([-0.1, -0.3], dtype=torch.float64)
    found = line_regions([weight, torch.ones(1, 2).double()], [bias, ZERO], ZERO, ONE)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("width", "depth"), [(1, 1), (2, 1), (9, 1), (3, 1), (3, 2), (3, 5), (4, 3), (7, 2), (12, 2)]
)
def test_the_sawtooth_reaches_the_bound(width: int, depth: int) -> None:
    weights, biases = sawtooth(width, depth)
    assert [tuple(w.shape) for w in weights] == [(width, 1), *[(width, width)] * (depth - 1), (1, width)]
    assert len(line_regions(weights, biases, ZERO, ONE)) == (width + 1) ** depth
    assert len(line_regions(weights, biases, -5 * ONE, 6 * ONE)) == (width + 1) ** depth


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_sawtooth_folds_the_interval_onto_itself(depth: int) -> None:
    weights, biases = sawtooth(4, depth)
    found = line_regions(weights, biases, ZERO, ONE)
    height = mlp(found.breakpoints[:, None], weights, biases, torch.relu)[:, 0]
    wanted = torch.tensor([0.0, 1.0] * len(found)).double()[: len(height)]
    torch.testing.assert_close(height, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_the_pieces_joined_are_the_net(seed: int) -> None:
    weights, biases = net(seed, 3, 8, 8, 8, 2)
    start, end = torch.randn(3).double() * 3, torch.randn(3).double() * 3
    found = line_regions(weights, biases, start, end)
    assert len(found) <= 9**3
    middle = (found.breakpoints[:-1] + found.breakpoints[1:]) / 2
    for t, slope in zip(middle, found.slopes, strict=True):
        x = (start + t * (end - start)).requires_grad_()
        value = mlp(x, weights, biases, torch.relu)
        for i in range(2):
            (gradient,) = torch.autograd.grad(value[i], x, retain_graph=True)
            torch.testing.assert_close(gradient @ (end - start), slope[i], atol=1e-7, rtol=1e-7)
    # Neighbours differ, so no region is counted twice.
    assert (found.slopes.diff(dim=0).abs().amax(dim=1) > 0).all()


def test_regions_of_a_line_are_those_of_the_plane_it_lies_in() -> None:
    weights, biases = net(3, 2, 6, 6, 1)
    regions = plane_regions(weights, biases, u=(-2, 2), v=(-2, 2))
    start, end = torch.tensor([-2.0, 0.3]).double(), torch.tensor([2.0, 0.3]).double()
    met = {
        region.pattern
        for region in regions
        if region.polygon[:, 1].min() < 0.3 - 1e-9 and region.polygon[:, 1].max() > 0.3 + 1e-9
    }
    assert len(line_regions(weights, biases, start, end)) == len(met)


@pytest.mark.parametrize("units", [1, 3, 6])
def test_lines_in_general_position(units: int) -> None:
    weights, biases = net(1, 2, units, 1)
    regions = plane_regions(weights, biases, u=(-200, 200), v=(-200, 200))
    assert len(regions) == 1 + units + units * (units - 1) // 2


@pytest.mark.parametrize("seed", range(3))
def test_the_regions_tile_the_plane_and_hold_the_net(seed: int) -> None:
    weights, biases = net(seed, 4, 7, 6, 2)
    axes, origin = torch.randn(2, 4).double(), torch.randn(4).double()
    regions = plane_regions(weights, biases, origin=origin, axes=axes, u=(-1, 3), v=(0, 2))
    assert sum(region.area for region in regions) == pytest.approx(8.0)
    assert len({region.pattern for region in regions}) == len(regions)
    for region in regions:
        shares = torch.rand(len(region.polygon)).double()
        point = (shares / shares.sum()) @ region.polygon
        wanted = mlp(origin + point @ axes, weights, biases, torch.relu)
        torch.testing.assert_close(region.gradient @ point + region.offset, wanted)


def test_errors() -> None:
    with pytest.raises(InputError, match="not reachable with fewer units"):
        sawtooth(2, 2)
    weights, biases = net(0, 3, 4, 1)
    with pytest.raises(InputError, match="give axes="):
        plane_regions(weights, biases)
    with pytest.raises(InputError, match=r"the first weight \(units, 2\)"):
        line_regions(weights, biases, torch.zeros(2), torch.ones(2))
