"""Sums over rows that add up: their number, total and scatter, without a centred copy of them.

N rows, D features, L rows of a basis; x a row, s a shift, z = x − s.

    S = Σ (x − μ)(x − μ)ᵀ = Σ zzᵀ − ttᵀ/N,   t = Σ z,   μ = s + t/N

s only has to lie near the mean, so that the difference loses no digits. Products are taken within chunks of
rows, in the precision that is asked for, and added in float64.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels import refusal, use_triton

Array = np.ndarray[Any, np.dtype[Any]]

# Few enough rows to stay in a core's cache and to round little before they are added in float64, enough to
# keep a matrix product busy.
CHUNK_NUMBERS = 1 << 18
CHUNK_ROWS = (1024, 8192)
# Columns are added up over so few rows before their sums are added in float64.
FEW_ROWS = 256
# A GPU is given many chunks at once, each a product of its own.
SLAB_NUMBERS = 1 << 25
# One chunk of so many is multiplied in float64 as well where products are taken in less.
CHECKED = 32
# Below these sizes a kernel's programs leave most of a GPU idle.
KERNEL_ROWS = 1 << 15
KERNEL_FEATURES = 32

Backend = Literal["auto", "torch", "triton"]


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
    """The features shifted by their mean over a few rows (n, D), or not at all where it is so small that the
    sums lose nothing by it."""
    first = head[0].double()
    spread = head.double() - first
    mean = first + spread.mean(0)  # exact where a column is constant
    variance = spread.var(0, correction=0)
    double = head.dtype in (torch.float64, torch.int32, torch.int64)
    small = mean.square().sum() <= (64 if double else 1) * variance.sum()
    if bool(small & ((mean == 0) | (variance > 0)).all()):
        mean = torch.zeros_like(mean)
    return View(mean) if double else View(mean.float().double(), precision=torch.float32)


def moments(x: Tensor, view: View, *, backend: Backend = "auto") -> dict[str, Tensor]:
    """N, t = Σ z and G = Σ zzᵀ in float64; (N, D) → "count", "total" (L,), "gram" (L, L).

    Of products in less than float64, some are taken twice: "error" is the sum of the differences, "checked"
    the trace of the G that they belong to. backend="triton" is a kernel for float32 rows on CUDA, which
    "auto" takes where it is worth it.
    """
    x, view = x.detach(), view.to(x.device)
    count = torch.tensor(float(len(x)), dtype=torch.float64, device=x.device)
    reason = refusal(x)
    if not reason and (x.dtype, view.precision, view.basis) != (torch.float32, torch.float32, None):
        reason = "a view in float64 or in a basis" if x.dtype == torch.float32 else f"rows of {x.dtype}"
    if use_triton(backend, reason, worth=len(x) >= KERNEL_ROWS and x.shape[1] >= KERNEL_FEATURES):
        from quire.kernels.scatter import scatter_sums

        return {"count": count} | scatter_sums(x, view.shift, CHECKED)
    return {"count": count} | (_moments_on_cpu if x.device.type == "cpu" else _moments)(x, view)


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
    if checks:
        sums["error"], sums["checked"] = torch.zeros_like(gram), total.new_zeros(())

    def seen(part: Tensor, precision: torch.dtype) -> Tensor:
        z = part.to(precision) if shift is None else torch.sub(part, shift.to(precision))
        return z if columns is None else z @ columns.to(precision)

    rows = chunk_rows(x)
    for part in x.split(slab_rows(x, size * size)):
        z = seen(part, view.precision)
        total += z.sum(0, dtype=torch.float64)
        gram += squares(z, rows)
        if checks:
            exact = squares(seen(part[:rows], torch.float64), rows)
            sums["error"] += squares(z[:rows], rows) - exact
            sums["checked"] += exact.trace()
    return sums


def squares(z: Tensor, rows: int) -> Tensor:
    """Σ zzᵀ: chunks of `rows` in the precision of z, their sum in float64."""
    whole = len(z) // rows * rows
    product = (z[whole:].mT @ z[whole:]).double()
    if whole:
        chunks = z[:whole].reshape(-1, rows, z.shape[1])
        product += torch.bmm(chunks.mT, chunks).sum(0, dtype=torch.float64)
    return product


def _moments_on_cpu(x: Tensor, view: View) -> dict[str, Tensor]:
    """On the CPU: BLAS knows that zᵀz is symmetric and leaves out half of the work, which PyTorch does not.

    PyTorch's threads are kept out of the loop, because they would wait for work on the cores that BLAS needs.
    """
    from scipy.linalg.blas import dsyrk, ssyrk

    array = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).numpy()
    shift = view.shift.numpy() if bool(view.shift.any()) else None
    columns = view.columns()
    factor = None if columns is None else columns.numpy()
    double, rows, size = view.precision == torch.float64, chunk_rows(x), view.size()
    kind = np.float64 if double else np.float32
    # The same room for each chunk: new memory would have to be asked for from the system each time.
    room = np.empty((min(rows, len(x)), x.shape[1]), kind)
    total, gram = np.zeros(size), np.zeros((size, size), order="F")
    error, checked = np.zeros_like(gram), 0.0

    def seen(part: Array, kind: Any, room: Array | None = None) -> Array:
        z: Array
        if shift is None:
            z = part.astype(kind, copy=False)
        else:
            z = np.subtract(part, shift.astype(kind), out=None if room is None else room[: len(part)])
        return z if factor is None else z @ factor.astype(kind)

    for number, start in enumerate(range(0, len(array), rows)):
        part = array[start : start + rows]
        with np.errstate(invalid="ignore", over="ignore"):  # seen in the sums by whoever uses them
            z = seen(part, kind, room)
        total += column_sums(z)
        if double:
            gram = dsyrk(1.0, z.T, beta=1.0, c=gram, overwrite_c=True)
            continue
        product = ssyrk(1.0, z.T)
        gram += product
        if number % CHECKED == 0:
            exact = dsyrk(1.0, seen(part, np.float64).T)
            error += product - exact
            checked += float(exact.trace())
    sums = {"total": torch.from_numpy(total), "gram": both_triangles(gram)}
    if not double:
        sums |= {"error": both_triangles(error), "checked": torch.tensor(checked, dtype=torch.float64)}
    return sums


def column_sums(z: Array) -> Array:
    whole = len(z) // FEW_ROWS * FEW_ROWS
    few = np.ones(FEW_ROWS, z.dtype) @ z[:whole].reshape(-1, FEW_ROWS, z.shape[1])
    total: Array = few.sum(0, dtype=np.float64) + z[whole:].sum(0, dtype=np.float64)
    return total


def both_triangles(upper: Array) -> Tensor:
    """A symmetric matrix from its upper triangle."""
    return torch.from_numpy(np.triu(upper) + np.triu(upper, 1).T)


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
