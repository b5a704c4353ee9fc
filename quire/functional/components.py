"""Principal components: the directions in which rows vary most, from sums over the rows.

N rows, D features, K components, L rows of a basis; x a row, s a shift, z = x − s.

    S = Σ (x − μ)(x − μ)ᵀ = Σ zzᵀ − ttᵀ/N,   t = Σ z,   μ = s + t/N;     S = Vᵀ diag(σ²) V

The sums add up over batches and need no centred copy of the rows; s only has to lie near the mean, so that
the difference loses no digits. Squaring costs half of them all the same: singular values below √ε·σ₁ drown in
the rounding of S. Where such are wanted, another pass takes the sums in coordinates that make the rows round,

    z' = diag(1/σ̂) V (x − s),   S' = Σ z'z'ᵀ − t't'ᵀ/N = Uᵀ diag(λ) U,   diag(√λ) U diag(σ̂) V = P diag(σ) V',

which is as accurate as a QR factorisation of the rows, though its sums still add up (Yamamoto et al.,
"Roundoff error analysis of the CholeskyQR2 algorithm", 2015; Fukaya et al., "Shifted Cholesky QR for
computing the QR factorization of ill-conditioned matrices", 2020).

Randomised: Halko, Martinsson and Tropp, "Finding structure with randomness", 2011.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.scatter import (
    HEAD_ROWS,
    View,
    first_view,
    moments,
    power_sums,
    share_lost,
    slab_rows,
)
from quire.functional.threads import one_thread
from quire.kernels import refusal

# Up to this size, sums are worth a copy to the CPU.
SMALL = 1024
# Of `moments`, how much its products have lost.
CHECKS = ("error", "checked", "checked_columns")
# Relative error of a variance that another pass is worth. What float32 loses is estimated by a Frobenius norm
# and from few chunks, which in most cases is one or two orders more than it is.
ACCURACY = {torch.float64: 1e-7, torch.float32: 1e-3}
# Estimates of what is lost are multiplied by this, to be on the safe side.
ROOM = 4.0
# Of matrices of such sizes, so few leading eigenpairs are looked for among so many filtered directions.
LEAST_FILTERED, MOST_FILTERED, FILTERED_LINES, EXTRA_LINES = 65, 256, 32, 16
# What of an eigenvalue may be left of Av − λv: float32's rounding. λ itself is then known to its square.
FOUND = 2.0**-23


def rounding(precision: torch.dtype) -> float:
    """Share of its largest eigenvalue that is lost of a scatter by rounding."""
    return ROOM * torch.finfo(precision).eps


class Components(NamedTuple):
    """Principal components in float64, the largest first."""

    mean: Tensor
    """(D,)"""
    axes: Tensor
    """(K, D), orthonormal rows; the largest entry of each is positive."""
    variances: Tensor
    """(K,): σ²/(N − 1)."""
    total_variance: Tensor
    """Of all D directions together."""


# From sums to components, in float64 ----------------------------------------------------------


class Facts(NamedTuple):
    """What sums say in plain numbers, by which a view is judged."""

    rows: float
    """N."""
    trace: float
    """Of G."""
    largest: float
    """Of G's diagonal."""
    constant: float
    """How many numbers of G's diagonal are 0."""
    drift: float
    """‖t‖²/N, which centring takes off."""
    square: float
    """What is left of the trace, feature by feature: a large one that is constant hides no other."""
    lost: float
    """`share_lost` of G; 0 where its products were in float64."""

    @staticmethod
    def of(sums: Mapping[str, Tensor]) -> Tensor:
        """As one vector, without waiting for a GPU."""
        count, total, diagonal = sums["count"], sums["total"], sums["gram"].diagonal()
        taken, constant = total.square() / count, (diagonal == 0).sum().double()
        numbers = (count, diagonal.sum(), diagonal.max(), constant, taken.sum(), (diagonal - taken).sum())
        checks = (torch.linalg.vector_norm(sums[name]) for name in CHECKS if name in sums)
        return torch.stack([*numbers, *checks])

    @classmethod
    def read(cls, numbers: Tensor) -> Facts:
        rows, trace, largest, constant, drift, square, *checks = numbers.tolist()
        return cls(rows, trace, largest, constant, drift, square, share_lost(*checks) if checks else 0.0)


class Spectrum(NamedTuple):
    """What sums say of the centred rows X = Q diag(σ) V."""

    mean: Tensor
    """(D,)"""
    singular_values: Tensor
    """(L,), falling, or only those asked for."""
    axes: Tensor
    """V, (L, D)."""
    square: Tensor
    """‖X‖² = Σ σ²."""
    left: Tensor | None
    """(L, L): turns Σ zy into Qᵀy; only where it was asked for."""
    rank: int
    """How many singular values can differ from zero at all."""
    facts: Facts
    upright: bool
    """Whether the largest entry of each axis is known to be positive (`align_signs`)."""


def leading_eigenpairs(matrix: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues of a symmetric matrix, falling, and their vectors as rows."""
    values, vectors = _eigenpairs(matrix)
    return values.flip(0)[:k], vectors.mT.flip(0)[:k]


def _leading(matrix: Tensor, k: int) -> dict[str, Tensor]:
    return dict(zip(("values", "vectors"), leading_eigenpairs(matrix, k), strict=True))


def _eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rising, with vectors as columns; not numbers for a matrix that is not finite."""
    try:
        if matrix.is_cuda:
            found = torch.linalg.eigh(matrix)
            return found.eigenvalues, found.eigenvectors
        if bool(matrix.trace().isfinite()):  # as no entry of a scatter is else; LAPACK might search for ever
            values, vectors = np.linalg.eigh(matrix.numpy())
            return torch.from_numpy(values), torch.from_numpy(vectors)
    except torch.linalg.LinAlgError:
        pass
    return torch.full_like(matrix[0], torch.nan), torch.full_like(matrix, torch.nan)


def filtered(matrix: Tensor, k: int) -> dict[str, Tensor]:
    """A basis in which the k largest eigenpairs of a positive semidefinite matrix can be looked for, on a GPU
    and without waiting for it; {} where that is not worth it."""
    small = LEAST_FILTERED <= len(matrix) <= MOST_FILTERED and k + EXTRA_LINES <= FILTERED_LINES
    if not small or not matrix.is_cuda or refusal(matrix[:0].float()):
        return {}
    from quire.kernels.eigen import filtered as kernel

    return kernel(matrix, FILTERED_LINES)


def products_in(basis: Tensor, image: Tensor) -> dict[str, Tensor]:
    """What the host needs of Q and Q A, and of nothing larger: Q A Qᵀ and Q Qᵀ, (L, L)."""
    return {"small": image @ basis.mT, "overlap": basis @ basis.mT}


def pairs_in_basis(
    basis: Tensor, image: Tensor, k: int, *, small: Tensor, overlap: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The k largest eigenvalues λ of A, falling and on the host, and their vectors v as rows, from
    orthonormal rows Q (L, D) and Q A, and on the host their products and the bound that Q was filtered by;
    None if they are not found within Q.

    Found means ‖Av − λv‖ ≤ FOUND·λ and λ > bound. An eigenvalue that is larger than one that was found has
    grown more in the filter, so it is not missed unless the random rows that Q began with had nothing of its
    vector: all L of them less than rounding's share of it.
    """
    if not bool(small.isfinite().all()):
        return None
    pairs = torch.linalg.eigh(small + small.mT)
    values, turn = pairs.eigenvalues.flip(0)[:k] / 2, pairs.eigenvectors.mT.flip(0)[:k]
    vectors, rest = _turned(basis, image, turn, values)
    askew = (turn @ overlap @ turn.mT - torch.eye(k, dtype=turn.dtype)).abs().max()
    straight = askew <= FOUND**2 + 1e-12 and values[-1] > bound
    return (values, vectors) if straight and bool((rest.cpu() <= FOUND * values).all()) else None


def _turned(basis: Tensor, image: Tensor, turn: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """±v = turn Q (k, D), the largest entry of each positive, and ‖Av − λv‖ (k,), from `turn` and λ on the
    host."""
    if not basis.is_cuda:
        vectors = turn @ basis
        rest = torch.linalg.vector_norm(turn @ image - values[:, None] * vectors, dim=1)
        return align_signs(vectors), rest
    from quire.kernels.eigen import turned

    return turned(basis, image, turn, values)


def beside(**parts: Tensor) -> dict[str, Tensor]:
    """What is small, on the CPU, by one copy: there, dozens of short operations take less time than a GPU
    needs to be asked for them."""
    small = max(part.numel() for part in parts.values()) <= SMALL**2
    return moved(torch.device("cpu"), **parts) if small else parts


def moved(device: torch.device, **parts: Tensor) -> dict[str, Tensor]:
    """The parts, all of one type, on a device, by one copy from each other one."""
    for source in {part.device for part in parts.values()} - {device}:
        away = {name: part for name, part in parts.items() if part.device == source}
        flat = torch.cat([part.flatten() for part in away.values()]).to(device)
        numbers = flat.split([part.numel() for part in away.values()])
        parts |= {name: number.view(parts[name].shape) for name, number in zip(away, numbers, strict=True)}
    return parts


def spectrum(sums: Mapping[str, Tensor], view: View, k: int | None = None, *, left: bool = False) -> Spectrum:
    """The k leading components (all of them: None) from the sums of `moments`.

    With a basis, `square` is what the rows have in it, and the shift has to be their mean, or near it within
    the basis.
    """
    count, total, gram = sums["count"], sums["total"], sums["gram"]
    k = len(gram) if k is None or view.scale is not None else k
    offset = total / count
    centred = torch.addr(gram, total, offset, alpha=-1)
    view = view.to(gram.device)
    if view.scale is not None:
        offset = offset * view.scale
    mean = view.shift + (offset if view.basis is None else offset @ view.basis)
    pairs: tuple[Tensor, Tensor] | None = None
    single = view.precision != torch.float64 and view.scale is None and not left
    found = filtered(centred, k) if single else {}
    facts = Facts.of(sums)  # two dozen short operations, which can be asked for while the filter runs
    if found:
        basis, image, bound = found["basis"], found["image"], found["bound"]
        known = moved(torch.device("cpu"), facts=facts, bound=bound, **products_in(basis, image))
        facts = known.pop("facts")
        pairs = pairs_in_basis(basis, image, k, **known)
    upright = pairs is not None and view.basis is None
    if pairs is None:
        known = beside(**_leading(centred, k), mean=mean, facts=facts)
        pairs, mean, facts = (known["values"], known["vectors"]), known["mean"], known["facts"]
    (values, vectors), known_facts = pairs, Facts.read(facts)
    view = view.to(vectors.device)
    inverse: Tensor | None = None
    if left:
        # Directions without any length are rounding: the inverse leaves them out.
        smallest = values[:1].clamp_min(0) * len(gram) * torch.finfo(values.dtype).eps
        inverse = torch.where(values > smallest, values, torch.inf).rsqrt()[:, None] * vectors
    values = values.clamp_min(0).sqrt()
    square = values.new_tensor(known_facts.square)
    if view.scale is not None:
        turn, values, vectors = torch.linalg.svd(values[:, None] * vectors * view.scale)
        inverse, square = None if inverse is None else turn.mT @ inverse, values.square().sum()
    # Centring takes one off as many directions as there are rows, and columns that never change have none.
    constant = int(known_facts.constant) if view.basis is None else 0
    rank = max(min(int(known_facts.rows) - 1, len(gram) - constant), 0)
    values[rank:] = 0.0
    axes = vectors if view.basis is None else vectors @ view.basis
    return Spectrum(mean, values, axes, square, inverse, rank, known_facts, upright)


def sharper_view(
    sums: Mapping[str, Tensor], view: View, found: Spectrum, wanted: int, *, rest: bool = True
) -> View | None:
    """Where the next pass should look from; None where the first `wanted` singular values (and the `rest`,
    taken together) are known to `ACCURACY`, or are zero as far as float64 can tell."""
    single, size = view.precision != torch.float64, len(sums["gram"])
    count, trace, most, _, drift, _, share = found.facts
    if single and not math.isfinite(trace):
        return view._replace(precision=torch.float64)  # squares that are too large for less
    values: list[float] = found.singular_values.tolist()
    largest = values[0]
    # G's largest eigenvalue is about `top`; what of it is lost in rounding hides smaller ones.
    top = largest**2 if view.scale is None else most
    lost = rounding(view.precision) * drift
    lost += ROOM * share * trace if single else rounding(view.precision) * top
    hidden = lost**0.5 * (1.0 if view.scale is None else float(view.scale.min()))
    floor = hidden / ACCURACY[view.precision] ** 0.5
    known = values[: min(wanted, found.rank)]
    faintest = known[-1] if known else math.inf
    if rest and wanted < found.rank:
        faintest = min(faintest, max(float(found.square) - sum(value * value for value in known), 0.0) ** 0.5)
    noise = torch.finfo(torch.float64).eps * max(count, size) * largest
    if not (faintest < floor and noise < floor):
        return None
    if single:
        return View(found.mean, view.basis, view.scale)
    if len(found.axes) < size:
        found = spectrum(sums, view)
    return View(found.mean, found.axes, found.singular_values.clamp_min(hidden))


def align_signs(axes: Tensor) -> Tensor:
    """The largest entry of each row made positive; without that, a direction has no sign."""
    smallest, largest = axes.aminmax(dim=1, keepdim=True)
    return torch.where(-smallest > largest, -axes, axes)


def orthonormal_rows(rows: Tensor) -> Tensor:
    """(L, D) with L ≤ D: an orthonormal basis of what rows span, filled up where they are dependent."""
    return torch.linalg.qr(rows.mT)[0].mT


def centred_image(sums: Mapping[str, Tensor], basis: Tensor) -> tuple[Tensor, Tensor]:
    """BS (L, D) and trace S, from the sums of `power_sums`."""
    total, count = sums["total"], sums["count"]
    image = sums["image"] - torch.outer(basis @ total, total) / count
    return image, sums["square"] - total.square().sum() / count


def nystrom(basis: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and axes of S ≈ SBᵀ(BSBᵀ)⁻¹BS, from orthonormal rows B and their image BS, (L, D)."""
    values, vectors = leading_eigenpairs((image @ basis.mT + basis @ image.mT) / 2)
    kept = values > values[0] * len(values) * torch.finfo(values.dtype).eps
    root = torch.where(kept, values, torch.inf).rsqrt()[:, None] * (vectors @ image)
    _, singular_values, axes = torch.linalg.svd(root, full_matrices=False)
    return singular_values, axes


# Three ways to the components of rows in memory -----------------------------------------------


def pca_covariance(x: Tensor, k: int) -> Components:
    """Eigenvectors of the covariance S/(N − 1), from one pass over x (N, D), and from more where the spectrum
    demands it."""
    check_components(k, x.shape)
    view: View | None = first_view(x[:HEAD_ROWS])
    with one_thread():
        while view is not None:
            sums = moments(x, view)
            found = spectrum(sums, view, k)
            view = sharper_view(sums, view, found, k)
    axes = found.axes[:k] if found.upright else align_signs(found.axes[:k])
    return _components(found.mean, axes, found.singular_values[:k], found.square, x)


def pca_svd(x: Tensor, k: int) -> Components:
    """Right singular vectors of the centred rows, x − μ = U diag(σ) V. Holds a centred copy in float64."""
    check_components(k, x.shape)
    mean = x.mean(0, dtype=torch.float64)
    _, values, axes = torch.linalg.svd(x - mean, full_matrices=False)
    return _components(mean, align_signs(axes[:k]), values[:k], values.square().sum(), x)


def pca_randomised(
    x: Tensor,
    k: int,
    *,
    oversamples: int = 10,
    power_iterations: int = 4,
    generator: torch.Generator | None = None,
) -> Components:
    """Components within the range of S^q Ω, Ω random of width k + oversamples, in q + 1 passes.

    As good as the spectrum falls: the error of an axis shrinks by λ_{k+oversamples+1}/λ_k an iteration.
    """
    check_components(k, x.shape)
    size = min(k + oversamples, *x.shape)
    drawn = torch.randn(size, x.shape[1], generator=generator, dtype=torch.float64, device=x.device)
    shift, basis = first_view(x[:HEAD_ROWS]).shift, orthonormal_rows(drawn)
    for remaining in range(power_iterations, -1, -1):
        sums = power_sums(x, View(shift, basis))
        image, square = centred_image(sums, basis)
        if remaining:
            basis = orthonormal_rows(image)
    values, axes = nystrom(basis, image)
    return _components(shift + sums["total"] / len(x), align_signs(axes[:k]), values[:k], square, x)


def _components(mean: Tensor, axes: Tensor, values: Tensor, square: Tensor, x: Tensor) -> Components:
    freedom = max(len(x) - 1, 1)
    parts = {"mean": mean, "axes": axes, "variances": values.square() / freedom}
    return Components(**moved(x.device, **parts, total_variance=square / freedom))


def check_components(k: int, shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or not 1 <= k <= min(shape):
        raise InputError(
            f"{k} components of rows of shape {tuple(shape)}",
            expected="rows (N, D), and from 1 to min(N, D) components",
            fix="ask for fewer components, or give more rows",
        )


# What components are for ----------------------------------------------------------------------


def explained_variance_ratio(variances: Tensor, total_variance: Tensor | float) -> Tensor:
    """λ_k / Σ_d λ_d; zeros where nothing varies at all."""
    total = torch.as_tensor(total_variance, dtype=variances.dtype, device=variances.device)
    return torch.where(total > 0, variances / total, torch.zeros_like(variances))


def components_for_share(variances: Tensor, total_variance: Tensor | float, share: float) -> int:
    """The smallest number of components that explain more than `share` of the variance."""
    explained = explained_variance_ratio(variances, total_variance).cumsum(0)
    return min(int((explained <= share).sum()) + 1, len(variances))


def project(x: Tensor, mean: Tensor, axes: Tensor) -> Tensor:
    """Scores V(x − μ) of each row, (N, D) → (N, K), in the precision of x."""
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    mean, columns = mean.to(x.device, dtype), axes.mT.to(x.device, dtype)
    # Shifted first: a large mean would cost the product its digits. In chunks: a copy would cost memory.
    if torch.compiler.is_exporting():  # any number of rows, so no number of chunks
        return (x - mean) @ columns
    return torch.cat([(part - mean) @ columns for part in x.split(slab_rows(x))])


def reconstruct(scores: Tensor, mean: Tensor, axes: Tensor) -> Tensor:
    """x̂ = Vᵀ(scores) + μ: of all points on a K-dimensional plane, on average the nearest (Eckart–Young)."""
    return torch.addmm(mean.to(scores), scores, axes.to(scores))
