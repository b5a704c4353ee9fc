"""`python -m quire.bench NAME… [--device cuda] [--save FOLDER]`.

That is `quire bench` for machines without the command line's dependencies."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.bench.run import Request, run
from quire.recipes.execute import resolve_device


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m quire.bench")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--save", type=Path)
    for flag in ("list", "growth", "small", "json"):
        parser.add_argument(f"--{flag}", action="store_true")
    given = parser.parse_args()
    if given.growth and given.save is None and not given.list:
        parser.error("--growth needs --save FOLDER")
    request = Request(
        tuple(given.names), resolve_device(given.device), listing=given.list, growth=given.growth,
        rounds=given.rounds, data=given.data, save=given.save, small=given.small, json=given.json,
    )  # fmt: skip
    return run(request)


if __name__ == "__main__":
    sys.exit(main())
