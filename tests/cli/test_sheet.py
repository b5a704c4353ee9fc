"""`quire sheet`, on entries of the tests' own: one that passes, one that fails, one that cannot run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from quire.cli import sheet
from quire.sheet.registry import Entry
from tests.cli.conftest import Quire


def double(x: float) -> float:
    return 2 * x


def triple(x: float) -> float:
    return 3 * x


def picture() -> Figure:
    figure = Figure()
    figure.subplots().plot([0, 1], [0, 2])
    return figure


def refuses(function: object) -> float:
    raise RuntimeError("no proof")


def make(id: str, **changes: object) -> Entry:
    values = {
        "id": id, "title": f"Title of {id}", "latex": r"f(x) = 2x", "code": (double,), "wrong": (triple,),
        "tolerance": 1e-9, "proof": lambda function: abs(function(1.5) - 3.0),
    }  # fmt: skip
    return Entry(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def some_entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = [
        make("dense/double", erratum="Often printed as 3x.", picture=picture),
        make("dense/other"),
        make("loss/broken", code=(triple,)),
        make("loss/odd", proof=refuses),
    ]
    monkeypatch.setattr(sheet, "entries", lambda: {entry.id: entry for entry in known})
    monkeypatch.chdir(tmp_path)


def test_list(quire: Quire) -> None:
    lines = quire("sheet", "list").out.splitlines()
    ids = [line.split()[0] for line in lines[1:]]
    assert ids == ["dense/double", "dense/other", "loss/broken", "loss/odd"]
    assert lines[1].endswith("erratum picture")
    chosen = json.loads(quire("sheet", "list", "--chapter", "dense", "--json").out)
    assert [entry["id"] for entry in chosen] == ["dense/double", "dense/other"]
    answer = quire("sheet", "list", "--chapter", "dence")
    assert answer.code == 2
    assert "did you mean 'dense'?" in answer.error


def test_show(quire: Quire, tmp_path: Path) -> None:
    answer = quire("sheet", "show", "dense/double")
    assert answer.code == 0
    for text in ("Title of dense/double", r"f(x) = 2x", "test_sheet.double", "Often printed as 3x."):
        assert text in answer.out
    assert "proof: passed, error 0, tolerance 1e-09; the wrong form has error 1.5" in answer.out
    assert (tmp_path / "sheet-dense-double.svg").read_text().count("<svg") == 1


def test_show_writes_where_it_is_told(quire: Quire, tmp_path: Path) -> None:
    answer = quire("sheet", "show", "dense/double", "--out", str(tmp_path / "a.svg"), "--json")
    assert json.loads(answer.out)["picture"] == str(tmp_path / "a.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    answer = quire("sheet", "show", "dense/double", "--out", str(tmp_path / "no" / "a.svg"))
    assert answer.code == 2
    assert "there is no folder" in answer.error


def test_show_of_a_failing_proof(quire: Quire) -> None:
    answer = quire("sheet", "show", "loss/broken")
    assert answer.code == 1
    assert "proof: FAILED, error 1.5" in answer.out


def test_verify(quire: Quire) -> None:
    answer = quire("sheet", "verify", "dense")
    assert answer.code == 0
    assert answer.out.splitlines()[-1].startswith("2 of 2 proofs passed in ")


def test_verify_fails_with_exit_code_1(quire: Quire) -> None:
    answer = quire("sheet", "verify")
    assert answer.code == 1
    assert "FAIL loss/broken: error 1.5, tolerance 1e-09" in answer.out
    assert "FAIL loss/odd: error inf, tolerance 1e-09; RuntimeError: no proof" in answer.out
    assert "2 of 4 proofs passed" in answer.out


def test_verify_as_json(quire: Quire) -> None:
    answer = quire("sheet", "verify", "loss/*", "dense/other", "--json")
    assert answer.code == 1
    assert json.loads(answer.out) == [
        {"id": "dense/other", "error": 0.0, "tolerance": 1e-9, "passed": True},
        {"id": "loss/broken", "error": 1.5, "tolerance": 1e-9, "passed": False},
        {"id": "loss/odd", "error": None, "tolerance": 1e-9, "passed": False},
    ]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["verify", "dense/doubel"], "did you mean 'dense/double'?"),
        (["show", "dense/doubel"], "did you mean 'dense/double'?"),
        (["verify", "dence"], "did you mean 'dense'?"),
        (["verify", "zzz/*"], "see quire sheet list"),
        (["show", "dense/double", "--out", "a.png"], "a name ending in .svg"),
        (["shw"], "did you mean 'show'?"),
        (["show"], "ID missing"),
        (["verify", "--jsn"], "did you mean '--json'?"),
    ],
)
def test_mistakes(quire: Quire, words: list[str], hint: str) -> None:
    answer = quire("sheet", *words)
    assert (answer.code, answer.out) == (2, "")
    assert hint in answer.error
