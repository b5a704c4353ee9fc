"""Triton's kernels of K-means against float64 differences, on awkward shapes and awkward numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.functional.nearest import cluster_sums

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 1, 1), (16, 16, 16), (1001, 5, 37), (70_001, 3, 1), (5000, 1, 129), (4000, 100, 1000),
    (3000, 300, 70), (999, 64, 2000), (3000, 128, 64), (20_000, 2, 3), (9000, 64, 1024), (9000, 100, 700),
]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cuda")


def verify(x: Tensor, centres: Tensor, weights: Tensor | None = None) -> None:
    wanted = []
    for part in x.split(max(1, 2**25 // centres.numel())):
        squared = (part.double()[:, None] - centres).square().sum(2)
        wanted.append((squared == squared.min(1, keepdim=True).values).double().argmax(1))
    labels = torch.cat(wanted)
    found = cluster_sums(x, centres, weights=weights, backend="triton")
    assert torch.equal(found.labels, labels)
    mass = torch.ones(len(x), dtype=torch.float64, device="cuda") if weights is None else weights
    sums = torch.zeros_like(centres).index_add_(0, labels, mass[:, None] * x.double())
    counts = torch.zeros_like(centres[:, 0]).index_add_(0, labels, mass)
    torch.testing.assert_close(found.sums, sums, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(found.counts, counts, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("rows", "features", "clusters"), SHAPES)
def test_any_shape(rows: int, features: int, clusters: int) -> None:
    verify(normal(rows, features).float(), normal(clusters, features, seed=1))


def test_weights() -> None:
    weights = torch.rand(5000, dtype=torch.float64, device="cuda")
    verify(normal(5000, 20).float(), normal(50, 20, seed=1), weights)


def test_exact_ties_and_equal_centres() -> None:
    grid = torch.randint(0, 4, (20_000, 3), device="cuda").float()
    half = 0.5 * (torch.arange(300, device="cuda") % 2)[:, None]
    verify(grid, grid[:300].double() + half)
    verify(torch.ones(500, 7, device="cuda"), torch.ones(20, 7, dtype=torch.float64, device="cuda"))


def test_rows_that_half_precision_cannot_tell_apart() -> None:
    centres = normal(200, 16)
    pairs = torch.combinations(torch.arange(200, device="cuda"))
    middle = (centres[pairs[:, 0]] + centres[pairs[:, 1]]) / 2
    verify(middle.float(), centres)


@pytest.mark.parametrize(("scale", "origin"), [(1.0, 3000.0), (1e15, 0.0), (1e-15, 0.0)])
def test_far_from_the_origin_large_and_small(scale: float, origin: float) -> None:
    verify(((normal(5000, 32) + origin) * scale).float(), (normal(100, 32, seed=1) + origin) * scale)


def test_other_types_take_another_way() -> None:
    x, centres = normal(3000, 8), normal(20, 8, seed=1)
    assert torch.equal(cluster_sums(x, centres).labels, cluster_sums(x, centres, backend="torch").labels)
    with pytest.raises(ValueError, match="float64 with backend='triton'"):
        cluster_sums(x, centres, backend="triton")
