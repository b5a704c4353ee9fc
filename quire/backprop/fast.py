"""The four equations with buffers that are made once: training of small dense nets without autograd.

A step of a small net costs bookkeeping, not arithmetic. Measured for 64-128-10 and a batch of 64 on one
core (microseconds): forward, loss and backward take 210 by autograd and 85 here, 40 of them in the five
matrix products. The choices behind that were measured too, and stand as comments where they were made.

B rows of a batch, D inputs, M outputs of a layer, C outputs of the net. a = Wz + b are the
pre-activations, z = σ(a) the outputs of a layer, δ = ∂C/∂a its error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.backprop.engine import dense_layers
from quire.errors import InputError, unknown_name
from quire.models.mlp import MLP
from quire.nn.activation import Arctan

LossFunction = Callable[[Tensor, Tensor], Tensor]
aten = torch.ops.aten

# Plans kept at once: the full batch, the last partial one and the micro-batches of both.
MAX_PLANS = 16


class Rule(NamedTuple):
    """How an activation runs on buffers. `forward(layer, a, z)` fills z; `backward(layer, δ, a, z)`
    multiplies δ by σ'(a) in place. Where σ' can be had from z alone, z takes a's place in memory."""

    forward: Callable[[Any, Tensor, Tensor], object]
    backward: Callable[[Any, Tensor, Tensor, Tensor], object]
    in_place: bool = True


# threshold_backward takes 3 µs for 64×128 where `delta.mul_(z > 0)` takes 13: no mask is written.
RULES: dict[type[nn.Module], Rule] = {
    nn.Identity: Rule(lambda layer, a, z: a, lambda layer, d, a, z: d),
    nn.ReLU: Rule(
        lambda layer, a, z: a.relu_(),
        lambda layer, d, a, z: aten.threshold_backward.grad_input(d, z, 0, grad_input=d),
    ),
    nn.ReLU6: Rule(
        lambda layer, a, z: functional.hardtanh_(a, 0.0, 6.0),
        lambda layer, d, a, z: aten.hardtanh_backward.grad_input(d, z, 0.0, 6.0, grad_input=d),
    ),
    nn.LeakyReLU: Rule(
        lambda layer, a, z: aten.leaky_relu.out(a, layer.negative_slope, out=z),
        lambda layer, d, a, z: aten.leaky_relu_backward.grad_input(
            d, a, layer.negative_slope, False, grad_input=d
        ),
        in_place=False,
    ),
    nn.Sigmoid: Rule(
        lambda layer, a, z: a.sigmoid_(),
        lambda layer, d, a, z: aten.sigmoid_backward.grad_input(d, z, grad_input=d),
    ),
    nn.Tanh: Rule(
        lambda layer, a, z: a.tanh_(),
        lambda layer, d, a, z: aten.tanh_backward.grad_input(d, z, grad_input=d),
    ),
    nn.Softplus: Rule(
        lambda layer, a, z: aten.softplus.out(a, layer.beta, layer.threshold, out=z),
        lambda layer, d, a, z: aten.softplus_backward.grad_input(
            d, a, layer.beta, layer.threshold, grad_input=d
        ),
        in_place=False,
    ),
    nn.LogSigmoid: Rule(
        lambda layer, a, z: aten.log_sigmoid.out(a, out=z),
        lambda layer, d, a, z: d.mul_(torch.sigmoid(a.neg_(), out=a)),
        in_place=False,
    ),
    Arctan: Rule(
        lambda layer, a, z: torch.atan(a, out=z),
        lambda layer, d, a, z: d.div_(a.square_().add_(1)),
        in_place=False,
    ),
}


class _Layer(NamedTuple):
    parameters: Mapping[str, Any]
    """The linear layer's own dictionary: what is in it at the time of a step is what is used."""
    activation: nn.Module
    rule: Rule


class _Plan:
    """The buffers of one batch size and one layout of the output, with their views that a step needs."""

    def __init__(self, layers: Sequence[_Layer], rows: int, classes_first: bool) -> None:
        like = layers[0].parameters["weight"]
        widths = [layer.parameters["weight"].size(0) for layer in layers]
        self.rows = rows
        pre = [like.new_empty(rows, width) for width in widths]
        error = [like.new_empty(rows, width) for width in widths]
        if classes_first:
            # (C, B) in memory: log_softmax over the first dimension vectorises over the rows and takes
            # 1.1 µs for 64×10 where it takes 6.5 over the last; the matrix products do not care.
            pre[-1] = like.new_empty(widths[-1], rows).t()
            error[-1] = like.new_empty(widths[-1], rows).t()
        post = [
            a if layer.rule.in_place else torch.empty_like(a) for a, layer in zip(pre, layers, strict=True)
        ]
        self.output, self.output_t = post[-1], post[-1].t()
        self.error, self.error_t = error[-1], error[-1].t()
        self.flat_error = (self.error_t if classes_first else self.error).view(-1)
        self.log_p = like.new_empty(widths[-1], rows)
        self.flat_log_p = self.log_p.view(-1)
        self.ones = like.new_ones(rows)
        self.positions = torch.arange(rows, device=like.device)
        self.index = torch.empty_like(self.positions)
        self.factor = like.new_ones(())
        self.factor_value = 1.0
        self.forward = list(zip(layers, pre, post, strict=True))
        # From the last layer to the first: layer, a, z, z of the layer before, δ, δᵀ, δ of the layer before.
        transposed = [part.t() for part in error]
        columns = (layers, pre, post, [None, *post[:-1]], error, transposed, [None, *error[:-1]])
        self.backward = list(zip(*columns, strict=True))[::-1]

    def differentiate(self, loss: LossFunction, target: Tensor, factor: float | Tensor) -> Tensor:
        """A loss of the user's own: autograd is asked for its gradient at the output, and no further."""
        output = self.output.detach().requires_grad_()
        with torch.enable_grad():
            value = loss(output, target)
            (value * factor).backward()
        assert output.grad is not None
        self.error.copy_(output.grad)
        return value.detach()

    def scale(self, factor: float | Tensor) -> None:
        # A Python number is wrapped anew in each call (2.4 µs); a kept 0-d tensor is not (0.9 µs).
        if isinstance(factor, Tensor):
            self.flat_error.mul_(factor)
        elif factor != 1.0:
            if factor != self.factor_value:
                self.factor.fill_(factor)
                self.factor_value = factor
            self.flat_error.mul_(self.factor)


# Losses -----------------------------------------------------------------------------------------
# Each returns Σ loss over the batch and writes ∂/∂output into the plan's last error.


def _cross_entropy(plan: _Plan, target: Tensor, ignore_index: int) -> Tensor:
    """Σ −log softmax(o)_y; the error is softmax(o) − onehot(y), zero in rows without a target."""
    torch.log_softmax(plan.output_t, 0, out=plan.log_p)
    torch.exp(plan.log_p, out=plan.error_t)
    # One flat index serves both the loss and the error: 5 µs against 7 for gather and scatter_add_.
    if target.min().item() >= 0:
        index, ones = torch.add(plan.positions, target, alpha=plan.rows, out=plan.index), plan.ones
    else:
        kept = target != ignore_index
        plan.error_t.mul_(kept)
        position = plan.positions[kept]
        index, ones = torch.add(position, target[kept], alpha=plan.rows), plan.ones[: len(position)]
    plan.flat_error.index_add_(0, index, ones, alpha=-1)
    return plan.flat_log_p.index_select(0, index).sum().neg_()


def _squared(plan: _Plan, target: Tensor, ignore_index: int) -> Tensor:
    """½Σ(o − y)²; the error is o − y."""
    torch.sub(plan.output, _like(target, plan.output), out=plan.error)
    return torch.dot(plan.flat_error, plan.flat_error).mul_(0.5)


def _bernoulli(plan: _Plan, target: Tensor, ignore_index: int) -> Tensor:
    """Σ log(1 + e^o) − y·o; the error is sigmoid(o) − y."""
    target = _like(target, plan.output)
    torch.sigmoid(plan.output, out=plan.error).sub_(target)
    return functional.binary_cross_entropy_with_logits(plan.output, target, reduction="sum")


@dataclass(frozen=True)
class Loss:
    compute: Callable[[_Plan, Tensor, int], Tensor]
    classes_first: bool = False


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, classes_first=True),
    "squared": Loss(_squared),
    "bernoulli": Loss(_bernoulli),
}


class DenseEngine:
    """Σ loss over a batch and factor·gradient added to each parameter's ``.grad``, without autograd.

    Parameters are looked up anew in each call, so a model may be loaded, moved to a flat buffer or
    frozen in part at any time. Dropout, norms and forward hooks are left to autograd: ask `supports`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = [
            _Layer(layer.linear._parameters, layer.activation, RULES[type(layer.activation)])
            for layer in dense_layers(model)
        ]
        self._plans: dict[tuple[int, bool], _Plan] = {}

    @staticmethod
    def supports(
        model: nn.Module, loss: str | LossFunction, device: torch.device | str, dtype: torch.dtype
    ) -> bool:
        """Whether `gradients` can replace autograd for this model: linear layers and element-wise
        activations only, none of them hooked, on the CPU in float32 or float64."""
        if (isinstance(loss, str) and loss not in LOSSES) or torch.device(device).type != "cpu":
            return False
        if dtype not in (torch.float32, torch.float64):
            return False
        modules = list(model.modules())
        if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
            return False
        if any(module._backward_hooks or module._backward_pre_hooks for module in modules):
            return False
        if any(type(module) not in (MLP, nn.Sequential, nn.Linear, nn.Dropout, *RULES) for module in modules):
            return False
        # A dropout layer is a no-op in evaluation, but that can change between two steps.
        if any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules):
            return False
        try:
            layers = dense_layers(model)
        except InputError:
            return False
        parameters = [parameter for layer in layers for parameter in layer.linear.parameters()]
        return all(parameter.dtype == dtype and parameter.device.type == "cpu" for parameter in parameters)

    def gradients(
        self,
        inputs: Tensor,
        target: Tensor,
        factor: float | Tensor,
        *,
        loss: str | LossFunction,
        ignore_index: int = -100,
    ) -> Tensor:
        """Σ loss over the batch, a new 0-d tensor; adds factor·∂Σloss/∂w to ``w.grad`` of each parameter.

        loss: "cross_entropy" (integer targets; rows with `ignore_index` count nothing), "squared"
        (½Σ(o−y)²), "bernoulli" (targets in [0, 1], outputs are logits), or any function of (output,
        target) that returns the sum; parameters of its own get their gradients too.
        """
        if inputs.dim() > 2:
            inputs = inputs.flatten(1)
        known, own = (LOSSES.get(loss), None) if isinstance(loss, str) else (None, loss)
        if known is None and own is None:
            raise unknown_name("loss", str(loss), LOSSES)
        key = inputs.size(0), known is not None and known.classes_first
        plan = self._plans.get(key) or self._make_plan(*key)
        with torch.no_grad():
            # a^l = W^l z^{l−1} + b^l, z^l = σ(a^l)
            previous = inputs
            for layer, a, z in plan.forward:
                weight, bias = layer.parameters["weight"], layer.parameters["bias"]
                if bias is None:
                    torch.mm(previous, weight.t(), out=a)
                else:
                    torch.addmm(bias, previous, weight.t(), out=a)
                layer.rule.forward(layer.activation, a, z)
                previous = z
            if own is not None:
                value = plan.differentiate(own, target, factor)
            elif known is not None:
                value = known.compute(plan, target, ignore_index)
                plan.scale(factor)
            for layer, a, z, previous, error, error_t, next_error in plan.backward:
                weight, bias = layer.parameters["weight"], layer.parameters["bias"]
                layer.rule.backward(layer.activation, error, a, z)  # BP1, and the second half of BP2
                if bias is not None and bias.requires_grad:  # BP3: product with ones 0.8 µs, sum(0) 1.7
                    (_new_grad(bias) if bias.grad is None else bias.grad).addmv_(error_t, plan.ones)
                if weight.requires_grad:  # BP4
                    grad = _new_grad(weight) if weight.grad is None else weight.grad
                    grad.addmm_(error_t, inputs if previous is None else previous)
                if next_error is not None:  # BP2
                    torch.mm(error, weight, out=next_error)
        return value

    def _make_plan(self, rows: int, classes_first: bool) -> _Plan:
        if len(self._plans) >= MAX_PLANS:
            self._plans.pop(next(iter(self._plans)))
        plan = self._plans[rows, classes_first] = _Plan(self.layers, rows, classes_first)
        return plan


def _new_grad(parameter: Tensor) -> Tensor:
    parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _like(target: Tensor, output: Tensor) -> Tensor:
    if target.shape != output.shape:
        if target.dim() != 1 or output.shape != (len(target), 1):
            raise InputError(
                f"targets of shape {tuple(target.shape)} for outputs of shape {tuple(output.shape)}",
                expected="the same shape",
                fix="give the model as many outputs as there are target columns",
            )
        target = target.unsqueeze(1)
    return target if target.dtype == output.dtype else target.to(output.dtype)
