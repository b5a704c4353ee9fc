from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from quire.errors import InputError
from quire.functional import activations as A
from quire.functional.activations import ACTIVATIONS

NAMES = list(ACTIVATIONS)
ELEMENTWISE = [name for name in NAMES if ACTIVATIONS[name].elementwise]
MIXING = [name for name in NAMES if not ACTIVATIONS[name].elementwise]

PEERS = {
    "linear": lambda a: a,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "arctan": torch.arctan,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "softplus": lambda a: torch.logaddexp(a, torch.zeros_like(a)),
    "log_sigmoid": lambda a: -torch.logaddexp(-a, torch.zeros_like(a)),
    "softmax": lambda a: F.softmax(a, -1),
    "log_softmax": lambda a: F.log_softmax(a, -1),
    "softmin": lambda a: F.softmin(a, -1),
}


def gradient(function, a, direction=None):
    a = a.detach().clone().requires_grad_()
    z = function(a)
    return torch.autograd.grad(z, a, torch.ones_like(z) if direction is None else direction)[0]


def test_models_find_the_names_they_use():
    wanted = ["linear", "sigmoid", "tanh", "arctan", "relu", "leaky_relu", "relu6", "softplus", "log_sigmoid"]
    assert set(wanted) == set(ELEMENTWISE)
    assert set(MIXING) == {"softmax", "log_softmax", "softmin"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_equal_the_peer(name, dtype):
    a = (torch.randn(40, 6) * 5).to(dtype)
    direction = torch.randn(40, 6).to(dtype)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-2}[dtype]
    activation = ACTIVATIONS[name]
    exact = PEERS[name](a.double())
    slope = gradient(PEERS[name], a.double(), direction.double())
    assert activation.function(a).dtype == dtype
    torch.testing.assert_close(activation.function(a).double(), exact, rtol=tolerance, atol=tolerance)
    for got in (gradient(activation.function, a, direction), activation.pull_back(a, direction)):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), slope, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extreme_inputs_stay_finite(name, dtype):
    a = torch.tensor([-1e4, -90.0, -1e-30, 0.0, 1e-30, 90.0, 1e4], dtype=dtype)
    activation = ACTIVATIONS[name]
    for values in (activation.function(a), gradient(activation.function, a), activation.derivative(a)):
        assert values.isfinite().all()
    if activation.derivative_from_output is not None:
        assert activation.derivative_from_output(activation.function(a)).isfinite().all()


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extreme_vectors_stay_finite(name, dtype):
    a = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], dtype=dtype)
    direction = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, 1.0]], dtype=dtype)
    activation = ACTIVATIONS[name]
    for values in (activation.function(a), gradient(activation.function, a, direction)):
        assert values.isfinite().all()
    assert activation.pull_back(a, direction).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    a = torch.tensor([[-2.5, -0.3, 0.4], [1.7, 5.0, 7.2]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ACTIVATIONS[name].function, (a,))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_derivative_equals_autograd_at_the_kinks_too(name):
    a = torch.tensor([-3.0, 0.0, 2.0, 6.0, 8.0], dtype=torch.float64)
    activation = ACTIVATIONS[name]
    torch.testing.assert_close(activation.derivative(a), gradient(activation.function, a), rtol=0, atol=1e-15)
    if activation.derivative_from_output is not None:
        z = activation.function(a)
        from_output = activation.derivative_from_output(z)
        torch.testing.assert_close(from_output, activation.derivative(a), rtol=0, atol=1e-14)


def test_derivatives_by_hand():
    zero = torch.zeros((), dtype=torch.float64)
    assert A.relu_derivative(zero) == 0
    assert A.sigmoid_derivative(zero) == 0.25
    assert A.tanh_derivative(zero) == 1
    assert A.arctan_derivative(zero + 1) == 0.5
    assert A.softplus_derivative(zero, 3.0) == 0.5
    assert A.leaky_relu_derivative(zero - 1).item() == 0.01  # to the last bit of float64


def test_derivatives_keep_their_digits_where_the_value_saturates():
    a = torch.tensor([50.0], dtype=torch.float64)
    assert A.sigmoid(a).item() == 1.0
    assert A.sigmoid_derivative(a).item() == pytest.approx(math.exp(-50), rel=1e-12)
    assert A.tanh_derivative(a).item() == pytest.approx(4 * math.exp(-100), rel=1e-12)


@pytest.mark.parametrize("beta", [0.1, 1.0, 4.0, 50.0])
def test_softplus_approaches_relu(beta):
    a = torch.linspace(-10, 10, 101, dtype=torch.float64)
    excess = A.softplus(a, beta) - torch.relu(a)
    assert (excess >= -1e-15).all()
    assert excess.max().item() == pytest.approx(math.log(2) / beta, rel=1e-9)


@given(st.floats(-300, 300))
def test_both_forms_of_tanh(value):
    a = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    for form in (A.tanh_from_exponentials, A.tanh_from_sigmoid):
        z = form(a)
        assert z.item() == pytest.approx(math.tanh(value), abs=1e-15)
        (slope,) = torch.autograd.grad(z, a)
        assert slope.item() == pytest.approx(A.tanh_derivative(a).item(), abs=1e-15)


def test_softmax_along_any_dimension():
    a, g = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for function, product in (
        (A.softmax, A.softmax_pull_back),
        (A.log_softmax, A.log_softmax_pull_back),
        (A.softmin, A.softmin_pull_back),
    ):
        for dim in range(3):
            slope = gradient(lambda v, f=function, d=dim: f(v, d), a, g)
            torch.testing.assert_close(product(a, g, dim), slope)
    torch.testing.assert_close(A.softmin(a, 1).sum(1), torch.ones(3, 5, dtype=torch.float64))


def test_messages():
    with pytest.raises(InputError, match=r"softplus with beta=0[\s\S]*expected: beta > 0"):
        A.softplus(torch.zeros(1), beta=0)
    with pytest.raises(InputError, match=r"unknown activation 'sigmod'[\s\S]*did you mean 'sigmoid'"):
        ACTIVATIONS["sigmod"]
    with pytest.raises(InputError, match=r"element-wise derivative of softmax[\s\S]*pull_back"):
        ACTIVATIONS["softmax"].derivative(torch.zeros(3))


@pytest.mark.parametrize("value", [21.0, 25.0, 30.0])
def test_softplus_keeps_its_float64_digits_above_pytorchs_threshold(value):
    excess = A.softplus(torch.tensor(value, dtype=torch.float64)).item() - value
    assert excess == pytest.approx(math.log1p(math.exp(-value)), rel=0.05)
