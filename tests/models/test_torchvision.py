"""Torchvision's networks and these are the same: names, shapes, first weights, logits, gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.models import BUILDERS

torchvision = pytest.importorskip("torchvision")

SHARED = [name for name in BUILDERS if hasattr(torchvision.models, name)]
ONE_OF_EACH = [
    "alexnet", "vgg11", "vgg11_bn", "googlenet", "resnet18", "resnet50", "resnext50_32x4d", "densenet121"
]  # fmt: skip


def theirs(name: str, **options: Any) -> nn.Module:
    if name == "googlenet":
        options |= {"init_weights": True}
    return getattr(torchvision.models, name)(weights=None, **options)


def pair(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    here, there = BUILDERS[name](7, **options), theirs(name, num_classes=7, **options)
    here.load_state_dict(there.state_dict())
    return here, there


def test_only_these_are_not_torchvisions() -> None:
    assert set(BUILDERS) - set(SHARED) == {"lenet5", "resnet20", "resnet32", "resnet44", "resnet56"}


@pytest.mark.parametrize("name", SHARED)
def test_names_and_shapes(name: str) -> None:
    with torch.device("meta"):
        here, there = BUILDERS[name]().state_dict(), theirs(name).state_dict()
    assert {key: value.shape for key, value in here.items()} == {k: v.shape for k, v in there.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_logits(name: str) -> None:
    here, there = pair(name)
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        mine, expected = here.eval()(x), there.eval()(x)
    assert float((mine - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_logits_of_transformed_inputs() -> None:
    here, there = pair("googlenet", transform_input=True)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(here.eval()(x), there.eval()(x), rtol=1e-5, atol=1e-5)


NO_DROPOUT = {
    "resnet18": {},
    "resnext50_32x4d": {},
    "densenet121": {},
    "googlenet": {"dropout": 0.0, "dropout_aux": 0.0},
}


@pytest.mark.parametrize("name", list(NO_DROPOUT))
def test_training(name: str) -> None:
    """Gradients and running averages; with auxiliary heads, those of all three outputs."""
    here, there = (net.double() for net in pair(name, **NO_DROPOUT[name]))
    x = torch.randn(2, 3, 65, 66, dtype=torch.float64)
    mine, expected = here(x), there(x)
    if name == "googlenet":
        mine, expected = torch.cat(mine), torch.cat([expected[0], expected.aux_logits1, expected.aux_logits2])
    torch.testing.assert_close(mine, expected)
    for output in (mine, expected):
        (output - 1).square().sum().backward()
    assert_close_everywhere(gradients(here), gradients(there))
    assert_close_everywhere(dict(here.named_buffers()), dict(there.named_buffers()))


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def assert_close_everywhere(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(mine[key], value, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["googlenet", "resnet18", "densenet121"])
def test_first_weights_have_the_same_size(name: str) -> None:
    here, there = BUILDERS[name](), theirs(name)
    for key, peer in there.named_parameters():
        mine = here.get_parameter(key)
        if peer.numel() >= 4000:
            assert mine.std().item() == pytest.approx(peer.std().item(), rel=0.1), key
        elif key.endswith("bias") or peer.dim() == 1:
            assert (mine.std() == 0) == (peer.std() == 0), key
            assert mine.mean().item() == pytest.approx(peer.mean().item(), abs=0.02), key


def test_a_file_that_torchvision_saved(tmp_path: Path) -> None:
    there = theirs("resnet18").eval()
    torch.save(there.state_dict(), tmp_path / "resnet18.pth")
    here = BUILDERS["resnet18"](weights=tmp_path / "resnet18.pth").eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(here(x), there(x), rtol=1e-5, atol=1e-5)
