"""The runs of a folder: what is said of each, and when it is read again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from quire.board import runs as module
from quire.board.runs import Runs
from quire.errors import InputError
from quire.report.reading import read_run
from tests.board.making import finished, line, make_run


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in folder.iterdir():
        os.utime(path, (then, then))


def test_what_the_list_says(runs: Path) -> None:
    found = {run.name: run for run in Runs(runs).list()}
    assert list(found) == ["gamma", "beta", "alpha"]  # the newest first
    assert [run.state for run in found.values()] == ["training", "interrupted", "finished"]
    assert found["alpha"].main is not None
    assert (found["alpha"].main.split, found["alpha"].main.measure, found["alpha"].main.value) == (
        "test",
        "accuracy",
        0.9,
    )
    assert (found["gamma"].main.split, found["gamma"].main.value) == ("validation", 0.75)  # type: ignore[union-attr]
    assert found["gamma"].step == 30
    assert found["beta"].recipe == "resnet"


def test_a_silent_run_is_no_longer_training(runs: Path) -> None:
    board = Runs(runs)
    assert board.summary("gamma").state == "training"
    age(runs / "gamma", 3600)
    assert board.summary("gamma").state == "unfinished"


def test_silence_alone_ends_the_state(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Runs(runs)
    assert board.summary("gamma").state == "training"
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 3600)
    assert board.summary("gamma").state == "unfinished"


def test_a_run_that_goes_on_after_its_end_is_training(runs: Path) -> None:
    board = Runs(runs)
    assert board.summary("alpha").state == "finished"
    then = time.time() - 5
    os.utime(runs / "alpha" / "result.json", (then, then))
    with (runs / "alpha" / "metrics.jsonl").open("a") as file:
        file.write(line(31, "validation", loss=0.01, accuracy=0.99))
    found = board.summary("alpha")
    assert (found.state, found.step) == ("training", 31)
    assert found.main is not None
    assert found.main.value == 0.99


def test_a_change_is_seen_and_an_unchanged_run_not_read_again(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Runs(runs)
    first = board.list()
    read: list[str] = []
    original = module._summarise
    monkeypatch.setattr(
        module, "_summarise", lambda name, *rest: (read.append(name), original(name, *rest))[1]
    )
    assert board.list() == first
    assert read == []
    with (runs / "gamma" / "metrics.jsonl").open("a") as file:
        file.write(line(31, "validation", loss=0.5, accuracy=0.5))
    assert {run.name: run for run in board.list()}["gamma"].step == 31
    assert read == ["gamma"]


def test_a_run_reads_like_its_report(runs: Path) -> None:
    mine, theirs = Runs(runs).run("alpha"), read_run(runs / "alpha")
    assert (mine.config, mine.result, mine.last_step) == (theirs.config, theirs.result, theirs.last_step)
    assert mine.measures == theirs.measures
    assert {m: list(s) for m, s in mine.curves.items()} == {m: list(s) for m, s in theirs.curves.items()}
    assert mine.curves["loss"]["train"].values.tolist() == theirs.curves["loss"]["train"].values.tolist()


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.toml", b"recipe = \xff", "config.toml is damaged"),
        ("config.toml", b"format = 2", "has format 2"),
        ("result.json", b"{", "result.json is damaged"),
        ("result.json", b"[" * 100_000, "result.json"),
        ("result.json", b'{"format": 1, "measures": 3}', "another shape"),
        ("metrics.jsonl", b"nonsense\n", "no record"),
    ],
)
def test_one_damaged_run_hides_no_other(runs: Path, file: str, content: bytes, problem: str) -> None:
    (runs / "gamma" / file).write_bytes(content)
    found = {run.name: run for run in Runs(runs).list()}
    assert len(found) == 3
    assert found["gamma"].state == "damaged"
    assert problem in found["gamma"].problem
    assert str(runs) not in found["gamma"].problem


def test_links_and_strangers_are_no_runs(runs: Path, tmp_path: Path) -> None:
    outside = make_run(tmp_path / "elsewhere", "secret", result=finished())
    (runs / "linked").symlink_to(outside)
    make_run(runs, "hollow")
    (runs / "hollow" / "config.toml").unlink()
    (runs / "hollow" / "config.toml").symlink_to(outside / "config.toml")
    (runs / "notes.txt").write_text("x")
    (runs / "empty").mkdir()
    board = Runs(runs)
    assert board.names() == ["alpha", "beta", "gamma"]
    for name in (
        "linked",
        "hollow",
        "empty",
        "notes.txt",
        "..",
        ".",
        "",
        "alpha/../beta",
        "../elsewhere/secret",
    ):
        with pytest.raises(InputError, match="no run"):
            board.folder(name)


def test_the_nearest_run_is_offered(runs: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'alpha'"):
        Runs(runs).folder("alhpa")


def test_no_folder_is_no_runs(tmp_path: Path) -> None:
    assert Runs(tmp_path / "none").list() == []


def test_curves_that_nobody_looks_at_any_more_go(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_POINTS", 250)
    board = Runs(runs)
    for name in ("alpha", "beta", "gamma"):
        board.metrics(name)
    assert list(board._metrics) == ["beta", "gamma"]  # 120 points each
