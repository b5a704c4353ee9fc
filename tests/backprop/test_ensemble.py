"""The explicit gradients of an ensemble against autograd on its members."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from quire.backprop.ensemble import EnsembleEngine
from quire.errors import InputError
from quire.models.ensemble import EnsembleConfig, MLPEnsemble


@pytest.mark.parametrize("hidden", [(), (7,), (7, 5)])
@pytest.mark.parametrize("activation", ["relu", "tanh", "leaky_relu", "softplus"])
@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
@pytest.mark.parametrize("counted", [True, False])
def test_value_and_gradients(hidden: tuple[int, ...], activation: str, loss: str, counted: bool) -> None:
    torch.manual_seed(0)
    model = MLPEnsemble(EnsembleConfig(3, 4, 5, hidden, activation)).double()
    for bias in model.biases:
        torch.nn.init.normal_(bias)
    engine = EnsembleEngine(model)
    for rows in (6, 2, 6):  # buffers are used again
        x = torch.randn(rows, 4, dtype=torch.float64)
        y = torch.randint(5, (rows,)) if loss == "cross_entropy" else torch.randn(rows, 5).double()
        counts = torch.randint(0, 3, (rows, 3)).double() if counted else None
        total = torch.zeros((), dtype=torch.float64)
        for m in range(3):
            output = model(x)[m]
            each = (
                F.cross_entropy(output, y, reduction="none")
                if loss == "cross_entropy"
                else 0.5 * (output - y).square().sum(1)
            )
            total = total + (each if counts is None else each * counts[:, m]).sum()
        expected = torch.autograd.grad(0.3 * total, list(model.parameters()))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)  # gradients are added
        value = engine.gradients(x, y, counts, 0.3, loss=loss)
        torch.testing.assert_close(value, total.detach(), rtol=1e-12, atol=1e-12)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient + 1, rtol=1e-11, atol=1e-11)


def test_frozen_parameters_get_no_gradient() -> None:
    model = MLPEnsemble(EnsembleConfig(2, 3, 2, (4,)))
    model.weights[0].requires_grad_(False)
    EnsembleEngine(model).gradients(
        torch.randn(5, 3), torch.zeros(5, dtype=torch.long), None, 1.0, loss="cross_entropy"
    )
    assert model.weights[0].grad is None
    assert model.biases[0].grad is not None


def test_what_is_supported() -> None:
    model = MLPEnsemble(EnsembleConfig(2, 3, 2, (4,)))
    assert EnsembleEngine.supports(model, torch.float32)
    assert not EnsembleEngine.supports(model, torch.float64)
    assert not EnsembleEngine.supports(torch.nn.Linear(3, 2), torch.float32)
    handle = model.register_forward_hook(lambda *_: None)
    assert not EnsembleEngine.supports(model, torch.float32)
    handle.remove()
    assert EnsembleEngine.supports(model, torch.float32)
    with pytest.raises(InputError, match="unknown loss 'hinge'"):
        EnsembleEngine(model).gradients(torch.randn(2, 3), torch.zeros(2), None, 1.0, loss="hinge")
