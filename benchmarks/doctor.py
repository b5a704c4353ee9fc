"""What the doctor costs: the look before the first step, and the monitor beside training.

    python -m benchmarks.doctor

The look before the first step at a ResNet-18 with images of CIFAR's size, in seconds. Training with the
monitor against training without it, in turns, for a dense network and a convolutional one; medians are
compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import describe, machine
from quire.doctor import Monitor, examine
from quire.models import resnet18

BAR_SECONDS, BAR_SHARE = 5.0, 1.03


def preflight(rows: int) -> float:
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    batches = [(torch.randn(rows, 3, 32, 32), torch.arange(rows) % 10) for _ in range(4)]
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    began = time.perf_counter()
    found = examine(model, F.cross_entropy, batches, optimisers=optimiser)
    seconds = time.perf_counter() - began
    print(f"examine a ResNet-18, {rows} images: {seconds:.2f} s, findings {found.codes()}")
    return seconds


def training(
    make: Callable[[], nn.Module], x: Tensor, y: Tensor, rows: int, steps: int, watched: bool
) -> float:
    torch.manual_seed(0)
    model = make()
    optimiser = torch.optim.SGD(model.parameters(), 0.05)
    monitor = Monitor(model, F.cross_entropy, [(x[:rows], y[:rows])]) if watched else None
    began = time.perf_counter()
    for step in range(steps):
        place = step * rows % (len(x) - rows + 1)
        part, target = x[place : place + rows], y[place : place + rows]
        optimiser.zero_grad()
        loss = F.cross_entropy(model(part), target)
        loss.backward()
        optimiser.step()
        if monitor is not None:
            monitor.step(loss)
    seconds = time.perf_counter() - began
    if monitor is not None:
        seen = monitor.course
        print(f"    {len(seen.looks)} looks, {len(seen.curvatures)} at the curvature in {seconds:.1f} s")
    return seconds


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def monitored(rounds: int, seconds: float) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    subjects = {
        "dense, 128 rows": (dense, torch.randn(4096, 784, generator=generator), 128),
        "convolutions, 64 rows": (convolutions, torch.randn(1024, 3, 32, 32, generator=generator), 64),
    }
    ratios = []
    for name, (make, x, rows) in subjects.items():
        y = torch.arange(len(x)) % 10
        each = training(make, x, y, rows, 20, False) / 20
        steps = max(50, int(seconds / each))
        pairs = [
            (training(make, x, y, rows, steps, False), training(make, x, y, rows, steps, True))
            for _ in range(rounds)
        ]
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{name}: {steps} steps, with the monitor {ratio:.3f} of the time without")
        ratios.append(ratio)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    print(describe(machine(())))
    preflight(64)
    preflight(128)
    monitored(options.rounds, options.seconds)
    print(f"bars: {BAR_SECONDS:g} s before the first step; {BAR_SHARE:g} of the time with the monitor")


if __name__ == "__main__":
    main()
