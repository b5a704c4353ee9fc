"""Layers with state, and output distributions."""

from __future__ import annotations

from quire.nn.activation import ACTIVATION_LAYERS, Arctan, activation
from quire.nn.dense import Dense
from quire.nn.dropout import Dropout, monte_carlo_dropout
from quire.nn.heads import HEADS, Bernoulli, Categorical, Gaussian, Head, Heteroscedastic, build_head
from quire.nn.images import Augmentation, ImageInputs
from quire.nn.noise import GaussianNoise
from quire.nn.normalise import BatchNorm, LayerNorm, PostNorm, PreNorm, Standardise

__all__ = [
    "ACTIVATION_LAYERS", "HEADS", "Arctan", "Augmentation", "BatchNorm", "Bernoulli", "Categorical",
    "Dense", "Dropout", "Gaussian", "GaussianNoise", "Head", "Heteroscedastic", "ImageInputs",
    "LayerNorm", "PostNorm", "PreNorm", "Standardise", "activation", "build_head", "monte_carlo_dropout",
]  # fmt: skip
