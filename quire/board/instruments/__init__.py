"""Instruments: formulas whose numbers can be moved. Importing this package registers them all."""

from __future__ import annotations

from quire.board.instruments import (  # noqa: F401
    activations,
    convolution,
    kernel_width,
    kmeans,
    lora_rank,
    step_size,
    temperature,
    vae_plane,
)
from quire.board.instruments.base import INSTRUMENTS, Instrument, answer

__all__ = ["INSTRUMENTS", "Instrument", "answer"]
