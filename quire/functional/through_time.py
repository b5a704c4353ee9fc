"""Elman's net and the GRU over whole sequences, with their gradients written out: for the CPU.

Autograd records each step's operations and adds a gradient of every weight T times. Here a layer is one
function. Its input products are made for many steps at once, a step is one product and a few operations in
place on memory that is there already, and backward has one loop over time that carries ∂/∂h alone:

    Elman  δ = σ′⊙dh,                                      dh ← g + δ W_hh
    GRU    δ_n = (1−z)(1−n²)⊙dh,   δ_hn = r⊙δ_n,           dh ← g + z⊙dh + (δ_r, δ_z, δ_hn) W_hh
           δ_r = hn⊙r(1−r)⊙δ_n,    δ_z = (h−n)z(1−z)⊙dh

with hn = W_hn h + b_hn, dh the gradient that arrives at the new state and g that of the output before it.
All factors of dh are known when the loop begins, so that a step multiplies once for all gates. The gradients
of the weights are products over all rows of a chunk of steps, while its δ are in the cache.

Operations: 6·N·G·H·(D + H), as many as any way of it, for N = T·B rows. Numbers kept for backward: N·H of
states for Elman, as with autograd, and 5·N·H for the GRU, where autograd keeps 7. On two cores of 93 GFLOP/s
each, B 32, T 100, D 64, H 128 needs 2.5 ms (Elman) and 7.6 ms (GRU) for its products alone.

A product of few rows is shared among threads by rows of the batch, not by columns of the weights as BLAS
would have it: each reads the weights once and waits for nobody in between.

B sequences, T steps, K steps of a chunk, D inputs, H hidden units, G gates, P parts of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, cast, final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import linear

from quire.functional.recurrent import elman_step, gru_step, unroll, valid_steps

CHUNK_NUMBERS = 2**17
"""K·B·H: the δ of a chunk and what they are made of stay in a cache of a few MiB."""
LEAST_ROWS = 8
"""Of a part: with fewer, each thread would read the weights for too little."""


def can_run(*tensors: Tensor) -> bool:
    """Whether the functions below take these: plain tensors on the CPU in single or double precision, where
    nothing looks at each operation (torch.func, forward-mode differentiation, tracing, compiling)."""
    return (
        all(one.device.type == "cpu" and one.dtype in (torch.float32, torch.float64) for one in tensors)
        and len({one.dtype for one in tensors}) == 1
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not transformed()
        and forward_ad._current_level < 0
    )


def transformed() -> bool:
    """Whether torch.func looks at each operation: vmap, grad, jvp."""
    # The compiler, which cannot read the question, brings transforms of its own.
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def elman_through_time(
    x: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    nonlinearity: Literal["tanh", "relu"] = "tanh",
    reverse: bool = False,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = σ(W_ih x_t + b_ih + W_hh h_{t−1} + b_hh): all h_t (B, T, H) and the last state (B, H).

    x is (B, T, D), h the first state (B, H). The same as `unroll` of `elman_step`, also when differentiated
    twice; `lengths` must be on the CPU, with the longest sequence first.
    """
    return _run(_Elman(nonlinearity), x, h, weight_ih, weight_hh, bias_ih, bias_hh, reverse, lengths)


def gru_through_time(
    x: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    reverse: bool = False,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The GRU of `gru_step`, in PyTorch's convention; arguments and results as in `elman_through_time`."""
    return _run(_Gru(), x, h, weight_ih, weight_hh, bias_ih, bias_hh, reverse, lengths)


def _run(
    cell: _Cell,
    x: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    reverse: bool,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    given = (x, h, weight_ih, weight_hh, bias_ih, bias_hh)
    keep = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given)
    counts = valid = None
    if lengths is not None:
        valid = valid_steps(lengths, x)
        counts = tuple(valid.sum(0).tolist())
    course = _Course(x.shape[1], len(x), weight_hh.shape[1], reverse, counts)
    output, last = cast(tuple[Tensor, Tensor], _ThroughTime.apply(cell, course, keep, *given))
    output = output.transpose(0, 1)
    return (output if valid is None else output.masked_fill(~valid.unsqueeze(-1), 0)), last


# The course of time ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Course:
    """In which order and in which portions the steps are done."""

    steps: int
    rows: int
    size: int
    reverse: bool
    counts: tuple[int, ...] | None

    @cached_property
    def length(self) -> int:
        """K."""
        return max(1, min(self.steps, CHUNK_NUMBERS // max(1, self.rows * self.size)))

    @cached_property
    def parts(self) -> int:
        """P."""
        threads = torch.get_num_threads()
        shared = self.counts is None and self.rows % threads == 0 and self.rows >= LEAST_ROWS * threads
        return threads if shared else 1

    def chunks(self) -> list[slice]:
        starts = range(0, self.steps, self.length)
        found = [slice(start, min(start + self.length, self.steps)) for start in starts]
        return found[::-1] if self.reverse else found

    def before_and_after(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Of states (T+1, B, H): those that the steps begin with, and those that they end with."""
        return (states[1:], states[:-1]) if self.reverse else (states[:-1], states[1:])

    def moving(self, chunk: slice, buffer: Tensor) -> Sequence[Tensor]:
        """For each step of a chunk, in order: the rows of buffer (K, B, …) that move, as (P, B/P, …)."""
        if self.counts is None:
            views: Sequence[Tensor] = buffer.unflatten(1, (self.parts, self.rows // self.parts)).unbind(0)
        else:
            pairs = zip(buffer.unbind(0), self.counts[chunk], strict=True)
            views = [row[:count].unsqueeze(0) for row, count in pairs]
        return views[::-1] if self.reverse else views

    def resting(self, chunk: slice, buffer: Tensor) -> Sequence[Tensor | None]:
        """The rows (…, H) that stay as they are, where there are any."""
        if self.counts is None:
            return (None,) * len(buffer)
        pairs = zip(buffer.unbind(0), self.counts[chunk], strict=True)
        views = [row[count:] if count < self.rows else None for row, count in pairs]
        return views[::-1] if self.reverse else views


# Cells ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weights:
    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None


class _Cell(ABC):
    gates: ClassVar[int]
    kept: ClassVar[tuple[int, ...]]
    """Widths of what is kept of each row besides its state, in units of H."""
    slots: ClassVar[int]
    """Blocks of δ: the first `gates` belong to W_ih, whose last gate comes first, the last to W_hh."""

    @abstractmethod
    def enter(self, rows: Tensor, weights: _Weights, after: Tensor, *kept: Tensor) -> None:
        """The products of rows (K·B, D) with W_ih and the biases, in the buffers (K, B, …) of their chunk."""

    @abstractmethod
    def views(self, before: Tensor, after: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """What a step works on, (K, B, …)."""

    @abstractmethod
    def step(self, weight: Tensor, *views: Tensor) -> None:
        """The new state, with W_hhᵀ as (P, H, G·H)."""

    @abstractmethod
    def derive(self, factors: Tensor, before: Tensor, after: Tensor, *kept: Tensor) -> Tensor | None:
        """Fill factors (K, B, slots, H), by which dh becomes δ; the share of dh that passes by, or None."""

    @abstractmethod
    def plain(self, weights: _Weights) -> Any:
        """The step of `quire.functional.recurrent`."""


@final
@dataclass(frozen=True)
class _Elman(_Cell):
    nonlinearity: str
    gates: ClassVar[int] = 1
    kept: ClassVar[tuple[int, ...]] = ()
    slots: ClassVar[int] = 1

    def enter(self, rows: Tensor, weights: _Weights, after: Tensor, *kept: Tensor) -> None:
        _product(rows, weights.ih, _sum(weights.bias_ih, weights.bias_hh), after.flatten(0, 1))

    def views(self, before: Tensor, after: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        return before, after

    def step(self, weight: Tensor, *views: Tensor) -> None:
        h, new = views
        new.baddbmm_(h, weight)
        new.tanh_() if self.nonlinearity == "tanh" else new.relu_()

    def derive(self, factors: Tensor, before: Tensor, after: Tensor, *kept: Tensor) -> None:
        if self.nonlinearity == "tanh":
            torch.addcmul(after.new_ones(()), after, after, value=-1, out=factors[:, :, 0])
        else:
            factors[:, :, 0] = after > 0

    def plain(self, weights: _Weights) -> Any:
        return partial(
            elman_step, weight_hh=weights.hh, bias_hh=weights.bias_hh, nonlinearity=self.nonlinearity
        )


@final
@dataclass(frozen=True)
class _Gru(_Cell):
    """Kept are (r, z, hn) beside each other and n; the blocks of δ are n, r, z, hn."""

    gates: ClassVar[int] = 3
    kept: ClassVar[tuple[int, ...]] = (3, 1)
    slots: ClassVar[int] = 4

    def enter(self, rows: Tensor, weights: _Weights, after: Tensor, *kept: Tensor) -> None:
        products, n = (one.flatten(0, 1) for one in kept)
        two = 2 * after.shape[-1]
        both = _sum(_head(weights.bias_ih, two), _head(weights.bias_hh, two))
        _product(rows, weights.ih[:two], both, products[:, :two])
        _product(rows, weights.ih[two:], _tail(weights.bias_ih, two), n)
        products[:, two:] = 0.0 if weights.bias_hh is None else weights.bias_hh[two:]

    def views(self, before: Tensor, after: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        products, n = kept
        size = after.shape[-1]
        r, z, hn = products.split(size, -1)
        return before, after, products, products[..., : 2 * size], r, z, hn, n

    def step(self, weight: Tensor, *views: Tensor) -> None:
        h, new, products, gates, r, z, hn, n = views
        products.baddbmm_(h, weight)
        gates.sigmoid_()
        n.addcmul_(r, hn).tanh_()
        torch.lerp(n, h, z, out=new)  # (1−z)⊙n + z⊙h

    def derive(self, factors: Tensor, before: Tensor, after: Tensor, *kept: Tensor) -> Tensor:
        products, n = kept
        r, z, hn = products.split(n.shape[-1], -1)
        of_n, of_r, of_z, of_hn = factors.unbind(2)
        torch.addcmul(n.new_ones(()), n, n, value=-1, out=of_n)
        of_n.addcmul_(of_n, z, value=-1)
        torch.mul(of_n, r, out=of_hn)
        torch.mul(of_hn, hn, out=of_r).addcmul_(of_r, r, value=-1)
        torch.sub(before, n, out=of_z).mul_(z).addcmul_(of_z, z, value=-1)
        return z

    def plain(self, weights: _Weights) -> Any:
        return partial(gru_step, weight_hh=weights.hh, bias_hh=weights.bias_hh)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _head(bias: Tensor | None, size: int) -> Tensor | None:
    return None if bias is None else bias[:size]


def _tail(bias: Tensor | None, size: int) -> Tensor | None:
    return None if bias is None else bias[size:]


# The function ---------------------------------------------------------------------------------


class _ThroughTime(torch.autograd.Function):
    """x (B, T, D), h (B, H) → states (T, B, H), last state (B, H)."""

    @staticmethod
    def forward(ctx: Any, cell: _Cell, course: _Course, keep: bool, *given: Any) -> tuple[Tensor, Tensor]:
        x, h, *rest = given
        weights = _Weights(*rest)
        states = x.new_empty(course.steps + 1, course.rows, course.size)
        before, after = course.before_and_after(states)
        states[-1 if course.reverse else 0] = h
        places = course.steps if keep else course.length
        kept = [x.new_empty(places, course.rows, width * course.size) for width in cell.kept]
        weight = weights.hh.t().expand(course.parts, -1, -1)
        for chunk in course.chunks():
            own = [one[chunk if keep else slice(chunk.stop - chunk.start)] for one in kept]
            old, new = before[chunk], after[chunk]
            cell.enter(_time_major(x, chunk), weights, new, *own)
            moving = [course.moving(chunk, one) for one in cell.views(old, new, *own)]
            still = course.resting(chunk, old), course.resting(chunk, new)
            for resting, stays, *views in zip(*still, *moving, strict=True):
                cell.step(weight, *views)
                if stays is not None:
                    stays.copy_(resting)
        if keep:
            ctx.cell, ctx.course = cell, course
            ctx.save_for_backward(*given, states, *kept)
        return after, states[0 if course.reverse else -1].clone()

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Any, ...]:
        given, buffers = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        needed = ctx.needs_input_grad[3:]
        # Enabled, the gradients are to be differentiated again.
        make = _plain_gradients if torch.is_grad_enabled() else _gradients
        return None, None, None, *make(ctx.cell, ctx.course, given, buffers, needed, arriving)


def _time_major(x: Tensor, chunk: slice) -> Tensor:
    """Rows (K·B, D) of x (B, T, D), step by step."""
    return x[:, chunk].transpose(0, 1).reshape(-1, x.shape[-1])


def _gradients(
    cell: _Cell,
    course: _Course,
    given: Sequence[Any],
    buffers: Sequence[Tensor],
    needed: Sequence[bool],
    arriving: Sequence[Tensor],
) -> list[Tensor | None]:
    x, _, *rest = given
    weights = _Weights(*rest)
    states, *kept = buffers
    before, after = course.before_and_after(states)
    size, width = course.size, cell.gates * course.size
    rolled = weights.ih.roll(size, 0) if cell.gates > 1 else weights.ih  # the last gate first, as δ has it
    of_x = x.new_empty(course.steps, course.rows, x.shape[-1]) if needed[0] else None
    of_ih = torch.zeros_like(rolled) if needed[2] else None
    of_hh = torch.zeros_like(weights.hh) if needed[3] else None
    sums = x.new_zeros(cell.slots * size)
    room = x.new_empty(course.length, course.rows, cell.slots, size)
    carried = _Carried(course, weights.hh, *arriving)
    for chunk in reversed(course.chunks()):
        delta = room[: chunk.stop - chunk.start]
        share = cell.derive(delta, before[chunk], after[chunk], *(one[chunk] for one in kept))
        carried.back(chunk, delta, delta.flatten(2)[..., -width:], share)
        found = delta.view(-1, cell.slots * size)
        if of_x is not None:
            torch.mm(found[:, :width], rolled, out=of_x[chunk].flatten(0, 1))
        if of_ih is not None:
            of_ih.addmm_(found[:, :width].t(), _time_major(x, chunk))
        if of_hh is not None:
            of_hh.addmm_(found[:, -width:].t(), before[chunk].flatten(0, 1))
        if needed[4] or needed[5]:
            sums += found.sum(0)  # a product with ones would round four times as much
    return [
        None if of_x is None else of_x.transpose(0, 1),
        carried.dh.flatten(0, 1),
        None if of_ih is None else of_ih.roll(-size, 0) if cell.gates > 1 else of_ih,
        of_hh,
        sums[:width].roll(-size) if needed[4] else None,
        sums[-width:].clone() if needed[5] else None,
    ]


class _Carried:
    """∂/∂h (P, B/P, H) on its way back: that of the state after the steps which are still to be done."""

    def __init__(self, course: _Course, weight_hh: Tensor, output: Tensor, last: Tensor) -> None:
        self.course = course
        self.weight = weight_hh.expand(course.parts, -1, -1)
        shape = (course.parts, course.rows // course.parts)
        # What arrives at the output before each step; before the first there is none.
        each, last = output.unflatten(1, shape).unbind(0), last.unflatten(0, shape)
        nothing = torch.zeros_like(last)
        self.earlier = (*each[1:], nothing) if course.reverse else (nothing, *each[:-1])
        self.dh = last + each[0 if course.reverse else -1]
        self.spare = torch.empty_like(self.dh)

    def back(self, chunk: slice, delta: Tensor, of_state: Tensor, share: Tensor | None) -> None:
        """Through the steps of a chunk, whose factors in `delta` are multiplied by dh on the way."""
        course = self.course
        order = slice(None, None, -1 if course.reverse else 1)
        buffers = (delta, of_state) if share is None else (delta, of_state, share)
        moving = [course.moving(chunk, one) for one in buffers]
        columns = (self.earlier[chunk][order], course.resting(chunk, delta), *moving)
        for arriving, rests, found, product, *shares in reversed(list(zip(*columns, strict=True))):
            dh, new = self.dh, self.spare
            if rests is not None:
                count = found.shape[1]
                rests.zero_()
                torch.add(arriving[:, count:], dh[:, count:], out=new[:, count:])
                arriving, dh, new = arriving[:, :count], dh[:, :count], new[:, :count]
            found.mul_(dh.unsqueeze(-2))
            if shares:
                torch.addcmul(arriving, dh, shares[0], out=new).baddbmm_(product, self.weight)
            else:
                torch.baddbmm(arriving, product, self.weight, out=new)
            self.dh, self.spare = self.spare, self.dh


def _plain_gradients(
    cell: _Cell,
    course: _Course,
    given: Sequence[Any],
    buffers: Sequence[Tensor],
    needed: Sequence[bool],
    arriving: Sequence[Tensor],
) -> list[Tensor | None]:
    """The same from autograd and `unroll`, with a graph of their own."""
    x, h, *rest = given
    weights = _Weights(*rest)
    lengths = None
    if course.counts is not None:
        lengths = torch.tensor([sum(count > row for count in course.counts) for row in range(course.rows)])
    a = linear(x, weights.ih, weights.bias_ih)
    output, last = unroll(cell.plain(weights), a, h, lengths, reverse=course.reverse)
    wanted = [one for one, need in zip(given, needed, strict=True) if need]
    weighed = (arriving[0].transpose(0, 1), arriving[1])
    gradients = torch.autograd.grad((output, last), wanted, weighed, create_graph=True, allow_unused=True)
    found = iter(gradients)
    return [next(found) if need else None for need in needed]
