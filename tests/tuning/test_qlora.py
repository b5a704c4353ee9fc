"""A base in NormalFloat4: products, gradients, types, merging, and a run that learns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional.nf4 import quantise_nf4
from quire.tuning import LoRAConfig, inject, quantise_base
from quire.tuning.stored import Stored
from tests.tuning.layers import Conv1D, overlays, randomise

pytestmark = pytest.mark.slow


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(70, 33), nn.Tanh(), Conv1D(20, 33), nn.LayerNorm(20), nn.Linear(20, 5))


def rounded(model: nn.Module) -> nn.Module:
    """A plain copy whose dense weights have gone through NormalFloat4."""
    plain = copy.deepcopy(model)
    for layer in (plain[0], plain[2], plain[4]):
        layer.weight.data = quantise_nf4(layer.weight).dequantise(layer.weight.dtype)
    return plain


def test_outputs_and_gradients_are_those_of_the_rounded_weights() -> None:
    model = make().double()
    plain = rounded(model)
    done = quantise_base(model)
    assert [each.name for each in done] == ["0.weight", "2.weight", "4.weight"]
    adapters = inject(model, LoRAConfig(rank=3, alpha=2.0))
    others = inject(plain, LoRAConfig(rank=3, alpha=2.0))
    randomise(adapters)
    for mine, other in zip(adapters.parameters(), others.parameters(), strict=True):
        other.data.copy_(mine.data)
    x = torch.randn(4, 6, 70, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    assert torch.allclose(model(x), plain(y), rtol=1e-12)
    model(x).square().sum().backward()
    plain(y).square().sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, y.grad, rtol=1e-10, atol=1e-12)
    for mine, other in zip(adapters.parameters(), others.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_the_error_is_reported_in_numbers() -> None:
    model = make()
    before = model[0].weight.detach().clone()
    first, *_ = quantise_base(model, ("0",))
    error = model[0].weight - before
    assert first.largest == pytest.approx(error.abs().max().item())
    assert first.relative == pytest.approx((error.norm() / before.norm()).item(), rel=1e-5)
    assert 0.05 < first.relative < 0.15
    assert first.bits == 8 * quantise_nf4(before).nbytes / before.numel()


def test_backward_does_not_keep_the_weight() -> None:
    """What autograd saves: the inputs of the thin path, never a tensor as large as a weight in full."""
    model = nn.Linear(256, 256, bias=False)
    quantise_base(model)
    adapters = inject(model, LoRAConfig(rank=2))
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    x = torch.randn(3, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(x)
    assert max(sizes) == 256 * 256 // 2  # the codes
    output.sum().backward()
    assert all(p.grad is not None for p in adapters.parameters())


def test_second_derivatives() -> None:
    model = nn.Linear(8, 3).double()
    quantise_base(model)
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, (x,))
    assert torch.autograd.gradgradcheck(lambda x: model(x).square(), (x,))


def test_computation_follows_the_inputs_and_autocast() -> None:
    model = make()
    quantise_base(model)
    randomise(inject(model, LoRAConfig(rank=2)))
    x = torch.randn(3, 70)
    expected = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(x)
    assert mixed.dtype == torch.bfloat16
    assert torch.allclose(mixed.float(), expected, atol=0.2)
    mixed.float().sum().backward()
    model.bfloat16()
    stored = model[0].tuning["weight"].stored
    assert isinstance(stored, Stored)
    assert (stored.codes.dtype, stored.steps.dtype, stored.mean.dtype) == (
        torch.uint8, torch.float32, torch.float32,
    )  # fmt: skip
    assert model[0].weight.dtype == torch.bfloat16
    half = model(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), expected, atol=0.2)
    model.float()
    assert torch.equal(model[4].tuning["weight"].stored.dequantise(), model[4].tuning["weight"].base(None))


def test_weights_that_cannot_be_stored_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.mix = nn.MultiheadAttention(4, 2)
            self.rnn = nn.GRU(4, 4)
            self.dense = nn.Linear(4, 4)
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight

    twins = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    twins[1].weight = twins[0].weight
    assert [each.name for each in quantise_base(twins)] == ["2.weight"]
    model = Tied()
    assert [each.name for each in quantise_base(model)] == ["dense.weight"]
    assert model.head.weight is model.embed.weight
    with pytest.raises(InputError, match="targets recurrent without a dense layer"):
        quantise_base(model, ("recurrent",))
    with pytest.raises(InputError, match="targets all without a dense layer"):
        quantise_base(model)  # a second time
    other = nn.Linear(3, 3)
    inject(other, LoRAConfig(rank=1))
    with pytest.raises(InputError, match="quantise the base first, then inject"):
        quantise_base(other)


# Merging --------------------------------------------------------------------------------------


def test_merging_requantises_and_reports_its_error() -> None:
    model = make()
    quantise_base(model)
    adapters = inject(model, LoRAConfig(rank=2, alpha=4.0))
    randomise(adapters)
    laid = overlays(model)
    packed = {name: copy.deepcopy(overlay.stored) for name, overlay in laid.items()}
    exact = {name: model.get_submodule(name.removesuffix(".weight")).weight.double() for name in laid}
    x = torch.randn(3, 70)
    before = model(x)
    report = adapters.merge()
    merged = {name: model.get_submodule(name.removesuffix(".weight")).weight.double() for name in laid}
    squares = 0.0
    for name, error in report.errors.items():
        difference = merged[name] - exact[name]
        assert error.largest == pytest.approx(difference.abs().max().item(), rel=1e-4)
        assert error.relative == pytest.approx((difference.norm() / exact[name].norm()).item(), rel=1e-4)
        assert 0.02 < error.relative < 0.2
        squares += difference.square().sum().item()
    assert report.total.squared == pytest.approx(squares, rel=1e-4)
    assert str(report).startswith("3 weights merged: largest error ")
    assert all(overlay.stored is not None and not len(overlay.adapters) for overlay in laid.values())
    assert not torch.equal(model(x), before)
    adapters.unmerge()
    assert torch.equal(model(x), before)
    for name, overlay in laid.items():
        for key, value in packed[name].state_dict().items():
            assert torch.equal(overlay.stored.state_dict()[key], value)


def test_merging_into_plain_weights_has_no_error_but_rounding() -> None:
    model = make()
    quantise_base(model)
    adapters = inject(model, LoRAConfig(rank=2))
    randomise(adapters)
    x = torch.randn(3, 70)
    before = model(x)
    report = adapters.merge(dequantise=True)
    assert report.total.relative < 1e-7
    assert [type(layer) for layer in model] == [nn.Linear, nn.Tanh, Conv1D, nn.LayerNorm, nn.Linear]
    assert torch.allclose(model(x), before, atol=1e-4)
    assert list(model.state_dict()) == list(make().state_dict())
    adapters.unmerge()
    assert torch.equal(model(x), before)
    assert "0.weight" not in model.state_dict()


def test_a_base_in_full_precision_is_quantised_as_it_is_loaded() -> None:
    model = make()
    quantise_base(model)
    adapters = inject(model, LoRAConfig(rank=2))
    other = make()
    adapters.load_base(other.state_dict())
    x = torch.randn(3, 70)
    assert torch.allclose(model(x), rounded(other)(x), atol=1e-6)
    found = adapters.base_state_dict()
    assert found.keys() == other.state_dict().keys()
    assert torch.equal(found["0.weight"], quantise_nf4(other[0].weight).dequantise())


@pytest.mark.slow
def test_it_compiles_into_one_graph() -> None:
    model = nn.Sequential(nn.Linear(70, 33), nn.Tanh(), Conv1D(5, 33))
    quantise_base(model)
    adapters = inject(model, LoRAConfig(rank=2))
    randomise(adapters)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 70, requires_grad=True)
    assert torch.allclose(compiled(x), model(x), atol=1e-6)
    compiled(x).sum().backward()
    mine = [p.grad.clone() for p in adapters.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.allclose(a, p.grad, atol=1e-5) for a, p in zip(mine, adapters.parameters(), strict=True))


def test_training_recovers_what_quantisation_lost() -> None:
    """A teacher, its student in four bits, and adapters that make up for the difference."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    student = copy.deepcopy(teacher)
    quantise_base(student)
    adapters = inject(student, LoRAConfig(rank=8))
    x = torch.randn(512, 64)
    with torch.no_grad():
        target = teacher(x)
    optimiser = torch.optim.Adam(adapters.parameters(), lr=3e-3)
    losses = []
    for _ in range(150):
        loss = (student(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
