"""The loss, and whether it fits what it is given.

n rows of a batch, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, nn

from quire.doctor.case import Case, finite
from quire.doctor.findings import CHECKS, Finding


def probabilities(output: Tensor) -> bool:
    """Whether the values of each row are positive and add up to 1."""
    if output.ndim < 2 or output.shape[1] < 2 or not bool((output >= 0).all()):
        return False
    return bool((output.sum(1) - 1).abs().max() < 1e-3)


@CHECKS.register("softmax-before-cross-entropy")
def softmax_before_cross_entropy(case: Case) -> Iterator[Finding]:
    output = case.output
    if case.kind == "cross-entropy" and output is not None and len(output) > 1 and probabilities(output):
        low = math.log(1 + (output.shape[1] - 1) / math.e)
        yield Finding(
            "error",
            "cross-entropy is given probabilities, and takes their softmax",
            last_layer(case),
            f"outputs of each row add up to 1: the loss cannot fall below {low:.3f}",
            "return the logits, and take the softmax only to predict",
        )


@CHECKS.register("sigmoid-before-logits-loss")
def sigmoid_before_logits_loss(case: Case) -> Iterator[Finding]:
    layer = list(case.step.layers.values())[-1]
    if case.kind == "binary cross-entropy of logits" and isinstance(layer.module, nn.Sigmoid):
        yield Finding(
            "error",
            "a loss of logits is given probabilities",
            layer.name,
            "all outputs lie in [0, 1]: no probability below 0.5 can be answered",
            "return the logits",
        )


@CHECKS.register("logits-into-probability-loss")
def logits_into_probability_loss(case: Case) -> Iterator[Finding]:
    output, problem = case.output, str(case.step.problem or "")
    if output is None:
        return
    if case.kind == "negative log-likelihood" and output.ndim >= 2:
        apart = (output.exp().sum(1) - 1).abs().max()
        if not bool(apart < 1e-3):
            yield Finding(
                "error",
                "nll_loss is given what are no log-probabilities",
                last_layer(case),
                f"exp(outputs) of a row add up to 1 ± {float(apart):.3g}",
                "end with log_softmax, or use cross_entropy",
            )
    elif "between 0 and 1" in problem and case.step.stage == "loss":
        yield Finding(
            "error",
            "a loss of probabilities is given logits",
            last_layer(case),
            f"outputs from {float(output.min()):.3g} to {float(output.max()):.3g}",
            "use binary_cross_entropy_with_logits",
        )


@CHECKS.register("loss-sign")
def loss_sign(case: Case) -> Iterator[Finding]:
    if case.kind in ("negative cross-entropy", "log-likelihood") and case.step.loss is not None:
        yield Finding(
            "error",
            "the loss is the log-likelihood, which training should raise",
            "loss",
            f"{float(case.step.loss.detach()):.4g}; descent makes it −∞",
            "negate it",
        )


@CHECKS.register("shapes-broadcast")
def shapes_broadcast(case: Case) -> Iterator[Finding]:
    output, target = case.output, case.first.target
    if output is None or not isinstance(target, Tensor) or output.shape == target.shape:
        return
    if case.kind in ("squared error", "absolute error") and output.numel() == target.numel() > 1:
        n = len(output)
        yield Finding(
            "error",
            "output and target are subtracted row against row",
            "loss",
            f"{tuple(output.shape)} − {tuple(target.shape)} has {n}×{n} numbers: each row against all",
            "give both the same shape: target.view_as(output)",
        )


@CHECKS.register("loss-detached")
def loss_detached(case: Case) -> Iterator[Finding]:
    loss = case.step.loss
    trainable = any(p.requires_grad for p in case.model.parameters())
    if isinstance(loss, Tensor) and not loss.requires_grad and trainable:
        yield Finding(
            "error",
            "the loss does not depend on any parameter",
            "loss",
            "it has no gradient: something between output and loss is detached, converted or rounded",
            "keep to tensor operations; no .item(), .detach(), .data, argmax or NumPy on the way",
        )


@CHECKS.register("loss-not-scalar")
def loss_not_scalar(case: Case) -> Iterator[Finding]:
    loss = case.step.loss
    if isinstance(loss, Tensor) and loss.numel() != 1:
        yield Finding(
            "error",
            "the loss is not one number",
            "loss",
            f"its shape is {tuple(loss.shape)}",
            "take its mean",
        )


@CHECKS.register("loss-not-finite")
def loss_not_finite(case: Case) -> Iterator[Finding]:
    loss = case.step.loss
    broken = next((y for y in case.step.layers.values() if y.outputs and not finite(y.output)), None)
    if broken is not None:
        yield Finding(
            "error",
            "an output is not finite",
            broken.name,
            f"of this {type(broken.module).__name__}, first: {int((~broken.output.isfinite()).sum()):,} of "
            f"{broken.output.numel():,} values",
            "look at what goes in: a division by 0, the logarithm of 0, or numbers beyond the type",
        )
    elif isinstance(loss, Tensor) and not finite(loss):
        yield Finding(
            "error",
            "the loss is not finite",
            "loss",
            f"{float(loss.detach().flatten()[0])} from finite outputs",
            "add a floor inside logarithms and divisions",
        )


@CHECKS.register("initial-loss")
def initial_loss(case: Case) -> Iterator[Finding]:
    loss, classes = case.step.loss, case.classes
    if case.kind != "cross-entropy" or classes is None or not isinstance(loss, Tensor) or not finite(loss):
        return
    value, expected = float(loss.detach()), math.log(classes)
    if value > 3 * expected + 1:
        yield Finding(
            "warning",
            "the first loss is that of a model which is sure and wrong",
            last_layer(case),
            f"{value:.3g}, where equal probabilities of {classes} classes give ln {classes} = {expected:.3g}",
            "make the last layer's first weights smaller, and scale the inputs",
        )


@CHECKS.register("step-fails")
def step_fails(case: Case) -> Iterator[Finding]:
    """What the other checks cannot name."""
    problem, stage = case.step.problem, case.step.stage
    if problem is None:
        return
    text = str(problem).split("\n")[0]
    if "modified by an inplace operation" in str(problem):
        yield Finding(
            "error",
            "a value that the gradient needs was overwritten",
            "backward",
            text,
            "replace the operation in place (x += …, relu_) by one that makes a new tensor",
        )
    else:
        yield Finding(
            "error",
            f"a step fails in {stage}",
            stage,
            f"{type(problem).__name__}: {text}",
            "call model and loss on one batch, and compare shapes and types",
        )


def last_layer(case: Case) -> str:
    seen = [layer.name for layer in case.step.layers.values() if layer.outputs]
    return seen[-1] if seen else "model"
