"""Disks that are full, read-only or gone, for real: small disks of their own, mounted where nobody else sees.

    python -m tests.faults.full                 every page of a save, of a run and of each command that writes
    python -m tests.faults.full --every 5       one in five

Each time: the checkpoint before is whole, the message has the path and the bytes, the exit code is 1, and
nothing is left. Where private mounts are not allowed it fails, or with --allow-skip does what needs none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from quire.errors import QuireError, WriteError
from quire.options import Optim
from quire.train import fit
from quire.train.checkpoints import Checkpoint, list_checkpoints, load_checkpoint
from quire.train.folder import CHECKPOINTS, RunFolder
from tests.faults import gone
from tests.faults.disks import can_mount, disk, fill, read_only, run_inside
from tests.faults.full_commands import ask, commands
from tests.recipes.examples import write_csv
from tests.train.examples import classes, classifier, folder, often

DELETIONS = 60
"""Of the folders of runs, where every page is tried."""


def checkpoint(step: int) -> Checkpoint:
    tensors = {"weights": {"w": torch.full((5000,), float(step))}, "best": {"w": torch.zeros(3000)}}
    return Checkpoint(step, tensors, {"progress": {"history": [], "text": "x" * 9000}, "task": {"task": "x"}})


def leftovers(run: Path) -> list[str]:
    return [path.name for path in run.rglob("*") if ".tmp" in path.name]


def complained(error: BaseException, path: Path) -> None:
    """The message says where and how many bytes, and what went wrong is still known to programs."""
    assert isinstance(error, WriteError), repr(error)
    assert str(path) in str(error), error
    assert "bytes" in str(error), error
    assert error.errno, error
    assert error.exit_code == 1, error


def saves(place: Path, every: int) -> Counter[str]:
    """A save with every number of pages left, from none to enough; then on a read-only disk."""
    counts: Counter[str] = Counter()
    with disk(place, 400) as mounted:
        store = RunFolder.create(mounted / "run", {"format": 1, "recipe": "test"})
        store.save(checkpoint(1), keep=3)
        for leave in range(0, 100, every):
            ballast = fill(mounted, leave)
            try:
                store.save(checkpoint(2), keep=3)
            except QuireError as error:
                complained(error, mounted / "run")
                counts["saves on a full disk"] += 1
                assert [path.name for path in list_checkpoints(store.path / CHECKPOINTS)] == ["step-1"]
            else:
                shutil.rmtree(store.path / CHECKPOINTS / "step-2")
                counts["saves with room enough"] += 1
                break
            finally:
                ballast.unlink()
            assert not leftovers(store.path)
            kept = load_checkpoint(store.path / CHECKPOINTS / "step-1")
            assert torch.equal(kept.tensors["weights"]["w"], torch.ones(5000))
        store.close()  # a disk with files that are open for writing cannot be made read-only
        read_only(mounted)
        try:
            store.save(checkpoint(2), keep=3)
            raise AssertionError("a read-only disk was written to")
        except QuireError as error:
            complained(error, mounted / "run")
            counts["saves on a read-only disk"] += 1
        read_only(mounted, on=False)
        load_checkpoint(store.path / CHECKPOINTS / "step-1")
    assert counts["saves with room enough"] == 1
    return counts


def deleted(place: Path) -> Counter[str]:
    """The run's folder goes just before a save of a run in Python."""
    place.mkdir(exist_ok=True)
    store = folder(place / "run")
    taken = 0

    class Deleting:
        record, resume = store.record, store.resume

        def save(self, made: Checkpoint, *, keep: int) -> None:
            nonlocal taken
            taken += 1
            if taken == 3:
                shutil.rmtree(store.path)
            store.save(made, keep=keep)

    try:
        fit(classifier(), classes(), classes(30, 2), steps=20, optim=Optim(lr=0.01),
            train=often(checkpoint_every=1), store=Deleting())  # type: ignore[arg-type]  # fmt: skip
        raise AssertionError("nobody noticed that the folder is gone")
    except QuireError as error:
        complained(error, store.path)
    finally:
        store.close()
    assert not store.path.exists(), [*store.path.rglob("*")]
    return Counter({"fits whose folder was deleted": 1})


def runs(place: Path, data: Path, every: int) -> Counter[str]:
    """Whole runs on disks of every size, until one is large enough; then on a read-only one, and with a
    temporary folder that is full."""
    counts: Counter[str] = Counter()
    line = ["train", "mlp", "--data", str(data), "--model.hidden", "4", "--epochs", "1", "--quiet"]
    pages = 2
    while not counts["runs with room enough"]:
        with disk(place, pages) as mounted:
            code, text = ask(*line, "--out", str(mounted / "run"))
            assert not leftovers(mounted), leftovers(mounted)
            if code == 0:
                counts["runs with room enough"] += 1
            else:
                assert code == 1, text
                assert str(mounted / "run") in text, text
                assert "bytes" in text, text
                assert "Traceback" not in text, text
                assert "--debug" not in text, text
                counts["runs on a full disk"] += 1
                for path in list_checkpoints(mounted / "run" / CHECKPOINTS):
                    load_checkpoint(path)
        pages += every
        assert pages < 2000, text
    with disk(place, 2000) as mounted:
        read_only(mounted)
        code, text = ask(*line, "--out", str(mounted / "run"))
        assert code == 1, text
        assert str(mounted) in text, text
        assert "bytes" in text, text
        assert "--debug" not in text, text
        counts["runs on a read-only disk"] += 1
    with disk(place, 4) as mounted:
        fill(mounted, 0)
        run = data.parent / "run"
        before, tempfile.tempdir = os.environ.get("TMPDIR"), None
        os.environ["TMPDIR"] = str(mounted)
        try:
            for words in ([*line, "--out", str(run)], ["predict", str(run), str(data)], ["report", str(run)],
                          ["export", str(run), str(data.parent / "model.pt2")],
                          ["export", str(run), str(data.parent / "model.onnx")]):  # fmt: skip
                code, text = ask(*words)
                assert code == 0 or (code == 1 and str(mounted) in text), text
                assert "Traceback" not in text, text
                counts["commands with a full temporary folder"] += 1
        finally:
            tempfile.tempdir = None
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--inside", action="store_true", help="in the private mounts already")
    parser.add_argument(
        "--allow-skip", action="store_true", help="do without disks where none can be mounted"
    )
    arguments = parser.parse_args()
    mounted = arguments.inside
    if not mounted and can_mount(allow_skip=arguments.allow_skip):
        run_inside("tests.faults.full", "--every", str(arguments.every), "--seed", str(arguments.seed))
    print(f"seed {arguments.seed}", flush=True)
    counts = gone.campaign(max(4, DELETIONS // arguments.every), arguments.seed)  # before there are threads
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        counts += deleted(Path(temporary, "plain"))
        if mounted:
            place = Path(temporary, "disk")
            data = write_csv(Path(temporary, "mine.csv"))
            counts += saves(place, arguments.every) + runs(place, data, arguments.every)
            counts += commands(place, Path(temporary), arguments.every)
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
