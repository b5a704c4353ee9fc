"""A file of one's own for any recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quire.recipes.base import Recipe


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


def target_for(recipe: Recipe) -> str:
    return {
        "classes": "kind", "two classes": "label", "values": "value", "any": "kind", "several": "label,value",
    }[recipe.targets]  # fmt: skip
