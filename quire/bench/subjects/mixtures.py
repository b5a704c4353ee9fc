"""An iteration of a full-covariance Gaussian mixture beside scikit-learn's, from the same start."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from quire.bench.case import (
    GIGABYTE,
    GROWTHS,
    SUBJECTS,
    Bar,
    Case,
    Contestant,
    Growth,
    Place,
    Turns,
    Work,
    peer,
)

FEW, MANY = 2, 12


@SUBJECTS.register("mixtures")
def mixtures(place: Place) -> Iterator[Case]:
    """An iteration of expectation-maximisation with full covariances, beside scikit-learn's."""
    if place.small:
        yield case(place, 600, 3, 2)
    elif not place.on_gpu:
        bars = (Bar("time", at_most=1 / 8, rival="scikit-learn"), Bar("error", at_most=1e-9))
        yield case(place, 50_000, 32, 16, bars)
    else:
        yield gpu_case(place, 200_000, 32, 64)


@GROWTHS.register("mixtures")
def growth(place: Place) -> Iterator[Growth]:
    """An iteration against the number of rows."""
    features, components = place.size(16, 2), place.size(16, 2)
    least, most = (16_000, 6) if place.on_gpu else (1000, 5)
    sizes = (100, 400) if place.small else tuple(least * 4**power for power in range(most))
    # A GPU does an iteration in less time than the start of a fit varies by.
    turns = (FEW, 10 * MANY) if place.on_gpu else (FEW, MANY)

    def make(rows: int) -> Case:
        from quire.estimators.mixture import GaussianMixture

        generator = torch.Generator(place.device).manual_seed(0)
        x = torch.randn(rows, features, generator=generator, device=place.device)

        def run(iterations: int) -> object:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it has not converged, and says so
                return GaussianMixture(components, tol=0, max_iter=iterations, random_state=0).fit(x)

        return Case("", {"quire": Turns(run, *turns)})

    yield Growth(
        f"Gaussian mixture iteration, {features} features, {components} full components", "rows N", sizes,
        make, order=1, memory_order=1,
    )  # fmt: skip


def case(place: Place, rows: int, features: int, components: int, bars: tuple[Bar, ...] = ()) -> Case:
    array = random_rows(rows, features, components)
    start = common_start(array, components)

    def fitted(kind: Any, data: Any) -> Callable[[int], Any]:
        def run(iterations: int) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # neither has converged, and both say so
                return kind(components, tol=0, max_iter=iterations, **start).fit(data)

        return run

    def rival(iterations: int) -> Any:
        from sklearn.mixture import GaussianMixture as Peer

        return fitted(Peer, array)(iterations)

    from quire.estimators.mixture import GaussianMixture

    mine = fitted(GaussianMixture, torch.tensor(array, device=place.device))
    contestants: dict[str, Contestant] = {
        "quire": Turns(mine, FEW, MANY),
        "scikit-learn": peer("sklearn", Turns(rival, FEW, MANY)),
    }

    def error(model: Any) -> float:
        """Of the mean log-likelihood of the fitted mixture, by the formula in NumPy."""
        return abs(float(model.score(array)) / log_likelihood(array, model) - 1)

    pairs = (features + 1) * (features + 2) // 2
    return Case(
        f"mixture iteration, {rows:,} × {features}, {components} full components, float64",
        contestants,
        # Two products with the pairs of a row's entries; the exponentials are next to nothing beside them.
        work=Work(moved=array.nbytes, operations={"float64": 4.0 * rows * pairs * components}),
        unit="iteration",
        error=error,
        bars=bars,
    )


def gpu_case(place: Place, rows: int, features: int, components: int) -> Case:
    """Rows in float32, beside the formula with all differences x − μ in memory."""
    from quire.estimators.mixture import GaussianMixture

    array = random_rows(rows, features, components)
    x = torch.tensor(array, device=place.device, dtype=torch.float32)
    start = common_start(array, components)
    few, many = 10, 210

    def run(iterations: int, x: torch.Tensor = x) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return GaussianMixture(components, tol=0, max_iter=iterations, **start).fit(x).lower_bound_

    def formula(iterations: int) -> float:
        weights, means, precisions = (torch.tensor(value).to(x) for value in start.values())
        covariances, likelihood = torch.linalg.inv(precisions), x.new_zeros(())
        for _ in range(iterations):
            likelihood, weights, means, covariances = formula_step(x, weights, means, covariances)
        return float(likelihood)

    exact = run(many, x.double())
    pairs = (features + 1) * (features + 2) // 2
    return Case(
        f"mixture iteration, {rows:,} × {features}, {components} full components, float32",
        {"quire": Turns(run, few, many), "formula": Turns(formula, few, many)},
        # Three products of halves where one of float32 is meant, with factors and with pairs.
        work=Work(moved=x.nbytes, operations={"bfloat16": 6.0 * rows * components * (features**2 + pairs)}),
        unit="iteration",
        error=lambda found: abs(found / exact - 1),
        bars=(
            Bar("time", at_most=0.5e-3, machine="H200"),
            Bar("memory", at_most=0.3 * GIGABYTE, machine="H200"),
            Bar("error", at_most=1e-6),
        ),
    )


def common_start(rows: np.ndarray, components: int) -> dict[str, Any]:
    """Equal weights, the first rows as means and the covariance of all: what every contestant begins with."""
    return {
        "weights_init": np.full(components, 1 / components),
        "means_init": rows[:components],
        "precisions_init": np.tile(np.linalg.inv(np.cov(rows.T)), (components, 1, 1)),
    }


def formula_step(
    x: torch.Tensor, weights: torch.Tensor, means: torch.Tensor, covariances: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """mean ln p(x) of rows (N, D), and the next π (K,), μ (K, D) and Σ (K, D, D)."""
    factors = torch.linalg.inv(torch.linalg.cholesky(covariances)).mT
    scaled = torch.einsum("nki,kij->nkj", x[:, None] - means, factors)
    volume = factors.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * math.log(2 * math.pi) * x.shape[1]
    logs = weights.log() + volume - 0.5 * scaled.square().sum(-1)
    share = logs.softmax(-1)
    count = share.sum(0)
    means = share.mT @ x / count[:, None]
    apart = x[:, None] - means
    second = torch.einsum("nki,nkj->kij", share[..., None] * apart, apart) / count[:, None, None]
    floor = 1e-6 * torch.eye(x.shape[1], device=x.device)
    return logs.logsumexp(-1).mean(), count / len(x), means, second + floor


def random_rows(rows: int, features: int, components: int, seed: int = 0) -> np.ndarray:
    """Overlapping components of random shapes, off the origin."""
    rng = np.random.default_rng(seed)
    label = rng.integers(components, size=rows)
    shapes = np.eye(features) + 0.5 * rng.normal(size=(components, features, features)) / features**0.5
    places = 10 + 2 * rng.normal(size=(components, features))
    out = np.empty((rows, features))
    for k in range(components):
        own = label == k
        out[own] = rng.normal(size=(own.sum(), features)) @ shapes[k] + places[k]
    return out


def log_likelihood(rows: np.ndarray, model: Any) -> float:
    """mean_n ln Σ_k π_k N(x_n; μ_k, Σ_k)."""
    logs = []
    for weight, mean, covariance in zip(model.weights_, model.means_, model.covariances_, strict=True):
        apart = rows - mean
        distance = (apart * np.linalg.solve(covariance, apart.T).T).sum(1)
        volume = np.linalg.slogdet(2 * np.pi * covariance)[1]
        logs.append(np.log(weight) - 0.5 * (distance + volume))
    return float(np.logaddexp.reduce(np.array(logs)).mean())
