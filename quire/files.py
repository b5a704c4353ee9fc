"""Writing without half-written files: to a temporary sibling, flushed to disk, then renamed. And reading
files of which nothing can be taken for granted."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar

from quire.errors import CheckpointError, QuireError, WriteError

Rest = ParamSpec("Rest")
Found = TypeVar("Found")


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when it is whole, or is removed."""
    temporary = _aside(path, "tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as problem:
        written = _bytes_below(temporary)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise unwritable(path, problem, written) from problem
    sync_folder(path.parent)


@contextmanager
def appending(path: Path) -> Iterator[IO[str]]:
    """A text file to add to."""
    try:
        with open(path, "a", encoding="utf-8", opener=open_plain) as file:
            yield file
    except OSError as problem:
        raise unwritable(path, problem, _bytes_below(path)) from problem


def open_plain(path: str, flags: int) -> int:
    """For `open`, to write to a file that may stand there: neither where a link leads, nor into a pipe, which
    would be waited for."""
    try:
        number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as problem:
        if problem.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise OSError(errno.EINVAL, _NOT_PLAIN, path) from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, _NOT_PLAIN, path)
    return number


_NOT_PLAIN = "a link, a device or a pipe, not a file"


def _bytes_below(path: Path) -> int:
    with suppress(OSError):
        files = [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]
        return sum(file.stat().st_size for file in files)
    return 0


def unwritable(path: Path, problem: BaseException, written: int = 0) -> BaseException:
    """The same problem where it is none of writing; otherwise one that says where and how much. safetensors
    has an error of its own for what the system refuses it."""
    refused = re.search(r"\(os error (\d+)\)", str(problem))
    if isinstance(problem, QuireError) or not (isinstance(problem, OSError) or refused):
        return problem
    number = problem.errno if isinstance(problem, OSError) else int(refused[1]) if refused else None
    reason = getattr(problem, "strerror", None) or (os.strerror(number) if number else str(problem))
    room = ""
    with suppress(OSError):
        free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
        room = f", {free} bytes are free on its disk"
    error = WriteError(
        f"{path} cannot be written: {reason}; it got to {written} bytes{room}",
        expected="a folder that can be written to, on a disk with room",
        fix="make room, or move the run to another disk and go on with --resume",
    )
    error.errno, error.strerror, error.filename = number, reason, str(path)
    return error


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, or leave it as it was."""
    with replacing(path) as file:
        file.write(content)


def make_folder(path: Path, *, parents: bool = True) -> None:
    """A folder, unless it is there."""
    try:
        path.mkdir(parents=parents, exist_ok=True)
    except OSError as problem:
        raise unwritable(path, problem) from problem


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace these files of a folder, which is made where it is not there; all of them, or none."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        make_folder(folder)
        replace_together(folder, files)
    except BaseException:
        with suppress(OSError):
            for parent in made:
                parent.rmdir()
        raise


def replace_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace all of these files of a folder that is there, or none; the first of them at last."""
    with ExitStack() as replaced:
        for name, content in files.items():
            file = replaced.enter_context(replacing(folder / name))
            file.write(content)
            file.flush()  # so that a full disk is met before the first of them is replaced


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, canonical_json(value))


def canonical_json(value: Any) -> bytes:
    """One spelling for one value, so that equal bytes and equal values are the same thing."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


def json_number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


@contextmanager
def folder_that_appears_whole(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary sibling to fill; it becomes `target` at the end, or is removed. What is there before goes
    only then, if it is to be replaced."""
    temporary = _aside(target, "tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        for path in temporary.iterdir():
            if path.is_file():
                sync_file(path)
        sync_folder(temporary)
        if replace and target.exists():
            _swap(temporary, target)
        else:
            temporary.rename(target)
        sync_folder(target.parent)
    except BaseException as problem:
        written = _bytes_below(temporary)
        shutil.rmtree(temporary, ignore_errors=True)
        raise unwritable(target, problem, written) from problem


def _swap(temporary: Path, target: Path) -> None:
    old = _aside(target, "old")
    target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _aside(path: Path, ending: str) -> Path:
    """A sibling of this process's own, which no list shows."""
    return path.with_name(f".{path.name}.{os.getpid()}.{ending}")


FREELY = 48 * 2**20
"""Bytes that any file may unpack to."""
PACKED = 100
"""How many times its size a larger one may unpack to: data seldom comes near it, a bomb is ten times that."""


def is_bomb(path: Path, unpacked: int) -> bool:
    """Whether a packed file that says it holds so many bytes is out of all proportion."""
    return unpacked > max(FREELY, PACKED * path.stat().st_size)


def read_file(path: Path) -> bytes:
    """The bytes of a regular file."""
    require_plain(path)
    return path.read_bytes()


def require_plain(path: Path) -> None:
    """Refuse a device or a pipe, which may have no end; to open a pipe would already wait for somebody."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "a device or a pipe, not a file", str(path))


LARGEST_TOML = 2**20
_DOTTED = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""")


def parse_toml(content: bytes) -> dict[str, Any]:
    """Settings in TOML. Python's parser takes room by the square of the parts of a key, and a hundred times
    that of a file; what no settings need is refused before."""
    if len(content) > LARGEST_TOML:
        raise tomllib.TOMLDecodeError(f"{len(content)} bytes of settings; {LARGEST_TOML} are allowed")
    text = content.decode("utf-8")
    if _DOTTED.search(text):
        raise tomllib.TOMLDecodeError("a key of more than 64 parts")
    return tomllib.loads(text)


def names_its_file(
    read: Callable[Concatenate[Path, Rest], Found],
) -> Callable[Concatenate[Path, Rest], Found]:
    """A reader of run folders whose every failure is a CheckpointError with the path.

    What somebody changed on purpose, with sums that fit, fails in as many ways as there are bytes.
    """

    @functools.wraps(read)
    def reading(path: Path, *values: Rest.args, **options: Rest.kwargs) -> Found:
        try:
            return read(path, *values, **options)
        except QuireError:
            raise
        except Exception as problem:
            what = " ".join(str(problem).split())[:200]
            raise CheckpointError(
                f"{path} cannot be used: {what or 'no reason given'} ({type(problem).__name__})",
                expected="what Quire wrote, unchanged",
                fix="restore it from a copy, or train again",
            ) from problem

    return reading


# The sums of a finished run ---------------------------------------------------------------------

SUMS = "sums.json"
GROWS = ("log.txt", "metrics.jsonl")
"""Files that are added to when a run is resumed; what they had then is what is checked."""
RESTORED = {
    "config.toml": "restore it from a copy; for other options begin a new run, with --config and this file",
    "report.html": "write it again with quire report RUN",
}
"""What helps against damage, where more can be done than to train again."""


def write_sums(
    folder: Path, patterns: tuple[str, ...] = ("*.*", "figures/*"), *, anew: Mapping[str, bytes] | None = None
) -> None:
    """Size and SHA-256 of the files of a run; those of its checkpoints are in their manifests. The files
    `anew` are replaced with it, or neither is."""
    found = {
        path.relative_to(folder).as_posix(): path for pattern in patterns for path in folder.glob(pattern)
    }
    files = {
        name: _size_and_sum(path.read_bytes())
        for name, path in found.items()
        if path.is_file() and name != SUMS and not name.startswith(".")
    }
    anew = anew or {}
    files |= {name: _size_and_sum(content) for name, content in anew.items()}
    sums: dict[str, Any] = {"format": 1, "files": files}
    own = {**sums, "sha256": hashlib.sha256(canonical_json(sums)).hexdigest()}
    replace_together(folder, {SUMS: canonical_json(own), **anew})


def _size_and_sum(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def check_sums(folder: Path, *names: str) -> None:
    """CheckpointError where one of these files, or without names any file, is not as the run left it. Of a
    run that has not ended that is its configuration."""
    if not (folder / SUMS).exists():
        return
    sums = _read_sums(folder / SUMS)
    for name in names or sums:
        if name not in sums:
            continue
        facts = sums[name]
        try:
            content = read_file(folder / name)
        except OSError as problem:
            raise _changed(folder / name, f"cannot be read: {problem.strerror}") from None
        content = content[: facts["bytes"]] if name in GROWS else content
        if len(content) != facts["bytes"] or hashlib.sha256(content).hexdigest() != facts["sha256"]:
            raise _changed(
                folder / name, "is damaged: it does not have the size or the sum that it was left with"
            )


@names_its_file
def _read_sums(path: Path) -> dict[str, Any]:
    content = read_file(path)
    sums = json.loads(content)
    stated = sums.pop("sha256")
    whole = canonical_json({**sums, "sha256": stated}) == content
    if not whole or stated != hashlib.sha256(canonical_json(sums)).hexdigest():
        raise _changed(path, "does not have its own sum")
    return dict(sums["files"])


def _changed(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {what}",
        expected="the file as the run wrote it",
        fix=RESTORED.get(path.name, "restore it from a copy, or train again"),
    )
