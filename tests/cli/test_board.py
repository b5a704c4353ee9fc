"""`quire board`: what it needs, what it refuses, and that it serves until it is interrupted."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.cli.conftest import Quire


def test_without_its_packages_it_says_how_to_get_them(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setitem(sys.modules, "starlette", None)
    answer = quire("board")
    assert (answer.code, answer.out) == (2, "")
    assert answer.error.startswith(
        "error: quire board without the package 'starlette'\n  expected: starlette"
    )
    assert "fix: pip install 'quire[board]'" in answer.error


def test_what_is_refused(quire: Quire, tmp_path: Path) -> None:
    assert "a port from 0 to 65535" in quire("board", "--port", "70000").error
    answer = quire("board", "--folder", str(tmp_path / "none"))
    assert answer.code == 2
    assert "no such folder" in answer.error


def test_a_port_that_is_taken(quire: Quire, tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="needs the extra 'board'")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        answer = quire("board", "--folder", str(tmp_path), "--port", str(other.getsockname()[1]))
    assert answer.code == 2
    assert "Address already in use" in answer.error
    assert "--port 0" in answer.error


def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="needs the extra 'board'")
    command = [sys.executable, "-m", "quire.cli.main", "board", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            said = process.stdout.readline()
            assert said.startswith("board: http://127.0.0.1:")
            with urllib.request.urlopen(said.split()[1], timeout=30) as answer:
                assert "There are no runs in runs yet" in answer.read().decode()
            process.send_signal(signal.SIGINT)
            rest, error = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, rest, error) == (0, "", "")
    assert not (tmp_path / "runs").exists()  # it only reads
