"""The loop of a mixture's sweep in C++, against PyTorch's operations and against densities written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.functional.mixture_chunks import DIAG, FULL, SPHERICAL, TIED, sweep_chunks, sweep_on_host
from quire.functional.mixture_sweeps import frame_of, mixture_sweep
from quire.functional.mixtures import make_mixture
from tests.kernels.widths import WIDTHS, limited

SHAPES = [(1, 1, 1, 1), (2, 3, 1, 50), (5, 7, 2, 1001), (33, 17, 3, 199), (12, 40, 1, 500), (3, 8, 1, 16)]
"""Features, components, starts, rows."""


def terms(kind: int, features: int) -> int:
    full = (features + 1) * (features + 2) // 2
    return {FULL: full, DIAG: 2 * features + 1, SPHERICAL: features + 2, TIED: features + 1}[kind]


def problem(
    kind: int, features: int, components: int, starts: int, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    generator = torch.Generator().manual_seed(features)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, shift = normal(rows, features).to(dtype), 0.1 * normal(features)
    scale = normal(features, features).triu() * features**-0.5 if kind in (FULL, TIED) else normal(features)
    if kind == SPHERICAL:
        scale = scale[:1]
    return x, shift, scale, 0.3 * normal(starts * components, terms(kind, features)), starts, kind


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [FULL, DIAG, SPHERICAL, TIED])
def test_a_sweep_is_that_of_pytorch(
    kind: int, shape: tuple[int, int, int, int], dtype: torch.dtype, width: str
) -> None:
    given = problem(kind, *shape, dtype)
    wanted = sweep_chunks(*given, 48)
    with limited(width):
        found = sweep_on_host(*given)
    for ours, theirs in zip(found, wanted, strict=True):
        scale = float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12 * scale)


@pytest.mark.parametrize("order", ["columns first", "every other", "not aligned", "none"])
def test_rows_that_lie_otherwise(order: str) -> None:
    x, *rest = problem(FULL, 4, 3, 1, 101, torch.float64)
    ways = {
        "columns first": x.T.contiguous().T,
        "every other": torch.stack([x, -x], 2).flatten(1)[:, ::2],
        "not aligned": torch.cat([x.new_zeros(1), x.flatten()])[1:].view(101, 4),
        "none": x[:0],
    }
    with limited("plain"):
        found = sweep_on_host(ways[order], *rest)
    for ours, theirs in zip(found, sweep_chunks(ways[order], *rest, 48), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", WIDTHS)
def test_components_far_off_and_without_weight(width: str) -> None:
    """Their share is nothing, or nearly; a logarithm of minus infinity is one of them."""
    x, shift, scale, theta, starts, kind = problem(FULL, 3, 4, 1, 77, torch.float64)
    theta[1, -1], theta[2, -1] = -math.inf, -5000.0
    with limited(width):
        likelihood, sums, _ = sweep_on_host(x, shift, scale, theta, starts, kind)
    wanted = sweep_chunks(x, shift, scale, theta, starts, kind, 48)
    torch.testing.assert_close(likelihood, wanted[0], rtol=1e-13, atol=0)
    torch.testing.assert_close(sums, wanted[1], rtol=1e-12, atol=1e-12)
    assert sums[1:3].abs().max() < 1e-250


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_heard_of(value: float, width: str) -> None:
    x, *rest = problem(FULL, 3, 4, 1, 77, torch.float64)
    x[70, 1] = value
    with limited(width):
        assert not sweep_on_host(x, *rest)[0].isfinite().any()


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_likelihood_is_that_of_distributions_written_out(backend: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 3, dtype=torch.float64)
    means, roots = torch.randn(2, 3).double(), torch.randn(2, 3, 3).double()
    covariances = roots @ roots.mT + torch.eye(3)
    weights = torch.tensor([0.3, 0.7]).double()
    each = torch.distributions.MultivariateNormal(means, covariances).log_prob(x[:, None])
    wanted = (each + weights.log()).logsumexp(1).sum()
    frame = frame_of(x.mean(0), x.T.cov(), "full")
    mixture = frame.put(make_mixture(weights, means, covariances))
    found = mixture_sweep(x, mixture, frame, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(
        found.log_likelihood + len(x) * frame.log_determinant(), wanted, rtol=1e-12, atol=0
    )
