"""Principal components against NumPy's singular value decomposition and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.utils.extmath import svd_flip
from torch import Tensor

from quire.errors import InputError
from quire.functional import components, scatter
from quire.functional.components import (
    align_signs,
    components_for_share,
    explained_variance_ratio,
    leading_eigenpairs,
    nystrom,
    orthonormal_rows,
    pca_covariance,
    pca_randomised,
    pca_svd,
    project,
    reconstruct,
)

DOUBLE = torch.float64


def with_spectrum(n: int, singular_values: Tensor, *, offset: float = 0.0, seed: int = 0) -> Tensor:
    """Rows whose centred singular values are known."""
    generator = torch.Generator().manual_seed(seed)
    d = len(singular_values)
    left = torch.randn(n, d, generator=generator, dtype=DOUBLE)
    left = torch.linalg.qr(left - left.mean(0))[0]
    right = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=DOUBLE))[0]
    return (left * singular_values.double()) @ right.mT + offset


def by_numpy(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    array = x.double().numpy()
    _, values, axes = np.linalg.svd(array - array.mean(0), full_matrices=False)
    return values, svd_flip(None, axes, u_based_decision=False)[1]


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_covariance_and_svd_are_scikit_learns(k: int, offset: float) -> None:
    x = with_spectrum(400, torch.linspace(30, 3, 10), offset=offset)
    peer = PCA(k, svd_solver="full").fit(x.numpy())
    for found in (pca_covariance(x, k), pca_svd(x, k)):
        np.testing.assert_allclose(found.axes, peer.components_, atol=1e-9)
        np.testing.assert_allclose(found.variances, peer.explained_variance_, rtol=1e-10)
        np.testing.assert_allclose(found.mean, peer.mean_, rtol=1e-12, atol=1e-12)
        ratio = explained_variance_ratio(found.variances, found.total_variance)
        np.testing.assert_allclose(ratio, peer.explained_variance_ratio_, rtol=1e-10)


@pytest.mark.parametrize("smallest", [-3, -6, -10])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_small_singular_values_are_not_lost(smallest: int, offset: float) -> None:
    x = with_spectrum(500, 50 * torch.logspace(0, smallest, 12, dtype=DOUBLE), offset=offset)
    found, (values, axes) = pca_covariance(x, 12), by_numpy(x)
    singular_values = (found.variances * 499).sqrt().numpy()
    # Both can only be right to float64's rounding of the largest (and of the offset).
    absolute = 1e-15 * (values[0] + 40 * offset)
    np.testing.assert_allclose(singular_values, values, rtol=1e-7, atol=absolute)
    weakest = max(absolute / values[-1], 1e-9)
    np.testing.assert_allclose(found.axes, axes, atol=30 * weakest)


@pytest.mark.parametrize("k", [4, 5])
def test_small_singular_values_are_not_lost_among_more_columns_than_are_asked_for(k: int) -> None:
    """The first pass cannot tell the last axes from each other, so the second has to look at all of them."""
    x = with_spectrum(200, torch.logspace(0, -10, 6, dtype=DOUBLE))
    values, axes = by_numpy(x)
    found = pca_covariance(x, k)
    np.testing.assert_allclose((found.variances * 199).sqrt(), values[:k], rtol=1e-5)
    np.testing.assert_allclose(found.axes, axes[:k], atol=1e-5)


def test_two_rows_have_one_direction() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 3.0]])
    for found in (pca_covariance(x, 1), pca_svd(x, 1), pca_randomised(x, 1)):
        assert found.axes[0].tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-6)
        assert found.variances.tolist() == pytest.approx([2.0])  # (1² + 1²) / (2 − 1)
        assert found.total_variance.item() == pytest.approx(2.0)


def test_pairs_within_a_basis() -> None:
    """What a GPU looks for in filtered rows: found where they span the vectors, refused where they do not."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=DOUBLE))[0].mT
    values = torch.tensor([9.0, 4.0, 2.5, 2.0, *[1e-3] * 8], dtype=DOUBLE)
    matrix = (vectors.mT * values) @ vectors
    turn = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=DOUBLE))[0]
    basis = turn @ vectors[[0, 1, 2, 3, 6, 7]]

    def found_in(basis: Tensor, bound: float) -> tuple[Tensor, Tensor] | None:
        products = components.products_in(basis, basis @ matrix)
        return components.pairs_in_basis(basis, basis @ matrix, 3, bound=torch.tensor(bound), **products)

    pairs = found_in(basis, 0.01)
    assert pairs is not None
    torch.testing.assert_close(pairs[0], values[:3])
    torch.testing.assert_close(align_signs(pairs[1]), align_signs(vectors[:3]))
    skewed = orthonormal_rows(basis + 0.1 * torch.randn(6, 12, generator=generator, dtype=DOUBLE))
    assert found_in(skewed, 0.01) is None
    assert found_in(basis, 3.0) is None  # not above the bound


def test_a_large_constant_hides_no_variance() -> None:
    """Of sums about 0, where the trace is 10²⁰ times as large as what varies."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 3, generator=generator, dtype=DOUBLE)
    x[:, 0] = 1e8
    view = scatter.View(torch.zeros(3, dtype=DOUBLE))
    wanted = float((x - x.mean(0)).square().sum())
    assert float(components.spectrum(scatter.moments(x, view), view).square) == pytest.approx(
        wanted, rel=1e-9
    )


def test_one_scatter_alone_would_lose_them() -> None:
    x = with_spectrum(500, 50 * torch.logspace(0, -10, 12, dtype=DOUBLE))
    values = torch.linalg.eigvalsh(torch.cov(x.T) * 499).clamp_min(0).sqrt()
    assert abs(float(values[0] / by_numpy(x)[0][-1]) - 1) > 0.9


@pytest.mark.parametrize(("smallest", "passes"), [(0, 1), (-3, 1), (-10, 2)])
def test_further_passes_are_taken_where_they_are_needed(
    smallest: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def counted(*arguments: object) -> dict[str, Tensor]:
        taken.append(arguments)
        return scatter.moments(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(components, "moments", counted)
    x = with_spectrum(500, torch.logspace(0, smallest, 6, dtype=DOUBLE))
    pca_covariance(x, 6)
    assert len(taken) == passes
    taken.clear()
    pca_covariance(x, 1)
    assert len(taken) == 1


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_first_rows_that_say_nothing_of_the_others(dtype: torch.dtype) -> None:
    """As in a file that is sorted: the shift is wrong, which another pass notices."""
    x = with_spectrum(4000, torch.tensor([60.0, 30, 10]), offset=1.0)
    x[1500:] += 1e5
    x = torch.cat([x, x.sum(1, keepdim=True) + with_spectrum(4000, torch.ones(1, dtype=DOUBLE))], 1).to(dtype)
    found, (values, axes) = pca_covariance(x, 4), by_numpy(x)
    np.testing.assert_allclose((found.variances * 3999).sqrt(), values, rtol=1e-6)
    np.testing.assert_allclose(found.axes, axes, atol=1e-6)


def test_dependent_columns() -> None:
    x = with_spectrum(300, torch.tensor([5.0, 3, 1, 0, 0]), offset=2)
    found = pca_covariance(x, 5)
    values, axes = by_numpy(x)
    np.testing.assert_allclose((found.variances * 299).sqrt(), values, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(found.axes[:3], axes[:3], atol=1e-9)
    np.testing.assert_allclose(found.axes @ found.axes.mT, np.eye(5), atol=1e-12)


def test_float32_rows() -> None:
    for smallest in (-1, -4):
        x = with_spectrum(3000, 50 * torch.logspace(0, smallest, 12)).float()
        found, (values, axes) = pca_covariance(x, 12), by_numpy(x)
        np.testing.assert_allclose((found.variances * 2999).sqrt(), values, rtol=1e-5)
        np.testing.assert_allclose(found.axes, axes, atol=1e-4)


def test_float32_numbers_whose_squares_it_cannot_hold() -> None:
    x = (with_spectrum(300, torch.tensor([3.0, 2, 1])) * 1e25).float()
    np.testing.assert_allclose(pca_covariance(x, 3).axes, by_numpy(x)[1], atol=1e-6)
    assert pca_covariance(torch.full((3, 2), torch.inf), 1).axes.isnan().all()


@pytest.mark.parametrize("shape", [(300, 40), (60, 150)])
def test_randomised_finds_what_stands_out(shape: tuple[int, int]) -> None:
    n, d = shape
    spectrum = torch.cat([torch.linspace(50, 20, 5), torch.full((min(n, d) - 6,), 1.0)])
    short = with_spectrum(max(n, d), spectrum)
    x = short if n > d else short.mT.contiguous()
    found = pca_randomised(x, 5, power_iterations=7, generator=torch.Generator().manual_seed(1))
    values, axes = by_numpy(x)
    np.testing.assert_allclose(found.axes, axes[:5], atol=1e-8)
    np.testing.assert_allclose((found.variances * (len(x) - 1)).sqrt(), values[:5], rtol=1e-9)
    np.testing.assert_allclose(found.total_variance, np.square(values).sum() / (len(x) - 1), rtol=1e-10)


def test_nystrom_is_exact_where_the_basis_holds_the_range() -> None:
    x = with_spectrum(100, torch.tensor([4.0, 2, 1, 0, 0, 0]))
    spread = torch.cov(x.T) * 99
    basis = orthonormal_rows(torch.linalg.eigh(spread)[1].mT[-3:])
    values, axes = nystrom(basis, basis @ spread)
    torch.testing.assert_close(values, torch.tensor([4.0, 2, 1], dtype=DOUBLE))
    np.testing.assert_allclose(align_signs(axes), by_numpy(x)[1][:3], atol=1e-9)


@pytest.mark.parametrize("k", [1, 3, 40, 120])
def test_leading_eigenpairs(k: int) -> None:
    root = torch.randn(120, 120, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    matrix = root @ root.mT
    values, vectors = leading_eigenpairs(matrix, k)
    wanted = torch.linalg.eigvalsh(matrix).flip(0)[:k]
    torch.testing.assert_close(values, wanted)
    torch.testing.assert_close(vectors @ matrix, values[:, None] * vectors, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(vectors @ vectors.mT, torch.eye(k, dtype=DOUBLE))


@pytest.mark.parametrize("matrix", [torch.zeros(150, 150), torch.eye(150), torch.ones(9, 9)])
def test_leading_eigenpairs_of_equal_values(matrix: Tensor) -> None:
    values, vectors = leading_eigenpairs(matrix.double(), 2)
    torch.testing.assert_close(vectors @ vectors.mT, torch.eye(2, dtype=DOUBLE))
    torch.testing.assert_close(vectors @ matrix.double(), values[:, None] * vectors)


def test_signs_are_those_of_scikit_learn() -> None:
    axes = torch.randn(6, 9, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    np.testing.assert_array_equal(align_signs(axes), svd_flip(None, axes.numpy(), u_based_decision=False)[1])


def test_projection_by_hand() -> None:
    """The points (0, 0), (2, 2), (4, 4.0) and (1, 3), (3, 1) have the diagonal as their first axis."""
    x = torch.tensor([[0.0, 0], [2, 2], [4, 4], [1, 3], [3, 1]], dtype=DOUBLE)
    found = pca_covariance(x, 1)
    half = 0.5**0.5
    torch.testing.assert_close(found.mean, torch.tensor([2.0, 2.0], dtype=DOUBLE))
    torch.testing.assert_close(found.axes, torch.tensor([[half, half]], dtype=DOUBLE))
    torch.testing.assert_close(found.variances, torch.tensor([4.0], dtype=DOUBLE))
    scores = project(x, found.mean, found.axes)
    torch.testing.assert_close(scores[:, 0], torch.tensor([-8, 0, 8, 0, 0], dtype=DOUBLE) * half / 2)
    nearest = torch.tensor([[0.0, 0], [2, 2], [4, 4], [2, 2], [2, 2]], dtype=DOUBLE)
    torch.testing.assert_close(reconstruct(scores, found.mean, found.axes), nearest)


def test_share_of_the_variance() -> None:
    variances = torch.tensor([6.0, 3.0, 1.0])
    assert [components_for_share(variances, 10.0, share) for share in (0.5, 0.6, 0.85, 0.95)] == [1, 2, 2, 3]
    assert components_for_share(torch.zeros(2), 0.0, 0.5) == 2
    assert explained_variance_ratio(torch.zeros(2), 0.0).tolist() == [0.0, 0.0]


def test_too_many_components() -> None:
    for function in (pca_covariance, pca_svd, pca_randomised):
        with pytest.raises(
            InputError, match=r"4 components of rows of shape \(9, 3\)\n  expected: rows \(N, D\)"
        ):
            function(torch.ones(9, 3), 4)
