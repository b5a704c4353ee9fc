"""Records that are taken in by their form are those that a report reads line by line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.board.layout import ENDS, columns, epoch_at
from quire.board.metrics import Metrics
from quire.errors import CheckpointError
from quire.report.reading import read_run
from tests.board import making
from tests.board.making import make_run
from tests.board.test_metrics import as_lists, read

LONG = 5 * ENDS


def line(step: int, split: str = "train", **values: Any) -> str:
    """As a trainer writes it, whose letters need not be ASCII."""
    return json.dumps(json.loads(making.line(step, split, **values)), ensure_ascii=False) + "\n"


def by_hand(text: str) -> dict[tuple[str, str], dict[int, float]]:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for each in text.splitlines():
        record = json.loads(each)
        for measure, value in record["values"].items():
            found.setdefault((record["split"], measure), {})[record["step"]] = value
    return found


def test_columns_are_the_numbers_of_the_lines() -> None:
    text = "".join(
        line(step, "train", loss=1 / step, lr=1e-5 * step)
        + (
            line(step, "validation", loss=-step, größe=math.nan if step == 9 else 0.1)
            if step % 3 == 0
            else ""
        )
        for step in range(1, LONG)
    )
    found = columns(text)
    assert found is not None
    expected = by_hand(text)
    assert {(column.split, column.measure) for column in found} == set(expected)
    for column in found:
        wanted = expected[column.split, column.measure]
        assert column.steps.tolist() == sorted(wanted)
        np.testing.assert_array_equal(column.values.tolist(), [wanted[step] for step in column.steps])
    assert epoch_at(text, LONG - 1) == (LONG - 1) / 10


def test_a_line_with_other_measures_finds_its_place() -> None:
    lines = [line(step, loss=float(step)) for step in range(1, LONG)]
    lines[40] = line(41, loss=77.0, accuracy=0.5)
    found = {column.measure: column for column in columns("".join(lines)) or []}
    assert found["loss"].steps.tolist() == list(range(1, LONG))
    assert found["loss"].values[40] == 77.0
    assert (found["accuracy"].steps.tolist(), found["accuracy"].values.tolist()) == ([41], [0.5])


@pytest.mark.parametrize(
    "odd",
    [
        "\n", "{}\n", "[1]\n", line(999, loss=None), line(999, loss=True), line(999, loss="x"), line(999),
        line(999, loss=1.0).replace(": ", ":"), line(3, loss=0.5),
        line(999, loss=1.0).replace("0.1", "0.1.2"), line(999, loss=1.0).replace("1.0", "1.0.2"),
        line(999, loss=1.0).replace('"format": 1', '"format": 2'), line(1 << 63, loss=1.0),
        line(999, loss=1.0).replace('"split": "train", ', ""), line(999, loss=1.0)[:-5] + "\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, LONG // 2, LONG])
def test_anything_else_is_left_to_a_reader_of_lines(odd: str, place: int) -> None:
    lines = [line(step, loss=1 / step) for step in range(1, LONG)]
    lines.insert(place, odd)
    assert columns("".join(lines)) is None


numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(-(10**6), 10**6))
forms = st.sampled_from([("loss",), ("loss", "accuracy"), ("lr", "loss"), ("a: b", 'quo"te', "µ")])


@st.composite
def written(draw: st.DrawFn) -> str:
    """Lines of two splits whose steps go on; now and then other measures, an earlier step, or no number."""
    usual = {split: draw(forms) for split in ("train", "validation")}
    odd = draw(
        st.dictionaries(st.integers(0, 2 * LONG), st.sampled_from(["form", "back", "null"]), max_size=3)
    )
    seed: Any = draw(st.lists(numbers, min_size=7, max_size=7))
    made = []
    for place in range(2 * LONG):
        split, what = ("train", "validation")[place % 2], odd.get(place)
        named = {m: seed[(place + i) % 7] for i, m in enumerate(usual[split])}
        if what == "form":
            named = {"accuracy": seed[place % 7]}
        elif what == "null":
            named["loss"] = None
        made.append(line(place // 3 if what == "back" else place, split, **named))
    return "".join(made)


@given(written(), st.integers(0, 40_000))
@settings(max_examples=25, deadline=None)
def test_in_two_looks_it_is_what_a_report_reads(
    tmp_path_factory: pytest.TempPathFactory, text: str, cut: int
) -> None:
    folder = make_run(tmp_path_factory.mktemp("runs"), "one", lines=[])
    path = folder / "metrics.jsonl"
    metrics = Metrics(path)
    for part in (text[:cut], text):
        path.write_text(part)
        metrics.read_on()
    whole = read_run(folder)
    assert read(metrics) == as_lists(whole.curves)
    assert (metrics.last_step, metrics.last_epoch) == (whole.last_step, whole.last_epoch)


def test_a_damaged_line_far_down_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.board.metrics._PIECE", 20_000)  # several pieces
    lines = [line(step, loss=1.0) for step in range(1, 1000)]
    lines[700] = "{\n"
    folder = make_run(tmp_path, "one", lines=lines)
    with pytest.raises(CheckpointError, match=r"line 701 of those read"):
        Metrics(folder / "metrics.jsonl").read_on()
    lines[700] = line(701, loss=5.0)
    folder = make_run(tmp_path, "two", lines=lines)
    metrics = Metrics(folder / "metrics.jsonl")
    metrics.read_on()
    assert metrics.points == 999
    assert metrics.series["loss"]["train"].values[700] == 5.0
