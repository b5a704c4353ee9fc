"""The kernels of a mixture's sweep against the formulas in float64, one row and one component at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.functional.mixture_sweeps import Frame, MixtureSweep, frame_of, mixture_sweep
from quire.functional.mixtures import Mixture, Moments, make_mixture
from tests.kernels.pooling import device

pytestmark = [pytest.mark.slow]


def setting(components: int, features: int, rows: int, starts: int = 2) -> tuple[Tensor, Mixture, Frame]:
    """Rows off the origin, mixtures about some of them, and the frame of all."""
    place = device()
    mixing = torch.eye(features, device=place) + 0.3 * torch.randn(features, features, device=place)
    x = torch.randn(rows, features, device=place) @ mixing + 10
    wide = x.double()
    frame = frame_of(wide.mean(0), torch.cov(wide.T, correction=0).reshape(features, features), "full", 1e-6)
    values = torch.randn(starts, components, features, features, device=place, dtype=torch.float64)
    mixture = make_mixture(
        torch.rand(starts, components, device=place, dtype=torch.float64).softmax(-1),
        frame.enter(wide)[torch.randint(rows, (starts, components), device=place)],
        values @ values.mT / features + torch.eye(features, device=place, dtype=torch.float64),
    )
    return x, mixture, frame


def formula(x: Tensor, mixture: Mixture, frame: Frame) -> MixtureSweep:
    inside = frame.enter(x.double())
    apart = inside[:, None, None] - mixture.means
    distance = torch.einsum("nrki,rkij,nrkj->nrk", apart, torch.linalg.inv(mixture.covariances), apart)
    volume = torch.linalg.slogdet(2 * math.pi * mixture.covariances).logabsdet
    logs = mixture.weights.log() - 0.5 * (distance + volume)
    shares = logs.softmax(-1)
    second = torch.einsum("nrk,ni,nj->rkij", shares, inside, inside)
    moments = shares.sum(0), torch.einsum("nrk,ni->rki", shares, inside), second
    return MixtureSweep(logs.logsumexp(-1).sum(0), Moments(*moments), False)


def check(x: Tensor, mixture: Mixture, frame: Frame, tolerance: float = 1e-5) -> None:
    found = mixture_sweep(x, mixture, frame, backend="triton")
    wanted = formula(x, mixture, frame)
    torch.testing.assert_close(found.log_likelihood, wanted.log_likelihood, rtol=1e-6, atol=0)
    for mine, exact in zip(found.moments, wanted.moments, strict=True):
        assert mine.shape == exact.shape
        # First moments may all cancel: in the frame the mean of all rows is 0.
        scale = max(float(exact.abs().max()), float(wanted.moments.counts.max()))
        assert (mine - exact).abs().max() <= tolerance * scale


@pytest.mark.parametrize(
    ("components", "features", "rows"),
    [(5, 3, 300), (3, 1, 1), (17, 9, 129), (64, 32, 200), (2, 33, 130), (128, 6, 77), (1, 64, 300)],
)
def test_awkward_sizes(components: int, features: int, rows: int) -> None:
    check(*setting(components, features, max(rows, features + 2)))


def test_rows_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from quire.kernels import mixture

    x, start, frame = setting(4, 5, 400)
    monkeypatch.setattr(mixture, "LARGEST_LOGS", 2 * 4 * 150)
    check(x, start, frame)
    monkeypatch.setattr(mixture, "TILES", 0)  # what rounding takes away is kept
    check(x, start, frame)


@pytest.mark.parametrize("out", [200.0, 3000.0])
def test_a_row_far_from_all_others(out: float) -> None:
    # 200 and 3000 deviations off: its square does not fit into half precision.
    x, mixture, frame = setting(3, 4, 100)
    x[7] = (out * torch.ones(4, device=x.device, dtype=torch.float64) @ frame.back + frame.shift).float()
    check(x, mixture, frame)


@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_components_of_any_size(size: float) -> None:
    x, mixture, frame = setting(3, 4, 100)
    check(
        x, make_mixture(mixture.weights, mixture.means * min(size, 1), mixture.covariances * size**2), frame
    )


def test_rows_that_are_not_contiguous() -> None:
    x, mixture, frame = setting(3, 6, 64)
    check(x.T.contiguous().T, mixture, frame)
