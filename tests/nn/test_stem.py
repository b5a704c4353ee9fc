"""The first convolution by squares of pixels, against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.nn.stem import Stem, folded

DOUBLE = torch.float64


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5, 7, 11])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_folded_is_the_convolution(kernel: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(kernel)
    for padding in range(kernel):
        for sides in ((16, 12), (14, 20)):
            x = torch.randn(2, channels, *sides, generator=generator, dtype=DOUBLE, requires_grad=True)
            weight = torch.randn(
                5, channels, kernel, kernel, generator=generator, dtype=DOUBLE, requires_grad=True
            )
            found = folded(x, weight, padding)
            wanted = functional.conv2d(x, weight, stride=2, padding=padding)
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
            back = torch.randn(wanted.shape, generator=generator, dtype=DOUBLE)
            mine, theirs = (torch.autograd.grad(y, (x, weight), back) for y in (found, wanted))
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def both(sides: tuple[int, int], device: str, **options: object) -> tuple[Stem, nn.Conv2d, Tensor]:
    torch.manual_seed(0)
    mine, theirs = Stem(3, 8, 7, **options), nn.Conv2d(3, 8, 7, **options)  # type: ignore[arg-type]
    theirs.load_state_dict(mine.state_dict())
    return mine.to(device), theirs.to(device), torch.randn(2, 3, *sides, device=device)


def test_on_a_cpu_it_is_the_layer_itself() -> None:
    mine, theirs, x = both((15, 18), "cpu", stride=2, padding=3)
    assert torch.equal(mine(x), theirs(x))
    assert isinstance(mine, nn.Conv2d)


@pytest.mark.gpu
@pytest.mark.parametrize("sides", [(32, 48), (31, 48)])
@pytest.mark.parametrize(
    "options", [{"stride": 2, "padding": 3}, {"stride": 2, "padding": 2, "bias": False}, {"padding": 3}]
)
def test_on_a_gpu_in_half_precision(sides: tuple[int, int], options: dict[str, object]) -> None:
    """Against float64: as near as the type allows, and as near as PyTorch's own."""
    mine, theirs, x = both(sides, "cuda", **options)
    exact = theirs.double()(x.double())
    theirs.float()
    found = {}
    for name, layer in (("mine", mine), ("theirs", theirs)):
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        found[name] = float((out.double() - exact).abs().max()), layer.weight.grad
    assert found["mine"][0] <= 2 * found["theirs"][0] + 1e-3
    torch.testing.assert_close(found["mine"][1], found["theirs"][1], rtol=0.05, atol=0.5)
