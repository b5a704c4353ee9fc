"""`quire train RECIPE`."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.cli.flags import HELP, is_flag
from quire.cli.parse import parse_with_config
from quire.cli.paths import require_file
from quire.cli.recipes import all_recipes, find_recipe
from quire.cli.show import print_json, print_measures
from quire.errors import InputError
from quire.recipes.base import Recipe, RunOptions

if TYPE_CHECKING:
    from quire.recipes.execute import Outcome


def main(words: Sequence[str]) -> int:
    if words and words[0] in HELP:
        print(usage())
        return 0
    if not words or is_flag(words[0]):
        raise InputError(
            f"the option {words[0]} where the recipe belongs" if words else "no recipe",
            expected=f"quire train RECIPE, with one of {', '.join(sorted(all_recipes()))}",
            fix="for example: quire train mlp",
        )
    recipe = find_recipe(words[0])
    options = parse_with_config(
        recipe.options,
        words[1:],
        prog=f"quire train {recipe.name}",
        description=f"{recipe.summary.rstrip('.')}. Expected on built-in data: {recipe.expected}.",
        recipe=recipe.name,
    )
    if options.data is not None:
        require_file(options.data)
    from quire.recipes.execute import execute

    # With --json standard output holds the object and nothing else, whatever a library prints.
    aside = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with aside:
        outcome = execute(recipe, options, command=shlex.join(["quire", "train", *words]))
    print_outcome(recipe, options, outcome)
    return 0


def print_outcome(recipe: Recipe, options: RunOptions, outcome: Outcome) -> None:
    if options.json:
        result = {"run": str(outcome.run), "measures": outcome.measures, "seconds": outcome.seconds}
        print_json(result)
        return
    for warning in outcome.warnings:
        print(f"note: {warning}")
    print_measures(outcome.measures)
    if outcome.expected_met is not None:
        print(f"expected: {recipe.expected}: {'met' if outcome.expected_met else 'NOT met'}")
    print(f"run: {outcome.run} ({outcome.seconds:.1f} s)")
    if outcome.report is not None:
        print(f"report: {outcome.report}")


def usage() -> str:
    recipes = all_recipes()
    width = max(map(len, recipes), default=0)
    lines = [f"  {name.ljust(width)}  {recipe.summary}" for name, recipe in recipes.items()]
    return "\n".join(["usage: quire train RECIPE [OPTIONS]", "", *lines, "", "quire train RECIPE --help"])
