"""K-means: rows are divided among centres so that squared distances are small.

N rows, D features, K centres, R starts, T trials; x a row, w its weight, c a centre, k(n) a label.

    J = Σ_n w_n ‖x_n − c_k(n)‖²,   k(n) = argmin_k ‖x_n − c_k‖²,   c_k = Σ_{k(n)=k} w_n x_n / Σ_{k(n)=k} w_n

Each of the two steps is a minimum of J with the other held fixed, so J never rises. Sums and counts add up
over batches, and J follows from them: J = Σ w‖x‖² − 2 Σ_k c_k·S_k + Σ_k n_k‖c_k‖².

The search for the nearest centre is in `quire.functional.nearest`.

k-means++: Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding", 2007.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.nearest import nearest_centres
from quire.functional.screen import pieces
from quire.kernels import Backend, refusal


class Farthest(NamedTuple):
    """The rows farthest from their centres, the farthest first."""

    squared: Tensor
    """‖x − c‖², (M,) float64"""
    labels: Tensor
    """(M,)"""
    weights: Tensor
    """(M,) float64"""
    rows: Tensor
    """(M, D) float64"""


# -- The two steps -----------------------------------------------------------------------------


def centre_update(sums: Tensor, counts: Tensor) -> Tensor:
    """c_k = S_k / n_k: (…, K, D), (…, K) → (…, K, D). An empty cluster joins the largest."""
    if counts.is_cpu and bool(counts.all()):  # a GPU would be waited for
        return sums / counts.unsqueeze(-1)
    # A division by 0 would be in the gradient even though nothing of it is in the result.
    means = sums / torch.where(counts == 0, 1.0, counts).unsqueeze(-1)
    largest = counts.argmax(-1, keepdim=True).unsqueeze(-1).expand(*sums.shape[:-2], 1, sums.shape[-1])
    return torch.where(counts.unsqueeze(-1) > 0, means, means.gather(-2, largest))


def step_at_once(sums: Tensor, counts: Tensor, *, backend: Backend, **state: Any) -> Tensor | None:
    """`quire.kernels.lloyd.advance`, a whole update in two launches, or None where it cannot run."""
    if backend == "torch" or not sums.is_cuda or refusal(sums[:0].float()):
        return None
    from quire.kernels.lloyd import advance

    return advance(sums, counts, **state)


def inertia(rows: Tensor, centres: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """J = Σ w‖x − c_k(n)‖², in float64."""
    total = rows.new_zeros((), dtype=torch.float64)
    for part in pieces(rows):
        squared = squared_distances(rows[part], centres, labels[part])
        total += squared.sum() if weights is None else (squared * weights[part]).sum()
    return total


def inertia_from_sums(centres: Tensor, sums: Tensor, counts: Tensor, squares: Tensor) -> Tensor:
    """J = Σ w‖x‖² − 2 Σ_k c_k·S_k + Σ_k n_k‖c_k‖², of (…, K, D), (…, K, D), (…, K), (…) → (…)."""
    weighed = torch.sub(counts.unsqueeze(-1) * centres, sums, alpha=2)
    return (weighed.mul_(centres).sum((-1, -2)) + squares).clamp_min_(0.0)


def squared_distances(rows: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
    """‖x − c_k(n)‖² of each row, in float64."""
    return (rows.double() - centres.double()[labels]).square_().sum(1)


def centre_distances(rows: Tensor, centres: Tensor) -> Tensor:
    """‖x_n − c_k‖: (N, D), (K, D) → (N, K), in the dtype of the rows."""
    result = rows.new_empty(len(rows), len(centres))
    shift = centres.double().mean(0)
    moved = centres.double() - shift
    for part in pieces(rows, max(centres.shape)):
        x = rows[part].double() - shift
        squared = torch.addmm(moved.square().sum(1), x, moved.T, alpha=-2) + x.square().sum(1, keepdim=True)
        # A distance of zero may come out as the root of what rounding leaves.
        noise = 4e-16 * (x.square().sum(1, keepdim=True) + moved.square().sum(1))
        result[part] = torch.where(squared > noise, squared, 0.0).sqrt_()
    return result


# -- Empty clusters ----------------------------------------------------------------------------


def farthest_rows(
    rows: Tensor, centres: Tensor, labels: Tensor, count: int, *, weights: Tensor | None = None
) -> Farthest:
    """The `count` rows farthest from their centres, or all of them if they are fewer."""
    squared = torch.cat([squared_distances(rows[part], centres, labels[part]) for part in pieces(rows)])
    # Among those as far as the last of them, which are few, the first come first.
    far = (squared >= squared.topk(min(max(count, 1), len(squared))).values[-1:]).nonzero()[:, 0]
    order = far[squared[far].sort(descending=True, stable=True).indices[:count]]
    weight = squared.new_ones(len(order)) if weights is None else weights[order].double()
    return Farthest(squared[order], labels[order], weight, rows[order].double())


def relocate_empty(sums: Tensor, counts: Tensor, far: Farthest) -> tuple[Tensor, Tensor]:
    """Give each cluster without weight the farthest row that is left, taking it from its own: (K, D), (K,).

    `far` needs as many rows as there are empty clusters. If all rows lie on their centres, nothing is gained
    by that and nothing changes.
    """
    empty = (counts == 0).nonzero()[:, 0].tolist()
    if not empty or not len(far.squared) or float(far.squared[0]) == 0:
        return sums, counts
    sums, counts = sums.clone(), counts.clone()
    for place, (new, old) in enumerate(zip(empty, far.labels.tolist(), strict=False)):
        mass = far.weights[place]
        sums[old] -= mass * far.rows[place]
        sums[new] = mass * far.rows[place]
        counts[new] = mass
        counts[old] -= mass
    return sums, counts


# -- Seeds -------------------------------------------------------------------------------------


def seeding_probabilities(rows: Tensor, centres: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """p_n = w_n D(x_n)² / Σ w D², with D the distance to the nearest of the centres so far: (N,) float64."""
    squared = squared_distances(rows, centres, nearest_centres(rows, centres))
    squared = squared if weights is None else squared * weights
    return squared / squared.sum()


def kmeans_plusplus(
    rows: Tensor,
    clusters: int,
    generator: torch.Generator | None = None,
    *,
    weights: Tensor | None = None,
    starts: int = 1,
    trials: int | None = None,
) -> Tensor:
    """Numbers of rows to start from, (R, K): the first by weight, each further one with probability w·D².

    Of `trials` such draws (2 + ⌊ln K⌋ unless given) the one that lowers Σ w·D² most is taken; 1 is the plain
    method. All starts are drawn at once. What is drawn does not depend on the order of the rows, and a row of
    weight 2 is drawn like two rows.
    """
    n = len(rows)
    _check_clusters(n, clusters)
    trials = 2 + int(math.log(clusters)) if trials is None else trials
    order = _order(rows)
    x = rows[order] - rows.double().mean(0).to(rows.dtype)
    norms = x.square().sum(1)
    weight = norms.new_ones(n, dtype=torch.float64) if weights is None else weights[order].double()
    chosen = torch.empty(starts, clusters, dtype=torch.int64, device=rows.device)
    chosen[:, 0] = _draw(weight.expand(starts, n), 1, generator)[:, 0]
    nearest = _squared_to(x, norms, chosen[:, :1])[:, 0]
    every = torch.arange(starts, device=rows.device)
    for k in range(1, clusters):
        drawn = _draw(nearest * weight, trials, generator)
        squared = torch.minimum(_squared_to(x, norms, drawn), nearest[:, None])  # (R, T, N)
        best = (squared.double() @ weight).argmin(1)
        nearest, chosen[:, k] = squared[every, best], drawn[every, best]
    return order[chosen]


def random_rows(
    count: int,
    clusters: int,
    generator: torch.Generator | None = None,
    *,
    weights: Tensor | None = None,
    starts: int = 1,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Numbers of K different rows for each start, (R, K), drawn one after the other with probability w."""
    _check_clusters(count, clusters)
    device = device if weights is None else weights.device
    noise = torch.rand(starts, count, generator=generator, dtype=torch.float64, device=device)
    # The K largest of u^(1/w), as logarithms.
    keys = noise.log_() if weights is None else noise.log_() / weights.double()
    return keys.topk(clusters).indices


def _order(rows: Tensor) -> Tensor:
    """An order of the rows that is their own: that of their projections onto one direction, (N,)."""
    direction = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=rows.device).cos()
    return torch.cat([rows[part].double() @ direction for part in pieces(rows)]).argsort(stable=True)


def _squared_to(x: Tensor, norms: Tensor, chosen: Tensor) -> Tensor:
    """‖x_n − x_m‖² for m in `chosen` (R, T), (R, T, N); zero where rounding leaves nothing else."""
    squared = torch.addmm(norms, x[chosen.flatten()], x.T, alpha=-2)
    scale = norms + norms[chosen.flatten(), None]
    squared += norms[chosen.flatten(), None]
    return torch.where(squared > 4 * torch.finfo(x.dtype).eps * scale, squared, 0.0).view(*chosen.shape, -1)


def _draw(weight: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """`count` numbers below N for each row of `weight` (R, N), with probabilities in proportion to it."""
    heights = weight.double().cumsum(1)
    shape = (len(weight), count)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device=weight.device)
    return torch.searchsorted(heights, drawn * heights[:, -1:], right=True).clamp_(max=weight.shape[1] - 1)


def _check_clusters(rows: int, clusters: int) -> None:
    if not 1 <= clusters <= rows:
        raise InputError(
            f"{clusters} clusters of {rows} rows",
            expected="at least one cluster, and a row for each of them",
            fix="ask for fewer clusters, or give more rows",
        )
