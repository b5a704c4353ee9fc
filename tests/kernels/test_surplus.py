"""The kernel of a linear layer's cross-entropy gives what explicit formulas in float64 give."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from quire.functional import linear_cross_entropy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (7, 10), (33, 1000), (64, 8192), (5, 50257)])
def test_surplus_and_losses(rows: int, classes: int, dtype: torch.dtype) -> None:
    from quire.kernels.surplus import surplus_

    torch.manual_seed(0)
    logits = (4 * torch.randn(rows, classes, device="cuda")).to(dtype)
    target = torch.randint(classes, (rows,), device="cuda")
    exact = logits.double()
    wanted = exact.softmax(1) - F.one_hot(target, classes)
    losses = surplus_(logits, target, classes, -100)
    torch.testing.assert_close(
        losses.double(), F.cross_entropy(exact, target, reduction="none"), rtol=1e-5, atol=1e-5
    )
    allowed = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    torch.testing.assert_close(logits.double(), wanted, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("kind", ["the first are absent", "the last is largest by far", "all are small"])
def test_sums_that_the_first_numbers_do_not_foretell(kind: str) -> None:
    from quire.kernels.surplus import surplus_

    torch.manual_seed(0)
    logits = torch.randn(3, 5000, device="cuda")
    target = torch.randint(4000, 5000, (3,), device="cuda")
    if kind == "the first are absent":
        logits[:, :3000] = float("-inf")
    elif kind == "the last is largest by far":
        logits[:, -1] = 400.0
    else:
        logits[:, 2048:] -= 300.0
        target = target - 4000
    exact = logits.double()
    wanted = exact.softmax(1) - F.one_hot(target, 5000)
    losses = surplus_(logits, target, 5000, -100)
    torch.testing.assert_close(
        losses.double(), F.cross_entropy(exact, target, reduction="none"), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [10, 4999, 5000])
def test_columns_past_the_classes_and_rows_that_do_not_count(classes: int) -> None:
    from quire.kernels.surplus import surplus_

    torch.manual_seed(0)
    logits = torch.randn(6, 5056, device="cuda")
    logits[:, classes:] = 1000.0
    target = torch.randint(classes, (6,), device="cuda")
    target[2] = -1
    exact = logits[:, :classes].double()
    losses = surplus_(logits, target, classes, -1)
    wanted = F.cross_entropy(exact, target, reduction="none", ignore_index=-1)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-5)
    surplus = exact.softmax(1) - F.one_hot(target.clamp(min=0), classes)
    surplus[2] = 0
    torch.testing.assert_close(logits[:, :classes].double(), surplus, rtol=1e-5, atol=1e-6)
    assert (logits[:, classes:] == 0).all()


def test_classes_that_cannot_be() -> None:
    from quire.kernels.surplus import surplus_

    logits = torch.full((2, 9000), float("-inf"), device="cuda")
    logits[0, 8999], logits[1, 3] = 2.0, -50.0
    losses = surplus_(logits, torch.tensor([8999, 3], device="cuda"), 9000, -100)
    assert losses.tolist() == [0.0, 0.0]
    assert logits.isfinite().all()


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_gradients_of_a_head(reduction: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(37, 24, device="cuda", requires_grad=True)
    weight = torch.randn(101, 24, device="cuda", requires_grad=True)
    target = torch.randint(101, (37,), device="cuda")
    target[::5] = -100
    factor = torch.rand(37, device="cuda") if reduction == "none" else torch.tensor(1.7, device="cuda")
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk=16)
    found = torch.autograd.grad((loss * factor).sum(), (hidden, weight))
    wide = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    plain = F.cross_entropy(wide[0] @ wide[1].T, target, reduction=reduction)
    wanted = torch.autograd.grad((plain * factor.double()).sum(), wide)
    torch.testing.assert_close(loss.double(), plain, rtol=1e-5, atol=1e-5)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_it_is_compiled_without_a_break() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(64, 32, device="cuda", requires_grad=True)
    weight = torch.randn(300, 32, device="cuda", requires_grad=True)
    target = torch.randint(300, (64,), device="cuda")

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden * 2, weight, target, reduction="sum", chunk=32)

    found = torch.compile(loss, fullgraph=True)(hidden, weight)
    wanted = loss(hidden, weight)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(value, (hidden, weight)) for value in (found, wanted)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
