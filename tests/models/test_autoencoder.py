"""Autoencoders: codes and back, tied weights, and how far a code is contracted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.models.autoencoder import Autoencoder, AutoencoderConfig, linear_autoencoder
from quire.models.registry import build_model, model_spec


def make(shape: tuple[int, ...] = (5,), kind: Any = "dense", **options: Any) -> Autoencoder:
    settings = {"hidden": (6,), "channels": 3, "activation": "tanh", "code": 3, **options}
    return Autoencoder(AutoencoderConfig(shape, kind, **settings)).double()


def rows(*shape: int) -> Tensor:
    return torch.randn(4, *shape, dtype=torch.float64)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("shape", "kind"), [((5,), "dense"), ((2, 5, 7), "dense"), ((2, 5, 7), "convolutional")]
)
def test_forward_is_decode_after_encode(shape: tuple[int, ...], kind: str, tied: bool) -> None:
    model, x = make(shape, kind, tied=tied, code_activation="sigmoid"), rows(*shape)
    codes = model.encode(x)
    assert codes.shape == (4, 3)
    assert ((codes > 0) & (codes < 1)).all()
    torch.testing.assert_close(codes, model.encoder(x).sigmoid())
    torch.testing.assert_close(model(x), model.decode(codes))
    assert model(x).shape == x.shape


@pytest.mark.parametrize(
    ("shape", "kind"), [((5,), "dense"), ((1, 8, 8), "convolutional"), ((2, 5, 7), "convolutional")]
)
def test_a_tied_decoder_is_the_transpose(shape: tuple[int, ...], kind: str) -> None:
    # ⟨Ax, h⟩ = ⟨x, Aᵀh⟩ for the linear parts of both halves.
    model, x = make(shape, kind, activation="linear", tied=True), rows(*shape)
    with torch.no_grad():
        for bias in model.decoder.biases:
            bias.normal_()
        codes = rows(3)
        encoded = model.encode(x) - model.encode(torch.zeros_like(x))
        decoded = model.decode(codes) - model.decode(torch.zeros_like(codes))
    torch.testing.assert_close((encoded * codes).sum(1), (decoded * x).flatten(1).sum(1))


def test_a_tied_decoder_by_hand() -> None:
    model, codes = make(tied=True), rows(3)
    (w1, w2), (c1, c2) = (
        [p for n, p in model.encoder.named_parameters() if "weight" in n],
        model.decoder.biases,
    )
    with torch.no_grad():
        c1.normal_()
        c2.normal_()
    wanted = torch.tanh(codes @ w2 + c1) @ w1 + c2
    torch.testing.assert_close(model.decode(codes), wanted)
    assert sum(p.numel() for p in model.parameters()) == 5 * 6 + 6 + 6 * 3 + 3 + 6 + 5
    assert len({t.data_ptr() for t in model.state_dict().values()}) == len(model.state_dict())


@pytest.mark.parametrize("options", [{}, {"hidden": (6, 4)}, {"hidden": (), "code_activation": "sigmoid"}])
@pytest.mark.parametrize(
    ("shape", "kind"), [((5,), "dense"), ((2, 5, 3), "dense"), ((2, 5, 3), "convolutional")]
)
def test_contraction_is_the_squared_norm_of_the_jacobian(
    shape: tuple[int, ...], kind: str, options: dict[str, Any]
) -> None:
    model, x = make(shape, kind, **options), rows(*shape)
    jacobian = torch.autograd.functional.jacobian(model.encode, x, create_graph=True)
    wanted = torch.stack([jacobian[n, :, n].square().sum() for n in range(4)])
    found = model.contraction(x)
    torch.testing.assert_close(found, wanted)
    parameters = list(model.encoder.parameters())
    ours, theirs = (
        torch.autograd.grad(value.sum(), parameters, allow_unused=True, materialize_grads=True)
        for value in (found, wanted)
    )
    torch.testing.assert_close(ours, theirs)
    assert all(slope.any() for slope, p in zip(ours, parameters, strict=True) if p.dim() > 1)
    with torch.no_grad():
        torch.testing.assert_close(model.contraction(x), wanted)


def test_contraction_needs_rows_that_stand_alone() -> None:
    with pytest.raises(InputError, match=r"an encoder with batch norm(.|\n)*norm=\"none\""):
        make(norm="batch").contraction(rows(5))


def test_a_linear_autoencoder_is_affine() -> None:
    model = linear_autoencoder(6, 2).double()
    x, y = rows(6), rows(6)
    torch.testing.assert_close(model(x) + model(y), model(x + y) + model(torch.zeros_like(x)))
    at_zero = model(torch.zeros_like(x))
    assert torch.linalg.matrix_rank(model(torch.eye(6, dtype=torch.float64)) - at_zero[0]) == 2


def test_is_rebuilt_from_its_description() -> None:
    model = make((2, 5, 7), "convolutional", tied=True, code_activation="relu")
    again = build_model(model_spec(model))
    assert isinstance(again, Autoencoder)
    assert again.config == model.config
    again.double().load_state_dict(model.state_dict())
    x = rows(2, 5, 7)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"code": 0}, "code is 0\n  expected: an integer >= 1"),
        ({"code_activation": "sigmod"}, "unknown activation 'sigmod'(.|\n)*did you mean"),
        ({"tied": True, "norm": "batch"}, "tied weights with norm='batch'"),
        ({"shape": (1, 2)}, r"shape is \(1, 2\)"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AutoencoderConfig(**{"shape": (5,), **options})
    with pytest.raises(InputError, match=r"codes of shape \(2, 4\)"):
        make(tied=True).decode(torch.zeros(2, 4).double())
