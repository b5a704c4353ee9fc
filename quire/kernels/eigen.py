"""A Triton kernel of subspace iteration: the plane of the leading eigenvectors of a small symmetric matrix.

A symmetric and positive semidefinite, D × D; Q of L orthonormal rows; b a bound; T_m Chebyshev's polynomials.

    Q ← orthonormal rows of Ω A, Ω random;     a few times  Q ← orthonormal rows of Q T_m(2A/b − 1)

T_m stays within ±1 for eigenvalues up to b and grows beyond, the faster the farther: b is the smallest of the
qᵀAq. What counts is how far the wanted eigenvalues lie above λ_{L+1} (Rutishauser, "Simultaneous iteration
method for symmetric matrices", 1970). m is as large as rounding allows: the largest eigenvector grows by up
to 10¹², from which Gram and Schmidt's method still tells the others.

All of it is one program in float64, since its steps wait for each other: for D 256, L 32 and 17 products
36·10⁶ multiplications, 0.15 ms at 128 a cycle, beside as many readings of A from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STAGES, DEGREE = 3, 5
CHUNK, WARPS, BUFFERS = 32, 8, 3


@triton.jit
def _orthonormal(y, i, lines):  # type: ignore[no-untyped-def]
    """Gram and Schmidt's method: each row is taken off all that follow, then all are given length 1."""
    for j in range(lines):
        row = tl.sum(tl.where((i == j)[:, None], y, 0.0), 0)
        product = tl.sum(y * row[None, :], 1)
        square = tl.sum(row * row, 0)
        inverse = tl.where(square > 0.0, 1.0 / square, 0.0)
        y -= tl.where(i > j, product * inverse, 0.0)[:, None] * row[None, :]
    square = tl.sum(y * y, 1)
    return y * tl.where(square > 0.0, 1.0 / tl.sqrt(square), 0.0)[:, None]


@triton.jit
def _times(y, work_ptr, matrix_ptr, i, d, size, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """y A; parts of y are read back from memory, as a program cannot take registers apart."""
    tl.debug_barrier()
    tl.store(work_ptr + i[:, None] * y.shape[1] + d[None, :], y)
    tl.debug_barrier()
    result = tl.zeros(y.shape, tl.float64)
    c = tl.arange(0, CHUNK)
    for first in range(0, size, CHUNK):
        left = tl.load(work_ptr + i[:, None] * y.shape[1] + (first + c)[None, :])
        here = (first + c < size)[:, None] & (d < size)[None, :]
        right = tl.load(matrix_ptr + (first + c)[:, None] * size + d[None, :], mask=here, other=0.0)
        result = tl.dot(left, right, result, out_dtype=tl.float64)
    return result


@triton.jit
def _filter(  # type: ignore[no-untyped-def]
    matrix_ptr, work_ptr, basis_ptr, image_ptr, bound_ptr, size, lines, stages, degree,
    LINES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """basis ← Q, image ← Q A, bound ← the last b."""
    i, d = tl.arange(0, LINES), tl.arange(0, WIDTH)
    inside = (i < lines)[:, None] & (d < size)[None, :]
    y = tl.where(inside, tl.randn(0, i[:, None] * WIDTH + d[None, :]).to(tl.float64), 0.0)
    y = _orthonormal(_times(y, work_ptr, matrix_ptr, i, d, size, CHUNK), i, lines)
    bound = tl.full((), 0.0, tl.float64)
    for _ in range(stages):
        image = _times(y, work_ptr, matrix_ptr, i, d, size, CHUNK)
        values = tl.sum(image * y, 1)
        top = tl.max(values, 0)
        bound = tl.maximum(tl.min(tl.where(i < lines, values, top), 0), 1e-9 * top)
        growth = 2.0 * (2.0 * top / bound - 1.0)
        before = y
        y = image * (2.0 / bound) - y
        reached = growth * growth
        for _ in range(1, degree):
            if reached <= 2e12:
                image = _times(y, work_ptr, matrix_ptr, i, d, size, CHUNK)
                following = image * (4.0 / bound) - 2.0 * y - before
                before = y
                y = following
            reached *= growth
        y = _orthonormal(y, i, lines)
    image = _times(y, work_ptr, matrix_ptr, i, d, size, CHUNK)
    place = i[:, None] * size + d[None, :]
    tl.store(basis_ptr + place, y, mask=inside)
    tl.store(image_ptr + place, image, mask=inside)
    tl.store(bound_ptr, bound)


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    basis_ptr, image_ptr, turn_ptr, vectors_ptr, rest_ptr, size, lines, WIDTH: tl.constexpr
):
    """A row of vectors ← Σ_l turn_l q_l = v, rest ← ‖Av − λv‖; λ stands behind a row of turn."""
    row, d = tl.program_id(0), tl.arange(0, WIDTH)
    vector, image = tl.zeros((WIDTH,), tl.float64), tl.zeros((WIDTH,), tl.float64)
    turn_ptr += row * (lines + 1)
    for line in range(lines):
        share = tl.load(turn_ptr + line)
        vector += share * tl.load(basis_ptr + line * size + d, mask=d < size, other=0.0)
        image += share * tl.load(image_ptr + line * size + d, mask=d < size, other=0.0)
    apart = image - tl.load(turn_ptr + lines) * vector
    tl.store(vectors_ptr + row * size + d, vector, mask=d < size)
    tl.store(rest_ptr + row, tl.sqrt(tl.sum(apart * apart, 0)))


def turned(basis: Tensor, image: Tensor, turn: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors v = turn Q (K, D) and ‖Av − λv‖ (K,), from `turn` (K, L) and λ (K,) on the host."""
    (lines, size), rows = basis.shape, len(turn)
    there = torch.cat([turn, values[:, None]], 1).to(basis.device)
    vectors, rest = basis.new_empty(rows, size), basis.new_empty(rows)
    width = max(triton.next_power_of_2(size), 16)
    _turned[(rows,)](basis, image, there, vectors, rest, size, lines, WIDTH=width, num_warps=2)
    return vectors, rest


def filtered(matrix: Tensor, lines: int) -> dict[str, Tensor]:
    """ "basis" Q (L, D), "image" Q A (L, D) and "bound" b of a symmetric A (D, D) in float64."""
    size = len(matrix)
    height, width = max(triton.next_power_of_2(lines), 16), max(triton.next_power_of_2(size), 16)
    work = matrix.new_empty(height, width)
    basis, image = matrix.new_empty(2, lines, size).unbind(0)
    bound = matrix.new_empty(())
    _filter[(1,)](
        matrix.contiguous(), work, basis, image, bound, size, lines, STAGES, DEGREE,
        LINES=height, WIDTH=width, CHUNK=CHUNK, num_warps=WARPS, num_stages=BUFFERS,
    )  # fmt: skip
    return {"basis": basis, "image": image, "bound": bound}
