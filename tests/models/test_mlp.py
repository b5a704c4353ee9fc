"""The MLP is its formula; what every model must do is in tests/contracts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quire.errors import InputError
from quire.models import MLP, MLPConfig, build_model, linear, model_spec


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
