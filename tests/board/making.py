"""Runs written by hand, and a board that serves them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.testclient import TestClient

from quire.board.app import Board, listening, settings_of
from quire.board.worker import Worker

CONFIG = """format = 1
recipe = {recipe}
command = {command}
date = "2026-01-0{day} 10:00"

[versions]
quire = "0.1.0"

[options]
seed = {seed}
out = {out}

[options.optim]
name = "adam"
lr = {lr}
"""


def line(step: int, split: str = "train", **values: Any) -> str:
    record = {"format": 1, "step": step, "epoch": step / 10, "split": split, "values": values, "seconds": 0.1}
    return json.dumps(record) + "\n"


def make_run(
    root: Path,
    name: str,
    *,
    recipe: str = "mlp",
    lr: float = 0.1,
    day: int = 1,
    lines: Sequence[str] | None = None,
    result: Mapping[str, Any] | None = None,
) -> Path:
    """A run folder with what `quire train` leaves in it, as far as the board reads it."""
    folder = root / name
    folder.mkdir(parents=True)
    text = CONFIG.format(
        recipe=json.dumps(recipe), command=json.dumps(f"quire train {recipe}"), day=day, seed=day,
        out=json.dumps(f"runs/{name}"), lr=lr,
    )  # fmt: skip
    (folder / "config.toml").write_text(text, encoding="utf-8")
    if lines is None:
        lines = [
            line(s, split, loss=1 / s, accuracy=s / 40)
            for s in range(1, 31)
            for split in ("train", "validation")
        ]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "log.txt").write_text("2026-01-01T10:00:00+00:00 saved step 30\n")
    if result is not None:
        (folder / "result.json").write_text(json.dumps({"format": 1, **result}), encoding="utf-8")
    return folder


def finished(accuracy: float = 0.9, **more: Any) -> dict[str, Any]:
    measures = {"test": {"loss": 0.2, "accuracy": accuracy}, "validation": {"loss": 0.1, "accuracy": 0.95}}
    return {
        "measures": measures,
        "stopped": "finished",
        "steps": 30,
        "seconds": 12.0,
        "parameters": 100,
        **more,
    }


Client = Callable[[Path], TestClient]


@contextmanager
def serving(root: Path, formulas: Worker) -> Iterator[int]:
    """A board on a port of its own, served as `quire board` does; gives the port."""
    made = Board(root)
    made.doctor = made.formulas = formulas
    server = uvicorn.Server(settings_of(made))
    with listening(0) as found:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [found]}, daemon=True)
        thread.start()
        try:
            yield found.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)
