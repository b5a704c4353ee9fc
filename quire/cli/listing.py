"""`quire list`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.cli.parse import parse
from quire.cli.recipes import all_recipes
from quire.cli.show import print_json, print_table


@dataclass(frozen=True)
class ListOptions:
    """Every recipe, with one line and the result it reaches on its built-in data."""

    json: bool = False
    """Print a list of {name, summary, expected, targets}."""
    debug: bool = False
    """Show the traceback of an error."""


def main(words: Sequence[str]) -> int:
    options = parse(ListOptions, words, prog="quire list")
    recipes = all_recipes().values()
    if options.json:
        print_json(
            [
                {"name": r.name, "summary": r.summary, "expected": str(r.expected), "targets": r.targets}
                for r in recipes
            ]
        )
    else:
        rows = [(recipe.name, recipe.summary, str(recipe.expected)) for recipe in recipes]
        print_table(["recipe", "what it does", "expected result"], rows)
    return 0
