"""PCA side by side with scikit-learn's: the time of a whole `fit`, and how far the results are apart.

Rows are drawn with deviations that fall like 1/(1 + d), as those of real data do, and each column has a mean
as large as its standard deviation. Repetitions are interleaved, so that a slow minute of the machine hits all
alike; medians are shown. Accuracy is that of the singular values and of the subspace, against a QR
factorisation in float64.

    python benchmarks/pca.py [--repetitions 5] [--threads N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.decomposition import PCA as PeerPCA

from benchmarks.machine import describe, machine
from quire.estimators.pca import PCA

Array = np.ndarray[Any, Any]


class Case(NamedTuple):
    rows: int
    features: int
    dtype: str

    def draw(self) -> Array:
        random = np.random.default_rng(0)
        factors = np.linalg.qr(random.standard_normal((self.features, self.features)))[0]
        deviations = 1 / (1 + np.arange(self.features))
        rows = random.standard_normal((self.rows, self.features)) * deviations
        rows = rows @ factors
        return (rows + rows.std(0)).astype(self.dtype)


CASES = [
    Case(rows, features, dtype)
    for rows, features in ((200_000, 32), (20_000, 784))
    for dtype in ("float64", "float32")
]
COMPONENTS = (16, None)
LIMIT = 1.0
"""Quire's time over scikit-learn's."""


def truth(X: Array) -> tuple[Array, Array]:
    """Singular values and axes from a QR factorisation and a decomposition of its small factor."""
    centred = X.astype(np.float64)
    centred -= centred.mean(0)
    _, values, axes = np.linalg.svd(np.linalg.qr(centred, mode="r"))
    return values, axes


def errors(model: Any, values: Array, axes: Array) -> dict[str, float]:
    kept = len(model.components_)
    found = model.components_.astype(np.float64)
    relative = np.abs(model.singular_values_ - values[:kept]) / values[:kept]
    # The sine of the largest angle between the planes; nothing is left over if all components are kept.
    left_over = found - (found @ axes[:kept].T) @ axes[:kept]
    return {"singular_values": float(relative.max()), "subspace": float(np.linalg.norm(left_over, 2))}


def compare(case: Case, repetitions: int) -> Iterator[dict[str, Any]]:
    X = case.draw()
    values, axes = truth(X)
    for components in COMPONENTS:
        models = {"quire": PCA(components), "scikit-learn": PeerPCA(components)}
        names = list(models)
        for model in models.values():
            model.fit(X)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for repetition in range(repetitions):
            for name in names if repetition % 2 else names[::-1]:
                began = time.perf_counter()
                models[name].fit(X)
                seconds[name].append(time.perf_counter() - began)
        rows = {
            name: {"seconds": statistics.median(seconds[name]), "fastest": min(seconds[name])}
            | errors(models[name], values, axes)
            for name in names
        }
        ratio = rows["quire"]["seconds"] / rows["scikit-learn"]["seconds"]
        kept = {"components": components, "models": rows, "ratio": ratio, "met": ratio <= LIMIT}
        yield case._asdict() | kept


def show(result: dict[str, Any]) -> None:
    print(describe(result["machine"]))
    for case in result["cases"]:
        name = f"{case['rows']} × {case['features']} → {case['components'] or 'all'}, {case['dtype']}"
        print(f"\n{name}: {case['ratio']:.2f} of scikit-learn's time, at most {result['limit']:.2f}")
        for name, row in case["models"].items():
            print(
                f"  {name:14}{1e3 * row['seconds']:9.1f} ms  error of singular values "
                f"{row['singular_values']:.1e}, of the subspace {row['subspace']:.1e}"
            )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="PCA side by side with scikit-learn's.")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads for PyTorch and for NumPy's BLAS")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        from threadpoolctl import threadpool_limits

        torch.set_num_threads(chosen.threads)
        threadpool_limits(chosen.threads)
    result = {
        "benchmark": "pca",
        "machine": machine(("scikit-learn", "numpy", "scipy")),
        "repetitions": chosen.repetitions,
        "limit": LIMIT,
        "cases": [found for case in CASES for found in compare(case, chosen.repetitions)],
    }
    if chosen.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
