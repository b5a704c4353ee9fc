"""From words to a dataclass of options: tyro parses and writes the help, the messages are ours."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from quire.cli import flags
from quire.cli.config import read_config
from quire.cli.paths import require_run
from quire.errors import InputError
from quire.files import check_sums

T = TypeVar("T")


def parse(
    options: type[T], words: Sequence[str], *, prog: str, description: str = "", default: Any = None
) -> T:
    """The options that `words` give. InputError for a mistake; `--help` prints and exits."""
    settings: dict[str, Any] = {"prog": prog, "args": list(words), "description": description or None}
    if default is not None:
        settings["default"] = default
    if flags.wants_help(words):
        return tyro.cli(options, **settings | {"args": ["--help"]})  # whatever is wrong or missing beside it
    flags.check_words(options, words, prog)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            return tyro.cli(options, **settings)
    except SystemExit as exit_request:
        raise _cause(exit_request, printed.getvalue(), prog) from None


def parse_with_config(
    options: type[T], words: Sequence[str], *, prog: str, description: str = "", recipe: str = ""
) -> T:
    """As `parse`, with `--config FILE.toml` read first; flags win over the file. A run that is
    resumed goes on with its own options in the same way.

    The options are made once, from file and flags together, so that a file may hold one half of
    what belongs together (`target`) and the command line the other (`--data`).
    """
    help_text = "Options from a TOML file, or from a run's config.toml to repeat it; flags win over the file."
    with_config: type = dataclasses.make_dataclass(
        options.__name__,
        [("config", Annotated[Path | None, tyro.conf.arg(help=help_text)], dataclasses.field(default=None))],
        bases=(options,),
        frozen=True,
        kw_only=True,
    )
    file, default, from_file = find_path(words, "--config"), None, set[str]()
    resumed = find_path(words, "--resume")
    if not flags.wants_help(words) and (file or resumed):
        if resumed:
            require_run(resumed)
            check_sums(resumed, "config.toml")
        file = file or Path(resumed or "") / "config.toml"
        default, from_file = read_config(with_config, file, recipe, flags.given(words))
    try:
        parsed: Any = parse(with_config, words, prog=prog, description=description, default=default)
    except InputError as error:
        blamed = (name for name in from_file - flags.given(words) if f"--{name} " in f"{error.got} ")
        if next(blamed, None) is None:
            raise
        raise InputError(f"{file}: {error.got}", expected=error.expected, fix=error.fix) from None
    names = (field.name for field in dataclasses.fields(options))  # type: ignore[arg-type]
    return options(**{name: getattr(parsed, name) for name in names})


def find_path(words: Sequence[str], name: str) -> Path | None:
    """The value of the last flag `name`; a missing value is the parser's to complain about."""
    found = None
    for position, word in enumerate(words):
        if word.startswith(f"{name}="):
            found = Path(word.partition("=")[2])
        elif word == name and position + 1 < len(words) and not flags.is_flag(words[position + 1]):
            found = Path(words[position + 1])
    return found


def _cause(exit_request: SystemExit, printed: str, prog: str) -> InputError:
    """The InputError that a dataclass raised inside tyro, or tyro's own message without its frame."""
    cause: BaseException | None = exit_request
    while cause is not None:
        if isinstance(cause, InputError):
            return cause
        cause = cause.__context__
    lines = [line.strip("│╭╮╰╯─ ") for line in printed.splitlines()]
    text = " ".join(line for line in lines[1:] if line and not line.startswith("For full helptext"))
    return InputError(text or "these options do not fit", fix=f"see {prog} --help")
