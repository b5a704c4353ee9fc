"""Recipes: functions from options to a complete run. Importing this package imports every recipe
file, and none of them imports PyTorch until it builds something."""

from quire.recipes import (
    autoencoders,
    classical,
    dense,
    few_labels,
    generative,
    language,
    polynomial,
    pooling,
    scenes,
    sequences,
    several,
    vision,
)
from quire.recipes.base import RECIPES, Expectation, Recipe, RunOptions, TableRunOptions, recipe

__all__ = [
    "RECIPES",
    "Expectation",
    "Recipe",
    "RunOptions",
    "TableRunOptions",
    "autoencoders",
    "classical",
    "dense",
    "few_labels",
    "generative",
    "language",
    "polynomial",
    "pooling",
    "recipe",
    "scenes",
    "sequences",
    "several",
    "vision",
]
