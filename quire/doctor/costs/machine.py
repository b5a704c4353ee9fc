"""How fast a machine multiplies, moves bytes and starts operations, measured in about a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from quire.functional.costs import roofline_seconds


@dataclass(frozen=True)
class Machine:
    """Rates of one device, a second."""

    device: str
    flops: dict[torch.dtype, float]
    bytes: float
    launch: float
    """Seconds that starting an operation of a training step takes, Python included."""
    ahead: bool = False
    """Whether operations are started while earlier ones still run, as on a GPU."""

    def seconds(self, operations: Iterable[tuple[float, float, torch.dtype]]) -> float:
        """Σ max(flops / rate, bytes / rate) and the time to start them: on top, or where operations are
        started ahead, whichever of the two is longer."""
        work, count = 0.0, 0
        for flops, moved, dtype in operations:
            rate = self.flops.get(dtype, self.flops[torch.float32])
            work += roofline_seconds([(flops, moved)], rate, self.bytes)
            count += 1
        started = count * self.launch
        return max(work, started) if self.ahead else work + started


def measure_machine(
    device: torch.device | str = "cpu", dtypes: Iterable[torch.dtype] = (torch.float32,)
) -> Machine:
    """The rates that a square product, a copy and a step of a tiny network reach on `device` as it is now."""
    device = torch.device(device)
    quick = device.type != "cpu"
    side, numbers = (4096, 2**28) if quick else (768, 2**23)

    def best(function: Callable[[], object], times: int = 5) -> float:
        found = float("inf")
        for _ in range(times):
            _wait(device)
            start = time.perf_counter()
            function()
            _wait(device)
            found = min(found, time.perf_counter() - start)
        return found

    with torch.random.fork_rng([device] if quick else []):
        flops = {}
        for dtype in {torch.float32, *dtypes}:
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            flops[dtype] = 2 * side**3 / best(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
        source = torch.empty(numbers, device=device).zero_()
        target = torch.empty_like(source).zero_()
        moved = 2 * source.nbytes / best(lambda: target.copy_(source))
        launch = _launch(device, best)
    return Machine(str(device), flops, moved, launch, ahead=quick)


def _launch(device: torch.device, best: Callable[..., float]) -> float:
    """A step of a network so small that starting its operations is all the work."""
    from quire.doctor.costs.operations import Watch

    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8))).to(device)
    optimiser = torch.optim.Adam(net.parameters())
    x = torch.randn(4, 8, device=device)

    def step() -> None:
        optimiser.zero_grad()
        net(x).sum().backward()
        optimiser.step()

    step()
    with Watch(net, []) as watch:
        step()
    return best(step, 10) / len(watch.operations)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
