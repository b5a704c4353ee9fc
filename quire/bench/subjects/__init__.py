"""One file a subject; importing this package registers them all."""

from __future__ import annotations

from quire.bench.subjects import (
    average_precision,
    curvature,
    digits,
    doctor,
    guard,
    kmeans,
    language,
    linear_loss,
    matching,
    mixtures,
    pca,
    pooling,
    qlora,
    recurrent,
    resnet50,
    small_mlp,
)

__all__ = [
    "average_precision",
    "curvature",
    "digits",
    "doctor",
    "guard",
    "kmeans",
    "language",
    "linear_loss",
    "matching",
    "mixtures",
    "pca",
    "pooling",
    "qlora",
    "recurrent",
    "resnet50",
    "small_mlp",
]
