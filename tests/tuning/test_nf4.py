"""NormalFloat4 against published numbers and explicit loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional import nf4
from quire.functional.nf4 import (
    NF4,
    dequantise_nf4,
    dequantise_scales,
    dynamic_float,
    nearest_code,
    nf4_bytes,
    normal_float,
    quantise_nf4,
    quantise_scales,
)

PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
]  # fmt: skip
"""The code book of bitsandbytes."""


def by_hand(values: list[float]) -> list[float]:
    """The round trip of one block of at most 64 numbers, number by number."""
    scale = max(abs(v) for v in values)
    if scale == 0:
        return values
    return [scale * min(PUBLISHED, key=lambda code: abs(code - v / scale)) for v in values]


def unpack(codes: Tensor, count: int) -> list[int]:
    halves = [half for byte in codes.tolist() for half in (byte >> 4, byte & 15)]
    return halves[:count]


def test_the_code_book_is_the_published_one_bit_by_bit() -> None:
    assert torch.equal(normal_float(), torch.tensor(PUBLISHED))


def test_the_code_book_is_quantiles_of_the_normal_distribution() -> None:
    """Φ(code · c) is evenly spaced on either side of ½, with one step more above."""
    delta = (1 / 32 + 1 / 30) / 2
    largest = torch.special.ndtri(torch.tensor(1 - delta, dtype=torch.float64))
    probabilities = torch.special.ndtr(normal_float().double() * largest)
    assert torch.allclose(
        probabilities[:8].diff(), probabilities.new_full((7,), (0.5 - delta) / 7), atol=1e-7
    )
    assert torch.allclose(
        probabilities[7:].diff(), probabilities.new_full((8,), (0.5 - delta) / 8), atol=1e-7
    )


@pytest.mark.parametrize("bits", [2, 3, 5])
def test_other_sizes_of_the_code_book(bits: int) -> None:
    code = normal_float(bits)
    assert len(code) == 2**bits
    assert (code.diff() > 0).all()
    assert (code[0], code[2 ** (bits - 1) - 1], code[-1]) == (-1, 0, 1)


def test_a_code_book_of_one_bit_is_refused() -> None:
    with pytest.raises(InputError, match="at least 2"):
        normal_float(1)


def test_the_dynamic_code_book_in_closed_form() -> None:
    """Decade e has 2^e values (0.1 + 0.9·(i + ½)/2^e)·10^(e − 6) of either sign; 0 and 1 complete 256."""
    values = [0.0, 1.0]
    for e in range(7):
        for i in range(2**e):
            value = (0.1 + 0.9 * (i + 0.5) / 2**e) * 10.0 ** (e - 6)
            values += [value, -value]
    code = dynamic_float()
    assert len(values) == 256
    assert torch.allclose(code, torch.tensor(sorted(values), dtype=torch.float64), rtol=1e-14, atol=0)
    assert code[0].item() == pytest.approx(-0.99296875)


def test_nearest_code_is_nearest() -> None:
    code = normal_float()
    values = torch.linspace(-1.2, 1.2, 3001)
    distances = (values[:, None] - code).abs()
    chosen = nearest_code(values, code)
    assert torch.equal(distances.gather(1, chosen.long()[:, None]).squeeze(1), distances.min(1).values)


def test_two_codes_a_byte_the_first_in_the_upper_half() -> None:
    packed = quantise_nf4(
        torch.tensor([1.0, -1.0, 0.0, 0.7229568362236023, -0.09105003625154495]), double=False
    )
    assert packed.codes.tolist() == [15 << 4 | 0, 7 << 4 | 14, 6 << 4 | 0]
    assert packed.scales.tolist() == [1.0]


@pytest.mark.parametrize("shape", [(1,), (5,), (63,), (64,), (65,), (3, 7, 11), (130, 2), (256, 257)])
def test_round_trip_is_that_of_an_explicit_loop(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape) * torch.logspace(-3, 3, math.prod(shape)).view(shape)
    flat = weight.flatten().tolist()
    expected = [v for i in range(0, len(flat), 64) for v in by_hand(flat[i : i + 64])]
    result = quantise_nf4(weight, double=False).dequantise()
    assert result.shape == weight.shape
    assert torch.allclose(result.flatten(), torch.tensor(expected), rtol=1e-6, atol=0)


def test_scales_are_quantised_as_an_explicit_loop_would() -> None:
    scales = torch.rand(700) * 3 + 0.5
    codes, steps, mean = quantise_scales(scales)
    levels = dynamic_float().tolist()
    assert codes.dtype == torch.uint8
    assert mean.item() == pytest.approx(scales.double().mean().item(), rel=1e-6)
    centred = (scales - mean).tolist()
    expected = []
    for start in range(0, 700, 256):
        group = centred[start : start + 256]
        step = max(map(abs, group))
        assert steps[start // 256].item() == pytest.approx(step)
        expected += [min(levels, key=lambda v: abs(v - c / step)) * step + mean.item() for c in group]
    assert torch.allclose(dequantise_scales(codes, steps, mean), torch.tensor(expected), rtol=1e-5)


def test_bits_per_number_are_those_of_the_paper() -> None:
    """4 + 8/64 + 32/(64·256), and one mean for the tensor."""
    packed = quantise_nf4(torch.randn(1024, 512))
    stored = sum(
        t.numel() * t.element_size() for t in (packed.codes, packed.scales, packed.steps, packed.mean)
    )
    assert packed.nbytes == stored
    assert packed.bits == 4 + 8 / 64 + 32 / (64 * 256) + 32 / (1024 * 512)
    assert round(packed.bits, 3) == 4.127
    assert quantise_nf4(torch.randn(1024, 512), double=False).bits == 4.5


@pytest.mark.parametrize("numel", [0, 1, 2, 63, 64, 65, 16384, 16385, 100_001])
@pytest.mark.parametrize("double", [True, False])
def test_predicted_bytes_are_those_that_are_stored(numel: int, double: bool) -> None:
    assert quantise_nf4(torch.randn(numel), double=double).nbytes == nf4_bytes(numel, double=double)


@pytest.mark.parametrize("double", [True, False])
def test_a_second_round_trip_changes_no_code(double: bool) -> None:
    first = quantise_nf4(torch.randn(300, 70), double=double)
    again = quantise_nf4(first.dequantise(), double=double)
    assert torch.equal(again.codes, first.codes)
    if not double:
        assert torch.equal(again.scales, first.scales)
        assert torch.equal(again.dequantise(), first.dequantise())


def test_the_error_is_bounded_by_half_the_widest_gap() -> None:
    """|w − ŵ| ≤ ½·max gap·scale, and double quantisation adds at most its own error of the scale."""
    weight = torch.randn(4096)
    plain = quantise_nf4(weight, double=False)
    scales = weight.view(-1, 64).abs().amax(1).repeat_interleave(64)
    half_gap = max(b - a for a, b in itertools.pairwise(PUBLISHED)) / 2
    assert ((plain.dequantise() - weight).abs() <= half_gap * scales * (1 + 1e-6)).all()
    packed = quantise_nf4(weight)
    assert packed.steps is not None
    assert packed.mean is not None
    coarse = dequantise_scales(packed.scales, packed.steps, packed.mean).repeat_interleave(64)
    bound = half_gap * scales + (coarse - scales).abs()
    assert ((packed.dequantise() - weight).abs() <= bound * (1 + 1e-6)).all()


def test_it_is_better_on_normal_weights_than_evenly_spaced_codes() -> None:
    weight = torch.randn(512, 64)
    scales = weight.abs().amax(1, keepdim=True)
    even = torch.linspace(-1, 1, 16)
    rounded = even[(weight / scales - even[:, None, None]).abs().argmin(0)] * scales
    error = (quantise_nf4(weight, double=False).dequantise() - weight).square().mean()
    assert error < 0.9 * (rounded - weight).square().mean()


@pytest.mark.parametrize("double", [True, False])
def test_blocks_of_zeros_and_of_one_value(double: bool) -> None:
    weight = torch.cat([torch.zeros(64), torch.full((64,), 2.0), torch.full((64,), -3.0), torch.randn(64)])
    result = quantise_nf4(weight, double=double).dequantise()
    assert torch.equal(result[:64], torch.zeros(64))
    tolerance = 1e-6 if not double else 0.01
    assert torch.allclose(result[64:192], weight[64:192], rtol=tolerance)
    assert torch.equal(quantise_nf4(torch.zeros(130), double=double).dequantise(), torch.zeros(130))


def test_equal_scales_survive_double_quantisation_exactly() -> None:
    weight = torch.full((256, 64), 0.75)
    assert torch.equal(quantise_nf4(weight).dequantise(), weight)


def test_a_scale_never_becomes_negative() -> None:
    """One large block among tiny ones: a tiny scale rounded to below zero would flip its block's signs."""
    weight = torch.randn(256, 64) * 1e-7
    weight[0] *= 1e7
    result = quantise_nf4(weight).dequantise()
    assert ((result == 0) | (result.sign() == weight.sign())).all()


def test_an_empty_tensor() -> None:
    packed = quantise_nf4(torch.empty(0, 5))
    assert packed.dequantise().shape == (0, 5)
    assert packed.mean is not None
    assert packed.mean.item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_types_of_weight_and_result(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 3).to(dtype)
    packed = quantise_nf4(weight)
    expected = quantise_nf4(weight.float()).dequantise()
    assert torch.equal(packed.dequantise(), expected)
    assert torch.equal(packed.dequantise(torch.bfloat16), expected.to(torch.bfloat16))


def test_large_weights_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = quantise_nf4(torch.randn(1000, 37))
    whole = dequantise_nf4(packed)
    monkeypatch.setattr(nf4, "CHUNK", 2**14)
    assert torch.equal(dequantise_nf4(packed), whole)


@pytest.mark.parametrize(
    "bad", [torch.tensor([1.0, math.nan]), torch.tensor([math.inf]), torch.tensor([1, 2])]
)
def test_what_cannot_be_quantised_is_refused(bad: Tensor) -> None:
    with pytest.raises(InputError, match="finite floating-point numbers"):
        quantise_nf4(bad)


def test_unpacked_codes_are_those_of_the_loop() -> None:
    weight = torch.randn(64)
    packed: NF4 = quantise_nf4(weight, double=False)
    scale = weight.abs().max().item()
    expected = [min(range(16), key=lambda i: abs(PUBLISHED[i] - v / scale)) for v in weight.tolist()]
    assert unpack(packed.codes, 64) == expected
