"""Opening what is given as data: plain files alone. A device or a pipe, which may have no end, is refused by
its name, also where a link leads to one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from quire import files
from quire.errors import DataError


def require_plain(path: Path) -> None:
    """For readers that open a path themselves."""
    try:
        files.require_plain(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=path) from None


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """The bytes of a file, piece by piece."""
    require_plain(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=path) from None
    with file:
        yield file


def read_bytes(path: Path) -> bytes:
    """All of a file."""
    try:
        return files.read_file(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=path) from None
