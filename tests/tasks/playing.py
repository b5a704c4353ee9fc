"""Small adversarial tasks and data that their tests share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quire.data.batch import TensorData
from quire.models.gan import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from quire.tasks.adversarial import Adversarial

MODES = 4


def circle(rows: int, seed: int = 1) -> TensorData:
    """Points around four places on a circle; the place is the class."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(MODES, (rows,), generator=generator)
    inputs = centres()[target] + 0.1 * torch.randn(rows, 2, generator=generator)
    return TensorData({"inputs": inputs, "target": target})


def centres() -> Tensor:
    angles = torch.arange(MODES) * 2 * math.pi / MODES
    return math.sqrt(2) * torch.stack([angles.cos(), angles.sin()], 1)


def pixels(rows: int, seed: int = 1) -> TensorData:
    """Images of 6 × 5 bytes: class 0 is bright on the left, class 1 on the right."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(2, (rows,), generator=generator)
    inputs = torch.randint(0, 60, (rows, 1, 6, 5), generator=generator)
    columns = torch.arange(5) < 2
    bright = torch.where(target[:, None] == 0, columns, columns.flip(0))
    return TensorData({"inputs": (inputs + 180 * bright[:, None, None]).to(torch.uint8), "target": target})


def players(
    *,
    shape: tuple[int, ...] = (2,),
    classes: int = 0,
    norm: str = "none",
    spectral: bool = False,
    seed: int = 0,
    hidden: tuple[int, ...] = (8, 8),
    kind: str = "dense",
    output: str = "linear",
    **options: Any,
) -> Adversarial:
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "shape": shape,
        "classes": classes,
        "hidden": hidden,
        "kind": kind,
        "channels": 4,
    }
    generator = Generator(GeneratorConfig(**common, latent=3, norm=norm, output=output))  # type: ignore[arg-type]
    return Adversarial(generator, Discriminator(DiscriminatorConfig(**common, spectral=spectral)), **options)
