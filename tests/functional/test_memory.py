"""The count of memory against sums that can be done by hand."""

from __future__ import annotations

import torch

from quire.functional.memory import allocated_bytes, peak_bytes


def test_what_is_alive_at_once() -> None:
    x = torch.zeros(1000)  # 4,000 bytes
    assert peak_bytes(lambda x: x, x) == 0
    assert peak_bytes(lambda x: x + 1, x) == 4_000
    assert peak_bytes(lambda x: (x + 1) * 2, x) == 8_000
    assert peak_bytes(lambda x: (x + 1).mul_(2), x) == 4_000

    def one_after_the_other(x: torch.Tensor) -> None:
        for _ in range(10):
            x.exp()

    # The old result is still there while its successor is made.
    assert peak_bytes(one_after_the_other, x) <= 8_000


def test_views_share_and_arguments_do_not_count() -> None:
    x = torch.zeros(10, 100)
    assert peak_bytes(lambda x: [x.mT, x[3:], x.reshape(-1)], x) == 0
    assert peak_bytes(lambda given: given["x"].view(-1), {"x": x}) == 0
    assert peak_bytes(lambda: torch.zeros(4, 250).expand(7, 4, 250)) == 4_000


def test_the_backward_pass_counts() -> None:
    x = torch.zeros(1000, requires_grad=True)
    forward = peak_bytes(lambda: x.exp())
    both = peak_bytes(lambda: torch.autograd.grad(x.exp(), x, torch.ones(1000)))
    assert forward == 4_000
    assert both >= 12_000  # the result, what comes in, and the gradient


def test_the_allocators_own_account() -> None:
    x = torch.zeros(1000)
    assert allocated_bytes(lambda: x.exp()) == 4_000
    assert allocated_bytes(lambda: x.exp().sin()) == 8_000

    def freed_at_once() -> None:
        for _ in range(10):
            x.exp()

    assert allocated_bytes(freed_at_once) == 4_000
