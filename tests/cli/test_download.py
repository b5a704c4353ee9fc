"""The command `download`, with a server of the test's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Quire
from tests.data.test_known import CONTENT, Files, add, part, served

__all__ = ["served"]


@pytest.fixture
def tiny_set(served: tuple[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Files]:
    """A known set of one file."""
    address, files = served
    files["a"] = CONTENT
    add(monkeypatch, [address], part("a", CONTENT))
    monkeypatch.chdir(tmp_path)
    return served


def test_a_set_lands_in_data_and_what_to_do_with_it_is_said(
    tiny_set: tuple[str, Files], quire: Quire
) -> None:
    done = quire("download", "tiny")
    assert (done.code, done.error) == (0, "a: 170,000 bytes\n")
    assert done.out == "data/tiny: a few; 1 files, 0.2 MB\nquire train lenet --data data/tiny\n"
    assert Path("data/tiny/a").read_bytes() == CONTENT
    again = quire("download", "tiny")
    assert again.code == 2
    assert "fix: read it with --data data/tiny, or name another folder" in again.error
    other = quire("download", "tiny", "other/place", "--json")
    assert json.loads(other.out) == {"folder": "other/place", "files": ["a"], "bytes": len(CONTENT)}
    assert other.error == ""


def test_what_cannot_be_had_leaves_nothing(tiny_set: tuple[str, Files], quire: Quire) -> None:
    address, files = tiny_set
    files["a"] = CONTENT[:-1]
    done = quire("download", "tiny")
    assert done.code == 1
    assert done.error.startswith(f"error: 'tiny' cannot be downloaded: {address}a: 169,999 bytes came\n")
    assert done.out == ""
    assert not Path("data").exists()


def test_a_bar_is_shown_on_a_terminal(
    tiny_set: tuple[str, Files], quire: Quire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    done = quire("download", "tiny")
    assert done.code == 0
    assert "170.0/170.0 kB" in done.error
    assert quire("download", "tiny", "quiet", "--quiet").error == ""


def test_an_unknown_set(quire: Quire) -> None:
    wrong = quire("download", "fashon-mnist")
    assert wrong.code == 2
    assert "did you mean 'fashion-mnist'?" in wrong.error
