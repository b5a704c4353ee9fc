"""Encoders and decoders: what they compute, layer by layer, and that any size comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import InputError
from quire.models.coders import CoderConfig, Decoder, Encoder


def weights(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each layer in order."""
    state = module.state_dict()
    names = [name.removesuffix(".weight") for name in state if name.endswith(".weight")]
    return [(state[f"{name}.weight"], state[f"{name}.bias"]) for name in names]


def shuffled_biases(module: Any) -> Any:
    """Biases start at 0, where a missing one would not be noticed."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return module


@pytest.mark.parametrize("shape", [(7,), (2, 3, 5)])
def test_dense_coders_by_hand(shape: tuple[int, ...]) -> None:
    config = CoderConfig(shape, hidden=(6, 4), activation="tanh")
    encoder, decoder = shuffled_biases(Encoder(config, 3)), shuffled_biases(Decoder(config, 3))
    x, codes = torch.randn(5, *shape), torch.randn(5, 3)
    z = x.reshape(5, -1)
    (w1, b1), (w2, b2), (w3, b3) = weights(encoder)
    assert [w.shape[0] for w in (w1, w2, w3)] == [6, 4, 3]
    wanted = torch.tanh(torch.tanh(z @ w1.T + b1) @ w2.T + b2) @ w3.T + b3
    torch.testing.assert_close(encoder(x), wanted)
    (v1, c1), (v2, c2), (v3, c3) = weights(decoder)
    assert [v.shape[0] for v in (v1, v2)] == [4, 6]
    wanted = torch.tanh(torch.tanh(codes @ v1.T + c1) @ v2.T + c2) @ v3.T + c3
    torch.testing.assert_close(decoder(codes), wanted.reshape(5, *shape))


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (9, 4)])
def test_convolutional_coders_by_hand(size: tuple[int, int]) -> None:
    config = CoderConfig((2, *size), "convolutional", hidden=(6,), channels=3, activation="relu")
    encoder, decoder = shuffled_biases(Encoder(config, 4)), shuffled_biases(Decoder(config, 4))
    z = x = torch.randn(3, 2, *size)
    *stages, (w1, b1), (w2, b2) = weights(encoder)
    sizes = [size]
    for weight, bias in stages:
        padded = functional.pad(z, (1, 1 + z.shape[3] % 2, 1, 1 + z.shape[2] % 2))
        z = functional.conv2d(padded, weight, bias, stride=2).relu()
        sizes.append(tuple(z.shape[2:]))
    wanted = (z.flatten(1) @ w1.T + b1).relu() @ w2.T + b2
    torch.testing.assert_close(encoder(x), wanted)
    assert max(sizes[-1]) <= 4
    codes = torch.randn(3, 4)
    (v1, c1), (v2, c2), *stages = weights(decoder)
    z = ((codes @ v1.T + c1).relu() @ v2.T + c2).relu().reshape(3, -1, *sizes[-1])
    for i, (weight, bias) in enumerate(stages):
        # A transposed convolution as an ordinary one: zeros between the pixels, the kernel turned around.
        spread = z.new_zeros(3, z.shape[1], 2 * z.shape[2] - 1, 2 * z.shape[3] - 1)
        spread[:, :, ::2, ::2] = z
        kernel = weight.transpose(0, 1).flip(2, 3)
        height, width = sizes[-2 - i]
        z = functional.conv2d(spread, kernel, bias, padding=2)[:, :, :height, :width]
        z = z if i == len(stages) - 1 else z.relu()
    torch.testing.assert_close(decoder(codes), z)


def test_any_size_comes_back() -> None:
    for height in (1, 2, 3, 6, 7, 12, 17, 28):
        for width in (1, 4, 5, 9, 28):
            config = CoderConfig((1, height, width), "convolutional", hidden=(), channels=1)
            x = torch.randn(2, 1, height, width)
            assert Decoder(config, 3)(Encoder(config, 3)(x)).shape == x.shape, (height, width)


def test_maps_shrink_to_a_few_pixels_and_widen_up_to_eightfold() -> None:
    config = CoderConfig((3, 100, 225), "convolutional", channels=16)
    assert config.maps == [
        (3, 100, 225), (16, 50, 113), (32, 25, 57), (64, 13, 29), (128, 7, 15), (128, 4, 8), (128, 2, 4),
    ]  # fmt: skip
    assert CoderConfig((1, 28, 28), "convolutional").maps[-1] == (128, 4, 4)
    assert CoderConfig((2, 3, 5)).maps == [(30, 1, 1)]


@pytest.mark.parametrize("kind", ["dense", "convolutional"])
def test_batch_norm_stands_before_each_hidden_activation_and_nowhere_else(kind: Any) -> None:
    config = CoderConfig((1, 16, 16), kind, hidden=(8,), channels=4, norm="batch")
    for coder in (Encoder(config, 3), Decoder(config, 3)):
        layers = list(coder.layers)
        hidden = [i for i, layer in enumerate(layers) if isinstance(layer, nn.ReLU)]
        norms = [i for i, layer in enumerate(layers) if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)]
        assert [i - 1 for i in hidden] == norms
        assert len(norms) == {"dense": 1, "convolutional": 3}[kind]


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_signals_keep_their_size_through_many_stages(activation: str) -> None:
    torch.manual_seed(0)
    config = CoderConfig((3, 64, 64), "convolutional", hidden=(256,), channels=32, activation=activation)
    with torch.no_grad():
        encoded = Encoder(config, 64)(torch.randn(16, 3, 64, 64))
        decoded = Decoder(config, 64)(torch.randn(16, 64))
    for signal in (encoded, decoded):
        assert 0.3 < signal.std().item() < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (3, 4)}, r"shape is \(3, 4\)\n  expected: \(D,\) for rows or \(C, H, W\) for images"),
        ({"shape": (0,)}, "a size in shape is 0"),
        ({"kind": "recurrent"}, "unknown kind of coder 'recurrent'"),
        ({"hidden": 8}, "hidden is 8"),
        ({"channels": 0}, "channels is 0"),
        ({"activation": "rleu"}, "unknown activation 'rleu'(.|\n)*did you mean 'relu'"),
        ({"norm": "layer"}, "unknown norm 'layer'"),
        ({"kind": "convolutional"}, r"a convolutional coder of rows of shape \(5,\)(.|\n)*kind=\"dense\""),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CoderConfig(**{"shape": (5,), **options})


def test_wrong_shapes() -> None:
    config = CoderConfig((2, 3, 3))
    with pytest.raises(
        InputError, match=r"inputs of shape \(4, 3, 3\)\n  expected: a batch of shape \(B, 2, 3, 3\)"
    ):
        Encoder(config, 2)(torch.zeros(4, 3, 3))
    with pytest.raises(InputError, match=r"codes of shape \(4, 3\)\n  expected: a batch of shape \(B, 2\)"):
        Decoder(config, 2)(torch.zeros(4, 3))
    with pytest.raises(InputError, match="features is 0"):
        Encoder(config, 0)
