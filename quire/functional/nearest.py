"""The nearest of K centres, and the sums of the rows that each centre got, in one pass over the rows.

N rows, D features, K centres. On a GPU by Triton's kernels, on a CPU by the loops that
`quire.functional.tally` calls, elsewhere by the operations of `quire.functional.screen`; labels are those of
float64 in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional import tally as on_host
from quire.functional.screen import screen
from quire.functional.tally import Tally
from quire.kernels import Backend, refusal, use_triton

if TYPE_CHECKING:
    from quire.kernels.grouped import RunningSums


class ClusterSums(NamedTuple):
    """Which rows belong to which centre, and what the next centres are made of."""

    labels: Tensor
    """k(n), (N,) int64; those that a GPU keeps are int32"""
    sums: Tensor
    """S_k = Σ w x of each cluster, (K, D) float64"""
    counts: Tensor
    """n_k = Σ w of each cluster, (K,) float64"""


def nearest_centres(
    rows: Tensor, centres: Tensor, *, shift: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """k(n) = argmin_k ‖x_n − c_k‖² as in float64, the lowest on a tie: (N, D), (K, D) → (N,).

    `shift` (D,) is a point amid the rows, the mean of the centres unless given.
    """
    return _search(rows, centres, None, shift, backend, collect=False).labels


def cluster_sums(
    rows: Tensor,
    centres: Tensor,
    *,
    weights: Tensor | None = None,
    shift: Tensor | None = None,
    tally: Tally | RunningSums | None = None,
    backend: Backend = "auto",
) -> ClusterSums:
    """Labels, sums and counts of the rows under these centres: (N, D), (K, D), (N,) → (N,), (K, D), (K,).

    With a `tally` of the same rows, which have no weights, only those are added that have changed sides; in a
    CPU's memory, only those are searched that may have. The labels are then its own: the next search changes
    them. (`running_sums` makes the tally of rows that kernels take.)
    """
    return _search(rows, centres, weights, shift, backend, collect=True, tally=tally)


def _search(
    rows: Tensor,
    centres: Tensor,
    weights: Tensor | None,
    shift: Tensor | None,
    backend: Backend,
    *,
    collect: bool,
    tally: Tally | RunningSums | None = None,
) -> ClusterSums:
    if rows.ndim != 2 or centres.ndim != 2 or rows.shape[1] != centres.shape[1] or not len(centres):
        raise InputError(
            f"rows of shape {tuple(rows.shape)} and centres of shape {tuple(centres.shape)}",
            expected="(N, D) and (K, D) with the same D and K ≥ 1",
        )
    centres = centres.double()
    shift = (centres.mean(0) if shift is None else shift).to(rows.dtype)
    weights = None if weights is None else weights.double().contiguous()
    if takes_kernels(rows, centres, backend):
        from quire.kernels import kmeans as kernels
        from quire.kernels.grouped import sums_by_label

        labels = kernels.nearest_labels(rows, centres, shift)
        if not collect:
            return ClusterSums(labels.long(), torch.zeros_like(centres), centres.new_zeros(len(centres)))
        if tally is not None:
            assert not isinstance(tally, Tally)
            return ClusterSums(tally.labels, *tally.move(labels))
        return ClusterSums(labels.long(), *sums_by_label(rows, labels, len(centres), weights))
    with torch.no_grad():
        if backend != "torch" and on_host.takes(rows, centres):
            if tally is None:
                tally = Tally(rows, len(centres), shift, weights=weights, collect=collect)
            assert isinstance(tally, Tally)
            sums, counts = tally.sweep(centres)
            return ClusterSums(tally.labels, sums, counts)
        return ClusterSums(*screen(rows, centres, shift, weights, collect=collect))


def takes_kernels(rows: Tensor, centres: Tensor, backend: Backend = "auto") -> bool:
    """Whether Triton's kernels search these, without ever waiting for the GPU."""
    reason = refusal(rows)
    if not reason:
        from quire.kernels import kmeans as kernels

        if not kernels.supports(rows, centres):
            reason = f"{len(rows)} rows of {rows.dtype} and {len(centres)} centres"
    return use_triton(backend, reason, takes=", float32 rows one after the other")


def running_sums(rows: Tensor, clusters: int, shift: Tensor, radius: float) -> RunningSums | None:
    """Sums of rows that kernels take, kept from one set of centres to the next, where that is worth it. No
    row is farther than `radius` from `shift` (D,)."""
    from quire.kernels.grouped import LEAST_CLUSTERS, RunningSums

    return RunningSums(rows, clusters, shift, radius) if clusters >= LEAST_CLUSTERS else None
