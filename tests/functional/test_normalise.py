"""Normalisation formulas against torch and scikit-learn."""

from __future__ import annotations

import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn

from quire.errors import InputError
from quire.functional import normalise as F


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standardisation_is_scikit_learns(dtype: torch.dtype) -> None:
    values = (torch.randn(40, 3) * torch.tensor([1.0, 100.0, 1e-3]) + torch.tensor([0.0, 1e4, 5.0])).to(dtype)
    oracle = StandardScaler().fit(values.double().numpy())
    mean, deviation = F.standardisation(values)
    assert mean.dtype == dtype
    torch.testing.assert_close(mean.double(), torch.from_numpy(oracle.mean_), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(deviation.double(), torch.from_numpy(oracle.scale_), rtol=1e-6, atol=0)
    restored = F.unstandardise(F.standardise(values, mean, deviation), mean, deviation)
    torch.testing.assert_close(restored, values)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e9, -1e-9])
def test_a_constant_column_has_deviation_one(value: float) -> None:
    for dtype in (torch.float32, torch.float64):
        _, deviation = F.standardisation(torch.full((1000, 1), value, dtype=dtype))
        assert deviation.item() == 1.0


def test_integers_and_half_precision_are_taken() -> None:
    mean, deviation = F.standardisation(torch.tensor([[1], [3]]))
    assert (mean.item(), deviation.item(), mean.dtype) == (2.0, 1.0, torch.float32)
    mean, deviation = F.standardisation(torch.tensor([[1.0], [3.0]]).bfloat16())
    assert (mean.item(), deviation.item(), mean.dtype) == (2.0, 1.0, torch.float32)
    with pytest.raises(InputError, match="at least one row"):
        F.standardisation(torch.zeros(3))


@pytest.mark.parametrize("shape", [(6, 4), (5, 4, 3), (3, 4, 2, 3)])
def test_batch_norm_is_torchs(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.rand(4).double(), torch.rand(4).double()
    wanted = nn.functional.batch_norm(x, None, None, weight, bias, training=True)
    got = F.batch_norm(x, *F.channel_statistics(x), weight, bias)
    torch.testing.assert_close(got, wanted)
    factors = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad((got * factors).sum(), x), torch.autograd.grad((wanted * factors).sum(), x)
    )
    plain = F.batch_norm(x, *F.channel_statistics(x))
    torch.testing.assert_close(plain, nn.functional.batch_norm(x, None, None, training=True))


def test_moving_averages_by_hand() -> None:
    old, new = torch.tensor(10.0), torch.tensor(20.0)
    assert F.moving_average(old, new, 0.1).item() == pytest.approx(11.0)
    assert F.moving_average(old, new, 0.9, "average").item() == pytest.approx(11.0)
    assert F.moving_average(old, new, 0.9, "batch").item() == pytest.approx(19.0)
    with pytest.raises(InputError, match=r"of the batch, or 0[.]9 of the average"):
        F.moving_average(old, new, 2.0)
    with pytest.raises(InputError, match="unknown meaning of momentum"):
        F.moving_average(old, new, 0.5, "both")  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [1, 2])
def test_layer_norm_is_torchs(dims: int) -> None:
    x = torch.randn(5, 3, 4, dtype=torch.float64) * 0.01 + 7
    shape = x.shape[-dims:]
    weight, bias = torch.rand(shape).double(), torch.rand(shape).double()
    wanted = nn.functional.layer_norm(x, shape, weight, bias)
    torch.testing.assert_close(F.layer_norm(x, dims, weight, bias), wanted)
    torch.testing.assert_close(F.layer_norm(x, dims), nn.functional.layer_norm(x, shape))
