"""Layers: what one step through them shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from quire.doctor.case import NORMS, Case, finite
from quire.doctor.findings import CHECKS, Finding

RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
SQUASHERS = (nn.Sigmoid, nn.Tanh)


@CHECKS.register("batch-norm")
def batch_norm(case: Case) -> Iterator[Finding]:
    layers = list(case.step.layers.values())
    for layer in layers:
        if not isinstance(layer.module, NORMS):
            continue
        if not layer.module.training and case.original.training:
            yield Finding(
                "warning",
                "batch normalisation does not learn its statistics",
                layer.name,
                "it is in evaluation mode while the model trains",
                "call model.train() after freezing, or mean it",
            )
            return
        rows = [y.shape[0] * math.prod(y.shape[2:]) for y in layer.outputs if y.ndim > 1]
        if layer.module.training and rows and min(rows) < 4:
            yield Finding(
                "error",
                "batch normalisation of almost no values",
                layer.name,
                f"mean and variance are taken over {min(rows)} values a channel",
                "use a larger batch, or group or layer normalisation",
            )
            return
    for before, after in pairwise(layers):
        bias = getattr(before.module, "bias", None)
        if isinstance(after.module, NORMS) and isinstance(bias, Tensor) and linear(before.module):
            yield Finding(
                "note",
                "a bias that the next layer takes away",
                f"{before.name}.bias",
                f"{bias.numel()} parameters without effect",
                "make the layer with bias=False",
            )
            return


@CHECKS.register("evaluation-mode")
def evaluation_mode(case: Case) -> Iterator[Finding]:
    dropouts = [
        y.name for y in case.step.layers.values() if isinstance(y.module, nn.modules.dropout._DropoutNd)
    ]
    if dropouts and not case.original.training:
        yield Finding(
            "warning",
            "the model was given in evaluation mode",
            dropouts[0],
            f"{len(dropouts)} dropout layers do nothing",
            "call model.train() before training",
        )


@CHECKS.register("dead-units")
def dead_units(case: Case) -> Iterator[Finding]:
    for layer in case.step.layers.values():
        if not isinstance(layer.module, RECTIFIERS) or not layer.outputs or len(layer.output) < 8:
            continue
        units = by_unit(layer.output)
        dead = (units == 0).all(0).double().mean()
        if dead > 0.5:
            yield Finding(
                "warning",
                "most units give 0 for every row",
                layer.name,
                f"{100 * float(dead):.0f} % of {units.shape[1]} units, {len(layer.output)} rows",
                "start with smaller weights and biases near 0, lower the step size, or use leaky ReLU",
            )
            return


@CHECKS.register("saturated-units")
def saturated_units(case: Case) -> Iterator[Finding]:
    layers = [y for y in case.step.layers.values() if y.outputs]
    for layer in layers[:-1]:
        if isinstance(layer.module, SQUASHERS):
            low = 0.0 if isinstance(layer.module, nn.Sigmoid) else -1.0
            share = ((layer.output > 0.99) | (layer.output < low + 0.01)).double().mean()
            if share > 0.5:
                yield Finding(
                    "warning",
                    "most units are saturated, and pass no gradient",
                    layer.name,
                    f"{100 * float(share):.0f} % of all values lie within 0.01 of a bound",
                    "scale the inputs, and start with smaller weights",
                )
                return


@CHECKS.register("gradient-flow")
def gradient_flow(case: Case) -> Iterator[Finding]:
    """Gradients of weights, relative to the weights, from the first layer to the last."""
    if case.step.stage != "done":
        return
    found = [
        (name, float(p.grad.norm() / p.norm().clamp_min(1e-12)))
        for name, p in case.model.named_parameters()
        if p.ndim > 1 and p.grad is not None and finite(p.grad)
    ]
    if len(found) < 4:
        return
    (first, start), (last, end) = found[0], found[-1]
    if end > 0 and start < 1e-5 * end:
        yield Finding(
            "warning",
            "gradients vanish on the way to the first layers",
            first,
            f"relative to its weights the gradient is {start:.1e} there and {end:.1e} at {last}",
            "use ReLU or GELU with He's initial weights, normalisation, or residual connections",
        )
    large = [(name, size) for name, size in found if size > 1e3]
    if large:
        yield Finding(
            "warning",
            "gradients explode",
            large[0][0],
            f"{large[0][1]:.1e} times as large as the weights; large at {len(large)} of {len(found)} weights",
            "start with smaller weights, normalise, and clip gradients by their norm",
        )


def linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd)


def by_unit(output: Tensor) -> Tensor:
    """(rows, units): the channels of a feature map are units that are seen at many places."""
    if output.ndim <= 2:
        return output.flatten(1)
    moved: Any = output.movedim(1, -1) if output.ndim > 3 else output
    return moved.reshape(-1, moved.shape[-1])
