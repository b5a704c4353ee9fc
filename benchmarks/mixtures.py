"""One iteration of a full-covariance Gaussian mixture, side by side with scikit-learn's, in one run.

50,000 rows of 32 features, 16 components, float64, from the same start. An iteration is what ten more of them
add to the whole of `fit`. The contestants take turns; the fastest rounds are compared, since other work on
the machine only ever adds to a time, and the parameters after all iterations stand beside the times.

    python -m benchmarks.mixtures [--rows 50000] [--features 32] [--components 16] [--rounds 3] [--device cpu]
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.mixture import GaussianMixture as Peer

from benchmarks.machine import describe, machine
from quire.estimators.mixture import GaussianMixture

BAR = 5.0
FEW, MANY = 2, 12


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    X = random_rows(options.rows, options.features, options.components)
    rows = torch.tensor(X, device=options.device)
    start = {
        "weights_init": np.full(options.components, 1 / options.components),
        "means_init": X[: options.components],
        "precisions_init": np.tile(np.linalg.inv(np.cov(X.T)), (options.components, 1, 1)),
    }

    def fit(kind: Any, data: Any, iterations: int) -> tuple[float, Any]:
        model = kind(options.components, tol=0, max_iter=iterations, **start)
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(data)
        if options.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - began, model

    contestants: dict[str, tuple[Any, Any]] = {"quire": (GaussianMixture, rows), "scikit-learn": (Peer, X)}
    times: dict[tuple[str, int], list[float]] = {}
    models = {}
    for kind, data in contestants.values():
        fit(kind, data, 1)  # warm-up
    for _ in range(options.rounds):
        for name, (kind, data) in contestants.items():
            for iterations in (FEW, MANY):
                seconds, models[name] = fit(kind, data, iterations)
                times.setdefault((name, iterations), []).append(seconds)
    each = {name: (min(times[name, MANY]) - min(times[name, FEW])) / (MANY - FEW) for name in contestants}
    print(describe(machine(("scikit-learn", "numpy"))))
    print(f"{options.rows} rows, {options.features} features, {options.components} full components, float64")
    for name, model in models.items():
        print(f"{name:13s} {1e3 * each[name]:8.1f} ms an iteration   mean ln p {model.lower_bound_:.9f}")
    mine, peer = models["quire"], models["scikit-learn"]
    gaps = {
        name: np.abs(getattr(mine, name) - getattr(peer, name)).max() for name in ("means_", "covariances_")
    }
    ratio = each["scikit-learn"] / each["quire"]
    print(f"scikit-learn / quire {ratio:.1f} (bar: at least {BAR:g})")
    print("largest difference after all iterations: " + ", ".join(f"{n} {v:.1e}" for n, v in gaps.items()))


if __name__ == "__main__":
    main()
