"""One file a subject; importing this package registers them all."""

from __future__ import annotations

from quire.bench.subjects import kmeans, language, linear_loss, matching, pooling, qlora, resnet50, small_mlp

__all__ = ["kmeans", "language", "linear_loss", "matching", "pooling", "qlora", "resnet50", "small_mlp"]
