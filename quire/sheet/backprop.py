"""Chapter 5: the four equations of backpropagation, the computational graph, and the way through time.

B samples, D inputs and M outputs of a layer, T time steps, H hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.backprop import (
    Backprop,
    Backpropagation,
    CrossEntropyCost,
    Elman,
    Graph,
    QuadraticCost,
    backpropagate,
    bias_gradient,
    bptt,
    computational_graph,
    hidden_error,
    output_error,
    state_gradient,
    weight_gradient,
)
from quire.backprop.engine import dense_layers
from quire.functional.activations import ACTIVATIONS, Activation
from quire.models.mlp import MLP, MLPConfig
from quire.sheet.registry import entry, gap, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]

TOLERANCE = 1e-12


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _costs() -> Iterator[tuple[Any, Tensor, Callable[[Tensor, Tensor], Tensor]]]:
    """Costs for outputs (5, 3), each with a target and the same cost as PyTorch or arithmetic has it."""
    target, classes = _normal(5, 3), torch.randint(0, 3, (5,))
    yield QuadraticCost(), target, lambda z, y: nn.functional.mse_loss(z, y, reduction="sum") / 2
    yield CrossEntropyCost(), classes, lambda z, y: nn.functional.cross_entropy(z, y, reduction="sum")
    yield (own := lambda z, y: ((z - y) ** 4).mean() + torch.sin(z).sum()), target, own


# The four equations ---------------------------------------------------------------------------


@entry(
    "backprop/bp1",
    "Error of the output layer",
    r"\delta^L = \nabla_{z} C \odot \sigma'(a^L)",
    code=output_error,
    wrong=lambda cost_gradient, a, activation: cost_gradient,  # forgets σ'
    tolerance=TOLERANCE,
)
def _(output_error: Code) -> float:
    errors = []
    for cost, target, oracle in _costs():
        for name, activation in ACTIVATIONS.items():
            a = _normal(5, 3).requires_grad_()
            z = activation.function(a)
            (expected,) = torch.autograd.grad(oracle(z, target), a)
            engine = Backprop([torch.eye(3).double()], [None], [name], cost)
            gradient = engine.cost.gradient(z.detach(), target)
            errors.append(gap(output_error(gradient, a.detach(), name), expected))
    return worst(*errors)


@entry(
    "backprop/bp2",
    "Error of a hidden layer",
    r"\delta^l = \big((W^{l+1})^{\top} \delta^{l+1}\big) \odot \sigma'(a^l)",
    code=hidden_error,
    wrong=lambda weight, error, a, activation: error @ weight,  # forgets σ'
    tolerance=TOLERANCE,
)
def _(hidden_error: Code) -> float:
    errors = []
    for name, activation in ACTIVATIONS.items():
        a, weight, error = _normal(5, 4).requires_grad_(), _normal(3, 4), _normal(5, 3)
        following = activation.function(a) @ weight.t()
        (expected,) = torch.autograd.grad(following, a, error)
        errors.append(gap(hidden_error(weight, error, a.detach(), name), expected))
    return worst(*errors)


@entry(
    "backprop/bp3",
    "Gradient of a bias",
    r"\frac{\partial C}{\partial b^l} = \delta^l",
    code=bias_gradient,
    wrong=lambda error: error.mean(0),  # a mean over the samples instead of their sum
    tolerance=TOLERANCE,
)
def _(bias_gradient: Code) -> float:
    errors = []
    for rows in (1, 2, 9):
        bias, z, weight, error = (
            _normal(4).requires_grad_(),
            _normal(rows, 3),
            _normal(4, 3),
            _normal(rows, 4),
        )
        (expected,) = torch.autograd.grad(nn.functional.linear(z, weight, bias), bias, error)
        errors.append(gap(bias_gradient(error), expected))
    return worst(*errors)


def _without_slopes(model: nn.Module, cost: Any, x: Tensor, y: Tensor) -> Backpropagation:
    """An engine that takes σ' to be 1 in every layer."""
    layers = dense_layers(model)
    flat = [Activation("flat", layer.activation, torch.ones_like) for layer in layers]
    names = [(f"{layer.name}weight", f"{layer.name}bias") for layer in layers]
    weights, biases = [layer.linear.weight for layer in layers], [layer.linear.bias for layer in layers]
    return Backprop(weights, biases, flat, cost, names=names)(x, y)


@entry(
    "backprop/bp4",
    "Gradient of a weight, and the four equations together",
    r"\frac{\partial C}{\partial W^l} = \delta^l (z^{l-1})^{\top}",
    code=(weight_gradient, backpropagate),
    wrong=(lambda error, z: error.t() @ torch.ones_like(z), _without_slopes),
    tolerance=TOLERANCE,
)
def _(weight_gradient: Code, backpropagate: Code) -> float:
    weight, z, error = _normal(4, 3).requires_grad_(), _normal(7, 3), _normal(7, 4)
    (expected,) = torch.autograd.grad(z @ weight.t(), weight, error)
    errors = [gap(weight_gradient(error, z), expected)]
    for cost, target, oracle in _costs():
        for activation in ("relu", "tanh", "softplus", "arctan"):
            model = MLP(MLPConfig(4, 3, (6, 5), activation)).double()
            x = _normal(5, 4)
            result = backpropagate(model, cost, x, target)
            value = oracle(model(x), target)
            gradients = torch.autograd.grad(value, list(model.parameters()))
            errors.append(gap(result.value, value))
            # δ^l is the gradient at a^l, layer by layer.
            before, z = [], x
            for layer in (layer.linear for layer in dense_layers(model)):
                before.append(layer(z))
                z = ACTIVATIONS[activation].function(before[-1]) if len(before) < 3 else before[-1]
            deltas = torch.autograd.grad(oracle(z, target), before)
            errors += [gap(a, b) for a, b in zip(result.deltas, deltas, strict=True)]
            errors.append(gap(result.output, z))
            for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
                errors.append(gap(result.gradients[name], gradient))
    return worst(*errors)


# The graph ------------------------------------------------------------------------------------


def _without_backward(function: Code, *inputs: Tensor, names: Sequence[str] | None = None) -> Graph:
    graph = computational_graph(function, *inputs, names=names)
    for node in graph.nodes:
        node.gradient = torch.ones_like(node.value)
    return graph


def _graph_picture() -> Figure:
    def loss(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return (torch.tanh(w * x + b) - y) ** 2 / 2

    inputs = [torch.tensor(value) for value in (0.5, 1.5, -0.25, 1.0)]
    graph = computational_graph(loss, *inputs, names=("x", "w", "b", "y"))
    return graph.figure("C = ½(tanh(wx + b) − y)²\neach node with its value and ∇ = ∂C/∂node")


@entry(
    "backprop/graph",
    "Computational graph with values and gradients",
    r"\frac{\partial C}{\partial v} = \sum_{u \,\in\, \mathrm{users}(v)} "
    r"\Big(\frac{\partial u}{\partial v}\Big)^{\top} \frac{\partial C}{\partial u}",
    code=computational_graph,
    wrong=_without_backward,
    tolerance=TOLERANCE,
    picture=_graph_picture,
)
def _(computational_graph: Code) -> float:
    # By hand, with v used twice: C = sin(v)·v, v = w·x, so ∂C/∂v = cos(v)·v + sin(v).
    x, w = _normal(4), _normal(4)
    graph = computational_graph(lambda x, w: (torch.sin(w * x) * (w * x)).sum(), x, w, names=("x", "w"))
    slope = torch.cos(w * x) * (w * x) + torch.sin(w * x)
    errors = [gap(graph["x"].gradient, slope * w), gap(graph["w"].gradient, slope * x)]
    sine = next(node for node in graph.nodes if node.op == "sin")
    errors += [gap(sine.value, torch.sin(w * x)), gap(sine.gradient, w * x)]
    # A model, against autograd at each parameter.
    model = MLP(MLPConfig(3, 2, (4,), "tanh")).double()
    inputs = _normal(5, 3)
    graph = computational_graph(model, inputs)
    expected = torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        errors.append(gap(graph[name].gradient, gradient))
    return worst(*errors, gap(graph.output.value, model(inputs)))


# Through time ---------------------------------------------------------------------------------


@entry(
    "backprop/bptt",
    "Backpropagation through time, truncated to the last L steps",
    r"\frac{dh_t}{dW} = \sum_{k=t-L+1}^{t} \Big(\prod_{j=k+1}^{t} \frac{\partial h_j}{\partial h_{j-1}}\Big) "
    r"\frac{\partial h_k}{\partial W}, \qquad "
    r"\frac{\partial h_j}{\partial h_{j-1}} = \mathrm{diag}(\sigma'(a_j))\, W_h",
    code=(state_gradient, bptt),
    wrong=(  # the direct effect at the last step alone
        lambda cell, x, h0=None, *, steps=None: state_gradient(cell, x, h0, steps=1),
        lambda cell, x, errors, h0=None, *, steps=None: bptt(cell, x, errors, h0, steps=1),
    ),
    tolerance=TOLERANCE,
)
def _(state_gradient: Code, bptt: Code) -> float:
    length, parts = 6, [_normal(4, 3) / 2, _normal(4, 4) / 2, _normal(4)]
    x, h0, output_weight = _normal(length, 3), _normal(4), _normal(4)

    def state(parts: Sequence[Tensor], until: int, steps: int) -> Tensor:
        """h_t of the recurrence written out; what happened `steps` before t is a constant."""
        w_input, w_hidden, bias = parts
        h = h0
        for t in range(until):
            h = torch.tanh(w_input @ x[t] + w_hidden @ (h.detach() if t == until - steps else h) + bias)
        return h

    cell, errors = Elman(parts[0], parts[1], parts[2]), []
    direct = output_weight.expand(length, 4)
    leaves = [part.clone().requires_grad_() for part in parts]
    for steps in (1, 3, length):
        last = torch.autograd.functional.jacobian(lambda *p, s=steps: state(p, length, s), tuple(parts))
        errors += [gap(a, b) for a, b in zip(state_gradient(cell, x, h0, steps=steps), last, strict=True)]
        cost = torch.stack([output_weight @ state(leaves, t, steps) for t in range(1, length + 1)]).sum()
        total = torch.autograd.grad(cost, leaves)
        errors += [gap(a, b) for a, b in zip(bptt(cell, x, direct, h0, steps=steps), total, strict=True)]
    for whole in (length + 5, None):  # L ≥ T, and no L at all, are the full gradient
        errors += [gap(a, b) for a, b in zip(bptt(cell, x, direct, h0, steps=whole), total, strict=True)]
        errors += [gap(a, b) for a, b in zip(state_gradient(cell, x, h0, steps=whole), last, strict=True)]
    return worst(*errors)
