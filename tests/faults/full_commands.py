"""Every command that writes, onto a disk that is full or read-only: exit code 1, one message with path and
bytes, nothing left, and what stood there as it was. `tests.faults.full` gives them their disks."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.cli.main import main as command
from quire.data.known import KNOWN, KnownSet, Part
from tests.faults.disks import PAGE, disk, fill, read_only
from tests.recipes.examples import write_csv, write_images

PAGES = 1000
EACH_PAGE = 30
"""Pages of room up to which each number is tried; beyond, one in so many, as files are larger."""


def ask(*words: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = command(words)
    return code, said.getvalue()


class Writing(NamedTuple):
    """A command as its words, in which DISK is where it writes to."""

    words: str
    again: str | None = None
    """Words with which it replaces what is there, if it ever does."""
    run: Path | None = None
    """A run that has to be on the disk itself."""
    lacking: str = ""
    """A file that this run is to be without."""

    def ask(self, mounted: Path, again: bool) -> tuple[int, str]:
        more = self.again if again and self.again else ""
        return ask(*f"{self.words} {more}".replace("DISK", str(mounted)).split())

    def put_run(self, mounted: Path) -> None:
        if self.run is not None:
            shutil.copytree(self.run, mounted / "run")
            if self.lacking:
                (mounted / "run" / self.lacking).unlink()


def writings(work: Path) -> list[Writing]:
    """All of them, with the runs that they need."""
    table, pictures = write_csv(work / "mine.csv"), write_images(work / "pictures", each=6)
    run, tuned, merged, rows, images = (work / name for name in ("mlp", "tuned", "merged", "gan", "vae"))
    short = "--steps 2 --quiet --device cpu"
    mlp = f"train mlp --data {table} --target kind {short}"
    for words in (
        f"{mlp} --model.hidden 4 --out {run}",
        f"{mlp} --tune.base {run} --tune.lora.rank 2 --out {tuned}",
        f"adapter merge {tuned} --out {merged}",
        f"train gan --data {table} --model.hidden 8 --model.latent 4 {short} --out {rows}",
        f"train vae --data {pictures} {short} --out {images}",
    ):
        code, text = ask(*words.split())
        assert code == 0, text
    add_known_set(work)
    export, overwrite = f"export {run} DISK/model", "--overwrite"
    bench = "--small --rounds 1 --threads 1 --device cpu --save DISK/bench"
    return [
        Writing(f"{export}.onnx", overwrite),
        Writing(f"{export}.pt2", overwrite),
        Writing(f"predict {run} {table} --out DISK/predicted.csv", overwrite),
        Writing(f"predict {run} {table} --out DISK/predicted.parquet", overwrite),
        Writing(f"sample {rows} --count 200 --out DISK/rows.csv", overwrite),
        Writing(f"sample {rows} --count 200 --out DISK/rows.parquet", overwrite),
        Writing(f"sample {images} --out DISK/images.png", overwrite),
        Writing(f"sample {images} --out DISK/images.npy", overwrite),
        Writing(f"sample {images} --out DISK/images"),
        Writing("report DISK/run", run=run),
        Writing("report DISK/run", run=run, lacking="report.html"),
        Writing("doctor DISK/run --no-curvature", run=run),
        Writing(f"doctor {run} --no-curvature --out DISK/doctor.html", ""),
        Writing(f"adapter merge {tuned} --out DISK/merged"),
        Writing(f"adapter unmerge {merged} --out DISK/unmerged"),
        Writing(f"adapter export {tuned} DISK/adapter.safetensors", overwrite),
        Writing(f"adapter export {tuned} DISK/adapter", overwrite),
        Writing(f"study {run} calibration --quiet --out DISK/study", overwrite),
        Writing("sheet show activation/sigmoid --out DISK/picture.svg", ""),
        Writing(f"bench pca {bench}", ""),
        Writing(f"bench gaussian-pooling --growth {bench}", ""),
        Writing("download tiny DISK/tiny --quiet"),
    ]


def add_known_set(work: Path) -> None:
    """A set of images to download, from a folder here."""
    content = np.random.default_rng(0).bytes(5 * PAGE)
    (work / "images.gz").write_bytes(content)
    part = Part("images.gz", len(content), hashlib.sha256(content).hexdigest())
    KNOWN.register("tiny")(KnownSet("a few", "lenet", (f"{work.as_uri()}/",), (part,)))


def contents(mounted: Path) -> dict[str, bytes | None]:
    found = {path.relative_to(mounted).as_posix(): path for path in mounted.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items()}


def commands(place: Path, work: Path, every: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for writing in writings(work):
        for again in (False, True)[: 1 if writing.again is None else 2]:
            with disk(place, PAGES) as mounted:
                writing.put_run(mounted)
                if again:
                    code, text = writing.ask(mounted, again=False)
                    assert code == 0, f"{writing.words}: {text}"
                counts += on_full_disks(writing, mounted, again, every)
    return counts


def on_full_disks(writing: Writing, mounted: Path, again: bool, every: int) -> Counter[str]:
    """One command with more and more room until it succeeds, after it was tried on a read-only disk."""
    what, counts = f"{writing.words}{' again' * again}", Counter[str]()
    before = contents(mounted)
    read_only(mounted)
    refused(what, *writing.ask(mounted, again), mounted)
    read_only(mounted, on=False)
    counts["commands on a read-only disk"] += 1
    leave = 0
    while True:
        assert leave < PAGES, f"{what}: it never has enough"
        ballast = fill(mounted, leave)
        code, text = writing.ask(mounted, again)
        ballast.unlink()
        if code == 0:
            counts["commands with room enough"] += 1
            break
        refused(f"{what} with {leave} pages", code, text, mounted)
        after = contents(mounted)
        changed = [name for name in {**before, **after} if before.get(name, 0) != after.get(name, 0)]
        assert not changed, f"{what} with {leave} pages changed {changed}: {text}"
        counts["commands on a full disk"] += 1
        leave += every if leave < EACH_PAGE else max(every, leave // 4)
    assert leave, f"{what} writes nothing"
    return counts


def refused(what: str, code: int, text: str, mounted: Path) -> None:
    assert code == 1, f"{what}: code {code}: {text}"
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, f"{what}: {text}"
    assert str(mounted) in errors[0], f"{what}: {text}"
    assert "bytes" in errors[0], f"{what}: {text}"
    assert "Traceback" not in text, f"{what}: {text}"
    assert "--debug" not in text, f"{what}: {text}"
