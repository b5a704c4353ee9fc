"""An iteration of a full-covariance Gaussian mixture beside scikit-learn's, from the same start."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from quire.bench.case import SUBJECTS, Bar, Case, Contestant, Place, Turns, Work, peer

FEW, MANY = 2, 12


@SUBJECTS.register("mixtures")
def mixtures(place: Place) -> Iterator[Case]:
    """An iteration of expectation-maximisation with full covariances, beside scikit-learn's."""
    if place.small:
        yield case(place, 600, 3, 2)
    elif not place.on_gpu:
        bars = (Bar("time", at_most=1 / 8, rival="scikit-learn"), Bar("error", at_most=1e-9))
        yield case(place, 50_000, 32, 16, bars)


def case(place: Place, rows: int, features: int, components: int, bars: tuple[Bar, ...] = ()) -> Case:
    array = random_rows(rows, features, components)
    start = {
        "weights_init": np.full(components, 1 / components),
        "means_init": array[:components],
        "precisions_init": np.tile(np.linalg.inv(np.cov(array.T)), (components, 1, 1)),
    }

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
