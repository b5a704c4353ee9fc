"""Training ResNet-50 on one GPU, side by side with torchvision's, in one run.

Random 224×224 images, batches of 256, bfloat16 mixed precision, SGD with momentum:

    trainer        quire.fit on quire.models.resnet50, compiled; pixels are gathered from a uint8 set on the
                   GPU and scaled in each step, the guard watches every step
    compiled       torchvision's resnet50 in a short loop on one fixed float batch, channels last,
                   torch.compile, fused SGD
    eager          the same without torch.compile

    python -m benchmarks.resnet50 [--steps 60] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.machine import describe, machine
from quire.data.batch import TensorData
from quire.models import resnet50
from quire.nn.heads import Categorical
from quire.nn.images import ImageInputs
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import Callback, fit
from quire.train.descent import Descent

BATCH, SIDE, CLASSES = 256, 224, 1000
BAR = 1.0


class Clock(Callback):
    """Seconds between two steps of a run, with the device's queue empty at both."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_step(self, descent: Descent, step: int) -> None:
        if step == self.first:
            torch.cuda.synchronize()
            self.begin = time.perf_counter()
        elif step == self.last:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.begin


class Trainer:
    def __init__(self, images: torch.Tensor, labels: torch.Tensor, steps: int) -> None:
        mean, std = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
        self.task = Supervised(resnet50(CLASSES), Categorical(CLASSES), inputs=ImageInputs(mean, std))
        self.data = TensorData({"inputs": images, "target": labels})
        self.steps = steps

    def __call__(self) -> float:
        clock = Clock(10, 10 + self.steps)
        options = Train(batch_size=BATCH, precision="bfloat16", compile=True, validate_every=10_000)
        fit(
            self.task, self.data, steps=10 + self.steps, device="cuda", train=options, callbacks=[clock],
            optim=Optim("sgd", lr=0.1, momentum=0.9, weight_decay=1e-4, decay="l2"),
        )  # fmt: skip
        return clock.seconds / self.steps


class Loop:
    """The peer: nothing but forward, backward and step."""

    def __init__(self, steps: int, *, compiled: bool) -> None:
        import torchvision

        model: nn.Module = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
        self.optimiser = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True
        )
        self.model: Callable[[torch.Tensor], torch.Tensor] = torch.compile(model) if compiled else model
        inputs = torch.randn(BATCH, 3, SIDE, SIDE, device="cuda")
        self.inputs = inputs.to(memory_format=torch.channels_last)
        self.labels = torch.randint(CLASSES, (BATCH,), device="cuda")
        self.steps = steps

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def __call__(self) -> float:
        for _ in range(10):
            self.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / self.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.manual_seed(0)
    images = torch.randint(256, (2048, 3, SIDE, SIDE), dtype=torch.uint8, device="cuda")
    labels = torch.randint(CLASSES, (2048,), device="cuda")
    contestants: dict[str, Callable[[], float]] = {
        "trainer": Trainer(images, labels, options.steps),
        "compiled": Loop(options.steps, compiled=True),
        "eager": Loop(options.steps, compiled=False),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, run in contestants.items():
            times[name].append(run())
    print(describe(machine(("torchvision",))))
    print(f"ResNet-50, batch {BATCH}, {SIDE}×{SIDE}, bfloat16, medians of {options.rounds} rounds")
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in median.items():
        print(f"{name:10}{1000 * seconds:8.2f} ms a step{BATCH / seconds:8.0f} images/s")
    print(f"trainer / compiled {median['compiled'] / median['trainer']:.3f} in speed (bar: at least {BAR:g})")


if __name__ == "__main__":
    main()
