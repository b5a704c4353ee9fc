"""Generator and discriminator: how a class comes in, what spectral norm promises, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.models.gan import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from quire.models.registry import build_model, model_spec

SHAPES: list[dict[str, Any]] = [
    {"shape": (3,), "hidden": (8, 6)},
    {"shape": (2, 5, 7), "hidden": (8, 6)},
    {"shape": (1, 9, 10), "hidden": (8,), "kind": "convolutional", "channels": 4},
]
shapes = pytest.mark.parametrize("options", SHAPES, ids=["rows", "images", "convolutional"])
LABEL = torch.tensor([0, 1, 2, 2, 1])


def generator(**options: Any) -> Generator:
    return Generator(GeneratorConfig(**{"latent": 4, "classes": 3, **options}))


def discriminator(**options: Any) -> Discriminator:
    return Discriminator(DiscriminatorConfig(**{"classes": 3, **options}))


@shapes
def test_a_generator_is_a_decoder_of_noise_and_an_indicator_of_the_class(options: dict[str, Any]) -> None:
    model, noise = generator(**options).eval(), torch.randn(5, 4)
    made = model(noise, LABEL)
    assert made.shape == (5, *options["shape"])
    joined = torch.tensor(
        [[*z.tolist(), *(float(y == c) for c in range(3))] for z, y in zip(noise, LABEL, strict=True)]
    )
    torch.testing.assert_close(made, model.decoder(joined))
    unknown = model(noise, torch.full((5,), -100))
    torch.testing.assert_close(unknown, model.decoder(nn.functional.pad(noise, (0, 3))))


@shapes
def test_a_discriminator_adds_the_projection_of_the_class(options: dict[str, Any]) -> None:
    model, x = discriminator(**options).eval(), torch.randn(5, *options["shape"])
    logits, features = model(x, LABEL), model.features(x)
    assert logits.shape == (5,)
    assert model.projection is not None
    vectors = model.projection.weight.T
    for row in range(5):
        wanted = features[row] @ (model.head.weight[0] + vectors[LABEL[row]]) + model.head.bias[0]
        torch.testing.assert_close(logits[row], wanted)
    torch.testing.assert_close(model.class_logits(x)[torch.arange(5), LABEL], logits)
    unknown = model(x, torch.full((5,), -100))
    torch.testing.assert_close(unknown, model.head(features)[:, 0])


@shapes
@pytest.mark.parametrize("build", [generator, discriminator])
def test_every_parameter_of_a_conditional_network_has_a_gradient_and_is_rebuilt(
    options: dict[str, Any], build: Any
) -> None:
    model = build(**options)
    x = torch.randn(5, *((4,) if build is generator else options["shape"]))
    (model(x, LABEL) - 1).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    again = build_model(json.loads(json.dumps(model_spec(model))))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(x, LABEL), model.eval()(x, LABEL))


@shapes
def test_spectral_norm_leaves_every_weight_of_the_features_with_norm_one(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = discriminator(**options)
    layers = [layer for layer in model.features.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    with torch.no_grad():
        for layer in layers:
            layer.parametrizations.weight.original.mul_(7.0)
        for _ in range(200):
            model(torch.randn(2, *options["shape"]), LABEL[:2])
    assert len(layers) >= 2
    for layer in layers:
        assert torch.linalg.matrix_norm(layer.weight.flatten(1), 2).item() == pytest.approx(1, abs=1e-3)
    free = discriminator(**options, spectral=False)
    assert not any("parametrizations" in name for name in free.state_dict())


def test_without_classes_nobody_asks_for_any() -> None:
    assert generator(shape=(3,), classes=0)(torch.randn(2, 4)).shape == (2, 3)
    model = discriminator(shape=(3,), classes=0)
    assert model.projection is None
    assert model(torch.randn(2, 3)).shape == (2,)


def test_tanh_keeps_samples_within_one() -> None:
    model = generator(shape=(3,), output="tanh").eval()
    noise = 100 * torch.randn(50, 4)
    made = model(noise, torch.zeros(50, dtype=torch.int64))
    assert made.abs().max() <= 1
    linear = generator(shape=(3,)).eval()
    linear.load_state_dict(model.state_dict())
    torch.testing.assert_close(linear(noise, torch.zeros(50, dtype=torch.int64)).tanh(), made)


def call_without_label() -> Tensor:
    return generator(shape=(3,))(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (call_without_label, r"no class numbers for a conditional model.*from 0 to 2.*pass label"),
        (lambda: generator(shape=(3,), classes=-1), r"classes is -1.*a whole number from 0"),
        (lambda: generator(shape=(3,), latent=0), r"latent is 0.*an integer >= 1"),
        (lambda: generator(shape=(3,), output="tan"), r"unknown output 'tan'.*linear, tanh"),
        (lambda: discriminator(shape=(3,), hidden=()), r"hidden is \(\).*at least one width"),
    ],
)
def test_mistakes_are_explained(call: Any, text: str) -> None:
    with pytest.raises(InputError, match=f"(?s){text}"):
        call()
