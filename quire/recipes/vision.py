"""Recipes of convolutional networks on images: lenet, alexnet, vgg, googlenet, resnet, resnext, densenet.

One idea with other networks: the images decide size and channels, their classes decide the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.errors import InputError
from quire.options import Augment, Images, Optim, Schedule, Train, check_range
from quire.recipes.base import DescentOptions, Expectation, recipe, refuse_input_noise

if TYPE_CHECKING:
    from quire.recipes.plan import Plan

SMALL_SIDE = 64
"""Images up to this side get the small variant of a network, which does not shrink them at once."""

LEAST_STEPS = 600
"""Few images are learned for more epochs, so that there are so many steps, unless --epochs or --steps says
otherwise."""

CHANGE_IMAGES = "change images with --augment.colour, --augment.cut-out and the other --augment options"


@dataclass(frozen=True, kw_only=True)
class ConvNet:
    """The network, and where its first weights come from."""

    weights: Path | None = None
    """Weights to start from: a file in torchvision's format (.pth, .safetensors), or a run of the same
    recipe. The classifier is made anew when the number of classes differs."""
    freeze: bool = False
    """Train the classifier alone."""
    unfreeze: float | None = None
    """Begin with the classifier alone, and let one more group of layers join after each so many epochs."""
    step_decay: float = 1.0
    """Factor of the step size from each group of layers to the group before it: below 1, early layers move
    less."""
    width: float | None = None
    """Factor of the numbers of channels; without it 1, or less where images are small."""

    def __post_init__(self) -> None:
        check_range(self, "--model.", unfreeze="> 0", step_decay="> 0", width="> 0")
        if (self.freeze or self.unfreeze) and self.weights is None:
            raise InputError(
                f"--model.{'freeze' if self.freeze else 'unfreeze'} without --model.weights",
                expected="trained weights to keep",
                fix="give a file or a run with --model.weights",
            )
        if self.freeze and self.unfreeze:
            raise InputError("both --model.freeze and --model.unfreeze", expected="one of them")


@dataclass(frozen=True, kw_only=True)
class AuxiliaryNet(ConvNet):
    auxiliary: bool = False
    """Train with two more classifiers halfway up, as the network was published; their losses count 0.3."""


@dataclass(frozen=True, kw_only=True)
class DenseTopNet(ConvNet):
    dropout: float | None = None
    """Of the dense layers; without it 0.5, or 0.2 where images are small."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--model.", dropout="[0, 1)")


@dataclass(frozen=True, kw_only=True)
class VGGNet(DenseTopNet):
    depth: Literal[11, 13, 16, 19] = 11
    batch_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class ResNet(ConvNet):
    depth: Literal[18, 34, 50, 101, 152, 20, 32, 44, 56] | None = None
    """18 to 152 for photographs, 20 to 56 for small images; without it 18 or 20 as the images are."""


@dataclass(frozen=True, kw_only=True)
class ResNeXt(ConvNet):
    depth: Literal[50, 101] = 50
    groups: int = 32
    """Parallel paths of each block."""
    width_per_group: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--model.", groups=">= 1", width_per_group=">= 1")


@dataclass(frozen=True, kw_only=True)
class DenseNet(ConvNet):
    depth: Literal[121, 169, 201] = 121


@dataclass(frozen=True, kw_only=True)
class ImageRunOptions(DescentOptions):
    """Options of the recipes that learn from images, one class each."""

    images: Images = field(default_factory=Images)
    augment: Augment = field(default_factory=lambda: Augment(shift=0.1))
    model: ConvNet = field(default_factory=ConvNet)
    optim: Optim = field(
        default_factory=lambda: Optim(
            "sgd", lr=0.1, momentum=0.9, weight_decay=5e-4, decay="l2", decay_biases=False,
            schedule=Schedule("cosine"),
        )
    )  # fmt: skip
    train: Train = field(default_factory=Train)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_input_noise(self.train, "images", CHANGE_IMAGES)


@dataclass(frozen=True, kw_only=True)
class LeNetOptions(ImageRunOptions):
    optim: Optim = field(default_factory=lambda: Optim(lr=2e-3, schedule=Schedule("cosine")))


@dataclass(frozen=True, kw_only=True)
class AlexNetOptions(ImageRunOptions):
    model: DenseTopNet = field(default_factory=DenseTopNet)
    optim: Optim = field(default_factory=lambda: Optim(lr=1e-3, schedule=Schedule("cosine")))
    train: Train = field(default_factory=lambda: Train(batch_size=32))


@dataclass(frozen=True, kw_only=True)
class VGGOptions(ImageRunOptions):
    model: VGGNet = field(default_factory=VGGNet)
    optim: Optim = field(default_factory=lambda: Optim(lr=3e-3, schedule=Schedule("cosine")))


@dataclass(frozen=True, kw_only=True)
class GoogLeNetOptions(ImageRunOptions):
    model: AuxiliaryNet = field(default_factory=AuxiliaryNet)
    optim: Optim = field(default_factory=lambda: Optim(lr=3e-3, schedule=Schedule("cosine")))


@dataclass(frozen=True, kw_only=True)
class ResNetOptions(ImageRunOptions):
    model: ResNet = field(default_factory=ResNet)


@dataclass(frozen=True, kw_only=True)
class ResNeXtOptions(ImageRunOptions):
    model: ResNeXt = field(default_factory=ResNeXt)


@dataclass(frozen=True, kw_only=True)
class DenseNetOptions(ImageRunOptions):
    model: DenseNet = field(default_factory=DenseNet)


@recipe(
    "lenet",
    summary="LeNet-5: two convolutions, two poolings, three dense layers, for small grey images",
    expected=Expectation("accuracy", at_least=0.95),
    targets="images",
    options=LeNetOptions,
)
def lenet(options: ImageRunOptions) -> Plan:
    return image_plan(options, "lenet5", {}, epochs=12, builtin_epochs=30, small_side=19, largest=32)


@recipe(
    "alexnet",
    summary="AlexNet: five convolutions and three dense layers with dropout",
    expected=Expectation("accuracy", at_least=0.95),
    targets="images",
    options=AlexNetOptions,
)
def alexnet(options: AlexNetOptions) -> Plan:
    return image_plan(options, "alexnet", {}, epochs=60, builtin_epochs=60, small_width=0.25)


@recipe(
    "vgg",
    summary="VGG: blocks of 3×3 convolutions, each followed by a pooling",
    expected=Expectation("accuracy", at_least=0.96),
    targets="images",
    options=VGGOptions,
)
def vgg(options: VGGOptions) -> Plan:
    model = options.model
    name = f"vgg{model.depth}{'_bn' if model.batch_norm else ''}"
    return image_plan(options, name, {}, epochs=60, builtin_epochs=12, small_width=0.25)


@recipe(
    "googlenet",
    summary="GoogLeNet: Inception blocks that look through windows of several sizes at once",
    expected=Expectation("accuracy", at_least=0.95),
    targets="images",
    options=GoogLeNetOptions,
)
def googlenet(options: GoogLeNetOptions) -> Plan:
    config = {"aux_logits": options.model.auxiliary}
    return image_plan(options, "googlenet", config, epochs=60, builtin_epochs=15, small_width=0.25)


@recipe(
    "resnet",
    summary="ResNet: blocks that add to what they are given, so that depth does not stop the gradient",
    expected=Expectation("accuracy", at_least=0.97),
    targets="images",
    options=ResNetOptions,
)
def resnet(options: ResNetOptions) -> Plan:
    depth, small = options.model.depth or 18, options.model.depth or 20
    return image_plan(
        options, f"resnet{depth}", {"zero_init_residual": True}, epochs=30, builtin_epochs=15,
        small_builder=f"resnet{small}",
    )  # fmt: skip


@recipe(
    "resnext",
    summary="ResNeXt: residual blocks of many parallel paths",
    expected=Expectation("accuracy", at_least=0.95),
    targets="images",
    options=ResNeXtOptions,
)
def resnext(options: ResNeXtOptions) -> Plan:
    model = options.model
    config = {
        "groups": model.groups,
        "width_per_group": model.width_per_group,
        # Blocks begin as the identity, without which tiny images are slow to learn.
        "zero_init_residual": True,
    }
    return image_plan(options, f"resnet{model.depth}", config, epochs=60, builtin_epochs=7, small_width=0.25)


@recipe(
    "densenet",
    summary="DenseNet: every layer reads the outputs of all layers before it",
    expected=Expectation("accuracy", at_least=0.96),
    targets="images",
    options=DenseNetOptions,
)
def densenet(options: DenseNetOptions) -> Plan:
    return image_plan(
        options, f"densenet{options.model.depth}", {}, epochs=60, builtin_epochs=6, small_width=0.25
    )


def image_plan(
    options: ImageRunOptions,
    builder: str,
    config: Mapping[str, Any],
    *,
    epochs: float,
    builtin_epochs: float,
    small_builder: str | None = None,
    small_width: float = 1.0,
    small_side: int = SMALL_SIDE,
    largest: int = 224,
) -> Plan:
    """A plan for the network of `builder`; images up to `small_side` get its small variant, of
    `small_width`, or that of `small_builder`, and larger ones than `largest` are brought to that side."""
    import torch

    from quire.data.batch import steps_per_epoch
    from quire.data.images import load_images
    from quire.models import BUILDERS, build_model
    from quire.nn.heads import Categorical
    from quire.nn.images import Augmentation, ImageInputs
    from quire.recipes.plan import Plan
    from quire.recipes.pretrained import read_source, transfer_rules, with_scales
    from quire.recipes.sight import image_pictures
    from quire.tasks.supervised import Supervised

    chosen = options.model
    start = chosen.weights or options.tune.base
    source = read_source(start) if start is not None else None
    like = source.preparation if source is not None else None
    data = with_scales(
        load_images(options.data or "digits", options.images, seed=options.seed, like=like, largest=largest),
        source,
    )
    preparation = data.preparation
    small = max(preparation.size) <= small_side
    if small and small_builder is not None:
        builder = small_builder
    if isinstance(chosen, DenseTopNet):
        config = {
            **config,
            "dropout": chosen.dropout if chosen.dropout is not None else 0.2 if small else 0.5,
        }
    if chosen.width is not None or small_width != 1.0:
        config = {**config, "width": chosen.width or (small_width if small else 1.0)}
    if small and source is None:
        config = {**config, "small": True}
    torch.manual_seed(options.seed)
    config = {**config, "num_classes": len(data.classes), "in_channels": preparation.channels}
    if source is not None and source.network is not None:
        shape = {key: config[key] for key in ("num_classes", "in_channels")}
        model = build_model({**source.network, **shape})
    else:
        model = BUILDERS[builder](**config)
    notes = source.load(model) if source is not None else []
    task = Supervised(
        model,
        Categorical(len(data.classes)),
        inputs=ImageInputs(preparation.mean, preparation.std),
        augmentation=Augmentation(options.augment, len(data.classes), preparation.mean),
        **transfer_rules(model, chosen),
    )
    steps = steps_per_epoch(len(data.train), options.train.batch_size)
    length = builtin_epochs if options.data is None else max(epochs, math.ceil(LEAST_STEPS / steps))
    return Plan(task, data, options, length, pictures=lambda: image_pictures(task, data), notes=notes)
