"""Small disks of their own, mounted where nobody else sees."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

PAGE = 4096
UNSHARE = ["unshare", "--map-root-user", "--mount"]


@contextlib.contextmanager
def disk(place: Path, pages: int) -> Iterator[Path]:
    """A disk of so many pages."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * PAGE}", "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def read_only(place: Path, on: bool = True) -> None:
    subprocess.run(["mount", "-o", f"remount,{'ro' if on else 'rw'}", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    """A file that takes all room but `leave` pages."""
    ballast = place / "ballast"
    room = os.statvfs(place)
    ballast.write_bytes(bytes(max(0, room.f_bavail - leave) * room.f_frsize))
    return ballast


def can_mount(*, allow_skip: bool) -> bool:
    """Whether there can be such disks. Where there cannot, the program ends, unless it may do without."""
    try:
        if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode == 0:
            return True
    except OSError:
        pass
    if not allow_skip:
        raise SystemExit("not done: private mounts are not allowed here; --allow-skip does what needs none")
    print("not done: full and read-only disks, as private mounts are not allowed here", flush=True)
    return False


def run_inside(name: str, *words: str) -> NoReturn:
    """This module again where it may mount; its code is that of this process."""
    again = [sys.executable, "-m", name, "--inside", *words]
    raise SystemExit(subprocess.run([*UNSHARE, *again], check=False).returncode)
