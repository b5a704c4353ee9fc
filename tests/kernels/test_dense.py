"""The products of a small dense layer give what float64 gives, forward, backward and once more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.pooling import against_double, device

SHAPES = [(1, 1, 1), (7, 3, 5), (16, 16, 16), (33, 70, 10), (64, 64, 128), (130, 65, 17)]


def inputs(rows: int, features: int, outputs: int, where: str) -> list[Tensor]:
    torch.manual_seed(rows + features)
    shapes = [(rows, features), (outputs, features), (outputs,)]
    return [torch.randn(shape).to(where) for shape in shapes]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_and_its_gradients(shape: tuple[int, int, int]) -> None:
    where = device()
    from quire.kernels.dense import Linear

    against_double(Linear.apply, functional.linear, inputs(*shape, where), 1e-6)


def test_rows_that_lie_apart_and_columns_first() -> None:
    where = device()
    from quire.kernels.dense import Linear

    x, weight, bias = inputs(20, 12, 9, where)
    against_double(Linear.apply, functional.linear, [x[::2], weight.t().contiguous().t(), bias], 1e-6)


def test_a_model_takes_the_kernel_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for long rows, without a bias, in half precision, or where a transform looks on."""
    where = device()
    from quire.functional.small_layers import MOST, SmallLayers
    from quire.kernels.dense import Linear

    taken: list[int] = []
    apply = Linear.apply
    monkeypatch.setattr(Linear, "apply", lambda *args: taken.append(1) or apply(*args))
    x, weight, bias = inputs(6, 5, 4, where)
    with SmallLayers():
        functional.linear(x, weight, bias)
        assert len(taken) == 1
        functional.linear(x, weight)
        functional.linear(x[None], weight, bias)
        functional.linear(x.double(), weight.double(), bias.double())
        functional.linear(torch.ones(MOST + 1, 5, device=where), weight, bias)
        torch.func.vmap(lambda row: functional.linear(row[None], weight, bias))(x)
        torch.func.jvp(lambda rows: functional.linear(rows, weight, bias), (x,), (x,))
        if where == "cuda":
            with torch.autocast("cuda", torch.bfloat16):
                functional.linear(x, weight, bias)
    functional.linear(x, weight, bias)
    assert len(taken) == 1


def test_frozen_inputs_and_weights() -> None:
    where = device()
    from quire.kernels.dense import Linear

    x, weight, bias = inputs(5, 4, 3, where)
    bias.requires_grad_()
    Linear.apply(x, weight, bias).sum().backward()
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 5.0))


def test_what_is_differentiated_twice() -> None:
    """As a gradient penalty is."""
    where = device()
    from quire.kernels.dense import Linear

    def penalty(layer: object, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden = layer(x, weight, bias).tanh()  # type: ignore[operator]
        (gradient,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
        return gradient.square().sum()

    found = [t.requires_grad_() for t in inputs(6, 5, 4, where)]
    wanted = [t.detach().double().requires_grad_() for t in found]
    penalty(Linear.apply, *found).backward()
    penalty(functional.linear, *wanted).backward()
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_value_that_is_not_finite_comes_through() -> None:
    where = device()
    from quire.kernels.dense import Linear

    x, weight, bias = inputs(20, 12, 9, where)
    x[3, 4] = float("nan")
    found = Linear.apply(x, weight, bias)
    assert bool(found[3].isnan().all())
    assert bool(found[[i for i in range(20) if i != 3]].isfinite().all())
