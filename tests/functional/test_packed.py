"""Sequences without padding against the same sequences with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.attention import attention
from quire.functional.packed import pack, packed_attention, unpack

LENGTHS = torch.tensor([3, 0, 5, 1])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_packing_by_hand() -> None:
    padded = torch.arange(8).reshape(2, 4)
    packed = pack(padded, torch.tensor([1, 3]))
    assert packed.tolist() == [0, 4, 5, 6]
    assert unpack(packed, torch.tensor([1, 3])).tolist() == [[0, 0, 0], [4, 5, 6]]
    assert unpack(packed, torch.tensor([1, 3]), 4).tolist() == [[0, 0, 0, 0], [4, 5, 6, 0]]
    assert unpack(pack(padded, torch.tensor([0, 0])), torch.tensor([0, 0])).shape == (2, 0)


def test_packing_carries_gradients() -> None:
    padded = random(4, 5, 2).requires_grad_()
    again = unpack(pack(padded, LENGTHS), LENGTHS)
    (gradient,) = torch.autograd.grad(again.sum(), padded)
    assert gradient.sum((1, 2)).tolist() == [6, 0, 10, 2]


@pytest.mark.parametrize("causal", [False, True])
def test_each_sequence_attends_to_itself(causal: bool) -> None:
    query, key, value = (random(4, 5, 2, 8).requires_grad_() for _ in range(3))  # (B, T, H, D)
    inputs = (query, key, value)
    got = packed_attention(*(pack(t, LENGTHS) for t in inputs), LENGTHS, causal=causal)
    padded = attention(*(t.transpose(1, 2) for t in inputs), lengths=LENGTHS, causal=causal).transpose(1, 2)
    wanted = pack(padded, LENGTHS)
    torch.testing.assert_close(got, wanted)
    for ours, theirs in zip(
        torch.autograd.grad(got.square().sum(), inputs),
        torch.autograd.grad(wanted.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_queries_and_keys_of_different_lengths() -> None:
    query_lengths, key_lengths = torch.tensor([2, 3]), torch.tensor([4, 0])
    query, key = random(5, 1, 4), random(4, 1, 4)
    got = packed_attention(query, key, key, query_lengths, key_lengths)
    weights = (query[:2, 0] @ key[:, 0].mT / 2).softmax(-1)
    torch.testing.assert_close(got[:2, 0], weights @ key[:, 0])
    assert (got[2:] == 0).all()
    assert packed_attention(query[:0], key[:0], key[:0], LENGTHS[:0]).shape == (0, 1, 4)


def test_messages() -> None:
    with pytest.raises(InputError, match=r"lengths \[9\] .*\n  expected: 1 whole numbers from 0 to 4"):
        pack(random(1, 4), torch.tensor([9]))
    with pytest.raises(InputError, match="3 packed places for lengths"):
        unpack(random(3), torch.tensor([1, 1]))
    with pytest.raises(InputError, match="pack each with its own lengths"):
        packed_attention(random(5, 1, 4), random(4, 1, 4), random(4, 1, 4), torch.tensor([5]))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_for_half_precision(causal: bool) -> None:
    lengths = torch.tensor([3, 5, 40])
    inputs = [torch.randn(48, 2, 32) for _ in range(3)]
    wanted = packed_attention(*inputs, lengths, causal=causal)
    there = [t.to("cuda", torch.bfloat16).requires_grad_() for t in inputs]
    got = packed_attention(*there, lengths.cuda(), causal=causal)
    torch.testing.assert_close(got.float().cpu(), wanted, atol=0.03, rtol=0.03)
    for gradient in torch.autograd.grad(got.sum(), there):
        assert gradient.isfinite().all()
    # A sequence without keys, beside others that have some.
    some = torch.tensor([40, 8]).cuda()
    none = packed_attention(there[0], there[1], there[2], some, torch.tensor([48, 0]).cuda())
    assert (none[40:] == 0).all()
    assert torch.autograd.grad(none.sum(), there[0])[0].isfinite().all()
