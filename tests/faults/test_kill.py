"""A share of the full counts of `make faults`, each in a process of its own because it forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bits() -> None:
    out = run("tests.faults.kill", "--kills", "4", "--kinds", "mlp,gmm", "--quiet")
    assert "runs that ended like an undisturbed one" in out


@pytest.mark.slow
@pytest.mark.long
def test_runs_that_are_asked_to_stop_do_so_with_everything_saved() -> None:
    out = run("tests.faults.signals", "--count", "4", "--fresh", "9")
    assert "stopped at once by a second Ctrl-C" in out


@pytest.mark.slow
@pytest.mark.long
def test_a_run_with_fault_after_fault_ends_as_one_without() -> None:
    out = run("tests.faults.soak", "--minutes", "0.15", "--allow-skip")
    assert "log of" in out
