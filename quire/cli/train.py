"""`quire train RECIPE`, in one process or in several."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.flags import HELP, is_flag
from quire.cli.member import MEMBER
from quire.cli.parse import parse_with_config
from quire.cli.paths import require_file, require_run
from quire.cli.recipes import all_recipes, find_recipe
from quire.cli.show import print_json, print_measures
from quire.cli.twice import ending_when_asked_twice
from quire.errors import InputError, QuireError
from quire.options import Parallel
from quire.recipes.base import Recipe, RunOptions

if TYPE_CHECKING:
    from quire.recipes.execute import Outcome
    from quire.train.member import Member


def main(words: Sequence[str]) -> int:
    if words and words[0] in HELP:
        print(usage())
        return 0
    member: Member | None = None
    if words and words[0] == MEMBER:
        member, words = _started_as(words[1:4]), words[4:]
    if not words or is_flag(words[0]):
        raise InputError(
            f"the option {words[0]} where the recipe belongs" if words else "no recipe",
            expected=f"quire train RECIPE, with one of {', '.join(sorted(all_recipes()))}",
            fix="for example: quire train mlp",
        )
    refuse_no_text(words)
    recipe = find_recipe(words[0])
    parsed: Any = parse_with_config(
        with_processes(recipe.options),
        words[1:],
        prog=f"quire train {recipe.name}",
        description=f"{recipe.summary.rstrip('.')}. Expected on built-in data: {recipe.expected}.",
        recipe=recipe.name,
    )
    names = [field.name for field in dataclasses.fields(recipe.options)]
    options = recipe.options(**{name: getattr(parsed, name) for name in names})
    if options.data is not None:
        require_file(options.data)
    for base in (getattr(getattr(options, "tune", None), "base", None), getattr(options, "source", None)):
        if base is not None:
            require_run(base)
    if member is None and parsed.nproc > 1:
        return start(parsed.nproc, words)
    outcome = run(recipe, options, words, member, shard=parsed.parallel.shard)
    if outcome is not None:
        print_outcome(recipe, options, outcome)
    return 0


def refuse_no_text(words: Sequence[str]) -> None:
    """A run keeps its command in a file of UTF-8."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"{word!r}, which is no text in UTF-8",
                expected="words that can be kept with the run",
                fix="give the file or folder another name",
            ) from None


def with_processes(options: type[RunOptions]) -> type:
    """The options of a recipe and those of starting processes, which are no part of a run: another number may
    go on with it."""
    return dataclasses.make_dataclass(
        options.__name__, [], bases=(Parallel, options), frozen=True, kw_only=True
    )


def start(count: int, words: Sequence[str]) -> int:
    """This command in `count` processes that train together."""
    from quire.cli.launch import launch

    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        command = [sys.executable, "-m", "quire.cli.main", "train", MEMBER]
        return launch([[*command, str(number), str(count), meeting, *words] for number in range(count)])


def _started_as(words: Sequence[str]) -> Member:
    from quire.cli.launch import end_with_parent
    from quire.train.member import Member

    end_with_parent()
    number, count, meeting = int(words[0]), int(words[1]), words[2]
    return Member(number, count, number, count, meeting)


def run(
    recipe: Recipe, options: RunOptions, words: Sequence[str], member: Member | None, *, shard: bool = False
) -> Outcome | None:
    """Train; the outcome in the process that tells the user of it."""
    from quire.recipes.execute import execute
    from quire.train.member import join, membership

    member = member or membership()
    command = shlex.join(["quire", "train", *words])
    # With --json standard output holds the object and nothing else, whatever a library prints.
    aside = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with aside, ending_when_asked_twice():
        if member is None:
            return execute(recipe, options, command=command, shard=shard)
        try:
            device = own_device(options.device, member)
        except QuireError as error:
            if member.local_number:  # the first of its machine says the same
                raise SystemExit(error.exit_code) from None
            raise
        options = dataclasses.replace(options, device=device)
        try:
            import torch

            with join(torch.device(device), member):
                outcome = execute(recipe, options, command=command, shard=shard)
        except QuireError as error:
            interrupted = error.exit_code > 128 and member.number > 0
            if interrupted or getattr(error, "said_elsewhere", False):
                raise SystemExit(error.exit_code) from None
            raise
    return outcome if member.number == 0 else None


def own_device(name: str, member: Member) -> str:
    """The device of one of several processes: of the GPUs of its machine the one with its number there."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return name
    if name != "cuda":
        raise InputError(
            f"--device {name} for {member.count} processes",
            expected="cuda, cpu or auto: each process takes a GPU of its own",
            fix="leave the number out",
        )
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < member.local_count:
        raise InputError(
            f"{member.local_count} processes on a machine with {there} CUDA devices",
            expected="a device for each",
            fix=f"use --nproc {there}" if there else "use --device cpu",
        )
    return f"cuda:{member.local_number}"


def print_outcome(recipe: Recipe, options: RunOptions, outcome: Outcome) -> None:
    if options.json:
        result = {"run": str(outcome.run), "measures": outcome.measures, "seconds": outcome.seconds}
        print_json(result)
        return
    for warning in outcome.warnings:
        if warning not in outcome.said:
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
