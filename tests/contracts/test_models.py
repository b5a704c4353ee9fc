"""Every registered model: rebuilt from its description, a gradient everywhere, half precision, export.

A new model is found by itself: its required fields are filled with small numbers.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from quire.models import MODELS, build_model, model_spec

VARIANTS: list[dict[str, Any]] = [
    {"model": "mlp", "in_features": 6, "out_features": 1, "hidden": []},
    {
        "model": "mlp",
        "in_features": 6,
        "out_features": 2,
        "hidden": [5, 4],
        "activation": "tanh",
        "dropout": 0.2,
    },
    {"model": "mlp", "in_features": 6, "out_features": 2, "hidden": [5], "norm": "batch"},
    {
        "model": "mlp",
        "in_features": 6,
        "out_features": 2,
        "hidden": [5],
        "norm": "layer",
        "activation": "arctan",
    },
    {"model": "mlp-ensemble", "members": 3, "in_features": 6, "out_features": 2, "hidden": [4, 5]},
]


def smallest(name: str) -> dict[str, Any]:
    """Six inputs, two of everything else that must be given."""
    fields = dataclasses.fields(MODELS[name].config)
    required = [f.name for f in fields if f.default is dataclasses.MISSING]
    return {"model": name, **{field: 6 if field == "in_features" else 2 for field in required}}


SPECS = [*map(smallest, MODELS), *(smallest(spec["model"]) | spec for spec in VARIANTS)]
specs = pytest.mark.parametrize(
    "spec", SPECS, ids=lambda spec: "-".join(str(value) for value in spec.values())
)


@specs
def test_a_model_is_rebuilt_from_its_description(spec: dict[str, Any]) -> None:
    model = build_model(spec).eval()
    full = model_spec(model)
    assert full.items() >= spec.items()
    again = build_model(json.loads(json.dumps(full))).eval()
    again.load_state_dict(load(save({name: t.contiguous() for name, t in model.state_dict().items()})))
    x = torch.randn(4, 6)
    assert torch.equal(model(x), again(x))
    assert model_spec(again) == full


@specs
def test_a_gradient_reaches_every_parameter(spec: dict[str, Any]) -> None:
    model = build_model(spec)
    (model(torch.randn(64, 6)) - 1).square().sum().backward()  # a target, since weights may start at zero
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@specs
def test_half_precision_and_autocast_are_finite_and_close(spec: dict[str, Any]) -> None:
    model, x = build_model(spec).eval(), torch.randn(8, 6)
    wanted = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).float(), wanted, atol=0.1, rtol=0.1)
    torch.testing.assert_close(model.bfloat16()(x.bfloat16()).float(), wanted, atol=0.1, rtol=0.1)


@specs
def test_a_model_can_be_exported_with_any_number_of_rows(spec: dict[str, Any]) -> None:
    model, x = build_model(spec).eval(), torch.randn(5, 6)
    rows = torch.export.Dim("rows")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
    other = torch.randn(9, 6)
    torch.testing.assert_close(program.module()(other), model(other))


@pytest.mark.gpu
@specs
def test_models_give_the_same_on_the_gpu(spec: dict[str, Any]) -> None:
    model, x = build_model(spec).double().eval(), torch.randn(5, 6, dtype=torch.float64)
    wanted = model(x)
    torch.testing.assert_close(model.cuda()(x.cuda()).cpu(), wanted)
