"""Kernel regression as a network: against sums by hand, also of what it leaves out; gradient and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.errors import InputError
from quire.models.nadaraya_watson import NadarayaWatson, NadarayaWatsonConfig

pytestmark = pytest.mark.slow

KERNELS = ("gaussian", "boxcar", "epanechnikov")
WIDTHS = {"gaussian": 0.7, "boxcar": 1.3, "epanechnikov": 1.6}
variants = pytest.mark.parametrize("per_feature", [False, True])
kernels = pytest.mark.parametrize("kernel", KERNELS)


def made(kernel: str, per_feature: bool = False, rows: int = 30, features: int = 3) -> NadarayaWatson:
    config = NadarayaWatsonConfig(features, 2, rows, kernel, per_feature, WIDTHS[kernel])  # type: ignore[arg-type]
    model = NadarayaWatson(config).double()
    with torch.no_grad():
        model.log_width.add_(torch.linspace(-0.2, 0.2, model.log_width.numel()))
    return model


def by_hand(model: NadarayaWatson, query: Tensor, left_out: int | None = None) -> list[float]:
    """The average of the values that one query asks, row by row."""
    shape = {
        "gaussian": lambda u: math.exp(-u * u / 2),
        "boxcar": lambda u: float(u <= 1),
        "epanechnikov": lambda u: max(0.0, 1 - u * u),
    }[model.config.kernel]
    width = model.width.expand(model.config.in_features).tolist()
    total, sums, nearest = 0.0, [0.0] * model.config.out_features, (math.inf, [0.0])
    for n, (key, value) in enumerate(zip(model.keys.tolist(), model.values.tolist(), strict=True)):
        if n == left_out:
            continue
        u = math.sqrt(sum(((q - k) / h) ** 2 for q, k, h in zip(query.tolist(), key, width, strict=True)))
        nearest = min(nearest, (u, value))
        total += shape(u)
        sums = [s + shape(u) * v for s, v in zip(sums, value, strict=True)]
    return [s / total for s in sums] if total else nearest[1]


def all_by_hand(model: NadarayaWatson, queries: Tensor, left_out: Sequence[int | None]) -> Tensor:
    with torch.no_grad():
        rows = [by_hand(model, query, n) for query, n in zip(queries, left_out, strict=True)]
    return torch.tensor(rows, dtype=queries.dtype)


@kernels
@variants
def test_answers_are_weighted_averages(kernel: str, per_feature: bool) -> None:
    model = made(kernel, per_feature)
    queries = 1.5 * torch.randn(20, 3, dtype=torch.float64)  # some out of reach of every row
    torch.testing.assert_close(model(queries), all_by_hand(model, queries, [None] * 20))


@kernels
@variants
def test_a_row_is_answered_by_the_others(kernel: str, per_feature: bool) -> None:
    """Any rows in any order, and queries that are not quite where their rows are."""
    model = made(kernel, per_feature)
    own = torch.randperm(30)[:17]
    queries = model.keys[own] + 0.01 * torch.randn(17, 3, dtype=torch.float64)
    torch.testing.assert_close(model.leave_one_out(queries, own), all_by_hand(model, queries, own.tolist()))


@kernels
def test_equal_rows_vouch_for_each_other_but_not_for_themselves(kernel: str) -> None:
    model = made(kernel, rows=3, features=1)
    model.remember(torch.tensor([[0.0], [0.0], [9.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]]))
    found = model.leave_one_out(model.keys, torch.arange(3))
    wanted = torch.tensor([2.0, 1.0, 1.5 if kernel == "gaussian" else 1.0], dtype=torch.float64)
    torch.testing.assert_close(found[:, 0], wanted)


@pytest.mark.parametrize("kernel", ["gaussian", "epanechnikov"])
@variants
def test_the_gradient_of_the_width_is_that_of_differences(kernel: str, per_feature: bool) -> None:
    model = made(kernel, per_feature)
    own, target = torch.arange(0, 30, 2), torch.randn(15, 2, dtype=torch.float64)

    def loss(found: Tensor) -> Tensor:
        return (found - target).square().sum()

    loss(model.leave_one_out(model.keys[own], own)).backward()
    assert model.log_width.grad is not None
    step = 1e-5
    for i in range(model.log_width.numel()):
        around = []
        for sign in (1, -1):
            with torch.no_grad():
                model.log_width[i] += sign * step
                around.append(loss(all_by_hand(model, model.keys[own], own.tolist())).item())
                model.log_width[i] -= sign * step
        assert model.log_width.grad[i].item() == pytest.approx((around[0] - around[1]) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("features", [1, 3])
def test_a_boxcar_has_a_gradient_of_zero(features: int) -> None:
    model = made("boxcar", features=features)
    model.leave_one_out(model.keys, torch.arange(30)).square().sum().backward()
    assert model.log_width.grad is not None
    assert model.log_width.grad.tolist() == [0.0]


@kernels
def test_far_away_the_nearest_row_answers(kernel: str) -> None:
    torch.manual_seed(0)  # two rows that are equally near share the answer
    model = made(kernel)
    far = 1e3 * torch.randn(5, 3, dtype=torch.float64)
    nearest = torch.cdist(far, model.keys).argmin(1)
    torch.testing.assert_close(model(far), model.values[nearest])
    assert model.leave_one_out(far, nearest).isfinite().all()
    second = torch.cdist(far, model.keys).scatter(1, nearest[:, None], torch.inf).argmin(1)
    torch.testing.assert_close(model.leave_one_out(far, nearest), model.values[second])


@kernels
def test_a_single_row_has_no_others(kernel: str) -> None:
    model = made(kernel, rows=1)
    found = model.leave_one_out(model.keys, torch.zeros(1, dtype=torch.long))
    assert found.tolist() == [[0.0, 0.0]]


@kernels
@variants
def test_an_exported_program_gives_the_same(kernel: str, per_feature: bool) -> None:
    model = made(kernel, per_feature).float()
    queries = torch.cat([torch.randn(6, 3), 50 * torch.randn(2, 3)])
    program = torch.export.export(model, (queries,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    other = torch.cat([queries, model.keys[:3], torch.randn(4, 3)])
    torch.testing.assert_close(program.module()(other), model(other))


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        sizes = [t.untyped_storage().nbytes() // t.element_size() for t in tensors]
        self.numbers = max([self.numbers, *sizes])
        return out


@kernels
def test_a_step_never_holds_a_number_for_each_pair(kernel: str) -> None:
    config = NadarayaWatsonConfig(2, 1, 6000, kernel, width=0.3)  # type: ignore[arg-type]
    model = NadarayaWatson(config)
    own = torch.arange(1500)
    with Largest() as largest:
        model.leave_one_out(model.keys[own], own).square().sum().backward()
        model(model.keys[own])
    assert largest.numbers < 1500 * 6000 / 5
    assert largest.numbers >= 6000


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(InputError, match="unknown kernel 'gausian'"):
        NadarayaWatsonConfig(1, 1, 1, "gausian")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a kernel of width -1\.0"):
        NadarayaWatsonConfig(1, 1, 1, width=-1.0)
    with pytest.raises(InputError, match="rows is 0"):
        NadarayaWatsonConfig(1, 1, 0)
    model = made("gaussian")
    with pytest.raises(InputError, match=r"keys of shape \(29, 3\).*"):
        model.remember(torch.zeros(29, 3), torch.zeros(29, 2))
    with pytest.raises(InputError, match=r"inputs of shape \(4, 2\)"):
        model(torch.zeros(4, 2))
