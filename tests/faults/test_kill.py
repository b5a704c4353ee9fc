"""A tenth of the full count of `make faults`, in a process of its own because the killer forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bits() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.kill", "--kills", "20"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
