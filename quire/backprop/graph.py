"""The computational graph of any PyTorch function or module, with values and gradients at its nodes.

Every call of a PyTorch function is recorded as it happens, at the level at which the code was written
(`linear`, `relu`, `+`), so that no model has to be rewritten or traced. Gradients are those of the sum of
the output's entries: with a scalar output (a loss), of the output itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, resolve_name

from quire.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Node:
    """One tensor of a computation."""

    index: int
    op: str
    """The function that made it, or what kind of leaf it is: input, parameter, buffer, constant."""
    name: str
    """Name of a leaf; for an operation, the numbers among its arguments."""
    value: Tensor
    inputs: tuple[int, ...] = ()
    """Indices of the nodes that it was computed from."""
    gradient: Tensor | None = None
    """∂(Σ output)/∂value; None where no gradient flows."""
    edge: GradientEdge | None = field(default=None, repr=False)

    @property
    def is_leaf(self) -> bool:
        return self.op in LEAVES

    def label(self) -> str:
        """Operation, value and gradient, in three lines."""
        title = f"{self.name} ({self.op})" if self.is_leaf else f"{self.op} {self.name}".strip()
        lines = [title, summary(self.value)]
        if self.gradient is not None:
            lines.append(f"∇ {summary(self.gradient)}")
        return "\n".join(lines)


LEAVES = frozenset({"input", "parameter", "buffer", "constant"})


class Graph:
    """Nodes in the order in which they were computed; the last one is the output."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)

    @property
    def output(self) -> Node:
        return self.nodes[-1]

    @property
    def edges(self) -> list[tuple[int, int]]:
        return [(source, node.index) for node in self.nodes for source in node.inputs]

    def __getitem__(self, name: str) -> Node:
        """The leaf called `name`."""
        for node in self.nodes:
            if node.is_leaf and node.name == name:
                return node
        raise KeyError(name)

    def layers(self) -> list[list[Node]]:
        """Nodes by depth, each below everything that it is computed from, with few crossing lines."""
        depth: dict[int, int] = {}
        users: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes:
            depth[node.index] = 1 + max((depth[source] for source in node.inputs), default=-1)
            for source in node.inputs:
                users[source].append(node.index)
        for node in self.nodes:  # leaves stand right above their first use
            if not node.inputs and users[node.index]:
                depth[node.index] = min(depth[user] for user in users[node.index]) - 1
        layers: list[list[Node]] = [[] for _ in range(1 + max(depth.values()))]
        for node in self.nodes:
            layers[depth[node.index]].append(node)
        place = {node.index: float(i) for layer in layers for i, node in enumerate(layer)}
        for layer in reversed(layers):  # ordered by the mean place of what uses them

            def mean_place(node: Node) -> float:
                wanted = [place[user] for user in users[node.index]]
                return sum(wanted) / len(wanted) if wanted else place[node.index]

            layer.sort(key=mean_place)
            place.update({node.index: i - (len(layer) - 1) / 2 for i, node in enumerate(layer)})
        return layers

    def to_dot(self) -> str:
        """The graph in Graphviz' language."""
        lines = ["digraph {", "  node [shape=box, fontname=Helvetica];"]
        for node in self.nodes:
            text = node.label().replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            style = ", style=filled, fillcolor=lightblue" if node.is_leaf else ""
            lines.append(f'  n{node.index} [label="{text}"{style}];')
        lines += [f"  n{source} -> n{target};" for source, target in self.edges]
        return "\n".join([*lines, "}"])

    def figure(self, title: str = "Computational graph: values and gradients (∇)") -> Figure:
        """Computation from top to bottom; leaves are blue, the output is orange."""
        from matplotlib.figure import Figure

        layers = self.layers()
        width = max(len(layer) for layer in layers)
        picture = Figure(figsize=(max(5.0, 2.3 * width), max(2.5, 1.25 * len(layers) + 0.5)))
        axes = picture.add_subplot()
        place: dict[int, tuple[float, float]] = {}
        for row, layer in enumerate(layers):
            for column, node in enumerate(layer):
                place[node.index] = (column - (len(layer) - 1) / 2, -float(row))
        boxes = {}
        for node in self.nodes:
            color = "lightblue" if node.is_leaf else "moccasin" if node is self.output else "white"
            style = {"boxstyle": "round,pad=0.4", "facecolor": color, "edgecolor": "dimgray"}
            x, y = place[node.index]
            # The colour is said, not left to the style: the boxes are light on any paper.
            text = axes.text(
                x, y, node.label(), ha="center", va="center", fontsize=8, color="#222222", bbox=style
            )
            boxes[node.index] = text.get_bbox_patch()
        for source, target in self.edges:
            ends = {"patchA": boxes[source], "patchB": boxes[target], "shrinkA": 0, "shrinkB": 0}
            arrow = {"arrowstyle": "-|>", "color": "gray", **ends}
            axes.annotate("", xy=place[target], xytext=place[source], arrowprops=arrow)
        axes.set_xlim(-width / 2, width / 2)
        axes.set_ylim(-len(layers) + 0.4, 0.6)
        axes.set_title(title)
        axes.axis("off")
        picture.tight_layout()
        return picture


def computational_graph(
    function: Callable[..., Tensor] | nn.Module, *inputs: Tensor, names: Sequence[str] | None = None
) -> Graph:
    """Run `function` on `inputs` and return its graph, with the value and the gradient of every node.

    `names` are names for the inputs. Parameters of a module go by their own. Neither the inputs nor
    any ``.grad`` is changed.
    """
    if names is not None and len(names) != len(inputs):
        raise InputError(f"{len(names)} names for {len(inputs)} inputs", expected="one name for each input")
    copies = [value.detach().clone() for value in inputs]
    copies = [value.requires_grad_() if value.is_floating_point() else value for value in copies]
    leaves = {("input", names[i] if names else f"x{i + 1}"): value for i, value in enumerate(copies)}
    if isinstance(function, nn.Module):
        leaves |= {("parameter", name): value for name, value in function.named_parameters()}
        leaves |= {("buffer", name): value for name, value in function.named_buffers()}
    recorder = _Recorder(leaves)
    with torch.enable_grad(), recorder:
        output = function(*copies)
    if not isinstance(output, Tensor):
        raise InputError(
            f"the function returned a {type(output).__name__}",
            expected="one tensor",
            fix="wrap it in a function that returns the tensor of interest",
        )
    return Graph(_with_gradients(output, _reachable(recorder.node_of(output), recorder.nodes)))


class _Recorder(TorchFunctionMode):
    def __init__(self, leaves: Mapping[tuple[str, str], Tensor]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.alive: list[Tensor] = []  # an id may be given again as soon as its tensor is gone
        self.index_of: dict[int, int] = {}
        for (kind, name), value in leaves.items():
            self._add(value, kind, name, ())

    def node_of(self, tensor: Tensor) -> int:
        if id(tensor) not in self.index_of:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "constant"
            self._add(tensor, kind, f"{kind[0]}{len(self.nodes)}", ())
        return self.index_of[id(tensor)]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        arguments = list(_leaves((args, kwargs or {})))
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        versions = {id(value): value._version for value in tensors}
        result = func(*args, **(kwargs or {}))
        made = [
            value
            for value in _leaves(result)
            if isinstance(value, Tensor) and versions.get(id(value)) != value._version
        ]
        if made:
            sources = tuple(dict.fromkeys(self.node_of(value) for value in tensors))
            numbers = [str(value) for value in arguments if type(value) in (int, float)]
            name = f"({', '.join(numbers)})" if numbers else ""
            for value in made:
                self._add(value, _op_name(func), name, sources)
        return result

    def _add(self, tensor: Tensor, op: str, name: str, sources: tuple[int, ...]) -> None:
        self.alive.append(tensor)
        self.index_of[id(tensor)] = len(self.nodes)
        edge = get_gradient_edge(tensor) if tensor.requires_grad else None
        # A copy: an operation in place would otherwise change what the node shows.
        value = tensor.detach().clone()
        self.nodes.append(Node(len(self.nodes), op, name, value, sources, edge=edge))


def _with_gradients(output: Tensor, nodes: list[Node]) -> list[Node]:
    tracked = [node for node in nodes if node.edge is not None]
    if output.requires_grad:
        edges = [node.edge for node in tracked if node.edge is not None]
        gradients = torch.autograd.grad(output.sum(), edges, allow_unused=True)
        for node, gradient in zip(tracked, gradients, strict=True):
            node.gradient = gradient
    for node in nodes:
        node.edge = None  # frees autograd's graph
    return nodes


def _reachable(output: int, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that the output depends on, numbered anew, the output last."""
    wanted: set[int] = set()
    waiting = [output]
    while waiting:
        index = waiting.pop()
        if index not in wanted:
            wanted.add(index)
            waiting.extend(nodes[index].inputs)
    kept = [node for node in nodes if node.index in wanted]
    number = {node.index: i for i, node in enumerate(kept)}
    for node in kept:
        node.index, node.inputs = number[node.index], tuple(number[source] for source in node.inputs)
    return kept


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _op_name(func: Callable[..., Any]) -> str:
    parts = (resolve_name(func) or getattr(func, "__name__", "operation")).split(".")
    name = parts[-2] if parts[-1] == "__get__" and len(parts) > 1 else parts[-1]
    plain = name.strip("_")
    symbols = {"add": "+", "sub": "−", "mul": "×", "truediv": "/", "div": "/", "matmul": "@", "neg": "−"}
    return symbols.get(plain.removeprefix("r") if plain in ("radd", "rmul", "rmatmul") else plain, plain)


def summary(value: Tensor) -> str:
    """A scalar or a few numbers in full; of more, the shape, mean and standard deviation."""
    if value.numel() <= 4:
        text = ", ".join(f"{number:.4g}" for number in value.flatten().tolist())
        return text if value.dim() == 0 else f"[{text}]"
    shape = "×".join(str(size) for size in value.shape)
    numbers = value.double()
    spread = numbers.std().item()
    return f"{shape}  {numbers.mean().item():.3g} ± {0.0 if math.isnan(spread) else spread:.3g}"
