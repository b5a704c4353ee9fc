"""Position layers: what they add, how far they reach, what they keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.errors import InputError
from quire.functional.position import sinusoidal
from quire.nn.position import LearnedPosition, SinusoidalPosition


def test_sinusoidal_adds_the_waves_for_any_length() -> None:
    layer = SinusoidalPosition(8)
    for length in (3, 100, 5):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(layer(x) - x, sinusoidal(length, 8).expand(2, -1, -1), atol=1e-6, rtol=0)
    assert not list(layer.parameters())
    assert layer.state_dict() == {}


@pytest.mark.parametrize("layer", [SinusoidalPosition(6), LearnedPosition(20, 6)])
def test_an_offset_goes_on_where_the_cache_ended(layer: nn.Module) -> None:
    x = torch.randn(2, 9, 6)
    whole = layer(x)
    parts = torch.cat([layer(x[:, :4]), layer(x[:, 4:5], offset=4), layer(x[:, 5:], offset=5)], 1)
    assert torch.equal(parts, whole)
    assert layer(x[:, :0]).shape == (2, 0, 6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_type_of_the_input_is_kept(dtype: torch.dtype) -> None:
    layer = SinusoidalPosition(4)
    layer(torch.zeros(1, 3, 4))
    out = layer(torch.zeros(1, 3, 4, dtype=dtype))
    assert out.dtype == dtype
    # From float64 angles, not from the float32 table that was there before.
    torch.testing.assert_close(out[0], sinusoidal(3, 4, dtype=dtype))


def test_learned_rows_are_an_embedding() -> None:
    layer, peer = LearnedPosition(10, 4), nn.Embedding(10, 4)
    layer.load_state_dict(peer.state_dict())
    x = torch.randn(2, 7, 4)
    out = layer(x)
    torch.testing.assert_close(out, x + peer(torch.arange(7)))
    out.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad[:, 0].tolist() == [2] * 7 + [0] * 3


def test_learned_rows_begin_small() -> None:
    weight = LearnedPosition(200, 100).weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(weight.mean().item()) < 1e-3


def test_messages() -> None:
    layer = LearnedPosition(4, 2)
    with pytest.raises(InputError, match=r"place 5, the last of 3 tokens after 3\n.*places 0 to 3"):
        layer(torch.zeros(1, 3, 2), offset=3)
    with pytest.raises(InputError, match=r"expected: \(…, T, 2\)"):
        layer(torch.zeros(1, 3, 5))
    with pytest.raises(InputError, match="an offset of -1"):
        SinusoidalPosition(2)(torch.zeros(1, 3, 2), offset=-1)
    with pytest.raises(InputError, match="positions of width 3"):
        SinusoidalPosition(3)
