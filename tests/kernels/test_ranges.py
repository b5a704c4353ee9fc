"""Sums over ranges of sorted keys by the kernel, against the direct sum over all pairs in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.functional import nadaraya_watson
from tests.kernels.pooling import device

pytestmark = [pytest.mark.slow]


def direct(query: Tensor, key: Tensor, value: Tensor, kernel: str, width: float, weights: Tensor) -> Tensor:
    near = (query.double() - key.double().mT).square() / width**2
    shape = (near <= 1).double() if kernel == "boxcar" else (1 - near).clamp(min=0)
    weight = shape * weights.double()[..., None, :]
    return weight @ value.double() / weight.sum(-1, keepdim=True)


@pytest.mark.parametrize("kernel", ["boxcar", "epanechnikov"])
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "width", "values"),
    [((), 300, 257, 0.2, 1), ((2,), 5, 64, 3.0, 3), ((), 1, 1, 1.5, 2), ((), 40, 1000, 0.02, 1)],
)
def test_sums_are_those_of_all_pairs(
    kernel: str, batch: tuple[int, ...], queries: int, keys: int, width: float, values: int
) -> None:
    where = device()
    generator = torch.Generator().manual_seed(keys)
    key = torch.rand(*batch, keys, 1, generator=generator).to(where)
    query = torch.rand(*batch, queries, 1, generator=generator).to(where)
    value = torch.randn(*batch, keys, values, generator=generator).to(where)
    weights = (torch.rand(*batch, keys, generator=generator) + 0.1).to(where)
    found = nadaraya_watson(query, key, value, kernel, width, weights=weights)  # type: ignore[arg-type]
    wanted = direct(query, key, value, kernel, width, weights)
    reached = wanted.isfinite()
    assert reached.any()
    torch.testing.assert_close(found.double()[reached], wanted[reached], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["boxcar", "epanechnikov"])
def test_others_answer_for_each_key(kernel: str) -> None:
    where = device()
    key = torch.rand(90, 1, generator=torch.Generator().manual_seed(3)).to(where)
    key[10:20] = key[5]  # equal keys are left out one at a time
    value = torch.arange(90.0, device=where)[:, None]
    found = nadaraya_watson(key, key, value, kernel, 0.3, exclude_self=True)  # type: ignore[arg-type]
    near = (key.double() - key.double().mT).square() / 0.3**2
    weight = ((near <= 1).double() if kernel == "boxcar" else (1 - near).clamp(min=0)).fill_diagonal_(0)
    wanted = weight @ value.double() / weight.sum(1, keepdim=True)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_with_a_gradient_the_sum_is_the_same() -> None:
    """Autograd takes PyTorch's operations, which must not show."""
    where = device()
    key = torch.rand(200, 1, generator=torch.Generator().manual_seed(4)).to(where)
    value = key.sin().requires_grad_()
    learned = nadaraya_watson(key, key, value, "epanechnikov", 0.1)
    plain = nadaraya_watson(key, key, value.detach(), "epanechnikov", 0.1)
    torch.testing.assert_close(plain, learned.detach(), rtol=1e-6, atol=1e-7)
    assert learned.requires_grad
