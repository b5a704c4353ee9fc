"""A thousand runs of ten thousand points each: everything is there, and the server stays small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.board.making import finished, line, make_run

RUNS, POINTS, COMPARED = 1000, 10_000, 20
LIMIT = 300e6

pytestmark = pytest.mark.slow


@pytest.fixture
def many(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    splits = ("train", "validation")
    lines = [
        line(i // 2 + 1, splits[i % 2], loss=1 / (i + 1), accuracy=i / POINTS, lr=0.1) for i in range(POINTS)
    ]
    lines[4321] = line(2161, "validation", loss=77.0, accuracy=0.5)  # a peak that no thinning may lose
    first = make_run(root, "run-0000", lines=lines, result=finished())
    for number in range(1, RUNS):
        folder = root / f"run-{number:04d}"
        folder.mkdir()
        config = (first / "config.toml").read_text().replace("lr = 0.1", f"lr = {number}")
        (folder / "config.toml").write_text(config)
        names = ("metrics.jsonl", "log.txt") if number % 3 else ("metrics.jsonl", "log.txt", "result.json")
        for name in names:
            os.link(first / name, folder / name)  # the same bytes a thousand times, without a thousand copies
    return root


def test_a_thousand_runs(many: Path) -> None:
    command = [sys.executable, "-m", "quire.cli.main", "board", "--folder", str(many), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+/", process.stdout.readline())
            assert found is not None
            address = found[0]

            def get(path: str) -> str:
                with urllib.request.urlopen(address + path, timeout=60) as answer:
                    return answer.read().decode()

            assert get("").count("data-run=") == RUNS
            query = "&".join(f"run=run-{number:04d}" for number in range(COMPARED))
            page = get(f"compare?{query}")
            assert page.count("/runs/run-") == 2 * COMPARED  # in the results and in what differs
            curves = get(f"api/curves?{query}&measure=loss&split=validation")
            assert curves.count('"name"') == COMPARED
            assert curves.count("77.0") == COMPARED
            assert len(curves) < 1e6
            status = Path(f"/proc/{process.pid}/status")
            if status.exists():
                peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
                assert peak is not None
                assert int(peak[1]) * 1024 < LIMIT
        finally:
            process.terminate()
