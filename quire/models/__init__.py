"""Model families: plain `nn.Module`s, each with its config dataclass and a registered name."""

from __future__ import annotations

from quire.models.ensemble import EnsembleConfig, MLPEnsemble
from quire.models.mlp import MLP, MLPConfig, linear
from quire.models.polynomial import PolynomialConfig, PolynomialModel
from quire.models.registry import MODELS, build_model, model, model_spec

__all__ = [
    "MLP",
    "MODELS",
    "EnsembleConfig",
    "MLPConfig",
    "MLPEnsemble",
    "PolynomialConfig",
    "PolynomialModel",
    "build_model",
    "linear",
    "model",
    "model_spec",
]
