"""What a training step costs, as numbers and as a table for a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from quire.doctor.costs.machine import Machine
from quire.doctor.costs.operations import Operation, Phase


@dataclass(frozen=True)
class LayerCost:
    """One module, without those inside it. Bytes and FLOPs of a step on the whole batch."""

    name: str
    kind: str
    output: tuple[int, ...] | None
    """Shape of its first output."""
    parameters: int
    """Those that no earlier layer has."""
    forward_flops: int
    backward_flops: int
    activation_bytes: int
    """What it made in the forward pass that the backward pass waits for."""
    gradient_bytes: int
    optimiser_bytes: int
    receptive_field: tuple[int, ...] | None
    """Pixels along each dimension that one place of the output sees; None where places are mixed."""
    attention_flops: int
    attention_bytes: int
    """The weights of attention, where they are kept."""
    seconds: float | None = None
    """Predicted, where the machine is known."""


@dataclass(frozen=True)
class Costs:
    """What a training step costs; `layers` add up to the totals."""

    layers: tuple[LayerCost, ...]
    parameters: int
    trained: int
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    gradient_bytes: int
    optimiser_bytes: int
    activation_bytes: int
    """Alive after the forward pass."""
    peaks: Mapping[Phase, tuple[int, str]]
    """Of each phase, the most bytes that are alive at one time, all of the above included, and where."""
    operations: tuple[Operation, ...] = field(repr=False)
    optimiser: str
    device: str
    machine: Machine | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max(size for size, _ in self.peaks.values())

    @property
    def forward_flops(self) -> int:
        return sum(operation.flops for operation in self.operations if operation.phase == "forward")

    @property
    def backward_flops(self) -> int:
        return sum(operation.flops for operation in self.operations if operation.phase == "backward")

    @property
    def counter_flops(self) -> int:
        """What PyTorch's counter says of the same step. It leaves out recurrent layers and fused attention
        on a CPU, and counts the gradient of a convolution's weights in groups once for each group."""
        return sum(operation.counted for operation in self.operations)

    @property
    def attention_flops(self) -> int:
        return sum(operation.attention for operation in self.operations)

    @property
    def attention_bytes(self) -> int:
        return sum(layer.attention_bytes for layer in self.layers)

    @property
    def seconds(self) -> float | None:
        """Predicted for one step on `machine`, by a roofline: a real step takes longer, on a CPU often
        several times as long."""
        return None if self.machine is None else self.machine.seconds(_work(self.operations))

    def on(self, machine: Machine) -> Costs:
        """The same step on another machine, by layer and in all."""
        layers = tuple(
            replace(layer, seconds=machine.seconds(_work(self.operations, layer.name)))
            for layer in self.layers
        )
        return replace(self, layers=layers, machine=machine)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows, a layer each, as a person reads them."""
        columns = ["layer", "kind", "output", "parameters", "forward", "backward", "activations", "field"]
        rows = []
        for layer in self.layers:
            shape = "×".join(map(str, layer.output)) if layer.output is not None else "–"
            seen = "×".join(map(str, layer.receptive_field)) if layer.receptive_field else "–"
            forward, backward = as_number(layer.forward_flops), as_number(layer.backward_flops)
            kept = as_bytes(layer.activation_bytes)
            row = [layer.name, layer.kind, shape, f"{layer.parameters:,}", forward, backward, kept, seen]
            rows.append(row)
        if self.machine is not None:
            columns.append("time")
            for row, layer in zip(rows, self.layers, strict=True):
                row.append(as_seconds(layer.seconds))
        return columns, rows

    def totals(self) -> list[tuple[str, str]]:
        size, where = max(self.peaks.values())
        phase = next(name for name, peak in self.peaks.items() if peak == (size, where))
        lines = [
            ("parameters", f"{self.parameters:,}, {self.trained:,} of them trained"),
            ("FLOPs", f"{as_number(self.forward_flops)} forward, {as_number(self.backward_flops)} backward"),
            ("weights", f"{as_bytes(self.parameter_bytes)}, buffers {as_bytes(self.buffer_bytes)}"),
            ("gradients", as_bytes(self.gradient_bytes)),
            ("optimiser", f"{as_bytes(self.optimiser_bytes)} ({self.optimiser})"),
            ("activations", f"{as_bytes(self.activation_bytes)}, inputs {as_bytes(self.input_bytes)}"),
            ("peak", f"{as_bytes(size)} in the {phase} pass, at {where}"),
        ]
        if self.attention_flops:
            kept = as_bytes(self.attention_bytes) if self.attention_bytes else "no weights"
            lines.append(("attention", f"{as_number(self.attention_flops)} forward, keeps {kept}"))
        if self.machine is not None:
            rates = f"on {self.device}, by its rates of products and copies"
            lines.append(("a step", f"{as_seconds(self.seconds)} at best {rates}"))
        return lines + [("note", note) for note in self.notes]

    def __str__(self) -> str:
        columns, rows = self.table()
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [columns, *rows]
        ]
        return "\n".join([*lines, "", *(f"{name.ljust(12)} {text}" for name, text in self.totals())])


def _work(
    operations: Iterable[Operation], layer: str | None = None
) -> Iterator[tuple[float, float, torch.dtype]]:
    for operation in operations:
        if layer is None or operation.layer == layer:
            yield operation.flops, operation.bytes, operation.dtype


def as_bytes(size: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"


def as_number(value: float) -> str:
    """With a thousand as K, a million M, and so on."""
    for unit in ("", "K", "M", "G", "T"):
        if value < 1000:
            return f"{value:.4g}{unit}"
        value /= 1000
    return f"{value:.4g}P"


def as_seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return (
        f"{value:.3g} s"
        if value >= 1
        else f"{value * 1e3:.3g} ms"
        if value >= 1e-3
        else f"{value * 1e6:.3g} µs"
    )
