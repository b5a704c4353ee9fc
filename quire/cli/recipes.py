"""The recipes as the commands see them: imported without PyTorch, looked up by name."""

from __future__ import annotations

from quire.errors import unknown_name
from quire.recipes.base import RECIPES, Recipe


def all_recipes() -> dict[str, Recipe]:
    import quire.recipes  # noqa: F401  registers every recipe

    return dict(RECIPES.items())


def find_recipe(name: str) -> Recipe:
    recipes = all_recipes()
    if name not in recipes:
        raise unknown_name("recipe", name, recipes)
    return recipes[name]
