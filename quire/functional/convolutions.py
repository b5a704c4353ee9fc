"""Convolution, pooling and their inverses in one, two and three dimensions.

The number of dimensions is that of the tensors: (N, C, L), (N, C, H, W) or (N, C, D, H, W). An option such as
`stride` is one number for all spatial dimensions or one for each. PyTorch's kernels do the work.

N samples, C channels in, F filters, K kernel, S stride, P padding, d dilation, W size of the input
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError, unknown_name

Size = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[tuple[int, int]] | Literal["valid", "same"]

_CORRELATE: tuple[Callable[..., Tensor], ...] = (functional.conv1d, functional.conv2d, functional.conv3d)
_MAX_POOL: tuple[Callable[..., Any], ...] = (
    functional.max_pool1d, functional.max_pool2d, functional.max_pool3d
)  # fmt: skip
_AVERAGE_POOL: tuple[Callable[..., Tensor], ...] = (
    functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d
)  # fmt: skip


# Convolution ----------------------------------------------------------------------------------


def cross_correlation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """y_{n,f,t} = b_f + Σ_{c,k} w_{f,c,k} x_{n,c,S·t+d·k−P}: what deep learning calls a convolution.

    `weight` is (F, C/groups, *K); filters and channels are split into `groups` that do not see each other.
    `padding` puts zeros around the input: "valid" none; "same" so many that ⌈W/S⌉ outputs come back, an odd
    one at the end; a number of them on both sides, for all dimensions or for each; or a pair
    (before, after) for each dimension.
    """
    count = _spatial(x, "cross_correlation")
    _check_weight(x, weight, groups)
    stride, dilation = as_sizes(stride, count, "stride"), as_sizes(dilation, count, "dilation")
    pairs = _padding_pairs(padding, x.shape[2:], weight.shape[2:], stride, dilation)
    if any(before != after for before, after in pairs):
        x = functional.pad(x, [side for pair in reversed(pairs) for side in pair])
        pairs = [(0, 0)] * count
    _check_fits(x, weight.shape[2:], dilation, pairs)
    both_sides = [before for before, _ in pairs]
    return _CORRELATE[count - 1](x, weight, bias, stride, both_sides, dilation, groups)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """y_{n,f,t} = b_f + Σ_{c,k} w_{f,c,k} x_{n,c,S·t+d·(K−1−k)−P}: cross-correlation with the flipped filter.

    This is the convolution of mathematics: commutative and associative. Options as in `cross_correlation`.
    """
    flipped = weight.flip(tuple(range(2, weight.dim())))
    return cross_correlation(
        x, flipped, bias, stride=stride, padding=padding, dilation=dilation, groups=groups
    )


def pointwise(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: Callable[[Tensor], Tensor] = torch.relu,
) -> Tensor:
    """An MLP over the channels of each pixel by itself, as a chain of 1×1 convolutions.

    h^k_{n,:,p} = σ(W^k h^{k−1}_{n,:,p} + b^k) with W^k (C_k, C_{k−1}); the last layer has no activation.
    """
    count = _spatial(x, "pointwise")
    if not weights or len(weights) != len(biases):
        raise InputError(
            f"pointwise with {len(weights)} weights and {len(biases)} biases",
            expected="at least one layer, and a bias for each weight",
            fix="give None for a layer without bias",
        )
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if index:
            x = activation(x)
        x = cross_correlation(x, weight[(..., *[None] * count)], bias)
    return x


# Pooling --------------------------------------------------------------------------------------


@overload
def max_pool(
    x: Tensor,
    kernel: Size,
    stride: Size | None = None,
    *,
    padding: Size = 0,
    dilation: Size = 1,
    return_indices: Literal[False] = False,
) -> Tensor: ...
@overload
def max_pool(
    x: Tensor,
    kernel: Size,
    stride: Size | None = None,
    *,
    padding: Size = 0,
    dilation: Size = 1,
    return_indices: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def max_pool(
    x: Tensor,
    kernel: Size,
    stride: Size | None = None,
    *,
    padding: Size = 0,
    dilation: Size = 1,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """y_{n,c,t} = max_k x_{n,c,S·t+d·k−P}, where padding counts as −∞. The stride is the kernel's size
    unless said otherwise.

    With `return_indices` also the place of each maximum in the flattened image, for `unpool`.
    """
    count = _spatial(x, "max_pool")
    kernel, stride, padding = _pooling_sizes(kernel, stride, padding, count)
    dilation = as_sizes(dilation, count, "dilation")
    _check_fits(x, kernel, dilation, [(side, side) for side in padding])
    pooled: Tensor | tuple[Tensor, Tensor] = _MAX_POOL[count - 1](
        x, kernel, stride, padding, dilation, return_indices=return_indices
    )
    return pooled


def average_pool(
    x: Tensor, kernel: Size, stride: Size | None = None, *, padding: Size = 0, count_padding: bool = True
) -> Tensor:
    """y_{n,c,t} = 1/|K| Σ_k x_{n,c,S·t+k−P}: the mean of each window.

    Without `count_padding` a window over the edge is divided by the number of its pixels inside.
    """
    count = _spatial(x, "average_pool")
    kernel, stride, padding = _pooling_sizes(kernel, stride, padding, count)
    _check_fits(x, kernel, [1] * count, [(side, side) for side in padding])
    return _AVERAGE_POOL[count - 1](x, kernel, stride, padding, count_include_pad=count_padding)


def unpool(
    x: Tensor,
    indices: Tensor,
    kernel: Size,
    stride: Size | None = None,
    *,
    padding: Size = 0,
    size: Sequence[int] | None = None,
) -> Tensor:
    """y_{n,c,i_t} = x_{n,c,t} at the places i_t that `max_pool` returned, 0 everywhere else.

    The result has (W−1)·S − 2P + K pixels along each dimension; `size` sets another one, which is needed
    where pooling left some pixels out. On a GPU, places outside of the result end the program.
    """
    count = _spatial(x, "unpool")
    kernel, stride, padding = _pooling_sizes(kernel, stride, padding, count)
    if indices.shape != x.shape:
        raise InputError(
            f"indices of shape {tuple(indices.shape)} for values of shape {tuple(x.shape)}",
            expected="one place for each value",
            fix="give the indices that max_pool returned for these values",
        )
    if size is None:
        size = [
            (w - 1) * s - 2 * p + k for w, s, p, k in zip(x.shape[2:], stride, padding, kernel, strict=True)
        ]
    else:
        size = as_sizes(size, count, "size")
    cells = torch.Size(size).numel()
    # Looking at the values would make a GPU wait, and cut a compiled graph in two.
    looked_at = indices.device.type == "cpu" and indices.numel() and not torch.compiler.is_compiling()
    if looked_at and not 0 <= indices.min() <= indices.max() < cells:
        raise InputError(
            f"unpool to {'×'.join(map(str, size))} with a value for place {int(indices.max())}",
            expected=f"places from 0 to {cells - 1}",
            fix="give the size of the image before pooling as `size`",
        )
    empty = x.new_zeros(x.shape[0], x.shape[1], cells)
    return empty.scatter(2, indices.flatten(2), x.flatten(2)).unflatten(2, tuple(size))


def upsample(x: Tensor, scale: Size, mode: Literal["nearest", "linear"] = "nearest") -> Tensor:
    """Each pixel becomes `scale` pixels along each dimension.

    "nearest" repeats it: y_i = x_⌊i/s⌋. "linear" (bilinear in 2-D, trilinear in 3-D) interpolates between
    pixel centres, y_i = x((i + ½)/s − ½), and repeats the outermost pixels.
    """
    count = _spatial(x, "upsample")
    scale = as_sizes(scale, count, "scale")
    if mode not in ("nearest", "linear"):
        raise unknown_name("way of upsampling", mode, ("nearest", "linear"))
    size = [w * s for w, s in zip(x.shape[2:], scale, strict=True)]
    if mode == "nearest":
        return functional.interpolate(x, size, mode="nearest")
    return functional.interpolate(x, size, mode=("linear", "bilinear", "trilinear")[count - 1])


# Checks ---------------------------------------------------------------------------------------


def as_sizes(value: Size, count: int, name: str, least: int = 1) -> list[int]:
    """One whole number for each of `count` dimensions, none below `least`."""
    sizes = list(value) if isinstance(value, Sequence) else [value] * count
    if len(sizes) != count or not all(isinstance(size, int) and size >= least for size in sizes):
        raise InputError(
            f"{name} {value!r} for {count} spatial {'dimension' if count == 1 else 'dimensions'}",
            expected=f"a whole number of at least {least}, or {count} of them",
            fix="give one number, or one for each dimension",
        )
    return sizes


def _spatial(x: Tensor, name: str) -> int:
    if not 3 <= x.dim() <= 5:
        raise InputError(
            f"{name} of shape {tuple(x.shape)}",
            expected="(samples, channels, ...) with one to three spatial dimensions",
            fix="add the missing dimensions with unsqueeze",
        )
    return x.dim() - 2


def _check_weight(x: Tensor, weight: Tensor, groups: int) -> None:
    if weight.dim() != x.dim():
        raise InputError(
            f"a weight of shape {tuple(weight.shape)} for an input of shape {tuple(x.shape)}",
            expected=f"(filters, channels / groups, ...) with {x.dim()} dimensions",
            fix="give the kernel as many spatial dimensions as the input",
        )
    filters, channels = weight.shape[:2]
    if groups < 1 or channels * groups != x.shape[1] or filters % groups:
        raise InputError(
            f"{filters} filters of {channels} channels in {groups} groups on {x.shape[1]} channels",
            expected="filters divisible by groups, and channels × groups equal to the input's",
            fix="make the weight (filters, channels of the input / groups, ...)",
        )


def _padding_pairs(
    padding: Padding, size: Sequence[int], kernel: Sequence[int], stride: list[int], dilation: list[int]
) -> list[tuple[int, int]]:
    """(before, after) for each dimension."""
    count = len(size)
    if isinstance(padding, str):
        if padding == "valid":
            return [(0, 0)] * count
        if padding != "same":
            raise unknown_name("padding", padding, ("valid", "same"))
        needed = [
            max((-(-w // s) - 1) * s + d * (k - 1) + 1 - w, 0)
            for w, k, s, d in zip(size, kernel, stride, dilation, strict=True)
        ]
        return [(total // 2, total - total // 2) for total in needed]
    if not isinstance(padding, int) and any(not isinstance(sides, int) for sides in padding):
        if len(padding) != count or any(isinstance(sides, int) or len(sides) != 2 for sides in padding):
            raise InputError(
                f"padding {padding!r} for {count} spatial dimensions",
                expected="a pair (before, after) for each dimension",
                fix="give pairs for all dimensions, or plain numbers for all",
            )
        first, second = (
            as_sizes([sides[side] for sides in padding], count, "padding", 0)  # type: ignore[index]
            for side in (0, 1)
        )
        return list(zip(first, second, strict=True))
    return [(side, side) for side in as_sizes(padding, count, "padding", 0)]  # type: ignore[arg-type]


def _pooling_sizes(
    kernel: Size, stride: Size | None, padding: Size, count: int
) -> tuple[list[int], list[int], list[int]]:
    kernels = as_sizes(kernel, count, "kernel")
    paddings = as_sizes(padding, count, "padding", 0)
    if any(2 * p > k for p, k in zip(paddings, kernels, strict=True)):
        raise InputError(
            f"padding {padding} around a pooling kernel of {kernel}",
            expected="at most half the kernel, so that no window lies outside",
            fix="pad less, or pad the input itself",
        )
    return kernels, kernels if stride is None else as_sizes(stride, count, "stride"), paddings


def _check_fits(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> None:
    for size, k, d, (before, after) in zip(x.shape[2:], kernel, dilation, pairs, strict=True):
        if d * (k - 1) + 1 > size + before + after:
            raise InputError(
                f"a kernel that spans {d * (k - 1) + 1} pixels on {size + before + after} (padding included)",
                expected="a kernel that fits into the padded input",
                fix="pad more, or take a smaller kernel or dilation",
            )
