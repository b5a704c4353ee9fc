"""A second Ctrl-C ends a process that is in one long call into C, where Python hears of none."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import hashlib, signal, sys
from quire.cli.twice import ending_when_asked_twice

heard = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: heard.append(number))
before = signal.set_wakeup_fd(-1)
with ending_when_asked_twice():
    print("here", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[1]))
assert signal.set_wakeup_fd(-1) == before
sys.exit(3 if heard else 4)
"""
LONG, SHORT = 10**9, 4 * 10**6


def run(work: int, *signals: int) -> tuple[int, str, float]:
    """Exit code, what was said, and seconds since the last signal."""
    command = [sys.executable, "-c", PROGRAM, str(work)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        for number in signals:
            time.sleep(0.2)
            running.send_signal(number)
        began = time.monotonic()
        _, said = running.communicate(timeout=60)
    return running.returncode, said, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_does_not_wait(number: int, code: int) -> None:
    found, said, seconds = run(LONG, number, number)
    assert (found, said) == (code, "interrupted\n")
    assert seconds < 15


def test_the_first_waits_and_nobody_is_ended_without() -> None:
    assert run(SHORT, signal.SIGINT)[:2] == (3, "")
    assert run(SHORT)[:2] == (4, "")
