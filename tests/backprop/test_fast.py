from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.backprop.fast import LOSSES, MAX_PLANS, DenseEngine
from quire.errors import InputError
from quire.models.mlp import MLP, MLPConfig
from quire.nn.activation import ACTIVATION_LAYERS

SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda o, y: functional.cross_entropy(o, y, reduction="sum"),
    "squared": lambda o, y: functional.mse_loss(o, y, reduction="sum") / 2,
    "bernoulli": lambda o, y: functional.binary_cross_entropy_with_logits(o, y, reduction="sum"),
}


def sample(loss: str, rows: int, outputs: int, dtype: torch.dtype = torch.float64) -> Tensor:
    if loss == "cross_entropy":
        return torch.randint(0, outputs, (rows,))
    return (
        torch.randn(rows, outputs, dtype=dtype)
        if loss == "squared"
        else torch.rand(rows, outputs, dtype=dtype)
    )


def autograd(model: nn.Module, loss: str, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, list[Tensor]]:
    value = SUMS[loss](model(x), y)
    return value.detach(), list(torch.autograd.grad(factor * value, list(model.parameters())))


def agree(model: nn.Module, gradients: list[Tensor], tolerance: float = 1e-12) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None
        scale = expected.abs().max().clamp(min=1.0)
        error = (parameter.grad - expected).abs().max() / scale
        assert error <= tolerance, f"{name}: {error}"


def test_every_loss_has_an_oracle() -> None:
    assert set(SUMS) == set(LOSSES)


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("activation", list(ACTIVATION_LAYERS))
@pytest.mark.parametrize("hidden", [(), (9,), (8, 7, 5)])
def test_equals_autograd(loss: str, activation: str, hidden: tuple[int, ...]) -> None:
    model = MLP(MLPConfig(6, 4, hidden, activation)).double()
    engine = DenseEngine(model)
    for rows in (1, 7, 64, 7, 13):  # buffers of one batch size must not leak into another
        x, y = 3 * torch.randn(rows, 6, dtype=torch.float64), sample(loss, rows, 4)
        model.zero_grad()
        value = engine.gradients(x, y, 1 / rows, loss=loss)
        expected, gradients = autograd(model, loss, x, y, 1 / rows)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        agree(model, gradients)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_calls_add_up(loss: str) -> None:
    model = MLP(MLPConfig(6, 4)).double()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    start = 0
    for parameter in model.parameters():  # views of one buffer, as the trainer gives them
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    engine = DenseEngine(model)
    x, y = torch.randn(20, 6, dtype=torch.float64), sample(loss, 20, 4)
    parts = zip(x.split([7, 7, 6]), y.split([7, 7, 6]), strict=True)
    values = [engine.gradients(part, target, 0.25, loss=loss) for part, target in parts]
    expected, gradients = autograd(model, loss, x, y, 0.25)
    torch.testing.assert_close(sum(values), expected, rtol=1e-12, atol=1e-12)
    agree(model, gradients)
    torch.testing.assert_close(flat, torch.cat([gradient.flatten() for gradient in gradients]))


def test_factors_as_numbers_and_tensors() -> None:
    model = MLP(MLPConfig(3, 2, (4,))).double()
    engine = DenseEngine(model)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 2, (5,))
    for factor in (1.0, 0.5, 1.0, torch.tensor(0.25, dtype=torch.float64), 0.5):
        model.zero_grad()
        engine.gradients(x, y, factor, loss="cross_entropy")
        agree(model, autograd(model, "cross_entropy", x, y, float(factor))[1])


@pytest.mark.parametrize("ignored", [[0], [1, 4], [0, 1, 2, 3, 4, 5, 6]])
def test_ignored_targets_count_nothing(ignored: list[int]) -> None:
    model = MLP(MLPConfig(3, 2, (4,))).double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(0, 2, (7,))
    y[ignored] = -100
    value = DenseEngine(model).gradients(x, y, 0.5, loss="cross_entropy")
    expected, gradients = autograd(model, "cross_entropy", x, y, 0.5)
    torch.testing.assert_close(value, expected)
    agree(model, gradients)


@pytest.mark.parametrize("wrong", [2, -1])
def test_a_target_out_of_range_raises(wrong: int) -> None:
    y = torch.tensor([0, wrong, 1])
    with pytest.raises(IndexError, match="out of range"):
        DenseEngine(MLP(MLPConfig(3, 2))).gradients(torch.randn(3, 3), y, 1.0, loss="cross_entropy")


def test_extreme_logits_stay_finite() -> None:
    model = nn.Sequential(nn.Linear(1, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1e4], [-1e4]]))
    for loss, target in (("cross_entropy", torch.tensor([1, 0])), ("bernoulli", torch.ones(2, 2))):
        x = torch.tensor([[1.0], [-1.0]])
        value = DenseEngine(model).gradients(x, target, 1.0, loss=loss)
        torch.testing.assert_close(value, SUMS[loss](model(x), target))
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


class Scaled(nn.Module):
    """A loss that mixes the outputs of a row and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.scale * functional.softplus(output.cumsum(1)) - target).abs().pow(3).sum()


def test_a_loss_of_ones_own() -> None:
    model, loss = MLP(MLPConfig(3, 2, (4,))).double(), Scaled()
    assert DenseEngine.supports(model, loss, "cpu", torch.float64)
    engine = DenseEngine(model)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    both = nn.ModuleList([model, loss])
    expected = loss(model(x), y)
    gradients = torch.autograd.grad(0.5 * expected, list(both.parameters()))
    for times in (1, 2):
        value = engine.gradients(x, y, 0.5, loss=loss)
        torch.testing.assert_close(value, expected.detach())
        assert not value.requires_grad
        agree(both, [times * gradient for gradient in gradients])


def test_targets_of_another_shape_or_dtype() -> None:
    model = MLP(MLPConfig(3, 1)).double()
    engine = DenseEngine(model)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 2, (5,))
    value = engine.gradients(x, y, 1.0, loss="bernoulli")
    expected, gradients = autograd(model, "bernoulli", x, y.double().unsqueeze(1), 1.0)
    torch.testing.assert_close(value, expected)
    agree(model, gradients)
    with pytest.raises(InputError, match=r"shape \(5, 2\) for outputs of shape \(5, 1\)"):
        engine.gradients(x, torch.zeros(5, 2), 1.0, loss="squared")
    with pytest.raises(InputError, match="did you mean 'squared'"):
        engine.gradients(x, y, 1.0, loss="square")


def test_follows_the_models_parameters_and_freezing() -> None:
    model = MLP(MLPConfig(3, 2, (4, 4))).double()
    engine = DenseEngine(model)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 2, (5,))
    engine.gradients(x, y, 1.0, loss="cross_entropy")
    model.body[0].weight.data = torch.randn(4, 3, dtype=torch.float64)
    model.head.bias = nn.Parameter(torch.randn(2, dtype=torch.float64))
    model.zero_grad()
    engine.gradients(x, y, 1.0, loss="cross_entropy")
    agree(model, autograd(model, "cross_entropy", x, y, 1.0)[1])
    model.zero_grad()
    model.body.requires_grad_(False)
    engine.gradients(x, y, 1.0, loss="cross_entropy")
    assert all(parameter.grad is None for parameter in model.body.parameters())
    assert model.head.weight.grad is not None


def test_gradients_leave_no_trace_in_autograd_and_buffers_stay_few() -> None:
    model = MLP(MLPConfig(3, 2))
    engine = DenseEngine(model)
    for rows in range(1, 3 * MAX_PLANS):
        x, y = torch.randn(rows, 3), torch.randint(0, 2, (rows,))
        assert not engine.gradients(x, y, 1.0, loss="cross_entropy").requires_grad
    assert len(engine._plans) == MAX_PLANS
    functional.cross_entropy(model(x), y).backward()


def test_softplus_and_leaky_relu_take_the_layers_own_settings() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Softplus(2.0), nn.Linear(4, 4), nn.LeakyReLU(0.3))
    model.append(nn.Linear(4, 2)).double()
    assert DenseEngine.supports(model, "squared", "cpu", torch.float64)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    DenseEngine(model).gradients(x, y, 1.0, loss="squared")
    agree(model, autograd(model, "squared", x, y, 1.0)[1])


def test_supports() -> None:
    def supported(model: nn.Module, loss: str = "squared", dtype: torch.dtype = torch.float32) -> bool:
        return DenseEngine.supports(model, loss, "cpu", dtype)

    assert supported(MLP(MLPConfig(3, 2, (4, 4), "tanh")))
    assert supported(MLP(MLPConfig(3, 2)).double(), dtype=torch.float64)
    assert not supported(MLP(MLPConfig(3, 2)), dtype=torch.float64)
    assert not supported(MLP(MLPConfig(3, 2)), "hinge")
    assert not supported(MLP(MLPConfig(3, 2, dropout=0.1)))
    assert not supported(MLP(MLPConfig(3, 2, norm="batch")))
    assert not supported(nn.Sequential(nn.Linear(3, 2), nn.GELU()))
    assert not supported(nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    assert not DenseEngine.supports(MLP(MLPConfig(3, 2)), "squared", "cuda", torch.float32)
    hooked = MLP(MLPConfig(3, 2))
    handle = hooked.body[1].register_forward_hook(lambda module, args, output: output + 1)
    assert not supported(hooked)
    handle.remove()
    assert supported(hooked)
    subclass = type("Residual", (MLP,), {"forward": lambda self, x: self.head(self.body(x)) + x})
    assert not supported(subclass(MLPConfig(3, 3)))
