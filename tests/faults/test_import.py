"""Importing Quire, and asking the command for help, does nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.dont_write_bytecode = True  # as for an installed package, whose caches are there already
from pathlib import Path
from tests.faults.watch import Watch
watch = Watch()
with watch.over(Path("/nowhere")) as notes:
    {work}
print(*notes, sep="\\n")
"""


def notes_of(work: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(work=work)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line]


def not_of_the_compiler(notes: list[str]) -> list[str]:
    """Without the empty file by which Python, asked by PyTorch's compiler, finds its temporary folder."""
    return [
        note
        for note in notes
        if not re.fullmatch(r"(open for writing |os.remove \(')/tmp/\w{8}(', -1\))?", note)
    ]


@pytest.mark.parametrize("work", ["import quire", "import quire.cli.main"])
def test_importing_opens_no_socket_starts_no_program_and_writes_nothing(work: str) -> None:
    assert notes_of(work) == []


@pytest.mark.slow
def test_what_uses_runs_does_not_either() -> None:
    assert not_of_the_compiler(notes_of("from quire import load")) == []


@pytest.mark.parametrize(
    "work",
    [
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.socket().close()",
        "open('/tmp', 'rb') if False else Path('/dev/../tmp/quire_canary.ran').touch()",
        "exec(compile('1', '/somewhere/else.py', 'exec'))",
    ],
)
def test_the_watch_sees(work: str) -> None:
    assert notes_of(work)
    Path("/tmp/quire_canary.ran").unlink(missing_ok=True)
