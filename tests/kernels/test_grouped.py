"""Sums by label against float64's index_add, of all rows at once and of those that moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.pooling import device

pytestmark = [pytest.mark.slow]


def wanted(x: Tensor, labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    sums = torch.zeros(clusters, x.shape[1], dtype=torch.float64, device=x.device)
    counts = torch.bincount(labels.long(), minlength=clusters).double()
    return sums.index_add_(0, labels.long(), x.double()), counts


@pytest.mark.parametrize(("n", "d", "k"), [(700, 5, 9), (1100, 70, 40), (3, 16, 2), (130, 1, 1)])
@pytest.mark.parametrize(("scale", "origin"), [(1.0, 0.0), (1e12, 3.0), (1e-12, 0.0), (1.0, 1000.0)])
def test_running_sums_are_those_of_the_rows_that_are_there(
    n: int, d: int, k: int, scale: float, origin: float
) -> None:
    where = device()
    from quire.kernels.grouped import RunningSums

    generator = torch.Generator().manual_seed(n)
    x = ((torch.randn(n, d, generator=generator) + origin) * scale).to(where)
    shift = x[:50].mean(0).double()
    radius = float((x.double() - shift).norm(dim=1).max())
    sums = RunningSums(x, k, shift, radius)
    labels = torch.randint(k, (n,), generator=generator, dtype=torch.int32)
    for share in (1.0, 0.1, 0.0, 1.0):
        moves = torch.rand(n, generator=generator) < share
        fresh = torch.randint(k, (n,), generator=generator, dtype=torch.int32)
        labels = torch.where(moves, fresh, labels)
        found, (exact, counts) = sums.move(labels.to(where)), wanted(x, labels.to(where), k)
        # Each row is rounded to a part of 2⁻³⁰ or less of the radius.
        torch.testing.assert_close(found[0], exact, rtol=1e-12, atol=1e-9 * n * radius)
        assert torch.equal(found[1], counts)
        assert torch.equal(sums.labels.cpu(), labels)


def test_a_sum_is_the_same_to_the_last_bit_however_it_came_about() -> None:
    where = device()
    from quire.kernels.grouped import RunningSums

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(900, 6, generator=generator).to(where)
    shift, radius = x.double().mean(0), 12.0
    labels = [torch.randint(5, (900,), generator=generator, dtype=torch.int32).to(where) for _ in range(5)]
    moved, new = RunningSums(x, 5, shift, radius), RunningSums(x, 5, shift, radius)
    for some in labels:
        last = moved.move(some)
    assert torch.equal(last[0], new.move(labels[-1])[0])


def test_weighted_sums() -> None:
    where = device()
    from quire.kernels.grouped import sums_by_label

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(500, 20, generator=generator).to(where)
    weights = torch.rand(500, generator=generator, dtype=torch.float64).to(where)
    labels = torch.randint(7, (500,), generator=generator, dtype=torch.int32).to(where)
    sums, counts = sums_by_label(x, labels, 7, weights)
    exact, _ = wanted(weights[:, None] * x.double(), labels, 7)
    torch.testing.assert_close(sums, exact, rtol=1e-12, atol=1e-12)
    mass = torch.zeros(7, dtype=torch.float64, device=where).index_add_(0, labels.long(), weights)
    torch.testing.assert_close(counts, mass)
