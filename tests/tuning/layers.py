"""One small layer of every kind that can be adapted, and W₀ + ΔW put together by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.nn import Dense
from quire.tuning import Adapters
from quire.tuning.factors import LowRank
from quire.tuning.overlay import Overlay


class Conv1D(nn.Module):
    """y = xW + b with W of (in, out), as in GPT-2."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Pair(nn.Module):
    """Calls an attention with what it needs."""

    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, _ = self.inner(query, key, value)
        return output


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    changed: int
    """Weights that "all" means."""


def normal(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape, dtype=torch.float64),)


def tokens(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, 7, shape),)


CASES: Mapping[str, Case] = {
    "linear": Case(lambda: nn.Linear(5, 4), normal(3, 5), 1),
    "linear without bias": Case(lambda: nn.Linear(5, 4, bias=False), normal(2, 3, 5), 1),
    "dense with activation": Case(lambda: Dense(5, 4, "tanh"), normal(3, 5), 1),
    "weight of (in, out)": Case(lambda: Conv1D(4, 5), normal(2, 3, 5), 1),
    "convolution 1-d": Case(lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), normal(2, 3, 9), 1),
    "convolution 2-d": Case(
        lambda: nn.Conv2d(3, 4, (3, 2), stride=2, padding=1, dilation=2), normal(2, 3, 9, 8), 1
    ),
    "convolution of one image": Case(lambda: nn.Conv2d(3, 4, 3), normal(3, 6, 6), 1),
    "convolution in a circle": Case(
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), normal(2, 3, 5, 5), 1
    ),
    "convolution 3-d": Case(lambda: nn.Conv3d(2, 3, 2), normal(2, 2, 4, 4, 4), 1),
    "grouped convolution": Case(lambda: nn.Conv2d(4, 6, 3, groups=2), normal(2, 4, 5, 5), 1),
    "depthwise convolution": Case(lambda: nn.Conv1d(4, 8, 3, groups=4), normal(2, 4, 7), 1),
    "transposed convolution": Case(lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), normal(2, 3, 4, 4), 1),
    "embedding": Case(lambda: nn.Embedding(7, 5), tokens(2, 6), 1),
    "embedding with padding": Case(lambda: nn.Embedding(7, 5, padding_idx=2), tokens(2, 6), 1),
    "embedding bag": Case(lambda: nn.EmbeddingBag(7, 5), tokens(2, 6), 1),
    "lstm": Case(lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), normal(2, 5, 3), 8),
    "lstm with projection": Case(lambda: nn.LSTM(3, 4, proj_size=2), normal(5, 2, 3), 3),
    "gru": Case(lambda: nn.GRU(3, 4), normal(5, 2, 3), 2),
    "elman": Case(lambda: nn.RNN(3, 4), normal(5, 2, 3), 2),
    "lstm cell": Case(lambda: nn.LSTMCell(3, 4), normal(2, 3), 2),
    "attention": Case(
        lambda: Pair(nn.MultiheadAttention(6, 2, batch_first=True)),
        lambda: tuple(torch.randn(3, 2, 5, 6, dtype=torch.float64)),
        2,
    ),
    "attention with other widths": Case(
        lambda: Pair(nn.MultiheadAttention(6, 2, kdim=4, vdim=3, batch_first=True)),
        lambda: (normal(2, 5, 6)()[0], normal(2, 7, 4)()[0], normal(2, 7, 3)()[0]),
        4,
    ),
    "encoder": Case(
        lambda: nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True), normal(2, 5, 6), 4
    ),
}


def randomise(adapters: Adapters) -> None:
    """Factors that are nowhere zero, as after training."""
    for name in adapters.configs:
        for parameter in adapters.parameters(name):
            nn.init.normal_(parameter, std=0.3)


def first_tensor(output: Any) -> Tensor:
    while isinstance(output, tuple):
        output = output[0]
    assert isinstance(output, Tensor)
    return output


def overlays(model: nn.Module) -> dict[str, Overlay]:
    """By the name of the weight that each lies over."""
    return {
        name.replace("tuning.", ""): module
        for name, module in model.named_modules()
        if isinstance(module, Overlay)
    }


def by_hand(
    model: nn.Module, name: str, overlay: Overlay, leaves: Mapping[str, tuple[Tensor, Tensor]]
) -> Tensor:
    """W₀ + Σ weight·s·B A, or (B A)ᵀ where the inputs are the rows, from copies of the factors."""
    owner = model.get_submodule(name.rpartition(".")[0])
    by_rows = isinstance(owner, nn.Embedding | nn.EmbeddingBag) or "Conv1D" in type(owner).__name__
    weight = owner._parameters[name.rpartition(".")[2]]
    assert weight is not None
    total = weight.detach()
    for name, share in overlay.active.items():
        change = overlay.adapters[name]
        assert isinstance(change, LowRank)
        first, second = leaves[name]
        product = torch.einsum("or,ri->oi", second.flatten(1), first.flatten(1))
        product = product.T if by_rows else product
        total = total + share * change.scale * product.reshape(weight.shape)
    return total
