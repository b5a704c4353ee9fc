"""The receptive field of each layer, followed through the operations of a forward pass.

Convolutions, pooling, padding and slices move it, what works on places apart keeps it, branches join theirs.
It is lost, and not guessed, where places are mixed: matrix products over places, resampling. What batch and
layer norm see of other places through their statistics is left out, as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from quire.functional.receptive import ReceptiveField, Window, receptive_field

aten = torch.ops.aten
Field = tuple[ReceptiveField, ...]
"""One for each dimension after samples and channels."""

POOLS = {
    aten.max_pool2d_with_indices: 3, aten.max_pool3d_with_indices: 3, aten.max_pool2d: 3,
    aten.avg_pool2d: None, aten.avg_pool3d: None,
}  # fmt: skip
"""Where among the arguments the dilation is."""
ADAPTIVE = {aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d, aten.adaptive_max_pool2d, aten.mean}
APART = {
    aten.native_batch_norm, aten._native_batch_norm_legit, aten.cudnn_batch_norm, aten.native_group_norm,
    aten.native_layer_norm, aten._batch_norm_with_update, aten.cat,
    aten.native_dropout, aten.clone, aten._to_copy, aten.detach, aten.alias, aten.view, aten._unsafe_view,
    aten.contiguous, aten.relu, aten.prelu, aten._prelu_kernel, aten.miopen_batch_norm,
}  # fmt: skip
"""What works on each place apart and is not tagged so."""


class Fields:
    """Receptive fields by storage and by size: views of another shape are another map."""

    def __init__(self) -> None:
        self.known: dict[int, dict[tuple[int, ...], Field]] = {}

    def start(self, tensor: Tensor) -> None:
        """An input, of which each place sees itself."""
        if tensor.dim() > 2:
            self._keep(tensor, (ReceptiveField(),) * (tensor.dim() - 2))

    def of(self, tensor: Any) -> Field | None:
        if not isinstance(tensor, Tensor) or tensor.dim() < 3 or tensor.layout != torch.strided:
            return None
        maps = self.known.get(tensor.untyped_storage()._cdata, {})
        return maps.get(tuple(tensor.shape[2:]))

    def follow(self, func: Any, args: Sequence[Any], result: Any) -> None:
        out = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(out, Tensor) or out.layout != torch.strided:
            return
        field = self._after(func, args, out)
        if field is not None:
            self._keep(out, field)

    def forget(self, storage: int) -> None:
        self.known.pop(storage, None)

    def _keep(self, tensor: Tensor, field: Field) -> None:
        self.known.setdefault(tensor.untyped_storage()._cdata, {})[tuple(tensor.shape[2:])] = field

    def _after(self, func: Any, args: Sequence[Any], out: Tensor) -> Field | None:
        kind = func.overloadpacket
        field = self.of(args[0]) if args else None
        if kind is aten.convolution and field is not None:
            _, weight, _, stride, padding, dilation, transposed = args[:7]
            if transposed:
                return None
            return slid(field, weight.shape[2:], stride, padding, dilation)
        if kind in POOLS and field is not None:
            return self._pooled(kind, field, args)
        if kind in ADAPTIVE and field is not None and out.dim() == args[0].dim():
            sizes = list(zip(args[0].shape[2:], out.shape[2:], strict=True))
            if any(before % after for before, after in sizes):
                return None
            window = [before // after for before, after in sizes]
            return slid(field, window, window, [0] * len(window), [1] * len(window))
        if kind is aten.constant_pad_nd and field is not None:
            pads = list(args[1]) + [0] * (2 * len(field))  # the last dimension comes first
            moved = [ReceptiveField(1, 1, -pads[2 * place]) for place in reversed(range(len(field)))]
            return tuple(composed(one, inner) for one, inner in zip(field, moved, strict=True))
        if kind is aten.slice and field is not None:
            return self._sliced(field, args)
        if kind in APART or torch.Tag.pointwise in func.tags:
            return self._joined(args, out)
        return None

    def _pooled(self, kind: Any, field: Field, args: Sequence[Any]) -> Field:
        count = len(field)
        kernel = widened(args[1], count)
        stride = widened(args[2], count) if len(args) > 2 and len(args[2]) else kernel
        padding = widened(args[3], count) if len(args) > 3 else [0] * count
        dilation = widened(args[4], count) if POOLS[kind] and len(args) > 4 else [1] * count
        return slid(field, kernel, stride, padding, dilation)

    def _sliced(self, field: Field, args: Sequence[Any]) -> Field:
        given = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
        dim, start, _, step = given
        place = dim - 2 if dim >= 0 else dim + len(field)
        if not 0 <= place < len(field):
            return field
        first = (start or 0) + (args[0].shape[dim] if (start or 0) < 0 else 0)
        inner = ReceptiveField(1, step or 1, first)
        return (*field[:place], composed(field[place], inner), *field[place + 1 :])

    def _joined(self, args: Sequence[Any], out: Tensor) -> Field | None:
        size = tuple(out.shape[2:])
        fields = [
            field
            for leaf in tree_leaves(list(args))
            if (field := self.of(leaf)) is not None and tuple(leaf.shape[2:]) == size
        ]
        if not fields or any(len(field) != len(size) for field in fields):
            return None
        joined: list[ReceptiveField] = []
        for parts in zip(*fields, strict=True):
            if len({part.jump for part in parts}) > 1:
                return None
            start = min(part.start for part in parts)
            stop = max(part.start + part.size for part in parts)
            joined.append(ReceptiveField(stop - start, parts[0].jump, start))
        return tuple(joined)


def widened(value: Any, count: int) -> list[int]:
    """PyTorch writes one number for the same along all dimensions."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def composed(outer: ReceptiveField, inner: ReceptiveField) -> ReceptiveField:
    """What a place sees of the input, which sees `inner` of a map whose places see `outer` of it."""
    return ReceptiveField(
        outer.size + (inner.size - 1) * outer.jump,
        outer.jump * inner.jump,
        outer.start + inner.start * outer.jump,
    )


def slid(
    field: Field,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Field:
    count = len(field)
    sizes = (widened(value, count) for value in (kernel, stride, padding, dilation))
    return tuple(
        composed(one, receptive_field([Window(*map(int, window))]))
        for one, window in zip(field, zip(*sizes, strict=True), strict=True)
    )
