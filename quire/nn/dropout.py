"""Dropout, and its reading as an average over an ensemble of thinned networks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional import regularise

DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip


class Dropout(nn.Module):
    """m⊙x/(1−p) with m ~ Bernoulli(1−p) while training, x in evaluation."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        regularise.check_rate(p, "drop rate")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return regularise.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


@dataclass(frozen=True)
class MonteCarlo:
    """Mean and spread of a network's outputs over random dropout masks."""

    mean: Tensor
    std: Tensor
    samples: int

    @property
    def standard_error(self) -> Tensor:
        """Of the mean: std/√S."""
        return self.std / self.samples**0.5


@torch.no_grad()
def monte_carlo_dropout(module: nn.Module, x: Tensor, samples: int = 100) -> MonteCarlo:
    """(1/S)·Σ_s f(x; mask_s): the prediction of the ensemble that dropout trains, with its spread.

    Only the dropout layers are set to training; the others (batch norm) stay as in evaluation, and
    all modes are restored afterwards.
    """
    if samples < 2:
        raise InputError(f"{samples} samples", expected="at least 2, so that a spread exists")
    layers = [layer for layer in module.modules() if isinstance(layer, (Dropout, *DROPOUTS))]
    if not layers:
        raise InputError(
            f"a {type(module).__name__} without dropout layers",
            expected="at least one dropout layer; without any, all samples would be alike",
            fix="add quire.nn.Dropout to the network",
        )
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        for layer in layers:
            layer.train()
        mean = squares = torch.zeros(())
        for count in range(1, samples + 1):  # Welford's update: stable, and memory for one output
            output = module(x)
            mean = output.clone() if count == 1 else mean
            squares = torch.zeros_like(output) if count == 1 else squares
            step = output - mean
            mean = mean + step / count
            squares = squares + step * (output - mean)
    finally:
        for part, mode in modes:
            part.training = mode
    return MonteCarlo(mean, (squares / (samples - 1)).sqrt(), samples)
