"""Starting from trained weights: what is taken over, what stays frozen, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quire.data.images import ImageData, ImagePreparation
    from quire.recipes.vision import ConvNet

IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)
"""Of the pixels (0 … 255) that published weights were trained on."""


@dataclass(frozen=True)
class Source:
    """Weights from elsewhere, and the preparation that they were trained with."""

    path: Path
    state: dict[str, Tensor]
    preparation: ImagePreparation | None = None
    """That of the run; None for a file of published weights."""
    network: dict[str, Any] | None = None
    """Description of the run's network, as `build_model` takes it."""

    def scales(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation that pixels are scaled by, as the weights expect it."""
        if self.preparation is not None:
            return self.preparation.mean, self.preparation.std
        if channels == 3:
            return IMAGENET_MEAN, IMAGENET_STD
        return (sum(IMAGENET_MEAN) / 3,) * channels, (sum(IMAGENET_STD) / 3,) * channels

    def load(self, model: nn.Module) -> list[str]:
        """Give the weights to a network; notes say what did not fit and was left as it was."""
        from quire.models.weights import fit_weights

        return fit_weights(model, self.state, self.path)  # type: ignore[arg-type]


def with_scales(data: ImageData, source: Source | None) -> ImageData:
    """Images that are scaled as the weights expect it."""
    if source is None:
        return data
    mean, std = source.scales(data.preparation.channels)
    return replace(data, preparation=replace(data.preparation, mean=mean, std=std))


def read_source(path: Path) -> Source:
    """A file in torchvision's format, or a run of a network on images."""
    from quire.models.weights import read_weights

    if not path.is_dir():
        return Source(path, read_weights(path))
    from quire.data.images import ImagePreparation
    from quire.models import model_spec
    from quire.tasks import Supervised, load_trained
    from quire.train.folder import read_config

    config = read_config(path)
    trained = load_trained(path)
    task, preparation = trained.task, trained.preparation
    if trained.adapters is not None:
        trained.adapters.merge(dequantise=True)
    if not isinstance(task, Supervised) or not isinstance(preparation, ImagePreparation):
        raise InputError(
            f"--model.weights {path} is a run of '{config['recipe']}'",
            expected="a run of a network that classifies images, or a file of weights",
            fix="train one with 'quire train resnet --data …'",
        )
    return Source(path, task.model.state_dict(), preparation, model_spec(task.model))


def transfer_rules(model: Any, chosen: ConvNet, prefix: str = "model.") -> dict[str, dict[str, float]]:
    """Step factors and frozen epochs by the beginning of a parameter's name, for `Supervised`; parts that
    never move are frozen in the model at once.

    The parts of a network stand in a row from the input to the classifier; d is how far a part is from the
    classifier: its step factor is step_decay^d, and it waits for unfreeze·d epochs.
    """
    factors: dict[str, float] = {}
    frozen: dict[str, float] = {}
    for distance, part in enumerate(reversed(model.parts)):
        for name in part:
            if chosen.step_decay != 1.0:
                factors[prefix + name] = chosen.step_decay**distance
            if chosen.unfreeze and distance:
                frozen[prefix + name] = chosen.unfreeze * distance
        if chosen.freeze and distance:
            for name, parameter in model.named_parameters():
                if name.startswith(part):
                    parameter.requires_grad_(False)
    return {"step_factors": factors, "frozen": frozen}
