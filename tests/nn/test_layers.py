"""Dense, normalising and activation layers against torch.nn and the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.errors import InputError
from quire.functional.activations import ACTIVATIONS
from quire.functional.normalise import batch_norm, layer_norm
from quire.nn import (
    ACTIVATION_LAYERS,
    BatchNorm,
    Dense,
    LayerNorm,
    PostNorm,
    PreNorm,
    Standardise,
    activation,
)

X = torch.linspace(-33, 33, 662, dtype=torch.float64)


def test_there_is_a_layer_for_each_element_wise_activation() -> None:
    assert set(ACTIVATION_LAYERS) == {name for name, one in ACTIVATIONS.items() if one.elementwise}


@pytest.mark.parametrize("name", list(ACTIVATION_LAYERS))
def test_the_layer_is_the_function_with_its_derivative(name: str) -> None:
    a = X.clone().requires_grad_()
    z = activation(name)(a)
    torch.testing.assert_close(z, ACTIVATIONS[name].function(X), rtol=1e-14, atol=1e-14)
    (slope,) = torch.autograd.grad(z.sum(), a)
    torch.testing.assert_close(slope, ACTIVATIONS[name].derivative(X))


def test_an_unknown_activation_names_its_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'relu6'"):
        activation("relu66")


@pytest.mark.parametrize("name", ["relu", "tanh", "linear"])
@pytest.mark.parametrize("bias", [True, False])
def test_dense_is_linear_then_activation(name: str, bias: bool) -> None:
    layer, peer = Dense(5, 3, name, bias=bias), nn.Linear(5, 3, bias)
    peer.load_state_dict(layer.state_dict())
    z = torch.randn(2, 7, 5)
    torch.testing.assert_close(layer(z), activation(name)(peer(z)))
    if bias:
        assert (layer.bias == 0).all()


def test_dense_starts_with_the_right_variance() -> None:
    # 40,000 weights: the standard error of a variance is 0.7%.
    assert Dense(200, 200, "relu").weight.var().item() == pytest.approx(2 / 200, rel=0.03)
    assert Dense(100, 400, "tanh").weight.var().item() == pytest.approx(2 / 500, rel=0.03)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (5, 4, 2, 3)])
def test_batch_norm_keeps_shape_and_torchs_state(shape: tuple[int, ...]) -> None:
    peers = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    own, peer = BatchNorm(4), peers[len(shape)](4)
    for _ in range(3):
        x = torch.randn(shape) * 3 + 1
        torch.testing.assert_close(own(x), peer(x))
    assert own.state_dict().keys() == peer.state_dict().keys()
    for ours, theirs in zip(own.state_dict().values(), peer.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(own.eval()(x), peer.eval()(x))
    by_formula = batch_norm(x, own.running_mean, own.running_var, own.weight, own.bias)
    torch.testing.assert_close(own(x), by_formula)


def test_batch_norm_is_found_as_one_of_torchs() -> None:
    assert isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(BatchNorm(3)), nn.SyncBatchNorm)


def test_momentum_of_the_average_is_the_complement() -> None:
    of_batch, of_average = BatchNorm(2, momentum=0.3), BatchNorm(2, momentum=0.7, momentum_of="average")
    x = torch.randn(5, 2)
    of_batch(x)
    of_average(x)
    torch.testing.assert_close(of_batch.running_mean, of_average.running_mean)
    torch.testing.assert_close(of_batch.running_mean, 0.3 * x.mean(0))


def test_batch_norm_refuses_what_it_cannot_normalise() -> None:
    with pytest.raises(InputError, match="single value for each channel"):
        BatchNorm(3)(torch.randn(1, 3))
    with pytest.raises(InputError, match=r"expected: \(N, 3, …\)"):
        BatchNorm(3)(torch.randn(2, 5))
    with pytest.raises(InputError, match="meaning of momentum"):
        BatchNorm(3, momentum_of="old")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a share in \[0, 1\]"):
        BatchNorm(3, momentum=1.5)
    assert BatchNorm(3).eval()(torch.randn(1, 3)).shape == (1, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_is_torchs_and_the_formula(dtype: torch.dtype) -> None:
    own, peer = LayerNorm((3, 4)).to(dtype), nn.LayerNorm((3, 4)).to(dtype)
    with torch.no_grad():
        own.weight.uniform_()
        own.bias.uniform_()
    peer.load_state_dict(own.state_dict())
    x = torch.randn(5, 3, 4, dtype=dtype)
    torch.testing.assert_close(own(x), peer(x))
    torch.testing.assert_close(layer_norm(x, 2, own.weight, own.bias), peer(x), rtol=2e-2, atol=2e-2)
    with pytest.raises(InputError, match="normalized_shape="):
        own(x.mT)


def test_pre_and_post_norm_differ_in_what_leaves_the_block() -> None:
    x = torch.randn(8, 6) * 5 + 2
    function = nn.Linear(6, 6)
    pre, post = PreNorm(LayerNorm(6), function), PostNorm(LayerNorm(6), function)
    torch.testing.assert_close(pre(x) - x, function(nn.functional.layer_norm(x, (6,))))
    torch.testing.assert_close(post(x).mean(1), torch.zeros(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(post(x).var(1, correction=0), torch.ones(8), atol=1e-3, rtol=0)


def test_standardise_travels_with_the_weights_and_inverts() -> None:
    values = torch.tensor([[1.0, 5.0, 2.0], [3.0, 5.0, 4.0]])
    layer = Standardise(3).fit(values)
    assert layer(values).tolist() == [[-1.0, 0.0, -1.0], [1.0, 0.0, 1.0]]
    again = Standardise(3)
    again.load_state_dict(layer.state_dict())
    torch.testing.assert_close(again.inverse(again(values)), values)
    assert not list(layer.parameters())
    with pytest.raises(InputError, match="4 columns"):
        layer.fit(torch.randn(5, 4))
    with pytest.raises(InputError, match="at least one row"):
        layer.fit(torch.randn(0, 3))
