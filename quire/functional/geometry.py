"""Calculators of convolutional nets: sizes and counts, separable filters, equivariance.

W size of the input, K kernel, S stride, P padding, d dilation, F filters, C channels
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name
from quire.functional.convolutions import Size, as_sizes
from quire.functional.modes import evaluating

# Sizes and counts -----------------------------------------------------------------------------


@overload
def output_size(size: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> int: ...
@overload
def output_size(
    size: Sequence[int], kernel: Size, stride: Size = 1, padding: Size = 0, dilation: Size = 1
) -> tuple[int, ...]: ...
def output_size(
    size: Size, kernel: Size, stride: Size = 1, padding: Size = 0, dilation: Size = 1
) -> int | tuple[int, ...]:
    """⌊(W − d(K−1) − 1 + 2P) / S⌋ + 1: pixels after a convolution or pooling, for one or more dimensions."""
    count = 1 if isinstance(size, int) else len(size)
    options = [("size", size, 1), ("kernel", kernel, 1), ("stride", stride, 1), ("padding", padding, 0)]
    columns = [as_sizes(value, count, name, least) for name, value, least in options]
    found = []
    for w, k, s, p, d in zip(*columns, as_sizes(dilation, count, "dilation"), strict=True):
        room = w - d * (k - 1) - 1 + 2 * p
        if room < 0:
            raise InputError(
                f"a kernel that spans {d * (k - 1) + 1} pixels on {w + 2 * p} (padding included)",
                expected="a kernel that fits into the padded input",
                fix="pad more, or take a smaller kernel or dilation",
            )
        found.append(room // s + 1)
    return found[0] if isinstance(size, int) else tuple(found)


def convolution_parameter_count(
    filters: int, kernel: Sequence[int], channels: int, groups: int = 1, bias: bool = True
) -> int:
    """F·(h·w·C/groups + 1): the weights of a convolution, and one bias for each filter."""
    if min(filters, channels, groups, *kernel) < 1 or filters % groups or channels % groups:
        raise InputError(
            f"{filters} filters of {tuple(kernel)} over {channels} channels in {groups} groups",
            expected="positive numbers, with filters and channels divisible by groups",
            fix="choose groups that divide both",
        )
    return filters * (math.prod(kernel) * (channels // groups) + bool(bias))


# Separable filters ----------------------------------------------------------------------------


def separate(filter: Tensor, tolerance: float | None = None) -> tuple[Tensor, Tensor] | None:
    """The column u and the row v with filter = u vᵀ, or None: they exist if and only if the rank is 1.

    One 2-D filter (h, w) then costs h + w products for each pixel instead of h·w. A vanishing determinant
    is not enough, since it only says that the rank is not full. The rank counts as 1 when the second
    singular value is at most `tolerance` times the first, by default the rounding of the filter's type.
    The filter of zeros, of rank 0, splits into zeros.
    """
    if filter.dim() != 2 or not filter.numel() or not filter.isfinite().all():
        raise InputError(
            f"a filter of shape {tuple(filter.shape)}",
            expected="a matrix (height, width) of finite numbers",
            fix="split the filter of one channel at a time: weight[f, c]",
        )
    exact = filter.dtype if filter.dtype in (torch.float32, torch.float64) else torch.float32
    kept = filter.dtype if filter.is_floating_point() else exact
    if tolerance is None:
        tolerance = max(filter.shape) * torch.finfo(kept).eps
    matrix = filter.to(exact)
    scale = matrix.abs().max()
    # Numbers near the ends of the range would overflow or vanish in the squares of the decomposition.
    left, values, right = torch.linalg.svd(matrix / scale if scale > 0 else matrix, full_matrices=False)
    if len(values) > 1 and values[1] > tolerance * values[0]:
        return None
    column, row = left[:, 0], right[0]
    sign = torch.where(column[column.abs().argmax()] < 0, -1.0, 1.0).to(exact)
    # The size is shared equally; both signs are turned so that the column's largest value is positive.
    share = values[0].sqrt() * scale.sqrt() * sign
    return (column * share).to(kept), (row * share).to(kept)


# Equivariance ---------------------------------------------------------------------------------

Transform = Literal["shift", "flip", "rotation"]


def equivariance_error(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    transform: Transform,
    *,
    amount: int = 1,
    stride: int = 1,
    margin: int = 0,
) -> float:
    """max |f(T x) − T f(x)| / max |T f(x)|: 0 when the model commutes with the transform T.

    "shift" moves the last dimension around by `amount` pixels, "flip" mirrors it, "rotation" turns the last
    two by `amount` quarter turns. `stride` is the model's own: its output moves by amount/stride pixels, and
    where that is not a whole number the better one of both neighbours counts. `margin` leaves out that many
    output pixels on each side, which edges and padding have changed; a shift needs at least as many as it
    moves. An output without spatial dimensions is asked for invariance: f(T x) = f(x).
    """
    _check_transform(x, transform, stride, margin)
    with evaluating(model), torch.no_grad():
        plain, changed = model(x), model(_transformed(x, transform, amount))
    if plain.dim() < 3:
        return _relative_gap(changed, plain)
    moves = [amount // stride, -(-amount // stride)] if transform == "shift" else [amount]
    errors = []
    for move in moves:
        expected = _transformed(plain, transform, move)
        if changed.shape != expected.shape:
            raise InputError(
                f"an output of {tuple(changed.shape)} where the transformed one has {tuple(expected.shape)}",
                expected="outputs whose size follows the transform",
                fix="check a rotation with square images",
            )
        errors.append(_relative_gap(_inside(changed, margin), _inside(expected, margin)))
    return min(errors)


def _transformed(x: Tensor, transform: Transform, amount: int) -> Tensor:
    if transform == "shift":
        return x.roll(amount, -1)
    if transform == "flip":
        return x.flip(-1)
    return torch.rot90(x, amount, (-2, -1))


def _relative_gap(actual: Tensor, expected: Tensor) -> float:
    size = expected.abs().max().item()
    return (actual - expected).abs().max().item() / (size or 1.0)


def _inside(x: Tensor, margin: int) -> Tensor:
    if min(x.shape[2:]) <= 2 * margin:
        raise InputError(
            f"a margin of {margin} on an output of {tuple(x.shape[2:])}",
            expected="a margin that leaves some pixels",
            fix="take a larger input or a smaller margin",
        )
    for dim in range(2, x.dim()):
        x = x.narrow(dim, margin, x.shape[dim] - 2 * margin)
    return x


def _check_transform(x: Tensor, transform: str, stride: int, margin: int) -> None:
    if transform not in ("shift", "flip", "rotation"):
        raise unknown_name("transform", transform, ("shift", "flip", "rotation"))
    needed = 4 if transform == "rotation" else 3
    if x.dim() < needed:
        raise InputError(
            f"a {transform} of shape {tuple(x.shape)}",
            expected=f"(samples, channels, ...) with at least {needed} dimensions",
            fix="add the missing dimensions with unsqueeze",
        )
    if stride < 1 or margin < 0:
        raise InputError(
            f"stride {stride} and margin {margin}",
            expected="a stride of at least 1 and a margin of at least 0",
            fix="give the product of the model's strides",
        )
