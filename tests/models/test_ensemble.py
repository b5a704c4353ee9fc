"""An ensemble is its members, computed at once: values, gradients, weights."""

from __future__ import annotations

import pytest
import torch

from quire.errors import InputError
from quire.models import MLP, EnsembleConfig, MLPConfig, MLPEnsemble

SHAPES = pytest.mark.parametrize("hidden", [(), (7,), (7, 5, 6)], ids=str)


@SHAPES
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_outputs_are_those_of_the_members(hidden: tuple[int, ...], activation: str) -> None:
    ensemble = MLPEnsemble(EnsembleConfig(4, 3, 2, hidden, activation)).double()
    for bias in ensemble.biases:
        torch.nn.init.normal_(bias)
    x = torch.randn(9, 3, dtype=torch.float64)
    outputs = ensemble(x)
    assert outputs.shape == (4, 9, 2)
    for index in range(4):
        torch.testing.assert_close(outputs[index], ensemble.member(index)(x))


@SHAPES
def test_gradients_are_those_of_the_members(hidden: tuple[int, ...]) -> None:
    ensemble = MLPEnsemble(EnsembleConfig(3, 4, 2, hidden)).double()
    x, target = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 2, (6,))
    members = [ensemble.member(index) for index in range(3)]
    loss = torch.nn.functional.cross_entropy(ensemble(x).flatten(0, 1), target.repeat(3), reduction="sum")
    loss.backward()
    for index, member in enumerate(members):
        torch.nn.functional.cross_entropy(member(x), target, reduction="sum").backward()
        gradients = [parameter.grad for parameter in member.parameters()]
        for layer, (weight, bias) in enumerate(zip(ensemble.weights, ensemble.biases, strict=True)):
            torch.testing.assert_close(weight.grad[index], gradients[2 * layer])
            torch.testing.assert_close(bias.grad[index], gradients[2 * layer + 1])


def test_each_member_may_have_rows_of_its_own() -> None:
    ensemble = MLPEnsemble(EnsembleConfig(3, 4, 2, (5,)))
    x = torch.randn(3, 6, 4)
    outputs = ensemble(x)
    for index in range(3):
        torch.testing.assert_close(outputs[index], ensemble.member(index)(x[index]))


def test_members_go_in_and_come_out_unchanged() -> None:
    members = [MLP(MLPConfig(4, 2, (5, 3), "tanh")).double() for _ in range(3)]
    ensemble = MLPEnsemble.from_members(members)
    assert ensemble.config == EnsembleConfig(3, 4, 2, (5, 3), "tanh")
    for index, member in enumerate(members):
        for name, tensor in ensemble.member(index).state_dict().items():
            assert torch.equal(tensor, member.state_dict()[name]), name


def test_a_member_is_a_copy() -> None:
    ensemble = MLPEnsemble(EnsembleConfig(2, 3, 1, (4,)))
    with torch.no_grad():
        ensemble.member(0).head.weight.fill_(99.0)
    assert (ensemble.weights[-1] != 99.0).all()


def test_members_start_independently_and_with_the_right_variance() -> None:
    ensemble = MLPEnsemble(EnsembleConfig(50, 64, 10, (128,)))
    first = ensemble.weights[0]
    assert len(first[:, 0, 0].unique()) == 50
    # Of each member by itself, 8192 weights: standard error 1.6%. One fan over all members would be 50 off.
    torch.testing.assert_close(first.var(dim=(1, 2)), torch.full((50,), 2 / 64), rtol=0.08, atol=0)
    assert ensemble.weights[1].var().item() == pytest.approx(2 / (128 + 10), rel=0.03)
    assert all((bias == 0).all() for bias in ensemble.biases)


def test_errors_say_how_to_fix_them() -> None:
    ensemble = MLPEnsemble(EnsembleConfig(2, 3, 1, (4,)))
    with pytest.raises(InputError, match=r"\(N, 3\) for all members, or \(2, N, 3\)"):
        ensemble(torch.randn(5, 4))
    with pytest.raises(InputError, match="a number from 0 to 1"):
        ensemble.member(2)
    with pytest.raises(InputError, match="at least one MLP"):
        MLPEnsemble.from_members([])
    with pytest.raises(InputError, match="build every member from one config"):
        MLPEnsemble.from_members([MLP(MLPConfig(3, 1)), MLP(MLPConfig(3, 2))])
    with pytest.raises(InputError, match="plain members"):
        MLPEnsemble.from_members([MLP(MLPConfig(3, 1, dropout=0.5))])
