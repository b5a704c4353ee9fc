"""Random words and random files for the command, and random lives of a run: only errors of ours, nothing
half-written."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from quire.cli.main import main as command
from quire.errors import QuireError
from quire.train.checkpoints import list_checkpoints, newest_checkpoint
from quire.train.folder import CHECKPOINTS, read_config
from tests.faults.flips import flip
from tests.faults.worker import STEPS, attempt, check_between, run
from tests.recipes.examples import write_csv

FULL = settings.default.max_examples == 1000  # the profile "faults"
FEW = settings(
    max_examples=1000 if FULL else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
UNFORESEEN = "run again with --debug"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_csv(folder / "mine.csv")
    words = ["--model.hidden", "4", "--steps", "2", "--quiet", "--device", "cpu"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert (
            command(
                ["train", "mlp", "--data", str(folder / "mine.csv"), "--out", str(folder / "run"), *words]
            )
            == 0
        )
    return folder


def judge(words: list[str], prepared: Path, files: dict[str, bytes]) -> None:
    """Run the command in a fresh folder: a known exit code, one message of ours, nothing half-written."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary)
        shutil.copytree(prepared / "run", here / "run")
        shutil.copy(prepared / "mine.csv", here)
        for name, content in files.items():
            (here / name).write_bytes(content)
        with (
            contextlib.chdir(here),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            code = command(words)
        text = said.getvalue()
        assert code in (0, 1, 2), (words, code)
        assert "Traceback" not in text, (words, text)
        assert UNFORESEEN not in text, (words, text)
        assert (code == 0) or text.startswith("error: "), (words, text)
        half = [path for path in here.rglob("*") if path.name.endswith(".tmp")]
        assert not half, (words, half)
        for made in (here / "made", *(here / "runs").glob("*")):
            assert not made.exists() or (made / "config.toml").exists(), (words, made)


WORDS = """run mine.csv none --json --quiet --out --data --target kind --seed -1 1e9 --help -- - --optim.lr
0.1 nan --overwrite --level --mode sample list show compare made.csv --table.header no --split test
--folder ."""
WORD = st.one_of(
    st.sampled_from(["", *WORDS.split()]), st.text(max_size=12).filter(lambda word: "\0" not in word)
)
STARTS = [["evaluate"], ["evaluate", "run"], ["predict"], ["predict", "run"], ["predict", "run", "mine.csv"],
          ["runs"], ["runs", "show"], ["report"], ["export", "run"], ["adapter"], ["adapter", "list", "run"],
          ["list"], ["completion"], ["sample", "run"], ["train"], ["sheet", "show"], []]  # fmt: skip


@FEW
@given(start=st.sampled_from(STARTS), words=st.lists(WORD, max_size=4))
def test_random_words(prepared: Path, start: list[str], words: list[str]) -> None:
    judge([*start, *words], prepared, {})


CELL = st.text("0123456789.,-+eE\"'\n\r\t;xyé☃ ", max_size=12)
CONTENT = st.one_of(
    st.binary(max_size=200),
    st.lists(st.lists(CELL, min_size=1, max_size=4).map(",".join), max_size=12).map(
        lambda rows: "\n".join(rows).encode()
    ),
)


@FEW
@given(
    ending=st.sampled_from(["csv", "tsv", "npy", "npz", "parquet", "txt", "png", "json"]),
    content=CONTENT,
    words=st.sampled_from(
        [["train", "mlp", "--steps", "1", "--quiet", "--out", "made", "--data"], ["predict", "run"],
         ["evaluate", "run", "--data"]]
    ),
)  # fmt: skip
def test_random_files(prepared: Path, ending: str, content: bytes, words: list[str]) -> None:
    judge([*words, f"file.{ending}"], prepared, {f"file.{ending}": content})


@FEW
@given(content=CONTENT, place=st.sampled_from(["config.toml", "metrics.jsonl", "result.json", "sums.json"]))
def test_random_files_in_a_run(prepared: Path, content: bytes, place: str) -> None:
    for words in (["runs", "show", "run"], ["runs", "list", "--folder", "."], ["evaluate", "run"]):
        judge(words, prepared, {f"run/{place}": content})


class Life(RuleBasedStateMachine):
    """A run that is trained, killed, damaged, moved, resumed and used in any order. It comes to its end, or
    says in words of ours why it cannot."""

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "run"

    # No preconditions: whether a run exists depends on when it was killed, and rules must not depend on that.

    @rule(inside=st.booleans())
    def train_and_kill(self, inside: bool) -> None:
        try:
            attempt(self.path, self.random, inside_save=inside)
        except AssertionError as problem:  # the worker ended by itself: only what was damaged may stop it
            if "failed by itself" not in str(problem) or not self.is_damaged():
                raise

    def is_damaged(self) -> bool:
        try:
            read_config(self.path)
            newest_checkpoint(self.path / CHECKPOINTS)
        except QuireError:
            return True
        return False

    @rule(where=st.floats(0, 1, exclude_max=True))
    def corrupt(self, where: float) -> None:
        if not self.path.exists():
            return
        files = [
            p
            for step in list_checkpoints(self.path / CHECKPOINTS)
            for p in step.iterdir()
            if p.stat().st_size
        ]
        if files:
            path = self.random.choice(files)
            flip(path, int(where * 8 * path.stat().st_size))

    @rule()
    def move(self) -> None:
        if self.path.exists():
            self.path = self.path.rename(self.folder / f"run{self.random.randrange(10**9)}")

    @rule()
    def use(self) -> None:
        try:
            assert 0 <= newest_checkpoint(self.path / CHECKPOINTS).step <= STEPS
            check_between(self.path)
        except QuireError as problem:
            self.names_the_run(problem)

    def names_the_run(self, problem: QuireError) -> None:
        assert str(self.path) in problem.got

    @rule()
    def resume(self) -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run(self.path)
        except QuireError as problem:
            self.names_the_run(problem)
        else:
            assert newest_checkpoint(self.path / CHECKPOINTS).step == STEPS

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


@pytest.mark.slow
def test_lives_of_a_run() -> None:
    torch.set_num_threads(1)
    run_state_machine_as_test(
        Life, settings=settings(FEW, max_examples=100 if FULL else 3, stateful_step_count=12 if FULL else 7)
    )
