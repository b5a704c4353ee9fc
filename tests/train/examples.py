"""Small tasks and data that the trainer's tests share."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.data.batch import TensorData
from quire.models.mlp import MLP, MLPConfig
from quire.nn.heads import Categorical, Gaussian
from quire.options import Train
from quire.tasks.supervised import Supervised
from quire.train.folder import RunFolder


def classes(rows: int = 90, seed: int = 1) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 5, generator=generator)
    target = (inputs[:, 0] + inputs[:, 1] ** 2 > 0.7).long() + (inputs[:, 2] > 1).long()
    return TensorData({"inputs": inputs, "target": target})


def numbers(rows: int = 90, seed: int = 1) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 5, generator=generator)
    noise = 0.1 * torch.randn(rows, generator=generator)
    return TensorData({"inputs": inputs, "target": 3 + 2 * inputs[:, 0] - inputs[:, 1] + noise})


def classifier(dropout: float = 0.0, norm: str = "none", seed: int = 0) -> Supervised:
    torch.manual_seed(seed)
    config = MLPConfig(5, 3, hidden=(8,), dropout=dropout, norm=norm)  # type: ignore[arg-type]
    return Supervised(MLP(config), Categorical(3))


def regressor(seed: int = 0, hidden: tuple[int, ...] = ()) -> Supervised:
    torch.manual_seed(seed)
    return Supervised(MLP(MLPConfig(5, 1, hidden=hidden)), Gaussian(1))


def folder(path: Path, *, resume: bool = False) -> RunFolder:
    if resume:
        return RunFolder.reopen(path)
    return RunFolder.create(path, {"format": 1, "recipe": "test"})


def often(**options: object) -> Train:
    """Training options that save at nearly every opportunity."""
    return Train(batch_size=20, checkpoint_seconds=0.0, **options)  # type: ignore[arg-type]
