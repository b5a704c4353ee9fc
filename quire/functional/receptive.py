"""Receptive fields: by formula for chains and branches of windows, by gradient support for any model.

l receptive field, f kernel, s stride, d dilation, C channels
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from quire.errors import InputError
from quire.functional.convolutions import Size, as_sizes


class Window(NamedTuple):
    """A convolution or pooling along one dimension, as far as its receptive field is concerned."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1


@dataclass(frozen=True)
class Branches:
    """Chains that start from the same input and are added or joined; an empty chain is a skip connection."""

    chains: Sequence[Sequence[Window | Branches]]


@dataclass(frozen=True)
class ReceptiveField:
    """What one output sees along one dimension: `size` pixels, the first of output 0 at `start`.

    The next output sees the same `jump` pixels further; `start` is negative where padding is seen. Near an
    edge an output may see less of the image than that, since the padding of inner layers hides it.
    """

    size: int = 1
    jump: int = 1
    start: int = 0

    def span(self, index: int) -> tuple[int, int]:
        """First pixel that the output at `index` sees, and the one after the last."""
        first = self.start + index * self.jump
        return first, first + self.size


def receptive_field(layers: Sequence[Window | Branches]) -> ReceptiveField:
    """l_k = l_{k−1} + d_k (f_k − 1) Π_{i<k} s_i with l_0 = 1, for a chain of windows.

    Chains in parallel see all that one of them sees, from the first pixel to the last.
    """
    return _grow(ReceptiveField(), layers)


def _grow(field: ReceptiveField, layers: Sequence[Window | Branches]) -> ReceptiveField:
    for layer in layers:
        if isinstance(layer, Branches):
            fields = [_grow(field, chain) for chain in layer.chains]
            if len({one.jump for one in fields}) != 1:
                raise InputError(
                    f"branches with strides of {[one.jump for one in fields]} input pixels",
                    expected="at least one chain, and the same product of strides in all",
                    fix="give the skip connection the stride of the others: Window(1, stride)",
                )
            start = min(one.start for one in fields)
            stop = max(one.start + one.size for one in fields)
            field = ReceptiveField(stop - start, fields[0].jump, start)
        else:
            kernel, stride, padding, dilation = layer
            if min(kernel, stride, dilation) < 1 or padding < 0:
                raise InputError(
                    f"a layer with {layer}",
                    expected="kernel, stride and dilation of at least 1, padding of at least 0",
                    fix="correct the layer",
                )
            field = ReceptiveField(
                field.size + dilation * (kernel - 1) * field.jump,
                field.jump * stride,
                field.start - padding * field.jump,
            )
    return field


@dataclass(frozen=True)
class FieldSupport:
    """The input pixels that the output at `position` depends on: `support` is True there."""

    position: tuple[int, ...]
    support: Tensor

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First pixel and the one after the last, along each dimension."""
        places = self.support.nonzero()
        if not len(places):
            return ((0, 0),) * self.support.dim()
        return tuple(zip(places.amin(0).tolist(), (places.amax(0) + 1).tolist(), strict=True))

    @property
    def size(self) -> tuple[int, ...]:
        """Extent along each dimension, holes included."""
        return tuple(stop - first for first, stop in self.spans)

    @property
    def touches_border(self) -> bool:
        """Whether the field may go on outside of the image, so that `size` is only a lower bound."""
        ends = zip(self.spans, self.support.shape, strict=True)
        return any(first == 0 or stop == extent for (first, stop), extent in ends)


def receptive_field_of(
    model: nn.Module,
    input_shape: Sequence[int],
    position: Sequence[int] | None = None,
    *,
    probes: int = 2,
    generator: torch.Generator | None = None,
) -> FieldSupport:
    """The receptive field of any model, measured: where ∂ Σ_c y_{c,position} / ∂x is not 0.

    `input_shape` is (C, *size) and `position` one place of the output, its centre if none is given; an
    output without spatial dimensions is taken as a whole. The measurement is made on a copy of the model in
    float64 and evaluation mode, with positive random parameters and inputs, so that no rectifier is off and
    no two paths cancel, with averages for max pooling, which have the same windows, and with activations
    that do not saturate. What depends on the draw all the same, such as the larger one of two branches, is
    joined over `probes` draws.
    """
    probe = copy.deepcopy(model).double().eval()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if len(input_shape) < 2 or min(input_shape) < 1 or probes < 1:
        raise InputError(
            f"input shape {tuple(input_shape)} and {probes} probes",
            expected="(channels, size, ...) of one sample, and at least one probe",
            fix="leave out the number of samples",
        )
    support = torch.zeros(*input_shape[1:], dtype=torch.bool)
    where: tuple[int, ...] = ()
    for _ in range(probes):
        _make_positive(probe, generator)
        x = _positive(torch.empty(1, *input_shape, dtype=torch.float64), generator).to(device)
        x.requires_grad_()
        # cuDNN may choose an algorithm whose rounding leaves small values instead of zeros.
        with torch.backends.cudnn.flags(enabled=False), torch.enable_grad(), _OpenPaths():
            out = probe(x)
            if not isinstance(out, Tensor) or out.dim() < 2:
                raise InputError(
                    f"the model returns {type(out).__name__} {list(getattr(out, 'shape', []))}",
                    expected="one tensor (samples, channels, ...)",
                    fix="wrap the model in one that returns the output in question",
                )
            where = _place(out, position)
            seen = out.movedim(1, -1)[(0, *where)].sum()
            gradient = torch.autograd.grad(seen, x, allow_unused=True)[0] if seen.requires_grad else None
        if gradient is not None:
            support |= (gradient[0] != 0).any(0).cpu()
    return FieldSupport(where, support)


def _place(out: Tensor, position: Sequence[int] | None) -> tuple[int, ...]:
    sizes = tuple(out.shape[2:])
    where = tuple(size // 2 for size in sizes) if position is None else tuple(position)
    if len(where) != len(sizes) or not all(0 <= i < size for i, size in zip(where, sizes, strict=True)):
        raise InputError(
            f"position {where} of an output of size {sizes}",
            expected="one index inside the output for each of its spatial dimensions",
            fix="leave the position out for the centre",
        )
    return where


def _positive(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    return tensor.uniform_(0.5, 1.5, generator=generator)


def _make_positive(model: nn.Module, generator: torch.Generator | None) -> None:
    """Positive parameters that keep the size of what passes through, and batch norms that let it pass."""
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
            drawn = _positive(torch.empty(parameter.shape, dtype=torch.float64), generator)
            parameter.copy_(drawn / max(fan_in, 1))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.reset_running_stats()


class _OpenPaths(TorchFunctionMode):
    """Functions that may pass no gradient, replaced by ones that always do and look at the same pixels.

    A maximum passes its gradient to one pixel of a window, the average to all of them; an activation that
    saturates has a gradient of 0 far from the origin, x / (1 + |x|) has not.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SATURATING:
            return functional.softsign(args[0] if args else kwargs["input"])
        result = func(*args, **kwargs)
        average = _AVERAGES.get(func)
        if average is None:
            return result
        if isinstance(result, tuple):  # with the places of the maxima
            return average(result[0], *args, **kwargs), *result[1:]
        return average(result, *args, **kwargs)


def _window_average(
    pooled: Tensor,
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    count: int,
) -> Tensor:
    """Averages over the windows that gave `pooled`, along its last `count` dimensions."""
    kernel, dilations = as_sizes(kernel_size, count, "kernel"), as_sizes(dilation, count, "dilation")
    strides = as_sizes(stride, count, "stride") if stride else kernel
    paddings = as_sizes(padding, count, "padding", 0)
    images = input.reshape(-1, 1, *input.shape[-count:])
    sides: list[int] = []
    for w, k, s, p, d, t in zip(
        images.shape[2:], kernel, strides, paddings, dilations, pooled.shape[-count:], strict=True
    ):
        # With ceil_mode the last window may stand over the end; without it some pixels may be left out.
        sides = [p, (t - 1) * s + d * (k - 1) + 1 - w - p, *sides]
    weight = input.new_full((1, 1, *kernel), 1 / math.prod(kernel))
    correlate = (functional.conv1d, functional.conv2d, functional.conv3d)[count - 1]
    return correlate(functional.pad(images, sides), weight, None, strides, 0, dilations).reshape(pooled.shape)


def _adaptive_average(
    pooled: Tensor, input: Tensor, output_size: Any, return_indices: bool = False, *, count: int
) -> Tensor:
    averages: tuple[Callable[..., Tensor], ...] = (
        functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d
    )  # fmt: skip
    return averages[count - 1](input, output_size)


def _mean(maximum: Tensor, input: Tensor, *args: Any, **options: Any) -> Tensor:
    return input.mean(*args, **options)


def _averages() -> dict[Any, Callable[..., Tensor]]:
    table: dict[Any, Callable[..., Tensor]] = {torch.amax: _mean, Tensor.amax: _mean}
    for count in (1, 2, 3):
        window = functools.partial(_window_average, count=count)
        adaptive = functools.partial(_adaptive_average, count=count)
        for place, name, average in (
            (torch, "max_pool{}d", window),
            (functional, "max_pool{}d", window),
            (functional, "max_pool{}d_with_indices", window),
            (functional, "adaptive_max_pool{}d", adaptive),
            (functional, "adaptive_max_pool{}d_with_indices", adaptive),
        ):
            table[getattr(place, name.format(count))] = average
    return table


_AVERAGES = _averages()
_SATURATING = {
    torch.sigmoid, Tensor.sigmoid, functional.sigmoid, torch.tanh, Tensor.tanh, functional.tanh,
    functional.hardsigmoid, functional.hardtanh, functional.relu6,
}  # fmt: skip
