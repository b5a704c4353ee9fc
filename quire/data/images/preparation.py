"""What was learned about images in training: their shape, the statistics of their channels, their classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from quire.data.batch import Data
from quire.data.columns import Label, Labels, Target, column_from_json
from quire.data.images.decode import Fit, Shape
from quire.data.images.objects import object_fields, settle
from quire.data.images.recognise import open_images, open_scenes
from quire.data.images.source import ImageSource
from quire.data.images.stream import Progress, fits, gather
from quire.data.images.survey import Survey, broken_note, survey
from quire.data.preparation import check_format
from quire.errors import DataError, InputError
from quire.options import Images, Scenes

FORMAT = "quire.images"
VERSION = 1
LEAST_STD = 1.0
"""Of a channel, in steps of 0…255: what varies less than that is not blown up, and nothing divides by 0."""
MOMENT_BYTES = 2**24


@dataclass(frozen=True, eq=False)
class PreparedImages:
    """Images ready for a model."""

    data: Data
    """"inputs" (N, C, H, W) uint8; with targets also "target" (N,), or for boxes "target.boxes" and so on."""
    lines: np.ndarray
    """(N,) name of each image."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ImagePreparation:
    """Everything learned about images in training; saved with the model and applied at predict."""

    size: tuple[int, int]
    """Rows H and columns W that every image is brought to."""
    channels: int
    fit: Fit
    mean: tuple[float, ...]
    """Of each channel over the training images, in 0…255."""
    std: tuple[float, ...]
    targets: tuple[Target, ...]
    boxes: bool = False
    """Whether images have objects with boxes rather than one class each."""
    warnings: tuple[str, ...] = ()

    @property
    def target(self) -> Target:
        return self.targets[0]

    @property
    def feature_names(self) -> list[str]:
        """Pixels have no names."""
        return []

    @property
    def shape(self) -> Shape:
        return Shape(*self.size, self.channels, self.fit)

    def read(self, path: Path | str, options: Images | None = None) -> ImageSource:
        """Images to predict on or to be judged by: anything that can be trained on, also without classes
        or boxes."""
        if self.boxes:
            return open_scenes(path, options if isinstance(options, Scenes) else Scenes(), plain=True)
        return open_images(path, options or Images())

    def transform(
        self, source: ImageSource, need_target: bool = False, progress: Progress | None = None
    ) -> PreparedImages:
        """All images of the source in the shape of training, with class numbers of training."""
        seen = survey(source)
        if need_target and self.targets:
            seen = self._with_targets(seen)
        fields: dict[str, Tensor] = {}
        if self.targets:
            fields = target_fields(seen, self.target, boxes=self.boxes, need_target=need_target)
        source, options = seen.source, seen.source.options
        in_memory = fits(len(source), self.shape, options)
        found = gather(source.pixels, fields, self.shape, options, in_memory=in_memory, progress=progress)
        notes = [*source.notes, *([broken_note(found.errors, len(source))] if found.errors else [])]
        return PreparedImages(found.data, source.names[found.kept], tuple(notes))

    def decode_classes(self, indices: Tensor | Sequence[int], target: int = 0) -> list[Label]:
        """Class numbers back to labels."""
        classes = self.targets[target].classes
        numbers = indices.tolist() if isinstance(indices, Tensor) else indices
        return [classes[int(i)] for i in numbers]

    def _with_targets(self, seen: Survey) -> Survey:
        source = seen.source
        if self.boxes and source.objects is None:
            raise DataError(
                "images without annotations", path=source.source, expected="boxes, as in Pascal VOC or COCO"
            )
        if not self.boxes and source.codes is None:
            raise no_classes(source)
        return settle(seen) if self.boxes else seen

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; every float survives exactly."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "size": list(self.size),
            "channels": self.channels,
            "fit": self.fit,
            "mean": list(self.mean),
            "std": list(self.std),
            "targets": [asdict(target) for target in self.targets],
            "boxes": self.boxes,
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ImagePreparation:
        check_format(entry, FORMAT, VERSION)
        try:
            height, width = entry["size"]
            mean, std = tuple(entry["mean"]), tuple(entry["std"])
            good = (
                all(type(side) is int and side > 0 for side in (height, width))
                and entry["channels"] in (1, 3)
                and len(mean) == len(std) == entry["channels"]
                and entry["fit"] in get_args(Fit)
                and type(entry["boxes"]) is bool
                and all(math.isfinite(value) for value in (*mean, *std))
                and min(std) > 0
            )
            targets = tuple(column_from_json(Target, target) for target in entry["targets"])
            good = good and (len(targets) == 1 or not (targets or entry["boxes"]))
            if not good or not all(target.classes for target in targets):
                raise TypeError("a value that cannot be")
            return cls(
                (height, width), entry["channels"], entry["fit"], mean, std, targets, entry["boxes"],
                tuple(entry["warnings"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"a damaged preparation ({error})", expected="what to_json wrote") from None


def target_fields(seen: Survey, target: Target, *, boxes: bool, need_target: bool) -> dict[str, Tensor]:
    """The fields beside the pixels. A class that `target` does not have is an error that names it."""
    source = seen.source
    extent = {"target.extent": torch.from_numpy(seen.size.astype(np.float32))} if boxes else {}
    if not need_target:
        return extent
    if boxes:
        assert source.objects is not None
        fields = object_fields(source.objects, seen.size)
        labels = fields["target.labels"]
        known = _translate(source, np.unique(source.objects.code), target)
        fields["target.labels"] = torch.where(labels < 0, labels, known[labels.clamp(min=0)])
        return fields | extent
    assert source.codes is not None
    return {"target": _translate(source, np.unique(source.codes), target)[torch.from_numpy(source.codes)]}


def _translate(source: ImageSource, used: np.ndarray, target: Target) -> Tensor:
    """The class number in training of each label of the source; 7 in one and "7" in the other are alike."""
    labels = source.labels or Labels("text", ())
    numbers = {str(label): number for number, label in enumerate(target.classes)}
    codes = torch.tensor([numbers.get(str(label), -1) for label in labels.values] or [-1])
    for code in used:
        if codes[code] < 0:
            known = ", ".join(map(str, target.classes[:20])) + (", …" if len(target.classes) > 20 else "")
            first = ""
            if source.codes is not None:
                first = f", such as {source.names[int((source.codes == code).argmax())]}"
            raise DataError(
                f"a class that was not in training{first}", path=source.source, value=labels.values[code],
                expected=f"one of {known}",
            )  # fmt: skip
    return codes


def no_classes(source: ImageSource) -> DataError:
    return DataError(
        "images without classes",
        path=source.source,
        expected="a folder with one sub-folder for each class and no images beside them, or labels in IDX "
        "or CIFAR files",
        fix="move each image to the folder of its class",
    )


def channel_moments(parts: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (with 1/n, at least `LEAST_STD`) of each channel of uint8 images
    (B, C, H, W), from how often each of the 256 values occurs, which is exact."""
    counts: list[Tensor] = []
    for part in parts:
        for images in part.split(max(1, MOMENT_BYTES // part[:1].numel())):
            found = [torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]
            counts = [a + b for a, b in zip(counts, found, strict=True)] if counts else found
    values = torch.arange(256)
    mean, std = [], []
    for count in counts:
        n, first, second = (int((count * values**power).sum()) for power in (0, 1, 2))
        mean.append(first / n)
        # A whole number, so a constant channel has exactly 0.
        std.append(max(math.sqrt(n * second - first**2) / n, LEAST_STD))
    return tuple(mean), tuple(std)
