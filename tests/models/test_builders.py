"""Every network that is built by name: counts and names, stages, parts, small and narrow variants."""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire import models
from quire.errors import InputError
from quire.models import BUILDERS, ConvNet, VisionConfig

pytestmark = pytest.mark.slow

# Parameters, and the first half of the SHA-256 of torchvision's sorted lines "NAME (SHAPE)".
TORCHVISION = {
    "alexnet": (61_100_840, "935c1ea73a7869ee"),
    "densenet121": (7_978_856, "9c659ec278435e95"),
    "densenet169": (14_149_480, "03a0accd6e99d8d0"),
    "densenet201": (20_013_928, "ebf13d018b02ad9d"),
    "googlenet": (13_004_888, "de3745733576b3b1"),
    "resnet18": (11_689_512, "5191d63ec3989592"),
    "resnet34": (21_797_672, "f8de2a1812ef85e4"),
    "resnet50": (25_557_032, "a87e91cd6bd1f939"),
    "resnet101": (44_549_160, "dbc3ca74fffafc72"),
    "resnet152": (60_192_808, "7d486dbdc941506e"),
    "resnext50_32x4d": (25_028_904, "20929ac81dfcc94f"),
    "resnext101_32x8d": (88_791_336, "5068f88fa77e6142"),
    "resnext101_64x4d": (83_455_272, "81b2497c5bec9c31"),
    "vgg11": (132_863_336, "b11acd4f90d9643f"),
    "vgg13": (133_047_848, "79ca8fd7a1480aa7"),
    "vgg16": (138_357_544, "ba63c2556d912509"),
    "vgg19": (143_667_240, "393fac8b08b63fbe"),
    "vgg11_bn": (132_868_840, "56ed5816909a8132"),
    "vgg13_bn": (133_053_736, "e4f52ce016e5e82f"),
    "vgg16_bn": (138_365_992, "86bad13b66635552"),
    "vgg19_bn": (143_678_248, "faf0fdbb92f698c6"),
}
# Millions of parameters in table 6 of He et al. 2015.
CIFAR = {"resnet20": 0.27, "resnet32": 0.46, "resnet44": 0.66, "resnet56": 0.85}
FAMILIES = [
    "lenet5",
    "alexnet",
    "vgg11",
    "vgg11_bn",
    "googlenet",
    "resnet18",
    "resnext50_32x4d",
    "densenet121",
]
families = pytest.mark.parametrize("name", FAMILIES)


def on_meta(build: Callable[..., ConvNet], *args: Any, **config: Any) -> ConvNet:
    with torch.device("meta"):
        return build(*args, **config).eval()


def parameter_count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def tiny(name: str, **config: Any) -> ConvNet:
    return BUILDERS[name](3, **{"in_channels": 3, "small": True, "width": 0.125} | config).eval()


# Names and counts -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TORCHVISION))
def test_torchvisions_names_and_counts(name: str) -> None:
    net = on_meta(BUILDERS[name])
    lines = sorted(f"{key} {tuple(value.shape)}" for key, value in net.state_dict().items())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    assert (parameter_count(net), digest) == TORCHVISION[name]


def test_counts_of_the_others() -> None:
    assert set(BUILDERS) == {*TORCHVISION, *CIFAR, "lenet5"}
    assert parameter_count(on_meta(models.lenet5)) == 61_706
    assert parameter_count(on_meta(models.googlenet, aux_logits=False)) == 6_624_904
    for name, millions in CIFAR.items():
        assert round(parameter_count(on_meta(BUILDERS[name])) / 1e6, 2) == millions


@pytest.mark.parametrize("name", list(BUILDERS))
def test_a_builder_is_a_function_like_any_other(name: str) -> None:
    build = BUILDERS[name]
    assert getattr(models, name) is build
    assert build.__name__ == name
    assert name in models.__all__
    assert "`weights` is a file in torchvision's format" in (build.__doc__ or "")
    assert pickle.loads(pickle.dumps(build)) is build
    signature = inspect.signature(build)
    config = on_meta(build).config
    values = {key: parameter.default for key, parameter in signature.parameters.items() if key != "weights"}
    assert values == vars(config)
    assert signature.return_annotation is type(on_meta(build))
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    assert kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD] + [inspect.Parameter.KEYWORD_ONLY] * len(values)


def test_options_reach_the_network() -> None:
    net = on_meta(models.resnet50, 7, in_channels=5, zero_init_residual=True)
    assert (net.fc.out_features, net.conv1.in_channels, net.config.layers) == (7, 5, (3, 4, 6, 3))
    assert isinstance(net, models.ResNet)
    assert on_meta(models.vgg16, dropout=0.1).classifier[2].p == 0.1


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("resnet50", {"widht": 0.5}, "unknown option 'widht' of model 'resnet50'.*did you mean 'width'"),
        ("resnet50", {"num_classes": 0}, "num_classes is 0"),
        ("vgg11", {"width": 0}, "width is 0"),
        ("vgg11", {"dropout": 1.0}, "dropout is 1.0"),
        ("vgg11", {"convolutions": (1, 1)}, "one number for each of five blocks"),
        ("googlenet", {"transform_input": True, "in_channels": 1}, "three channels: red, green and blue"),
        ("resnet18", {"groups": 4}, "basic blocks with groups=4 and width_per_group=64"),
        ("resnet18", {"block": "basics"}, "did you mean 'basic'"),
        ("resnet18", {"layers": ()}, "a number in layers is 0"),
        ("densenet121", {"drop_rate": -0.1}, "drop_rate is -0.1"),
    ],
)
def test_wrong_options(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"(?s){message}"):
        BUILDERS[name](**config)


def test_a_misspelt_network() -> None:
    with pytest.raises(InputError, match="did you mean 'densenet121'"):
        BUILDERS["densnet121"]


# Stages and parts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("alexnet", (55, 27, 13, 6)),
        ("vgg16", (224, 112, 56, 28, 14, 7)),
        ("googlenet", (112, 56, 28, 14, 7)),
        ("resnet50", (112, 56, 28, 14, 7)),
        ("resnext50_32x4d", (112, 56, 28, 14, 7)),
        ("densenet121", (112, 56, 28, 14, 7)),
        ("resnet20", (224, 112, 56)),
    ],
)
def test_stages_of_a_photograph(name: str, sides: tuple[int, ...]) -> None:
    maps = on_meta(BUILDERS[name]).stages(torch.empty(1, 3, 224, 224, device="meta"))
    assert tuple(stage.shape[-1] for stage in maps) == sides
    channels = {"alexnet": 256, "vgg16": 512, "googlenet": 1024, "resnet20": 64, "densenet121": 1024}
    assert maps[-1].shape[1] == channels.get(name, 2048)


@families
def test_stages_of_small_images(name: str) -> None:
    net = tiny(name)
    x = torch.randn(2, 3, 8, 8)
    maps = net.stages(x)
    sides = [stage.shape[-1] for stage in maps]
    assert sides == ([8, 4] if name == "lenet5" else [8, 4, 2, 1])
    logits = net(x)
    # What follows the last map, by hand: with the places that are pooled, all heads are dense layers.
    features = maps[-1].flatten(1)
    for key in net.head:
        layer = net.get_submodule(key)
        features = layer(features) if isinstance(layer, nn.Linear | nn.ReLU) else features
    torch.testing.assert_close(features, logits)
    assert logits.shape == (2, 3)
    for size in ((13, 64), (33, 9)):
        assert net(torch.randn(1, 3, *size)).shape == (1, 3)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_each_parameter_is_in_one_part(name: str) -> None:
    net = on_meta(BUILDERS[name])
    prefixes = [(prefix, number) for number, group in enumerate(net.parts) for prefix in group]
    numbers = []
    for key, _ in net.named_parameters():
        found = [number for prefix, number in prefixes if key.startswith(prefix)]
        assert len(found) == 1, key
        numbers.append(found[0])
    assert set(numbers) == set(range(len(net.parts)))
    head = [value for key, value in net.named_parameters() if key.startswith(net.parts[-1])]
    assert all(len(value) == net.config.num_classes for value in head)
    assert len(head) == (6 if name == "googlenet" else 2)


def test_parts_of_vgg_end_at_the_poolings() -> None:
    assert on_meta(models.vgg11).parts == (
        ("features.0.",), ("features.3.",), ("features.6.", "features.8."), ("features.11.", "features.13."),
        ("features.16.", "features.18."), ("classifier.0.", "classifier.3."), ("classifier.6.",),
    )  # fmt: skip


def test_a_module_that_was_replaced_takes_part() -> None:
    net, x = tiny("resnet18"), torch.randn(1, 3, 8, 8)
    before = net.stages(x)
    net.layer2 = nn.Sequential(net.layer2, nn.Threshold(100.0, 0.0))
    assert torch.equal(net.stages(x)[0], before[0])
    assert not net.stages(x)[1].any()


def test_a_network_compiles_as_one_graph() -> None:
    net, x = tiny("resnet18", layers=(1, 1)), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), net(x))


# Sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [False, True])
@families
def test_the_smallest_image(name: str, small: bool) -> None:
    net = on_meta(BUILDERS[name], small=small, width=0.125, in_channels=3)
    side = net.smallest
    assert side <= 8 or not small
    assert net(torch.empty(1, 3, side, side, device="meta")).shape[0] == 1
    if side == 1:
        return
    below = torch.empty(1, 3, side, side - 1, device="meta")
    fix = "enlarge the images" if small else "build the network with small=True"
    with pytest.raises(InputError, match=f"(?s)sides of at least {side} pixels.*{fix}"):
        net(below)
    if name != "lenet5":  # which could enlarge a smaller image as well, and would then see nothing but border
        net.smallest = 1
        with pytest.raises(RuntimeError, match="Output size is too small"):
            net(below)


def test_wrong_images() -> None:
    net = tiny("resnet18")
    with pytest.raises(InputError, match=r"(?s)\(2, 1, 8, 8\).*\(N, 3, height, width\).*in_channels=1"):
        net(torch.zeros(2, 1, 8, 8))
    with pytest.raises(InputError, match=r"(?s)\(3, 8, 8\).*give a batch of images"):
        net.stages(torch.zeros(3, 8, 8))


def test_widths_are_multiples_of_eight() -> None:
    config = VisionConfig(width=0.25)
    assert [config.channels(count) for count in (64, 96, 1, 40, 1000)] == [16, 24, 8, 8, 248]
    assert config.channels(128, multiple=32) == 32
    assert VisionConfig().channels(13) == 13
    assert VisionConfig(width=2).channels(6) == 16


@pytest.mark.parametrize("name", ["alexnet", "vgg11_bn", "googlenet", "resnet50", "resnext50_32x4d"])
@pytest.mark.parametrize("width", [0.5, 1.5])
def test_narrow_and_wide_networks(name: str, width: float) -> None:
    net = on_meta(BUILDERS[name], width=width)
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    assert all(module.out_channels % 8 == 0 for module in convolutions)
    share = parameter_count(net) / parameter_count(on_meta(BUILDERS[name]))
    assert share == pytest.approx(width**2, rel=0.3)
    if name == "resnext50_32x4d":
        assert {module.groups for module in convolutions} == {1, 32}


def test_weights_by_path(tmp_path: Path) -> None:
    net = tiny("resnet18")
    torch.save(net.state_dict(), tmp_path / "w.pth")
    again = models.resnet18(3, width=0.125, small=True, weights=tmp_path / "w.pth").eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(net(x), again(x))
