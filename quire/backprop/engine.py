"""The four equations of backpropagation, for any dense net, activation and cost.

    BP1   δ^L = ∇_z C ⊙ σ'(a^L)
    BP2   δ^l = (W^{l+1}ᵀ δ^{l+1}) ⊙ σ'(a^l)
    BP3   ∂C/∂b^l = δ^l
    BP4   ∂C/∂W^l = δ^l z^{l−1}ᵀ

B samples (rows of a batch; the sums over them are the gradients of the summed cost), D inputs and M outputs
of a layer. a = Wz + b are the pre-activations, z = σ(a) the outputs of a layer, δ = ∂C/∂a its error.
Softmax and its kin mix the entries of a; for them "⊙ σ'(a)" is the product with the transposed Jacobian.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional.activations import ACTIVATIONS, Activation
from quire.nn.activation import Arctan


@runtime_checkable
class Cost(Protocol):
    """A cost C(z^L, y) with its gradient with respect to the output z^L of the net."""

    def value(self, output: Tensor, target: Tensor) -> Tensor: ...

    def gradient(self, output: Tensor, target: Tensor) -> Tensor: ...


CostLike = Cost | Callable[[Tensor, Tensor], Tensor]
ActivationLike = str | Activation | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FunctionCost:
    """A cost given as a plain function of (output, target) that returns a scalar."""

    function: Callable[[Tensor, Tensor], Tensor]

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        return self.function(output, target)

    def gradient(self, output: Tensor, target: Tensor) -> Tensor:
        # Not torch.func.grad, whose first call loads the compiler and takes seconds.
        leaf = output.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.function(leaf, target), leaf)[0]


class QuadraticCost:
    """C = ½ Σ ‖z^L − y‖², with ∇C = z^L − y."""

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum() / 2

    def gradient(self, output: Tensor, target: Tensor) -> Tensor:
        return output - target


class CrossEntropyCost:
    """C = −Σ log softmax(z^L)_y for integer targets y, with ∇C = softmax(z^L) − onehot(y)."""

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        return -torch.log_softmax(output, -1).gather(-1, target.unsqueeze(-1)).sum()

    def gradient(self, output: Tensor, target: Tensor) -> Tensor:
        ones = torch.ones_like(target, dtype=output.dtype).unsqueeze(-1)
        return torch.softmax(output, -1).scatter_add(-1, target.unsqueeze(-1), -ones)


# The four equations ---------------------------------------------------------------------------


def output_error(cost_gradient: Tensor, a: Tensor, activation: ActivationLike) -> Tensor:
    """BP1: δ^L = ∇_z C ⊙ σ'(a^L), (…, M)."""
    return as_activation(activation).pull_back(a, cost_gradient)


def hidden_error(next_weight: Tensor, next_error: Tensor, a: Tensor, activation: ActivationLike) -> Tensor:
    """BP2: δ^l = (W^{l+1}ᵀ δ^{l+1}) ⊙ σ'(a^l), (…, D) from next_weight (M, D) and next_error (…, M)."""
    return as_activation(activation).pull_back(a, next_error @ next_weight)


def bias_gradient(error: Tensor) -> Tensor:
    """BP3: ∂C/∂b = Σ_samples δ, (M,) from (…, M)."""
    return error.reshape(-1, error.shape[-1]).sum(0)


def weight_gradient(error: Tensor, z: Tensor) -> Tensor:
    """BP4: ∂C/∂W = Σ_samples δ zᵀ, (M, D) from error (…, M) and the layer's input z (…, D)."""
    return error.reshape(-1, error.shape[-1]).t() @ z.reshape(-1, z.shape[-1])


# The engine -----------------------------------------------------------------------------------


class Forward(NamedTuple):
    pre_activations: list[Tensor]
    """a^1 … a^L."""
    outputs: list[Tensor]
    """z^0 … z^L; the first is the input."""


@dataclass(frozen=True)
class Backpropagation:
    """What one pass of the four equations gives."""

    value: Tensor
    output: Tensor
    deltas: list[Tensor]
    """δ^1 … δ^L, (B, M) each."""
    gradients: Mapping[str, Tensor]
    """∂C by parameter name."""


class Backprop:
    """A dense net as weights W^l (M, D), biases b^l (M,) or None, one activation a layer, and a cost.

    Parameters are called ``weight1``, ``bias1``, … unless `names` gives a pair for each layer.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activations: Sequence[ActivationLike],
        cost: CostLike,
        *,
        names: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        if not weights or len({len(weights), len(biases), len(activations)}) != 1:
            raise InputError(
                f"{len(weights)} weights, {len(biases)} biases and {len(activations)} activations",
                expected="one of each for every layer, and at least one layer",
                fix='give "linear" where a layer has no activation and None where it has no bias',
            )
        for number, (first, second) in enumerate(itertools.pairwise(weights), start=1):
            if second.shape[1] != first.shape[0]:
                raise InputError(
                    f"weights of shape {tuple(first.shape)} and {tuple(second.shape)} in layers "
                    f"{number} and {number + 1}",
                    expected="as many columns as the layer before has rows",
                    fix="weights are (outputs, inputs); transpose them if yours are not",
                )
        self.weights = [weight.detach() for weight in weights]
        self.biases = [None if bias is None else bias.detach() for bias in biases]
        self.activations = [as_activation(activation) for activation in activations]
        self.cost: Cost = cost if isinstance(cost, Cost) else FunctionCost(cost)
        self.names = names or [(f"weight{i}", f"bias{i}") for i in range(1, len(weights) + 1)]

    def forward(self, x: Tensor) -> Forward:
        """a^l = W^l z^{l−1} + b^l, z^l = σ(a^l), all of them kept."""
        pre_activations, outputs = [], [x.detach()]
        for weight, bias, activation in zip(self.weights, self.biases, self.activations, strict=True):
            pre_activations.append(nn.functional.linear(outputs[-1], weight, bias))
            outputs.append(activation.function(pre_activations[-1]))
        return Forward(pre_activations, outputs)

    def __call__(self, x: Tensor, y: Tensor) -> Backpropagation:
        """Cost, errors and gradients for inputs x (B, D) and targets y."""
        with torch.no_grad():
            pre_activations, outputs = self.forward(x)
            value = self.cost.value(outputs[-1], y)
            cost_gradient = self.cost.gradient(outputs[-1], y)
            deltas = [output_error(cost_gradient, pre_activations[-1], self.activations[-1])]
            for layer in range(len(self.weights) - 2, -1, -1):
                weight, a = self.weights[layer + 1], pre_activations[layer]
                deltas.insert(0, hidden_error(weight, deltas[0], a, self.activations[layer]))
            gradients: dict[str, Tensor] = {}
            for layer, (weight_name, bias_name) in enumerate(self.names):
                gradients[weight_name] = weight_gradient(deltas[layer], outputs[layer])
                if self.biases[layer] is not None:
                    gradients[bias_name] = bias_gradient(deltas[layer])
        return Backpropagation(value, outputs[-1], deltas, gradients)


def backpropagate(model: nn.Module, cost: CostLike, x: Tensor, y: Tensor) -> Backpropagation:
    """The four equations on a model made of linear layers and activations, without autograd.

    Gradients come under the model's own parameter names. The layers are read from the model in the
    order in which they are declared; if they do not reproduce its output, it is refused.
    """
    layers = dense_layers(model)
    engine = Backprop(
        [layer.linear.weight for layer in layers],
        [layer.linear.bias for layer in layers],
        [as_activation(layer.activation) for layer in layers],
        cost,
        names=[(f"{layer.name}weight", f"{layer.name}bias") for layer in layers],
    )
    rows = x.flatten(1) if x.dim() > 2 and x.shape[-1] != layers[0].linear.in_features else x
    result = engine(rows, y)
    with torch.no_grad():
        output = model(x)
    if output.shape != result.output.shape or not torch.allclose(output, result.output, rtol=1e-4, atol=1e-6):
        raise InputError(
            f"{type(model).__name__} does more than apply its layers one after the other",
            expected="a chain of linear layers and activations",
            fix="use autograd (loss.backward()) for this model",
        )
    return result


# Reading a model ------------------------------------------------------------------------------


class DenseLayer(NamedTuple):
    name: str
    """The prefix of its parameters' names, with the dot."""
    linear: nn.Linear
    activation: nn.Module
    """`nn.Identity` where the layer has none."""


def dense_layers(model: nn.Module) -> list[DenseLayer]:
    """The linear layers of `model`, in the order of declaration, each with the activation that follows."""
    layers: list[DenseLayer] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            layers.append(DenseLayer(f"{name}." if name else "", module, nn.Identity()))
        elif next(module.children(), None) is not None or _passes_through(module):
            continue
        elif (
            not layers
            or not isinstance(layers[-1].activation, nn.Identity)
            or next(module.parameters(), None) is not None
        ):
            raise InputError(
                f"layer '{name}' of kind {type(module).__name__}",
                expected="linear layers, each followed by at most one activation without parameters",
                fix="use autograd (loss.backward()) for this model",
            )
        else:
            layers[-1] = layers[-1]._replace(activation=module)
    if not layers:
        raise InputError(f"{type(model).__name__} has no linear layer", expected="at least one nn.Linear")
    parameters = [id(parameter) for layer in layers for parameter in layer.linear.parameters()]
    if len(set(parameters)) < len(parameters):
        raise InputError(
            f"{type(model).__name__} uses the same weights in several layers",
            expected="weights of its own for each layer",
            fix="use autograd (loss.backward()) for this model",
        )
    return layers


def _passes_through(module: nn.Module) -> bool:
    dropout = isinstance(module, nn.Dropout) and (module.p == 0 or not module.training)
    # An empty nn.Sequential is what the body of a model without hidden layers is made of.
    return dropout or isinstance(module, nn.Identity | nn.Flatten | nn.Sequential)


# Layers whose formula is exactly that of the named activation. Softplus is not among them: PyTorch's
# layer turns linear at βa = 20, which float64 can tell from the formula.
NAMED: dict[type[nn.Module], str] = {
    nn.Identity: "linear", nn.ReLU: "relu", nn.ReLU6: "relu6", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh",
    nn.LogSigmoid: "log_sigmoid", Arctan: "arctan",
}  # fmt: skip


def as_activation(activation: ActivationLike) -> Activation:
    """A name, an `Activation`, a layer or any function of a tensor as an `Activation`.

    For a function without a known derivative, Jᵀg is asked of autograd at that one layer.
    """
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, str):
        return ACTIVATIONS[activation]
    if isinstance(activation, nn.Module) and type(activation) in NAMED:
        return ACTIVATIONS[NAMED[type(activation)]]
    function = activation

    def pull_back(a: Tensor, gradient: Tensor) -> Tensor:
        leaf = a.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(function(leaf), leaf, gradient)[0]

    def derivative(a: Tensor) -> Tensor:
        return pull_back(a, torch.ones_like(a))

    name = getattr(function, "__name__", type(function).__name__)
    return Activation(name, function, derivative, mixing=pull_back)
