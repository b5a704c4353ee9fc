"""`quire train` in several processes: the same result, and an end for all when one fails or is to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quire.cli.launch import launch
from quire.cli.train import own_device
from quire.errors import InputError, QuireError
from quire.train.checkpoints import newest_checkpoint
from quire.train.member import Member, membership
from tests.cli.conftest import Quire

pytestmark = pytest.mark.slow

LONG = "import time; time.sleep(60)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# -- Starting and ending ---------------------------------------------------------------------------


def test_all_that_end_well_is_well(tmp_path: Path) -> None:
    write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('there')"
    assert launch([[*python(write), str(tmp_path / f"{i}")] for i in range(3)]) == 0
    assert len(list(tmp_path.iterdir())) == 3


def test_the_one_that_fails_is_named_and_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.launch.GRACE", 0.2)
    monkeypatch.setattr("quire.cli.launch.URGED", 0.2)
    began = time.monotonic()
    fail = "import sys; print('warning', file=sys.stderr); sys.exit('error: no rows\\n  fix: give some')"
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {LONG}"
    with pytest.raises(QuireError, match=r"^process 2 of 3 failed: no rows\n  fix: give some$") as caught:
        launch([python(LONG), python(stubborn), python(fail)])
    assert caught.value.exit_code == 1
    assert time.monotonic() - began < 20


def test_one_that_is_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.launch.GRACE", 0.2)
    with pytest.raises(QuireError, match=r"^process 0 of 2 was ended by SIGKILL$"):
        launch([python("import os; os.kill(os.getpid(), 9)"), python(LONG)])


def test_a_failure_that_the_first_has_told_of_is_not_told_twice(capfd: pytest.CaptureFixture[str]) -> None:
    say = "import sys; print('error: wrong', file=sys.stderr); sys.exit(2)"
    assert launch([python(say), python("import sys; sys.exit(2)")]) == 2
    assert capfd.readouterr().err == "error: wrong\n"


LOSES = "import sys, time; time.sleep({}); sys.exit('error: process 1 of 2 lost touch with another')"


@pytest.mark.parametrize("first", ["", "time.sleep(1); "])
def test_the_first_that_has_told_is_named_below_its_words(
    first: str, capfd: pytest.CaptureFixture[str]
) -> None:
    say = f"import sys, time; {first}print('error: wrong', file=sys.stderr); sys.exit(1)"
    assert launch([python(say), python(LOSES.format(0 if first else 1))]) == 1
    assert capfd.readouterr().err == "error: wrong\n  in: process 0 of 2\n"


STARTER = """
import sys
from quire.cli.launch import launch
sys.exit(launch([[sys.executable, "-c", sys.argv[1], str(i)] for i in range(2)]))
"""
LISTENING = """
import os, signal, sys, time
def stop(number, frame): sys.exit(128 + number)
signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)
print(os.getpid(), flush=True) if sys.argv[1] == "0" else None
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on(number: int, code: int) -> None:
    with subprocess.Popen([*python(STARTER), LISTENING], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        starter.stdout.readline()
        time.sleep(0.3)
        starter.send_signal(number)
        assert starter.wait(timeout=20) == code


FOLLOWING = f"""
from quire.cli.launch import end_with_parent
end_with_parent()
import os
print(os.getpid(), flush=True)
{LONG}
"""


def test_nothing_is_left_when_the_starter_is_killed() -> None:
    with subprocess.Popen([*python(STARTER), FOLLOWING], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        starter.kill()
    assert _gone(child, 10)


def _gone(process: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(process, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


# -- Runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    values = [",".join(f"{v:.4f}" for v in row) for row in x.tolist()]
    lines = [f"{row},{'ab'[c]}" for row, c in zip(values, y.tolist(), strict=True)]
    path.write_text("one,two,three,kind\n" + "\n".join(lines) + "\n")
    return path


MLP = ("mlp", "--model.dropout", "0", "--optim.name", "sgd", "--optim.lr", "0.05", "--train.batch-size", "9",
       "--train.noise.inputs", "0", "--device", "cpu")  # fmt: skip


def started(words: Sequence[str], where: Path, *, torchrun: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "quire", "train", *words]
    if torchrun:
        meet = ["--standalone", "--nproc-per-node", "2", "-m", "quire", "train"]
        command = [sys.executable, "-m", "torch.distributed.run", *meet, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        command, cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def members(starter: int) -> list[int]:
    """The processes that a process has started, by number of their run."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_text().split("\0")
        except (OSError, ValueError):
            continue
        if parent == starter and "--member" in words:
            found[int(words[words.index("--member") + 1])] = int(path.name)
    return [found[number] for number in sorted(found)]


def test_one_process_is_asked_to_stop_another_number_goes_on_and_all_is_as_in_one(
    table: Path, tmp_path: Path, quire: Quire
) -> None:
    same = (*MLP, "--data", str(table), "--steps", "6000")
    with started([*same, "--nproc", "2", "--out", "run"], tmp_path) as running:
        _wait_for_steps(tmp_path / "run")
        second = members(running.pid)
        os.kill(second[1], signal.SIGTERM)
        began = time.monotonic()
        _, said = running.communicate(timeout=60)
    assert running.returncode == 143, said
    assert time.monotonic() - began < 30
    assert said.count("everything is saved") == 1
    assert "go on with: quire train mlp --resume run" in said
    assert all(_gone(process, 5) for process in second)
    stopped = newest_checkpoint(tmp_path / "run" / "checkpoints").step
    assert 0 < stopped < 6000

    with started(
        ["mlp", "--resume", "run", "--steps", str(stopped + 40)], tmp_path, torchrun=True
    ) as running:
        out, said = running.communicate(timeout=120)
    assert running.returncode == 0, said
    assert out.count("report: run/report.html") == 1

    wanted = quire("train", *same, "--steps", str(stopped + 40), "--out", str(tmp_path / "one"), "--quiet")
    assert wanted.code == 0, wanted.error
    two, one = (newest_checkpoint(tmp_path / name / "checkpoints") for name in ("run", "one"))
    assert two.step == one.step == stopped + 40
    for name, value in one.tensors["weights"].items():
        torch.testing.assert_close(two.tensors["weights"][name], value, rtol=1e-3, atol=1e-4, msg=name)


def _wait_for_steps(run: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        metrics = run / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size:
            return
        time.sleep(0.02)
    raise AssertionError("no step was taken")


@pytest.mark.long
def test_a_process_that_is_killed_ends_all_and_is_named(table: Path, tmp_path: Path) -> None:
    with started(
        [*MLP, "--data", str(table), "--steps", "100000", "--nproc", "2", "--out", "run"], tmp_path
    ) as running:
        _wait_for_steps(tmp_path / "run")
        both = members(running.pid)
        os.kill(both[1], signal.SIGKILL)
        began = time.monotonic()
        _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert time.monotonic() - began < 30
    assert "process 1 of 2 was ended by SIGKILL" in said
    assert "process 0 of 2 lost touch with another" in said
    assert "Traceback" not in said
    assert all(_gone(process, 5) for process in both)


@pytest.mark.long
def test_statistics_in_two_processes(table: Path, tmp_path: Path, quire: Quire) -> None:
    words = ("kmeans", "--data", str(table), "--device", "cpu", "--quiet", "--json")
    with started([*words, "--nproc", "2", "--out", "two"], tmp_path) as running:
        out, said = running.communicate(timeout=120)
    assert running.returncode == 0, said
    alone = quire("train", *words, "--out", str(tmp_path / "one"))
    assert alone.code == 0, alone.error
    two, one = json.loads(out)["measures"], json.loads(alone.out)["measures"]
    assert two.keys() == one.keys()
    for part, values in one.items():
        assert two[part] == pytest.approx(values, rel=1e-6), part


def test_mistakes_are_told_once_and_early(table: Path, tmp_path: Path, quire: Quire) -> None:
    wrong = quire("train", "mlp", "--nproc", "0")
    assert wrong.code == 2
    wanted = "a whole number from 1 to 1024"
    assert wrong.error == f"error: --nproc is 0\n  expected: {wanted}\n  fix: set --nproc to {wanted}\n"
    words = [*MLP, "--data", str(table), "--nproc", "2", "--out", "run"]
    with started([*words, "--target", "nothing"], tmp_path) as running:
        _, said = running.communicate(timeout=60)
    assert running.returncode == 2, said
    assert said.count("nothing") == 1
    with started([*words, "--target", "kind", "--device", "cuda:7"], tmp_path) as running:
        _, said = running.communicate(timeout=60)
    assert running.returncode == 2, said
    assert said.count("error: ") == said.count("--device cuda:7 for 2 processes") == 1
    assert not (tmp_path / "run").exists()


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member(5, 8, 1, 4)
    assert own_device("cpu", member) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert own_device("auto", member) == own_device("cuda", member) == "cuda:1"
    with pytest.raises(InputError, match="--device cuda:0 for 8 processes"):
        own_device("cuda:0", member)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="4 processes on a machine with 2 CUDA devices") as caught:
        own_device("cuda", member)
    assert caught.value.fix == "use --nproc 2"


def test_who_has_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert membership() is None
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert membership() == Member(5, 8, 1, 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert membership() is None


@pytest.mark.parametrize("member", [False, True])
def test_one_of_several_ends_without_pythons_own_end(member: bool) -> None:
    """Which may be aborted by threads that are still there, after all is done and said."""
    program = "import atexit; from quire.cli.member import leave; atexit.register(print, 'end')"
    program += "; print('done'); leave(3)"
    env = {**os.environ, **({"WORLD_SIZE": "2"} if member else {})}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout.split()) == (3, ["done"] if member else ["done", "end"])
