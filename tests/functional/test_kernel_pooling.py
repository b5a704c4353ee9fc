"""Nadaraya-Watson in all its forms against direct sums, in fractions where rounding is in question."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.kernel_pooling import (
    KERNELS,
    gaussian_pooling,
    kernel_weights,
    nadaraya_watson,
    nearest_key,
)
from quire.functional.memory import peak_bytes

COMPACT = ["boxcar", "epanechnikov"]


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def kernel(name: str, squared: float) -> float:
    if name == "gaussian":
        return math.exp(-squared / 2)
    return float(squared <= 1) if name == "boxcar" else max(0.0, 1 - squared)


def direct(
    name: str, query: Tensor, key: Tensor, value: Tensor, width: float, factors: list[float] | None = None,
    leave_out: bool = False, empty: str = "nearest",
) -> Tensor:  # fmt: skip
    """Query by query, key by key."""
    rows = []
    for n, q in enumerate(query):
        squared = [float(((q - k) ** 2).sum()) / width**2 for k in key]
        # A factor common to all keys of a query changes nothing, and keeps exp from vanishing.
        others = [m for m in range(len(key)) if not (leave_out and m == n)]
        least = min((squared[m] for m in others), default=0.0) if name == "gaussian" else 0.0
        shares = [factors[m] if factors else 1.0 for m in others]
        weights = [kernel(name, squared[m] - least) * s for m, s in zip(others, shares, strict=True)]
        if sum(weights) > 0:
            rows.append(sum(w * value[m] for w, m in zip(weights, others, strict=True)) / sum(weights))
        elif empty == "zero":
            rows.append(torch.zeros_like(value[0]))
        elif empty == "nearest":
            rows.append(value[min(others, key=squared.__getitem__)])
        else:
            rows.append(sum(s * value[m] for s, m in zip(shares, others, strict=True)) / sum(shares))
    return torch.stack(rows)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dimensions", [1, 2, 5])
@pytest.mark.parametrize("width", [0.05, 0.6, 4.0])
def test_the_direct_sum(name: Any, dimensions: int, width: float) -> None:
    query, key, value = random(13, dimensions), random(17, dimensions), random(17, 2)
    torch.testing.assert_close(
        nadaraya_watson(query, key, value, name, width),
        direct(name, query, key, value, width),
        rtol=1e-10, atol=1e-10,
    )  # fmt: skip
    weights = kernel_weights(query, key, name, width)
    wanted = [[kernel(name, float(((q - k) ** 2).sum()) / width**2) for k in key] for q in query]
    torch.testing.assert_close(weights, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dimensions", [1, 3])
@pytest.mark.parametrize("empty", ["nearest", "mean", "zero"])
def test_leave_one_out_with_weights(name: Any, dimensions: int, empty: Any) -> None:
    key, value, factors = random(15, dimensions), random(15, 2), torch.rand(15, dtype=torch.float64) + 0.1
    key[4] = key[9]  # the other copy still counts
    for width in (0.01, 0.5):
        got = nadaraya_watson(key, key, value, name, width, weights=factors, exclude_self=True, empty=empty)
        wanted = direct(name, key, key, value, width, factors.tolist(), True, empty)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dimensions", [1, 2])
def test_without_a_key_in_reach(dimensions: int) -> None:
    key = torch.tensor([[0.0], [10.0], [30.0]]).expand(3, dimensions).double()
    value = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
    query = torch.tensor([[4.0], [6.0], [-50.0], [99.0]]).expand(4, dimensions).double()
    for name in COMPACT:
        for empty, wanted in (("nearest", [1, 2, 1, 6]), ("mean", [3] * 4), ("zero", [0] * 4)):
            got = nadaraya_watson(query, key, value, name, 1.0, empty=empty)  # type: ignore[arg-type]
            assert got[:, 0].tolist() == wanted
    # Halfway, the first of equals.
    assert nearest_key(torch.full((1, dimensions), 5.0), key).tolist() == [0]
    half = nadaraya_watson(torch.full((1, dimensions), 5.0).double(), key, value, "boxcar", 1.0)
    assert half.tolist() == [[1.0]]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_no_keys_and_no_other_keys(name: Any, dimensions: int) -> None:
    nothing = nadaraya_watson(random(3, dimensions), random(0, dimensions), random(0, 2), name)
    assert nothing.tolist() == [[0, 0]] * 3
    one = random(1, dimensions)
    alone = nadaraya_watson(one, one, random(1, 2), name, exclude_self=True)
    assert alone.tolist() == [[0, 0]]
    assert nadaraya_watson(random(0, dimensions), random(3, dimensions), random(3, 2), name).shape == (0, 2)


@pytest.mark.parametrize("name", COMPACT)
@pytest.mark.parametrize("step", [1.0, 0.1, 1 / 3])
def test_keys_on_the_edge_fall_on_the_side_of_the_direct_sum(name: Any, step: float) -> None:
    places = torch.randint(0, 30, (80,))
    key = (places.double() * step)[:, None]
    query = (torch.arange(-3, 33).double() * step)[:, None]
    value = torch.eye(80, dtype=torch.float64)  # the answer is the weights themselves
    for reach in (1, 2, 5):
        got = nadaraya_watson(query, key, value, name, reach * step, empty="zero")
        weights = kernel_weights(query, key, name, reach * step)
        assert torch.equal(got.sum(-1) > 0, weights.sum(-1) > 0)
        if name == "boxcar":  # where a key on the edge has a weight that can be seen
            assert torch.equal(got > 0, weights > 0)
        wanted = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        # Where every key in reach lies on the edge, Epanechnikov's weights are rounding and nothing else.
        real = (weights.sum(-1) > 1e-9) | (weights.sum(-1) == 0)
        torch.testing.assert_close(got[real], wanted[real], rtol=1e-10, atol=1e-12)
    if step == 1.0 and name == "boxcar":
        counts = [sum(abs(int(p) - q) <= 2 for p in places) for q in range(-3, 33)]
        weights = kernel_weights(query, key, "boxcar", 2.0)
        assert weights.sum(-1).tolist() == counts


@pytest.mark.parametrize("name", COMPACT)
def test_nothing_is_lost_beside_large_values_far_away(name: Any) -> None:
    # Keys a million from zero, a kernel of a thousandth, and huge values to the left of all windows:
    # differences of prefix sums would keep no digit at all.
    key = 1e6 + torch.rand(400, 1, dtype=torch.float64) * 0.05
    key[:50] -= 1.0
    value = random(400, 1)
    value[:50] = 1e14
    query = 1e6 + torch.rand(40, 1, dtype=torch.float64) * 0.05
    width = 1e-3
    got = nadaraya_watson(query, key, value, name, width, empty="zero")
    for q, answer in zip(query[:, 0].tolist(), got[:, 0].tolist(), strict=True):
        top = bottom = scale = Fraction(0)
        for k, v in zip(key[:, 0].tolist(), value[:, 0].tolist(), strict=True):
            squared = (Fraction(q) - Fraction(k)) ** 2 / Fraction(width) ** 2
            weight = max(Fraction(0), 1 - squared) if name == "epanechnikov" else Fraction(int(squared <= 1))
            top, bottom, scale = (
                top + weight * Fraction(v),
                bottom + weight,
                scale + weight * abs(Fraction(v)),
            )
        if bottom > Fraction(1, 1000):  # the edge itself may round to the other side
            assert abs(answer - float(top / bottom)) <= 1e-10 * float(scale / bottom)


def test_far_queries_still_tell_keys_apart() -> None:
    # In float32 the scores are near −10⁶, where they are 0.06 apart; their differences are what counts.
    key = torch.tensor([[0.0], [0.0005]])
    value = torch.tensor([[0.0], [1.0]])
    query = torch.tensor([[1500.0]])
    wanted = 1 / (1 + math.exp(-(1500.0**2 - 1499.9995**2) / 2))
    assert gaussian_pooling(query, key, value).item() == pytest.approx(wanted, rel=1e-5)
    # Neighbours a hundred widths from the origin.
    key, value = torch.rand(50, 3) + 300, torch.randn(50, 1)
    got = gaussian_pooling(key + 0.01, key, value, 0.5)
    wide = (t.double() for t in (key + 0.01, key, value))
    torch.testing.assert_close(got.double(), direct("gaussian", *wide, 0.5), rtol=1e-5, atol=1e-5)


def test_an_offset_common_to_all_changes_nothing() -> None:
    # Squares of 10⁸ would leave no digit of a distance of 1.
    query, key, value = (torch.randint(-9, 10, (12, n)).double() for n in (3, 3, 1))
    for name in KERNELS:
        near = nadaraya_watson(query, key, value, name, 4.0)
        torch.testing.assert_close(nadaraya_watson(query + 1e8, key + 1e8, value, name, 4.0), near)


def test_a_width_for_each_dimension() -> None:
    query, key, value = random(6, 2), random(8, 2), random(8, 1)
    widths = torch.tensor([0.5, 3.0], dtype=torch.float64)
    for name in KERNELS:
        scaled = nadaraya_watson(query / widths, key / widths, value, name, 1.0)
        torch.testing.assert_close(nadaraya_watson(query, key, value, name, widths), scaled)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_batches(name: Any, dimensions: int) -> None:
    query, key, value = random(2, 3, 5, dimensions), random(2, 1, 7, dimensions), random(2, 3, 7, 2)
    got = nadaraya_watson(query, key, value, name, 0.4)
    for a in range(2):
        for b in range(3):
            wanted = nadaraya_watson(query[a, b], key[a, 0], value[a, b], name, 0.4)
            torch.testing.assert_close(got[a, b], wanted)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_gradients(name: Any, dimensions: int) -> None:
    torch.manual_seed(0)
    query, key, value = random(2, 4, dimensions), random(2, 6, dimensions), random(2, 6, 2)
    width = torch.tensor(0.9, dtype=torch.float64)
    factors = torch.rand(2, 6, dtype=torch.float64) + 0.5
    inputs = [t.requires_grad_() for t in (query, key, value, width, factors)]

    def run(q: Tensor, k: Tensor, v: Tensor, h: Tensor, s: Tensor) -> Tensor:
        return nadaraya_watson(q, k, v, name, h, weights=s)

    # An edge that a finite difference crosses would be no fault of the gradient.
    squared = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1) / width.detach() ** 2
    assert (squared - 1).abs().min() > 1e-4
    assert torch.autograd.gradcheck(run, inputs)


def test_masks_reach_the_gaussian() -> None:
    query, key, value = random(2, 4, 3), random(2, 4, 3), random(2, 4, 2)
    got = gaussian_pooling(query, key, value, lengths=torch.tensor([0, 3]), causal=True)
    assert (got[0] == 0).all()
    for n in range(4):
        seen = min(n + 1, 3)
        wanted = direct("gaussian", query[1, n : n + 1], key[1, :seen], value[1, :seen], 1.0)
        torch.testing.assert_close(got[1, n : n + 1], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
def test_types(name: Any, dtype: torch.dtype) -> None:
    for dimensions in (1, 3):
        query, key, value = (random(6, n).to(dtype) for n in (dimensions, dimensions, 2))
        got = nadaraya_watson(query, key, value, name, 0.7)
        assert got.dtype == dtype
        exact = nadaraya_watson(query.double(), key.double(), value.double(), name, 0.7)
        torch.testing.assert_close(got.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_memory_grows_with_rows_not_with_pairs(name: Any) -> None:
    def peak(rows: int) -> int:
        query, key, value = random(rows, 2), random(rows, 2), random(rows, 1)
        return peak_bytes(lambda: nadaraya_watson(query, key, value, name, 0.5))

    small, large = peak(1_500), peak(3_000)
    assert large - small < 1_500 * 1_000
    assert large < 3_000 * 3_000 * 8 / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "gauss"}, "did you mean 'gaussian'"),
        ({"width": 0.0}, "a kernel of width 0.0"),
        ({"width": torch.tensor([1.0, -1.0])}, "expected: a number > 0"),
        ({"weights": torch.tensor([1.0, 0.0])}, "leave keys of weight 0 out"),
        ({"kernel": "boxcar", "empty": "none"}, "no key is in reach 'none'"),
        ({"backend": "triton2"}, "unknown backend"),
        ({"exclude_self": True}, "exclude_self with 3 queries and 2 keys"),
    ],
)
def test_messages(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        nadaraya_watson(random(3, 2), random(2, 2), random(2, 1), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dimensions", [1, 3])
def test_on_the_gpu(name: Any, dimensions: int) -> None:
    inputs = [random(300, n).requires_grad_() for n in (dimensions, dimensions, 2)]
    there = [t.detach().cuda().requires_grad_() for t in inputs]
    got, wanted = (nadaraya_watson(*some, name, 0.3) for some in (there, inputs))
    torch.testing.assert_close(got.cpu(), wanted)
    gradients = (
        torch.autograd.grad(out.square().sum(), some[2]) for out, some in ((got, there), (wanted, inputs))
    )
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
