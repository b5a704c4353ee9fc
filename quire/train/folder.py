"""The run folder: the one place that training writes to and everything else reads from.

    config.toml      everything needed to repeat the run
    metrics.jsonl    one line a record
    checkpoints/     see `quire.train.checkpoints`
    log.txt          what happened and when

One process writes to a run at a time; a lock that dies with its process sees to it.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from quire.errors import CheckpointError, InputError
from quire.files import (
    appending,
    check_sums,
    folder_that_appears_whole,
    make_folder,
    names_its_file,
    open_plain,
    parse_toml,
    read_file,
    unwritable,
    write_bytes,
    write_sums,
)
from quire.train.checkpoints import Checkpoint, list_checkpoints, newest_checkpoint, save_checkpoint
from quire.train.toml import dump_toml

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
LOG = "log.txt"
CHECKPOINTS = "checkpoints"


class RunFolder:
    """A run folder that is open for writing; a `Store` of the trainer.

    `documents` (task and preparation) go into each checkpoint, so that one checkpoint is all that
    is needed to use the model.
    """

    def __init__(self, path: Path, *, resuming: bool) -> None:
        self.path = path
        self.resuming = resuming
        self.documents: dict[str, Any] = {}
        self._lock = _lock(path)

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], *, overwrite: bool = False) -> RunFolder:
        """A new folder with its config, which appears whole; an existing one only with `overwrite`."""
        check_free(path, overwrite=overwrite)
        make_folder(path.parent)
        if path.exists():
            _lock(path).close()  # not while another process trains in it
        with folder_that_appears_whole(path, replace=overwrite) as temporary:
            (temporary / CONFIG).write_text(dump_toml(config), encoding="utf-8")
            write_sums(temporary, (CONFIG,))  # a run that has ended has those of its other files as well
            (temporary / METRICS).touch()
            (temporary / LOG).touch()
        return cls(path, resuming=False)

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """An existing run to go on with."""
        read_config(path)
        return cls(path, resuming=True)

    def record(self, record: dict[str, Any]) -> None:
        with appending(self.path / METRICS) as file:
            file.write(_line(record))

    def save(self, checkpoint: Checkpoint, *, keep: int) -> None:
        whole = Checkpoint(checkpoint.step, checkpoint.tensors, {**checkpoint.documents, **self.documents})
        save_checkpoint(self.path / CHECKPOINTS, whole, keep=keep)
        self.log(f"saved step {checkpoint.step}")

    def resume(self) -> Checkpoint | None:
        if not self.resuming:
            return None
        for left in self.path.rglob(".*.tmp"):  # by a process that was killed while it wrote
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        history: list[dict[str, Any]] = []
        checkpoint = None
        if list_checkpoints(self.path / CHECKPOINTS):
            checkpoint = newest_checkpoint(self.path / CHECKPOINTS, self.log)
            history = checkpoint.documents["progress"]["history"]
        # Records after the checkpoint belong to steps that will be taken again.
        write_bytes(self.path / METRICS, self._lines(history).encode())
        self.log(f"resumed at step {checkpoint.step if checkpoint else 0}")
        return checkpoint

    def _lines(self, history: list[dict[str, Any]]) -> str:
        """Those of the metrics that a checkpoint knows of, as they stand, or else as it has them."""
        with suppress(OSError, ValueError, RecursionError):
            found = read_file(self.path / METRICS).decode().splitlines(keepends=True)[: len(history)]
            records = [json.loads(line) for line in found]
            if records == history and found == [*map(_line, records)]:
                return "".join(found)
        self.log(f"{METRICS} was not as it was left; its lines are those of the checkpoint again")
        return "".join(map(_line, history))

    def log(self, message: str) -> None:
        stamp = datetime.now().astimezone().isoformat(timespec="seconds")
        with suppress(OSError), appending(self.path / LOG) as file:  # hides no other error
            file.write(f"{stamp} {message}\n")

    def close(self) -> None:
        self._lock.close()


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def check_free(path: Path, *, overwrite: bool) -> None:
    """Refuse a folder that would lose something or cannot be, before any work is done."""
    if not path.exists():
        above = next(parent for parent in path.absolute().parents if parent.exists())
        if not above.is_dir():
            raise InputError(
                f"--out {path} lies in {above.name}, which is a file", expected="a new folder",
                fix="choose another folder",
            )  # fmt: skip
        return
    if not path.is_dir() or ((path / CONFIG).exists() is False and any(path.iterdir())):
        raise InputError(
            f"--out {path} exists and is no run folder",
            expected="a new folder, or an old run to replace",
            fix="choose another folder",
        )
    if not overwrite:
        raise InputError(
            f"the run folder {path} exists already",
            expected="a new folder",
            fix="choose another --out, go on with --resume, or replace it with --overwrite",
        )


@names_its_file
def read_config(path: Path) -> dict[str, Any]:
    """The config of a run, or a clear word that there is none."""
    try:
        config = parse_toml(read_file(path / CONFIG))
    except FileNotFoundError:
        what = "is no run folder" if path.exists() else "does not exist"
        raise InputError(
            f"{path} {what}",
            expected=f"a folder with {CONFIG}, made by 'quire train'",
            fix="'quire runs' lists the runs that there are",
        ) from None
    except NotADirectoryError:
        raise InputError(f"{path} is a file", expected="the folder of a run") from None
    except (ValueError, RecursionError) as problem:  # tomllib itself counts neither digits nor brackets
        raise CheckpointError(
            f"{path / CONFIG} cannot be read: {problem}", expected="the file as it was written"
        ) from None
    if config.get("format") != 1:
        raise CheckpointError(f"{path / CONFIG}: format {config.get('format')}", expected="format 1")
    check_sums(path, CONFIG)
    return config


def _lock(path: Path) -> IO[str]:
    try:
        file = open(path / ".lock", "a", opener=open_plain)  # noqa: SIM115
    except OSError as problem:
        raise unwritable(path / ".lock", problem) from problem
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InputError(
            f"{path} is being written by another process",
            expected="a run that nobody else trains",
            fix="wait for it to end, or stop it",
        ) from None
    return file
