"""Penalties of codes and damage to inputs, against torch.distributions, Jacobians and counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace

from quire.errors import InputError
from quire.functional import autoencode
from quire.functional.autoencode import (
    code_sparsity,
    contractive_layer,
    contractive_penalty,
    corrupt,
    hide_places,
    laplace_nll,
    masking_noise,
    salt_and_pepper,
)


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# Penalties ------------------------------------------------------------------------------------


def test_sparsity_by_hand() -> None:
    codes = torch.tensor([[1.0, -2.0, 0.0], [0.5, 0.5, -0.5]])
    assert code_sparsity(codes).tolist() == [3.0, 1.5]


@pytest.mark.parametrize("strength", [0.3, 1.0, 5.0])
def test_laplace_prior(strength: float) -> None:
    codes = doubles(6, 4).requires_grad_()
    prior = Laplace(torch.zeros((), dtype=torch.float64), 1 / strength)
    torch.testing.assert_close(laplace_nll(codes, strength), -prior.log_prob(codes).sum(1))
    apart = laplace_nll(codes, strength) - strength * code_sparsity(codes)
    torch.testing.assert_close(apart, torch.full_like(apart, -4 * math.log(strength / 2)))
    with pytest.raises(InputError, match="a Laplace prior of strength 0\n  expected: a number > 0"):
        laplace_nll(codes, 0)


def jacobian_norm(encode: Any, x: Tensor) -> Tensor:
    jacobian = torch.autograd.functional.jacobian(encode, x, create_graph=True)
    return torch.stack([jacobian[n, :, n].square().sum() for n in range(len(x))])


@pytest.mark.parametrize(
    "activation",
    ["linear", "sigmoid", "tanh", "arctan", "softplus", "relu", "leaky_relu", "relu6", "log_sigmoid"],
)
def test_one_layer_in_closed_form(activation: str) -> None:
    from quire.nn.activation import activation as layer

    linear, f = nn.Linear(5, 4).double(), layer(activation)
    x = doubles(7, 5)
    wanted = jacobian_norm(lambda rows: f(linear(rows)), x)
    found = contractive_layer(x, linear.weight, linear.bias, activation)
    torch.testing.assert_close(found, wanted)
    parameters = list(linear.parameters())
    ours, theirs = (
        torch.autograd.grad(value.sum(), parameters, allow_unused=True, materialize_grads=True)
        for value in (found, wanted)
    )
    torch.testing.assert_close(ours, theirs)


def test_any_depth_is_a_function_of_every_parameter() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Sigmoid()).double()
    x = doubles(3, 4)
    names = [name for name, _ in net.named_parameters()]

    def penalty(*values: Tensor) -> Tensor:
        def encode(rows: Tensor) -> Tensor:
            return torch.func.functional_call(net, dict(zip(names, values, strict=True)), rows)

        return contractive_penalty(encode, x)

    assert torch.autograd.gradcheck(penalty, tuple(net.parameters()))


@pytest.mark.parametrize("at_once", [1, 2, 10**9])
def test_gradients_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Softplus(), nn.Linear(5, 7)).double()
    x = doubles(4, 2, 3)
    monkeypatch.setattr(autoencode, "MOST_GRADIENTS", at_once * x.numel())
    torch.testing.assert_close(contractive_penalty(net, x), jacobian_norm(net, x))
    with torch.no_grad():
        torch.testing.assert_close(contractive_penalty(net, x), jacobian_norm(net, x))


def test_codes_must_be_vectors() -> None:
    with pytest.raises(InputError, match=r"codes of shape \(2, 3, 4\)"):
        contractive_penalty(lambda x: x, doubles(2, 3, 4))


# Damage ---------------------------------------------------------------------------------------


def test_masking_noise() -> None:
    x = torch.randn(4000, 5)
    damaged = masking_noise(x, 0.3)
    zero = damaged == 0
    assert torch.equal(damaged[~zero], x[~zero])
    deviation = math.sqrt(0.3 * 0.7 / 4000)
    assert (zero.float().mean(0) - 0.3).abs().max() < 4.5 * deviation
    assert torch.equal(masking_noise(x, 0.0), x)
    assert not masking_noise(x, 1.0).any()
    assert masking_noise(x.bfloat16(), 0.5).dtype == torch.bfloat16


def test_a_small_share_is_kept_in_half_precision() -> None:
    """Drawn in bfloat16 itself, numbers below 0.001 would come four times as often."""
    ones = torch.ones(200_000, dtype=torch.bfloat16)
    hit = (masking_noise(ones, 1e-3) == 0).sum().item()
    assert abs(hit - 200) < 5 * math.sqrt(200)


def test_salt_and_pepper() -> None:
    x = torch.rand(4000, 3) * 0.5 + 0.25
    low, high = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor(4.0)
    damaged = salt_and_pepper(x, 0.4, low, high)
    pepper, salt = damaged == low, damaged == high
    assert torch.equal(damaged[~pepper & ~salt], x[~pepper & ~salt])
    deviation = math.sqrt(0.2 * 0.8 / 4000)
    for share in (pepper.float().mean(0), salt.float().mean(0)):
        assert (share - 0.2).abs().max() < 4.5 * deviation


def test_gaussian_noise_and_seeds() -> None:
    x = torch.zeros(20_000)
    noise = corrupt(x, "gaussian", 0.7)
    assert abs(noise.mean().item()) < 4.5 * 0.7 / math.sqrt(20_000)
    assert noise.std().item() == pytest.approx(0.7, rel=0.03)
    for kind in autoencode.CORRUPTIONS:
        draws = [
            corrupt(x[:50] + 0.5, kind, 0.5, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4)
        ]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("kind", "amount", "message"),
    [
        ("saltpepper", 0.1, "unknown kind of noise 'saltpepper'(.|\n)*did you mean 'salt_and_pepper'"),
        ("masking", 1.5, r"share to mask 1.5\n  expected: a number in \[0, 1\]"),
        ("salt_and_pepper", -0.1, "share to replace -0.1"),
        ("gaussian", -1.0, "noise with standard deviation -1.0"),
    ],
)
def test_wrong_noise(kind: Any, amount: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        corrupt(torch.zeros(3), kind, amount)


def test_hidden_features() -> None:
    hidden = hide_places(500, (10,), 0.3)
    assert hidden.shape == (500, 10)
    assert (hidden.sum(1) == 3).all()
    assert (hidden.float().mean(0) - 0.3).abs().max() < 4.5 * math.sqrt(0.21 / 500)


@pytest.mark.parametrize(("height", "width", "patch"), [(8, 8, 4), (7, 10, 4), (5, 5, 1), (6, 9, 3)])
def test_hidden_patches_are_whole(height: int, width: int, patch: int) -> None:
    hidden = hide_places(40, (3, height, width), 0.5, patch)
    assert hidden.shape == (40, 1, height, width)
    down, across = math.ceil(height / patch), math.ceil(width / patch)
    for image in hidden[:, 0]:
        kinds = [
            image[i * patch : (i + 1) * patch, j * patch : (j + 1) * patch].unique().tolist()
            for i in range(down)
            for j in range(across)
        ]
        assert all(len(kind) == 1 for kind in kinds)
        assert sum(kind == [True] for kind in kinds) == int(0.5 * down * across + 0.5)
