"""The runs of a folder. A run is read when it is asked for, and again only where one of its files changed.

A run is named by its folder, and found among the names that the folder lists: no path is ever made from what
a browser sent. Symbolic links are not followed, as they may lead elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.board.metrics import Metrics, Stamp, is_folder, last_values, stamp
from quire.errors import CheckpointError, InputError, QuireError, nearest
from quire.files import parse_toml
from quire.report import reading
from quire.report.reading import TRAINER_VALUES, Curve, Run
from quire.report.summary import Headline, headline

TRAINING_SECONDS = 60.0
"""A run without a result that wrote within this time is taken to be training: a checkpoint is due every 20
seconds, and each leaves a line in the log."""
KEPT_POINTS = 2_000_000
"""Points of curves that stay in memory, 16 bytes each; beyond it the runs looked at longest ago go."""

GLIMPSE = 1 << 16
"""Bytes at the end of a run's metrics; a measure that is not in them is missed until its curve is read."""
_FILES = ("config.toml", "metrics.jsonl", "result.json", "log.txt")
_STATES = {"finished": "finished", "early": "stopped early", "converged": "converged"}


@dataclass(frozen=True)
class Summary:
    """One line of the list."""

    name: str
    recipe: str
    state: str
    """training, finished, stopped early, converged, interrupted, unfinished or damaged."""
    main: Headline | None
    step: int
    when: str
    written: float
    """Time of the newest file, in seconds since 1970."""
    problem: str = ""
    """Why it cannot be read."""

    @property
    def settled(self) -> bool:
        return self.state != "training"


class Runs:
    """The runs below `root`, one folder each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.RLock()
        self._reading = threading.RLock()
        """Of curves, which takes longer: the list need not wait for them."""
        self._summaries: dict[str, tuple[tuple[Stamp | None, ...], Summary]] = {}
        self._metrics: OrderedDict[str, Metrics] = OrderedDict()
        self._listed: set[str] = set()

    def names(self) -> list[str]:
        return sorted(name for name in self._folders() if stamp(self.root / name / "config.toml"))

    def _folders(self) -> set[str]:
        try:
            with os.scandir(self.root) as entries:
                self._listed = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        except FileNotFoundError:
            self._listed = set()
        return self._listed

    def folder(self, name: str) -> Path:
        """InputError where the folder lists no run of this name."""
        # What was listed once may have become something else; what was not may be new.
        known = name in self._listed and is_folder(self.root / name)
        if not (known or name in self._folders()) or stamp(self.root / name / "config.toml") is None:
            fix = nearest(name, self.names()) or "see the list of runs"
            raise InputError(f"no run '{name}'", expected="a run of the folder", fix=fix)
        return self.root / name

    def whole(self, name: str) -> Path:
        """A folder that others may read through: InputError where something in it is a link."""
        folder = self.folder(name)
        for above, folders, files in os.walk(folder):
            for link in (Path(above) / each for each in (*folders, *files)):
                if link.is_symlink():
                    raise InputError(
                        f"{link.relative_to(self.root)} is a symbolic link",
                        expected="a run whose files lie in its own folder",
                        fix="put the file itself there, or use the command line",
                    )
        return folder.resolve()

    # -- the list ------------------------------------------------------------------------------

    def list(self) -> list[Summary]:
        """Every run, the newest first."""
        with self._lock:
            names = self.names()
            found = [self.summary(name) for name in names]
            for gone in self._summaries.keys() - set(names):
                del self._summaries[gone]
        return sorted(found, key=lambda run: (run.when, run.name), reverse=True)

    def summary(self, name: str) -> Summary:
        folder = self.root / name
        stamps = tuple(stamp(folder / file) for file in _FILES)
        with self._lock:
            known = self._summaries.get(name)
            if known is not None and known[0] == stamps and _still(known[1]):
                return known[1]
            made = _summarise(name, folder, *stamps)
            self._summaries[name] = stamps, made
        return made

    # -- one run -------------------------------------------------------------------------------

    def run(self, name: str) -> Run:
        """Configuration, result and whole curves, as a report reads them."""
        folder = self.folder(name)
        config = read_whole_config(folder)
        result = read_result(folder)
        metrics = self.metrics(name)
        curves = {
            measure: {split: series.curve() for split, series in splits.items()}
            for measure, splits in metrics.series.items()
        }
        return Run(folder, config, result, curves, metrics.last_step, metrics.last_epoch)

    def glimpse(self, name: str) -> Run:
        """The same without reading the curves, of which it has the last points alone."""
        folder = self.folder(name)
        path = folder / "metrics.jsonl"
        step, curves = last_values(path, GLIMPSE) if stamp(path) else (0, {})
        return Run(folder, read_whole_config(folder), read_result(folder), curves, step)

    def read_ahead(self, names: Sequence[str]) -> None:
        """Read the curves that somebody will ask for next, while their page is on its way."""

        def read() -> None:
            with suppress(QuireError):  # whoever asks for them is told
                self.all_metrics(names)

        threading.Thread(target=read).start()  # no daemon: PyArrow must not be cut off

    def all_metrics(self, names: Sequence[str]) -> tuple[Metrics, ...]:
        """Those of several runs at one go: askers that take turns run by run hold each other up."""
        with self._reading:
            return tuple(self.metrics(name) for name in names)

    def metrics(self, name: str) -> Metrics:
        folder = self.folder(name)
        with self._reading:
            found = self._metrics.get(name) or Metrics(folder / "metrics.jsonl")
            try:
                found.read_on()
            except CheckpointError:
                self._metrics.pop(name, None)
                raise
            self._metrics[name] = found
            self._metrics.move_to_end(name)
            kept = sum(metrics.points for metrics in self._metrics.values())
            while kept > KEPT_POINTS and len(self._metrics) > 1:
                kept -= self._metrics.popitem(last=False)[1].points
        return found

    def file(self, name: str, *parts: str) -> Path | None:
        """A plain file of a run, None where there is none; no link on the way to it is followed."""
        path = self.folder(name)
        for part in parts[:-1]:
            path = path / part
            if path.is_symlink():
                return None
        path = path / parts[-1]
        return path if stamp(path) is not None else None


def read_whole_config(folder: Path) -> dict[str, Any]:
    return _config((folder / "config.toml").read_bytes(), folder)


def read_result(folder: Path) -> dict[str, Any] | None:
    path = folder / "result.json"
    try:
        return reading.read_result(path) if stamp(path) is not None else None
    except RecursionError as error:
        raise reading.damaged(path, "it is nested too deeply") from error


def _config(text: bytes, folder: Path) -> dict[str, Any]:
    path = folder / "config.toml"
    try:
        config = parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise reading.damaged(path, str(error)) from error
    reading.check_format(path, config)
    return config


def _summarise(name: str, folder: Path, *stamps: Stamp | None) -> Summary:
    config_stamp, metrics_stamp, result_stamp, log_stamp = stamps
    written = max((found.modified for found in stamps if found), default=0) / 1e9
    when = datetime.fromtimestamp(config_stamp.modified / 1e9 if config_stamp else 0).strftime(
        "%Y-%m-%d %H:%M"
    )
    try:
        head = read_head(folder)
        result = read_result(folder)
        state = _state(result, metrics_stamp, result_stamp, log_stamp)
        if state == "training":
            result = None  # of an earlier end, if there is one: the run goes on
        step, curves = 0, dict[str, dict[str, Curve]]()
        if result is not None:
            step = result["steps"] if isinstance(result.get("steps"), int) else 0
        elif metrics_stamp is not None:
            step, curves = last_values(folder / "metrics.jsonl")
        run = Run(folder, head, result, {k: v for k, v in curves.items() if k not in TRAINER_VALUES})
        main, recipe = headline(run), run.recipe
    except Exception as error:
        # A file may hold anything, and one run must not hide the others.
        problem = error.got if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"[:200]
        return Summary(name, "–", "damaged", None, 0, when, written, problem.replace(f"{folder}{os.sep}", ""))
    return Summary(name, recipe, state, main, step, str(head.get("date") or when), written)


def read_head(folder: Path) -> dict[str, Any]:
    """What a configuration says before its first table: recipe, command, date. The whole of it takes ten
    times as long, which a thousand runs would feel."""
    lines = (folder / "config.toml").read_bytes().splitlines(keepends=True)
    end = next((place for place, line in enumerate(lines) if line.startswith(b"[")), len(lines))
    return _config(b"".join(lines[:end]), folder)


def _state(result: Mapping[str, Any] | None, *stamps: Stamp | None) -> str:
    metrics, finished, log = stamps
    newest = max((found.modified for found in (metrics, log) if found), default=0)
    if finished is not None and (metrics is None or metrics.modified <= finished.modified):
        stopped = str((result or {}).get("stopped", "finished"))
        return _STATES.get(stopped, stopped)
    return "training" if time.time() - newest / 1e9 < TRAINING_SECONDS else "unfinished"


def _still(summary: Summary) -> bool:
    """Whether what was said of a run is true although time has passed."""
    return summary.settled or time.time() - summary.written < TRAINING_SECONDS


def splits_of(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """The splits of several runs' curves, in the order in which people think of them."""
    found = {split for splits in curves for split in splits}
    usual = [split for split in ("train", "validation", "test") if split in found]
    return usual + sorted(found - set(usual))
