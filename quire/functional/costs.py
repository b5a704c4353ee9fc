"""What training costs: operations, bytes and seconds, by closed forms.

N samples, T places (tokens), S places that are attended to, E width, H heads, D parameters in matrices,
L layers
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from quire.errors import InputError


def dense_flops(rows: int, in_features: int, out_features: int) -> int:
    """2·rows·in·out: a product and a sum for each weight and row."""
    return 2 * rows * in_features * out_features


def convolution_flops(
    samples: int,
    in_channels: int,
    out_channels: int,
    kernel: Sequence[int],
    out_size: Sequence[int],
    groups: int = 1,
) -> int:
    """2·N·C_out·Π out·(C_in/groups)·Π kernel: a product and a sum for each weight and place of the output."""
    places = samples * out_channels * math.prod(out_size)
    return 2 * places * (in_channels // groups) * math.prod(kernel)


def backward_flops(forward: int, first: int = 0) -> int:
    """2·forward − first: a product like the forward one for the gradient of the weights, another for that of
    the inputs, which the first layer, whose products are `first`, does not need."""
    return 2 * forward - first


def attention_flops(queries: int, keys: int, width: int, batch: int = 1) -> int:
    """4·N·T·S·E: queries with keys, and weights with values, over all heads of E in all. Quadratic in T."""
    return 4 * batch * queries * keys * width


def attention_bytes(queries: int, keys: int, heads: int, batch: int = 1, itemsize: int = 4) -> int:
    """N·H·T·S numbers: the weights, as far as they are kept at all; fused kernels keep N·H·T instead."""
    return batch * heads * queries * keys * itemsize


def transformer_flops(tokens: int, parameters: int) -> int:
    """6·tokens·D of one step: 2 forward and 4 backward for each token and weight; attention comes on top."""
    return 6 * tokens * parameters


def training_bytes(parameters: int, states: int, itemsize: int = 4) -> int:
    """(2 + states)·D numbers: weights, gradients and what the optimiser keeps, before any activation."""
    return (2 + states) * parameters * itemsize


def roofline_seconds(
    operations: Iterable[tuple[float, float]], flops_rate: float, bytes_rate: float, launch: float = 0.0
) -> float:
    """Σ max(flops / rate, bytes / rate) + launch: each (flops, bytes) is bound by arithmetic or by memory."""
    if flops_rate <= 0 or bytes_rate <= 0 or launch < 0:
        raise InputError(
            f"rates of {flops_rate:g} and {bytes_rate:g} a second, {launch:g} s a launch",
            expected="positive rates, and a launch that takes no less than nothing",
            fix="measure the machine: quire.doctor.measure_machine()",
        )
    return sum(max(flops / flops_rate, moved / bytes_rate) + launch for flops, moved in operations)
