"""The loop of a sweep of expectation-maximisation over rows; see `quire.functional.mixture_sweeps`.

N rows, D features, n rows of a chunk, R starts of K components, P features φ. By PyTorch's operations, in
chunks that stay in a cache, or on a CPU by the loop of `quire/kernels/host/mixture.cpp`, which takes half as
long: it keeps sums in registers, and φ of a few rows in the nearest cache.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from quire.kernels import host

# Kinds of φ(x̂), in the order of `mixture_coefficients`: x̂_i x̂_j; (x², x, 1); (‖x‖², x, 1); x̂ itself.
FULL, DIAG, SPHERICAL, TIED = 0, 1, 2, 3


class _Mixture(ctypes.Structure):
    """`Mixture` of mixture.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "features", "wide", "stride")),
        *((name, ctypes.c_void_p) for name in ("rows", "shift", "scale")),
        *((name, ctypes.c_int64) for name in ("mixes", "kind", "starts", "components", "terms")),
        *((name, ctypes.c_void_p) for name in ("theta", "likelihood", "sums", "total")),
    ]


def products_of(kind: int, columns: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Which rows of x̂ᵀ (D + 1, n) make which of φ (P, n), as views: to find them anew for each chunk would
    take a tenth of a sweep."""
    size = columns.size(0)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    if kind == FULL:  # rows of the triangle are whole rows of memory, where a gather would copy twice
        place = 0
        for i in range(size):
            found.append((columns[i], columns[i:], out[place : place + size - i]))
            place += size - i
    elif kind == DIAG:
        found.append((columns[:-1], columns[:-1], out[: size - 1]))
    return found


def fill(kind: int, columns: Tensor, out: Tensor, products: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """φ (P, n) of x̂ᵀ (D + 1, n)."""
    size = columns.size(0)
    if kind == TIED:
        return columns
    if kind == FULL and columns.is_cuda:
        pairs = torch.triu_indices(size, size, device=columns.device)
        return torch.mul(columns[pairs[0]], columns[pairs[1]], out=out)
    for one, others, place in products:
        torch.mul(one, others, out=place)
    if kind == SPHERICAL:
        torch.sum(columns[:-1].square(), [0], keepdim=True, out=out[:1])
    if kind != FULL:
        out[out.size(0) - size :].copy_(columns)
    return out


def normalise(logs: Tensor) -> Tensor:
    """ln π_k N(x_n) (…, K, n) become responsibilities in place; Σ_n ln p(x_n), (…)."""
    largest = logs.amax(-2, keepdim=True)
    # A share of e^−600 adds nothing to a sum, and the exponential of less than −708 takes 6 to 17 times as
    # long as any other.
    total = logs.sub_(largest).clamp_(min=-600.0).exp_().sum(-2, keepdim=True)
    logs.div_(total)
    return total.log_().add_(largest).sum([-1, -2])


def sweep_chunks(
    x: Tensor, shift: Tensor, scale: Tensor, theta: Tensor, starts: int, kind: int, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ ln p(x̃_n) of each start, Σ_n r_nk φ_p(x̃_n) (R·K, P) and, for tied covariances, Σ x̃x̃ᵀ of rows (N, D),
    from Θ (R·K, P); `rows` at a time, in the frame of `shift` and `scale`."""
    features, components = x.size(1), theta.size(0) // starts
    likelihood, sums = theta.new_zeros([starts]), torch.zeros_like(theta)
    total = theta.new_zeros([features, features])
    columns, logs, phi = theta[:0], theta, theta
    products: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, x.size(0), rows):
        part = x[start : start + rows]
        count = part.size(0)
        if columns.size(0) == 0 or columns.size(1) != count:
            columns, logs = theta.new_ones([features + 1, count]), theta.new_empty([theta.size(0), count])
            phi = columns if kind == TIED else theta.new_empty([theta.size(1), count])
            products = products_of(kind, columns, phi)
        apart = part.to(theta.dtype) - shift
        if scale.dim() == 2:
            torch.mm(scale.t(), apart.t(), out=columns[:-1])
        else:
            torch.mul(apart.t(), scale[:, None], out=columns[:-1])
        fill(kind, columns, phi, products)
        torch.mm(theta, phi, out=logs)
        likelihood += normalise(logs.view([starts, components, count]))
        sums.addmm_(logs, phi.t())
        if kind == TIED:
            total += columns[:-1] @ columns[:-1].t()
    return likelihood, sums, total


def sweep_on_host(
    x: Tensor, shift: Tensor, scale: Tensor, theta: Tensor, starts: int, kind: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What `sweep_chunks` gives, by a loop of the CPU; shift, scale and Θ are float64."""
    library: Any = host.library()
    (count, features), (components, terms) = x.shape, theta.shape
    x = host.as_rows(x)
    padded = theta.new_zeros(terms, library.quire_padded(components))
    padded[:, :components] = theta.T
    likelihood, sums = theta.new_zeros(starts), torch.zeros_like(padded)
    total = theta.new_zeros(features, features)
    mixes = scale.ndim == 2
    scale = scale.contiguous() if mixes else scale.expand(features).contiguous()
    given = _Mixture(
        count=count, features=features, wide=x.dtype == torch.float64, stride=x.stride(0), rows=x.data_ptr(),
        shift=shift.data_ptr(), scale=scale.data_ptr(), mixes=mixes, kind=kind, starts=starts,
        components=components // starts, terms=terms, theta=padded.data_ptr(),
        likelihood=likelihood.data_ptr(), sums=sums.data_ptr(), total=total.data_ptr(),
    )  # fmt: skip
    if library.quire_mixture(ctypes.addressof(given)):
        raise MemoryError(f"no room for {terms} products of some rows")
    return likelihood, sums[:, :components].T.contiguous(), total
