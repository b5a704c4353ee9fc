"""`quire bench [NAME…]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from quire.cli.parse import parse
from quire.errors import InputError


@dataclass(frozen=True)
class BenchOptions:
    """Quire beside its peers, in one run: time, ratio, extra memory, share of the machine's limit.

    Contestants take turns, after a warm-up, and medians of the rounds are shown. A peer that is not installed
    is named as absent. Exit code 1 where a bar is not met.
    """

    names: Positional[tuple[str, ...]] = ()
    """Subjects; without any, all that this machine can run."""
    list: bool = False
    """Show the subjects, and run nothing."""
    growth: bool = False
    """Time and memory against size instead, as a picture; needs --save."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    rounds: int = 5
    """Turns that each contestant takes."""
    threads: int | None = None
    """Threads of a CPU; PyTorch's choice without it."""
    data: Path | None = None
    """A file for subjects that take one (a text, for shakespeare)."""
    save: Path | None = None
    """Folder for DATE-NAME-MACHINE.txt and .json (and .png with --growth)."""
    small: bool = False
    """Tiny sizes, to see that everything runs. Its figures mean nothing."""
    json: bool = False
    """Print one object instead of tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InputError(f"--rounds {self.rounds}", expected="1 or more", fix="leave it out")
        if self.threads is not None and self.threads < 1:
            raise InputError(f"--threads {self.threads}", expected="1 or more", fix="leave it out")
        if self.data is not None and not self.data.is_file():
            raise InputError(f"--data {self.data}: no such file", expected="a file", fix="check the path")
        if self.save is not None and self.save.exists() and not self.save.is_dir():
            raise InputError(f"--save {self.save} is a file", expected="a folder", fix="choose another name")
        if self.growth and self.save is None and not self.list:
            raise InputError(
                "--growth without --save", expected="a folder for the picture", fix="add --save FOLDER"
            )


def main(words: Sequence[str]) -> int:
    options = parse(BenchOptions, words, prog="quire bench")
    from quire.bench.run import Request, run
    from quire.recipes.execute import resolve_device

    request = Request(
        options.names, resolve_device(options.device), listing=options.list, growth=options.growth,
        rounds=options.rounds, threads=options.threads, data=options.data, save=options.save,
        small=options.small, json=options.json,
    )  # fmt: skip
    return run(request)
