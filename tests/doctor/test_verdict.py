"""Faults that show in training are found and named at their place; healthy training is left in peace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.data.batch import TensorData
from quire.doctor import SIGNS, Monitor, Watching, diagnose, judge
from quire.doctor.course import Baseline, Course
from quire.errors import InputError
from quire.models import MLP, MLPConfig
from quire.tasks.supervised import Categorical, Supervised
from quire.train import fit

pytestmark = pytest.mark.slow

Loss = Callable[[Any, Any], Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batches(x: Tensor, y: Tensor, count: int = 1) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.chunk(count), y.chunk(count), strict=True))


def quadrants(rows: int = 128, features: int = 6) -> tuple[Tensor, Tensor]:
    x = drawn(rows, features)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def mlp(*first: nn.Module, outputs: int = 4, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*first, nn.Linear(6, 32), activation(), nn.Linear(32, outputs))


def plain(
    depth: int, activation: type[nn.Module], scale: float | None = None, normalised: bool = False
) -> nn.Sequential:
    """Layers without a way around them; weights of He's deviation, or `scale` times PyTorch's own."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(64, 64), *([nn.BatchNorm1d(64)] if normalised else []), activation()]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear) and scale is None:
                nn.init.kaiming_normal_(layer.weight)
                layer.bias.zero_()
            elif isinstance(layer, nn.Linear):
                layer.weight.mul_(scale)
    return model


class Last(nn.Module):
    """The class of a sequence from the last state of a recurrent layer."""

    def __init__(self, cell: type[nn.RNN] | type[nn.LSTM], scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.out = cell(6, 16, batch_first=True), nn.Linear(16, 4)
        with torch.no_grad():
            self.cells.weight_hh_l0.mul_(scale)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(x)[0][:, -1])
        return out


class LinearState(nn.Module):
    """A recurrent layer without a bound: a state of the size of its inputs, many times over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.out = nn.RNN(6, 16, batch_first=True, nonlinearity="relu"), nn.Linear(16, 4)
        with torch.no_grad():
            self.cells.weight_hh_l0.copy_(1.6 * torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(1e-6 * x)[0][:, -1])
        return out


class Breaks(nn.Module):
    """The logarithm of a number that training makes negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 4), nn.Identity()
        self.room = nn.Parameter(torch.tensor(0.02))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x) + torch.log(self.room))
        return out


def room_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + output.mean()


@dataclass(frozen=True)
class Fault:
    code: str
    where: str
    model: Callable[[], nn.Module] = mlp
    loss: Loss = F.cross_entropy
    data: Callable[[], tuple[Tensor, Tensor]] = quadrants
    optimiser: Callable[[Any], torch.optim.Optimizer] | None = None
    batches: int = 1
    silence: tuple[str, ...] = ()
    """Checks before the first step that see it as well."""
    steps: int = 30


def sgd(lr: float, momentum: float = 0.0) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr, momentum=momentum)


def adam(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Adam(parameters, lr)


def wide(rows: int = 64) -> tuple[Tensor, Tensor]:
    x, y = quadrants(rows, 64)
    return x, y


def sequences(places: int = 60) -> tuple[Tensor, Tensor]:
    x = drawn(32, places, 6)
    return x, (x[:, 0, 0] > 0).long() + 2 * (x[:, 0, 1] > 0).long()


def coins() -> tuple[Tensor, Tensor]:
    """Targets that have nothing to do with the inputs."""
    return drawn(32, 200), torch.randint(4, (32,), generator=torch.Generator().manual_seed(1))


def squares() -> tuple[Tensor, Tensor]:
    x = drawn(64, 6)
    return x, x[:, :1]


FAULTS = {
    "gradient descent that diverges": Fault("step-too-large", "SGD, step size 300", optimiser=sgd(300.0)),
    "Adam that jumps": Fault("step-too-large", "Adam, step size 30", optimiser=adam(30.0)),
    "gradient descent that creeps": Fault("step-too-small", "SGD, step size 1e-06", optimiser=sgd(1e-6)),
    "Adam that creeps": Fault("step-too-small", "Adam, step size 1e-07", optimiser=adam(1e-7)),
    "steps from one side of a valley to the other": Fault(
        "oscillation", "SGD, step size 0.05", lambda: nn.Linear(6, 1), F.l1_loss,
        data=lambda: (torch.ones(16, 6), torch.ones(16, 1)), optimiser=sgd(0.05),
    ),
    "a logarithm that breaks": Fault("not-finite", "output of last", Breaks, room_loss, optimiser=sgd(0.02)),
    "sigmoids one behind the other": Fault(
        "vanishing-gradients", "0.weight", lambda: plain(12, nn.Sigmoid, 1.0), data=wide,
        silence=("gradient-flow",),
    ),
    "weights that are too large": Fault(
        "exploding-gradients", "0.weight", lambda: plain(12, nn.Identity, 12.0), data=wide,
        silence=("gradient-flow",),
    ),
    "layers without a way around": Fault(
        "shattered-gradients", "inputs", lambda: plain(25, nn.ReLU, normalised=True), data=wide
    ),
    "a tanh net that forgets": Fault("recurrent-reach", "cells", lambda: Last(nn.RNN), data=sequences),
    "a state that grows": Fault("recurrent-reach", "cells", LinearState, data=sequences),
    "units that die": Fault("units-die", "1", optimiser=sgd(20.0)),
    "units that saturate": Fault(
        "units-saturate", "1", lambda: mlp(activation=nn.Tanh), optimiser=sgd(60.0)
    ),
    "noise alone": Fault(
        "noisy-gradients", "batch of 4 rows", lambda: nn.Linear(200, 4), data=coins, batches=8,
        optimiser=sgd(1e-3),
    ),
    "nothing but likeness": Fault(
        "collapse", "2", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)),
        lambda output, _: output.var(0).sum() + (output.mean() - 3).square(), optimiser=adam(0.03),
        steps=300,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_training_is_found_at_its_place(name: str) -> None:
    fault = FAULTS[name]
    model = fault.model()
    given = [fault.optimiser(model.parameters())] if fault.optimiser else []
    x, y = fault.data()
    verdict = diagnose(
        model,
        fault.loss,
        batches(x, y, fault.batches),
        optimisers=given,
        silence=fault.silence,
        steps=fault.steps,
    )
    places = [finding.where for finding in verdict.findings if finding.code == fault.code]
    assert fault.where in places, str(verdict)


def curve(*values: float) -> list[tuple[int, float]]:
    return [(10 * (i + 1), value) for i, value in enumerate(values)]


FALLING = [2.0 * 0.7**i + 0.1 for i in range(12)]

RECORDED = {
    "a loss that became nothing": ("not-finite", "training loss", Course(curve(2, 1, math.nan), ended=True)),
    "one gradient of a million": (
        "exploding-gradients", "step 50", Course(curve(*FALLING), norms=curve(1, 1, 1, 1, 1e6, 1, 1)),
    ),
    "a loss that rose": ("step-too-large", "step 60", Course(curve(2, 1.8, 3, 9, 20, 40), ended=True)),
    "a loss that stays": (
        "plateau", "steps 10 to 60", Course(curve(2.30, 2.30, 2.31, 2.30, 2.30, 2.30), ended=True)
    ),
    "no better than the largest class": (
        "underfit", "training accuracy",
        Course(baseline=Baseline("accuracy", 0.7, 0.7, "the largest class", True), ended=True),
    ),
    "a validation loss that turns": (
        "overfit", "from step 40",
        Course(curve(*FALLING), curve(2, 1.5, 1.2, 1.1, 1.2, 1.4, 1.7, 2.0, 2.2, 2.4, 2.5, 2.6), ended=True,
               keeps_best=False),
    ),
    "a loss that still falls": (
        "unfinished", "steps 90 to 100", Course(curve(*[3 - 0.2 * i for i in range(10)]), ended=True)
    ),
    "a log that ends in failure": ("failed", "step 3", Course(failed="step 3: the loss is not finite")),
    "a task's own warning": ("collapse", "model", Course(warnings=["the posterior has collapsed: 18 of 20"])),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_a_fault_is_read_from_a_record(name: str) -> None:
    code, where, course = RECORDED[name]
    assert (code, where) in [(found.code, found.where) for found in judge(course).findings], str(
        judge(course)
    )
    assert code not in judge(course, silence=[code]).findings.codes()


def test_every_sign_has_a_planted_fault() -> None:
    assert {f.code for f in FAULTS.values()} | {code for code, _, _ in RECORDED.values()} == set(SIGNS)


Training = tuple[nn.Module, Loss, list[Any], Callable[[Any], torch.optim.Optimizer]]
HEALTHY: dict[str, Callable[[], Training]] = {
    "classes": lambda: (mlp(), F.cross_entropy, batches(*quadrants(), 4), adam(1e-2)),
    "classes, one batch": lambda: (mlp(), F.cross_entropy, batches(*quadrants()), sgd(0.3, 0.9)),
    "values": lambda: (mlp(outputs=1), F.mse_loss, batches(*squares()), adam(1e-2)),
    "tanh": lambda: (mlp(activation=nn.Tanh), F.cross_entropy, batches(*quadrants(), 2), adam(1e-2)),
    "twelve layers": lambda: (plain(12, nn.ReLU), F.cross_entropy, batches(*wide()), adam(1e-3)),
    "LSTM": lambda: (Last(nn.LSTM), F.cross_entropy, batches(*sequences(12)), adam(1e-2)),
    "batch norm": lambda: (
        mlp(nn.BatchNorm1d(6)), F.cross_entropy, batches(*quadrants(), 4), sgd(0.1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_training_is_left_in_peace(name: str) -> None:
    torch.manual_seed(0)
    model, loss, rows, optimiser = HEALTHY[name]()
    verdict = diagnose(model, loss, rows, optimisers=optimiser(model.parameters()))
    assert verdict.findings.codes("error", "warning") == [], str(verdict)
    assert verdict.sentence.startswith("It learns: the loss went from ")


def test_records_of_good_runs_have_no_fault() -> None:
    course = Course(curve(*FALLING), curve(*[v + 0.05 for v in FALLING]), ended=True)
    assert judge(course).findings.codes("error", "warning") == []
    assert judge(course).sentence.startswith("It learns: the loss went from 2.1 to 0.1")


def test_a_diagnosis_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    F.cross_entropy(model(drawn(16, 6)), quadrants(16)[1]).backward()
    optimiser.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [value.clone() for entry in optimiser.state.values() for value in entry.values()]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    stream = torch.get_rng_state()
    diagnose(model, F.cross_entropy, batches(*quadrants(), 4), optimisers=optimiser)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    after = [value for entry in optimiser.state.values() for value in entry.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert all(
        torch.equal(a, p.grad)
        for a, p in zip(gradients, model.parameters(), strict=True)
        if p.grad is not None
    )
    assert not any(module._forward_hooks for module in model.modules())
    assert model.training


def test_the_gradient_norm_and_the_sizes_of_a_look_are_right() -> None:
    from quire.doctor.watch import look

    model, (x, y) = mlp(), quadrants()
    found, gradients = look(model, lambda: F.cross_entropy(model(x), y))
    F.cross_entropy(model(x), y).backward()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, p.grad)
    wanted = math.sqrt(
        sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    )
    assert found.norm == pytest.approx(wanted, rel=1e-6)
    hidden = model[:2](x)
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
    assert found.layers[1].size == pytest.approx(float(hidden.detach().square().mean().sqrt()), rel=1e-5)
    assert found.layers[1].dead == pytest.approx(float((hidden == 0).all(0).float().mean()))


def test_noise_and_signal_of_a_known_gradient() -> None:
    """Gradients g_i = w − x_i with x ~ N(m, s²): signal |w − m|², variance s²·D."""
    from quire.doctor.case import Case
    from quire.doctor.probe import gradient_noise

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.full((50,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.place - x

    x = 2 * drawn(8 * 32, 50) + 1
    rows = [(part, part) for part in x.chunk(8)]
    case = Case(Point(), lambda output, _: output.square().sum(1).mean() / 2, rows)
    noise = gradient_noise(case, case.model)
    assert noise is not None
    assert noise.rows == 32
    assert noise.signal == pytest.approx(50 * 4, rel=0.05)
    assert noise.variance == pytest.approx(50 * 4, rel=0.15)


def test_a_monitor_keeps_to_its_share_and_says_what_it_saw() -> None:
    model, (x, y) = mlp(), quadrants()
    now = [0.0]
    monitor = Monitor(model, F.cross_entropy, [(x, y)], share=0.1, curvature=False, clock=lambda: now[0])
    look = monitor.look

    def slow() -> None:
        look()
        now[0] += 1.0

    monitor.look = slow  # type: ignore[method-assign]
    for _ in range(200):
        now[0] += 1.0
        monitor.step(2.0)
    looked = len(monitor.course.looks)
    assert 15 <= looked <= 23
    assert monitor.spent <= 0.1 * now[0] + 1
    with pytest.raises(InputError, match="share 0"):
        Monitor(model, F.cross_entropy, [(x, y)], share=0)


def dense_largest(monitor: Monitor) -> float:
    model, pair = monitor.case.original.eval(), monitor.pair
    named = {name: p.detach() for name, p in model.named_parameters()}

    def value(*parts: Tensor) -> Tensor:
        output = torch.func.functional_call(model, dict(zip(named, parts, strict=True)), pair.inputs)
        return F.cross_entropy(output, pair.target)

    blocks = torch.autograd.functional.hessian(value, tuple(named.values()))
    rows = [
        torch.cat([block.reshape(p.numel(), -1) for block in row], 1)
        for p, row in zip(named.values(), blocks, strict=True)
    ]
    return float(torch.linalg.eigvalsh(torch.cat(rows))[-1])


def test_training_is_the_same_with_a_monitor_as_without() -> None:
    def trained(watching: bool) -> tuple[dict[str, Tensor], Monitor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4))
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        x, y = quadrants()
        monitor = Monitor(model, F.cross_entropy, [(x, y)], share=1.0) if watching else None
        for _ in range(20):
            optimiser.zero_grad()
            value = F.cross_entropy(model(x), y)
            value.backward()
            optimiser.step()
            if monitor is not None:
                monitor.step(value)
                monitor.look()
        return dict(model.state_dict()), monitor

    (one, _), (other, monitor) = trained(False), trained(True)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert monitor is not None
    assert len(monitor.course.looks) > 20
    # λmax of the whole batch, by the dense Hessian where training has ended.
    monitor.look_at_curvature()
    assert monitor.course.curvatures[-1][1] == pytest.approx(dense_largest(monitor), rel=0.1)
    assert not monitor.verdict().findings.codes("error", "warning"), str(monitor.verdict())


def test_the_trainers_callback_names_a_fault_while_it_trains() -> None:
    x, y = quadrants()
    data = TensorData({"inputs": x, "target": y})
    from quire.options import Optim, Train

    def run(lr: float) -> list[str]:
        torch.manual_seed(0)
        task = Supervised(MLP(MLPConfig(in_features=6, out_features=4, hidden=(32,))), Categorical(4))
        said: list[str] = []
        fit(
            task, data, steps=60, optim=Optim(name="sgd", lr=lr), train=Train(validate_every=10),
            callbacks=[Watching(lambda finding: said.append(finding.code), share=1.0)],
        )  # fmt: skip
        return said

    assert run(0.1) == []
    assert "units-die" in run(12.0)


def test_a_task_s_own_warning_is_taken_apart() -> None:
    course = Course(warnings=["2 of 3 components are flat: in 4 directions; drop columns", "all is lost"])
    flat, lost = judge(course).findings
    assert (flat.what, flat.evidence, flat.fix) == (
        "2 of 3 components are flat", "in 4 directions", "drop columns"
    )  # fmt: skip
    assert (lost.what, lost.evidence, lost.fix) == (
        "all is lost", "all is lost", "see the report of the run"
    )  # fmt: skip
