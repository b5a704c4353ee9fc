"""What the stages of every network see and how they move with the image: formula, gradient, brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.functional import Branches, Window, equivariance_error, receptive_field, receptive_field_of
from quire.models import BUILDERS, ConvNet

pytestmark = pytest.mark.slow

Layers = list[Window | Branches]
THREE = Window(3, 1, 1)


def build(name: str, **config: Any) -> ConvNet:
    """Narrow, with batch norms that have seen a batch, without which some networks fade out."""
    net = BUILDERS[name](3, **{"in_channels": 3, "width": 0.125} | config).double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        net(noise(4, 32 if name == "lenet5" else max(net.smallest, 16)))
    return net.eval()


def noise(count: int, *size: int) -> Tensor:
    return torch.randn(count, 3, size[0], size[-1], dtype=torch.float64)


class Stage(nn.Module):
    def __init__(self, net: ConvNet, index: int) -> None:
        super().__init__()
        self.net, self.index = net, index

    def forward(self, x: Tensor) -> Tensor:
        return self.net.stages(x)[self.index]


# The networks as chains of windows ------------------------------------------------------------


def vgg(*convolutions: int, pools: Sequence[int] = range(5)) -> Layers:
    layers: Layers = []
    for block, count in enumerate(convolutions):
        layers += [THREE] * count + ([Window(2, 2)] if block in pools else [])
    return layers


def alexnet(first: Window, padding: int) -> Layers:
    pool = Window(3, 2, padding)
    return [first, pool, Window(5, 1, 2), pool, THREE, THREE, THREE, pool]


def googlenet(*stem: Window) -> Layers:
    block = Branches([[Window(1)], [Window(1), THREE], [Window(1), THREE], [THREE, Window(1)]])
    pool = Window(3, 2)
    return [*stem, Window(1), THREE, pool, block, block, pool, *[block] * 5, Window(2, 2), block, block]


def resnet(stem: Layers, counts: Sequence[int], inner: Sequence[int]) -> Layers:
    """`inner` are the sizes of a block's convolutions; a stride is in the first that is not 1×1."""
    layers = list(stem)
    for stage, count in enumerate(counts):
        for block in range(count):
            stride = 2 if stage and not block else 1
            at = [kernel > 1 for kernel in inner].index(True)
            path = [Window(k, stride if i == at else 1, k // 2) for i, k in enumerate(inner)]
            layers.append(Branches([path, [Window(1, stride)]]))
    return layers


def densenet(stem: Layers, counts: Sequence[int]) -> Layers:
    layers = list(stem)
    for block, count in enumerate(counts):
        if block:
            layers.append(Window(2, 2))
        layers += [Branches([[Window(1), THREE], []])] * count
    return layers


STEM: Layers = [Window(7, 2, 3), Window(3, 2, 1)]
# Name, options, chain up to the last map, and its receptive field worked out on paper.
NETWORKS: dict[str, tuple[str, dict[str, Any], Layers, int]] = {
    "lenet5": ("lenet5", {}, [Window(5), Window(2, 2), Window(5), Window(2, 2)], 16),
    "alexnet": ("alexnet", {}, alexnet(Window(11, 4, 2), 0), 195),
    "vgg11": ("vgg11", {}, vgg(1, 1, 2, 2, 2), 150),
    "vgg16": ("vgg16", {}, vgg(2, 2, 3, 3, 3), 212),
    "googlenet": ("googlenet", {}, googlenet(Window(7, 2, 3), Window(3, 2)), 379),
    "resnet18": ("resnet18", {}, resnet(STEM, (2, 2, 2, 2), (3, 3)), 435),
    "resnet50": ("resnet50", {}, resnet(STEM, (3, 4, 6, 3), (1, 3, 1)), 427),
    "resnext50": ("resnext50_32x4d", {}, resnet(STEM, (3, 4, 6, 3), (1, 3, 1)), 427),
    "resnet20": ("resnet20", {}, resnet([THREE], (3, 3, 3), (3, 3)), 81),
    "densenet": ("densenet121", {"block_config": (2, 2, 2, 2)}, densenet(STEM, (2, 2, 2, 2)), 279),
    "small alexnet": ("alexnet", {"small": True}, alexnet(THREE, 1), 49),
    "small vgg11": ("vgg11_bn", {"small": True}, vgg(1, 1, 2, 2, 2, pools=(2, 3, 4)), 40),
    "small googlenet": ("googlenet", {"small": True}, googlenet(THREE), 95),
    "small resnet18": ("resnet18", {"small": True}, resnet([THREE], (2, 2, 2, 2), (3, 3)), 109),
    "small densenet": (
        "densenet121", {"small": True, "block_config": (2, 2)}, densenet([THREE], (2, 2)), 16
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", list(NETWORKS))
def test_formula_and_gradient_agree(key: str) -> None:
    name, config, chain, by_hand = NETWORKS[key]
    field = receptive_field(chain)
    assert field.size == by_hand
    # High enough for the whole field of two neighbours, and as narrow as possible.
    height = 32 if name == "lenet5" else by_hand + 2 * field.jump
    net = build(name, **config)
    width = 32 if name == "lenet5" else max(net.smallest, 2 * field.jump)
    last = Stage(net, -1)
    rows = last(noise(1, height, width)).shape[2]
    middle = rows // 2 - (rows % 2 == 0)
    for row in (middle, middle + 1):
        first, stop = field.span(row)
        found = receptive_field_of(last, (3, height, width), (row, 0), probes=1)
        assert found.spans[0] == (max(first, 0), min(stop, height))
    inside = [row for row in range(rows) if field.span(row)[0] > 0 and field.span(row)[1] < height]
    assert inside, "no output sees all of its field"
    found = receptive_field_of(last, (3, height, width), (inside[0], 0), probes=1)
    assert found.size[0] == by_hand


def test_published_fields_of_deep_networks() -> None:
    """DenseNet-121 sees 2,071 pixels, ResNet-101 971 and ResNet-152 1,451 with the stride in the 3×3."""
    assert receptive_field(densenet(STEM, (6, 12, 24, 16))).size == 2071
    assert receptive_field(resnet(STEM, (3, 4, 23, 3), (1, 3, 1))).size == 971
    assert receptive_field(resnet(STEM, (3, 8, 36, 3), (1, 3, 1))).size == 1451


# By brute force -------------------------------------------------------------------------------

SMALL = [
    "lenet5",
    "alexnet",
    "vgg11_bn",
    "googlenet",
    "resnet18",
    "resnet20",
    "resnext50_32x4d",
    "densenet121",
]
networks = pytest.mark.parametrize("name", SMALL)


def small(name: str) -> ConvNet:
    return build(name, small=True, **{"block_config": (2, 2, 2)} if name == "densenet121" else {})


def spoiled(side: int) -> Tensor:
    """One image for each pixel, where that pixel is NaN: what sees it becomes NaN."""
    x = torch.ones(side**2, 3, side, side, dtype=torch.float64)
    places = torch.arange(side**2)
    x[places, :, places // side, places % side] = torch.nan
    return x


@networks
def test_gradient_and_brute_force_agree(name: str) -> None:
    net, side = small(name), 12
    with torch.no_grad():
        maps = net.stages(spoiled(side))
    for index, stage in enumerate(maps):
        for position in {(0, 0), tuple(size // 2 for size in stage.shape[2:])}:
            found = receptive_field_of(Stage(net, index), (3, side, side), position, probes=1)
            brute = stage[(..., *position)].isnan().any(1).reshape(side, side)
            assert torch.equal(found.support, brute), (index, position)
            assert brute.any()


@networks
def test_logits_see_what_brute_force_says(name: str) -> None:
    net = small(name)
    with torch.no_grad():
        brute = net(spoiled(8)).isnan().any(1).reshape(8, 8)
    assert torch.equal(receptive_field_of(net, (3, 8, 8)).support, brute)
    assert brute.all()


# Equivariance ---------------------------------------------------------------------------------


@networks
def test_stages_move_with_the_image_by_their_stride(name: str) -> None:
    net, side = small(name), 64
    x = noise(1, side)
    assert len(net.sections) >= 2
    for index in (0, 1):
        stage = Stage(net, index)
        out = stage(x).shape[-1]
        stride = side // out
        assert stride == 2**index
        # Only outputs whose field ends before what came in at the edge.
        field = receptive_field_of(stage, (3, side, side), probes=1).size[1]
        margin = math.ceil((field / 2 + stride) / stride)
        for amount in (stride, -2 * stride):
            shift = {"amount": amount, "stride": stride, "margin": margin + 1}
            assert equivariance_error(stage, x, "shift", **shift) < 1e-12
        assert equivariance_error(stage, x, "shift", amount=stride, stride=stride) > 1e-3  # at the edges
        if stride > 1:
            sub = {"amount": 1, "stride": stride, "margin": margin}
            assert equivariance_error(stage, x, "shift", **sub) > 1e-2
        assert equivariance_error(stage, x, "flip", margin=margin) > 1e-2


def test_the_valid_convolutions_of_lenet_need_no_margin_but_the_shift() -> None:
    last, x = Stage(build("lenet5"), -1), noise(2, 32)
    assert last(x).shape[-1] == 5
    assert equivariance_error(last, x, "shift", amount=4, stride=4, margin=1) < 1e-12
    assert equivariance_error(last, x, "shift", amount=3, stride=4, margin=1) > 1e-2


@pytest.mark.parametrize("name", ["vgg11_bn", "resnet18", "resnet20", "resnext50_32x4d", "densenet121"])
def test_a_classifier_with_global_pooling_ignores_whole_strides_only(name: str) -> None:
    """Around a circle, where there are no edges; all poolings of these networks are without padding."""
    net, x = small(name), noise(2, 16)
    stride = 16 // net.stages(x)[-1].shape[-1]
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"
    assert equivariance_error(net, x, "shift", amount=stride) < 1e-11
    for amount in range(1, stride):
        assert equivariance_error(net, x, "shift", amount=amount) > 1e-4
    assert equivariance_error(net, x, "flip") > 1e-4


@networks
def test_no_classifier_ignores_a_shift_by_a_pixel(name: str) -> None:
    assert equivariance_error(small(name), noise(4, 16), "shift", amount=1) > 1e-4
