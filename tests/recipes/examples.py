"""A file of one's own for any recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from quire.recipes.base import Recipe


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """For runs whose reports nobody reads: pictures are made, but come out empty. To draw them takes most of
    the time of a short run."""

    def save(_: Figure, file: TextIO, **__: Any) -> None:
        file.write('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"></svg>')

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.report.style._lay_out", lambda _: None)
        patch.setattr(Figure, "savefig", save)
        yield


def write_csv(path: Path, rows: int = 160, seed: int = 0) -> Path:
    """Numbers, categories, booleans, dates and missing values; two classes, three classes, a value."""
    generator = np.random.default_rng(seed)
    size = generator.normal(50, 10, rows)
    colour = generator.choice(["red", "green", "blue"], rows)
    fast = generator.random(rows) < 0.5
    day = generator.integers(1, 28, rows)
    value = 3 * size + 20 * (colour == "red") + 5 * fast + generator.normal(0, 2, rows)
    lines = ["size,colour,fast,day,kind,label,value"]
    for i in range(rows):
        shown = "" if i % 17 == 3 else f"{size[i]:.3f}"
        kind = ["small", "middle", "large"][int(np.searchsorted([45, 55], size[i]))]
        label = "high" if value[i] > 160 else "low"
        moves = "yes" if fast[i] else "no"
        lines.append(f"{shown},{colour[i]},{moves},2024-03-{day[i]:02d},{kind},{label},{value[i]:.3f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_images(folder: Path, each: int = 16, seed: int = 0) -> Path:
    """A folder for each of three classes: a bar, a square, or nothing but noise, on 16 × 16 pixels."""
    generator = np.random.default_rng(seed)
    for name in ("bar", "noise", "square"):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            pixels = generator.integers(0, 90, (16, 16, 3))
            x, y = generator.integers(1, 8, 2)
            if name == "bar":
                pixels[:, x : x + 3] = (220, 60, 40)
            elif name == "square":
                pixels[y : y + 6, x : x + 6] = (40, 80, 230)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i:02d}.png")
    return folder


def write_scenes(folder: Path, count: int = 24, seed: int = 0) -> Path:
    """Annotated scenes of 48 × 40 pixels in Pascal VOC's layout: red and blue rectangles, one to three."""
    generator = np.random.default_rng(seed)
    (folder / "JPEGImages").mkdir(parents=True)
    (folder / "Annotations").mkdir()
    for i in range(count):
        pixels = generator.integers(0, 90, (40, 48, 3))
        objects = ""
        for place in range(1 + i % 3):
            name, colour = [("red", (230, 40, 30)), ("blue", (30, 60, 240))][int(generator.integers(2))]
            width, height = generator.integers(8, 14, 2)
            x, y = 16 * place + int(generator.integers(0, 2)), int(generator.integers(0, 40 - height))
            pixels[y : y + height, x : x + width] = colour
            corners = (
                f"<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + width}</xmax><ymax>{y + height}</ymax>"
            )
            objects += f"<object><name>{name}</name><bndbox>{corners}</bndbox></object>\n"
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "JPEGImages" / f"{i:03d}.png")
        (folder / "Annotations" / f"{i:03d}.xml").write_text(
            f"<annotation><filename>{i:03d}.png</filename>\n"
            f"<size><width>48</width><height>40</height><depth>3</depth></size>\n{objects}</annotation>\n"
        )
    return folder


def write_text(path: Path, sentences: int = 250, seed: int = 0) -> Path:
    """Short sentences of a few words."""
    generator = np.random.default_rng(seed)
    words = [["the", "a"], ["cat", "dog", "bird"], ["sees", "likes"], ["water", "trees", "rain"]]
    made = [" ".join(str(generator.choice(choice)) for choice in words) for _ in range(sentences)]
    path.write_text(".\n".join(made) + ".\n")
    return path


def write_pairs(path: Path, count: int = 120, seed: int = 0) -> Path:
    """Small letters, and the same as capitals in reverse."""
    generator = np.random.default_rng(seed)
    texts = {"".join(generator.choice(list("abcd"), generator.integers(2, 6))) for _ in range(count)}
    path.write_text("".join(f"{text}\t{text[::-1].upper()}\n" for text in sorted(texts)))
    return path


def write_labelled(path: Path, count: int = 120, seed: int = 0) -> Path:
    """Texts in which one of three letters is frequent, and which."""
    generator = np.random.default_rng(seed)
    lines = ["text,label"]
    for i in range(count):
        often = "xyz"[i % 3]
        letters = generator.choice([often, often, "a", "b", "c"], generator.integers(6, 12))
        lines.append(f"{''.join(letters)} {i},{'many ' + often}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_data(recipe: Recipe, folder: Path, seed: int = 0) -> Path:
    """Data of the kind that a recipe learns from."""
    writers = {"text": write_text, "pairs": write_pairs, "labelled": write_labelled}
    if recipe.targets in writers:
        name = "mine.csv" if recipe.targets == "labelled" else "mine.txt"
        return writers[recipe.targets](folder / name, seed=seed)
    if recipe.targets == "images":
        return write_images(folder / "mine", seed=seed)
    if recipe.targets == "scenes":
        return write_scenes(folder / "mine", seed=seed)
    return write_csv(folder / "mine.csv", seed=seed)


def target_for(recipe: Recipe) -> str:
    return {
        "classes": "kind", "two classes": "label", "values": "value", "any": "kind", "several": "value,label",
    }[recipe.targets]  # fmt: skip
