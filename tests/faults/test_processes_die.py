"""A loader that raises, a reading thread that dies, a process that leaves or is killed: the others end soon,
and say which one it was."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from quire.train.checkpoints import newest_checkpoint
from tests.train.examples import classes

pytestmark = pytest.mark.slow

PATIENCE = 30.0
"""Seconds within which all have to be gone."""

TROUBLE = """
# Python runs this in every process that it starts: one of several comes to grief after some batches.
import os, pathlib, signal
import torch
from quire.data import batch, streamed

NUMBER, ACT, FOLDER = {number}, {act!r}, {folder!r}
calls = [0]

def trouble():
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not there or torch.distributed.get_rank() != NUMBER:
        return
    calls[0] += 1
    if calls[0] < 40:
        return
    pathlib.Path(FOLDER, "when").touch()
    if ACT == "raise":
        raise ValueError("the disk said no")
    if ACT == "leave":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)

real = batch.TensorData.batches

def batches(self, *given, **options):
    for one in real(self, *given, **options):
        trouble()
        yield one

read = streamed.StreamedRows._read

def reading(self, start, stop):
    trouble()
    return read(self, start, stop)

batch.TensorData.batches, streamed.StreamedRows._read = batches, reading
"""


ONE_GPU = """
# Two processes with a GPU each, on what NCCL takes for two machines, so that they may share the only one.
import sys
import quire.cli.train

quire.cli.train.own_device = lambda name, member: "cuda:0"
words = sys.orig_argv
started = words[words.index("--member") + 1] if "--member" in words else os.environ.get("RANK", "")
os.environ |= {{"NCCL_HOSTID": "machine " + started, "NCCL_SOCKET_IFNAME": "lo"}}
"""


class Ended(NamedTuple):
    code: int
    said: str
    seconds: float
    """From the trouble to the end of all."""


def run(
    folder: Path, words: list[str], act: str, number: int, *, torchrun: bool, device: str = "cpu"
) -> Ended:
    begun = TROUBLE + ONE_GPU * (device == "cuda")
    (folder / "sitecustomize.py").write_text(begun.format(number=number, act=act, folder=str(folder)))
    words = [*words, "--device", device]
    command = [sys.executable, "-m", "quire", "train", *words, "--nproc", "2"]
    if torchrun:
        meet = ["--standalone", "--nproc-per-node", "2", "-m", "quire", "train"]
        command = [sys.executable, "-m", "torch.distributed.run", *meet, *words]
    path = os.pathsep.join([str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert (folder / "when").exists(), ended.stderr
    return Ended(ended.returncode, ended.stderr, time.time() - (folder / "when").stat().st_mtime)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    data = classes(120)
    rows = zip(data.inputs.tolist(), data.target.tolist(), strict=True)
    lines = [",".join([*(f"{value:.4f}" for value in inputs), "abc"[kind]]) for inputs, kind in rows]
    path.write_text("one,two,three,four,five,kind\n" + "\n".join(lines) + "\n")
    return path


def left_over(folder: Path) -> list[str]:
    """Processes that still work there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").resolve() == folder.resolve():
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


WHY = {"raise": "ValueError: the disk said no", "leave": "code 3", "kill": "SIGKILL"}
few = [("raise", 1, False), ("leave", 1, True)]
CASES = [
    pytest.param(act, number, torchrun, marks=[] if (act, number, torchrun) in few else [pytest.mark.long])
    for act in WHY
    for number in (0, 1)
    for torchrun in (False, True)
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("act", "number", "torchrun"), CASES)
def test_all_end_and_name_the_one(
    act: str, number: int, torchrun: bool, device: str, table: Path, tmp_path: Path
) -> None:
    words = ["mlp", "--data", str(table), "--steps", "100000", "--train.batch-size", "20",
             "--train.checkpoint-every", "20", "--out", "run"]  # fmt: skip
    ended = run(tmp_path, words, act, number, torchrun=torchrun, device=device)
    assert ended.code not in (0, 2)
    assert ended.seconds < PATIENCE, ended.said
    named = f"process {number} of 2"
    other = f"process {1 - number} of 2 lost touch with another, which has failed or was ended: {named}"
    said = ended.said
    if torchrun:  # which may end the other before it has noticed
        assert f"local_rank: {number}" in said, said
        why = {"raise": "the disk said no", "leave": "exitcode: 3", "kill": "-9"}[act]
        assert why in said.replace("  ", " "), said
    else:
        assert WHY[act] in said, said
        assert named in said, said
        if number == 1:  # the first one's words are shown as they come
            assert other in said, said
            if act == "raise":
                assert f"{other}: {WHY[act]}" in said
    if not torchrun:
        assert "Traceback" not in said
    assert left_over(tmp_path) == []
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").step >= 20


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_thread_that_reads_ahead(number: int, tmp_path: Path) -> None:
    """Rows that are read in pieces by a thread, which fails."""
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(4000, 3)).astype(np.float32))
    words = ["kmeans", "--data", str(tmp_path / "rows.npy"), "--table.memory", "1e-9",
             "--sweeps", "100000", "--clusters", "30", "--tolerance", "0", "--out", "run"]  # fmt: skip
    ended = run(tmp_path, words, "raise", number, torchrun=False)
    assert ended.code == 1
    assert ended.seconds < PATIENCE
    assert f"process {number} of 2" in ended.said
    assert "the disk said no" in ended.said
    assert "Traceback" not in ended.said
    assert left_over(tmp_path) == []
