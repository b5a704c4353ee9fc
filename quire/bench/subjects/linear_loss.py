"""A linear layer and its cross-entropy, with all logits in memory and without."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from quire.bench.case import GIGABYTE, SUBJECTS, Bar, Case, Contestant, Place, Work, largest_difference
from quire.functional.linear_loss import linear_cross_entropy


def all_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ weight.t(), target)


@SUBJECTS.register("linear-cross-entropy")
def linear_loss(place: Place) -> Iterator[Case]:
    """Loss and gradients of the last layer of a language model, beside torch.compile with all logits."""
    rows, width, classes = (16_384, 1024, 50_257) if place.on_gpu else (512, 256, 8_000)
    rows, classes = place.size(rows, 32), place.size(classes, 100)
    dtype = torch.bfloat16 if place.on_gpu else torch.float32
    hidden = torch.randn(rows, width, device=place.device, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(classes, width, device=place.device, dtype=dtype)).requires_grad_()
    target = torch.randint(classes, (rows,), device=place.device)
    some = min(256, rows)
    few = hidden[:some].double() @ weight.double().t()
    loss = functional.cross_entropy(few, target[:some], reduction="sum") / rows
    exact = torch.autograd.grad(loss, hidden)[0][:some]

    def run(function: object) -> Contestant:
        def call() -> object:
            loss = function(hidden, weight, target)  # type: ignore[operator]
            return torch.autograd.grad(loss, [hidden, weight])

        return call

    name = str(dtype).removeprefix("torch.")
    rival = "formula compiled" if place.on_gpu else "formula"
    contestants = {"quire": run(linear_cross_entropy)}
    if place.on_gpu:
        contestants["formula compiled"] = run(torch.compile(all_logits))
    contestants["formula"] = run(all_logits)
    memory = (Bar("memory", at_most=0.5 * GIGABYTE, machine="H200"),) if place.on_gpu else ()
    yield Case(
        f"linear + cross-entropy, {rows:,} × {width} → {classes:,}, {name}, forward and backward",
        contestants,
        work=Work(operations={"bfloat16" if place.on_gpu else "float32": 6.0 * rows * width * classes}),
        error=lambda found: largest_difference(found[0][:some], exact),
        bars=(Bar("time", at_most=1.0, rival=rival), *memory),
    )
