"""Streamed pooling against the same sums with every score in memory, and how much it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.attention import (
    additive_score,
    attention_pooling,
    dot_score,
    masked_softmax,
    projected_score,
)
from quire.functional.memory import peak_bytes
from quire.functional.streaming import additive_attention, block_size, streamed_pooling

pytestmark = pytest.mark.slow


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


SITUATIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"lengths": torch.tensor([0, 7])},
    {"lengths": torch.tensor([[0, 1, 2, 3, 9], [9, 4, 0, 2, 1]]), "causal": True},
    {"mask": torch.rand(5, 9) < 0.5},
    {"mask": torch.randn(2, 1, 9).masked_fill(torch.rand(2, 1, 9) < 0.5, -torch.inf)},
]


@pytest.mark.parametrize("options", SITUATIONS, ids=lambda o: "+".join(o) or "open")
@pytest.mark.parametrize("block", [(1, 1), (2, 4), (5, 9), (3, 100)])
def test_blocks_give_what_the_whole_gives(options: dict[str, Any], block: tuple[int, int]) -> None:
    query, key, value = (random(2, n, w).requires_grad_() for n, w in ((5, 4), (9, 4), (9, 3)))
    factor = random(4).requires_grad_()
    inputs = (query, key, value, factor)

    def score(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return (q * w) @ k.mT * 3

    got = streamed_pooling(score, query, key, value, (factor,), block=block, **options)
    wanted = attention_pooling(query, key, value, lambda q, k: score(q, k, factor), **options)
    torch.testing.assert_close(got.value, wanted)
    factors = random(*wanted.shape)
    found = torch.autograd.grad((got.value * factors).sum(), inputs)
    expected = torch.autograd.grad((wanted * factors).sum(), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    allowed = masked_softmax(torch.zeros(2, 5, 9), **options) > 0
    totals = score(query, key, factor)
    mask = options.get("mask")
    if mask is not None and mask.is_floating_point():
        totals = totals + mask
    totals = totals.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(got.log_total, totals.detach())
    assert not got.log_total.requires_grad


@pytest.mark.parametrize("options", SITUATIONS, ids=lambda o: "+".join(o) or "open")
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_additive_attention_is_its_formula(options: dict[str, Any], backend: Any) -> None:
    query, key, value = (random(2, n, w).requires_grad_() for n, w in ((5, 3), (9, 4), (9, 2)))
    w_q, w_k, w_v = (random(*shape).requires_grad_() for shape in ((6, 3), (6, 4), (6,)))
    inputs = (query, key, value, w_q, w_k, w_v)
    got = additive_attention(query @ w_q.mT, key @ w_k.mT, value, w_v, backend=backend, **options)
    wanted = attention_pooling(query, key, value, lambda q, k: additive_score(q, k, w_q, w_k, w_v), **options)
    torch.testing.assert_close(got, wanted)
    for ours, theirs in zip(
        torch.autograd.grad(got.square().sum(), inputs),
        torch.autograd.grad(wanted.square().sum(), inputs),
        strict=True,
    ):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)


def test_gradients_by_finite_differences() -> None:
    query, key, value, vector = (random(*s).requires_grad_() for s in ((2, 4, 3), (2, 5, 3), (2, 5, 2), (3,)))
    options = {"lengths": torch.tensor([0, 4]), "backend": "torch"}
    assert torch.autograd.gradcheck(
        lambda *given: additive_attention(*given, **options), (query, key, value, vector)
    )
    assert torch.autograd.gradcheck(
        lambda q, k, v: streamed_pooling(dot_score, q, k, v, causal=True, block=(2, 2)).value,
        (query, key, value),
    )


def test_only_what_needs_a_gradient_gets_one() -> None:
    query, key, value, vector = random(4, 3), random(5, 3), random(5, 2).requires_grad_(), random(3)
    out = additive_attention(query, key, value, vector, backend="torch")
    (gradient,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(gradient.sum(), torch.tensor(8.0).double())  # 4 rows of weights, 2 columns
    vector.requires_grad_()
    out = additive_attention(query, key, value.detach(), vector, backend="torch")
    assert torch.autograd.grad(out.sum(), vector)[0].abs().sum() > 0


def test_scores_of_any_size_neither_overflow_nor_vanish() -> None:
    query, key = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1000.0], [2000.0], [3000.0]])
    got = streamed_pooling(dot_score, query, key, torch.eye(3), block=(1, 1))
    assert got.value.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert got.log_total.tolist() == [3000, -1000]


@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (0, 3), (1, 1)])
def test_extreme_sizes(queries: int, keys: int) -> None:
    query, key = random(queries, 2).requires_grad_(), random(keys, 2).requires_grad_()
    out = additive_attention(query, key, random(keys, 4), random(2), backend="torch")
    assert out.shape == (queries, 4)
    assert keys or (out == 0).all()
    for gradient in torch.autograd.grad(out.sum(), (query, key)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    exact = [random(2, 40, 8), random(2, 50, 8), random(2, 50, 4), random(8)]
    inputs = [t.to(dtype).requires_grad_() for t in exact]
    got = additive_attention(*inputs, backend="torch", lengths=torch.tensor([0, 30]))
    assert got.dtype == dtype
    wanted = additive_attention(*exact, lengths=torch.tensor([0, 30]))
    torch.testing.assert_close(got.double(), wanted, atol=0.03, rtol=0.03)
    for gradient in torch.autograd.grad(got.sum(), inputs):
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()


def test_autocast_does_not_round_the_sums() -> None:
    query, key, value, vector = (torch.randn(*s) for s in ((30, 8), (40, 8), (40, 4), (8,)))
    plain = additive_attention(query, key, value, vector, backend="torch")
    with torch.autocast("cpu", torch.bfloat16):
        cast = additive_attention(query, key, value, vector, backend="torch")
    torch.testing.assert_close(cast, plain)


def test_extra_memory_is_linear() -> None:
    def peaks(size: int) -> tuple[int, int]:
        inputs = [torch.randn(size, 32, requires_grad=True) for _ in range(3)]
        vector = torch.randn(32, requires_grad=True)

        def streamed() -> None:
            additive_attention(*inputs, vector, backend="torch").sum().backward()

        def held() -> None:
            (masked_softmax(projected_score(inputs[0], inputs[1], vector)) @ inputs[2]).sum().backward()

        return peak_bytes(streamed), peak_bytes(held)

    (small, _), (large, held) = peaks(256), peaks(512)
    # Twice the rows: a block stays a block; what doubles is queries, keys, values and their gradients.
    assert large - small <= 256 * 32 * 4 * 12
    assert held > 512 * 512 * 32 * 4
    assert large < held / 10


def test_block_sizes() -> None:
    cpu = torch.device("cpu")
    rows, columns = block_size((8, 1024, 1024), 128, cpu)
    assert rows * columns == 1024  # the batch leaves room for no more
    assert block_size((1, 10, 20), 4, cpu) == (10, 20)
    assert block_size((1, 1, 100_000), 1, cpu) == (1, 100_000)
    assert block_size((0, 5, 0), 1, cpu) == (5, 1)


def test_messages() -> None:
    inputs = random(2, 3), random(4, 3), random(4, 2), random(3)
    with pytest.raises(InputError, match="unknown backend 'cuda'"):
        additive_attention(*inputs, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a mask that is not learned"):
        additive_attention(*inputs, mask=random(2, 4).requires_grad_(), backend="torch")
    with pytest.raises(InputError, match="one value for each key"):
        additive_attention(inputs[0], inputs[1], random(5, 2), inputs[3], backend="torch")
    query = inputs[0].requires_grad_()
    out = additive_attention(query, *inputs[1:], backend="torch")
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(InputError, match="a second derivative of streamed attention"):
        first.sum().backward()


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    inputs = [random(2, 40, 8), random(2, 50, 8), random(2, 50, 4), random(8)]
    there = [t.cuda().requires_grad_() for t in inputs]
    got = additive_attention(*there, backend="torch", lengths=torch.tensor([0, 30]).cuda())
    torch.testing.assert_close(got.cpu(), additive_attention(*inputs, lengths=torch.tensor([0, 30])))
    for gradient in torch.autograd.grad(got.sum(), there):
        assert gradient.isfinite().all()
