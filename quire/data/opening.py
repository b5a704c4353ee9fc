"""Opening what is given as data: plain files alone. A device or a pipe, which may have no end, is refused by
its name, also where a link leads to one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from quire.errors import DataError
from quire.files import read_file


def require_plain(path: Path) -> None:
    """For readers that open a path themselves. Opening a pipe would already wait for somebody to write."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError("cannot be read: a device or a pipe, not a file", path=path)


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
        return read_file(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=path) from None
