"""What the doctor costs: the look before the first step, and the monitor beside training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.bench.case import SUBJECTS, Bar, Case, Place
from quire.doctor import Monitor, examine
from quire.models.resnet import resnet18, resnet20


@SUBJECTS.register("doctor")
def doctor(place: Place) -> Iterator[Case]:
    """The look before the first step, and training with the monitor beside training without."""
    if place.on_gpu:
        return
    rows = place.size(128, 4)
    torch.manual_seed(0)
    model = resnet20(10) if place.small else resnet18(10)
    batches = [(torch.randn(rows, 3, 32, 32), torch.arange(rows) % 10) for _ in range(4)]
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    yield Case(
        f"the look before the first step, ResNet-18, {rows} images of 32 × 32",
        {"quire": lambda: examine(model, F.cross_entropy, batches, optimisers=optimiser)}, whole=True,
        bars=(Bar("time", at_most=5.0),),
    )  # fmt: skip
    steps = place.size(2000, 4)
    for name, make, x, size in subjects():
        yield Case(
            f"training with the monitor, {name}, {size} rows, {steps} steps",
            {"with": training(make, x, size, steps, True), "without": training(make, x, size, steps, False)},
            amount=float(steps), unit="step", rounds=2, bars=(Bar("time", at_most=1.03, rival="without"),),
        )  # fmt: skip


def subjects() -> Iterator[tuple[str, Callable[[], nn.Module], Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    yield "dense", dense, torch.randn(4096, 784, generator=generator), 128
    yield "convolutions", convolutions, torch.randn(1024, 3, 32, 32, generator=generator), 64


def training(
    make: Callable[[], nn.Module], x: Tensor, rows: int, steps: int, watched: bool
) -> Callable[[], object]:
    y = torch.arange(len(x)) % 10

    def run() -> object:
        torch.manual_seed(0)
        model = make()
        optimiser = torch.optim.SGD(model.parameters(), 0.05)
        monitor = Monitor(model, F.cross_entropy, [(x[:rows], y[:rows])]) if watched else None
        for step in range(steps):
            place = step * rows % (len(x) - rows + 1)
            optimiser.zero_grad()
            loss = F.cross_entropy(model(x[place : place + rows]), y[place : place + rows])
            loss.backward()
            optimiser.step()
            if monitor is not None:
                monitor.step(loss)
        return model

    return run


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
