"""Formulas of dense nets: cases by hand, torch, and limits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.errors import InputError
from quire.functional import feedforward as F


def test_dense_and_mlp_by_hand() -> None:
    weight, bias = torch.tensor([[1.0, -1.0], [2.0, 0.0]]), torch.tensor([0.5, -3.0])
    z = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    assert F.dense(z, weight, bias, torch.relu).tolist() == [[0.0, 0.0], [3.5, 3.0]]
    last, end = torch.tensor([[2.0, 1.0]]), torch.tensor([-1.0])
    assert F.mlp(z, [weight, last], [bias, end], torch.relu).tolist() == [[-1.0], [9.0]]


def test_parameter_counts_by_hand() -> None:
    assert F.parameter_count(2, 3, 1, 1) == 2 * 3 + 3 + 3 * 1 + 1
    assert F.parameter_count(2, 3, 1, 2) == 13 + 12
    assert F.parameter_count(5, 99, 2, 0) == 12
    assert F.scalar_parameter_count(3, 1) == 10
    assert F.scalar_parameter_count(3, 2) == F.parameter_count(1, 3, 1, 2) == 22
    with pytest.raises(InputError, match="-1 hidden layers"):
        F.parameter_count(1, 1, 1, -1)
    with pytest.raises(InputError, match="at least 1"):
        F.scalar_parameter_count(3, 0)


def test_one_hot_and_back() -> None:
    classes = torch.tensor([[2, 0], [1, 1]])
    torch.testing.assert_close(F.one_hot(classes, 4), nn.functional.one_hot(classes, 4).float())
    assert torch.equal(F.from_one_hot(F.one_hot(classes, 4)), classes)
    assert F.one_hot(torch.tensor([], dtype=torch.long), 3).shape == (0, 3)
    with pytest.raises(InputError, match="classes from 0 to 3"):
        F.one_hot(torch.tensor([0, 3]), 3)
    with pytest.raises(InputError, match="no negative class"):
        F.one_hot(torch.tensor([-1]), 3)
    with pytest.raises(InputError, match=r"classes.long\(\)"):
        F.one_hot(torch.tensor([1.0]), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_temperature_limits(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]], dtype=dtype)
    assert F.temperature_softmax(logits, 0.0).tolist() == [[0, 1, 0], [0.5, 0.5, 0]]
    torch.testing.assert_close(F.temperature_softmax(logits, 1.0), logits.softmax(-1))
    torch.testing.assert_close(F.temperature_softmax(logits, 1e8), torch.full_like(logits, 1 / 3))
    torch.testing.assert_close(F.temperature_softmax(logits, 2.0, dim=0), (logits / 2).softmax(0))
    assert F.temperature_softmax(logits * 1e4, 1e-30).isfinite().all()
    with pytest.raises(InputError, match="use 0 for arg max"):
        F.temperature_softmax(logits, -1.0)
    with pytest.raises(InputError, match="a number >= 0"):
        F.temperature_softmax(logits, float("nan"))


def test_temperature_has_its_gradient() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: F.temperature_softmax(a, 0.7), logits)


def test_permuted_inputs_with_permuted_weights_change_nothing() -> None:
    weight, x, order = torch.randn(3, 5).double(), torch.randn(7, 5).double(), torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(x[:, order] @ F.permute_inputs(weight, order).t(), x @ weight.t())
    with pytest.raises(InputError, match="each of 0 … 4 once"):
        F.permute_inputs(weight, torch.tensor([0, 1, 2, 3, 3]))


def test_monotone_violation_by_hand() -> None:
    steps = torch.tensor([-2.0, -1.0, 0.0, 1.0])

    def square(x: torch.Tensor) -> torch.Tensor:
        return x[:, 1] ** 2

    # Falls from 4 to 0, rises from 0 to 1.
    assert F.monotone_violation(square, torch.zeros(2), 1, steps).item() == 1.0
    assert F.monotone_violation(square, torch.zeros(2), 0, steps).item() == 0.0


def test_a_wide_enough_net_fits_its_own_kinks_exactly() -> None:
    x = torch.linspace(0, 1, 101, dtype=torch.float64)
    target = 1 + 2 * x - 5 * torch.relu(x - 0.25) + 7 * torch.relu(x - 0.75)
    fit = F.relu_basis_fit(x, target, 4)
    torch.testing.assert_close(fit(x), target)
    torch.testing.assert_close(fit(torch.tensor([0.1, 0.9]).double()), torch.tensor([1.2, 0.6]).double())
