"""Outcomes in files: a dated table for people, and the same numbers as JSON."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch

from quire.bench.machine import describe, short_name
from quire.bench.measure import Outcome
from quire.bench.table import text
from quire.files import canonical_json, write_files


def stem(name: str, device: torch.device) -> str:
    return f"{datetime.date.today().isoformat()}-{name}-{short_name(device)}"


def save(folder: Path, name: str, device: torch.device, outcomes: list[Outcome]) -> Path:
    """Write both files and return the table's path; a result of the same day is replaced."""
    path = folder / f"{stem(name, device)}.txt"
    machine = describe(device)
    tables = "\n\n".join(text(outcome) for outcome in outcomes)
    found = {
        "format": 1,
        "subject": name,
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "outcomes": [outcome.plain() for outcome in outcomes],
    }
    table = f"quire bench {name}\n{machine}\n\n{tables}\n".encode()
    write_files(folder, {path.name: table, path.with_suffix(".json").name: canonical_json(found)})
    return path
