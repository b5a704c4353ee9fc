"""What a loss is: a sum over samples with a weight beside it.

    mean = sum / weight

The weight is counted from the targets alone, before anything is computed, so a mean over parts of a batch
is exact: add the sums, add the weights, divide once. A loss registers with the function that counts its
weight, and its mean is made from that one definition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor

from quire.errors import InputError, unknown_name
from quire.registry import Registry

P = ParamSpec("P")

Reduction = Literal["none", "sum", "mean"]
Weight = float | Tensor
Example = tuple[tuple[Tensor, ...], dict[str, Any]]


@dataclass(frozen=True)
class Loss:
    """A loss and the denominator of its mean.

    ``function(*inputs, reduction=…, **options)``: the first input is the prediction that is learned, all
    inputs share the batch dimension, options do not depend on the batch.
    ``weigh(*inputs, **options)``: the denominator of the mean. It never reads the first input, which may be
    None where the prediction is not there yet.
    ``couples_samples``: a sample's loss depends on the others of its batch, so sums of parts do not add up.
    ``example(generator, n, dtype)``: random inputs of n samples and options, with uneven weights and ignored
    targets where the loss has them.
    """

    name: str
    function: Callable[..., Tensor]
    weigh: Callable[..., Weight]
    couples_samples: bool
    example: Callable[[torch.Generator, int, torch.dtype], Example]


LOSSES: Registry[Loss] = Registry("loss")


def mean_of(total: Tensor, weight: Weight) -> Tensor:
    """total / weight, and 0 with a zero gradient where nothing counts (weight 0) instead of PyTorch's NaN."""
    if isinstance(weight, Tensor):
        # A sum over nothing is 0 already; dividing it by 1 keeps both value and gradient at 0.
        return (total / (weight + (weight == 0))).to(total.dtype)
    return total / weight if weight else total


def loss(
    name: str,
    *,
    weigh: Callable[..., Weight],
    example: Callable[[torch.Generator, int, torch.dtype], Example],
    couples_samples: bool = False,
) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Register a function that knows the reductions "none" and "sum"; "mean", the default, is added here."""

    def add(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
        @functools.wraps(function)
        def reduced(*inputs: Any, reduction: str = "mean", **options: Any) -> Tensor:
            if reduction == "mean":
                weight, kind = weigh(*inputs, **options), inputs[0].dtype
                if kind == torch.float16:  # a sum of 65505 ones would be infinite already
                    inputs = tuple(_raised(value) for value in inputs)
                    options = {name: _raised(value) for name, value in options.items()}
                total = function(*inputs, reduction="sum", **options)  # type: ignore[arg-type]
                mean = mean_of(total, weight)
                return mean.to(kind) if kind == torch.float16 else mean
            if reduction not in ("none", "sum"):
                raise unknown_name("reduction", reduction, ("none", "sum", "mean"))
            return function(*inputs, reduction=reduction, **options)  # type: ignore[arg-type]

        LOSSES.register(name)(Loss(name, reduced, weigh, couples_samples, example))
        return reduced  # type: ignore[return-value]

    return add


def _raised(value: Any) -> Any:
    """Half precision as float32, anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value


def reduce(values: Tensor, reduction: str) -> Tensor:
    """The values themselves, or their sum."""
    return values.sum() if reduction == "sum" else values


def require_same_shape(name: str, first: Tensor, second: Tensor) -> None:
    """Refuse to broadcast: a column against a row would silently compare every pair of samples."""
    if first.shape != second.shape:
        raise InputError(
            f"{name} of shapes {tuple(first.shape)} and {tuple(second.shape)}",
            expected="two tensors of the same shape",
            fix="reshape one to the other's shape, for example target.view_as(prediction)",
        )


def require_positive(name: str, option: str, value: float) -> None:
    if not value > 0:
        raise InputError(
            f"{name} with {option}={value}", expected=f"{option} > 0", fix=f"give a positive {option}"
        )


def count_elements(_: object, target: Tensor, *__: object, **___: object) -> float:
    """The number of target entries: the weight of an element-wise loss."""
    return float(target.numel())


def count_samples(_: object, target: Tensor, *__: object, **___: object) -> float:
    """The number of rows of the target, 1 where it is a single number."""
    return float(target.shape[0]) if target.dim() else 1.0


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Standard normal numbers for examples, on the generator's device."""
    return torch.randn(*shape, generator=generator, dtype=dtype, device=generator.device)


def uniform(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers in [0, 1) for examples, on the generator's device."""
    return torch.rand(*shape, generator=generator, dtype=dtype, device=generator.device)
