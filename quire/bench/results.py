"""Outcomes in files: a dated table for people, and the same numbers as JSON."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch

from quire.bench.machine import describe, short_name
from quire.bench.measure import Outcome
from quire.bench.table import text
from quire.files import write_bytes, write_json


def stem(name: str, device: torch.device) -> str:
    return f"{datetime.date.today().isoformat()}-{name}-{short_name(device)}"


def save(folder: Path, name: str, device: torch.device, outcomes: list[Outcome]) -> Path:
    """Write both files and return the table's path; a result of the same day is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem(name, device)}.txt"
    machine = describe(device)
    tables = "\n\n".join(text(outcome) for outcome in outcomes)
    write_bytes(path, f"quire bench {name}\n{machine}\n\n{tables}\n".encode())
    found = {
        "format": 1,
        "subject": name,
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "outcomes": [outcome.plain() for outcome in outcomes],
    }
    write_json(path.with_suffix(".json"), found)
    return path
