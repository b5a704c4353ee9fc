"""`quire sample RUN`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from quire.cli.parse import parse
from quire.cli.paths import require_run
from quire.cli.show import print_json
from quire.errors import InputError
from quire.options import check_range


@dataclass(frozen=True)
class SampleOptions:
    """Text from a language model, printed as it is made."""

    run: Positional[Path]
    """Run folder."""
    prompt: str = "\n"
    """What the text begins with."""
    length: int = 300
    """Tokens after the prompt."""
    count: int = 1
    """How many texts."""
    temperature: float = 0.8
    """0 takes the likeliest token each time; above 1 unlikely ones become more frequent."""
    top_k: int | None = None
    """Draw from the k likeliest tokens alone."""
    top_p: float | None = None
    """Draw from the fewest tokens that together have this probability."""
    stop: tuple[str, ...] = ()
    """Strings at which a text ends."""
    seed: int = 0
    json: bool = False
    """Print one object: run, prompt, texts."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        check_range(self, "--", length=">= 1", count=">= 1", temperature=">= 0", top_k=">= 1", seed=">= 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"--top-p is {self.top_p}", expected="a probability in (0, 1]")


def main(words: Sequence[str]) -> int:
    options = parse(SampleOptions, words, prog="quire sample")
    require_run(options.run)
    from quire.runs import load

    run = load(options.run)
    settings: dict[str, Any] = {
        "length": options.length, "temperature": options.temperature, "top_k": options.top_k,
        "top_p": options.top_p, "stop_strings": options.stop,
    }  # fmt: skip
    if options.json or options.stop:  # a stop string is known only when it is complete
        texts = run.sample([options.prompt] * options.count, seed=options.seed, **settings)
        if options.json:
            print_json({"run": str(options.run), "prompt": options.prompt, "texts": texts})
        else:
            print("\n---\n".join(texts))
        return 0
    for number in range(options.count):
        sys.stdout.write("\n---\n" if number else "")
        sys.stdout.write(options.prompt)
        for piece in run.stream(options.prompt, seed=options.seed + number, **settings):
            sys.stdout.write(piece)
            sys.stdout.flush()
    print()
    return 0
