"""Layers with state, and output distributions."""

from __future__ import annotations

from quire.nn.activation import ACTIVATION_LAYERS, Arctan, activation
from quire.nn.attention import AdditiveAttention, AttentionPooling, KeyValueCache, MultiHeadAttention
from quire.nn.dense import Dense
from quire.nn.dropout import Dropout, monte_carlo_dropout
from quire.nn.heads import HEADS, Bernoulli, Categorical, Gaussian, Head, Heteroscedastic, build_head
from quire.nn.images import Augmentation, ImageInputs
from quire.nn.noise import GaussianNoise, noisy_activations, perturbed
from quire.nn.normalise import BatchNorm, LayerNorm, PostNorm, PreNorm, Standardise
from quire.nn.position import LearnedPosition, SinusoidalPosition
from quire.nn.recurrent import GRU, LSTM, RNN

__all__ = [
    "ACTIVATION_LAYERS", "GRU", "HEADS", "LSTM", "RNN", "AdditiveAttention", "Arctan", "AttentionPooling",
    "Augmentation", "BatchNorm", "Bernoulli", "Categorical", "Dense", "Dropout", "Gaussian",
    "GaussianNoise", "Head", "Heteroscedastic", "ImageInputs", "KeyValueCache", "LayerNorm",
    "LearnedPosition", "MultiHeadAttention", "PostNorm", "PreNorm", "SinusoidalPosition", "Standardise",
    "activation", "build_head", "monte_carlo_dropout", "noisy_activations", "perturbed",
]  # fmt: skip
