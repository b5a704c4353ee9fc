from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from quire.backprop.engine import (
    Backprop,
    CrossEntropyCost,
    QuadraticCost,
    as_activation,
    backpropagate,
    bias_gradient,
    dense_layers,
    hidden_error,
    output_error,
    weight_gradient,
)
from quire.errors import InputError
from quire.functional.activations import ACTIVATIONS
from quire.models.mlp import MLP, MLPConfig


def net(widths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    weights = [torch.randn(m, d, dtype=torch.float64) for d, m in itertools.pairwise(widths)]
    return weights, [torch.randn(m, dtype=torch.float64) for m in widths[1:]]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_case_solved_by_hand() -> None:
    """x = 2, w = 3, b = 1: a = 7; second layer w = ½, b = 0: output 3.5, target 1.5, so δ² = 2."""
    weights = [torch.tensor([[3.0]]), torch.tensor([[0.5]])]
    engine = Backprop(
        weights, [torch.tensor([1.0]), torch.tensor([0.0])], ["relu", "linear"], QuadraticCost()
    )
    result = engine(torch.tensor([[2.0]]), torch.tensor([[1.5]]))
    assert result.value.item() == 2.0
    assert [delta.item() for delta in result.deltas] == [1.0, 2.0]
    expected = {"weight1": 2.0, "bias1": 1.0, "weight2": 14.0, "bias2": 2.0}
    assert {name: gradient.item() for name, gradient in result.gradients.items()} == expected


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("cost_name", ["quadratic", "cross_entropy", "function"])
def test_equals_autograd_for_every_activation(activation: str, cost_name: str) -> None:
    weights, biases = net([4, 5, 6, 3])
    x = torch.randn(7, 4, dtype=torch.float64)
    target = torch.randint(0, 3, (7,)) if cost_name == "cross_entropy" else torch.randn(7, 3).double()
    cost = {
        "quadratic": QuadraticCost(),
        "cross_entropy": CrossEntropyCost(),
        "function": lambda z, y: ((z - y) ** 4).mean() + z.sum(),
    }[cost_name]
    result = Backprop(weights, biases, [activation] * 3, cost)(x, target)

    parameters = [p.requires_grad_() for pair in zip(weights, biases, strict=True) for p in pair]
    z = x
    pre_activations = []
    for weight, bias in zip(weights, biases, strict=True):
        a = z @ weight.t() + bias
        a.retain_grad()
        pre_activations.append(a)
        z = ACTIVATIONS[activation].function(a)
    value = {
        "quadratic": lambda: nn.functional.mse_loss(z, target, reduction="sum") / 2,
        "cross_entropy": lambda: nn.functional.cross_entropy(z, target, reduction="sum"),
        "function": lambda: ((z - target) ** 4).mean() + z.sum(),
    }[cost_name]()
    value.backward()
    close(result.value, value.detach())
    for gradient, parameter in zip(result.gradients.values(), parameters, strict=True):
        assert parameter.grad is not None
        close(gradient, parameter.grad)
    for delta, a in zip(result.deltas, pre_activations, strict=True):
        assert a.grad is not None
        close(delta, a.grad)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "softplus", "tanh", "arctan"])
@pytest.mark.parametrize("hidden", [(), (5,), (5, 4, 3)])
def test_backpropagate_names_gradients_as_the_model_does(activation: str, hidden: tuple[int, ...]) -> None:
    model = MLP(MLPConfig(4, 3, hidden, activation)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    result = backpropagate(model, CrossEntropyCost(), x, y)
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    assert set(result.gradients) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        close(result.gradients[name], parameter.grad)


def test_layers_without_bias_flatten_and_activations_of_ones_own() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(6, 4, bias=False), nn.GELU(), nn.Linear(4, 2), nn.Softmax(-1)
    )
    model.double()
    x, y = torch.randn(5, 2, 3, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    result = backpropagate(model, nn.MSELoss(), x, y)
    nn.MSELoss()(model(x), y).backward()
    assert set(result.gradients) == {"1.weight", "3.weight", "3.bias"}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        close(result.gradients[name], parameter.grad)


def test_a_layer_shared_by_two_places_counts_in_both() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu)
    assert [type(layer.activation) for layer in dense_layers(model)] == [nn.ReLU, nn.ReLU]
    twice = nn.Linear(3, 3)
    with pytest.raises(InputError, match="same weights in several layers"):
        dense_layers(nn.Sequential(twice, nn.ReLU(), twice))


def test_one_sample_without_a_batch() -> None:
    error, z = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])
    assert weight_gradient(error, z).tolist() == [[3.0, 4.0, 5.0], [6.0, 8.0, 10.0]]
    assert bias_gradient(error).tolist() == [1.0, 2.0]
    a = torch.tensor([-1.0, 1.0, 2.0])
    assert hidden_error(torch.ones(2, 3), error, a, "relu").tolist() == [0.0, 3.0, 3.0]
    assert output_error(a, a, "relu").tolist() == [0.0, 1.0, 2.0]


def test_a_function_gets_its_derivative_from_autograd() -> None:
    a = torch.randn(5, dtype=torch.float64)
    close(as_activation(torch.sin).derivative(a), torch.cos(a))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def test_what_is_not_a_chain_is_refused() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(InputError, match="does more than apply its layers") as info:
        backpropagate(Residual(), QuadraticCost(), x, x)
    assert "use autograd" in str(info.value)
    with pytest.raises(InputError, match="layer '1' of kind BatchNorm1d"):
        backpropagate(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), QuadraticCost(), x, x)
    with pytest.raises(InputError, match="has no linear layer"):
        backpropagate(nn.Flatten(), QuadraticCost(), x, x)


def test_layers_that_do_not_fit_are_named() -> None:
    weights, biases = net([4, 5, 3])
    with pytest.raises(InputError, match=r"\(5, 4\) and \(3, 6\) in layers 1 and 2"):
        Backprop([weights[0], torch.zeros(3, 6)], biases, ["relu", "linear"], QuadraticCost())
    with pytest.raises(InputError, match="2 weights, 2 biases and 1 activations"):
        Backprop(weights, biases, ["relu"], QuadraticCost())
    with pytest.raises(InputError, match="did you mean 'relu'"):
        Backprop(weights, biases, ["rleu", "linear"], QuadraticCost())
