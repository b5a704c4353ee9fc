"""The loss without logits is the loss with them, in values and gradients, and really holds none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from quire.errors import InputError
from quire.functional.linear_loss import linear_cross_entropy


def example(
    shape: tuple[int, ...] = (3, 7), features: int = 5, classes: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, target with ignored places, bias."""
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    target = torch.randint(0, classes, shape, generator=generator)
    target[torch.rand(shape, generator=generator) < 0.25] = -100
    return normal(*shape, features), normal(classes, features), target, normal(classes)


def with_logits(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    each = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction=reduction)
    return each.view(target.shape) if reduction == "none" else each


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("chunk", [None, 1, 4, 21, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients_are_those_of_all_logits(
    reduction: str, chunk: int | None, biased: bool
) -> None:
    hidden, weight, target, bias = example()
    inputs = (hidden, weight, bias) if biased else (hidden, weight)
    shift = bias if biased else None
    got = linear_cross_entropy(hidden, weight, target, shift, reduction=reduction, chunk=chunk)
    wanted = with_logits(hidden, weight, target, shift, reduction)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    above = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, inputs, above), torch.autograd.grad(wanted, inputs, above), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_what_needs_a_gradient_gets_one(reduction: str) -> None:
    for needed in range(3):
        hidden, weight, target, bias = example()
        inputs = [hidden, weight, bias]
        for place, one in enumerate(inputs):
            one.requires_grad_(place == needed)
        linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, chunk=5).sum().backward()
        found = [one.grad is not None for one in inputs]
        assert found == [place == needed for place in range(3)]
        wanted = torch.autograd.grad(
            with_logits(hidden, weight, target, bias, reduction).sum(), inputs[needed]
        )[0]
        torch.testing.assert_close(inputs[needed].grad, wanted)


def test_backward_can_be_repeated() -> None:
    hidden, weight, target, bias = example()
    loss = linear_cross_entropy(hidden, weight, target, bias, chunk=4)
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor):
                self.numel = max(self.numel, one.numel())
        return made


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_logits_are_never_held(reduction: str) -> None:
    hidden, weight, target, bias = example((64,), 3, 500, torch.float32)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, chunk=4).sum().backward()
    assert seen.numel == 4 * 500  # a chunk of logits, and less than V·D = 1500 otherwise
    with Largest() as seen:
        with_logits(hidden, weight, target, bias, reduction).sum().backward()
    assert seen.numel == 64 * 500


def test_nothing_that_counts_is_zero_without_nan() -> None:
    hidden, weight, target, bias = example()
    ignored = torch.full_like(target, -100)
    for reduction in ("mean", "sum"):
        loss = linear_cross_entropy(hidden, weight, ignored, bias, reduction=reduction)
        assert loss == 0
        for gradient in torch.autograd.grad(loss, (hidden, weight, bias)):
            assert not gradient.any()
    nothing = linear_cross_entropy(hidden[:0], weight, target[:0])
    assert nothing == 0
    assert linear_cross_entropy(hidden[:1, :1], weight, target[:1, :1].clamp(min=0)).isfinite()


def test_what_stands_in_ignored_rows_has_no_effect() -> None:
    hidden, weight, target, _ = example()
    spoilt = hidden.detach().clone()
    spoilt[target == -100] = torch.nan
    spoilt.requires_grad_()
    loss = linear_cross_entropy(spoilt, weight, target)
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, target))
    for gradient in torch.autograd.grad(loss, (spoilt, weight)):
        assert gradient.isfinite().all()


def test_another_ignored_index() -> None:
    hidden, weight, target, _ = example()
    target = target.clamp(min=0)
    wanted = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), target.flatten(), ignore_index=0)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, target, ignore_index=0), wanted)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, target, _ = example(dtype=torch.float32)
    loss = linear_cross_entropy(hidden * 1e4, weight, target)
    torch.testing.assert_close(loss, with_logits(hidden * 1e4, weight, target, None, "mean"))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, (hidden, weight)))


# Half precision -------------------------------------------------------------------------------


def test_half_precision_adds_up_in_full() -> None:
    """The gradient to the weight is a sum over many chunks: bfloat16 would lose the small ones."""
    hidden, weight, target, bias = example((4096,), 8, 6, torch.bfloat16)
    inputs = (hidden, weight, bias)
    loss = linear_cross_entropy(hidden, weight, target, bias, reduction="sum", chunk=4)
    assert loss.dtype == torch.float32
    exact = [one.detach().double().requires_grad_() for one in inputs]
    wanted = with_logits(exact[0], exact[1], target, exact[2], "sum")
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-3, atol=0)
    for a, b in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(wanted, exact), strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() < 0.01 * b.norm()


def test_autocast_multiplies_in_half_and_keeps_the_types_of_parameters() -> None:
    hidden, weight, target, bias = example(dtype=torch.float32)
    inputs = (hidden, weight, bias)
    wanted = torch.autograd.grad(with_logits(hidden, weight, target, bias, "mean"), inputs)
    for reduction in ("mean", "none"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, chunk=4)
        assert loss.dtype == torch.float32
        loss = loss if reduction == "mean" else loss.sum() / (target != -100).sum()
        for a, b in zip(torch.autograd.grad(loss, inputs), wanted, strict=True):
            assert a.dtype == torch.float32
            assert 0 < (a - b).norm() < 0.02 * b.norm()


@pytest.mark.slow
def test_it_can_be_compiled_without_a_break() -> None:
    hidden, weight, target, bias = example()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    got, wanted = (
        function(hidden, weight, target, bias, chunk=6) for function in (compiled, linear_cross_entropy)
    )
    torch.testing.assert_close(got, wanted)
    inputs = (hidden, weight, bias)
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(a, b)


# Mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda h, w, t, b: (h[..., :4], w, t, b), "(3, 7, 4), (11, 5), (11,)"),
        (lambda h, w, t, b: (h, w, t, b[:3]), "(3,)"),
        (lambda h, w, t, b: (h, w, t[:2], b), "one class for each row"),
        (lambda h, w, t, b: (h, w, t.double(), b), "class indices"),
        (lambda h, w, t, b: (h, w, t.clamp(min=11), b), "class 11 in the target"),
        (lambda h, w, t, b: (h, w, t.clamp(max=-1, min=-2), b), "class -2 in the target"),
    ],
)
def test_wrong_inputs_say_so(change: Any, text: str) -> None:
    hidden, weight, target, bias = change(*example())
    with pytest.raises(InputError) as caught:
        linear_cross_entropy(hidden, weight, target, bias)
    assert text in str(caught.value)
    assert "expected:" in str(caught.value)


def test_wrong_options_say_so() -> None:
    hidden, weight, target, _ = example()
    with pytest.raises(InputError, match="chunk is 0"):
        linear_cross_entropy(hidden, weight, target, chunk=0)
    with pytest.raises(InputError, match="did you mean 'mean'"):
        linear_cross_entropy(hidden, weight, target, reduction="meen")


@pytest.mark.gpu
def test_the_gpu_gives_the_same() -> None:
    hidden, weight, target, bias = example()
    wanted = linear_cross_entropy(hidden, weight, target, bias, chunk=4)
    moved = [one.detach().cuda().requires_grad_() for one in (hidden, weight, bias)]
    got = linear_cross_entropy(moved[0], moved[1], target.cuda(), moved[2], chunk=4)
    torch.testing.assert_close(got.cpu(), wanted)
    expected = torch.autograd.grad(wanted, (hidden, weight, bias))
    for a, b in zip(torch.autograd.grad(got, moved), expected, strict=True):
        torch.testing.assert_close(a.cpu(), b)
