"""Initial weights: moments against torch.nn.init, orthogonality, gains, propagation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from quire.errors import InputError
from quire.functional import initialise as F


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
@pytest.mark.parametrize("shape", [(150, 100), (30, 20, 3, 3)])
def test_variances_are_torchs(distribution: str, shape: tuple[int, ...]) -> None:
    seeded = torch.Generator().manual_seed(0)
    he = getattr(nn.init, f"kaiming_{distribution}_")(
        torch.empty(shape), nonlinearity="relu", generator=seeded
    )
    own = F.he_(torch.empty(shape), distribution=distribution, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(own, he)  # the same numbers drawn, so the same scale
    xavier = getattr(nn.init, f"xavier_{distribution}_")(
        torch.empty(shape), gain=1.3, generator=torch.Generator().manual_seed(0)
    )
    own = F.xavier_(
        torch.empty(shape), gain=1.3, distribution=distribution, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(own, xavier)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (6, 2, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_orthogonal_keeps_lengths(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = F.orthogonal_(torch.empty(shape, dtype=dtype), gain=2.0).flatten(1).double()
    rows, columns = weight.shape
    product = weight @ weight.t() if rows <= columns else weight.t() @ weight
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(product, 4 * torch.eye(min(rows, columns)).double(), atol=tolerance, rtol=0)


def test_orthogonal_is_uniform_not_one_of_a_few_signs() -> None:
    diagonals = torch.stack([F.orthogonal_(torch.empty(4, 4)).diagonal() for _ in range(500)])
    # Each entry has mean 0 and variance 1/4; Householder's raw Q has a mean well below zero.
    assert (diagonals.mean(0).abs() < 4 * 0.5 / math.sqrt(500)).all()


def test_parameters_are_filled_without_a_gradient() -> None:
    layer = nn.Linear(5, 5)
    for fill in (F.he_, F.xavier_, F.orthogonal_):
        assert fill(layer.weight) is layer.weight
        assert layer.weight.is_leaf
        assert layer.weight.requires_grad


@pytest.mark.parametrize(("name", "value"), [("linear", 1), ("relu", math.sqrt(2)), ("tanh", 1.5925374)])
def test_gains(name: str, value: float) -> None:
    assert F.gain(name) == pytest.approx(value, rel=1e-7)


def test_gain_of_relu6_by_its_closed_form() -> None:
    # E[min(a⁺, 6)²] = ∫₀⁶ a² φ + 36 P(a > 6)
    tail = 0.5 * math.erfc(6 / math.sqrt(2))
    inside = 0.5 - tail - 6 * math.exp(-18) / math.sqrt(2 * math.pi)
    assert F.gain("relu6") == pytest.approx((inside + 36 * tail) ** -0.5, rel=1e-7)


def test_choice_by_activation() -> None:
    wide = torch.empty(400, 100)
    for name, variance in [("relu", 2 / 100), ("softplus", 2 / 100), ("tanh", 2 / 500), ("linear", 2 / 500)]:
        assert F.initialise_(wide, name).var().item() == pytest.approx(variance, rel=0.05), name


def test_sizes_by_layer_by_hand() -> None:
    double = 2 * torch.eye(3, dtype=torch.float64)
    x = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]).double()
    sizes = F.variance_by_layer([double] * 3, "linear", x)
    torch.testing.assert_close(sizes.forward, 2.5 * torch.tensor([4.0, 16.0, 64.0]).double())
    torch.testing.assert_close(sizes.backward / sizes.backward[-1], torch.tensor([16.0, 4.0, 1.0]).double())


def test_recurrent_growth_by_hand() -> None:
    growth = F.recurrent_growth(torch.diag(torch.tensor([2.0, 0.5])), 3, torch.tensor([1.0, 0.0]))
    assert growth.tolist() == [1.0, 2.0, 4.0, 8.0]


def test_errors() -> None:
    with pytest.raises(InputError, match="biases and gains"):
        F.he_(torch.empty(3))
    with pytest.raises(InputError, match="biases and gains"):
        F.orthogonal_(torch.empty(3))
    with pytest.raises(InputError, match="did you mean 'uniform'"):
        F.xavier_(torch.empty(3, 3), distribution="unifrom")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="did you mean 'relu'"):
        F.gain("relo")
    with pytest.raises(InputError, match="unknown element-wise activation 'softmax'"):
        F.initialise_(torch.empty(3, 3), "softmax")
    with pytest.raises(InputError, match="unknown direction"):
        F.gain("relu", direction="sideways")  # type: ignore[arg-type]
