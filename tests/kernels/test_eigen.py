"""Leading eigenpairs from a filtered basis against a dense eigenproblem."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.functional.components import filtered, pairs_in_basis, products_in
from tests.kernels.pooling import device

DOUBLE = torch.float64


def pairs(basis: Tensor, image: Tensor, bound: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    return pairs_in_basis(basis, image, k, bound=bound, **products_in(basis, image))


def with_eigenvalues(values: Tensor) -> Tensor:
    drawn = torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    vectors = torch.linalg.qr(drawn)[0]
    matrix = (vectors * values) @ vectors.mT
    return (matrix + matrix.mT) / 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["harmonic", "slow", "squares", "falling fast", "low rank"])
def test_what_is_found_is_what_there_is(case: str) -> None:
    where = device()
    from quire.kernels.eigen import filtered as kernel

    d = torch.arange(80, dtype=DOUBLE)
    values = {
        "harmonic": 1 / (1 + d),
        "slow": (1 + d) ** -0.4,
        "squares": 1e6 / (1 + d) ** 2,
        "falling fast": 0.7**d,
        "low rank": torch.where(d < 20, 3 - d / 10, 0.0),
    }[case]
    matrix = with_eigenvalues(values)
    parts = {name: part.cpu() for name, part in kernel(matrix.to(where), 24).items()}
    torch.testing.assert_close(
        parts["basis"] @ matrix, parts["image"], rtol=1e-9, atol=1e-9 * values[0].item()
    )
    found = pairs(parts["basis"], parts["image"], parts["bound"], 8)
    assert found is not None
    torch.testing.assert_close(found[0], values[:8], rtol=1e-11, atol=0)
    torch.testing.assert_close(found[1] @ found[1].mT, torch.eye(8, dtype=DOUBLE), rtol=0, atol=1e-11)
    residual = (found[1] @ matrix - found[0][:, None] * found[1]).norm(dim=1)
    assert bool((residual <= 2.0**-22 * found[0]).all())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["alike", "none", "not a number"])
def test_what_is_not_found_is_not_given(case: str) -> None:
    where = device()
    from quire.kernels.eigen import filtered as kernel

    matrix = with_eigenvalues(torch.linspace(1.1, 0.9, 80, dtype=DOUBLE))
    if case == "none":
        matrix = torch.zeros_like(matrix)
    elif case == "not a number":
        matrix[3, 4] = torch.nan
    parts = {name: part.cpu() for name, part in kernel(matrix.to(where), 24).items()}
    assert pairs(parts["basis"], parts["image"], parts["bound"], 8) is None


def test_a_basis_that_misses_a_direction() -> None:
    """Half of the vector of the third eigenvalue is outside; the first two are inside."""
    values = torch.tensor([5.0, 4, 3, 2, 1, 0.5], dtype=DOUBLE)
    matrix = torch.diag(values)
    basis = torch.eye(6, dtype=DOUBLE)[:4]
    basis[2, [2, 4]] = 0.5**0.5
    bound = torch.tensor(0.1, dtype=DOUBLE)
    assert pairs(basis, basis @ matrix, bound, 3) is None
    found = pairs(basis, basis @ matrix, bound, 2)
    assert found is not None
    assert found[0].tolist() == [5, 4]
    assert pairs(basis, basis @ matrix, torch.tensor(4.5, dtype=DOUBLE), 2) is None
    askew = basis.clone()
    askew[0, 1] = 0.01
    assert pairs(askew, askew @ matrix, bound, 2) is None


def test_only_small_matrices_on_a_gpu_are_filtered() -> None:
    assert filtered(torch.eye(100, dtype=DOUBLE), 8) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("lines", "size", "k"), [(5, 7, 3), (24, 80, 8), (32, 256, 16), (3, 1, 1)])
def test_vectors_turned_in_one_kernel(lines: int, size: int, k: int) -> None:
    """Against the products themselves, for any numbers."""
    where = device()
    from quire.kernels.eigen import turned

    generator = torch.Generator().manual_seed(size)
    basis, image = torch.randn(2, lines, size, generator=generator, dtype=DOUBLE)
    turn, values = torch.randn(k, lines, generator=generator, dtype=DOUBLE), torch.arange(1.0, k + 1).double()
    vectors, rest = turned(basis.to(where), image.to(where), turn, values)
    exact = turn @ basis
    largest = exact.gather(1, exact.abs().argmax(1, keepdim=True))
    torch.testing.assert_close(vectors.cpu(), exact * largest.sign(), rtol=1e-12, atol=1e-12)
    wanted = (turn @ image - values.diag() @ turn @ basis).norm(dim=1)
    torch.testing.assert_close(rest.cpu(), wanted, rtol=1e-12, atol=1e-12)
