"""Backpropagation written out: the four equations, through time, as a graph, and as a fast engine."""

from __future__ import annotations

from quire.backprop.bptt import Elman, ElmanGradients, bptt, state_gradient, state_jacobian
from quire.backprop.engine import (
    Backprop,
    Backpropagation,
    Cost,
    CrossEntropyCost,
    FunctionCost,
    QuadraticCost,
    backpropagate,
    bias_gradient,
    hidden_error,
    output_error,
    weight_gradient,
)
from quire.backprop.fast import DenseEngine
from quire.backprop.graph import Graph, Node, computational_graph

__all__ = [
    "Backprop", "Backpropagation", "Cost", "CrossEntropyCost", "DenseEngine", "Elman", "ElmanGradients",
    "FunctionCost", "Graph", "Node", "QuadraticCost", "backpropagate", "bias_gradient", "bptt",
    "computational_graph", "hidden_error", "output_error", "state_gradient", "state_jacobian",
    "weight_gradient",
]  # fmt: skip
