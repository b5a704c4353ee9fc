"""Random words and random files for the command, and random lives of a run: only errors of ours, nothing
half-written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.random_lives import WORDS as LIVES
from tests.faults.random_lives import Life, train_undisturbed
from tests.faults.random_words import ANY_TEXT, judge, lines, prepare

FULL = settings.default.max_examples == 1000  # the profile "faults"
FEW = settings(
    max_examples=1000 if FULL else 25,
    derandomize=not FULL,  # the suite's share is the same each time, that of `make faults` always another
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("prepared"))


WORDS = """mlp-run mine.csv none --json --quiet --out --data --target kind --seed -1 1e9 --help -- -
--optim.lr 0.1 nan --overwrite --level --mode sample list show compare made.csv --table.header no --split test
--folder ."""
WORD = st.one_of(st.sampled_from(["", *WORDS.split()]), ANY_TEXT)
STARTS = [["evaluate"], ["evaluate", "mlp-run"], ["predict"], ["predict", "mlp-run"],
          ["predict", "mlp-run", "mine.csv"], ["runs"], ["runs", "show"], ["report"], ["export", "mlp-run"],
          ["adapter"], ["adapter", "list", "mlp-run"], ["list"], ["completion"], ["sample", "gru-run"],
          ["train"], ["sheet", "show"], []]  # fmt: skip


@FEW
@given(start=st.sampled_from(STARTS), words=st.lists(WORD, max_size=4))
def test_random_words(prepared: Path, start: list[str], words: list[str]) -> None:
    judge([*start, *words], prepared)


@FEW
@given(words=lines())
def test_random_options(prepared: Path, words: list[str]) -> None:
    judge(words, prepared)


CELL = st.text("0123456789.,-+eE\"'\n\r\t;xyé☃ ", max_size=12)
CONTENT = st.one_of(
    st.binary(max_size=200),
    st.lists(st.lists(CELL, min_size=1, max_size=4).map(",".join), max_size=12).map(
        lambda rows: "\n".join(rows).encode()
    ),
)
READERS = [
    ["train", "mlp", "--steps", "1", "--quiet", "--out", "made", "--data"],
    ["train", "kmeans", "--clusters", "2", "--quiet", "--out", "made", "--data"],
    ["train", "gru", "--steps", "1", "--model.width", "4", "--text.context", "4", "--quiet", "--out", "made",
     "--data"],
    ["train", "mlp", "--data", "mine.csv", "--steps", "1", "--quiet", "--out", "made", "--config"],
    ["predict", "mlp-run"],
    ["evaluate", "mlp-run", "--data"],
    ["evaluate", "gru-run", "--data"],
]  # fmt: skip


@FEW
@given(
    ending=st.sampled_from(["csv", "tsv", "npy", "npz", "parquet", "txt", "png", "json", "toml", "bin"]),
    content=CONTENT,
    words=st.sampled_from(READERS),
)
def test_random_files(prepared: Path, ending: str, content: bytes, words: list[str]) -> None:
    judge([*words, f"file.{ending}"], prepared, {f"file.{ending}": content})


@FEW
@given(content=CONTENT, place=st.sampled_from(["config.toml", "metrics.jsonl", "result.json", "sums.json"]))
def test_random_files_in_a_run(prepared: Path, content: bytes, place: str) -> None:
    for words in (["runs", "show", "mlp-run"], ["runs", "list", "--folder", "."], ["evaluate", "mlp-run"]):
        judge(words, prepared, {f"mlp-run/{place}": content})


@pytest.mark.slow
def test_lives_of_a_run(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    wholes = {recipe: train_undisturbed(recipe, tmp_path) for recipe in LIVES}
    machine = type("Life", (Life,), {"wholes": wholes})
    run_state_machine_as_test(
        machine,
        settings=settings(
            FEW,
            max_examples=300 if FULL else 8,
            stateful_step_count=12 if FULL else 8,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink a life takes many minutes
        ),
    )
