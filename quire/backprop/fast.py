"""The four equations with buffers that are made once: training of small dense nets without autograd.

A step of a small net costs bookkeeping, not arithmetic. Measured for 64-128-10 and a batch of 64 on one
core (microseconds): forward, loss and backward take 210 by autograd and 85 here, 40 of them in the five
matrix products. The choices behind that were measured too, and stand as comments where they were made.

B rows of a batch, D inputs, M outputs of a layer, C outputs of the net. a = Wz + b are the
pre-activations, z = σ(a) the outputs of a layer, δ = ∂C/∂a its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.backprop.engine import dense_layers
from quire.errors import InputError, unknown_name
from quire.functional.modes import has_hooks
from quire.models.mlp import MLP
from quire.nn.activation import Arctan

LossFunction = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor, float | Tensor], Tensor]
"""Inputs, targets and factor to the summed loss; gradients are added to the parameters' ``.grad``."""
aten = torch.ops.aten

# Plans kept at once: the full batch, the last partial one and the micro-batches of both.
MAX_PLANS = 16


class Rule(NamedTuple):
    """How an activation runs on buffers. `forward(layer, a, z)` fills z; `backward(layer, δ, a, z)`
    multiplies δ by σ'(a) in place and may overwrite a and z. Where σ' can be had from z alone, z takes
    a's place in memory."""

    forward: Callable[[Any, Tensor, Tensor], object]
    backward: Callable[[Any, Tensor, Tensor, Tensor], object]
    in_place: bool = True


# z of a layer is not read after its own backward, so σ' may take its place: sign(z) is ReLU's derivative.
# Two methods of a tensor cost 5 µs less than one operator of `torch.ops`, which Python dispatches.
RULES: dict[type[nn.Module], Rule] = {
    nn.Identity: Rule(lambda layer, a, z: a, lambda layer, d, a, z: d),
    nn.ReLU: Rule(
        lambda layer, a, z: a.relu_(),
        lambda layer, d, a, z: d.mul_(z.sign_()),
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


class _Bound(NamedTuple):
    """A layer's tensors as they are in memory now, with their transposes: looking them up in the module
    and transposing them anew would cost 7 µs a step."""

    weight: Tensor
    weight_t: Tensor
    weight_grad: Tensor | None
    """None where the layer is frozen."""
    bias: Tensor | None
    bias_grad: Tensor | None
    activation: nn.Module
    rule: Rule


def _bind(linear: nn.Linear, activation: nn.Module) -> _Bound:
    weight, bias = linear.weight, linear.bias
    for parameter in (weight, bias):
        if parameter is not None and parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    plain = weight.detach()
    return _Bound(
        plain,
        plain.t(),
        weight.grad if weight.requires_grad else None,
        None if bias is None else bias.detach(),
        bias.grad if bias is not None and bias.requires_grad else None,
        activation,
        RULES[type(activation)],
    )


def _place(parameter: Tensor | None) -> tuple[object, ...]:
    """What must not change for a binding to stay true."""
    if parameter is None:
        return ()
    return parameter.data_ptr(), parameter.requires_grad, id(parameter.grad)


class _Plan:
    """The buffers of one batch size and one layout of the output, with their views that a step needs."""

    def __init__(self, layers: Sequence[_Bound], rows: int, classes_first: bool) -> None:
        like = layers[0].weight
        widths = [layer.weight.size(0) for layer in layers]
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
        self._link(layers, pre, post, error)

    def _link(
        self, layers: Sequence[_Bound], pre: list[Tensor], post: list[Tensor], error: list[Tensor]
    ) -> None:
        """The step as calls whose arguments are known: what depends on the batch stays open. A list of
        such calls runs 15 µs faster than a loop over the layers."""
        first, last = layers[0], len(layers) - 1
        bias = first.bias
        if bias is None:
            self.take_inputs: Callable[[Tensor], object] = lambda x: torch.mm(x, first.weight_t, out=pre[0])
        else:
            self.take_inputs = lambda x: torch.addmm(bias, x, first.weight_t, out=pre[0])
        self.forward: list[Callable[[], object]] = []
        for i, layer in enumerate(layers):
            if i and layer.bias is None:  # a^l = W^l z^{l−1} + b^l
                self.forward.append(partial(torch.mm, post[i - 1], layer.weight_t, out=pre[i]))
            elif i:
                self.forward.append(partial(torch.addmm, layer.bias, post[i - 1], layer.weight_t, out=pre[i]))
            if not isinstance(layer.activation, nn.Identity):  # z^l = σ(a^l)
                self.forward.append(partial(layer.rule.forward, layer.activation, pre[i], post[i]))
        self.backward: list[Callable[[], object]] = []
        for i in range(last, -1, -1):
            layer, transposed = layers[i], error[i].t()
            if not isinstance(layer.activation, nn.Identity):  # BP1, and the second half of BP2
                self.backward.append(
                    partial(layer.rule.backward, layer.activation, error[i], pre[i], post[i])
                )
            if layer.bias_grad is not None:  # BP3: product with ones 0.8 µs, sum(0) 1.7
                self.backward.append(partial(layer.bias_grad.addmv_, transposed, self.ones))
            if i and layer.weight_grad is not None:  # BP4
                self.backward.append(partial(layer.weight_grad.addmm_, transposed, post[i - 1]))
            if i:  # BP2
                self.backward.append(partial(torch.mm, error[i], layer.weight, out=error[i - 1]))
        self.first_error_t, self.first_grad = error[0].t(), first.weight_grad

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
    """Σ −log softmax(o)_y; the error is softmax(o) − onehot(y), zero in rows without a target.

    Targets may also be probabilities t (B, C) that add up to one: Σ −t·log softmax(o), softmax(o) − t.
    One-hot rows made once are cheaper than class numbers in each step, by 10 µs.
    """
    torch.log_softmax(plan.output_t, 0, out=plan.log_p)
    torch.exp(plan.log_p, out=plan.error_t)
    if target.is_floating_point():
        wanted = target.t()
        plan.error_t.sub_(wanted)
        return torch.sum(wanted * plan.log_p).neg_()
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

    Each call checks that the parameters are where they were, so a model may be loaded, moved to a flat
    buffer or frozen in part at any time. Dropout, norms and hooks are left to autograd: ask `supports`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = [(layer.linear, layer.activation) for layer in dense_layers(model)]
        parameters = [p for linear, _ in self.layers for p in (linear.weight, linear.bias)]
        self._parameters = [p for p in parameters if p is not None]
        self._places: list[tuple[object, ...]] = []
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
        if has_hooks(model):
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

        loss: "cross_entropy" (class numbers, where rows with `ignore_index` count nothing, or rows of
        probabilities), "squared"
        (½Σ(o−y)²), "bernoulli" (targets in [0, 1], outputs are logits), or any function of (output,
        target) that returns the sum; parameters of its own get their gradients too.
        """
        if self._places != [_place(p) for p in self._parameters]:
            self._bind()
        if inputs.dim() > 2:
            inputs = inputs.flatten(1)
        return self._steps(loss, ignore_index)(inputs, target, factor)

    def bound(self, loss: str | LossFunction) -> Step:
        """`gradients` for one loss, two-dimensional inputs and parameters that stay where they are in
        memory until training ends; without the checks, which would cost 12 µs a step."""
        self._bind()
        return self._steps(loss, -100)

    def _steps(self, loss: str | LossFunction, ignore_index: int) -> Step:
        if isinstance(loss, str) and loss not in LOSSES:
            raise unknown_name("loss", loss, LOSSES)
        known = LOSSES[loss] if isinstance(loss, str) else None
        classes_first = known is not None and known.classes_first
        plans = self._plans

        # Nothing here requires a gradient (the parameters are bound detached), so autograd keeps out.
        def step(inputs: Tensor, target: Tensor, factor: float | Tensor) -> Tensor:
            rows = inputs.size(0)
            plan = plans.get((rows, classes_first)) or self._make_plan(rows, classes_first)
            plan.take_inputs(inputs)
            for operation in plan.forward:
                operation()
            if known is not None:
                value = known.compute(plan, target, ignore_index)
                plan.scale(factor)
            else:
                assert not isinstance(loss, str)
                value = plan.differentiate(loss, target, factor)
            for operation in plan.backward:
                operation()
            if plan.first_grad is not None:  # BP4 of the first layer
                plan.first_grad.addmm_(plan.first_error_t, inputs)
            return value

        return step

    def _bind(self) -> None:
        """Take hold of the tensors anew; every buffer refers to them."""
        self._bound = [_bind(linear, activation) for linear, activation in self.layers]
        self._plans.clear()
        self._places = [_place(p) for p in self._parameters]

    def _make_plan(self, rows: int, classes_first: bool) -> _Plan:
        if len(self._plans) >= MAX_PLANS:
            self._plans.pop(next(iter(self._plans)))
        plan = self._plans[rows, classes_first] = _Plan(self._bound, rows, classes_first)
        return plan


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
