"""One image file to pixels (C, H, W), uint8.

C channels (1 grey, 3 red-green-blue), H rows, W columns.

Only formats of a closed list are opened, so that no file can call an interpreter (as EPS does).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

import numpy as np
from PIL import Image

from quire.errors import DataError
from quire.files import is_bomb

Fit = Literal["crop", "pad", "stretch"]

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
ENDINGS = frozenset(
    (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".pnm")
)
GREY_MODES = ("1", "L", "LA", "La", "I", "F")
ALPHA_MODES = ("LA", "La", "RGBA", "RGBa", "PA")
DRAFT = 2
"""A JPEG is decoded at a fraction of its size as long as so many pixels are left for each wanted one."""
DRAFTED = ("JPEG", "MPO")
"""Formats that can be decoded at a fraction of their size."""
DECODED = 4
"""Bytes that a pixel takes while it is decoded and converted."""
SCANNED = 6
"""Bytes that a pixel of a progressive JPEG takes until its last scan is read, however small it is decoded."""
ORIENTATION_TAG = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What brings an image of each EXIF orientation upright; from 5 on width and height change places."""


@dataclass(frozen=True)
class Shape:
    """What every image is brought to."""

    height: int
    width: int
    channels: int
    fit: Fit

    @property
    def dimensions(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    @property
    def numbers(self) -> int:
        """In one image."""
        return self.channels * self.height * self.width


@dataclass(frozen=True)
class Header:
    """What a file says of itself before anything is decoded."""

    width: int
    height: int
    """As stored; see `upright_size`."""
    grey: bool
    turn: int = 1
    """EXIF orientation, 1 where there is nothing to do."""

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height as a viewer shows them."""
        return (self.height, self.width) if self.turn >= 5 else (self.width, self.height)


def is_image(path: Path) -> bool:
    """Whether the name is one of an image that can be read; hidden files are none."""
    return path.suffix.lower() in ENDINGS and not path.name.startswith(".")


def read_header(path: Path, most_pixels: int) -> Header:
    with open_image(path, most_pixels) as image:
        grey = image.mode in GREY_MODES or image.mode.startswith("I;16") or _grey_palette(image)
        return Header(*image.size, grey, _turn(image))


def decode(path: Path, shape: Shape, most_pixels: int, *, upright: bool = True) -> np.ndarray:
    """The image at `path` as (C, H, W); `upright` applies the orientation that a camera noted in it."""
    with open_image(path, most_pixels) as image:
        if is_bomb(path, image.width * image.height * _bytes_a_pixel(image)):
            packed = path.stat().st_size
            raise _broken(path, f"{image.width} × {image.height} pixels in {packed} bytes, out of proportion")
        turn = _turn(image) if upright else 1
        wanted = (shape.height, shape.width) if turn >= 5 else (shape.width, shape.height)
        image.draft(None, _draft_size(image.size, wanted, shape.fit))
        try:
            image.load()
        except MemoryError:
            raise
        except Exception as error:  # each of Pillow's decoders fails in its own way
            raise _broken(path, f"it cannot be decoded ({error})") from None
        plain = to_channels(image, shape.channels, path)
    if turn != 1:
        plain = plain.transpose(TURNS[turn])
    return to_shape(plain, shape)


def open_image(path: Path, most_pixels: int) -> Image.Image:
    """The image with its header read and nothing decoded."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise _broken(path, "not a file")  # but a pipe or a device, which may have no end
    try:
        with _PILLOW_LIMIT:
            image = Image.open(path, formats=FORMATS)
    except MemoryError:
        raise
    except Exception as error:
        raise _broken(path, _why_not_open(path, error)) from None
    width, height = image.size
    if width * height > most_pixels:
        image.close()
        raise DataError(
            f"an image of {width} × {height} pixels",
            path=path,
            expected=f"at most {most_pixels} pixels",
            fix="shrink it, raise --images.most_pixels, or leave it out with --images.broken skip",
        )
    return image


def to_channels(image: Image.Image, channels: int, path: object) -> Image.Image:
    """Grey (mode L) or red-green-blue: what is transparent becomes white, 16 bits become 8."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        deep = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((deep + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise _broken(path, f"pixels of 32 bits (mode {image.mode}), whose range is not known")
    if image.mode in ALPHA_MODES or "transparency" in image.info:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    mode = "L" if channels == 1 else "RGB"
    try:
        return image if image.mode == mode else image.convert(mode)
    except ValueError as error:
        raise _broken(path, f"its colours cannot be converted ({error})") from None


def to_shape(image: Image.Image, shape: Shape) -> np.ndarray:
    """(C, H, W): the middle of the image, all of it with a black border, or all of it distorted.

    Bilinear with the filter widened where it shrinks, so that nothing aliases.
    """
    wanted = (shape.width, shape.height)
    if image.size != wanted:
        width, height = image.size
        filter_ = Image.Resampling.BILINEAR
        if shape.fit == "stretch":
            image = image.resize(wanted, filter_)
        elif shape.fit == "crop":
            scale = max(shape.width / width, shape.height / height)
            inner_width, inner_height = min(width, shape.width / scale), min(height, shape.height / scale)
            left, top = (width - inner_width) / 2, (height - inner_height) / 2
            right, bottom = min(width, left + inner_width), min(height, top + inner_height)
            image = image.resize(wanted, filter_, box=(left, top, right, bottom))
        else:
            scale = min(shape.width / width, shape.height / height)
            inner = max(1, round(width * scale)), max(1, round(height * scale))
            canvas = Image.new(image.mode, wanted)
            corner = (shape.width - inner[0]) // 2, (shape.height - inner[1]) // 2
            canvas.paste(image.resize(inner, filter_), corner)
            image = canvas
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _draft_size(size: tuple[int, int], wanted: tuple[int, int], fit: Fit) -> tuple[int, int]:
    scales = [DRAFT * w / s for w, s in zip(wanted, size, strict=True)]
    if fit != "stretch":
        scales = [max(scales) if fit == "crop" else min(scales)] * 2
    width, height = (max(1, math.ceil(s * scale)) for s, scale in zip(size, scales, strict=True))
    return width, height


def _bytes_a_pixel(image: Image.Image) -> int:
    if image.format not in DRAFTED:
        return DECODED
    return SCANNED if "progressive" in image.info else 0


def _turn(image: Image.Image) -> int:
    # Pillow turns TIFFs itself, and would decode a PNG to look for tags behind the pixels.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    try:
        turn = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # damaged tags do not make the pixels worthless
        return 1
    return turn if turn in TURNS else 1


def _grey_palette(image: Image.Image) -> bool:
    if image.mode not in ("P", "PA") or image.palette is None:
        return False
    kind, entries = image.palette.getdata()
    width = {"RGB": 3, "BGR": 3, "RGBX": 4, "BGRX": 4, "RGBA": 4, "BGRA": 4}.get(kind)
    if width is None or len(entries) % width:
        return False
    colours = np.frombuffer(bytes(entries), np.uint8).reshape(-1, width)[:, :3]
    return bool((colours == colours[:, :1]).all())


def _why_not_open(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such image"
    if isinstance(error, OSError) and error.strerror:
        return f"it cannot be read: {error.strerror}"
    if path.stat().st_size == 0:
        return "an empty file"
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image"
    return f"it cannot be opened as an image ({error})"


def _broken(path: object, why: str) -> DataError:
    return DataError(
        why,
        path=path,
        expected=f"a whole image: {', '.join(FORMATS)}",
        fix="replace or remove the file, or leave such files out with --images.broken skip",
    )


class _PillowLimit:
    """Lifts Pillow's own limit on pixels, which holds for the whole process and knows no option, for as
    long as some thread reads a header. Ours is checked before anything is decoded."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.users = 0
        self.kept: int | None = None

    def __enter__(self) -> None:
        with self.lock:
            if self.users == 0:
                self.kept, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            self.users += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                Image.MAX_IMAGE_PIXELS = self.kept


_PILLOW_LIMIT = _PillowLimit()
