"""The recipe of detection: objects on images, their classes and boxes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quire.options import Augment, Optim, Scenes, Schedule, Train, check_range
from quire.recipes.base import DescentOptions, Expectation, recipe, refuse_input_noise
from quire.recipes.vision import CHANGE_IMAGES, SMALL_SIDE

if TYPE_CHECKING:
    from quire.recipes.plan import Plan

Backbone = Literal[
    "alexnet", "densenet121", "densenet169", "densenet201", "googlenet", "lenet5", "resnet18", "resnet20",
    "resnet32", "resnet34", "resnet44", "resnet50", "resnet56", "resnet101", "resnet152", "resnext50_32x4d",
    "resnext101_32x8d", "resnext101_64x4d", "vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn",
    "vgg19", "vgg19_bn",
]  # fmt: skip

OWN_STEPS = 2000
"""Steps on data of one's own, unless --epochs or --steps says otherwise."""
VALIDATE_EVERY = 50
"""Steps between validations on data of one's own, at least, unless --train.validate-every says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Detector:
    """The network."""

    backbone: Backbone = "resnet18"
    """The network whose feature maps are read."""
    weights: Path | None = None
    """Weights of the backbone to start from: a file in torchvision's format, or a run that classifies
    images with it."""
    backbone_step: float = 1.0
    """Factor of the step size of the backbone: below 1, trained weights move less."""
    backbone_width: float | None = None
    """Factor of the backbone's channels; without it 1, or 0.5 where images are small."""
    levels: int | None = None
    """Feature maps that boxes are read from; without it 3, or 2 where images are small."""
    stride: int | None = None
    """Pixels between the cells of the finest map; without it 8, or 4 where images are small."""
    width: int | None = None
    """Channels of the maps that boxes are read from; without it 128, or 64 where images are small."""
    ratios: tuple[float, ...] = (1.0, 2.0, 0.5)
    """Width over height of the default boxes."""

    def __post_init__(self) -> None:
        check_range(
            self, "--model.", backbone_step="> 0", backbone_width="> 0", levels=">= 1", stride=">= 1",
            width=">= 1",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SSDOptions(DescentOptions):
    images: Scenes = field(default_factory=Scenes)
    augment: Augment = field(
        default_factory=lambda: Augment(crop=0.6, zoom_out=1.25, aspect=1.25, colour=0.2)
    )
    model: Detector = field(default_factory=Detector)
    match: float = 0.5
    """Overlap (IoU) from which on a default box learns an object."""
    overlap: float = 0.45
    """Overlap above which the lesser of two detections of a class is dropped."""
    optim: Optim = field(
        default_factory=lambda: Optim(
            lr=2e-3, weight_decay=0.02, decay_biases=False, schedule=Schedule("cosine", warmup=100)
        )
    )
    train: Train = field(default_factory=lambda: Train(batch_size=32, monitor="map50", average=0.995))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", match="(0, 1)", overlap="(0, 1)")
        refuse_input_noise(self.train, "images", CHANGE_IMAGES)


@recipe(
    "ssd",
    summary="SSD: finds objects on images, each with its class and box",
    expected=Expectation("map50", at_least=0.9),
    targets="scenes",
    options=SSDOptions,
)
def ssd(options: SSDOptions) -> Plan:
    import torch

    from quire.data.batch import steps_per_epoch
    from quire.data.images import ImagePreparation, load_scenes
    from quire.functional.detect import fit_scales
    from quire.models import BUILDERS, model_spec
    from quire.models.ssd import SSD, SSDConfig
    from quire.nn.images import Augmentation, ImageInputs
    from quire.recipes.plan import Plan, base_preparation
    from quire.recipes.pretrained import read_source, with_scales
    from quire.recipes.sight import scene_pictures
    from quire.tasks.detection import Detection, DetectionRules

    chosen = options.model
    source = read_source(chosen.weights) if chosen.weights is not None else None
    data = with_scales(load_scenes(options.data or "digit-scenes", options.images, seed=options.seed), source)
    preparation = data.preparation
    if (base := base_preparation(options, ImagePreparation)) is not None:
        preparation = replace(preparation, mean=base.mean, std=base.std)
        data = replace(data, preparation=preparation)
    small = max(preparation.size) <= SMALL_SIDE
    build = BUILDERS[chosen.backbone]
    if source is not None and source.network is not None:
        backbone = source.network
    else:
        width = chosen.backbone_width or (0.5 if small and source is None else 1.0)
        with torch.device("meta"):  # a description is all that is needed
            backbone = model_spec(build(in_channels=preparation.channels, width=width))
    levels = chosen.levels or (2 if small else 3)
    boxes, labels = (data.train.fields[f"target.{name}"] for name in ("boxes", "labels"))
    torch.manual_seed(options.seed)
    model = SSD(
        SSDConfig(
            backbone=backbone,
            num_classes=len(data.classes),
            in_channels=preparation.channels,
            size=preparation.size,
            levels=levels,
            stride=chosen.stride or (4 if small else 8),
            scales=fit_scales(boxes[labels >= 0], levels),
            ratios=chosen.ratios,
            width=chosen.width or (64 if small else 128),
        )
    )
    notes = source.load(model.backbone) if source is not None else []
    task = Detection(
        model,
        DetectionRules(match=options.match, overlap=options.overlap),
        step_factors={"model.backbone.": chosen.backbone_step} if chosen.backbone_step != 1 else None,
        inputs=ImageInputs(preparation.mean, preparation.std),
        augmentation=Augmentation(options.augment, None, preparation.mean),
    )
    per_epoch = steps_per_epoch(len(data.train), options.train.batch_size)
    if options.train.validate_every is None and options.data is not None:
        # Few images make short epochs; judging takes longer than those.
        every = per_epoch * math.ceil(VALIDATE_EVERY / per_epoch)
        options = replace(options, train=replace(options.train, validate_every=every))
    epochs = 10 if options.data is None else math.ceil(OWN_STEPS / per_epoch)
    return Plan(task, data, options, epochs, pictures=lambda: scene_pictures(task, data), notes=notes)
