"""Ten networks of ten kinds, small, none of which the code under test knows; the last two are of others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from quire.models import GPT, VAE, GPTConfig, VAEConfig, lenet5, resnet20, vgg11_bn

Made = tuple[nn.Module, tuple[Tensor, ...]]


def tokens(*shape: int) -> Tensor:
    return torch.randint(60, shape)


def dense() -> Made:
    sizes = (64, 256, 256, 128, 10)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), (torch.randn(128, 64),)


def lenet() -> Made:
    return lenet5(), (torch.randn(64, 1, 28, 28),)


def resnet() -> Made:
    return resnet20(), (torch.randn(8, 3, 32, 32),)


class Inverted(nn.Module):
    """MobileNet's block, with EfficientNet's squeeze and excitation."""

    def __init__(self, width: int, factor: int = 4) -> None:
        super().__init__()
        inner = width * factor
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.SiLU(),
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.SiLU(),
        )
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, width, 1), nn.SiLU())
        self.open = nn.Sequential(nn.Conv2d(width, inner, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return x + self.project(y * self.open(self.gate(y)))


def mobile() -> Made:
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(*stem, Inverted(16), Inverted(16), *head), (torch.randn(8, 3, 32, 32),)


def vgg() -> Made:
    model = vgg11_bn(num_classes=10)
    wide = {0: (512 * 7 * 7, 32), 3: (32, 32), 6: (32, 10)}  # the published ones have 120 million weights
    for place, sizes in wide.items():
        model.classifier[place] = nn.Linear(*sizes)
    return model, (torch.randn(2, 3, 64, 64),)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 60)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


def lstm() -> Made:
    return Reader(), (tokens(16, 24),)


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(8, 48, 64),)


def gpt() -> Made:
    return GPT(GPTConfig(vocab_size=60, context=64, layers=2, heads=4, width=64)), (tokens(8, 64),)


def vae() -> Made:
    return VAE(VAEConfig(shape=(784,), latent=8, hidden=(256,))), (torch.rand(64, 784),)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.last = nn.Conv2d(32, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(torch.cat([first, self.up(self.down(first))], 1))


def unet() -> Made:
    return UNet(), (torch.randn(4, 1, 32, 32),)


def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=60, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    return BertForSequenceClassification(config), (tokens(8, 32),)


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=64, n_embd=64, n_layer=2, n_head=4)), (
        tokens(8, 48),
    )


NETWORKS: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (dense, lenet, resnet, mobile, vgg, lstm, encoder, gpt, vae, unet, bert, gpt2)
}
