"""Processes that wait for something which Python cannot interrupt, as a GPU is waited for, are ended when
another is gone, and say which; those that have only not finished yet are left in peace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from quire.errors import InputError
from quire.train import Interrupted, lookout
from quire.train.lookout import LostTouch, attended
from quire.train.processes import from_all

pytestmark = pytest.mark.slow

COUNT, WHO = 3, 1
GPU = torch.device("cuda")  # which nothing is computed on
ENDED = 7
"""The code of a process that ends by itself."""
PATIENCE = 60


def work(act: str, number: int) -> None:
    if act == "known":
        time.sleep(3 * lookout.GRACE * (number != WHO))  # the others are still saving
        raise Interrupted("stopped")
    if act == "done":
        time.sleep(3 * lookout.GRACE * (number != WHO))
        return
    if number != WHO and act == "killed while all talk":
        while True:
            from_all(number)
    if number != WHO:
        time.sleep(PATIENCE)
    if act.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "raises":
        raise ValueError("the disk said no")
    raise InputError("a row that only this one has", fix="take it out")


def main(path: Path, number: int, act: str) -> None:
    lookout.GRACE, lookout.LOOK = 0.7, 0.1
    distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=number, world_size=COUNT)
    try:
        with attended(GPU, "go on", lambda line: (path / f"log {number}").write_text(line)):
            work(act, number)
    except LostTouch as lost:
        (path / f"lost {number}").write_text(lost.got)
    finally:
        os._exit(ENDED)


def run(path: Path, act: str) -> list[tuple[int, str, float]]:
    """Of each process its exit code, what it said, and the seconds it took."""
    began = time.monotonic()
    call = "import sys; from pathlib import Path; from tests.train.test_lookout import main; "
    call += "main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
    command = [sys.executable, "-c", call, str(path)]
    started = [
        subprocess.Popen([*command, str(number), act], stderr=subprocess.PIPE, text=True)
        for number in range(COUNT)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    seconds = time.monotonic() - began
    return [(process.returncode, words, seconds) for process, words in zip(started, said, strict=True)]


@pytest.mark.parametrize(
    ("act", "why"),
    [
        ("killed", ""),
        ("raises", ": ValueError: the disk said no"),
        ("mistake", ": a row that only this one has"),
    ],
)
def test_who_waits_for_one_that_is_gone_ends_and_names_it(act: str, why: str, tmp_path: Path) -> None:
    for number, (code, said, seconds) in enumerate(run(tmp_path, act)):
        if number == WHO:
            assert code == (-signal.SIGKILL if act == "killed" else ENDED)
            continue
        assert seconds < PATIENCE / 2
        assert code == 1, said
        lost = f"process {number} of {COUNT} lost touch with another, which has failed or was ended"
        assert f"error: {lost}: process {WHO} of {COUNT}{why}\n  fix: go on\n" in said
        assert (tmp_path / f"log {number}").read_text() == f"failed: {lost}: process {WHO} of {COUNT}{why}"


def test_who_is_told_by_its_own_call_names_the_one_that_is_gone(tmp_path: Path) -> None:
    """And none of those that are left."""
    for number, (code, said, seconds) in enumerate(run(tmp_path, "killed while all talk")):
        if number == WHO:
            assert code == -signal.SIGKILL
            continue
        assert seconds < PATIENCE / 2
        assert code == ENDED, said
        lost = (tmp_path / f"lost {number}").read_text()
        assert lost.endswith(f"has failed or was ended: process {WHO} of {COUNT}")


@pytest.mark.parametrize("act", ["known", "done"])
def test_who_has_still_something_to_do_is_left_in_peace(act: str, tmp_path: Path) -> None:
    for code, said, seconds in run(tmp_path, act):
        assert code == ENDED, said
        assert "lost touch" not in said
        assert seconds > 3 * 0.7
    assert not list(tmp_path.glob("log *"))
