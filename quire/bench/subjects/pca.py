"""The whole `fit` of PCA beside scikit-learn's, and how far both are from a QR factorisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.bench.case import SUBJECTS, Bar, Case, Contestant, Place, Work, peer
from quire.estimators.pca import PCA
from quire.functional.components import pca_covariance


@SUBJECTS.register("pca")
def pca(place: Place) -> Iterator[Case]:
    """The whole fit of PCA beside scikit-learn's on a CPU; on a GPU beside the Gram matrix and eigh."""
    if place.on_gpu:
        bars = (Bar("time", at_most=2.5e-3, machine="H200"), Bar("error", at_most=1e-5))
        yield on_gpu(place, 0.5, bars)
        yield on_gpu(place, 0.0, bars[1:])
        return
    for rows, features in ((200_000, 32), (20_000, 784)) if not place.small else ((200, 8),):
        for dtype in (np.float64, np.float32):
            yield on_cpu(rows, features, dtype)


def draw(rows: int, features: int) -> np.ndarray[Any, Any]:
    """Deviations fall like 1/(1 + d), as those of real data do; means are as large as deviations."""
    random = np.random.default_rng(0)
    factors = np.linalg.qr(random.standard_normal((features, features)))[0]
    x = (random.standard_normal((rows, features)) / (1 + np.arange(features))) @ factors
    return x + x.std(0)


def on_cpu(rows: int, features: int, dtype: Any) -> Case:
    x = draw(rows, features).astype(dtype)
    kept = min(16, features)
    centred = x.astype(np.float64) - x.mean(0, dtype=np.float64)
    values = np.linalg.svd(np.linalg.qr(centred, mode="r"))[1][:kept]

    def theirs() -> object:
        from sklearn.decomposition import PCA as Peer

        return Peer(kept).fit(x)

    name = np.dtype(dtype).name
    bars = (Bar("time", at_most=1.0, rival="scikit-learn"),) if dtype is np.float64 else ()
    return Case(
        f"PCA, {rows:,} × {features} to {kept}, {name}",
        {"quire": lambda: PCA(kept).fit(x), "scikit-learn": peer("sklearn", theirs)},
        work=Work(moved=x.nbytes, operations={name: 1.0 * rows * features**2}),
        unit="fit", error=lambda found: float(np.abs(found.singular_values_ / values - 1).max()), bars=bars,
    )  # fmt: skip


def on_gpu(place: Place, power: float, bars: tuple[Bar, ...]) -> Case:
    """Deviations fall like (1 + d)^−power; without a fall, nothing but the whole eigenproblem tells them."""
    rows, features, kept = 1_000_000, 256, 16
    generator = torch.Generator(place.device).manual_seed(0)
    scale = 1 / (1 + torch.arange(features, device=place.device)) ** power
    x = torch.randn(rows, features, generator=generator, device=place.device) * scale + scale
    exact = torch.linalg.eigvalsh(x.double().T.cov()).flip(0)[:kept]

    def gram() -> Tensor:
        centred = x - x.mean(0)
        return torch.linalg.eigh(centred.T @ centred / (rows - 1))[0].flip(0)[:kept]

    def quire() -> Tensor:
        return pca_covariance(x, kept).variances

    contestants: dict[str, Contestant] = {"quire": quire, "Gram matrix and eigh": gram}
    return Case(
        f"PCA, {rows:,} × {features} to {kept}, float32" + ("" if power else ", all variances alike"),
        contestants,
        work=Work(moved=x.nbytes, operations={"tf32": 3.0 * rows * features**2}), unit="fit",
        error=lambda found: float((found.double() / exact - 1).abs().max()),
        bars=bars,
    )  # fmt: skip
