"""A step as it is taken: each operation with the layer that asked for it, what it computes and what it moves.

A layer is known in the forward pass by the modules that are being called; in the backward pass by the node of
the graph that is at work, whose number tells in which module it was made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from quire.doctor.costs import scratch
from quire.doctor.costs.fields import Field, Fields
from quire.functional.memory import LiveBytes, storages

aten = torch.ops.aten
Phase = Literal["forward", "backward", "optimiser"]
MODEL, OUTSIDE = "(model)", "(loss)"
"""What belongs to the model itself, and to no module."""


class Operation(NamedTuple):
    layer: str
    phase: Phase
    name: str
    flops: int
    counted: int
    """The same as PyTorch's own counter has it."""
    bytes: int
    """Read and written."""
    dtype: torch.dtype
    attention: int = 0
    """FLOPs of attention that it stands for: the second of two products stands for both."""


# Formulas of products that PyTorch's counter leaves out, or has more of -----------------------


def _convolved(gradient: Tensor, x: Tensor, weight: Tensor, transposed: bool, mask: Sequence[bool]) -> int:
    """The counter takes the gradient of a weight in groups for that of a whole one."""
    places = x if transposed else gradient
    return 2 * places.numel() // places.shape[1] * weight.numel() * sum(mask[:2])


def _recurrent(x: Tensor, *weights: Tensor) -> int:
    rows = x.numel() // x.shape[-1]
    return 2 * rows * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _attended(query: Tensor, key: Tensor, value: Tensor) -> int:
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


MORE: dict[Any, Callable[..., int]] = {
    aten.convolution_backward: lambda dy, x, w, *rest: _convolved(dy, x, w, rest[4], rest[7]),
    aten.mv: lambda a, x: 2 * a.numel(),
    aten.addmv: lambda y, a, x: 2 * a.numel(),
    aten.dot: lambda x, y: 2 * x.numel(),
    aten.mkldnn_rnn_layer: lambda x, w, u, *rest: _recurrent(x, w, u),
    aten.mkldnn_rnn_layer_backward: lambda x, w, u, *rest: 2 * _recurrent(x, w, u),
    aten._cudnn_rnn: lambda x, weights, *rest: _recurrent(x, *weights),
    aten._cudnn_rnn_backward: lambda x, weights, *rest: 2 * _recurrent(x, *weights),
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest: _attended(q, k, v),
    # The weights once more, and for each of the two products the gradients of its two factors.
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda out, q, k, v, *rest: (
        2 * _attended(q, k, v) + 2 * math.prod(q.shape) * k.shape[-2]
    ),
}
ATTENTION = {packet for packet in (*MORE, *flop_registry) if "attention" in str(packet)}
PRODUCTS = {aten.bmm, aten.baddbmm}
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""They make room and write nothing."""


class Watch(LiveBytes):
    """Books operations, memory, shapes and receptive fields of what happens while it is active."""

    def __init__(self, model: nn.Module, known: Sequence[Tensor], unit: int = 1) -> None:
        super().__init__(known, unit)
        self.model = model
        self.phase: Phase = "forward"
        self.operations: list[Operation] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.fields: dict[str, Field] = {}
        self.maps = Fields()
        self.makers: dict[int, str] = {}
        """The layer that made a storage, while it is alive."""
        self.peaks: dict[Phase, tuple[int, str]] = {}
        """Of each phase: the most bytes, and the layer that reached them."""
        self.attention_bytes: dict[str, int] = defaultdict(int)
        self._weights: set[int] = set()
        """Storages with weights of attention."""
        self._stack: list[str] = []
        self._nodes: dict[int, str] = {}
        self._next = torch.autograd._get_sequence_nr()
        self._owners = {
            id(parameter): name or MODEL
            for name, module in model.named_modules()
            for parameter in module.parameters(recurse=False)
        }

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Modules say inside when they begin and end."""
        hooks = []

        def begin(name: str) -> Callable[..., None]:
            return lambda *given: self._stack.append(name)

        def end(name: str) -> Callable[..., None]:
            def leave(module: nn.Module, given: Any, output: Any) -> None:
                self._stack.pop()
                if self.phase == "forward":
                    self._returned(name, output)

            return leave

        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(begin(name or MODEL), prepend=True))
            hooks.append(module.register_forward_hook(end(name or MODEL), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def alive(self) -> dict[str, int]:
        """Bytes that are alive now, by the layer that made them."""
        found: dict[str, int] = defaultdict(int)
        for key, size in self.sizes.items():
            found[self.makers.get(key, OUTSIDE)] += size
        return found

    def seen(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, fresh: list[int]
    ) -> None:
        kind = getattr(func, "overloadpacket", None)
        if kind is None or func.namespace == "prim":
            return
        layer = self._where()
        for key in fresh:
            self.makers[key] = layer
        if buffer := scratch.kept(kind, args):
            self._widen(result[3], buffer)
        most = self.now + scratch.inside(kind, args, result)
        if most > self.peaks.get(self.phase, (-1, ""))[0]:
            self.peaks[self.phase] = most, layer
        if self.phase == "forward":
            self.maps.follow(func, args, result)
        if not (fresh or func._schema.is_mutable) or kind in EMPTY:
            return  # a view
        formula: Any = flop_registry.get(kind)
        counted = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
        flops = MORE[kind](*args) if kind in MORE else counted
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        dtype = next((leaf.dtype for leaf in tensors if leaf.is_floating_point()), torch.float32)
        moved = sum(_size(leaf) for leaf in tensors)
        attention = flops * self._attends(kind, layer, args, result)
        self.operations.append(
            Operation(layer, self.phase, str(kind), flops, counted, moved, dtype, attention)
        )

    def _where(self) -> str:
        node = torch._C._current_autograd_node()
        layer = self._stack[-1] if self._stack else OUTSIDE
        if node is None:
            number = torch.autograd._get_sequence_nr()
            self._nodes.update(dict.fromkeys(range(self._next, number), layer))
            self._next = number
            return layer
        if self._stack:  # computed once more for the backward pass
            return layer
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._owners.get(id(variable), OUTSIDE)
        return self._nodes.get(node._sequence_nr(), OUTSIDE)

    def _returned(self, name: str, output: Any) -> None:
        tensors = tensors_of(output)
        if tensors:
            self.shapes[name] = tuple(tensors[0].shape)
            field = self.maps.of(tensors[0])
            if field is not None:
                self.fields[name] = field

    def _attends(self, kind: Any, layer: str, args: Sequence[Any], result: Any) -> int:
        """How many times this operation's FLOPs are those of attention: twice for the product of weights and
        values, which that of queries and keys came before, once for both in one."""
        if self.phase != "forward":
            return 0
        if kind in ATTENTION:
            return 1
        marked = [leaf for leaf in args if isinstance(leaf, Tensor) and _key(leaf) in self._weights]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if kind is aten._softmax and outputs[0].dim() > 2:
            self._weights.add(_key(outputs[0]))
        elif marked and kind in PRODUCTS:
            self.attention_bytes[layer] += _size(marked[0])
            return 2
        elif marked and outputs and outputs[0].numel() == marked[0].numel():  # dropout, another dtype
            self._weights.add(_key(outputs[0]))
        return 0

    def _widen(self, buffer: Tensor, size: int) -> None:
        """A buffer that is empty in a step without numbers, but would not be."""
        key = _key(buffer)
        if buffer.numel() == 0 and key in self.sizes:
            self.sizes[key] += size
            self.now += size

    def _release(self, key: int) -> None:
        super()._release(key)
        self.makers.pop(key, None)
        self.maps.forget(key)
        self._weights.discard(key)


def tensors_of(output: Any) -> list[Tensor]:
    """Tensors of an output; those of a dataclass that is a mapping, too."""
    leaves = tree_leaves(dict(output) if hasattr(output, "items") else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return next((storage._cdata for storage in storages(tensor)), 0)


def _size(tensor: Tensor) -> int:
    """Bytes that are read or written, of which an expanded tensor has fewer than numbers."""
    nbytes = tensor.numel() * tensor.itemsize
    if tensor.layout != torch.strided:
        return nbytes
    return min(nbytes, tensor.untyped_storage().nbytes())
