"""Every registered model keeps one contract; the MLP is its formula."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from quire.errors import InputError
from quire.models import MLP, MODELS, MLPConfig, build_model, linear, model_spec

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "mlp": [
        {"in_features": 6, "out_features": 3},
        {"in_features": 6, "out_features": 1, "hidden": []},
        {"in_features": 6, "out_features": 2, "hidden": [5, 4], "activation": "tanh", "dropout": 0.2},
        {"in_features": 6, "out_features": 2, "hidden": [5], "norm": "batch"},
        {"in_features": 6, "out_features": 2, "hidden": [5], "norm": "layer", "activation": "arctan"},
    ],
    "mlp-ensemble": [{"members": 3, "in_features": 6, "out_features": 2, "hidden": [4, 5]}],
    "polynomial": [{"in_features": 6, "out_features": 2, "degree": 2}],
}
SPECS = [{"model": name, **config} for name, configs in EXAMPLES.items() for config in configs]
specs = pytest.mark.parametrize(
    "spec", SPECS, ids=lambda spec: "-".join(str(value) for value in spec.values())
)


def test_there_is_an_example_of_every_model() -> None:
    assert set(EXAMPLES) == set(MODELS)


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


def test_hidden_layers_are_plain_linear_layers_in_order() -> None:
    model = MLP(MLPConfig(4, 2, (5, 3), dropout=0.1, norm="batch"))
    kinds = [type(layer) for layer in model.body]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout] * 2
    assert list(model.state_dict())[:2] == ["body.0.weight", "body.0.bias"]
    assert model.body_features == 3
    x = torch.randn(6, 4)
    model.eval()
    torch.testing.assert_close(model(x), model.head(model.body(x)))


def test_no_hidden_layer_is_the_linear_model() -> None:
    model, x = linear(3, 2), torch.randn(5, 3)
    assert len(model.body) == 0
    torch.testing.assert_close(model(x), x @ model.head.weight.t() + model.head.bias)


def test_trailing_dimensions_are_flattened() -> None:
    model, x = MLP(MLPConfig(8, 2)), torch.randn(3, 2, 2, 2)
    torch.testing.assert_close(model(x), model(x.reshape(3, 8)))


def test_a_body_serves_another_head() -> None:
    model = MLP(MLPConfig(4, 3, (5,)))
    other = nn.Sequential(model.body, nn.Linear(model.body_features, 7))
    assert other(torch.randn(2, 4)).shape == (2, 7)


def test_initial_outputs_have_about_the_inputs_size() -> None:
    torch.manual_seed(0)
    for name in ("relu", "leaky_relu", "linear"):
        model = MLP(MLPConfig(256, 256, (256,) * 10, activation=name))
        assert 0.2 < model(torch.randn(64, 256)).square().mean() < 5, name


def test_dropout_acts_in_training_only() -> None:
    model, x = MLP(MLPConfig(4, 2, (64,), dropout=0.5)), torch.randn(3, 4)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


BAD = [
    ({"model": "mpl"}, "did you mean 'mlp'?"),
    ({"in_features": 2}, 'an entry "model": NAME'),
    ({"model": "mlp", "in_features": 2, "out_features": 1, "hiden": [3]}, "did you mean 'hidden'?"),
    ({"model": "mlp", "in_features": 2}, "lacks out_features"),
    ({"model": "mlp", "in_features": 0, "out_features": 1}, "in_features is 0"),
    ({"model": "mlp", "in_features": 2, "out_features": 1.5}, "out_features is 1.5"),
    ({"model": "mlp", "in_features": 2, "out_features": 1, "hidden": 5}, "write hidden=(128,)"),
    ({"model": "mlp", "in_features": 2, "out_features": 1, "hidden": [5, -1]}, "a width in hidden is -1"),
    ({"model": "mlp", "in_features": 2, "out_features": 1, "activation": "rellu"}, "did you mean 'relu'?"),
    ({"model": "mlp", "in_features": 2, "out_features": 1, "dropout": 1.0}, "a probability in [0, 1)"),
    ({"model": "mlp", "in_features": 2, "out_features": 1, "norm": "bath"}, "did you mean 'batch'?"),
    ({"model": "mlp-ensemble", "members": 0, "in_features": 2, "out_features": 1}, "members is 0"),
]


@pytest.mark.parametrize(("spec", "text"), BAD, ids=[text for _, text in BAD])
def test_a_wrong_description_says_what_is_wrong(spec: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        build_model(spec)
    assert text in str(caught.value)
    assert caught.value.fix


def test_wrong_inputs_and_strangers_are_refused() -> None:
    with pytest.raises(InputError, match="rows of 4 features"):
        MLP(MLPConfig(4, 2))(torch.randn(3, 5))
    with pytest.raises(InputError, match="Linear is not a registered model"):
        model_spec(nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@specs
def test_models_give_the_same_on_the_gpu(spec: dict[str, Any]) -> None:
    model, x = build_model(spec).double().eval(), torch.randn(5, 6, dtype=torch.float64)
    wanted = model(x)
    torch.testing.assert_close(model.cuda()(x.cuda()).cpu(), wanted)
