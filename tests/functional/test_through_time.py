"""Whole sequences against torch.nn's layers and against the loop over cells, in values and all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import quire.functional.through_time as module
from quire.functional.recurrent import elman_step, gru_step, unroll
from quire.functional.through_time import can_run, elman_through_time, gru_through_time
from quire.nn.recurrent import GRU, RNN

KINDS: dict[str, tuple[Any, Any, Any, int]] = {
    "tanh": (elman_through_time, elman_step, nn.RNN, 1),
    "relu": (
        partial(elman_through_time, nonlinearity="relu"),
        partial(elman_step, nonlinearity="relu"),
        partial(nn.RNN, nonlinearity="relu"),
        1,
    ),
    "gru": (gru_through_time, gru_step, nn.GRU, 3),
}
SHAPES = [(1, 1, 1, 1), (3, 7, 5, 6), (32, 9, 3, 4), (5, 2, 1, 7), (2, 123, 2, 3)]
"""B, T, D, H"""
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(kind: str, rows: int, steps: int, inputs: int, size: int, bias: bool = True) -> list[Tensor]:
    """x, h, weight_ih, weight_hh and the biases, as leaves."""
    wide = KINDS[kind][3] * size
    shapes = [(rows, steps, inputs), (rows, size), (wide, inputs), (wide, size)]
    shapes += [(wide,), (wide,)] if bias else []
    found = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    found[3] *= size**-0.5
    return [one.requires_grad_() for one in found]


def by_loop(
    kind: str, leaves: list[Tensor], lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    x, h, weight_ih, weight_hh, *biases = leaves
    bias_ih, bias_hh = biases or (None, None)
    step = partial(KINDS[kind][1], weight_hh=weight_hh, bias_hh=bias_hh)
    return unroll(step, linear(x, weight_ih, bias_ih), h, lengths, reverse=reverse)


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    weighed = [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in outputs]
    return torch.autograd.grad(outputs, leaves, weighed, **options)


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# Against others -------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_torch_gives_the_same_values_and_gradients(
    kind: str, shape: tuple[int, int, int, int], bias: bool
) -> None:
    leaves = make(kind, *shape, bias=bias)
    peer = KINDS[kind][2](shape[2], shape[3], bias=bias, batch_first=True).double()
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    peer.load_state_dict({n: p.detach() for n, p in zip(names, leaves[2:], strict=False)})
    found = KINDS[kind][0](*leaves)
    wanted, last = peer(leaves[0], leaves[1][None])
    assert_same(found, (wanted, last[0]))
    theirs = [*leaves[:2], *(getattr(peer, name) for name in names[: len(leaves) - 2])]
    assert_same(gradients(found, leaves), gradients((wanted, last[0]), theirs))


@kinds
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("chunk", "threads"), [("a step", 1), ("three steps", 2), ("all", 2)])
def test_the_loop_over_cells_gives_the_same(
    kind: str,
    shape: tuple[int, int, int, int],
    reverse: bool,
    uneven: bool,
    chunk: str,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, steps, _, size = shape
    numbers = {"a step": 1, "three steps": 3 * rows * size, "all": 2**17}[chunk]
    monkeypatch.setattr(module, "CHUNK_NUMBERS", numbers)
    torch.set_num_threads(threads)
    leaves = make(kind, *shape)
    lengths = None
    if uneven:
        lengths = torch.randint(steps + 1, (rows,)).sort(descending=True).values
    found = KINDS[kind][0](*leaves, reverse=reverse, lengths=lengths)
    wanted = by_loop(kind, leaves, lengths, reverse)
    assert_same(found, wanted)
    assert_same(gradients(found, leaves), gradients(wanted, leaves))


@kinds
@pytest.mark.parametrize("lengths", [None, torch.tensor([4, 2, 0])])
@pytest.mark.parametrize("reverse", [False, True])
def test_finite_differences_agree_once_and_twice(kind: str, lengths: Tensor | None, reverse: bool) -> None:
    leaves = make(kind, 3, 4, 2, 3)
    function = partial(KINDS[kind][0], lengths=lengths, reverse=reverse)
    assert torch.autograd.gradcheck(function, leaves)
    if kind != "relu" and reverse and lengths is not None:  # relu's is zero but for the weights
        assert torch.autograd.gradgradcheck(function, leaves)


# How it is called -----------------------------------------------------------------------------


@kinds
def test_inputs_and_gradients_of_any_layout(kind: str) -> None:
    leaves = make(kind, 4, 6, 5, 3)
    wanted = KINDS[kind][0](*leaves)
    whole = torch.stack([leaves[0].detach()] * 2, -1).transpose(0, 1)  # every other number, time first
    x = whole[..., 0].transpose(0, 1).requires_grad_()
    assert not x.is_contiguous()
    found = KINDS[kind][0](x, *leaves[1:])
    assert_same(found, wanted)
    ones = torch.ones((), dtype=torch.float64)
    for outputs, inputs in ((found, [x, *leaves[1:]]), (wanted, leaves)):
        expanded = [ones.expand(out.shape) for out in outputs]
        assert_same(
            torch.autograd.grad(outputs, inputs, expanded, retain_graph=True),
            torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), inputs),
        )


@kinds
def test_each_subset_of_gradients(kind: str) -> None:
    leaves = make(kind, 2, 4, 3, 2)
    every = gradients(KINDS[kind][0](*leaves), leaves)
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(6), n) for n in (1, 5)):
        given = [leaf if i in chosen else leaf.detach() for i, leaf in enumerate(leaves)]
        found = gradients(KINDS[kind][0](*given), [leaves[i] for i in chosen])
        assert_same(found, tuple(every[i] for i in chosen))


@kinds
def test_one_of_the_two_results_is_enough(kind: str) -> None:
    leaves = make(kind, 2, 4, 3, 2)
    for pick in (0, 1):
        found, wanted = KINDS[kind][0](*leaves)[pick], by_loop(kind, leaves)[pick]
        assert_same(gradients((found,), leaves), gradients((wanted,), leaves))


@kinds
def test_a_second_backward_gives_the_same(kind: str) -> None:
    leaves = make(kind, 2, 4, 3, 2)
    found = KINDS[kind][0](*leaves)
    first = gradients(found, leaves, retain_graph=True)
    for a, b in zip(first, gradients(found, leaves), strict=True):
        assert torch.equal(a, b)


@kinds
def test_gradients_have_memory_of_their_own(kind: str) -> None:
    leaves = make(kind, 2, 4, 3, 2)
    torch.stack([out.sum() for out in KINDS[kind][0](*leaves)]).sum().backward()
    places = {leaf.grad.untyped_storage().data_ptr() for leaf in leaves if leaf.grad is not None}
    assert len(places) == len(leaves)


@kinds
def test_nothing_is_kept_without_gradients(kind: str) -> None:
    leaves = make(kind, 2, 4, 3, 2)
    with torch.no_grad():
        found = KINDS[kind][0](*leaves)
    assert not any(out.requires_grad for out in found)
    assert_same(found, KINDS[kind][0](*leaves))


@kinds
def test_an_output_changed_in_place_is_noticed(kind: str) -> None:
    leaves = make(kind, 2, 4, 3, 2)
    output, _ = KINDS[kind][0](*leaves)
    loss = output.sum()
    output.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_single_precision_is_as_exact_as_torch() -> None:
    leaves = make("gru", 8, 40, 16, 32)
    exact = by_loop("gru", leaves)[0]
    peer = nn.GRU(16, 32, batch_first=True)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    peer.load_state_dict({name: p.detach() for name, p in zip(names, leaves[2:], strict=True)})
    halves = [leaf.detach().float() for leaf in leaves]
    error = (gru_through_time(*halves)[0] - exact).abs().max()
    theirs = (peer(halves[0], halves[1][None])[0] - exact).abs().max()
    assert error < 2 * theirs + 1e-6


# Where it steps back --------------------------------------------------------------------------


def test_where_it_can_run() -> None:
    x = torch.zeros(2)
    assert can_run(x, x)
    assert can_run(x.double())
    assert not can_run(x.bfloat16())
    assert not can_run(x, x.double())
    assert not can_run(x.to("meta"))
    seen = []
    torch.func.vmap(lambda row: seen.append(can_run(row)) or row)(x)
    torch.func.grad(lambda row: seen.append(can_run(row)) or row.sum())(x)
    with torch.autograd.forward_ad.dual_level():
        seen.append(can_run(x))
    assert seen == [False] * 3


@pytest.mark.parametrize("layer_class", [RNN, GRU])
def test_a_layer_goes_through_functional_transforms(layer_class: Any) -> None:
    layer = layer_class(3, 4, 2, bidirectional=True).double()
    x, direction = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)

    def total(inputs: Tensor) -> Tensor:
        output: Tensor = layer(inputs)[0]
        return output.square().sum()

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(total)(x), wanted)
    several = torch.func.vmap(lambda one: layer(one)[0])(torch.stack((x, direction)))
    torch.testing.assert_close(several, torch.stack((layer(x)[0], layer(direction)[0])))
    _, along = torch.func.jvp(total, (x,), (direction,))
    torch.testing.assert_close(along, (wanted * direction).sum())
    (product,) = torch.autograd.functional.hvp(total, x, direction)[1:]
    step = 1e-5
    ahead, behind = (torch.func.grad(total)(x + sign * step * direction) for sign in (1, -1))
    torch.testing.assert_close(product, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)
