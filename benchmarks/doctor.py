"""What the doctor costs: the look before the first step, and the monitor beside training.

    python -m benchmarks.doctor

The look before the first step at a ResNet-18 with images of CIFAR's size, in seconds. Training with the
monitor against training without it, in short turns, for a dense network and a convolutional one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import describe, machine
from quire.doctor import Monitor, examine
from quire.models import resnet18

BAR_SECONDS, BAR_SHARE = 5.0, 1.03
TURN = 20
"""Steps after which the other loop goes on: a machine that slows down slows both."""


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


class Training:
    """A loop that can be gone on with, and the time that it has taken."""

    def __init__(self, make: Callable[[], nn.Module], x: Tensor, y: Tensor, rows: int, watched: bool) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.y, self.rows = make(), x, y, rows
        self.seconds, self.done, self.began = 0.0, 0, 0.0
        self.optimiser = torch.optim.SGD(self.model.parameters(), 0.05)
        first = [(x[:rows], y[:rows])]
        self.monitor = Monitor(self.model, F.cross_entropy, first, clock=self.clock) if watched else None

    def clock(self) -> float:
        """Time in this loop alone: the other one's turns do not count."""
        return self.seconds + (time.perf_counter() - self.began if self.began else 0.0)

    def go_on(self, steps: int) -> None:
        self.began = time.perf_counter()
        for _ in range(steps):
            place = self.done * self.rows % (len(self.x) - self.rows + 1)
            part, target = self.x[place : place + self.rows], self.y[place : place + self.rows]
            self.optimiser.zero_grad()
            loss = F.cross_entropy(self.model(part), target)
            loss.backward()
            self.optimiser.step()
            self.done += 1
            if self.monitor is not None:
                self.monitor.step(loss)
        self.seconds += time.perf_counter() - self.began
        self.began = 0.0


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def monitored(seconds: float) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    subjects = {
        "dense, 128 rows": (dense, torch.randn(4096, 784, generator=generator), 128),
        "convolutions, 64 rows": (convolutions, torch.randn(1024, 3, 32, 32, generator=generator), 64),
    }
    ratios = []
    for name, (make, x, rows) in subjects.items():
        y = torch.arange(len(x)) % 10
        pair = [Training(make, x, y, rows, watched) for watched in (False, True)]
        while pair[0].seconds < seconds:
            for training in pair:
                training.go_on(TURN)
        plain, watched = pair
        assert watched.monitor is not None
        seen = watched.monitor.course
        ratio = watched.seconds / plain.seconds
        print(
            f"{name}: {plain.done} steps, with the monitor {ratio:.3f} of the time without; "
            f"{len(seen.looks)} looks, {len(seen.curvatures)} at the curvature"
        )
        ratios.append(ratio)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    print(describe(machine(())))
    preflight(64)
    preflight(128)
    monitored(options.seconds)
    print(f"bars: {BAR_SECONDS:g} s before the first step; {BAR_SHARE:g} of the time with the monitor")


if __name__ == "__main__":
    main()
