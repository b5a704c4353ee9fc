"""Chapter 21, K-means: against scikit-learn from the same start, and explicit probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.functional.clusters import (
    centre_update,
    inertia,
    kmeans_plusplus,
    random_rows,
    seeding_probabilities,
)
from quire.functional.nearest import cluster_sums
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]


def _blobs(rows: int, features: int, centres: int, spread: float = 4.0) -> Tensor:
    middle = spread * torch.randn(centres, features, dtype=torch.float64)
    return middle[torch.arange(rows) % centres] + torch.randn(rows, features, dtype=torch.float64)


def _picture() -> Figure:
    from quire.report.style import figure

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        x = _blobs(400, 2, 6)
        centres, path, heights = x[:6].clone(), [x[:6].clone()], []
        for _ in range(12):
            found = cluster_sums(x, centres)
            heights.append(float(inertia(x, centres, found.labels)))
            centres = centre_update(found.sums, found.counts)
            heights.append(float(inertia(x, centres, found.labels)))
            path.append(centres)
    fig = figure(9.4, 3.8)
    plane, curve = fig.subplots(1, 2)
    plane.scatter(x[:, 0], x[:, 1], c=found.labels, cmap="tab10", s=8)
    for trail in torch.stack(path, 1):
        plane.plot(trail[:, 0], trail[:, 1], color="black", linewidth=0.8)
    plane.scatter(centres[:, 0], centres[:, 1], color="black", marker="x")
    plane.set(title="clusters and the paths of their centres", xlabel="x₁", ylabel="x₂")
    steps = torch.arange(len(heights)) / 2
    curve.plot(steps, heights, color="grey", linewidth=0.8)
    curve.plot(steps[::2], heights[::2], "o", label="rows assigned", markersize=4)
    curve.plot(steps[1::2], heights[1::2], "s", label="centres updated", markersize=4)
    curve.set(title="J never rises", xlabel="iteration", ylabel="J")
    curve.legend()
    return fig


def _by_product(rows: Tensor, centres: Tensor, **options: Any) -> Any:
    """The largest x·c instead of the nearest c: ‖c‖² is forgotten."""
    labels = (rows @ centres.T).argmax(1)
    one_hot = torch.nn.functional.one_hot(labels, len(centres)).to(rows.dtype)
    return cluster_sums(rows, centres)._replace(labels=labels, sums=one_hot.T @ rows, counts=one_hot.sum(0))


@entry(
    "classical/k-means",
    "K-means",
    r"J = \sum_n \|x_n - c_{k(n)}\|^2; \qquad k(n) \leftarrow \arg\min_k \|x_n - c_k\|^2, \quad "
    r"c_k \leftarrow \frac{1}{n_k} \sum_{n:\,k(n)=k} x_n; \qquad J \text{ never rises}",
    code=(cluster_sums, centre_update, inertia),
    wrong=(_by_product, centre_update, inertia),
    tolerance=1e-9,
    picture=_picture,
)
def _k_means(assign: Code, update: Code, objective: Code) -> float:
    from sklearn.cluster import KMeans

    x = _blobs(500, 3, 7) + 10
    centres, labels, rises, iterations = x[:9].clone(), torch.full((500,), -1), 0.0, 0
    while iterations < 100:
        found = assign(x, centres)
        now = float(objective(x, centres, found.labels))
        apart = zip(x, found.labels, strict=True)
        rises = worst(rises, gap(now, sum(float((row - centres[k]).square().sum()) for row, k in apart)))
        if iterations:  # the same centres, the rows assigned anew
            rises = worst(rises, (now - float(objective(x, centres, labels))) / now)
        new = update(found.sums, found.counts)
        rises = worst(rises, (float(objective(x, new, found.labels)) - now) / now)
        iterations += 1
        if torch.equal(labels, found.labels):
            break
        centres, labels = new, found.labels
    peer = KMeans(9, init=x[:9].numpy(), n_init=1, tol=0.0).fit(x.numpy())
    return worst(
        rises,
        gap(centres, torch.from_numpy(peer.cluster_centers_)),
        gap(float(objective(x, centres, labels)), peer.inertia_),
        require(iterations == peer.n_iter_ and labels.tolist() == peer.labels_.tolist()),
    )


def _by_distance(rows: Tensor, centres: Tensor, **options: Any) -> Tensor:
    """In proportion to D instead of D²."""
    root = seeding_probabilities(rows, centres).sqrt()
    return root / root.sum()


def _anywhere(
    rows: Tensor, clusters: int, generator: Any = None, *, starts: int = 1, **options: Any
) -> Tensor:
    return random_rows(len(rows), clusters, generator, starts=starts)


@entry(
    "classical/k-means++",
    "First centres far apart: k-means++",
    r"p_n = \frac{D(x_n)^2}{\sum_m D(x_m)^2}, \qquad D(x) = \min_{c \text{ chosen so far}} \|x - c\|",
    code=(seeding_probabilities, kmeans_plusplus),
    wrong=(_by_distance, _anywhere),
    tolerance=1e-12,
)
def _k_means_plus_plus(probabilities: Code, choose: Code) -> float:
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [2.0, 0.0], [3.0, 4.0], [5.0, 5.0]], dtype=torch.float64)
    drawn = choose(x, 3, starts=40_000, trials=1)
    error = 0.0
    for first in range(5):
        for second in range(5):
            chosen = [first] if first == second else [first, second]
            squared = [min(float((row - x[k]).square().sum()) for k in chosen) for row in x]
            wanted = torch.tensor(squared, dtype=torch.float64) / sum(squared)
            error = worst(error, gap(probabilities(x, x[chosen]), wanted))
            after = drawn[(drawn[:, : len(chosen)] == torch.tensor(chosen)).all(1), len(chosen)]
            if len(after):
                share = torch.bincount(after, minlength=5) / len(after)
                # Five standard deviations of a share.
                error = worst(error, require(((share - wanted).abs() <= 2.5 / len(after) ** 0.5).all()))
    return error
