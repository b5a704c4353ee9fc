"""Run folders whose adapters are merged into the weights, and taken out again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import InputError
from quire.files import folder_that_appears_whole, make_folder
from quire.tasks.loading import TUNING, load_trained
from quire.train.checkpoints import Checkpoint, newest_checkpoint, save_checkpoint
from quire.train.folder import CHECKPOINTS, check_free
from quire.tuning import MergeReport

MERGED = "merged"
"""The document of a checkpoint that describes the adapters which its weights contain."""
BEFORE = "unmerged-"
"""What the tensors of the run begin with that was merged; they are kept, so that the way back is exact."""


def merge_run(run: Path, out: Path, *, dequantise: bool = False) -> MergeReport:
    """Write the run `out`, which is `run` with W₀ + ΔW in its weights and costs no more than its base."""
    checkpoint = newest_checkpoint(run / CHECKPOINTS)
    if TUNING not in checkpoint.documents or MERGED in checkpoint.documents:
        raise InputError(
            f"{run} has no adapters"
            + (" any more: they are merged" if MERGED in checkpoint.documents else ""),
            expected="a run that was tuned with --tune.lora.rank",
            fix="quire adapter list RUN shows what a run has",
        )
    trained = load_trained(run)
    adapters = trained.adapters
    assert adapters is not None
    report = adapters.merge(dequantise=dequantise)
    left = {**adapters.spec(), "adapters": {}, "active": {}}
    documents = {key: value for key, value in checkpoint.documents.items() if key != TUNING}
    documents[MERGED] = checkpoint.documents[TUNING]
    if left["stored"]:  # weights that stay in four bits
        documents[TUNING] = left
    tensors = {f"{BEFORE}{name}": value for name, value in checkpoint.tensors.items()}
    tensors["final"] = trained.task.state_dict()
    with _copied(run, out) as folder:
        save_checkpoint(folder / CHECKPOINTS, Checkpoint(checkpoint.step, tensors, documents), keep=1)
    return report


def unmerge_run(run: Path, out: Path) -> None:
    """Write the run `out` as it was before `merge_run`, bit by bit."""
    checkpoint = newest_checkpoint(run / CHECKPOINTS)
    if MERGED not in checkpoint.documents:
        raise InputError(
            f"{run} has no merged adapters", expected="a run that 'quire adapter merge' wrote",
            fix="quire adapter list RUN shows what a run has",
        )  # fmt: skip
    documents = {key: value for key, value in checkpoint.documents.items() if key != MERGED}
    documents[TUNING] = checkpoint.documents[MERGED]
    tensors = {
        name.removeprefix(BEFORE): value
        for name, value in checkpoint.tensors.items()
        if name.startswith(BEFORE)
    }
    with _copied(run, out) as folder:
        save_checkpoint(folder / CHECKPOINTS, Checkpoint(checkpoint.step, tensors, documents), keep=1)


@contextmanager
def _copied(run: Path, out: Path) -> Iterator[Path]:
    """`out`, which appears whole, with everything of `run` but its checkpoints."""
    check_free(out, overwrite=False)
    make_folder(out.parent)
    with folder_that_appears_whole(out) as folder:
        shutil.copytree(
            run, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(CHECKPOINTS, ".lock", ".*.tmp")
        )
        yield folder
