"""The NormalFloat4 kernel against the format's definition, and a QLoRA layer that goes through it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from quire.errors import InputError
from quire.functional.nf4 import (
    NF4,
    Tables,
    dequantise_nf4,
    dynamic_float,
    make_tables,
    normal_float,
    quantise_nf4,
)
from quire.tuning import LoRAConfig, inject, quantise_base
from tests.kernels.pooling import close, device

pytestmark = [pytest.mark.slow]


def by_definition(packed: NF4) -> Tensor:
    """code[i]·scale number by number, in float32."""
    halves = torch.stack([packed.codes >> 4, packed.codes & 15], 1).flatten()[: packed.numel].cpu()
    scales = packed.scales.cpu()
    if packed.steps is not None and packed.mean is not None:
        steps = packed.steps.cpu().repeat_interleave(256)[: len(scales)]
        levels = dynamic_float().float()[scales.long()]
        scales = (levels * steps + packed.mean.cpu()).clamp(min=0)
    values = normal_float()[halves.long()] * scales.repeat_interleave(64)[: packed.numel]
    return values.view(packed.shape)


def check(packed: NF4, dtype: torch.dtype) -> None:
    found = dequantise_nf4(packed, dtype, backend="triton")
    exact = by_definition(packed)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    if dtype == torch.bfloat16 and not found.is_cuda:
        # Triton's interpreter cuts bfloat16 off instead of rounding.
        assert torch.equal(found.float().view(torch.int32), exact.view(torch.int32) & -65536)
    else:
        assert torch.equal(found.cpu(), exact.to(dtype))


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("shape", [(1,), (63,), (64, 64), (7, 13), (5, 123), (2, 3, 41), (33_001,), (0, 5)])
def test_numbers_are_those_of_the_format(shape: tuple[int, ...], double: bool) -> None:
    weight = torch.randn(shape) * torch.logspace(-6, 4, shape[-1])
    packed = quantise_nf4(weight.to(device()), double=double)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(packed, dtype)


def test_scales_that_rounding_makes_negative_are_zero() -> None:
    weight = torch.ones(256 * 64, device=device()) * 1e-3
    weight[: 64 * 64] = 1.0
    packed = quantise_nf4(weight)
    assert packed.steps is not None
    assert packed.mean is not None
    packed.scales.fill_(0)  # the lowest level, −0.99
    check(packed, torch.float32)
    assert (dequantise_nf4(packed, backend="triton") == 0).all()


def test_parts_of_other_tensors() -> None:
    """Codes that no wide load may take, every second byte, and scales that lie apart."""
    packed = quantise_nf4(torch.randn(70, 65, device=device()))
    assert packed.steps is not None
    shifted = torch.cat([packed.codes[:1], packed.codes])[1:]
    spread = torch.stack([packed.codes, packed.codes], 1)[:, 0]
    scales = torch.stack([packed.scales, packed.scales], 1)[:, 1]
    steps = torch.stack([packed.steps, packed.steps], 1)[:, 1]
    for codes in (shifted, spread):
        check(NF4(codes, scales, steps, packed.mean, packed.shape), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_makes_its_weight_twice_and_keeps_it_never(
    dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, calls, sizes = device(), [], []
    from quire.kernels import nf4

    whole: Any = nf4.dequantise

    def count(*arguments: Any) -> Tensor:
        calls.append(arguments[-1])
        found: Tensor = whole(*arguments)
        return found

    monkeypatch.setattr(nf4, "dequantise", count)
    layer = nn.Linear(70, 130, bias, device=where, dtype=dtype)
    plain = copy.deepcopy(layer)
    quantise_base(layer)
    calls.clear()
    plain.weight.data = layer.weight.detach().clone()
    adapters, others = (inject(each, LoRAConfig(rank=3, alpha=2.0)) for each in (layer, plain))
    for mine, other in zip(adapters.parameters(), others.parameters(), strict=True):
        mine.data.normal_()
        other.data.copy_(mine.data)
    for each in (layer, plain):
        if each.bias is not None:
            each.bias.requires_grad_()
    calls.clear()
    x = torch.randn(2, 9, 140, device=where, dtype=dtype)[..., ::2].requires_grad_()
    y = x.detach().clone().requires_grad_()

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = layer(x)
    wanted = plain(y)
    slope = torch.randn_like(wanted)
    found.backward(slope)
    wanted.backward(slope)
    assert calls == [False, True]
    assert max(sizes) < 130 * 70 * dtype.itemsize
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    close(found, wanted.double(), tolerance)
    assert x.grad is not None
    assert y.grad is not None
    close(x.grad, y.grad.double(), tolerance)
    learned = [
        [*each.parameters(), *([there.bias] if bias else [])]
        for each, there in ((adapters, layer), (others, plain))
    ]
    for mine, other in zip(*learned, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        close(mine.grad, other.grad.double(), tolerance)


def test_torch_func_sees_the_same_gradients() -> None:
    layer = nn.Linear(70, 33).double()
    plain = copy.deepcopy(layer)
    quantise_base(layer)
    plain.weight.data = layer.weight.detach()
    x = torch.randn(4, 70, dtype=torch.float64)
    found, wanted = (torch.func.grad(lambda x, f=f: f(x).square().sum())(x) for f in (layer, plain))
    torch.testing.assert_close(found, wanted)


def test_tensors_without_numbers_have_shapes() -> None:
    packed = quantise_nf4(torch.randn(6, 31, device=device()))
    tables = make_tables(packed.codes.device)
    assert packed.steps is not None
    assert packed.mean is not None
    with FakeTensorMode() as mode:
        parts = [mode.from_tensor(t) for t in (packed.codes, packed.scales, packed.steps, packed.mean)]
        there = Tables(*(mode.from_tensor(t) for t in tables))
        found = dequantise_nf4(NF4(*parts, packed.shape), torch.bfloat16, there, backend="triton")
    assert (found.shape, found.dtype) == ((6, 31), torch.bfloat16)


def test_what_the_kernel_does_not_do() -> None:
    packed = quantise_nf4(torch.randn(6, 31, device=device()))
    with pytest.raises(InputError, match=r"a result of type torch.float64 with backend='triton'"):
        dequantise_nf4(packed, torch.float64, backend="triton")
    assert dequantise_nf4(packed, torch.float64).dtype == torch.float64


@pytest.mark.gpu
def test_the_same_bits_as_the_plain_form() -> None:
    packed = quantise_nf4(torch.randn(1000, 3001, device=device()))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        plain = dequantise_nf4(packed, dtype, backend="torch")
        assert torch.equal(dequantise_nf4(packed, dtype, backend="triton"), plain)


@pytest.mark.gpu
def test_a_compiled_layer_makes_its_weight_twice_too() -> None:
    layer = nn.Linear(2048, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
    quantise_base(layer)
    adapters = inject(layer, LoRAConfig(rank=4))
    x = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).float().sum(), [x, *adapters.parameters()])
    compiled = torch.compile(layer, fullgraph=True)
    compiled(x).float().sum().backward()
    found = torch.autograd.grad(compiled(x).float().sum(), [x, *adapters.parameters()])
    for mine, other in zip(found, wanted, strict=True):
        close(mine.float(), other.double(), 2e-2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = compiled(x)
    assert torch.cuda.memory_allocated() - before < 2048 * 4096  # a byte a number; the weight takes two
    output.sum().backward()
