"""Sums over rows against explicit sums in float64, and what is said of their accuracy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional import scatter
from quire.functional.components import ROOM
from quire.functional.scatter import View, first_view, moments, power_sums, share_lost


def lost_share(sums: dict[str, Tensor]) -> float:
    return share_lost(
        *(float(torch.linalg.norm(sums[name])) for name in ("error", "checked", "checked_columns"))
    )


def rows(n: int, d: int, *, offset: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(n + d)
    values = torch.randn(n, d, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 2, d)
    return (values + offset).to(dtype)


def explicit(x: Tensor, shift: Tensor, matrix: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Row by row."""
    size = x.shape[1] if matrix is None else len(matrix)
    total, gram = torch.zeros(size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    for row in x:
        z = row.double() - shift
        z = z if matrix is None else matrix @ z
        total += z
        gram += torch.outer(z, z)
    return total, gram


@pytest.mark.parametrize(("n", "d"), [(1, 1), (5, 3), (257, 7), (2500, 5)])
@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_moments_are_the_sums(n: int, d: int, shift: float) -> None:
    x = rows(n, d, offset=2)
    found = moments(x, View(torch.full((d,), shift, dtype=torch.float64)))
    total, gram = explicit(x, torch.full((d,), shift, dtype=torch.float64))
    assert float(found["count"]) == n
    torch.testing.assert_close(found["total"], total, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(found["gram"], gram, rtol=1e-12, atol=1e-10)


def test_moments_in_other_coordinates() -> None:
    x = rows(300, 6, offset=1)
    basis = torch.linalg.qr(rows(6, 4))[0].mT.contiguous()
    scale = torch.tensor([1.0, 0.1, 10.0, 2.0], dtype=torch.float64)
    shift = torch.arange(6, dtype=torch.float64)
    found = moments(x, View(shift, basis, scale))
    total, gram = explicit(x, shift, basis / scale[:, None])
    torch.testing.assert_close(found["total"], total)
    torch.testing.assert_close(found["gram"], gram)


def test_parts_add_up_to_the_whole() -> None:
    x, view = rows(3000, 4), View(torch.ones(4, dtype=torch.float64))
    whole, first, second = moments(x, view), moments(x[:1234], view), moments(x[1234:], view)
    for name, value in whole.items():
        torch.testing.assert_close(first[name] + second[name], value, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64])
def test_rows_of_other_types(dtype: torch.dtype) -> None:
    x = (rows(700, 5, offset=3).abs() * 20).to(dtype)
    view = first_view(x[:100])
    found = moments(x, view)
    total, gram = explicit(x, view.shift)
    torch.testing.assert_close(found["total"], total, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(found["gram"], gram, rtol=1e-5, atol=1e-2)
    assert (view.precision == torch.float64) == (dtype == torch.int64)
    assert ("error" in found) == (dtype != torch.int64)


def test_rows_that_are_columns_of_a_larger_table() -> None:
    table = rows(500, 9)
    view = View(torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(moments(table[:, 1::2], view)["gram"], explicit(table[:, 1::2], view.shift)[1])


def test_the_way_of_a_gpu_on_the_cpu() -> None:
    x = rows(2500, 6, offset=2, dtype=torch.float32)
    basis = torch.linalg.qr(rows(6, 3))[0].mT.contiguous()
    shift = torch.full((6,), 1.5, dtype=torch.float64)
    for view in (View(shift), View(shift, basis), View(0 * shift), View(shift, precision=torch.float32)):
        ours, other = scatter._moments(x, view), scatter._moments_on_cpu(x, view)
        assert ours.keys() == other.keys()
        torch.testing.assert_close(ours["total"], other["total"], rtol=1e-6, atol=1e-3)
        torch.testing.assert_close(ours["gram"], other["gram"], rtol=1e-5, atol=1e-3)
    whole, first = scatter.squares(x.double(), 700)
    assert whole == pytest.approx(explicit(x, 0 * shift)[1], rel=1e-12)
    assert first == pytest.approx(explicit(x[:700], 0 * shift)[1], rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [24, 100])
@pytest.mark.parametrize("outliers", [False, True])
def test_what_float32_loses_is_not_more_than_what_is_said(seed: int, size: int, outliers: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20_000, size, generator=generator) * torch.logspace(0, -2, size)
    if outliers:
        x[::97] *= 1000
    view = View(torch.zeros(size, dtype=torch.float64), precision=torch.float32)
    found = moments(x, view)
    exact = moments(x, View(view.shift))["gram"]
    lost = torch.linalg.matrix_norm(found["gram"] - exact, 2)
    said = lost_share(found) * exact.trace()
    assert 0 < lost <= ROOM * said
    assert said < 1e-5 * exact.trace()


def test_the_shift_is_the_mean_where_it_matters() -> None:
    near, far = rows(400, 3), rows(400, 3, offset=1e6)
    assert not first_view(near).shift.any()
    torch.testing.assert_close(first_view(far).shift, far.mean(0))
    single = first_view(far.float())
    assert single.precision == torch.float32
    assert torch.equal(single.shift.float().double(), single.shift)


def test_a_constant_column_becomes_exactly_zero() -> None:
    for dtype in (torch.float64, torch.float32):
        x = rows(1000, 3, dtype=dtype)
        x[:, 1] = 0.1
        assert float(moments(x, first_view(x))["gram"][1, 1]) == 0


def test_a_large_mean_costs_no_digits() -> None:
    x = rows(5000, 4)
    far = x + 1e7
    found = moments(far, first_view(far[:100]))
    total = found["total"]
    spread = found["gram"] - torch.outer(total, total) / len(x)
    wanted = torch.cov(far.T) * (len(x) - 1)
    torch.testing.assert_close(spread, wanted, rtol=1e-9, atol=1e-6)
    naive = far.T @ far - len(x) * torch.outer(far.mean(0), far.mean(0))
    assert (naive - wanted).abs().max() > 1e-2, "without a shift the digits are gone"


def test_power_sums() -> None:
    x, shift = rows(300, 6, offset=1), torch.arange(6, dtype=torch.float64)
    basis = torch.linalg.qr(rows(6, 2))[0].mT.contiguous()
    z = x - shift
    for precision, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found = power_sums(x.to(precision), View(shift, basis, None, precision))
        torch.testing.assert_close(found["image"], basis @ z.mT @ z, rtol=tolerance, atol=1e3 * tolerance)
        torch.testing.assert_close(found["total"], z.sum(0), rtol=tolerance, atol=1e2 * tolerance)
        torch.testing.assert_close(found["square"], z.square().sum(), rtol=tolerance, atol=0.0)


def test_the_kernel_says_what_it_takes() -> None:
    view = View(torch.zeros(3, dtype=torch.float64), precision=torch.float32)
    with pytest.raises(InputError, match=r"with backend='triton'\n  expected: Triton"):
        moments(torch.ones(4, 3), view, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d"), [(40_000, 256), (33_000, 100), (50_001, 32)])
def test_on_a_gpu_kernel_and_torch_agree_with_float64(n: int, d: int) -> None:
    x = rows(n, d, offset=3, dtype=torch.float32).cuda()
    view = first_view(x[:1000])
    wanted = moments(x.double(), View(view.shift))["gram"]
    length = wanted.diagonal().sqrt()
    for backend in ("triton", "torch"):
        found = moments(x, view, backend=backend)  # type: ignore[arg-type]
        apart = (found["gram"] - wanted) / torch.outer(length, length)
        assert float(apart.abs().max()) < 1e-5
        assert lost_share(found) < 1e-5
        total = (x.double() - view.shift).sum(0)
        assert float(((found["total"] - total) / length).abs().max()) < 1e-4
