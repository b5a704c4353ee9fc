"""A number that tells whether data has changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from quire.data.images.decode import is_image
from quire.data.opening import opened
from quire.errors import DataError

WHOLE_FOLDER = 512 * 2**20
"""Bytes up to which every file of a folder is read whole."""
WHOLE_FILE = 2**20
"""Bytes up to which a file that is no image is read whole in any folder: labels, lists, annotations."""
ENDS = 4096
"""Bytes read of the beginning and end of other files."""


def fingerprint(path: Path | str) -> str:
    """SHA-256, in hexadecimal.

    Of a file: of its bytes. Of a folder: of the sorted relative names of its files with the size and
    SHA-256 of each. In a folder of 512 MiB or more, images and files above 1 MiB count by their first and
    last 4 KiB alone, so a change inside that keeps the size goes unnoticed there.
    """
    path = Path(path)
    try:
        if not path.is_dir():
            return _whole(path)
        files = sorted(
            Path(top, name).relative_to(path).as_posix() for top, _, names in os.walk(path) for name in names
        )
        sizes = {name: (path / name).stat().st_size for name in files}
        read_all = sum(sizes.values()) < WHOLE_FOLDER
        total = hashlib.sha256()
        for name, size in sizes.items():
            file = path / name
            small = size <= WHOLE_FILE and not is_image(file)
            content = _whole(file) if read_all or small else _ends(file, size)
            total.update(f"{name}\0{size}\0{content}\n".encode("utf-8", "surrogateescape"))
        return total.hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=error.filename or path) from None


def _whole(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _ends(path: Path, size: int) -> str:
    with opened(path) as file:
        first = file.read(ENDS)
        file.seek(max(0, size - ENDS))
        return hashlib.sha256(first + file.read(ENDS)).hexdigest()
