"""A share of what `make faults` does, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.hostile_files.every import cases

ROOT = Path(__file__).parents[2]


def run(name: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.faults.{name}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_there_are_enough_hostile_files() -> None:
    made = cases()
    assert len(made) >= 200
    assert len({case.name for case in made}) == len(made)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hostile_files_are_refused() -> None:
    run("hostile", "--every", "97", "--quiet")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_flipped_bits_are_noticed() -> None:
    run("flips", "--flips", "40")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_full_disks_cost_nothing_that_was_saved() -> None:
    out = run("full", "--every", "60", "--allow-skip")
    if "not done" in out:
        pytest.skip(out)


@pytest.mark.slow
def test_layers_and_optimisers_are_those_of_pytorch() -> None:
    pytest.importorskip("expecttest")
    assert "sets of options of AdamW" in run("databases")


@pytest.mark.slow
def test_fuzzing_finds_nothing_at_once() -> None:
    pytest.importorskip("atheris")
    for reader in ("csv", "config"):
        run("fuzz", "--reader", reader, "--seconds", "2")
