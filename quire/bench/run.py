"""Runs subjects one after the other, and shows and keeps what was found."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import quire.bench.subjects  # noqa: F401
from quire.bench.case import GROWTHS, SUBJECTS, Place
from quire.bench.growth import measure, save_growth
from quire.bench.machine import describe
from quire.bench.measure import run_case
from quire.bench.results import save
from quire.bench.table import text


@dataclass(frozen=True)
class Request:
    names: tuple[str, ...]
    device: torch.device
    listing: bool = False
    growth: bool = False
    rounds: int = 5
    threads: int | None = None
    data: Path | None = None
    save: Path | None = None
    small: bool = False
    json: bool = False


def run(request: Request) -> int:
    """The exit code: 1 where a bar is not met."""
    known: Any = GROWTHS if request.growth else SUBJECTS
    if request.listing:
        width = max(map(len, known))
        for name in known:
            print(f"{name:{width}}  {(known[name].__doc__ or '').splitlines()[0]}")
        return 0
    chosen = {name: known[name] for name in request.names or known}
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    place = Place(request.device, request.small, request.data)
    return grow(request, place, chosen) if request.growth else compare(request, place, chosen)


def compare(request: Request, place: Place, chosen: dict[str, Any]) -> int:
    everything: dict[str, list[Any]] = {}
    machine = describe(place.device)
    if not request.json:
        print(machine)
    for name, subject in chosen.items():
        outcomes = []
        for case in subject(place):
            outcomes.append(run_case(case, place, rounds=request.rounds, say=say))
            if not request.json:
                print("\n" + text(outcomes[-1]), flush=True)
        if not outcomes:
            say(f"{name}: nothing to measure on {place.device}", lasting=True)
            continue
        everything[name] = [outcome.plain() for outcome in outcomes]
        if request.save is not None:
            say(f"written: {save(request.save, name, place.device, outcomes)}", lasting=True)
    if request.json:
        print(json.dumps({"machine": machine, "subjects": everything}))
    bars = [bar for found in everything.values() for case in found for bar in case["bars"]]
    return 1 if any(bar["met"] is False for bar in bars) and not request.small else 0


def grow(request: Request, place: Place, chosen: dict[str, Any]) -> int:
    assert request.save is not None
    for name, subject in chosen.items():
        for number, growth in enumerate(subject(place)):
            found = measure(growth, place, say=say)
            print("\n".join(found.lines()), flush=True)
            title = name if not number else f"{name}-{number + 1}"
            say(f"written: {save_growth(request.save, title, place.device, found)}", lasting=True)
    return 0


def say(line: str, lasting: bool = False) -> None:
    """What is under way is for terminals alone; in a file it would stand between the tables."""
    if lasting:
        print(line, file=sys.stderr, flush=True)
    elif sys.stderr.isatty():
        print(f"\033[K… {line[:100]}", end="\r", file=sys.stderr, flush=True)
