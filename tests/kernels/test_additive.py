"""The additive-attention kernels against the formula in float64, with every tanh in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.functional.attention import masked_softmax
from quire.functional.streaming import additive_attention
from tests.kernels.pooling import against_double, close, device, one_tile, unseen_are_zero

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def few_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    device()
    from quire.kernels import additive

    one_tile(monkeypatch, additive._score, additive._slope)
    monkeypatch.setattr(additive, "BLOCK", 1 << 12)  # several blocks of queries


def formula(options: dict[str, Any]) -> Any:
    def run(query: Tensor, key: Tensor, value: Tensor, vector: Tensor) -> Tensor:
        scores = (query[..., :, None, :] + key[..., None, :, :]).tanh() @ vector
        return masked_softmax(scores, **options) @ value

    return run


def inputs(
    batch: tuple[int, ...], n: int, m: int, hidden: int, width: int, scale: float = 1.0
) -> list[Tensor]:
    place = device()
    sizes = (*batch, n, hidden), (*batch, m, hidden), (*batch, m, width), (hidden,)
    drawn = [torch.randn(*size, device=place) for size in sizes]
    return [drawn[0] * scale, drawn[1] * scale, *drawn[2:]]


def check(given: list[Tensor], options: dict[str, Any], tolerance: float = 5e-6) -> None:
    there = {n: v.to(device()) if isinstance(v, Tensor) else v for n, v in options.items()}
    against_double(
        lambda *t: additive_attention(*t, backend="triton", **there),
        formula(there),
        given,
        tolerance,
        max(tolerance, 1e-5),
    )


SITUATIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"lengths": torch.tensor([0, 7])},
    {"mask": torch.arange(5 * 9).reshape(5, 9) % 3 > 0},
    {"mask": torch.linspace(-1, 1, 18).reshape(2, 1, 9), "causal": True},
]


@pytest.mark.parametrize("options", SITUATIONS, ids=lambda o: "+".join(o) or "open")
def test_masks(options: dict[str, Any]) -> None:
    check(inputs((2,), 5, 9, 6, 3), options)


@pytest.mark.parametrize(
    ("n", "m", "hidden", "width"),
    [(1, 1, 1, 1), (130, 3, 13, 2), (3, 131, 8, 17), (33, 65, 70, 1), (128, 128, 128, 1)],
)
def test_awkward_sizes(n: int, m: int, hidden: int, width: int) -> None:
    check(inputs((1,), n, m, hidden, width), {})


def test_queries_that_see_no_key_give_zeros_and_no_gradient() -> None:
    unseen_are_zero(additive_attention, inputs((2,), 5, 9, 6, 3))


def test_batches_are_broadcast() -> None:
    query, key, value, vector = inputs((2, 3), 4, 5, 6, 2)
    check([query, key[:, :1], value[:1], vector], {})


def test_rows_that_are_not_contiguous() -> None:
    query, key, value, vector = inputs((2,), 6, 6, 6, 6)
    check([query.mT, key[:, ::2].repeat(1, 2, 1).mT, value.mT, vector.flip(0)], {})


@pytest.mark.parametrize("scale", [9.0, 60.0])
def test_inputs_whose_exponentials_overflow(scale: float) -> None:
    check(inputs((1,), 7, 40, 9, 3, scale), {}, 2e-5)


def test_an_offset_between_queries_and_keys() -> None:
    # tanh sees their sum only, but e^{2·80} alone is infinite.
    query, key, value, vector = inputs((1,), 7, 40, 9, 3)
    check([query + 80, key - 80, value, vector], {}, 3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    check([t.to(dtype) for t in inputs((2,), 20, 30, 8, 4)], {"lengths": torch.tensor([0, 30])}, 1e-2)


def test_every_tile_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import additive

    given = [t.requires_grad_() for t in inputs((1,), 40, 66, 70, 3)]
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = formula({})(*wide)
    wanted = [exact.detach(), *torch.autograd.grad(exact.square().sum(), wide)]
    scores, slopes = additive.SCORE_TILES, additive.SLOPE_TILES
    for tile in range(max(len(scores), len(slopes))):
        for tuner, tiles in ((additive._score, scores), (additive._slope, slopes)):
            constants, warps, stages = tiles[tile % len(tiles)]
            config = type(tuner.configs[0])(constants, num_warps=warps, num_stages=stages)
            monkeypatch.setattr(tuner, "configs", [config])
            monkeypatch.setattr(tuner, "cache", {})
        out = additive_attention(*given, backend="triton")
        found = [out.detach(), *torch.autograd.grad(out.square().sum(), given)]
        for one, other in zip(found, wanted, strict=True):
            close(one, other, 5e-6)


def test_only_what_needs_a_gradient_gets_one() -> None:
    query, key, value, vector = inputs((1,), 4, 5, 3, 2)
    for place, needs in enumerate((query, key, value, vector)):
        given = [t.detach() for t in (query, key, value, vector)]
        given[place].requires_grad_()
        (found,) = torch.autograd.grad(
            additive_attention(*given, backend="triton").square().sum(), given[place]
        )
        wide = [t.detach().double() for t in given]
        wide[place].requires_grad_()
        (wanted,) = torch.autograd.grad(formula({})(*wide).square().sum(), wide[place])
        assert needs.shape == found.shape
        close(found, wanted, 1e-5)


@pytest.mark.gpu
def test_extra_memory_is_linear() -> None:
    from quire.kernels import additive

    def peak(size: int) -> int:
        given = [torch.randn(1, size, 64, device="cuda", requires_grad=True) for _ in range(3)]
        vector = torch.randn(64, device="cuda", requires_grad=True)
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            additive_attention(*given, vector, backend="triton").sum().backward()
        return torch.cuda.max_memory_allocated() - before

    # A block of scores and its slopes, then numbers that grow with the rows: 64 wide, about thirty of each.
    blocks = 4 * 4 * max(additive.BLOCK, 128 * 4096)
    assert peak(4096) <= blocks + 30 * 4096 * 64 * 4
    assert peak(2048) < 2048 * 2048 * 64 * 4 / 8


@pytest.mark.gpu
def test_auto_takes_the_kernel_for_large_inputs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import additive

    calls = []
    whole = additive.additive_pooling
    monkeypatch.setattr(additive, "additive_pooling", lambda *t: calls.append(1) or whole(*t))
    additive_attention(*inputs((1,), 8, 8, 8, 8))
    assert not calls
    large = inputs((2,), 256, 256, 64, 8)
    additive_attention(*large)
    assert len(calls) == 1
    additive_attention(*(t.double() for t in large))
    additive_attention(*large, backend="torch")
    assert len(calls) == 1
