"""Recurrent layers over whole sequences, forward and backward, beside torch.nn's.

B sequences, T steps, D inputs, H hidden units. Of the wider shape the products alone take two thirds of
torch.nn's time on two cores, so that there is less to win.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from quire.bench.case import SUBJECTS, Bar, Case, Contestant, Place, Work, largest_difference
from quire.nn.recurrent import GRU, LSTM, RNN, Recurrent

LAYERS: dict[str, tuple[type[Recurrent], Any, float | None]] = {
    "GRU": (GRU, nn.GRU, 1 / 1.5),
    "Elman": (RNN, nn.RNN, 1 / 1.5),
    "LSTM": (LSTM, nn.LSTM, None),
}
"""Quire's, torch.nn's, and what is promised of the time on a CPU. The LSTM is one and the same kernel."""


@SUBJECTS.register("recurrent")
def recurrent(place: Place) -> Iterator[Case]:
    """Training steps of a GRU, of Elman's net and of an LSTM, beside torch.nn's layers."""
    shapes = [(32, 100, 64, 128), (64, 64, 256, 256)]
    for shape in [(4, 20, 3, 4)] if place.small else shapes:
        for name in LAYERS:
            yield case(name, shape, shape == shapes[0] and not place.on_gpu, place)


def case(name: str, shape: tuple[int, int, int, int], promised: bool, place: Place) -> Case:
    rows, steps, inputs, size = shape
    layer_class, peer_class, most = LAYERS[name]
    layer = layer_class(inputs, size).to(place.device)
    peer = peer_class(inputs, size, batch_first=True).to(place.device)
    peer.load_state_dict(layer.state_dict())
    x = torch.randn(rows, steps, inputs, device=place.device).requires_grad_()
    arriving = torch.randn(rows, steps, size, device=place.device)

    def gradients(module: nn.Module, x: Tensor, arriving: Tensor) -> tuple[Tensor, ...]:
        output, _ = module(x)
        return torch.autograd.grad(output, [x, *module.parameters()], arriving)

    def run(module: nn.Module) -> Contestant:
        return lambda: gradients(module, x, arriving)

    exact = gradients(deepcopy(peer).double(), x.double(), arriving.double())
    operations = 6.0 * rows * steps * layer.gates * size * (inputs + size)
    return Case(
        f"{name}, {rows} sequences of {steps} steps, {inputs} → {size}, float32, forward and backward",
        {"quire": run(layer), "torch.nn": run(peer)},
        work=Work(operations={"float32": operations}),
        amount=float(rows * steps),
        unit="step of a sequence",
        error=lambda found: max(largest_difference(a, b) for a, b in zip(found, exact, strict=True)),
        bars=(Bar("time", at_most=most, rival="torch.nn"),) if promised and most is not None else (),
    )
