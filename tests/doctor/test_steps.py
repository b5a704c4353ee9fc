"""Ten problems, four of them convex: 100 steps of full-batch descent with the advised step size, against
twelve from 1e-4 to 31.6 in half decades. An end is the mean loss over the last tenth of the steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from quire.doctor.curvature.steps import StepAdvice, advise_step, stable_limit
from quire.errors import InputError
from quire.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.slow

Loss = Callable[[Tensor, Tensor], Tensor]
Problem = tuple[nn.Module, Loss, Tensor, Tensor]
STEPS = 100
GRID = [10 ** (-4 + i / 2) for i in range(12)]


class Scaled(nn.Module):
    """x ⊙ w: with rows √λ and half the squared norm as the loss, a quadratic with eigenvalues λ."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.inner, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.leave = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(self.enter(x.view(-1, 1, 8, 8))).relu(), 2)
        return self.leave((x + self.second(self.inner(x))).relu().mean((2, 3)))


class Adder(nn.Module):
    """Reads pairs (number, mark) and gives the sum of the marked numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.leave = nn.RNN(2, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.read(x)[0][:, -1])


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1).mean() / 2


def by_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def standard(values: object) -> Tensor:
    tensor = torch.as_tensor(values, dtype=torch.float64)
    return (tensor - tensor.mean(0)) / tensor.std(0)


def digits(rows: int, wrong: int = 0) -> tuple[Tensor, Tensor]:
    inputs, target = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    chosen = torch.randperm(len(inputs))[:rows]
    target = target[chosen].long()
    target[:wrong] = torch.randint(10, (wrong,))
    return inputs[chosen].double() / 16, target


def quadratic() -> Problem:
    eigenvalues = torch.logspace(-3, 0, 50, dtype=torch.float64)
    return Scaled(torch.randn(50)), half_square, eigenvalues.sqrt().expand(4, 50), torch.zeros(4, 50)


def linear_regression() -> Problem:
    inputs, target = load_diabetes(return_X_y=True)
    return nn.Linear(10, 1), F.mse_loss, standard(inputs), standard(target)[:, None]


def logistic_regression() -> Problem:
    inputs, target = load_breast_cancer(return_X_y=True)
    return (
        nn.Linear(30, 1),
        F.binary_cross_entropy_with_logits,
        standard(inputs),
        torch.as_tensor(target)[:, None],
    )


def softmax_regression() -> Problem:
    """A tenth of the labels is drawn at random: without that the classes are separable and the loss has no
    minimum."""
    return nn.Linear(64, 10), F.cross_entropy, *digits(700, wrong=70)


def mlp_regression() -> Problem:
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
    return model, F.mse_loss, *linear_regression()[2:]


def mlp_classification() -> Problem:
    widths = (nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    return nn.Sequential(*widths), F.cross_entropy, *digits(128)


def convolutional() -> Problem:
    return Residual(), F.cross_entropy, *digits(96)


def autoencoder() -> Problem:
    images, _ = digits(128)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64)), F.mse_loss, images, images


def gpt() -> Problem:
    """Counting in steps of one to three, modulo twelve."""
    rows = torch.arange(9) * torch.randint(1, 4, (32, 1)) + torch.randint(0, 12, (32, 1))
    return GPT(GPTConfig(12, 8, 1, 2, 16)), by_token, rows[:, :-1] % 12, rows[:, 1:] % 12


def recurrent() -> Problem:
    inputs = torch.rand(64, 10, 2)
    inputs[..., 1] = (inputs[..., 1] > 0.8).float()
    return Adder(), F.mse_loss, inputs, inputs.prod(2).sum(1, keepdim=True)


PROBLEMS = [
    quadratic, linear_regression, logistic_regression, softmax_regression, mlp_regression, mlp_classification,
    convolutional, autoencoder, gpt, recurrent,
]  # fmt: skip


def pose(problem: Callable[[], Problem]) -> Problem:
    """In float64, from a fixed seed: at the edge of stability rounding alone changes where a run ends."""
    torch.manual_seed(0)
    model, loss, inputs, target = problem()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    labels = loss in (F.cross_entropy, by_token)
    return model.double(), loss, inputs, target if labels else target.double()


def descend(problem: Problem, step: float, steps: int = STEPS) -> float:
    """An ordinary loop; the mean of its last losses."""
    model, loss, inputs, target = problem
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=step)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        value = loss(model(inputs), target)
        value.backward()
        optimiser.step()
        losses.append(value.item())
    end = sum(losses[-(steps // 10) :]) / (steps // 10)
    return end if math.isfinite(end) else math.inf


@pytest.mark.slow
@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_ends_within_a_twentieth_of_the_best_of_a_grid(make: Callable[[], Problem]) -> None:
    problem = pose(make)
    model, loss, inputs, target = problem
    advice = advise_step(model, loss, [(inputs, target)], steps=STEPS)
    end = descend(problem, advice.step)
    best = min(descend(problem, step) for step in GRID)
    assert end <= 1.05 * best
    assert end < 0.99 * advice.start_loss
    assert end == pytest.approx(advice.end_loss, rel=0.01)
    # Less than the grid itself.
    assert advice.gradients < len(GRID) * STEPS


def parabola(*eigenvalues: float) -> Problem:
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    start = torch.ones(len(values), dtype=torch.float64)
    return Scaled(start), half_square, values.sqrt()[None], torch.zeros(1, len(values), dtype=torch.float64)


def advise(problem: Problem, **options: object) -> StepAdvice:
    model, loss, inputs, target = problem
    return advise_step(model, loss, [(inputs, target)], **options)  # type: ignore[arg-type]


def test_the_theory_of_a_quadratic() -> None:
    advice = advise(parabola(0.5, 1.0, 4.0), steps=20)
    assert advice.largest == pytest.approx(4)
    assert advice.smallest == pytest.approx(0.5)
    assert advice.first_step == pytest.approx(0.25)
    assert advice.limit == pytest.approx(0.5)
    assert advice.condition_number == pytest.approx(8)
    assert advice.slowest_rate == pytest.approx(0.875)
    assert advice.start_loss == pytest.approx(5.5 / 2)
    # The best rate is that of 2/(λmin + λmax) = 0.444.
    assert 0.25 < advice.step < 0.5
    text = str(advice)
    assert "1/λmax = 0.25 and a limit of 0.5" in text
    assert f"{advice.gradients} gradients" in text
    assert "condition number 8 leaves 0.875" in text


def test_each_trial_is_what_an_ordinary_loop_gives() -> None:
    problem = parabola(0.5, 1.0, 4.0)
    advice = advise(problem, steps=40)
    whole = [trial for trial in advice.trials if trial.steps == 40 and math.isfinite(trial.loss)]
    assert len(whole) >= 3
    for trial in whole:
        assert trial.loss == pytest.approx(descend(problem, trial.step, 40), rel=1e-6)
    assert advice.end_loss == min(trial.loss for trial in whole)
    # Curvature: three products of three gradients; one pass for the first loss; the trials.
    assert advice.gradients == 9 + 1 + sum(trial.steps for trial in advice.trials)


def test_momentum_moves_the_limit() -> None:
    """With μ = 0.9 descent on λ = 4 stays bounded below 2·1.9/4 = 0.95 alone."""
    assert stable_limit(4.0, 0.9, "sgd") == pytest.approx(0.95)
    for step, stable in ((0.94, True), (0.96, False)):
        weight = torch.ones(1, requires_grad=True)
        optimiser = torch.optim.SGD([weight], lr=step, momentum=0.9)
        for _ in range(1000):
            optimiser.zero_grad()
            (2 * weight.square()).sum().backward()
            optimiser.step()
        assert (abs(weight.item()) < 100) is stable
    advice = advise(parabola(0.01, 4.0), momentum=0.9)
    assert advice.momentum == 0.9
    assert advice.step < advice.limit == pytest.approx(0.95)
    assert advice.end_loss < advise(parabola(0.01, 4.0)).end_loss


def test_the_limit_of_adam() -> None:
    """With second moments held at 1 Adam is stable below 2·1.9/(0.1·λ) = 9.5 for λ = 4, and says so."""
    assert stable_limit(4.0, 0.9, "adam") == pytest.approx(9.5)
    for step, stable in ((9.4, True), (9.6, False)):
        weight, average = 1e-3, 0.0
        for _ in range(3000):
            average = 0.9 * average + 0.1 * 4 * weight
            weight -= step * average
        assert (abs(weight) < 1) is stable


def test_adam_is_preconditioned_and_labelled_so() -> None:
    """On ½ Σ λ_i w_i² at w = 1 the first second moments are g² = λ², so that D^-½ H D^-½ is the identity."""
    advice = advise(parabola(0.01, 1.0, 25.0), optimiser="adam", steps=40)
    assert advice.largest == pytest.approx(1, rel=1e-4)
    assert advice.smallest == pytest.approx(1, rel=1e-4)
    assert advice.condition_number == pytest.approx(1, rel=1e-3)
    assert "curvature preconditioned by Adam's second moments" in str(advice)
    assert advice.end_loss < 0.1 * advice.start_loss
    plain = advise(parabola(0.01, 1.0, 25.0), steps=40)
    assert plain.condition_number == pytest.approx(2500, rel=1e-3)


def test_leaves_the_model_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    batches = [(torch.randn(12, 3), torch.randn(12, 1)) for _ in range(3)]
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    with torch.no_grad():
        first = advise_step(model, F.mse_loss, iter(batches), steps=16)
        second = advise_step(model, F.mse_loss, batches, steps=16)
    assert first == second
    assert first.end_loss < first.start_loss
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_start_without_upward_curvature() -> None:
    """cos w at w = 0.1 bends down; the ladder still finds a step to its minimum at π."""

    class Cosine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.1], dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.weight.cos().sum() * inputs.sum()

    advice = advise_step(Cosine(), lambda output, _: output, [(torch.ones(1), torch.ones(1))], steps=50)
    assert advice.largest < 0
    assert math.isinf(advice.limit)
    assert math.isinf(advice.condition_number)
    assert advice.slowest_rate == 1
    assert advice.end_loss == pytest.approx(-1, abs=1e-3)


def test_errors_say_what_to_do() -> None:
    problem = parabola(1.0, 2.0)
    with pytest.raises(InputError, match=r"optimiser 'sdg'(.|\n)*did you mean 'sgd'"):
        advise(problem, optimiser="sdg")
    with pytest.raises(InputError, match=r"3 steps(.|\n)*at least 8"):
        advise(problem, steps=3)
    with pytest.raises(InputError, match="no batch"):
        advise_step(problem[0], problem[1], [])
    model, loss, inputs, target = problem
    with pytest.raises(InputError, match=r"a loss of nan before the first step(.|\n)*examine"):
        advise_step(model, loss, [(inputs * math.nan, target)])
