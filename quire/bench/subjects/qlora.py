"""A training step of a dense layer with an adapter, its base stored in four bits or in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from quire.bench.case import SUBJECTS, Bar, Case, Kind, Place, Work, largest_difference
from quire.bench.training import captured
from quire.tuning import LoRAConfig, inject, quantise_base

RANK = 16


@SUBJECTS.register("qlora")
def qlora(place: Place) -> Iterator[Case]:
    """A QLoRA step of a dense layer (output, gradients of inputs and adapter), beside a LoRA step."""
    rows, inputs, outputs = (2048, 4096, 14_336) if place.on_gpu else (256, 512, 1792)
    rows, outputs = place.size(rows, 8), place.size(outputs, 96)
    dtype = torch.bfloat16 if place.on_gpu else torch.float32
    x = torch.randn(rows, inputs, device=place.device, dtype=dtype).requires_grad_()
    slope = torch.randn(rows, outputs, device=place.device, dtype=dtype)
    small = nn.Linear(inputs, outputs, bias=False, device=place.device, dtype=dtype)
    large = nn.Linear(inputs, outputs, bias=False, device=place.device, dtype=dtype)
    bits = quantise_base(small)[0].bits
    large.weight.data = small.weight.detach()  # the same base, rounded to four bits, at its full size
    adapters = [inject(layer, LoRAConfig(rank=RANK)) for layer in (small, large)]
    for one, other in zip(*(each.parameters() for each in adapters), strict=True):
        other.data.copy_(one.data.normal_(std=0.02))
    some = min(64, rows)
    changed = small.weight.detach().double()  # with the adapter
    exact = slope[:some].double() @ changed
    learned = [list(each.parameters()) for each in adapters]

    def step(layer: nn.Module, parameters: list[nn.Parameter], size: float) -> Callable[[], object]:
        def call() -> tuple[tuple[Tensor, ...], float]:
            return torch.autograd.grad(layer(x), [x, *parameters], slope), size

        return call

    name = str(dtype).removeprefix("torch.")
    rival, kind = f"LoRA, {name}", "bfloat16" if place.on_gpu else "float32"
    kinds: dict[Kind, float] = {kind: rows * (4.0 * inputs * outputs + 6.0 * RANK * (inputs + outputs))}  # type: ignore[dict-item]
    steps = {
        "quire": step(small, learned[0], bits),
        rival: step(large, learned[1], 8.0 * dtype.itemsize),
    }
    title = f"QLoRA step, {inputs} → {outputs}, {rows} rows, rank {RANK}, {name}"
    cases = {title: steps}
    if place.on_gpu:
        # What the device takes, however long the host does for some twenty launches.
        cases[f"{title}, as one CUDA graph"] = {name: captured(run) for name, run in steps.items()}
    for title, contestants in cases.items():
        yield Case(
            title,
            contestants,
            work=Work(operations=kinds),
            unit="step",
            error=lambda found: largest_difference(found[0][0][:some], exact),
            result=lambda found: float(found[1]),
            result_name="bits a parameter",
            bars=(
                Bar("result", at_most=4.13),
                *((Bar("time", at_most=1.15, rival=rival),) if place.on_gpu else ()),
            ),
        )
