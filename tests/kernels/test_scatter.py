"""The scatter kernel against sums in float64."""

from __future__ import annotations

import pytest
import torch

from tests.functional.test_scatter import lost_share
from tests.kernels.pooling import device

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize(
    ("n", "d", "columns"), [(300, 20, 16), (1000, 40, 32), (50, 16, 16), (257, 33, 32), (64, 5, 16)]
)
def test_sums_and_their_error(n: int, d: int, columns: int) -> None:
    where = device()
    from quire.kernels.scatter import Tile, scatter_sums

    generator = torch.Generator().manual_seed(n)
    x = (torch.randn(n, d, generator=generator) * torch.logspace(-3, 3, d) + 3).to(where)
    shift = x[:20].double().mean(0).float().double()
    found = scatter_sums(x, shift, 2, slice(None, None, 3), Tile(64, columns, 16, 4, 2))
    z = x.double() - shift
    wanted = z.mT @ z
    length = wanted.diagonal().sqrt()
    assert float(((found["gram"] - wanted) / torch.outer(length, length)).abs().max()) < 1e-6
    assert float(((found["total"] - z.sum(0)) / length).abs().max()) < 3e-6
    assert 0.3 < float(found["checked"] / wanted.trace()) <= 1 + 1e-9
    assert 0 < lost_share(found) < 1e-6


def test_numbers_that_half_precision_cannot_hold_are_not_finite() -> None:
    """They stand out, so that another pass in float64 is taken."""
    where = device()
    from quire.kernels.scatter import Tile, scatter_sums

    x = torch.ones(200, 16, device=where)
    x[:100] *= torch.linspace(-1, 1, 100, device=where)[:, None]
    x[150] = 1e9
    shift = torch.zeros(16, dtype=torch.float64, device=where)
    found = scatter_sums(x, shift, 2, slice(None), Tile(64, 16, 16, 4, 2))
    assert not bool(found["gram"].isfinite().all())
