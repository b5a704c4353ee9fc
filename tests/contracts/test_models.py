"""Every registered model: rebuilt from its description, a gradient everywhere, half precision, export.

A new model is found by itself and tried by the example that it is registered with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from quire.models import MODELS, build_model, model_spec

Inputs = tuple[Tensor, ...]

VARIANTS: list[dict[str, Any]] = [
    {"model": "mlp", "hidden": [], "out_features": 1},
    {"model": "mlp", "hidden": [5, 4], "activation": "tanh", "dropout": 0.2},
    {"model": "mlp", "hidden": [5], "norm": "batch"},
    {"model": "mlp", "hidden": [5], "norm": "layer", "activation": "arctan"},
    {"model": "mlp-ensemble", "members": 3, "hidden": [4, 5]},
    {"model": "vgg", "batch_norm": True},
    {"model": "autoencoder", "tied": True, "code_activation": "sigmoid"},
    {"model": "autoencoder", "norm": "batch"},
    {"model": "googlenet", "aux_logits": False, "transform_input": True},
    {"model": "resnet", "block": "bottleneck", "groups": 4, "width_per_group": 16},
    {"model": "resnet", "shortcut": "pad"},
    {"model": "recurrent", "kind": "rnn", "tie_weights": True},
    {"model": "recurrent", "kind": "gru", "reset": "before", "keeps": "1-z"},
    {"model": "gpt", "tied": False, "bias": False},
]


def described(spec: dict[str, Any]) -> dict[str, Any]:
    """With the example's values for what it does not say."""
    return json.loads(json.dumps({**MODELS[spec["model"]].example.config, **spec}))


def words(spec: dict[str, Any]) -> str:
    return "-".join(str(value) for value in spec.values())


SPECS = [{"model": name} for name in MODELS] + VARIANTS
specs = pytest.mark.parametrize("spec", [pytest.param(described(spec), id=words(spec)) for spec in SPECS])


def inputs(spec: dict[str, Any], rows: int) -> Inputs:
    """Numbers, or tokens where the configuration has a vocabulary, or tokens of two languages."""
    shape = MODELS[spec["model"]].example.input_shape
    sizes = [spec[name] for name in ("vocab_size", "source_vocab", "target_vocab") if name in spec]
    if not sizes:
        return (torch.randn(rows, *shape),)
    return tuple(torch.randint(size, (rows, *shape)) for size in sizes)


def changed(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """With the numbers changed; tokens stay."""
    return tuple(change(part) if part.is_floating_point() else part for part in x)


def outputs(model: nn.Module, x: Inputs) -> Tensor:
    """All outputs in one vector; a model may have several while it is trained."""
    found = model(*x)
    parts = (found,) if isinstance(found, Tensor) else found
    return torch.cat([part.flatten() for part in parts])


def ready(spec: dict[str, Any]) -> nn.Module:
    """The model as it is used: its batch norms have seen a batch, without which some networks fade out."""
    model = build_model(spec)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None  # the plain average over all batches, of which there is one
    with torch.no_grad():
        model(*inputs(spec, 16))
    return model.eval()


@specs
def test_a_model_is_rebuilt_from_its_description(spec: dict[str, Any]) -> None:
    model = ready(spec)
    full = model_spec(model)
    assert full.items() >= spec.items()
    again = build_model(json.loads(json.dumps(full))).eval()
    x = inputs(spec, 4)
    starts_at_zero = not outputs(model, x).any()
    assert starts_at_zero or not torch.allclose(outputs(model, x), outputs(again, x))
    again.load_state_dict(load(save({name: t.contiguous() for name, t in model.state_dict().items()})))
    assert torch.equal(outputs(model, x), outputs(again, x))
    assert model_spec(again) == full


@specs
def test_a_gradient_reaches_every_parameter(spec: dict[str, Any]) -> None:
    model = build_model(spec)
    # A target, since weights may start at zero.
    (outputs(model, inputs(spec, 64)) - 1).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@specs
def test_half_precision_and_autocast_are_finite_and_close(spec: dict[str, Any]) -> None:
    model, x = ready(spec), inputs(spec, 8)
    wanted = outputs(model, x)
    # A deep network of random weights makes much of a rounding: what it makes of rounded inputs tells.
    rounded = outputs(model, changed(x, lambda part: part.bfloat16().float()))
    tolerance = 0.05 * wanted.norm() + 10 * (rounded - wanted).norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert (outputs(model, x).float() - wanted).norm() <= tolerance
    half = outputs(model.bfloat16(), changed(x, lambda part: part.bfloat16()))
    assert (half.float() - wanted).norm() <= tolerance


@pytest.mark.slow
@specs
def test_a_model_can_be_exported_with_any_number_of_rows(spec: dict[str, Any]) -> None:
    model = ready(spec)
    rows = torch.export.Dim("rows")
    x = inputs(spec, 5)
    program = torch.export.export(model, x, dynamic_shapes=tuple({0: rows} for _ in x))
    other = inputs(spec, 9)
    torch.testing.assert_close(outputs(program.module(), other), outputs(model, other))


@pytest.mark.gpu
@specs
def test_models_give_the_same_on_the_gpu(spec: dict[str, Any]) -> None:
    model, x = ready(spec).double(), changed(inputs(spec, 5), lambda part: part.double())
    wanted = outputs(model, x)
    there = tuple(part.cuda() for part in x)
    torch.testing.assert_close(outputs(model.cuda(), there).cpu(), wanted)
