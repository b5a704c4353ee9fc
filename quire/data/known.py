"""Well-known sets of images by name: fetched from where they are published, and kept only if their sums are
those that are known. Nothing here is called unless somebody asks for a set by name."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tarfile
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.errors import InputError, QuireError
from quire.files import folder_that_appears_whole
from quire.registry import Registry

SILENCE = 30.0
"""Seconds without a byte after which the next source is tried."""
PIECE = 2**16

Shown = Callable[[str, int, int], object]
"""Of a file's name, how many of its bytes are there, and how many there will be."""


@dataclass(frozen=True)
class Part:
    """A file as it is published."""

    name: str
    bytes: int
    sha256: str
    members: tuple[tuple[str, int], ...] = ()
    """Of an archive: what is taken out of it, by name and size, after which the archive goes."""


@dataclass(frozen=True)
class KnownSet:
    summary: str
    recipe: str
    """One that learns it."""
    sources: tuple[str, ...]
    """Folders that hold all parts, in the order in which they are tried."""
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


KNOWN: Registry[KnownSet] = Registry("set to download")

KNOWN.register("mnist")(
    KnownSet(
        "70,000 handwritten digits, grey, 28 × 28",
        "lenet",
        (
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
        ),
        (
            Part(
                "train-images-idx3-ubyte.gz", 9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            Part(
                "train-labels-idx1-ubyte.gz", 28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            Part(
                "t10k-images-idx3-ubyte.gz", 1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            Part(
                "t10k-labels-idx1-ubyte.gz", 4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
    )
)  # fmt: skip

KNOWN.register("fashion-mnist")(
    KnownSet(
        "70,000 pieces of clothing, grey, 28 × 28",
        "lenet",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        (
            Part(
                "train-images-idx3-ubyte.gz", 26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            Part(
                "train-labels-idx1-ubyte.gz", 29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            Part(
                "t10k-images-idx3-ubyte.gz", 4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            Part(
                "t10k-labels-idx1-ubyte.gz", 5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
    )
)  # fmt: skip

CIFAR_RECORDS = 10_000 * (1 + 3 * 32 * 32)
KNOWN.register("cifar-10")(
    KnownSet(
        "60,000 photographs of ten classes, in colour, 32 × 32",
        "resnet",
        ("https://www.cs.toronto.edu/~kriz/",),
        (
            Part(
                "cifar-10-binary.tar.gz", 170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                (
                    *((f"cifar-10-batches-bin/data_batch_{i}.bin", CIFAR_RECORDS) for i in range(1, 6)),
                    ("cifar-10-batches-bin/test_batch.bin", CIFAR_RECORDS),
                    ("cifar-10-batches-bin/batches.meta.txt", 61),
                ),
            ),
        ),
    )
)  # fmt: skip


def to_download(path: Path) -> str:
    """How a known set comes to be there; nothing where none is called so."""
    if path.name not in KNOWN:
        return ""
    folder = path if path.parent.name else Path("data", path.name)
    return f"quire download {path.name} {folder}, then --data {folder}"


def download(name: str, folder: Path, shown: Shown = lambda name, done, whole: None) -> Path:
    """Fetch a known set into `folder`, which must not be there yet and appears when all of it is right."""
    known = KNOWN[name]
    if folder.exists():
        raise InputError(
            f"{folder} is there already",
            expected="a folder that is to be made",
            fix=f"read it with --data {folder}, or name another folder",
        )
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with folder_that_appears_whole(folder) as temporary:
            for part in known.parts:
                _fetch(name, known, part, temporary / part.name, shown)
                if part.members:
                    _unpack(temporary / part.name, part, temporary)
    except BaseException:
        with suppress(OSError):  # somebody may have put something there
            for parent in made:
                parent.rmdir()
        raise
    return folder


def _fetch(name: str, known: KnownSet, part: Part, path: Path, shown: Shown) -> None:
    """From the first source that has the file as it should be."""
    said = []
    for source in known.sources:
        problem = _fetch_from(source + part.name, part, path, shown)
        if not problem:
            return
        said.append(f"{source}{part.name}: {problem}")
    raise QuireError(
        f"'{name}' cannot be downloaded: {'; '.join(said)}",
        expected=f"{part.bytes:,} bytes with the SHA-256 {part.sha256}",
        fix="check the connection to the internet; files that were got otherwise are read with --data FOLDER",
    )


def _fetch_from(address: str, part: Part, path: Path, shown: Shown) -> str:
    """What kept the file from being fetched; nothing where it is there. Errors of the disk are raised."""
    found, done = hashlib.sha256(), 0
    try:
        answer = urllib.request.urlopen(address, timeout=SILENCE)
    except (OSError, http.client.HTTPException, ValueError) as problem:
        return _words(problem)
    with answer, path.open("wb") as file:
        while done <= part.bytes:
            try:
                piece = answer.read(PIECE)
            except (OSError, http.client.HTTPException) as problem:
                return _words(problem)
            if not piece:
                break
            file.write(piece)
            found.update(piece)
            done += len(piece)
            shown(part.name, min(done, part.bytes), part.bytes)
    if done != part.bytes:
        return f"{'more than ' * (done > part.bytes)}{min(done, part.bytes):,} bytes came"
    return "" if found.hexdigest() == part.sha256 else f"it has the SHA-256 {found.hexdigest()}"


def _words(problem: Exception) -> str:
    return " ".join(str(getattr(problem, "reason", None) or problem).split()) or type(problem).__name__


def _unpack(archive: Path, part: Part, folder: Path) -> None:
    """Take the members that are known out of an archive whose sum is right, whatever else there is in it."""
    with tarfile.open(archive) as packed:
        for name, size in part.members:
            member = packed.getmember(name)
            content = packed.extractfile(member)
            if content is None or member.size != size:
                raise QuireError(f"{archive.name} holds {name} with {member.size} bytes", expected=f"{size}")
            with (folder / Path(name).name).open("wb") as file:
                shutil.copyfileobj(content, file, PIECE)
    archive.unlink()
