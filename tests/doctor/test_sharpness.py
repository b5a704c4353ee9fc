from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.doctor.curvature.sharpness import Sharpness
from quire.errors import InputError

pytestmark = pytest.mark.slow


class Parabola(nn.Module):
    """½ Σ λ_i w_i², whatever the inputs."""

    def __init__(self, *eigenvalues: float) -> None:
        super().__init__()
        self.register_buffer("eigenvalues", torch.tensor(eigenvalues, dtype=torch.float64))
        self.weight = nn.Parameter(torch.ones(len(eigenvalues), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.eigenvalues * self.weight.square()).sum() / 2


def value(output: Tensor, target: Tensor) -> Tensor:
    return output


ROW = torch.zeros(1)


def test_on_a_quadratic() -> None:
    sharpness = Sharpness(Parabola(0.5, 1.0, 2.0, 8.0), value, every=1, budget=math.inf)
    assert math.isnan(sharpness.value)
    for _ in range(3):
        look = sharpness.step(ROW, ROW)
        assert look is not None
    assert [step for step, *_ in sharpness.history] == [1, 2, 3]
    for _, largest, limit, error in sharpness.history:
        assert largest == pytest.approx(8, rel=1e-3)
        assert limit == pytest.approx(0.25, rel=1e-3)
        assert abs(largest - 8) <= error + 1e-9
    assert sharpness.value == sharpness.history[-1].value


def test_an_eigenvalue_that_overtakes_the_old_one_is_seen() -> None:
    model = Parabola(*[1.0] * 20, 8.0)
    sharpness = Sharpness(model, value, every=1, budget=math.inf)
    sharpness.step(ROW, ROW)
    model.eigenvalues[0] = 16.0
    for _ in range(6):
        sharpness.step(ROW, ROW)
    assert sharpness.value == pytest.approx(16, rel=0.02)


def test_nothing_that_curves_upwards_has_no_limit() -> None:
    sharpness = Sharpness(Parabola(-1.0, -2.0), value, every=1, budget=math.inf)
    look = sharpness.step(ROW, ROW)
    assert look is not None
    assert look.value == pytest.approx(-1)
    assert math.isinf(look.limit)


def dense_largest(model: nn.Module, inputs: Tensor, target: Tensor) -> float:
    """By torch.func.hessian."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, values, (inputs,)), target)

    blocks = torch.func.hessian(loss)(parameters)
    rows = [
        torch.cat([blocks[a][b].reshape(parameters[a].numel(), -1) for b in parameters], 1)
        for a in parameters
    ]
    return torch.linalg.eigvalsh(torch.cat(rows))[-1].item()


def test_follows_the_dense_hessian_in_training() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(40, 3, dtype=torch.float64)
    target = (inputs[:, :1] * inputs[:, 1:2]).sin()
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    sharpness = Sharpness(model, F.mse_loss, every=10, budget=math.inf)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    compared = []
    for _ in range(200):
        optimiser.zero_grad()
        F.mse_loss(model(inputs), target).backward()
        optimiser.step()
        look = sharpness.step(inputs, target)
        if look is not None:
            compared.append((look.value, dense_largest(model, inputs, target)))
    assert len(compared) == 20
    for found, expected in compared:
        assert found == pytest.approx(expected, rel=0.1)
    values = [expected for _, expected in compared]
    assert max(values) > 1.2 * min(values)  # there was something to follow


def test_leaves_everything_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 1))
    inputs, target = torch.randn(16, 3), torch.randn(16, 1)
    model.train()
    model[2].eval()
    F.mse_loss(model(inputs), target).backward()
    states = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    sharpness = Sharpness(model, F.mse_loss, every=1, budget=math.inf)
    with torch.no_grad():
        assert sharpness.step(inputs, target) is not None
    model[2].train()
    assert sharpness.step(inputs, target) is not None
    model[2].eval()
    assert all(torch.equal(tensor, states[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


class Clock:
    """Time that passes with each step and each pass through the model alone."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize("budget", [0.02, 0.2])
def test_the_share_of_time_is_honoured(budget: float) -> None:
    """A step takes 1 s; a look 7 s however many products it takes, as its loss is computed once."""
    clock = Clock()
    model = Parabola(1.0, 2.0, 3.0)
    model.register_forward_hook(lambda *_: setattr(clock, "seconds", clock.seconds + 7))
    sharpness = Sharpness(model, value, every=5, budget=budget, clock=clock)
    shares = []
    for _ in range(4000):
        clock.seconds += 1
        look = sharpness.step(ROW, ROW)
        if look is not None:
            shares.append(sharpness.share)
    assert sharpness.spent == 7 * len(sharpness.history)
    # Only the cost of the first look must be guessed.
    assert max(shares[1:]) <= budget
    assert sharpness.share > 0.8 * budget  # and it is used
    steps = [look.step for look in sharpness.history]
    assert min(b - a for a, b in itertools.pairwise(steps)) >= 5


def test_every_is_the_least_distance_where_time_is_plenty() -> None:
    clock = Clock()
    sharpness = Sharpness(Parabola(1.0, 2.0), value, every=25, budget=0.02, clock=clock)
    for _ in range(2000):
        clock.seconds += 1
        sharpness.step(ROW, ROW)
    assert len(sharpness.history) > 10
    # Looks cost nothing here, but that is known after the first one alone, which may have to wait.
    steps = [look.step for look in sharpness.history]
    assert all(b - a == 25 for a, b in itertools.pairwise(steps))


def test_reads_no_more_rows_than_asked() -> None:
    seen = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append((len(output), len(target)))
        return F.mse_loss(output, target)

    Sharpness(nn.Linear(2, 1), loss, every=1, budget=math.inf, rows=10).step(
        torch.randn(64, 2), torch.randn(64, 1)
    )
    assert seen == [(10, 10)]


def test_any_loss_through_due_and_look() -> None:
    weight = nn.Linear(1, 1, bias=False)
    sharpness = Sharpness(weight, every=2, budget=math.inf)
    assert [sharpness.due() for _ in range(2)] == [False, True]
    assert sharpness.look(lambda: 3 * weight.weight.square().sum()).value == pytest.approx(6)
    assert not sharpness.due()
    with pytest.raises(InputError, match=r"no loss to look at(.|\n)*look"):
        sharpness.step(ROW, ROW)
    with pytest.raises(InputError, match=r"budget = 0(.|\n)*a share of the time"):
        Sharpness(weight, budget=0)


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    sharpness = Sharpness(Parabola(0.5, 8.0).cuda(), value, every=1, budget=math.inf)
    look = sharpness.step(ROW, ROW)
    assert look is not None
    assert look.value == pytest.approx(8, rel=1e-3)
