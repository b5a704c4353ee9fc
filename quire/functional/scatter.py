"""Sums over rows that add up: their number, total and scatter, without a centred copy of them.

N rows, D features, L rows of a basis; x a row, s a shift, z = x − s.

    S = Σ (x − μ)(x − μ)ᵀ = Σ zzᵀ − ttᵀ/N,   t = Σ z,   μ = s + t/N

s only has to lie near the mean, so that the difference loses no digits. Products are taken within chunks of
rows, in the precision that is asked for, and added in float64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels import Backend, refusal, use_triton

Array = np.ndarray[Any, np.dtype[Any]]

# Few enough rows to stay near a core and, in float32, to round little before they are added in float64;
# enough to keep all cores busy with a product.
CHUNK_NUMBERS = 1 << 23
CHUNK_ROWS = (2048, 8192)
# From so many rows a first guess is made of the mean.
HEAD_ROWS = 64
# Columns are added up in so many parts, which are then added in float64.
PARTS = 64
# A GPU is given many chunks at once, each a product of its own.
SLAB_NUMBERS = 1 << 25
# Where products are taken in less than float64, one chunk of so many is multiplied in float64 as well, with
# about so many of its columns.
CHECKED = 32
CHECKED_COLUMNS = 32


class View(NamedTuple):
    """Coordinates in which sums are taken: z = diag(1/scale) basis (x − shift)."""

    shift: Tensor
    """(D,)"""
    basis: Tensor | None = None
    """(L, D), orthonormal rows; None for the features themselves."""
    scale: Tensor | None = None
    """(L,); None for ones."""
    precision: torch.dtype = torch.float64
    """Of the products within a chunk. In less than float64, the shift is a number of that precision."""

    def to(self, device: torch.device | str) -> View:
        basis, scale = (part if part is None else part.to(device) for part in (self.basis, self.scale))
        return View(self.shift.to(device), basis, scale, self.precision)

    def size(self) -> int:
        """L, or D without a basis."""
        return len(self.shift if self.basis is None else self.basis)

    def columns(self) -> Tensor | None:
        """(D, L) by which shifted rows are multiplied."""
        if self.basis is None or self.scale is None:
            return None if self.basis is None else self.basis.mT
        return (self.basis / self.scale[:, None]).mT


def first_view(head: Tensor) -> View:
    """The features shifted by their mean over a few rows (n, D), or on the CPU, where this takes time, not at
    all if it is so small that the sums lose nothing by it."""
    double = head.dtype in (torch.float64, torch.int32, torch.int64)
    if head.is_cuda and not double:  # where a column is constant, rounding makes this exact
        return View(head.detach().mean(0, dtype=torch.float64).float().double(), precision=torch.float32)
    few = head.detach().double()
    spread = few - few[0]
    mean = few[0] + spread.mean(0)  # exact where a column is constant
    if head.device.type == "cpu":
        variance = spread.var(0, correction=0)
        small = mean.square().sum() <= (64 if double else 1) * variance.sum()
        if bool(small & ((mean == 0) | (variance > 0)).all()):
            mean = torch.zeros_like(mean)
    if not double:
        mean = mean.float().double()
    return View(mean, precision=torch.float64 if double else torch.float32)


def as_array(x: Tensor) -> Array:
    """Rows on the CPU for NumPy, which does not know all of PyTorch's types."""
    return (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).numpy()


def moments(x: Tensor, view: View, *, backend: Backend = "auto") -> dict[str, Tensor]:
    """N, t = Σ z and G = Σ zzᵀ in float64; (N, D) → "count", "total" (L,), "gram" (L, L).

    Of products in less than float64, some are taken twice; the sums of the differences, and of the squares
    that they belong to, say how much is lost (`share_lost`). backend="triton" is a kernel for float32 rows on
    CUDA, which "auto" takes where it is worth it.
    """
    x, view = x.detach(), view.to(x.device)
    count = torch.full((), float(len(x)), dtype=torch.float64, device=x.device)
    reason = refusal(x)
    if not reason and (x.dtype, view.precision, view.basis) != (torch.float32, torch.float32, None):
        reason = "a view in float64 or in a basis" if x.dtype == torch.float32 else f"rows of {x.dtype}"
    if use_triton(backend, reason):
        from quire.kernels.scatter import scatter_sums

        return {"count": count} | scatter_sums(x, view.shift, CHECKED, checked_columns(x.shape[1]))
    return {"count": count} | (_moments_on_cpu if x.device.type == "cpu" else _moments)(x, view)


def share_lost(error: float, checked: float, checked_columns: float) -> float:
    """‖error of G‖ / trace G in the Frobenius norm, from its norm in some chunks and columns: an error grows
    with both of the columns that it belongs to."""
    return error / max(math.sqrt(checked * checked_columns), 1e-300)


def checked_columns(size: int) -> slice:
    return slice(None, None, max(1, size // CHECKED_COLUMNS))


def chunk_rows(x: Tensor) -> int:
    few, many = CHUNK_ROWS
    return min(max(CHUNK_NUMBERS // max(x.shape[1], 1), few), many)


def slab_rows(x: Tensor, products: int = 1) -> int:
    """Rows taken at once: on a GPU so many chunks that neither they nor the `products` numbers that come of
    each take much room."""
    rows = chunk_rows(x)
    return rows if x.device.type == "cpu" else rows * max(1, SLAB_NUMBERS // max(rows * x.shape[1], products))


def _moments(x: Tensor, view: View) -> dict[str, Tensor]:
    """On a GPU: slabs of many chunks."""
    shift, columns, size = view.shift if bool(view.shift.any()) else None, view.columns(), view.size()
    total, gram = view.shift.new_zeros(size), view.shift.new_zeros(size, size)
    sums = {"total": total, "gram": gram}
    checks = view.precision != torch.float64
    some = checked_columns(size)

    def seen(part: Tensor, precision: torch.dtype) -> Tensor:
        z = part.to(precision) if shift is None else torch.sub(part, shift.to(precision))
        return z if columns is None else z @ columns.to(precision)

    rows = chunk_rows(x)
    samples, products = [], []
    for part in x.split(slab_rows(x, size * size)):
        z = seen(part, view.precision)
        total += z.sum(0, dtype=torch.float64)
        added, first = squares(z, rows)
        gram += added
        if checks:
            samples.append(part[:rows])
            products.append(first[:, some])
    if checks:
        exact = [seen(sample, torch.float64) for sample in samples]
        error = torch.stack(products).sum(0, dtype=torch.float64)
        for z in exact:
            error -= z.mT @ z[:, some]
        lengths = torch.stack([z.square().sum(0) for z in exact]).sum(0)
        sums |= {"error": error, "checked": lengths.sum(), "checked_columns": lengths[some].sum()}
    return sums


def squares(z: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Σ zzᵀ: chunks of `rows` in the precision of z, their sum in float64; and the first chunk's own.

    A symmetric matrix is known by three of its quarters.
    """
    whole, half = max(len(z) // rows, 1) * rows, z.shape[1] // 2
    chunks, left = z[:whole].reshape(-1, min(rows, len(z)), z.shape[1]), z[whole:]
    gram, first = (z.new_empty(z.shape[1], z.shape[1], dtype=kind) for kind in (torch.float64, z.dtype))
    parts = (slice(None, half), slice(half, None))
    for i, j in ((0, 0), (0, 1), (1, 1)):
        a, b = parts[i], parts[j]
        product = torch.bmm(chunks[..., a].mT, chunks[..., b])
        first[a, b] = product[0]
        gram[a, b] = product.sum(0, dtype=torch.float64) + (left[:, a].mT @ left[:, b]).double()
    for matrix in (gram, first):
        matrix[parts[1], parts[0]] = matrix[parts[0], parts[1]].mT
    return gram, first


def _moments_on_cpu(x: Tensor, view: View) -> dict[str, Tensor]:
    """On the CPU: NumPy sees that zᵀz is symmetric and leaves out half of the work, which PyTorch does not.

    All products are NumPy's, and so is the eigenproblem of what comes of them: PyTorch and SciPy have threads
    of their own, and those of one go on waiting for work on the cores that another's product needs.
    """
    array = as_array(x)
    shift = view.shift.numpy() if bool(view.shift.any()) else None
    columns = view.columns()
    double, rows, size = view.precision == torch.float64, chunk_rows(x), view.size()
    kind = np.float64 if double else np.float32
    if double:  # more rows at once lose nothing, and need no room if they are taken as they are
        as_they_are = shift is None and columns is None and array.dtype == np.float64
        rows = len(array) if as_they_are else max(rows, CHUNK_NUMBERS // x.shape[1])
    # The same room for each chunk: new memory would have to be asked for from the system each time.
    room = None if shift is None else np.empty((min(rows, len(x)), x.shape[1]), kind)
    total, gram = np.zeros(size), np.zeros((size, size))
    some = checked_columns(size)
    error, checked = np.zeros_like(gram[:, some]), np.zeros(2)

    def seen(part: Array, kind: Any, room: Array | None = None) -> Array:
        z: Array = (
            part.astype(kind, copy=False) if shift is None else without_shift(part, shift.astype(kind), room)
        )
        return z if columns is None else (z.astype(np.float64) @ columns.numpy()).astype(kind, copy=False)

    for number, start in enumerate(range(0, len(array), rows)):
        part = array[start : start + rows]
        with np.errstate(invalid="ignore", over="ignore"):  # seen in the sums by whoever uses them
            z = seen(part, kind, room)
            product = z.T @ z
        total += column_sums(z)
        gram += product
        if not double and number % CHECKED == 0:
            exact = seen(part, np.float64)
            error += product[:, some] - exact.T @ exact[:, some]
            lengths = np.einsum("ij,ij->j", exact, exact)
            checked += lengths.sum(), lengths[some].sum()
    sums = {"total": torch.from_numpy(total), "gram": torch.from_numpy(gram)}
    if not double:
        names = ("checked", "checked_columns")
        sums |= {"error": torch.from_numpy(error)} | dict(zip(names, torch.from_numpy(checked), strict=True))
    return sums


def without_shift(part: Array, shift: Array, room: Array | None) -> Array:
    """part − shift, into `room`: 64 rows at a time as one long one, since short ones take longer."""
    z = np.empty(part.shape, shift.dtype) if room is None else room[: len(part)]
    whole, width = len(part) // PARTS * PARTS, PARTS * part.shape[1]
    long = part[:whole].reshape(-1, width), z[:whole].reshape(-1, width)
    np.subtract(long[0], np.tile(shift, PARTS), out=long[1])
    np.subtract(part[whole:], shift, out=z[whole:])
    return z


def column_sums(z: Array) -> Array:
    """Σ z: every 64th row, in one long row of 64 short ones, and what comes of that in float64."""
    rows, width = len(z) // PARTS, z.shape[1]
    parts = z[: rows * PARTS].reshape(rows, PARTS * width).sum(0)
    rest = z[rows * PARTS :].sum(0, dtype=np.float64)
    total: Array = parts.reshape(PARTS, width).sum(0, dtype=np.float64) + rest
    return total


def power_sums(x: Tensor, view: View) -> dict[str, Tensor]:
    """What a step of subspace iteration needs: N, t = Σ z, "square" Σ ‖z‖² and "image" Σ (Bz)zᵀ, (L, D), for
    z = x − s; in float64."""
    view = view.to(x.device)
    assert view.basis is not None
    shift, columns = view.shift.to(view.precision), view.basis.mT.to(view.precision)
    image = torch.zeros_like(view.basis)
    total, square = torch.zeros_like(view.shift), image.new_zeros(())
    for part in x.detach().split(slab_rows(x)):
        z = torch.sub(part, shift)
        total += z.sum(0, dtype=torch.float64)
        square += z.square().sum(dtype=torch.float64)
        image += (z @ columns).mT @ z
    return {"count": image.new_tensor(float(len(x))), "total": total, "square": square, "image": image}
