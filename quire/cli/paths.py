"""Paths are checked before any long work: runs that must exist, files that must not."""

from __future__ import annotations

from pathlib import Path

from quire.errors import InputError, nearest


def require_run(folder: Path) -> None:
    """InputError where there is no run, with the nearest one beside it."""
    if (folder / "config.toml").is_file():
        return
    what = "has no config.toml, so it is no run" if folder.is_dir() else "does not exist"
    if folder.is_file():
        what = "is a file"
    beside = folder.parent.glob("*/config.toml") if folder.parent.is_dir() else ()
    hint = nearest(str(folder), (str(config.parent) for config in beside))
    raise InputError(
        f"run {folder} {what}", expected="the folder of a run", fix=hint or "quire runs lists those in runs/"
    )


def require_file(path: Path) -> None:
    if not path.exists():
        from quire.data.known import to_download

        beside = (str(other) for other in path.parent.iterdir()) if path.parent.is_dir() else ()
        hint = to_download(path) or nearest(str(path), beside)
        raise InputError(f"{path}: no such file", expected="a file that exists", fix=hint or "check the path")


def refuse_existing(path: Path, overwrite: bool) -> None:
    """InputError, before any work, where `path` could not be written at the end."""
    if path.is_dir():
        raise InputError(f"{path} is a folder", expected="the name of a file to write")
    if path.exists() and not overwrite:
        raise InputError(
            f"{path} exists already", expected="a new file", fix="choose another name, or add --overwrite"
        )
    if not path.parent.is_dir():
        raise InputError(
            f"{path}: there is no folder {path.parent}",
            expected="a file in a folder that exists",
            fix=f"mkdir -p {path.parent}",
        )
