"""Healthy models of other libraries are left in peace, before the first step and in a few of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.doctor import diagnose

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

CLASSES = 4
Made = tuple[nn.Module, Callable[[Any, Any], Tensor], list[tuple[Tensor, Tensor]]]


def images(size: int = 32, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Two batches whose classes are told by their brightness."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        label = torch.arange(rows) % CLASSES
        x = torch.randn(rows, 3, size, size, generator=generator)
        found.append((x + (label[:, None, None, None] - 1.5) * 0.7, label))
    return found


def tokens(places: int = 12, words: int = 50, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randint(words, (rows, places), generator=generator) for _ in range(2)]
    return [(part, part[:, 0] % CLASSES) for part in x]


def next_tokens(places: int = 12, words: int = 50, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randint(words, (rows, places + 1), generator=generator) for _ in range(2)]
    return [(part[:, :-1], part[:, 1:]) for part in x]


def class_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits if hasattr(output, "logits") else output, target)


def token_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def hugging(name: str, data: Callable[..., Any] = tokens, loss: Any = class_loss, **options: Any) -> Made:
    kind = getattr(transformers, name)
    config = kind.config_class(num_labels=CLASSES, **options)
    return kind(config), loss, data()


TEXT = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "pad_token_id": 0,
}  # fmt: skip
SMALL = {"image_size": 32, "patch_size": 8} | {
    k: v for k, v in TEXT.items() if "token" not in k and "vocab" not in k
}


def timm_model(name: str) -> Made:
    timm = pytest.importorskip("timm")
    return timm.create_model(name, num_classes=CLASSES), class_loss, images(64)


def torchvision_model(name: str) -> Made:
    vision = pytest.importorskip("torchvision")
    return vision.models.get_model(name, num_classes=CLASSES), class_loss, images(64)


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: hugging(
        "GPT2LMHeadModel", next_tokens, token_loss, vocab_size=50, n_embd=32, n_layer=2, n_head=2,
        n_positions=16,
    ),
    "bert": lambda: hugging("BertForSequenceClassification", **TEXT),
    "roberta": lambda: hugging("RobertaForSequenceClassification", **TEXT),
    "electra": lambda: hugging("ElectraForSequenceClassification", embedding_size=32, **TEXT),
    "albert": lambda: hugging("AlbertForSequenceClassification", embedding_size=16, **TEXT),
    "distilbert": lambda: hugging(
        "DistilBertForSequenceClassification", vocab_size=50, dim=32, n_layers=2, n_heads=2, hidden_dim=64
    ),
    "llama": lambda: hugging("LlamaForCausalLM", next_tokens, token_loss, num_key_value_heads=2, **TEXT),
    "vit": lambda: hugging("ViTForImageClassification", images, **SMALL),
    "hf resnet": lambda: hugging(
        "ResNetForImageClassification", images, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
        layer_type="basic",
    ),
    "convnext": lambda: hugging(
        "ConvNextForImageClassification", images, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2
    ),
    "timm resnet18": lambda: timm_model("resnet18"),
    "timm mobilenet": lambda: timm_model("mobilenetv3_small_050"),
    "timm convnext": lambda: timm_model("convnext_atto"),
    "timm efficientnet": lambda: timm_model("efficientnet_b0"),
    "torchvision resnet18": lambda: torchvision_model("resnet18"),
    "torchvision densenet": lambda: torchvision_model("densenet121"),
    "torchvision shufflenet": lambda: torchvision_model("shufflenet_v2_x0_5"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_stranger_is_left_in_peace(name: str) -> None:
    torch.manual_seed(0)
    model, loss, batches = MODELS[name]()
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    verdict = diagnose(model, loss, batches, optimisers=optimiser, steps=20, seconds=10)
    assert verdict.findings.codes("error", "warning") == [], str(verdict)
