"""A Triton kernel of subspace iteration: the plane of the leading eigenvectors of a small symmetric matrix.

A symmetric and positive semidefinite, D × D; Q of L orthonormal rows; b a bound; T_m Chebyshev's polynomials.

    Q ← orthonormal rows of Ω A, Ω random;     a few times  Q ← orthonormal rows of Q T_m(2A/b − 1)

T_m stays within ±1 for eigenvalues up to b and grows beyond, the faster the farther: b is the smallest of the
qᵀAq. What counts is how far the wanted eigenvalues lie above λ_{L+1} (Rutishauser, "Simultaneous iteration
method for symmetric matrices", 1970). m is as large as rounding allows: the largest eigenvector grows by up
to 10¹², from which Gram and Schmidt's method still tells the others.

All of it is float64, and its steps wait for each other: for D 256, L 32 and 17 products 36·10⁶
multiplications, 0.3 ms at the 64 a cycle of one multiprocessor. So a few programs share out the columns of
each product, meet, and go on with all of it; the rest each does for itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STAGES, DEGREE = 3, 5
CHUNK, WARPS, BUFFERS = 32, 8, 3
PROGRAMS, LEAST_SHARE = 4, 16
# So often a program looks whether the others are there, for about a second; who waits longer goes on with
# numbers that are then not found to be eigenvectors.
PATIENCE = tl.constexpr(10**6)


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
def _times(y, work_ptr, met_ptr, turn, matrix_ptr, i, d, size, SHARE: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """y A, the product number `turn`; parts of y are read back from memory, as a program cannot take
    registers apart, and so are the columns that other programs have."""
    WIDTH: tl.constexpr = y.shape[1]
    programs = tl.num_programs(0)
    own_ptr = work_ptr + tl.program_id(0) * y.shape[0] * WIDTH
    tl.debug_barrier()
    tl.store(own_ptr + i[:, None] * WIDTH + d[None, :], y)
    tl.debug_barrier()
    result = tl.zeros((y.shape[0], SHARE), tl.float64)
    c, mine = tl.arange(0, CHUNK), tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    for first in range(0, size, CHUNK):
        left = tl.load(own_ptr + i[:, None] * WIDTH + (first + c)[None, :])
        here = (first + c < size)[:, None] & (mine < size)[None, :]
        right = tl.load(matrix_ptr + (first + c)[:, None] * size + mine[None, :], mask=here, other=0.0)
        result = tl.dot(left, right, result, out_dtype=tl.float64)
    # Each product has a place of its own, so that nobody reads what another has from an earlier one.
    shared_ptr = work_ptr + (programs + turn) * y.shape[0] * WIDTH
    tl.store(shared_ptr + i[:, None] * WIDTH + mine[None, :], result)
    tl.debug_barrier()
    tl.atomic_add(met_ptr, 1, sem="acq_rel", scope="gpu")
    spins = 0
    while (tl.atomic_add(met_ptr, 0, sem="acquire", scope="gpu") < programs * (turn + 1)) & (
        spins < PATIENCE
    ):
        spins += 1
    tl.debug_barrier()
    return tl.load(shared_ptr + i[:, None] * WIDTH + d[None, :], cache_modifier=".cg")


@triton.jit
def _filter(  # type: ignore[no-untyped-def]
    matrix_ptr, work_ptr, met_ptr, basis_ptr, image_ptr, bound_ptr, size, lines, stages, degree,
    LINES: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """basis ← Q, image ← Q A, bound ← the last b."""
    turn = 0
    i, d = tl.arange(0, LINES), tl.arange(0, WIDTH)
    inside = (i < lines)[:, None] & (d < size)[None, :]
    y = tl.where(inside, tl.randn(0, i[:, None] * WIDTH + d[None, :]).to(tl.float64), 0.0)
    y = _times(y, work_ptr, met_ptr, turn, matrix_ptr, i, d, size, SHARE, CHUNK)
    y = _orthonormal(y, i, lines)
    bound = tl.full((), 0.0, tl.float64)
    for _ in range(stages):
        turn += 1
        image = _times(y, work_ptr, met_ptr, turn, matrix_ptr, i, d, size, SHARE, CHUNK)
        values = tl.sum(image * y, 1)
        top = tl.max(values, 0)
        bound = tl.maximum(tl.min(tl.where(i < lines, values, top), 0), 1e-9 * top)
        growth = 2.0 * (2.0 * top / bound - 1.0)
        before = y
        y = image * (2.0 / bound) - y
        reached = growth * growth
        for _ in range(1, degree):
            if reached <= 2e12:
                turn += 1
                image = _times(y, work_ptr, met_ptr, turn, matrix_ptr, i, d, size, SHARE, CHUNK)
                following = image * (4.0 / bound) - 2.0 * y - before
                before = y
                y = following
            reached *= growth
        y = _orthonormal(y, i, lines)
    image = _times(y, work_ptr, met_ptr, turn + 1, matrix_ptr, i, d, size, SHARE, CHUNK)
    place = i[:, None] * size + d[None, :]
    inside &= tl.program_id(0) == 0
    tl.store(basis_ptr + place, y, mask=inside)
    tl.store(image_ptr + place, image, mask=inside)
    tl.store(bound_ptr, bound, mask=tl.program_id(0) == 0)


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    basis_ptr, image_ptr, turn_ptr, vectors_ptr, rest_ptr, size, lines, WIDTH: tl.constexpr
):
    """A row of vectors ← Σ_l turn_l q_l = v, its largest entry made positive, rest ← ‖Av − λv‖; λ stands
    behind a row of turn."""
    row, d = tl.program_id(0), tl.arange(0, WIDTH)
    vector, image = tl.zeros((WIDTH,), tl.float64), tl.zeros((WIDTH,), tl.float64)
    turn_ptr += row * (lines + 1)
    for line in range(lines):
        share = tl.load(turn_ptr + line)
        vector += share * tl.load(basis_ptr + line * size + d, mask=d < size, other=0.0)
        image += share * tl.load(image_ptr + line * size + d, mask=d < size, other=0.0)
    apart = image - tl.load(turn_ptr + lines) * vector
    sign = tl.where(-tl.min(vector, 0) > tl.max(vector, 0), -1.0, 1.0)
    tl.store(vectors_ptr + row * size + d, sign * vector, mask=d < size)
    tl.store(rest_ptr + row, tl.sqrt(tl.sum(apart * apart, 0)))


def turned(basis: Tensor, image: Tensor, turn: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors ±v = turn Q (K, D), the largest entry of each positive, and ‖Av − λv‖ (K,), from `turn` (K, L)
    and λ (K,) on the host."""
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
    programs = PROGRAMS if matrix.is_cuda else 1  # the interpreter runs one after the other
    programs = min(programs, width // LEAST_SHARE)
    work = matrix.new_empty(programs + STAGES * DEGREE + 2, height, width)
    met = torch.zeros((), dtype=torch.int32, device=matrix.device)
    basis, image = matrix.new_empty(2, lines, size).unbind(0)
    bound = matrix.new_empty(())
    _filter[(programs,)](
        matrix.contiguous(), work, met, basis, image, bound, size, lines, STAGES, DEGREE,
        LINES=height, WIDTH=width, SHARE=width // programs, CHUNK=CHUNK, num_warps=WARPS, num_stages=BUFFERS,
    )  # fmt: skip
    return {"basis": basis, "image": image, "bound": bound}
