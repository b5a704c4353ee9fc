"""What a network sees of images: their scale, and random changes of them while training.

Images are (N, C, H, W) with values from 0 to 255, as uint8 or in floating point.

N images, C channels, H×W pixels, G boxes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional import augment
from quire.functional.losses import IGNORE_INDEX
from quire.options import Augment


class ImageInputs(nn.Module):
    """(x − mean) / std by channel, in the type of these two, which travel with the weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if not mean or len(mean) != len(std):
            raise InputError(
                f"{len(mean)} means and {len(std)} standard deviations",
                expected="one of each for every channel",
                fix="take both from the pixels of the training images",
            )
        if not all(math.isfinite(value) for value in (*mean, *std)) or min(std) <= 0:
            raise InputError(
                f"means {list(mean)} and standard deviations {list(std)}",
                expected="finite numbers, the standard deviations above 0",
                fix="give a channel that never changes a standard deviation of 1",
            )
        self.register_buffer("mean", torch.tensor(list(mean), dtype=torch.float32))
        self.register_buffer("std", torch.tensor(list(std), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != len(self.mean):
            raise InputError(
                f"images of shape {tuple(x.shape)}",
                expected=f"(N, {len(self.mean)}, H, W)",
                fix="bring them to the number of channels that the network was made for",
            )
        return (x.to(self.mean.dtype) - self.mean[:, None, None]) / self.std[:, None, None]

    def undo(self, values: Tensor) -> Tensor:
        """Pixels from scaled values, where nothing has been cut off or rounded."""
        return values * self.std[:, None, None] + self.mean[:, None, None]

    def pixels(self, values: Tensor) -> Tensor:
        """Bytes from scaled values."""
        return self.undo(values).round().clamp(0, 255).to(torch.uint8)

    def spec(self) -> dict[str, Any]:
        """Everything needed to build it again, as plain JSON values."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist()}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        return cls(spec["mean"], spec["std"])

    def extra_repr(self) -> str:
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


class Augmentation(nn.Module):
    """The random changes that `options` ask for, made where the images are, in this order: window, shift,
    flip, colour, cut-out, mixing.

    Numbers come from PyTorch's own generator of that device, and nothing waits for the device. `mean` is the
    colour by channel around an image that became smaller, and of what is cut out. `classes` is how many there
    are to blend, None where the targets are something else.
    """

    mean: Tensor

    def __init__(self, options: Augment, classes: int | None, mean: Sequence[float]) -> None:
        super().__init__()
        self.options, self.classes = options, classes
        if classes is None:
            self.check_scenes()
        # Where a run is saved, its options say all of this.
        self.register_buffer("mean", torch.tensor(list(mean), dtype=torch.float32), persistent=False)

    @property
    def active(self) -> bool:
        """Whether anything is changed at all."""
        o = self.options
        return self._windows or o.mixes or any((o.shift, o.flip, o.colour, o.cut_out))

    @property
    def _windows(self) -> bool:
        return self.options.crop < 1 or self.options.zoom_out > 1

    def check_scenes(self) -> None:
        """Refuse options that have no meaning for boxes."""
        for name in ("mixup", "cutmix"):
            if getattr(self.options, name):
                raise InputError(
                    f"--augment.{name} {getattr(self.options, name):g} where targets are not classes",
                    expected="a share of two classes, which boxes and numbers do not have",
                    fix=f"leave --augment.{name} out, or set it to 0",
                )

    @torch.no_grad()
    def images(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Changed images (N, C, H, W) and their classes (N,).

        Where options mix, targets become shares of the classes (N, classes). An ignored image is mixed with
        none and its row is 0. Where both mixup and cutmix are on, each image takes one of them, by lot.
        """
        if not self.active:
            return x, target
        nothing = torch.zeros(len(x), 0, 4, device=x.device)
        x, _, _ = self._change(x, nothing, nothing[..., 0] > 0)
        return self._mix(x, target) if self.options.mixes else (x, target)

    @torch.no_grad()
    def scenes(self, x: Tensor, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Changed images with their boxes (N, G, 4) and labels (N, G), which are −1 where there is no box,
        or none any more."""
        self.check_scenes()
        if not self.active:
            return x, boxes, labels
        x, boxes, present = self._change(x, boxes, labels >= 0)
        return x, boxes, torch.where(present, labels, -1)

    def _change(self, x: Tensor, boxes: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        o = self.options
        if self._windows:
            x, boxes, present = augment.random_window(
                x, boxes, present, smallest=o.crop, largest=o.zoom_out, aspect=o.aspect, fill=self.mean
            )
        if limit := round(o.shift * max(x.shape[2:])):
            x, boxes, present = augment.random_shift(x, limit, None, boxes, present)
        if o.flip:
            x, boxes, present = augment.random_flip(x, o.flip, None, boxes, present)
        if o.colour:
            x = augment.colour_jitter(x, o.colour)
        if o.cut_out:
            x = augment.cut_out(x, o.cut_out, fill=self.mean)
        return x, boxes, present

    def _mix(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        assert self.classes is not None
        ignored = target == IGNORE_INDEX
        shares = nn.functional.one_hot(target.masked_fill(ignored, 0), self.classes).float()
        shares = shares.masked_fill(ignored[:, None], 0.0)
        o = self.options
        if not o.cutmix:
            return augment.mixup(x, shares, o.mixup, apart=ignored)
        pasted, by_area = augment.cutmix(x, shares, o.cutmix, apart=ignored)
        if not o.mixup:
            return pasted, by_area
        blended, by_share = augment.mixup(x, shares, o.mixup, apart=ignored)
        lot = torch.rand(len(x), 1, device=x.device) < 0.5
        return torch.where(lot[..., None, None], pasted, blended), torch.where(lot, by_area, by_share)

    def extra_repr(self) -> str:
        return f"{self.options}, classes={self.classes}"
