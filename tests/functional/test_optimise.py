from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional import optimise


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_single_tensors_and_lists_agree() -> None:
    w, g = [torch.randn(3, 2), torch.randn(4)], [torch.randn(3, 2), torch.randn(4)]
    zeros = [torch.zeros_like(v) for v in w]
    together = optimise.adam_step(w, g, zeros, zeros, 1)
    apart = [optimise.adam_step(a, b, z, z, 1) for a, b, z in zip(w, g, zeros, strict=True)]
    for kind in range(3):
        for i in range(2):
            assert torch.equal(together[kind][i], apart[i][kind])


def test_inputs_are_left_alone() -> None:
    w, g, v = vector(1, 2), vector(3, 4), vector(5, 6)
    optimise.momentum_step(w, g, v, 0.1, 0.5)
    optimise.clip_by_norm(g, 0.1)
    optimise.adam_step(w, g, v, v, 1)
    assert (w.tolist(), g.tolist(), v.tolist()) == ([1, 2], [3, 4], [5, 6])


def test_momentum_by_hand() -> None:
    w, v = optimise.momentum_step(vector(1.0), vector(2.0), vector(4.0), 0.1, 0.5)
    assert v.tolist() == [4.0]  # 0.5·4 + 2
    assert w.tolist() == pytest.approx([0.6])


def test_first_step_of_adam_has_length_eta_whatever_the_gradient() -> None:
    for size in (1e-3, 1.0, 1e3):
        w, _, _ = optimise.adam_step(vector(0.0), vector(size), vector(0.0), vector(0.0), 1, 0.01)
        assert w.item() == pytest.approx(-0.01, rel=1e-4)


def test_decay_both_ways_is_one_for_sgd() -> None:
    w, g = vector(2.0, -4.0), vector(1.0, 1.0)
    decoupled = optimise.gradient_descent_step(optimise.decay_weights(w, 0.1, 0.5), g, 0.1)
    penalised = optimise.gradient_descent_step(w, optimise.add_l2_gradient(g, w, 0.5), 0.1)
    assert decoupled.tolist() == pytest.approx([1.8, -3.9])
    assert torch.allclose(decoupled, penalised)


def test_l1_gradient_is_zero_at_zero() -> None:
    got = optimise.add_l1_gradient(vector(1, 1, 1), vector(-3, 0, 5), 0.5)
    assert got.tolist() == [0.5, 1.0, 1.5]


def test_clipping_by_hand() -> None:
    gradients = [vector(3.0), vector(4.0)]  # one vector of length 5
    assert optimise.global_norm(gradients).item() == 5
    clipped = optimise.clip_by_norm(gradients, 1.0)
    assert [g.item() for g in clipped] == pytest.approx([0.6, 0.8])
    assert [g.item() for g in optimise.clip_by_norm(gradients, 5.0)] == [3.0, 4.0]
    assert optimise.clip_by_value(vector(-3, 0.5, 9), 1.0).tolist() == [-1, 0.5, 1]


def test_long_gradients_in_half_precision_keep_their_direction() -> None:
    """Their length is above the largest number of float16, and bfloat16 would round it to three digits."""
    long = torch.tensor([60000.0, -60000.0, 0.0], dtype=torch.float16)
    assert optimise.global_norm(long).item() == pytest.approx(60000 * 2**0.5)
    assert optimise.clip_by_norm(long, 2.0).tolist() == pytest.approx([2**0.5, -(2**0.5), 0.0], rel=2e-3)
    many = [torch.ones(1000, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16)]
    assert optimise.global_norm(many).item() == pytest.approx(1005**0.5, rel=1e-6)


def test_a_zero_gradient_stays_zero() -> None:
    assert optimise.clip_by_norm(torch.zeros(3), 1.0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_types_are_kept(dtype: torch.dtype) -> None:
    w = torch.randn(5).to(dtype)
    results = [
        *optimise.momentum_step(w, w, w, 0.1),
        *optimise.adam_step(w, w, w, w, 3),
        optimise.clip_by_norm(w, 0.1),
        optimise.decay_weights(w, 0.1, 0.1),
        optimise.add_l1_gradient(w, w, 0.1),
    ]
    assert {result.dtype for result in results} == {dtype}


def test_minibatches_cover_each_row_once_in_a_new_order() -> None:
    batches = list(optimise.minibatches(10, 4, torch.Generator().manual_seed(0)))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(torch.cat(batches).tolist()) == list(range(10))
    assert torch.cat(batches).tolist() != list(range(10))
    short = list(optimise.minibatches(10, 4, drop_last=True))
    assert [len(batch) for batch in short] == [4, 4]


def token_loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = rows
    total = nn.functional.cross_entropy(model(x), y, reduction="sum")
    return total, (y != -100).sum()


def test_accumulation_equals_the_full_batch_with_ignored_targets() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(20, 4).double(), torch.randint(3, (20,))
    y[:9] = -100  # the first part of 7 rows has no target at all
    parameters = list(model.parameters())
    full = nn.functional.cross_entropy(model(x), y)
    expected = torch.autograd.grad(full, parameters)
    parts = list(zip(x.split(7), y.split(7), strict=True))
    value, gradients = optimise.accumulate(lambda part: token_loss(model, part), parts, parameters)
    assert value.item() == pytest.approx(full.item(), abs=1e-14)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-14)
    means = [nn.functional.cross_entropy(model(a), b) for a, b in parts[1:]]
    assert abs(torch.stack(means).mean() - full) > 1e-3  # what a mean of means would have given


def test_accumulation_passes_parts_that_do_not_reach_a_parameter() -> None:
    w, unused = vector(2.0).requires_grad_(), vector(1.0).requires_grad_()
    constant = torch.tensor(5.0).double()
    value, (g, none) = optimise.accumulate(
        lambda part: (constant if part is None else (w * part).sum(), 1.0), [vector(3.0), None], [w, unused]
    )
    assert (value.item(), g.item(), none.item()) == (5.5, 1.5, 0.0)


def test_coupled_accumulation_equals_the_full_batch() -> None:
    encode = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, parameters = torch.randn(11, 5).double(), list(encode.parameters())

    def loss(z: Tensor) -> Tensor:
        return torch.cdist(z, z).logsumexp(1).mean()  # every row against every other

    full = loss(encode(x))
    expected = torch.autograd.grad(full, parameters)
    value, gradients = optimise.accumulate_coupled(encode, loss, x.split(4), parameters)
    assert torch.allclose(value, full)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-13)


def test_checkpointing_keeps_inputs_only_and_gradients_the_same() -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(5)])
    x = torch.randn(16, 8, requires_grad=True)

    def by_layer(v: Tensor) -> Tensor:
        for layer in net:
            v = optimise.checkpointed(layer)(v)
        return v

    plain = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    again = torch.autograd.grad(by_layer(x).sum(), [x, *net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert optimise.saved_bytes(by_layer, x) == 5 * x.nbytes
    assert optimise.saved_bytes(net, x) >= 10 * x.nbytes
    assert optimise.saved_bytes(optimise.checkpointed(net), x) == x.nbytes


def test_messages() -> None:
    with pytest.raises(InputError, match=r"momentum 1.0\n  expected: a number in \[0, 1\)"):
        optimise.effective_step(0.1, 1.0)
    with pytest.raises(InputError, match="step 0 of Adam\n  expected: a step >= 1"):
        optimise.adam_step(vector(1), vector(1), vector(0), vector(0), 0)
    with pytest.raises(InputError, match="lists of 2, 1 tensors"):
        optimise.gradient_descent_step([vector(1), vector(2)], [vector(1)], 0.1)
    with pytest.raises(InputError, match="a gradient bound of -1"):
        optimise.clip_by_norm(vector(1), -1)
    with pytest.raises(InputError, match="batches of 0 out of 5 rows"):
        list(optimise.minibatches(5, 0))
    with pytest.raises(InputError, match="no part to accumulate over"):
        optimise.accumulate(lambda part: (part, 1.0), [], [vector(1)])
    w = vector(1).requires_grad_()
    with pytest.raises(InputError, match="a total weight of 0"):
        optimise.accumulate(lambda part: (part.sum(), 0.0), [w], [w])
    with pytest.raises(InputError, match="no part to accumulate over"):
        optimise.accumulate_coupled(lambda part: part, lambda z: z.sum(), [], [vector(1)])
