"""The Gaussian-pooling kernels against differences in float64, with every distance in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.attention import masked_softmax
from quire.functional.kernel_pooling import gaussian_pooling, nadaraya_watson
from tests.kernels.pooling import against_double, close, device, one_tile, unseen_are_zero

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    device()
    from quire.kernels import gaussian, gaussian_one

    one_tile(monkeypatch, gaussian._forward, gaussian_one._forward, tile=-1)
    one_tile(monkeypatch, gaussian._backward, tile=1)


def inputs(
    batch: tuple[int, ...], n: int, m: int, dimensions: int, width: int, scale: float = 1.0
) -> list[Tensor]:
    place = device()
    sizes = (*batch, n, dimensions), (*batch, m, dimensions), (*batch, m, width)
    query, key, value = (torch.randn(*size, device=place) for size in sizes)
    return [query * scale, key * scale, value]


def formula(query: Tensor, key: Tensor, value: Tensor, width: Any = 1.0, **options: Any) -> Tensor:
    weights, leave_out = options.pop("weights", None), options.pop("exclude_self", False)
    difference = (query[..., :, None, :] - key[..., None, :, :]) / width
    scores = -0.5 * difference.square().sum(-1)
    if weights is not None:
        scores = scores + weights.log()[..., None, :]
    if leave_out:
        scores = scores.masked_fill(
            torch.eye(len(scores[0]), dtype=torch.bool, device=scores.device), -torch.inf
        )
    return masked_softmax(scores, **options) @ value


def check(given: list[Tensor], options: dict[str, Any], tolerance: float = 5e-6) -> None:
    there = {n: v.to(device()) if isinstance(v, Tensor) else v for n, v in options.items()}
    against_double(
        lambda *t: gaussian_pooling(*t, backend="triton", **there),
        lambda *t: formula(*t, **there),
        given, tolerance, 2 * tolerance,
    )  # fmt: skip


SITUATIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"lengths": torch.tensor([0, 7])},
    {"lengths": torch.tensor([[0, 1, 2, 3, 9, 8, 7, 6, 5], [9, 4, 0, 2, 1, 1, 1, 1, 1]]), "causal": True},
    {"exclude_self": True},
    {"width": 0.3},
]


@pytest.mark.parametrize("options", SITUATIONS, ids=lambda o: "+".join(o) or "open")
def test_situations(options: dict[str, Any]) -> None:
    check(inputs((2,), 9, 9, 3, 2), options)


@pytest.mark.parametrize(
    ("n", "m", "dimensions", "width"),
    [(1, 1, 1, 1), (130, 3, 16, 1), (3, 131, 17, 8), (33, 65, 2, 17), (20, 30, 64, 64)],
)
def test_awkward_sizes(n: int, m: int, dimensions: int, width: int) -> None:
    # Half as wide, so that in 64 dimensions a query still has several neighbours.
    check(inputs((1,), n, m, dimensions, width, 0.5), {})


def test_queries_that_see_no_key_give_zeros_and_no_gradient() -> None:
    unseen_are_zero(gaussian_pooling, inputs((2,), 5, 9, 6, 3))


def test_batches_are_broadcast() -> None:
    query, key, value = inputs((2, 3), 4, 5, 6, 2)
    check([query, key[:, :1], value[:1]], {})


def test_one_query_sees_one_key_alone() -> None:
    query, key, value = inputs((1,), 1, 1, 3, 2)
    assert (gaussian_pooling(query, key, value, exclude_self=True, backend="triton") == 0).all()


@pytest.mark.parametrize("scale", [5.0, 15.0])
def test_neighbours_far_from_the_mean(scale: float) -> None:
    # In float32, −½‖q‖² + q·k − ½‖k‖² would be off by 10⁻⁵ here.
    query, key, value = inputs((1,), 40, 60, 2, 3, scale)
    near = key[:, :40] + 0.3 * query / scale
    check([near, key, value], {})


def test_an_offset_common_to_all() -> None:
    query, key, value = inputs((1,), 20, 30, 3, 2)
    check([query + 300, key + 300, value], {}, 1e-5)


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_values_of_any_size(size: float) -> None:
    query, key, value = inputs((1,), 20, 30, 3, 2)
    check([query, key, value * size], {})


def test_learned_widths_and_weights() -> None:
    query, key, value = inputs((1,), 30, 40, 4, 2)
    place = device()
    found, wanted = [], []
    for shape in ((), (4,)):
        for dtype, results in ((torch.float32, found), (torch.float64, wanted)):
            width = torch.full(shape, 0.7, dtype=dtype, device=place, requires_grad=True)
            weights = torch.linspace(0.1, 2, 40, dtype=dtype, device=place)[None].requires_grad_()
            given = [t.to(dtype).requires_grad_() for t in (query, key, value)]
            run = gaussian_pooling if dtype == torch.float32 else formula
            options: dict[str, Any] = {"backend": "triton"} if dtype == torch.float32 else {}
            out = run(*given, width, weights=weights, **options)
            results.append(out.detach())
            results.extend(torch.autograd.grad(out.square().sum(), (width, weights, *given)))
    for ours, exact in zip(found, wanted, strict=True):
        close(ours, exact, 1e-5)


@pytest.mark.parametrize("options", SITUATIONS, ids=lambda o: "+".join(o) or "open")
def test_a_single_value(options: dict[str, Any]) -> None:
    check(inputs((2,), 9, 9, 3, 1), options)


@pytest.mark.parametrize("scale", [15.0, 3000.0])
def test_a_single_value_of_any_spread(scale: float) -> None:
    # Beyond 64 widths no gradients are to be had, but the values are.
    query, key, value = inputs((1,), 70, 130, 3, 1, scale)
    near = torch.cat([key[:, :60] + 0.3 * query[:, :60] / scale, query[:, 60:]], 1)
    found = gaussian_pooling(near, key, value, backend="triton")
    close(found, formula(near.double(), key.double(), value.double()), 5e-6)


def test_a_single_value_far_from_all_keys() -> None:
    # 2^s of query 3 is below what float32 has; the others are among the keys.
    query, key, value = inputs((2,), 70, 40, 3, 1)
    query[0, 3] += 20
    weights = torch.linspace(0.1, 50, 40, device=query.device)
    found = gaussian_pooling(query, key, value, weights=weights, backend="triton")
    exact = formula(query.double(), key.double(), value.double(), weights=weights.double())
    close(found, exact, 2e-5)
    check([query, key, value], {}, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 4])
def test_half_precision(dtype: torch.dtype, width: int) -> None:
    check([t.to(dtype) for t in inputs((2,), 20, 30, 8, width)], {"lengths": torch.tensor([0, 30])}, 1e-2)


@pytest.mark.parametrize("width", [1, 3])
def test_every_tile_gives_the_same(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    from quire.kernels import gaussian, gaussian_one

    given = [t.requires_grad_() for t in inputs((1,), 140, 150, 5, width)]
    there = gaussian.FORWARD_TILES, gaussian.BACKWARD_TILES, gaussian_one.TILES
    tuners = gaussian._forward, gaussian._backward, gaussian_one._forward
    first: list[Tensor] = []
    for tile in range(max(map(len, there))):
        for tuner, tiles in zip(tuners, there, strict=True):
            constants, warps, stages = tiles[tile % len(tiles)]
            config = type(tuner.configs[0])(constants, num_warps=warps, num_stages=stages)
            monkeypatch.setattr(tuner, "configs", [config])
        out = gaussian_pooling(*given, backend="triton")
        found = [out.detach(), *torch.autograd.grad(out.square().sum(), given)]
        first = first or found
        for one, other in zip(found, first, strict=True):
            close(one, other.double(), 3e-6)


def test_what_the_kernel_does_not_do() -> None:
    query, key, value = inputs((1,), 4, 5, 3, 2)
    with pytest.raises(InputError, match="a mask with backend='triton'"):
        gaussian_pooling(query, key, value, mask=torch.ones(4, 5, dtype=torch.bool), backend="triton")
    with pytest.raises(InputError, match="more than 64 widths"):
        gaussian_pooling(query, key, value, 0.001, backend="triton")
    with pytest.raises(InputError, match="kernel 'boxcar' with backend='triton'"):
        nadaraya_watson(query, key, value, "boxcar", backend="triton")
    with pytest.raises(InputError, match="float64 with backend='triton'"):
        gaussian_pooling(query.double(), key, value, backend="triton")


@pytest.mark.gpu
def test_memory_grows_with_rows_not_with_pairs() -> None:
    def peak(rows: int) -> int:
        given = [t.requires_grad_() for t in inputs((), rows, rows, 16, 1)]
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            gaussian_pooling(*given, backend="triton").sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(8192) <= 2.2 * peak(4096)
    assert peak(8192) < 8192 * 8192 * 4 / 8


@pytest.mark.gpu
def test_auto_takes_the_kernel_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import gaussian

    calls = []
    whole = gaussian.gaussian_pooling
    monkeypatch.setattr(gaussian, "gaussian_pooling", lambda *t: calls.append(1) or whole(*t))
    large = inputs((), 2048, 2048, 3, 2)
    exact = formula(*(t.double() for t in large))
    close(gaussian_pooling(*large), exact, 1e-5)
    assert len(calls) == 1
    close(gaussian_pooling(*large, mask=torch.ones(2048, dtype=torch.bool, device="cuda")), exact, 1e-5)
    wide = formula(*(t.double() for t in large), width=0.01)
    close(gaussian_pooling(*large, width=0.01), wide, 1e-5)  # too wide for the kernel
    gaussian_pooling(*(t[:64] for t in large))
    assert len(calls) == 1
