"""Images that need no download: scikit-learn's digits, and scenes for detection made of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from quire.data.columns import Labels
from quire.data.images.source import Arrays, ImageSource, Objects, object_array
from quire.data.splits import split_rows
from quire.options import Images, Scenes
from quire.registry import Registry

IMAGES: Registry[Callable[[Images], ImageSource]] = Registry("built-in set of images")
SCENES: Registry[Callable[[Scenes], ImageSource]] = Registry("built-in set of annotated images")

SCENE_COUNT = 1200
SCENE_SIDE = 64
MOST_DIGITS = 4
DIGIT_SIDES = (12, 28)
"""Smallest and largest side of a digit in pixels, before it is cut to its ink."""
INK = 64
"""What a pixel of a digit must exceed, of 255, to be part of its box."""
MOST_OVERLAP = 0.1
"""Of the smaller of two boxes."""
PARTS = {"train": 0.7, "validation": 0.15, "test": 0.15}
TRIES = 30
SEED = 4


def builtin_images(name: str, options: Images | None = None) -> ImageSource:
    """A built-in set by name: the same images each time."""
    return IMAGES[name](options or Images())


def builtin_scenes(name: str, options: Scenes | None = None) -> ImageSource:
    return SCENES[name](options or Scenes())


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """1797 images of 8 × 8 pixels, uint8 from 0 to 255, and their digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images * (255 / 16)).round().astype(np.uint8), data.target.astype(np.int64)


@IMAGES.register("digits")
def digits(options: Images) -> ImageSource:
    """1797 images of handwritten digits, 8 × 8 pixels; the digit as class."""
    images, codes = _digits()
    names = object_array([f"digit {row}" for row in range(1, len(codes) + 1)])
    labels = Labels("integer", tuple(range(10)))
    return ImageSource("digits (built in)", Arrays(images[:, None]), names, options, labels, codes)


@SCENES.register("digit-scenes")
def digit_scenes(options: Scenes, count: int = SCENE_COUNT, side: int = SCENE_SIDE) -> ImageSource:
    """Scenes of one to four digits of different sizes and contrasts on a noisy background, with the boxes
    of their ink. No digit of one part appears in another."""
    images, codes = _digits()
    rows = split_rows(len(codes), PARTS["validation"], PARTS["test"], SEED, torch.from_numpy(codes))
    generator = np.random.default_rng(SEED)
    held_out = [round(count * PARTS[part]) for part in ("validation", "test")]
    counts = [count - sum(held_out), *held_out]
    scenes: list[np.ndarray] = []
    found: list[tuple[int, tuple[int, ...], int]] = []
    for part_rows, part_count in zip(rows, counts, strict=True):
        for _ in range(part_count):
            scene, placed = _make_scene(images, part_rows.numpy(), side, generator)
            found += [(len(scenes), box, int(codes[row])) for row, box in placed]
            scenes.append(scene)
    objects = Objects(
        np.array([image for image, _, _ in found]),
        np.array([box for _, box, _ in found], np.float64),
        "corner and sides",
        np.array([code for _, _, code in found]),
        np.zeros(len(found), bool),
        np.arange(1, len(found) + 1),
        " annotation ",
        ("digit-scenes (built in)",) * count,
        np.ones(count, bool),
        np.full((count, 2), side),
    )
    return ImageSource(
        "digit-scenes (built in)",
        Arrays(np.stack(scenes)[:, None]),
        object_array([f"scene {row}" for row in range(1, count + 1)]),
        options,
        Labels("integer", tuple(range(10))),
        None,
        np.repeat(list(PARTS), counts),
        objects,
    )


def _make_scene(
    images: np.ndarray, rows: np.ndarray, side: int, generator: np.random.Generator
) -> tuple[np.ndarray, list[tuple[int, tuple[int, ...]]]]:
    """Pixels (side, side), and (row of the digit, x, y, width and height of its ink) of each."""
    ground = generator.uniform(20, 90)
    scene = np.full((side, side), ground)
    placed: list[tuple[int, tuple[int, ...]]] = []
    wanted = generator.integers(1, MOST_DIGITS + 1)
    for _ in range(TRIES):
        if len(placed) == wanted:
            break
        row = int(generator.choice(rows))
        length = int(generator.integers(DIGIT_SIDES[0], DIGIT_SIDES[1] + 1))
        drawn = np.asarray(Image.fromarray(images[row]).resize((length, length), Image.Resampling.BICUBIC))
        across, down = (np.flatnonzero((drawn > INK).any(axis)) for axis in (0, 1))
        left, top = generator.integers(0, side - length + 1, 2)
        box = (int(left + across[0]), int(top + down[0]), int(np.ptp(across)) + 1, int(np.ptp(down)) + 1)
        if any(_overlap(box, other) > MOST_OVERLAP for _, other in placed):
            continue
        window = scene[top : top + length, left : left + length]
        ink = generator.uniform(130, 255)
        np.maximum(window, ground + (ink - ground) * (drawn / 255), out=window)
        placed.append((row, box))
    scene += generator.normal(0, generator.uniform(2, 10), scene.shape)
    return scene.clip(0, 255).astype(np.uint8), placed


def _overlap(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Area of the intersection, as a share of the smaller box."""
    sides = [min(one[i] + one[i + 2], other[i] + other[i + 2]) - max(one[i], other[i]) for i in (0, 1)]
    return max(0, sides[0]) * max(0, sides[1]) / min(one[2] * one[3], other[2] * other[3])
