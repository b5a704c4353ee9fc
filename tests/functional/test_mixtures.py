"""Gaussian mixtures against torch.distributions, explicit loops, closed forms and cases solved by hand."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from quire.errors import InputError
from quire.functional.mixture_sweeps import (
    Frame,
    cancellation,
    frame_of,
    mixture_coefficients,
    mixture_sweep,
    quadratic_features,
)
from quire.functional.mixtures import (
    COVARIANCE_TYPES,
    Mixture,
    Moments,
    akaike_information,
    bayesian_information,
    covariance_shape,
    make_mixture,
    mixture_log_densities,
    mixture_moments,
    mixture_parameter_count,
    mixture_responsibilities,
    mixture_update,
    sample_mixture,
)
from quire.functional.threads import share_rows

STARTS, COMPONENTS, FEATURES, ROWS = 2, 3, 4, 211
kinds = pytest.mark.parametrize("kind", COVARIANCE_TYPES)


def make_rows() -> Tensor:
    """Uneven scales, dependent features, far from the origin."""
    x = torch.randn(ROWS, FEATURES, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.1, 2.0])
    x[:, 1] += 2 * x[:, 0]
    return x + torch.tensor([3.0, -20.0, 1.0, 0.0])


def random_mixture(kind: str, x: Tensor) -> Mixture:
    shape = (STARTS, *covariance_shape(kind, COMPONENTS, FEATURES))
    values = torch.randn(shape, dtype=torch.float64)
    covariances = values @ values.mT + torch.eye(FEATURES) if values.ndim == 4 else values.square() + 0.5
    weights = torch.randn(STARTS, COMPONENTS, dtype=torch.float64).softmax(-1)
    return make_mixture(weights, x[torch.randint(ROWS, (STARTS, COMPONENTS))], covariances)


def matrix(mixture: Mixture, kind: str, start: int, k: int) -> Tensor:
    """The covariance of one component as a matrix, whatever the kind."""
    own = mixture.covariances[start, 0 if kind == "tied" else k]
    return own if own.ndim == 2 else own.expand(FEATURES).diag()


@kinds
def test_log_densities_are_those_of_torch(kind: str) -> None:
    x = make_rows()
    mixture = random_mixture(kind, x)
    logs = mixture_log_densities(x, mixture)
    assert logs.shape == (STARTS, ROWS, COMPONENTS)
    for r in range(STARTS):
        for k in range(COMPONENTS):
            peer = MultivariateNormal(mixture.means[r, k], matrix(mixture, kind, r, k)).log_prob(x)
            torch.testing.assert_close(
                logs[r, :, k], peer + mixture.weights[r, k].log(), rtol=1e-10, atol=1e-9
            )
    share, likelihood = mixture_responsibilities(logs)
    torch.testing.assert_close(share, logs.exp() / logs.exp().sum(-1, keepdim=True), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(likelihood, logs.exp().sum(-1).log(), rtol=1e-9, atol=1e-9)


def updated_by_loops(x: Tensor, share: Tensor, kind: str, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """π, μ and Σ of one start as the textbook writes them, row by row."""
    count, components = share.sum(0), share.shape[1]
    means = torch.stack(
        [sum(share[n, k] * x[n] for n in range(len(x))) / count[k] for k in range(components)]
    )
    scatter = torch.zeros(components, FEATURES, FEATURES, dtype=torch.float64)
    for k in range(components):
        for n in range(len(x)):
            scatter[k] += share[n, k] * torch.outer(x[n] - means[k], x[n] - means[k])
    full = scatter / count[:, None, None]
    diagonal = full.diagonal(dim1=-2, dim2=-1)
    covariances = {
        "full": full + floor * torch.eye(FEATURES),
        "tied": (scatter.sum(0) / len(x) + floor * torch.eye(FEATURES))[None],
        "diag": diagonal + floor,
        "spherical": diagonal.mean(-1, keepdim=True) + floor,
    }
    return count / len(x), means, covariances[kind]


@kinds
@pytest.mark.parametrize("shift", ["zero", "common", "means"])
def test_update_is_the_textbook_s_about_any_shift(kind: str, shift: str) -> None:
    x = make_rows()[:60]
    mixture = random_mixture(kind, x.repeat(4, 1))
    about = {"zero": torch.zeros(FEATURES), "common": x.mean(0), "means": mixture.means}[shift].double()
    share, _ = mixture_responsibilities(mixture_log_densities(x, mixture))
    floor = 0.01 * torch.eye(FEATURES, dtype=torch.float64) if mixture.matrices else 0.01
    new = mixture_update(mixture_moments(x, share, mixture, about), mixture, about, floor)
    assert new.covariances.shape == mixture.covariances.shape
    for r in range(STARTS):
        for got, expected in zip(new[:3], updated_by_loops(x, share[r], kind, 0.01), strict=True):
            torch.testing.assert_close(got[r], expected, rtol=1e-8, atol=1e-8)


def test_moments_add_up_over_batches() -> None:
    x = make_rows()
    mixture = random_mixture("full", x)
    share, _ = mixture_responsibilities(mixture_log_densities(x, mixture))
    whole = mixture_moments(x, share, mixture, x[0])
    parts = [
        mixture_moments(a, b, mixture, x[0]) for a, b in zip(x.split(50), share.split(50, 1), strict=True)
    ]
    for i, total in enumerate(whole):
        torch.testing.assert_close(sum(part[i] for part in parts), total, rtol=1e-12, atol=1e-9)


def test_two_rows_by_hand() -> None:
    """x = 0 and 2, responsibilities (¾, ¼) and (¼, ¾)."""
    x = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    share = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)
    like = make_mixture(torch.ones(2) / 2, torch.zeros(2, 1), torch.ones(2, 1, 1))
    new = mixture_update(mixture_moments(x, share, like, torch.zeros(1)), like, torch.zeros(1))
    torch.testing.assert_close(new.weights, torch.tensor([0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(new.means, torch.tensor([[0.5], [1.5]], dtype=torch.float64))
    # ¾·½² + ¼·1½² = ¾
    torch.testing.assert_close(new.covariances, torch.full((2, 1, 1), 0.75, dtype=torch.float64))
    torch.testing.assert_close(new.factors, torch.full((2, 1, 1), 0.75**-0.5, dtype=torch.float64))


def test_an_empty_component_stays_at_its_shift() -> None:
    means = torch.tensor([[1.0], [5.0]], dtype=torch.float64)
    like = make_mixture(torch.ones(2) / 2, means, torch.ones(2, 1, 1, dtype=torch.float64))
    share = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    new = mixture_update(mixture_moments(x, share, like, like.means), like, like.means, 0.1)
    torch.testing.assert_close(new.means, means)
    torch.testing.assert_close(new.covariances.flatten(), torch.tensor([1.1, 0.1]).double())
    assert 0 < new.weights[1] < 1e-14


def test_a_covariance_that_is_not_positive_definite_is_nan() -> None:
    covariances = torch.stack([torch.eye(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]])]).double()
    mixture = make_mixture(torch.ones(2) / 2, torch.zeros(2, 2), covariances)
    assert mixture.factors[0].isfinite().all()
    assert mixture.factors[1].isnan().all()


@pytest.mark.parametrize(
    ("kind", "free"),
    [("full", 2 + 6 + 3 * 3), ("tied", 2 + 6 + 3), ("diag", 2 + 6 + 6), ("spherical", 2 + 6 + 3)],
)
def test_free_parameters_of_three_components_in_the_plane(kind: str, free: int) -> None:
    assert mixture_parameter_count(kind, 3, 2) == free


def test_information_criteria_by_hand() -> None:
    assert bayesian_information(-100.0, 5, 20) == pytest.approx(5 * math.log(20) + 200)
    assert akaike_information(-100.0, 5) == 210


def test_unknown_covariances() -> None:
    for call in (covariance_shape, mixture_parameter_count):
        with pytest.raises(InputError, match=r"unknown covariance type 'ful'\n.*\n.*did you mean 'full'"):
            call("ful", 2, 2)


@kinds
def test_draws_have_the_mixture_s_moments(kind: str) -> None:
    x = make_rows()
    mixture = random_mixture(kind, x).map(lambda tensor: tensor[0])
    n = 40_000
    rows, component = sample_mixture(mixture, n, torch.Generator().manual_seed(int(torch.randint(2**31, ()))))
    shares = torch.bincount(component, minlength=COMPONENTS) / n
    assert (shares - mixture.weights).abs().max() < 5 * 0.5 / n**0.5
    for k in range(COMPONENTS):
        own = rows[component == k]
        covariance = matrix(Mixture(*(t[None] for t in mixture)), kind, 0, k)
        deviation = covariance.diagonal().sqrt()
        assert ((own.mean(0) - mixture.means[k]) / deviation).abs().max() < 5 / len(own) ** 0.5
        scaled = (torch.cov(own.T) - covariance) / torch.outer(deviation, deviation)
        assert scaled.abs().max() < 6 * 2**0.5 / len(own) ** 0.5


def test_draws_of_several_starts_are_refused() -> None:
    with pytest.raises(InputError, match=r"weights of shape \(2, 3\)\n  expected: .*\n  fix: choose one"):
        sample_mixture(random_mixture("diag", make_rows()), 5)


# -- Sweeps ------------------------------------------------------------------------------------


def whitened(x: Tensor, kind: str, floor: float = 1e-6) -> Frame:
    return frame_of(x.mean(0), torch.cov(x.T, correction=0), kind, floor)


@kinds
def test_a_frame_changes_coordinates_exactly(kind: str) -> None:
    x = make_rows()
    frame, mixture = whitened(x, kind), random_mixture(kind, x)
    inside = frame.put(mixture)
    for got, expected in zip(frame.take(inside), mixture, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        mixture_log_densities(frame.enter(x), inside) + frame.log_determinant(),
        mixture_log_densities(x, mixture), rtol=1e-9, atol=1e-9,
    )  # fmt: skip
    standard = torch.cov(frame.enter(x).T, correction=0)
    if kind in ("full", "tied"):
        torch.testing.assert_close(standard, torch.eye(FEATURES).double(), rtol=0, atol=1e-3)
    elif kind == "diag":
        torch.testing.assert_close(standard.diagonal(), torch.ones(FEATURES).double(), rtol=0, atol=1e-3)
    else:
        assert standard.trace().item() == pytest.approx(FEATURES, rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "diag"])
def test_constant_and_dependent_features_have_a_frame(kind: str) -> None:
    x = make_rows()
    x[:, 2] = 7.0
    x[:, 3] = x[:, 0] - x[:, 1]
    frame = whitened(x, kind, 0.0)
    assert frame.enter(x).isfinite().all()
    back_and_forth = frame.scale @ frame.back if kind == "full" else (frame.scale * frame.back).diag()
    torch.testing.assert_close(back_and_forth, torch.eye(4, dtype=torch.float64))


@kinds
def test_products_are_the_log_densities(kind: str) -> None:
    x = make_rows()
    mixture = random_mixture(kind, x)
    augmented = torch.cat([x.mT, x.new_ones(1, ROWS)])
    logs = (mixture_coefficients(mixture) @ quadratic_features(augmented, mixture)).mT
    expected = mixture_log_densities(x, mixture)
    if kind == "tied":
        common = -0.5 * (x @ mixture.factors[:, 0]).square().sum(-1)
        logs = logs + common[..., None]
    torch.testing.assert_close(logs, expected, rtol=1e-9, atol=1e-7)


@kinds
@pytest.mark.parametrize("size", [1.0, 1e10])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sweep_is_the_update(kind: str, size: float, dtype: torch.dtype) -> None:
    """By products, and about the means."""
    x = make_rows().to(dtype)
    mixture, frame = random_mixture(kind, x.double()), whitened(x.double(), kind)
    inside, origin = frame.put(mixture), torch.zeros(FEATURES, dtype=torch.float64)
    likelihood, moments, about_means = mixture_sweep(x, inside, frame, size)
    assert about_means == (size > 1e9)
    shift = inside.means if about_means else origin
    new = frame.take(mixture_update(moments, inside, shift, frame.floor(0.01)))
    share, each = mixture_responsibilities(mixture_log_densities(x.double(), mixture))
    for r in range(STARTS):
        expected = updated_by_loops(x.double(), share[r], kind, 0.01)
        for got, wanted in zip(new[:3], expected, strict=True):
            torch.testing.assert_close(got[r], wanted, rtol=1e-9, atol=1e-9)
    moved = likelihood + ROWS * frame.log_determinant()
    torch.testing.assert_close(moved, each.sum(-1), rtol=1e-11, atol=1e-9)


@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tiny_clusters_far_apart(kind: str, dtype: torch.dtype) -> None:
    """Clusters of size 1e-3 (in float32) or 1e-7 at distance 1000 or so: each row belongs to one cluster
    alone, so that the update is the mean and the covariance of each cluster, computed apart."""
    size = 1e-7 if dtype == torch.float64 else 1e-3
    places = torch.tensor([[700.0, 0.0], [-200.0, 900.0], [0.0, -800.0]], dtype=torch.float64)
    label = torch.arange(300) % 3
    x = (places[label] + size * torch.randn(300, 2, dtype=torch.float64)).to(dtype)
    frame = whitened(x.double(), kind, 0.0)
    shape = covariance_shape(kind, 3, 2)
    covariances = torch.eye(2).expand(shape) if len(shape) == 3 else torch.ones(shape)
    start = make_mixture(torch.ones(3).double() / 3, places, 4 * size**2 * covariances.double())
    inside = frame.put(start)
    assert cancellation(inside) > 1e10
    _, moments, about_means = mixture_sweep(x, inside, frame)
    assert about_means
    new = frame.take(mixture_update(moments, inside, inside.means))
    own = [x.double()[label == k] - places[k] for k in range(3)]  # exact: the places are near
    full = torch.stack([torch.cov(part.T, correction=0) for part in own])
    diagonal = full.diagonal(dim1=-2, dim2=-1)
    expected = {"full": full, "tied": full.mean(0, keepdim=True), "diag": diagonal,
                "spherical": diagonal.mean(-1, keepdim=True)}[kind]  # fmt: skip
    torch.testing.assert_close(new.covariances / size**2, expected / size**2, rtol=1e-5, atol=1e-5)
    means = torch.stack([part.mean(0) for part in own])
    torch.testing.assert_close((new.means - places) / size, means / size, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new.weights, torch.ones(3).double() / 3)


def test_several_threads_change_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_rows()
    mixture, frame = random_mixture("full", x), whitened(x, "full")
    inside = frame.put(mixture)
    expected = mixture_sweep(x, inside, frame)
    monkeypatch.setattr("quire.functional.mixture_sweeps.ROWS_PER_THREAD", 10)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        likelihood, moments, _ = mixture_sweep(x, inside, frame)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(likelihood, expected[0], rtol=1e-12, atol=0)
    for got, wanted in zip(moments, expected[1], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_rows_are_shared_in_order_and_errors_come_through() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        seen = share_rows(lambda span: (span.start, span.stop, threading.get_ident()), 10, least=3)
        assert [span[:2] for span in seen] == [(0, 4), (4, 8), (8, 10)]
        here = threading.get_ident()
        assert [span[2] == here for span in seen] == [True, False, False]

        def fail(span: slice) -> None:
            if span.start:
                raise ZeroDivisionError("in a thread")

        with pytest.raises(ZeroDivisionError, match="in a thread"):
            share_rows(fail, 10, least=3)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_backends_that_cannot_be_had() -> None:
    x = make_rows()
    frame = whitened(x, "diag")
    inside = frame.put(random_mixture("diag", x))
    with pytest.raises(InputError, match=r"not full with backend='triton'\n.*at most 128 components"):
        mixture_sweep(x, inside, frame, backend="triton")
    with pytest.raises(InputError, match="unknown backend 'cuda'"):
        mixture_sweep(x, inside, frame, backend="cuda")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("components", "features", "rows"), [(5, 3, 1000), (64, 32, 5003), (17, 9, 129), (128, 6, 77)]
)
def test_the_kernel_is_the_plain_sweep(components: int, features: int, rows: int) -> None:
    pytest.importorskip("triton")
    x = torch.randn(rows, features, device="cuda") @ torch.randn(features, features, device="cuda") + 10
    frame = whitened(x.double(), "full")
    values = torch.randn(2, components, features, features, device="cuda", dtype=torch.float64)
    mixture = make_mixture(
        torch.rand(2, components, device="cuda", dtype=torch.float64).softmax(-1),
        frame.enter(x)[torch.randint(rows, (2, components), device="cuda")].double(),
        values @ values.mT / features + torch.eye(features, device="cuda", dtype=torch.float64),
    )
    likelihood, moments, _ = mixture_sweep(x, mixture, frame, backend="triton")
    exact_likelihood, exact, _ = mixture_sweep(x.double(), mixture, frame, backend="torch")
    torch.testing.assert_close(likelihood, exact_likelihood, rtol=1e-6, atol=0)
    for got, wanted in zip(moments, exact, strict=True):
        scale = wanted.abs().amax().item()
        torch.testing.assert_close(got / scale, wanted / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("components", "features"), [(3, 1), (5, 3), (64, 32), (7, 33), (2, 64), (2, 65)])
def test_the_update_on_a_gpu_is_the_plain_one(components: int, features: int) -> None:
    x = torch.randn(500, features, dtype=torch.float64) @ torch.randn(features, features).double()
    unit = torch.eye(features, dtype=torch.float64)
    like = make_mixture(
        torch.ones(2, components).double(), torch.randn(2, components, features).double(),
        unit.expand(2, components, features, features),
    )  # fmt: skip
    share = torch.randn(2, 500, components, dtype=torch.float64).softmax(-1)
    moments = mixture_moments(x, share, like, like.means)
    expected = mixture_update(moments, like, like.means, 0.1 * unit)
    there = Moments(*(tensor.cuda() for tensor in moments))
    got = mixture_update(there, like.map(Tensor.cuda), like.means.cuda(), 0.1 * unit.cuda())
    for mine, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), plain, rtol=1e-8, atol=1e-9)
    flat = there._replace(second=torch.zeros_like(there.second))
    broken = mixture_update(flat, like.map(Tensor.cuda), like.means.cuda(), 0.0)
    assert not broken.factors.isfinite().all(-1).all(-1).any()
