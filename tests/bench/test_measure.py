"""Figures of benchmarks: times, memory, limits, bars, and what is written down."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch

from quire.bench.case import Absent, Bar, Case, Clocked, Growth, Place, Turns, Work, peer
from quire.bench.growth import Grown, draw, measure
from quire.bench.machine import limit, short_name
from quire.bench.measure import Figures, Outcome, judge, run_case
from quire.bench.results import save
from quire.bench.table import amount, markdown, seconds, text

pytestmark = pytest.mark.slow

HERE = Place(torch.device("cpu"))


def sleeper(wanted: float) -> Case:
    return Case("sleep", {"quire": lambda: time.sleep(wanted), "twice": lambda: time.sleep(2 * wanted)})


def test_a_call_takes_the_time_it_takes() -> None:
    found = run_case(sleeper(0.01), HERE, rounds=2).contestants
    assert 0.009 < found["quire"].seconds < 0.05
    assert found["twice"].seconds > 1.5 * found["quire"].seconds


def test_set_up_does_not_count_in_turns() -> None:
    def run(turns: int) -> None:
        time.sleep(0.05 + 0.004 * turns)

    found = run_case(Case("turns", {"quire": Turns(run, 2, 12)}), HERE, rounds=2).contestants["quire"]
    assert 0.003 < found.seconds < 0.02


def test_a_run_may_take_its_own_time() -> None:
    times = iter([3.0, 1.0, 2.0])
    case = Case("own", {"quire": Clocked(lambda: (next(times), "made"))}, result=lambda made: len(made))
    found = run_case(case, HERE, rounds=3).contestants["quire"]
    assert (found.seconds, found.spread, found.result) == (2.0, 1.0, 4.0)


def test_a_whole_run_is_called_once() -> None:
    calls = []
    run_case(Case("whole", {"quire": lambda: calls.append(1)}, whole=True, amount=4), HERE)
    assert calls == [1]


def test_memory_is_what_a_call_holds_at_most() -> None:
    def hold() -> float:
        return float(torch.ones(30_000_000).sum())

    found = run_case(Case("hold", {"quire": hold, "nothing": lambda: None}), HERE, rounds=1).contestants
    held, nothing = found["quire"].bytes, found["nothing"].bytes
    if held is None or nothing is None:
        pytest.skip("this system keeps no high-water mark that can be set back")
    assert 100e6 < held < 200e6
    assert nothing < 20e6


def test_who_runs_out_of_memory_is_absent() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    found = run_case(Case("large", {"quire": lambda: None, "rival": fail}), HERE, rounds=1).contestants
    assert found["rival"].absent == "out of memory"
    assert not found["quire"].absent


def test_a_peer_that_is_not_installed_is_named() -> None:
    missing = peer("no_such_package", lambda: None)
    assert isinstance(missing, Absent)
    outcome = run_case(Case("peers", {"quire": lambda: None, "rival": missing}), HERE, rounds=1)
    assert "rival  absent: no_such_package is not installed" in " ".join(text(outcome).split("\n"))


def test_the_limit_is_the_slowest_of_what_must_be_done() -> None:
    device = torch.device("cpu")
    little = limit(device, Work(moved=8.0, operations={"float32": 2e9}))
    much = limit(device, Work(moved=1e12, operations={"float32": 2e9}))
    assert little is not None
    assert much is not None
    assert little[1] == "float32"
    assert much[1] == "memory"
    assert 1e-4 < little[0] < 10
    assert limit(device, None) is None


BARS = {
    "below": (Bar("time", at_most=2.0), 1.0, True),
    "above": (Bar("time", at_most=0.5), 1.0, False),
    "faster than a rival": (Bar("time", at_most=0.6, rival="rival"), 0.5, True),
    "rate": (Bar("rate", at_least=2.0), 1.0, False),
    "memory": (Bar("memory", at_most=100.0), 64.0, True),
    "another machine": (Bar("time", at_most=0.5, machine="H200"), None, None),
    "an absent rival": (Bar("time", at_most=0.5, rival="absent"), None, None),
}


@pytest.mark.parametrize("name", BARS)
def test_bars(name: str) -> None:
    bar, found, met = BARS[name]
    seen = {"quire": Figures(1.0, bytes=64), "rival": Figures(2.0), "absent": Figures(absent="why")}
    verdict = judge(bar, Outcome("title", "call", 1.0, seen), "a machine")
    assert (verdict["found"], verdict["met"]) == (found, met)


def test_a_bar_has_one_side() -> None:
    with pytest.raises(ValueError, match="either at most or at least"):
        Bar("time")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-6, "4 µs"), (5e-9, "5 ns"), (1234.0, "1,234 s")],
)
def test_times_are_readable(value: float, wanted: str) -> None:
    assert seconds(value) == wanted


def test_amounts_are_readable() -> None:
    assert [amount(value) for value in (10, 2048, 3 << 20, 5 << 30)] == ["10 B", "2 KiB", "3 MiB", "5 GiB"]


def test_what_is_written_can_be_read_and_shown(tmp_path: Path) -> None:
    case = Case(
        "a | case", {"quire": Clocked(lambda: (0.5, None)), "rival": Clocked(lambda: (1.0, None))},
        work=Work(moved=1e6), unit="token", bars=(Bar("time", at_most=1.0, rival="rival"),),
    )  # fmt: skip
    path = save(tmp_path, "name", torch.device("cpu"), [run_case(case, HERE, rounds=1)])
    assert short_name(torch.device("cpu")) in path.name
    assert "bar: time / rival's 0.5, at most 1: met" in path.read_text()
    stored = json.loads(path.with_suffix(".json").read_text())
    table = markdown([("machine", outcome) for outcome in stored["outcomes"]])
    assert "| 2 tokens/s | rival: 1 tokens/s | 2 × |" in table


def test_growth_finds_the_order_and_stops_where_memory_ends() -> None:
    def make(size: int) -> Case:
        if size > 64:
            raise torch.OutOfMemoryError
        return Case("", {"quire": Clocked(lambda: (1e-6 * size**2, None))})

    growth = Growth("squares", "size N", (8, 16, 32, 64, 128), make, order=2, memory_order=1)
    found = measure(growth, HERE, say=lambda _: None)
    assert [point["size"] for point in found.points["quire"]] == [8, 16, 32, 64]
    order = found.order("quire", "seconds")
    assert order is not None
    assert math.isclose(order, 2.0, rel_tol=1e-6)
    assert "order of time 2.00 (expected 2)" in "\n".join(found.lines())


def test_the_picture_of_growth_has_titles_and_axes() -> None:
    growth = Growth("squares", "size N", (1, 2), lambda size: Case("", {}), order=2, memory_order=1)
    points = {"quire": [{"size": n, "seconds": float(n), "bytes": 1000 * n} for n in (1, 2, 4)]}
    picture = draw(Grown(growth, points), "a machine")
    left, right = picture.axes
    assert (left.get_title(), left.get_xlabel(), left.get_ylabel()) == ("Time", "size N", "seconds")
    assert (right.get_title(), right.get_ylabel()) == ("Extra memory", "MiB")
