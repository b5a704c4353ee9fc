"""What lies in a run folder under the name of a file to write to, and leads elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import WriteError
from quire.train.folder import LOG, METRICS, RunFolder, read_config
from tests.train.examples import folder

PRECIOUS = b"what somebody else has written\n"
WAYS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, other: path.symlink_to(other),
    "a pipe": lambda path, other: os.mkfifo(path),
    "a device": lambda path, other: path.symlink_to("/dev/full"),
}


def laid(way: str, name: str, at: Path) -> Path:
    """A run in which this stands in the place of a file; where the link leads to."""
    at.mkdir(exist_ok=True)
    folder(at / "run").close()
    other = at / "other"
    other.write_bytes(PRECIOUS)
    (at / "run" / name).unlink()
    WAYS[way](at / "run" / name, other)
    return other


@pytest.mark.timeout(20)
@pytest.mark.parametrize("way", WAYS)
def test_a_lock_is_neither_followed_nor_waited_for(way: str, tmp_path: Path) -> None:
    other = laid(way, ".lock", tmp_path)
    with pytest.raises(WriteError, match="lock cannot be written: a link, a device or a pipe, not a file"):
        RunFolder.reopen(tmp_path / "run")
    assert other.read_bytes() == PRECIOUS


@pytest.mark.timeout(20)
@pytest.mark.parametrize("way", WAYS)
def test_metrics_and_log_are_neither_followed_nor_waited_for(way: str, tmp_path: Path) -> None:
    for name in (METRICS, LOG):
        other = laid(way, name, tmp_path / name)
        run = RunFolder.reopen(tmp_path / name / "run")
        run.log("here")
        if name == METRICS:
            with pytest.raises(WriteError, match="a link, a device or a pipe, not a file"):
                run.record({"step": 1})
            run.resume()  # which writes them anew
            run.record({"step": 1})
            assert (run.path / METRICS).read_text() == '{"step": 1}\n'
        run.close()
        assert other.read_bytes() == PRECIOUS


def test_a_run_to_be_replaced_goes_once_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    RunFolder.create(path, {"format": 1, "which": "old"}).close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("quire.train.folder.write_sums", full)
        with pytest.raises(WriteError, match="No space left on device"):
            RunFolder.create(path, {"format": 1, "which": "new"}, overwrite=True)
    assert read_config(path)["which"] == "old"
    RunFolder.create(path, {"format": 1, "which": "new"}, overwrite=True).close()
    assert read_config(path)["which"] == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["run"]
