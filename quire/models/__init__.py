"""Model families: plain `nn.Module`s, each with its config dataclass and a registered name.

Networks that have names of their own, such as resnet50, are built by functions of those names.
"""

from __future__ import annotations

from quire.models.alexnet import AlexNet, AlexNetConfig, alexnet
from quire.models.autoencoder import Autoencoder, AutoencoderConfig, linear_autoencoder
from quire.models.coders import CoderConfig, Decoder, Encoder
from quire.models.densenet import DenseNet, DenseNetConfig, densenet121, densenet169, densenet201
from quire.models.ensemble import EnsembleConfig, MLPEnsemble
from quire.models.gan import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from quire.models.googlenet import GoogLeNet, GoogLeNetConfig, googlenet
from quire.models.gpt import GPT, GPTConfig
from quire.models.lenet import LeNet, LeNetConfig, lenet5
from quire.models.mlp import MLP, MLPConfig, linear
from quire.models.nadaraya_watson import NadarayaWatson, NadarayaWatsonConfig
from quire.models.polynomial import PolynomialConfig, PolynomialModel
from quire.models.recurrent import (
    RecurrentClassifier,
    RecurrentClassifierConfig,
    RecurrentLM,
    RecurrentLMConfig,
)
from quire.models.registry import BUILDERS, MODELS, Example, build_model, model, model_spec
from quire.models.resnet import (
    ResNet,
    ResNetConfig,
    resnet18,
    resnet20,
    resnet32,
    resnet34,
    resnet44,
    resnet50,
    resnet56,
    resnet101,
    resnet152,
    resnext50_32x4d,
    resnext101_32x8d,
    resnext101_64x4d,
)
from quire.models.seq2seq import Seq2Seq, Seq2SeqConfig
from quire.models.ssd import SSD, SSDConfig
from quire.models.transformer import (
    Transformer,
    TransformerClassifier,
    TransformerClassifierConfig,
    TransformerConfig,
)
from quire.models.vae import VAE, VAEConfig
from quire.models.vgg import (
    VGG,
    VGGConfig,
    vgg11,
    vgg11_bn,
    vgg13,
    vgg13_bn,
    vgg16,
    vgg16_bn,
    vgg19,
    vgg19_bn,
)
from quire.models.vision import ConvNet, VisionConfig
from quire.models.weights import fit_weights, load_weights, read_weights

__all__ = [
    "BUILDERS",
    "GPT",
    "MLP",
    "MODELS",
    "SSD",
    "VAE",
    "VGG",
    "AlexNet",
    "AlexNetConfig",
    "Autoencoder",
    "AutoencoderConfig",
    "CoderConfig",
    "ConvNet",
    "Decoder",
    "DenseNet",
    "DenseNetConfig",
    "Discriminator",
    "DiscriminatorConfig",
    "Encoder",
    "EnsembleConfig",
    "Example",
    "GPTConfig",
    "Generator",
    "GeneratorConfig",
    "GoogLeNet",
    "GoogLeNetConfig",
    "LeNet",
    "LeNetConfig",
    "MLPConfig",
    "MLPEnsemble",
    "NadarayaWatson",
    "NadarayaWatsonConfig",
    "PolynomialConfig",
    "PolynomialModel",
    "RecurrentClassifier",
    "RecurrentClassifierConfig",
    "RecurrentLM",
    "RecurrentLMConfig",
    "ResNet",
    "ResNetConfig",
    "SSDConfig",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Transformer",
    "TransformerClassifier",
    "TransformerClassifierConfig",
    "TransformerConfig",
    "VAEConfig",
    "VGGConfig",
    "VisionConfig",
    "alexnet",
    "build_model",
    "densenet121",
    "densenet169",
    "densenet201",
    "fit_weights",
    "googlenet",
    "lenet5",
    "linear",
    "linear_autoencoder",
    "load_weights",
    "model",
    "model_spec",
    "read_weights",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet34",
    "resnet44",
    "resnet50",
    "resnet56",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
]
