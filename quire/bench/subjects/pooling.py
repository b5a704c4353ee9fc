"""Attention by kernels and by addition, beside the same formulas in PyTorch with all scores in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quire.bench.case import (
    GIGABYTE,
    GROWTHS,
    SUBJECTS,
    Bar,
    Case,
    Contestant,
    Growth,
    Place,
    Work,
    largest_difference,
)  # fmt: skip
from quire.functional import additive_attention, gaussian_pooling, nadaraya_watson
from quire.functional.attention import attention

Function = Callable[..., Tensor]


def additive(query: Tensor, key: Tensor, value: Tensor, vector: Tensor) -> Tensor:
    return ((query[:, :, None] + key[:, None]).tanh() @ vector).softmax(-1) @ value


def gaussian(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    score = query @ key.mT - 0.5 * key.square().sum(-1) - 0.5 * query.square().sum(-1, keepdim=True)
    return score.softmax(-1) @ value


@SUBJECTS.register("additive-attention")
def additive_subject(place: Place) -> Iterator[Case]:
    """Σ softmax(w·tanh(q + k)) v, forward and backward, beside the formula with all N·M·h numbers."""
    batch, size, hidden = (8, 1024, 128) if place.on_gpu else (2, 128, 32)
    size = place.size(size, 16)
    inputs = [torch.randn(batch, size, hidden, device=place.device) for _ in range(3)]
    inputs.append(torch.randn(hidden, device=place.device) / hidden**0.5)
    exact = additive(inputs[0][:, :64].double(), *(t.double() for t in inputs[1:]))
    bars = (
        Bar("time", at_most=2e-3, machine="H200"),
        Bar("memory", at_most=0.1 * GIGABYTE, machine="H200"),
    )
    yield both_ways(
        place, f"additive attention, batch {batch}, {size} × {size}, width {hidden}, float32",
        {"quire": additive_attention, **formula(place, additive)}, inputs, exact,
        # A reciprocal shared by two, forward, and three times as many backward.
        Work(operations={"special": 2.0 * batch * size * size * hidden}), bars if place.on_gpu else (),
    )  # fmt: skip


@SUBJECTS.register("gaussian-pooling")
def gaussian_subject(place: Place) -> Iterator[Case]:
    """Σ softmax(−½‖q − k‖²) v, forward, then forward and backward, beside the formula."""
    size = place.size(32_768 if place.on_gpu else 4096, 64)
    inputs = [torch.randn(size, width, device=place.device) for width in (16, 16, 1)]
    exact = gaussian(inputs[0][:1024].double(), *(t.double() for t in inputs[1:]))
    title = f"Gaussian pooling, {size:,} × {size:,}, 16 dimensions, 1 value, float32"
    contestants = {"quire": gaussian_pooling, **formula(place, gaussian)}

    def once(function: Function) -> Contestant:
        return lambda: function(*inputs)

    yield Case(
        f"{title}, forward", {name: once(function) for name, function in contestants.items()},
        work=Work(operations={"special": float(size) ** 2}),
        error=lambda found: largest_difference(found[: len(exact)], exact),
        bars=(Bar("time", at_most=0.6e-3, machine="H200"),) if place.on_gpu else (),
    )  # fmt: skip
    work = Work(operations={"special": 3.0 * size**2})
    yield both_ways(place, title, contestants, inputs, exact, work)


@SUBJECTS.register("kernel-pooling")
def kernel_subject(place: Place) -> Iterator[Case]:
    """Boxcar and Epanechnikov pooling in one dimension, by sorting; exact, where all pairs would not fit."""
    size = place.size(1_000_000 if place.on_gpu else 100_000, 100)
    query, key, value = (torch.rand(size, 1, device=place.device) for _ in range(3))
    width = 0.01 if not place.small else 0.5
    for kernel in ("boxcar", "epanechnikov"):

        def every_pair(name: str = kernel) -> Tensor:
            """Of a few queries, in float64."""
            near = (query[:64].double() - key.double().mT).abs() / width
            weight = (near <= 1).double() * (1 if name == "boxcar" else 1 - near.square())
            return weight @ value.double() / weight.sum(-1, keepdim=True)

        exact = every_pair()
        yield Case(
            f"{kernel} pooling, one dimension, {size:,} × {size:,}, float32",
            {"quire": lambda name=kernel: nadaraya_watson(query, key, value, name, width)},  # type: ignore[misc]
            work=Work(moved=4.0 * 4 * size),
            error=lambda found, exact=exact: largest_difference(found[:64], exact),  # type: ignore[misc]
            bars=(Bar("time", at_most=20e-3, machine="H200"), Bar("error", at_most=1e-5)),
        )


@GROWTHS.register("gaussian-pooling")
def gaussian_growth(place: Place) -> Iterator[Growth]:
    """As many queries as keys, beside the formula with all weights in memory."""

    def make(size: int) -> Case:
        inputs = [torch.randn(size, width, device=place.device) for width in (16, 16, 1)]
        return Case("", {"quire": lambda: gaussian_pooling(*inputs), "formula": lambda: gaussian(*inputs)})

    yield Growth(
        "Gaussian pooling of N queries by N keys, 16 dimensions", "queries and keys N", sizes(place, 2048),
        make, order=2, memory_order=1,
    )  # fmt: skip


@GROWTHS.register("attention")
def attention_growth(place: Place) -> Iterator[Growth]:
    """As many queries as keys, beside the formula with all weights in memory."""
    dtype = torch.bfloat16 if place.on_gpu else torch.float32

    def make(size: int) -> Case:
        q, k, v = (torch.randn(1, 8, size, 64, device=place.device, dtype=dtype) for _ in range(3))
        return Case(
            "", {"quire": lambda: attention(q, k, v), "formula": lambda: (q @ k.mT / 8).softmax(-1) @ v}
        )

    yield Growth(
        "Scaled dot-product attention, 8 heads of 64", "queries and keys N", sizes(place, 1024), make,
        order=2, memory_order=1,
    )  # fmt: skip


@SUBJECTS.register("attention")
def attention_subject(place: Place) -> Iterator[Case]:
    """Scaled dot-product attention: PyTorch's fused kernel is near the limit and is called."""
    batch, heads, size, width = (8, 16, 4096, 64) if place.on_gpu else (2, 4, 512, 64)
    size = place.size(size, 32)
    dtype = torch.bfloat16 if place.on_gpu else torch.float32
    q, k, v = (torch.randn(batch, heads, size, width, device=place.device, dtype=dtype) for _ in range(3))
    exact = (q[:1, :1].double() @ k[:1, :1].double().mT / width**0.5).softmax(-1) @ v[:1, :1].double()
    fused = torch.nn.functional.scaled_dot_product_attention
    yield Case(
        f"attention, batch {batch}, {heads} heads of {width}, {size} × {size}, "
        f"{str(dtype).removeprefix('torch.')}, forward",
        {"quire": lambda: attention(q, k, v), "PyTorch's SDPA": lambda: fused(q, k, v)},
        work=Work(
            moved=4.0 * q.nbytes,
            operations={"bfloat16" if place.on_gpu else "float32": 4.0 * batch * heads * size**2 * width},
        ),
        error=lambda found: largest_difference(found[:1, :1], exact),
        bars=(Bar("time", at_most=1.1, rival="PyTorch's SDPA"),),
    )


def sizes(place: Place, first: int) -> tuple[int, ...]:
    """Doubled up to what takes seconds on a GPU."""
    if place.small:
        return (64, 128)
    return tuple(first * 2**power for power in range(10 if place.on_gpu else 5))


def formula(place: Place, function: Function) -> dict[str, Function]:
    """The formula as it stands, and through torch.compile on a GPU (compiling is not counted)."""
    return {"formula compiled": torch.compile(function), "formula": function} if place.on_gpu else {
        "formula": function
    }  # fmt: skip


def both_ways(
    place: Place,
    title: str,
    functions: dict[str, Function],
    inputs: list[Tensor],
    exact: Tensor,
    work: Work,
    bars: tuple[Bar, ...] = (),
) -> Case:
    """Forward, and backward to all inputs from random numbers, which are drawn once."""
    given = [tensor.detach().requires_grad_() for tensor in inputs]
    factor = torch.randn_like(inputs[2])  # as many queries as keys

    def run(function: Function) -> Contestant:
        def call() -> object:
            out = function(*given)
            return out, torch.autograd.grad(out, given, factor)

        return call

    def error(found: object) -> float:
        assert isinstance(found, tuple)
        return largest_difference(found[0][..., : exact.shape[-2], :], exact)

    return Case(
        f"{title}, forward and backward", {name: run(function) for name, function in functions.items()},
        work=work, error=error, bars=bars,
    )  # fmt: skip
