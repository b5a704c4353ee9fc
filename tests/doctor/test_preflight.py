"""Planted faults are found and named at their place; healthy models are left in peace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.doctor import CHECKS, examine
from quire.errors import InputError
from quire.models import GPT, GPTConfig


def rows(n: int = 64, d: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def labels(n: int = 64, classes: int = 3) -> Tensor:
    return torch.arange(n) % classes


def mlp(*last: nn.Module, width: int = 16, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, outputs), *last)


class Unused(nn.Module):
    """A layer that forward forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.forgotten = mlp(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).exp()
        out: Tensor = self.last(h)
        h += 1
        return out


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).log() * 0


def changed(model: nn.Module, change: Callable[[nn.Module], Any]) -> nn.Module:
    change(model)
    return model


def big(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(40)


def deep(activation: Callable[[], nn.Module], scale: float) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(14):
        layers += [nn.Linear(6, 6), activation()]
    model = nn.Sequential(*layers, nn.Linear(6, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model


@dataclass(frozen=True)
class Fault:
    code: str
    where: str
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy
    x: Callable[[], Tensor] = rows
    y: Callable[[], Any] = labels
    more: Callable[[], tuple[Any, ...]] = tuple
    """Inputs beside x."""
    validation: Callable[[], list[Any]] = list
    optimisers: Callable[[nn.Module], list[torch.optim.Optimizer]] = lambda model: []


def dead() -> nn.Module:
    model = mlp()
    with torch.no_grad():
        model[0].bias.fill_(-50)
    return model


def saturated() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        model[0].weight.mul_(100)
    return model


class Masked(nn.Module):
    """Attention over the places that a mask leaves."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.attend, self.out, self.keeps = (
            nn.MultiheadAttention(6, 1, batch_first=True),
            nn.Linear(6, 3),
            keeps,
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = ~mask if self.keeps else mask
        out: Tensor = self.out(self.attend(x, x, x, key_padding_mask=hidden)[0].mean(1))
        return out


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def box_loss(output: Tensor, target: list[dict[str, Tensor]]) -> Tensor:
    return F.l1_loss(output, torch.stack([one["boxes"][0] for one in target]))


class DropsAlways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(F.dropout(x, 0.5))
        return out


class Deaf(nn.Module):
    """What it learns has no way to its output beyond rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) * 1e-6
        return out


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.words(x))
        return out


def tokens() -> nn.Module:
    torch.manual_seed(0)
    return Tokens()


def padded() -> Tensor:
    """Eight rows of tokens from 1 on, of different lengths, filled up with 0."""
    found = torch.randint(1, 20, (8, 10), generator=torch.Generator().manual_seed(0))
    return torch.where(torch.arange(10) < torch.arange(3, 11)[:, None], found, 0)


def tokens_loss(output: Any, target: Tensor) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def some_frozen(model: nn.Module) -> None:
    for p in model.parameters():
        p.requires_grad_(False)


FAULTS = {
    "softmax before cross-entropy": Fault("softmax-before-cross-entropy", "3", lambda: mlp(nn.Softmax(1))),
    "sigmoid before a loss of logits": Fault(
        "sigmoid-before-logits-loss", "3", lambda: mlp(nn.Sigmoid(), outputs=1),
        F.binary_cross_entropy_with_logits, y=lambda: (labels() == 0).float()[:, None],
    ),
    "logits into nll": Fault("logits-into-probability-loss", "2", mlp, F.nll_loss),
    "probabilities into nll": Fault(
        "logits-into-probability-loss", "3", lambda: mlp(nn.Softmax(1)), F.nll_loss
    ),
    "logits into binary cross-entropy": Fault(
        "logits-into-probability-loss", "2", lambda: mlp(outputs=1), F.binary_cross_entropy,
        y=lambda: (labels() == 0).float()[:, None],
    ),
    "wrong sign": Fault("loss-sign", "loss", mlp, lambda o, t: -F.cross_entropy(o, t)),
    "wrong sign of log-probabilities": Fault(
        "loss-sign", "loss", lambda: mlp(nn.LogSoftmax(1)), lambda o, t: o[torch.arange(len(t)), t].mean()
    ),
    "a column against a row": Fault(
        "shapes-broadcast", "loss", lambda: mlp(outputs=1), F.mse_loss, y=lambda: rows()[:, 0]
    ),
    "classes from 1": Fault("target-range", "target, batch 1, (2,)", mlp, y=lambda: labels() + 1),
    "a negative class": Fault("target-range", "target, batch 1, (0,)", mlp, y=lambda: labels() - 1),
    "classes as floats": Fault("target-dtype", "target", mlp, y=lambda: labels().float()),
    "one class alone": Fault("class-imbalance", "target, class 1", mlp, y=lambda: torch.ones(64).long()),
    "pixels as they are": Fault("inputs-unscaled", "inputs", mlp, x=lambda: 127 + 70 * rows()),
    "years as they are": Fault("inputs-unscaled", "inputs", mlp, x=lambda: 2000 + rows()),
    "a constant column": Fault(
        "inputs-constant", "inputs, column 2", mlp, x=lambda: rows().index_fill(1, torch.tensor([2]), 4.0)
    ),
    "a missing value": Fault(
        "data-not-finite", "inputs, batch 1, (0, 0)", mlp,
        x=lambda: rows().index_fill(0, torch.tensor([0]), torch.nan),
    ),
    "a detached loss": Fault("loss-detached", "loss", mlp, lambda o, t: F.cross_entropy(o.detach(), t)),
    "a loss for each row": Fault(
        "loss-not-scalar", "loss", mlp, lambda o, t: F.cross_entropy(o, t, reduction="none")
    ),
    "a logarithm of 0": Fault("loss-not-finite", "3", lambda: mlp(Logarithm())),
    "large first weights": Fault("initial-loss", "2", lambda: changed(mlp(), big)),
    "an operation in place": Fault("step-fails", "backward", InPlace),
    "inputs of another width": Fault("step-fails", "forward", mlp, x=lambda: rows(d=5)),
    "a forgotten layer": Fault("parameter-without-gradient", "forgotten.weight", Unused),
    "all frozen": Fault("nothing-to-train", "0.weight", lambda: changed(mlp(), some_frozen)),
    "an optimiser of a part": Fault(
        "parameter-outside-optimiser", "2.weight", mlp,
        optimisers=lambda m: [torch.optim.SGD(list(m.parameters())[:2], 0.1)],
    ),
    "two optimisers of the same": Fault(
        "parameter-outside-optimiser", "0.weight", mlp,
        optimisers=lambda m: [torch.optim.SGD(m.parameters(), 0.1), torch.optim.SGD(m.parameters(), 0.1)],
    ),
    "batch norm of two rows": Fault(
        "batch-norm", "1",
        lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        x=lambda: rows(2), y=lambda: labels(2),
    ),
    "batch norm in evaluation mode": Fault(
        "batch-norm", "1",
        lambda: changed(nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4)), lambda m: m[1].eval()),
    ),
    "a bias before batch norm": Fault(
        "batch-norm", "0.bias", lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    ),
    "evaluation mode": Fault(
        "evaluation-mode", "2",
        lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3)).eval(),
    ),
    "rows in both splits": Fault(
        "rows-in-both-splits", "validation, batch 1, row 2", mlp,
        validation=lambda: [(torch.cat([rows(2, seed=9), rows(8)]), labels(10))],
    ),
    "a row that is masked as a whole": Fault(
        "rows-masked", "inputs 2, batch 1, row 3", Masked,
        x=lambda: torch.randn(16, 5, 6), y=lambda: labels(16),
        more=lambda: (torch.zeros(16, 5).bool().index_fill(0, torch.tensor([3]), True),),
    ),
    "a row masked in the other convention": Fault(
        "rows-masked", "inputs 2, batch 1, row 0", lambda: Masked(keeps=True),
        x=lambda: torch.randn(16, 5, 6), y=lambda: labels(16),
        more=lambda: (torch.ones(16, 5).bool().index_fill(0, torch.tensor([0]), False),),
    ),
    "a box without area": Fault(
        "boxes", "target, batch 1, image 1, box 0", Boxes, box_loss, x=lambda: torch.rand(2, 3, 8, 8),
        y=lambda: [{"boxes": torch.tensor([[0.0, 0, 4, 4]])}, {"boxes": torch.tensor([[4.0, 4, 4, 6]])}],
    ),
    "boxes as corner and size": Fault(
        "boxes", "target, batch 1, image 0, box 0", Boxes, box_loss, x=lambda: torch.rand(1, 3, 8, 8),
        y=lambda: [{"boxes": torch.tensor([[5.0, 5, 2, 2]])}],
    ),
    "padding that counts": Fault(
        "padding-counts", "target, token 0", tokens, tokens_loss, x=padded,
        y=lambda: F.pad(padded()[:, 1:], (0, 1)),
    ),
    "one layer at three places": Fault(
        "parameters-shared", "1.weight",
        lambda: nn.Sequential(*[nn.Linear(6, 6)] * 3, nn.ReLU(), nn.Linear(6, 3)),
    ),
    "dropout left on": Fault("random-in-evaluation", "model", DropsAlways),
    "weights that fade": Fault("initial-variance", "4", lambda: deep(nn.ReLU, 0.05)),
    "weights that blow up": Fault("initial-variance", "4", lambda: deep(nn.ReLU, 400.0)),
    "targets that cannot be learned": Fault("one-batch", "model", Deaf),
    "more data than memory": Fault("memory", "inputs", mlp),
    "dead units": Fault("dead-units", "1", dead),
    "saturated units": Fault("saturated-units", "1", saturated),
    "vanishing gradients": Fault("gradient-flow", "0.weight", lambda: deep(nn.Sigmoid, 1.0)),
    "exploding gradients": Fault("gradient-flow", "0.weight", lambda: deep(nn.Identity, 12.0)),
}  # fmt: skip


class Loader(list[Any]):
    """Batches, and a data set that says how many rows it has."""

    dataset = range(2**40)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_at_its_place(name: str) -> None:
    fault = FAULTS[name]
    model = fault.model()
    batches = (Loader if fault.code == "memory" else list)([(fault.x(), *fault.more(), fault.y())])
    examined = partial(
        examine, model, fault.loss, batches, optimisers=fault.optimisers(model), validation=fault.validation()
    )
    found = examined()
    places = [finding.where for finding in found if finding.code == fault.code]
    assert fault.where in places, str(found)
    assert fault.code not in examined(silence=[fault.code]).codes()


def test_every_check_has_a_planted_fault() -> None:
    assert {fault.code for fault in FAULTS.values()} == set(CHECKS)


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(6, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(x)[0][:, -1])
        return out


HEALTHY: dict[str, Callable[[], tuple[nn.Module, Callable[[Any, Any], Tensor], Tensor, Tensor]]] = {
    "classes": lambda: (mlp(), F.cross_entropy, rows(), labels()),
    "log-probabilities": lambda: (mlp(nn.LogSoftmax(1)), F.nll_loss, rows(), labels()),
    "two classes": lambda: (
        mlp(outputs=1), F.binary_cross_entropy_with_logits, rows(), (labels() == 0).float()[:, None]
    ),
    "probability": lambda: (
        mlp(nn.Sigmoid(), outputs=1), F.binary_cross_entropy, rows(), (labels() == 0).float()[:, None]
    ),
    "values": lambda: (mlp(outputs=1), F.mse_loss, rows(), rows(d=1, seed=1)),
    "images": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Dropout(), nn.Linear(8, 3),
        ),
        F.cross_entropy, torch.randn(16, 1, 8, 8), labels(16),
    ),
    "sequences": lambda: (LastState(), F.cross_entropy, torch.randn(32, 5, 6), labels(32)),
    "gpt": lambda: (
        GPT(GPTConfig(vocab_size=20, context=8, layers=2, heads=2, width=16)), tokens_loss,
        torch.randint(20, (8, 8)), torch.randint(20, (8, 8)),
    ),
    "deep": lambda: (deep(lambda: nn.LeakyReLU(0.2), 2.0), F.cross_entropy, rows(), labels()),
    "encoder": lambda: (
        nn.Sequential(nn.TransformerEncoderLayer(6, 2, 12, batch_first=True), nn.Flatten(), nn.Linear(30, 3)),
        F.cross_entropy, torch.randn(16, 5, 6), labels(16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_are_left_in_peace(name: str) -> None:
    torch.manual_seed(0)
    model, loss, x, y = HEALTHY[name]()
    found = examine(model, loss, [(x, y)], optimisers=torch.optim.SGD(model.parameters(), 0.1))
    assert found.codes("error", "warning") == [], str(found)


def test_nothing_is_changed_by_an_examination() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    examine(model, F.cross_entropy, [(rows(), labels())])
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_batches_come_in_several_forms_and_others_are_refused() -> None:
    model = mlp()
    assert not examine(model, F.cross_entropy, [{"inputs": rows(), "target": labels()}])
    assert not examine(model, F.cross_entropy, iter([[rows(), labels()]] * 20))
    with pytest.raises(InputError, match="a batch of type Tensor"):
        examine(model, F.cross_entropy, [rows()])
    with pytest.raises(InputError, match="no batch"):
        examine(model, F.cross_entropy, [])
    with pytest.raises(InputError, match="unknown check 'dead-unit'"):
        examine(model, F.cross_entropy, [(rows(), labels())], silence=["dead-unit"])


def test_findings_read_well_and_the_gravest_come_first() -> None:
    found = examine(mlp(nn.Softmax(1)), F.cross_entropy, [(2000 + rows(), labels())])
    assert found.codes()[0] == "softmax-before-cross-entropy"
    text = str(found)
    assert text.startswith("error: cross-entropy is given probabilities")
    assert "the loss cannot fall below 0.551" in text
    assert str(examine(mlp(), F.cross_entropy, [(rows(), labels())])).startswith("nothing found")
