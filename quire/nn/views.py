"""Views of a row: random changes that leave what it is as it is. Two views of one row belong together.

N rows, C channels, H×W pixels, D columns of a table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional import augment
from quire.functional.warp import draw_warps, take_warps


@final
class ImageViews(nn.Module):
    """Images (N, C, H, W) from 0 to 255, in bytes or floating point: warped, mirrored, in other colours, with
    a part cut out. `background` is what lies around an image, by channel."""

    background: Tensor
    kind = "images"

    def __init__(
        self,
        background: Sequence[float],
        *,
        shift: float = 0.0,
        zoom: float = 1.0,
        rotate: float = 0.0,
        shear: float = 0.0,
        bend: float = 0.0,
        flip: float = 0.0,
        colour: float = 0.0,
        cut_out: float = 0.0,
    ) -> None:
        """See `quire.functional.warp.draw_warps`; `flip` is a probability, `colour` the strength of changes
        of brightness and contrast, `cut_out` the side of a blank square as a share of the image's."""
        super().__init__()
        self.warp: dict[str, Any] = {
            "shift": shift,
            "zoom": zoom,
            "rotate": rotate,
            "shear": shear,
            "bend": bend,
        }
        self.flip, self.colour, self.cut_out = flip, colour, cut_out
        self.register_buffer("background", torch.tensor(list(background)), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        if any(value != (1.0 if name == "zoom" else 0.0) for name, value in self.warp.items()):
            x = take_warps(x, draw_warps(x, **self.warp), self.background)
        if self.flip:
            x = augment.random_flip(x, self.flip)
        if self.colour:
            x = augment.colour_jitter(x, self.colour)
        if self.cut_out:
            x = augment.cut_out(x, self.cut_out, fill=self.background)
        return x

    def spec(self) -> dict[str, Any]:
        others = {"flip": self.flip, "colour": self.colour, "cut_out": self.cut_out}
        return {"kind": self.kind, "background": self.background.tolist(), **self.warp, **others}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        return cls(**{name: value for name, value in spec.items() if name != "kind"})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.spec().items() if name != "kind")


@final
class RowViews(nn.Module):
    """Rows (N, D) with noise of deviation `noise`, in the units of prepared columns, and with each value
    taken from another row of the batch with probability `swap`."""

    kind = "rows"

    def __init__(self, *, noise: float = 0.0, swap: float = 0.0) -> None:
        super().__init__()
        self.noise, self.swap = noise, swap

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        if self.swap:
            x = augment.swap_noise(x, self.swap)
        return x + self.noise * torch.randn_like(x) if self.noise else x

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind, "noise": self.noise, "swap": self.swap}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        return cls(noise=spec["noise"], swap=spec["swap"])

    def extra_repr(self) -> str:
        return f"noise={self.noise}, swap={self.swap}"


Views = ImageViews | RowViews


def build_views(spec: Mapping[str, Any]) -> Views:
    """The views that `spec` describes."""
    if spec.get("kind") == ImageViews.kind:
        return ImageViews.from_spec(spec)
    if spec.get("kind") == RowViews.kind:
        return RowViews.from_spec(spec)
    raise InputError(f"views of {spec.get('kind')!r}", expected="images or rows")
