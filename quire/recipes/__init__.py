"""Recipes: functions from options to a complete run. Importing this package imports every recipe
file, and none of them imports PyTorch until it builds something."""

from quire.recipes import dense, polynomial, several
from quire.recipes.base import RECIPES, Expectation, Recipe, RunOptions, recipe

__all__ = ["RECIPES", "Expectation", "Recipe", "RunOptions", "dense", "polynomial", "recipe", "several"]
