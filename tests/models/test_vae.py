"""The variational autoencoder: shapes, classes joined to both halves, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from quire.errors import InputError
from quire.models.conditional import asked_classes
from quire.models.registry import build_model, model_spec
from quire.models.vae import VAE, VAEConfig

KINDS: list[dict[str, Any]] = [
    {"shape": (6,), "hidden": (8,)},
    {"shape": (1, 5, 7), "hidden": (8, 4)},
    {"shape": (2, 9, 6), "kind": "convolutional", "hidden": (), "channels": 3, "norm": "batch"},
]
kinds = pytest.mark.parametrize("options", KINDS, ids=["rows", "images", "convolutional"])


@kinds
@pytest.mark.parametrize("classes", [0, 4])
def test_shapes_and_gradients(options: dict[str, Any], classes: int) -> None:
    model = VAE(VAEConfig(**options, latent=3, classes=classes))
    x, label = torch.randn(10, *options["shape"]), torch.arange(10) % 4 if classes else None
    raw, mean, log_std = model(x, label)
    assert raw.shape == x.shape
    assert mean.shape == log_std.shape == (10, 3)
    ((raw - 1).square().sum() + (mean - 1).square().sum() + (log_std - 1).square().sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_posteriors_start_with_the_priors_width() -> None:
    model = VAE(VAEConfig((6,), hidden=(8,), latent=3))
    mean, log_std = model.encode(100 * torch.randn(5, 6))
    assert log_std.abs().max() == 0
    assert mean.abs().max() > 0


@kinds
def test_a_class_changes_both_halves_and_an_unknown_one_is_a_row_of_zeros(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = VAE(VAEConfig(**options, latent=3, classes=2)).eval()
    x, z = torch.randn(1, *options["shape"]).expand(3, *options["shape"]), torch.randn(1, 3).expand(3, 3)
    label = torch.tensor([0, 1, -1])
    for found in (model.encode(x, label)[0], model.decode(z, label)):
        rows = found.flatten(1)
        assert torch.pdist(rows).min() > 1e-4, "all three are different"
    unknown = model.decoder(torch.cat([z[2:], torch.zeros(1, 2)], 1))
    assert_close(model.decode(z, label)[2:], unknown)


def test_a_conditional_model_is_rebuilt_from_its_description() -> None:
    model = VAE(VAEConfig((1, 4, 4), hidden=(8,), latent=2, classes=3))
    spec = model_spec(model)
    again = build_model(spec)
    again.load_state_dict(model.state_dict())
    x, label = torch.randn(3, 1, 4, 4), torch.tensor([2, 0, 1])
    assert_close(again(x, label), model(x, label), rtol=0, atol=0)
    assert spec["classes"] == 3


def test_missing_and_wrong_classes_are_refused() -> None:
    plain, conditional = (VAE(VAEConfig((6,), hidden=(8,), latent=2, classes=k)) for k in (0, 3))
    x, z = torch.randn(4, 6), torch.randn(4, 2)
    for call in (conditional.encode, conditional):
        with pytest.raises(InputError, match=r"no class numbers(?s:.*)label from 0 to 2(?s:.*)pass label"):
            call(x)
    with pytest.raises(InputError, match="no class numbers"):
        conditional.decode(z)
    with pytest.raises(InputError, match=r"made without classes(?s:.*)build the model with classes=K"):
        plain.encode(x, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match="the class number 3\n  expected: numbers from 0 to 2"):
        conditional.encode(x, torch.tensor([0, 1, 2, 3]))
    with pytest.raises(InputError, match=r"of type torch.float32 and shape \(4,\)"):
        conditional.encode(x, torch.zeros(4))
    with pytest.raises(InputError, match=r"shape \(3,\)\n  expected: 4 integers"):
        conditional.decode(z, torch.tensor([0, 1, 2]))
    with pytest.raises(InputError, match=r"inputs of shape \(4, 5\)"):
        conditional.encode(torch.randn(4, 5), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match="latent is 0"):
        VAEConfig((6,), latent=0)
    with pytest.raises(InputError, match="classes is -1"):
        VAEConfig((6,), classes=-1)


def test_classes_that_are_asked_for() -> None:
    assert asked_classes(0, 4, None) is None
    for label, wanted in ((None, [0, 1, 2, 0]), (2, [2, 2, 2, 2]), ([1, 0, 2, 1], [1, 0, 2, 1])):
        found = asked_classes(3, 4, label)
        assert found is not None
        assert found.tolist() == wanted
    for wrong in (3, -1, [0, 1], 1.0):
        with pytest.raises(InputError, match=r"for 4 samples\n  expected: one class, or 4, from 0 to 2"):
            asked_classes(3, 4, wrong)  # type: ignore[arg-type]
