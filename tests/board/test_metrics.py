"""Curves read on while they are written are those that a report reads from the whole file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.board.metrics import Metrics, last_values, stamp, thin
from quire.errors import CheckpointError
from quire.report.reading import Curve, read_run
from tests.board.making import line, make_run


def as_lists(curves: object) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
    return {
        measure: {
            split: (c.steps.tolist(), np.nan_to_num(c.values, nan=-7.0).tolist())
            for split, c in splits.items()
        }
        for measure, splits in curves.items()  # type: ignore[attr-defined]
    }


def read(metrics: Metrics) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
    return as_lists(
        {m: {s: series.curve() for s, series in splits.items()} for m, splits in metrics.series.items()}
    )


values = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(-9, 9), st.none(), st.just("x")
)
lines = st.lists(
    st.builds(
        lambda step, split, named: line(step, split, **named),
        st.integers(0, 30),
        st.sampled_from(["train", "validation"]),
        st.dictionaries(st.sampled_from(["loss", "accuracy", "lr"]), values),
    ),
    max_size=30,
)


@given(lines, st.lists(st.integers(0, 4000), max_size=6))
@settings(max_examples=60, deadline=None)
def test_reading_on_gives_what_a_report_reads(
    tmp_path_factory: pytest.TempPathFactory, written: list[str], cuts: list[int]
) -> None:
    root = tmp_path_factory.mktemp("runs")
    folder = make_run(root, "one", lines=[])
    text, path = "".join(written), folder / "metrics.jsonl"
    metrics = Metrics(path)
    for cut in sorted(min(cut, len(text)) for cut in cuts):
        path.write_text(text[:cut])
        metrics.read_on()
    path.write_text(text)
    metrics.read_on()
    whole = read_run(folder)
    assert read(metrics) == as_lists(whole.curves)
    assert metrics.last_step == whole.last_step


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "one", lines=[line(1, loss=1.0), line(2, loss=0.5)[:20]])
    metrics = Metrics(folder / "metrics.jsonl")
    assert metrics.read_on()
    assert metrics.points == 1
    with metrics.path.open("a") as file:
        file.write(line(2, loss=0.5)[20:])
    assert metrics.read_on()
    assert metrics.points == 2
    assert not metrics.read_on()


@pytest.mark.parametrize("again", [4, 20])
def test_a_resumed_run_is_read_from_its_beginning(tmp_path: Path, again: int) -> None:
    folder = make_run(tmp_path, "one", lines=[line(s, loss=1.0) for s in range(1, 9)])
    metrics = Metrics(folder / "metrics.jsonl")
    metrics.read_on()
    fresh = tmp_path / "fresh"
    fresh.write_text("".join(line(s, loss=2.0) for s in range(1, again + 1)))
    fresh.rename(metrics.path)  # as training replaces it
    metrics.read_on()
    assert read(metrics) == {"loss": {"train": (list(range(1, again + 1)), [2.0] * again)}}
    assert metrics.last_step == again


@pytest.mark.parametrize(
    "bad", ["{\n", "[]\n", '{"format": 1, "step": "x", "values": {}}\n', '{"step": 1, "values": {}}\n']
)
def test_a_damaged_line_is_named(tmp_path: Path, bad: str) -> None:
    folder = make_run(tmp_path, "one", lines=[line(1, loss=1.0), bad, line(2, loss=1.0)])
    with pytest.raises(CheckpointError, match=r"one/metrics\.jsonl is damaged: line 2"):
        Metrics(folder / "metrics.jsonl").read_on()


def test_the_end_of_a_long_file_is_enough_for_the_last_values(tmp_path: Path) -> None:
    many = [line(s, loss=float(s)) for s in range(1, 2001)] + [line(2000, "validation", loss=7.0)]
    folder = make_run(tmp_path, "one", lines=many)
    step, found = last_values(folder / "metrics.jsonl")
    assert step == 2000
    assert found["loss"]["train"].values.tolist() == [2000.0]
    assert found["loss"]["validation"].values.tolist() == [7.0]


@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=400),
    st.integers(4, 60),
)
@settings(max_examples=100, deadline=None)
def test_thinning_loses_no_extreme(numbers: list[float], points: int) -> None:
    curve = Curve(np.arange(len(numbers)) * 3, np.array(numbers))
    thinned = thin(curve, points)
    assert len(thinned.steps) <= max(points, 4)
    assert thinned.steps[0] == 0
    assert thinned.steps[-1] == 3 * (len(numbers) - 1)
    assert (np.diff(thinned.steps) > 0).all()
    known = dict(zip(curve.steps.tolist(), numbers, strict=True))
    for step, value in zip(thinned.steps.tolist(), thinned.values.tolist(), strict=True):
        assert json.dumps(known[step]) == json.dumps(value)
    if not np.isnan(numbers).all():
        assert np.nanmax(thinned.values) == np.nanmax(numbers)
        assert np.nanmin(thinned.values) == np.nanmin(numbers)


def test_a_link_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    assert stamp(tmp_path / "secret") is not None
    assert stamp(tmp_path / "link") is None
    assert stamp(tmp_path / "nothing") is None
    assert stamp(tmp_path) is None
