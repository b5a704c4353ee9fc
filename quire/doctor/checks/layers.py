"""Layers: what one step through them shows."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from quire.doctor.case import NORMS, Case, finite
from quire.doctor.findings import CHECKS, Finding
from quire.doctor.flow import IDLE, NEARLY_ALL, exploding, vanishing
from quire.doctor.watch import NEAR, TINY, by_unit, dead_share, saturated_share


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


@CHECKS.register("random-in-evaluation")
def random_in_evaluation(case: Case) -> Iterator[Finding]:
    if case.step.stage != "done" or case.output is None:
        return
    model = copy.deepcopy(case.original).eval()
    with case.drawing(), torch.no_grad():
        first, second = (case.call(model, case.first) for _ in range(2))
    if isinstance(first, Tensor) and first.shape == second.shape and not torch.equal(first, second):
        apart = float((first - second).abs().max())
        if apart > 1e-4 * float(first.abs().max()):
            yield Finding(
                "warning",
                "the model answers at random in evaluation mode",
                "model",
                f"two answers to one batch differ by {apart:.3g}",
                "pass training=self.training to functional dropout; in evaluation, sample only when asked",
            )


@CHECKS.register("initial-variance")
def initial_variance(case: Case) -> Iterator[Finding]:
    """Var(Wx) = D_in·Var(w)·E[x²]: where the factor is far from 1, numbers shrink or grow with each layer."""
    sizes = [
        (y, float(y.output.double().var(0, correction=0).mean().sqrt()))
        for y in case.step.layers.values()
        if y.outputs and linear(y.module) and finite(y.output) and len(y.output) > 1
    ]
    if len(sizes) < 3 or sizes[0][1] == 0:
        return
    for layer, size in sizes[1:-1]:
        share = size / sizes[0][1]
        if not 1e-3 < share < 1e3:
            weight: Any = layer.module.weight
            inputs = weight[0].numel()
            deviation = float(weight.detach().std())
            yield Finding(
                "warning",
                "activations " + ("fade" if share < 1 else "blow up") + " from layer to layer",
                layer.name,
                f"rows differ by {share:.1e} of what they do after the first layer; √D_in·σ_w is "
                f"{inputs**0.5 * deviation:.2g}, where √2 keeps it for ReLU and 1 for tanh",
                "draw weights with He's (ReLU) or Xavier's (tanh) deviation, or normalise",
            )
            return


@CHECKS.register("dead-units")
def dead_units(case: Case) -> Iterator[Finding]:
    for layer in case.step.layers.values():
        share = dead_share(layer.module, layer.output) if layer.outputs else None
        if share is not None and (dead := float(share)) > IDLE:
            yield Finding(
                "warning" if dead > NEARLY_ALL else "note",
                "most units give 0 for every row",
                layer.name,
                f"{100 * dead:.0f} % of {by_unit(layer.output).shape[1]} units, {len(layer.output)} rows",
                "start with smaller weights and biases near 0, lower the step size, or use leaky ReLU",
            )
            return


@CHECKS.register("saturated-units")
def saturated_units(case: Case) -> Iterator[Finding]:
    layers = [y for y in case.step.layers.values() if y.outputs]
    for layer in layers[:-1]:
        share = saturated_share(layer.module, layer.output)
        if share is not None and float(share) > IDLE:
            yield Finding(
                "warning",
                "most units are saturated, and pass no gradient",
                layer.name,
                f"{100 * float(share):.0f} % of all values lie within {NEAR} of a bound",
                "scale the inputs, and start with smaller weights",
            )
            return


@CHECKS.register("gradient-flow")
def gradient_flow(case: Case) -> Iterator[Finding]:
    """Gradients of weights, relative to the weights, from the first layer to the last."""
    if case.step.stage != "done":
        return
    flow = [
        (name, float(p.grad.norm() / p.detach().norm()))
        for name, p in case.model.named_parameters()
        # Weights that start at 0 have no size that a gradient could be compared with.
        if p.ndim > 1 and p.grad is not None and finite(p.grad) and float(p.detach().abs().max()) > TINY
    ]
    yield from vanishing(flow)
    if len(flow) >= 4:
        yield from exploding(flow)


def linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
