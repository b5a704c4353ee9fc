"""Train, use and compare small real runs through the command."""

from __future__ import annotations

import csv
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import chdir
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest

from quire.cli.main import main
from quire.errors import InputError
from quire.runs import load
from tests.cli.conftest import Quire

pytestmark = pytest.mark.slow

TRAIN = ("train", "mlp", "--data", "table.csv", "--target", "y", "--model.hidden", "16", "--quiet")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a table y = 2a − b + noise, new rows without y, and one trained run."""
    folder = tmp_path_factory.mktemp("workshop")
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(120, 2))
    target = rows @ [2.0, -1.0] + 0.1 * generator.normal(size=120)
    lines = [f"{a:.6f},{b:.6f},{y:.6f}" for (a, b), y in zip(rows, target, strict=True)]
    (folder / "table.csv").write_text("a,b,y\n" + "\n".join(lines) + "\n")
    (folder / "new.csv").write_text("a,b\n1,0\n0,1\n-1,0.5\n")
    with chdir(folder):
        assert main([*TRAIN, "--epochs", "60", "--optim.lr", "0.03", "--out", "runs/one"]) == 0
        yield folder


@pytest.fixture(autouse=True)
def inside(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_train_prints_result_and_report(quire: Quire) -> None:
    answer = quire(*TRAIN, "--epochs", "1", "--out", "runs/text")
    assert answer.code == 0, answer.error
    lines = answer.out.splitlines()
    assert lines[0].split()[:2] == ["split", "loss"]
    assert [line.split()[0] for line in lines[1:4]] == ["train", "validation", "test"]
    assert lines[-1] == "report: runs/text/report.html"
    assert "expected" not in answer.out  # nothing is promised on the user's own data
    assert Path("runs/text/report.html").is_file()


def test_train_as_json_prints_one_object_alone(quire: Quire) -> None:
    answer = quire(*TRAIN, "--epochs", "1", "--out", "runs/json", "--json")
    result = json.loads(answer.out)
    assert set(result) == {"run", "measures", "seconds"}
    assert result["run"] == "runs/json"
    assert set(result["measures"]) == {"train", "validation", "test"}
    assert result["seconds"] > 0


def test_an_existing_run_is_never_overwritten_unasked(quire: Quire) -> None:
    assert quire(*TRAIN, "--epochs", "1", "--out", "runs/kept").code == 0
    before = Path("runs/kept/config.toml").read_bytes()
    answer = quire(*TRAIN, "--epochs", "2", "--out", "runs/kept")
    assert answer.code == 2
    assert "runs/kept exists already" in answer.error
    assert Path("runs/kept/config.toml").read_bytes() == before
    assert quire(*TRAIN, "--epochs", "2", "--out", "runs/kept", "--overwrite").code == 0
    assert Path("runs/kept/config.toml").read_bytes() != before


def test_resuming_takes_the_options_of_the_run(quire: Quire) -> None:
    shutil.copytree("runs/one", "runs/longer")
    answer = quire("train", "mlp", "--resume", "runs/longer", "--epochs", "62", "--quiet", "--json")
    assert answer.code == 0, answer.error
    result = json.loads(Path("runs/longer/result.json").read_text())
    assert result["epochs"] == 62
    other = quire("train", "mlp", "--resume", "runs/longer", "--optim.lr", "0.5", "--quiet")
    assert other.code == 2
    assert "resuming with other values" in other.error


def test_a_run_is_repeated_from_its_config(quire: Quire) -> None:
    words = ("--config", "runs/one/config.toml", "--out", "runs/again", "--json", "--quiet")
    answer = quire("train", "mlp", *words)
    again = json.loads(answer.out)["measures"]
    assert again == json.loads(Path("runs/one/result.json").read_text())["measures"]


def test_evaluate(quire: Quire) -> None:
    saved = json.loads(Path("runs/one/result.json").read_text())["measures"]
    result = json.loads(quire("evaluate", "runs/one", "--split", "test", "--json").out)
    assert set(result) == {"run", "measures", "seconds"}
    assert result["measures"] == {"test": pytest.approx(saved["test"])}
    every = json.loads(quire("evaluate", "runs/one", "--json").out)["measures"]
    assert every == {split: pytest.approx(values) for split, values in saved.items()}
    assert quire("evaluate", "runs/one", "--data", "table.csv").out.splitlines()[1].startswith("data ")


def test_predict_learned_the_plane(quire: Quire) -> None:
    rows = list(csv.DictReader(quire("predict", "runs/one", "new.csv").out.splitlines()))
    found = [float(row["prediction"]) for row in rows]
    assert found == pytest.approx([2.0, -1.0, -2.5], abs=0.5)


def test_predict_writes_whole_files_by_their_ending(quire: Quire, tmp_path: Path) -> None:
    printed = quire("predict", "runs/one", "new.csv", "--mode", "interval").out
    comma, parquet = tmp_path / "p.csv", tmp_path / "p.parquet"
    for path in (comma, parquet):
        assert quire("predict", "runs/one", "new.csv", "--mode", "interval", "--out", str(path)).code == 0
    assert comma.read_text() == printed
    columns = pq.read_table(parquet).to_pydict()
    assert all(low < high for low, high in zip(columns["low"], columns["high"], strict=True))
    answer = quire("predict", "runs/one", "new.csv", "--out", str(comma))
    assert answer.code == 2
    assert "exists already" in answer.error
    assert comma.read_text() == printed
    assert quire("predict", "runs/one", "new.csv", "--out", str(comma), "--overwrite").code == 0
    assert comma.read_text() != printed
    assert files(tmp_path) == {"p.csv", "p.parquet"}


def test_what_training_did_not_have_is_said_beside_the_predictions(quire: Quire, tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    new.write_text("b,more,a\n0,x,1\n1,y,\n")
    notes = [
        "note: columns that training did not have are ignored: more",
        "note: column 'a': 1 missing, none in training; the training median is used",
    ]
    printed = quire("predict", "runs/one", str(new))
    assert printed.error.splitlines() == notes
    assert len(printed.out.splitlines()) == 3
    kept = quire("predict", "runs/one", str(new), "--out", str(tmp_path / "p.csv"))
    assert kept.error.splitlines() == notes
    assert json.loads(quire("predict", "runs/one", str(new), "--json").out)["rows"] == 2
    assert quire("predict", "runs/one", "new.csv").error == ""
    new.write_text("more,b,a,y\nx,0,1,2\n")
    assert quire("evaluate", "runs/one", "--data", str(new)).error.splitlines() == notes[:1]


def test_rows_in_memory_are_predicted_as_those_of_a_file() -> None:
    pandas = pytest.importorskip("pandas")
    run = load("runs/one")
    expected = run.predict("new.csv").to_pydict()
    frame = pandas.read_csv("new.csv")
    assert run.predict(frame[["b", "a"]]).to_pydict() == expected
    assert run.predict(pyarrow.Table.from_pandas(frame)).to_pydict() == expected
    # An array has no names: as wide as the training file, or without its target.
    assert run.predict(frame.to_numpy()).to_pydict() == expected
    with pytest.raises(InputError, match="a int"):
        run.predict(5)


def test_the_column_that_was_taken_as_the_target_is_said(quire: Quire) -> None:
    """Before training to a person who watches, after it to one who asked for quiet; once in any case."""
    words = [word for word in TRAIN if word not in ("--target", "y", "--quiet")]
    note = "note: the target is 'y', the last column; --target names another"
    watched = quire(*words, "--epochs", "1", "--out", "runs/watched")
    assert watched.error.splitlines()[0] == note
    assert note not in watched.out
    quiet = quire(*words, "--epochs", "1", "--out", "runs/quiet", "--quiet")
    assert quiet.out.splitlines()[0] == note
    assert quiet.error == ""
    named = quire(*TRAIN, "--epochs", "1", "--out", "runs/named")
    assert "the target is" not in named.out + named.error


def test_an_exported_file_takes_dates_categories_and_large_numbers(quire: Quire, tmp_path: Path) -> None:
    """Cells are made from the file's metadata alone; seconds since 1970 are more than float32 tells apart."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    rows = [(1_700_000_000 + 7 * i, f"2024-{1 + i % 12:02d}-15", "abc"[i % 3], i % 19) for i in range(60)]
    text = "".join(",".join(map(str, row)) + ".5\n" for row in rows)
    Path("times.csv").write_text("seconds,day,kind,y\n" + text)
    words = ["train", "mlp", "--data", "times.csv", "--target", "y", "--epochs", "3", "--quiet"]
    assert quire(*words, "--out", "runs/times").code == 0
    assert quire("export", "runs/times", str(tmp_path / "m.onnx")).code == 0
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
    columns = json.loads(session.get_modelmeta().custom_metadata_map["columns"])
    assert [column["kind"] for column in columns] == ["number", "date", "category"]
    start, kinds = date.fromisoformat(columns[1]["days_since"]), columns[2]["categories"]
    cells = [[n, (date.fromisoformat(day) - start).days, kinds.index(kind)] for n, day, kind, _ in rows]
    (found,) = session.run(None, {"table": np.array(cells, np.float64)})
    printed = quire("predict", "runs/times", "times.csv").out
    expected = [float(row["prediction"]) for row in csv.DictReader(printed.splitlines())]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    # Small numbers are taken in float32, as everywhere.
    assert quire("export", "runs/one", str(tmp_path / "small.onnx")).code == 0
    assert runtime.InferenceSession(str(tmp_path / "small.onnx")).get_inputs()[0].type == "tensor(float)"


def test_predict_as_json(quire: Quire) -> None:
    result = json.loads(quire("predict", "runs/one", "new.csv", "--json").out)
    assert (result["run"], result["rows"], len(result["predictions"])) == ("runs/one", 3, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "runs/on", "new.csv"], "did you mean 'runs/one'?"),
        (["predict", "runs/one", "nw.csv"], "did you mean 'new.csv'?"),
        (["predict", "runs/one", "new.csv", "--out", "p.xls"], "a name that ends in .csv or .parquet"),
        (["predict", "runs/one", "new.csv", "--out", "no/p.csv"], "there is no folder no"),
        (["predict", "runs/one", "new.csv", "--level", "1.5"], "--level is 1.5"),
        (["predict", "runs/one", "new.csv", "--mode", "men"], "did you mean 'mean'?"),
        (["predict", "runs/one", "new.csv", "--levl", "0.5"], "did you mean '--level'?"),
        (["predict", "runs/one", "new.csv", "--score", "0.5"], "one of mode, level, seed"),
        (["evaluate", "runs"], "run runs has no config.toml"),
        (["evaluate", "runs/one", "--data", "gone.csv"], "gone.csv: no such file"),
        (["evaluate", "runs/one", "--split", "tst"], "did you mean 'test'?"),
        (
            ["evaluate", "runs/one", "--data", "table.csv", "--split", "test"],
            "has no parts and is judged whole",
        ),
        (["evaluate", "runs/one", "--data", "new.csv"], "no column 'y'"),
        (["train", "mlp", "--data", "table.csv", "--tune.base", "runs/on"], "did you mean 'runs/one'?"),
        (["export", "runs/one", "model.txt"], "a name that ends in .onnx or .pt2"),
        (["export", "runs/one", "table.csv/m.onnx"], "there is no folder table.csv"),
        (["train", "mlp", "--data", "tabel.csv"], "did you mean 'table.csv'?"),
        (["train", "mlp", "--resume", "runs/nothing"], "run runs/nothing does not exist"),
        (["train", "mlp", "--data", "table.csv", "--target", "z"], "missing column 'z'"),
        (["train", "mlp", "--config", "table.csv"], "table.csv is not TOML"),
        (["train", "mlp", "--out", "table.csv"], "--out table.csv exists and is no run folder"),
        (["runs", "show", "runs/on"], "did you mean 'runs/one'?"),
        (["runs", "compare", "runs/one"], "two or more run folders"),
        (["runs", "--folder", "nowhere"], "--folder nowhere: no such folder"),
        (["runs", "lst"], "did you mean 'list'?"),
        (["report", "nowhere"], "run nowhere does not exist"),
    ],
)
def test_mistakes_leave_nothing_behind(quire: Quire, workshop: Path, words: list[str], message: str) -> None:
    before = files(workshop)
    answer = quire(*words)
    assert (answer.code, answer.out) == (2, ""), answer.error
    assert message in answer.error
    assert "Traceback" not in answer.error
    assert files(workshop) == before


def test_runs_are_listed_shown_and_compared(quire: Quire) -> None:
    assert quire(*TRAIN, "--epochs", "1", "--out", "runs/two").code == 0
    named = [row["name"] for row in json.loads(quire("runs", "--json").out)]
    assert {"one", "two"} <= set(named)
    assert any(line.startswith("one ") for line in quire("runs").out.splitlines())
    shown = json.loads(quire("runs", "show", "runs/one", "--json").out)
    assert (shown["recipe"], shown["finished"], shown["options"]["optim"]["lr"]) == ("mlp", True, 0.03)
    assert "optim.lr" in quire("runs", "show", "runs/one").out
    both = json.loads(quire("runs", "compare", "runs/one", "runs/two", "--json").out)
    assert [row["options"]["optim.lr"] for row in both] == [0.03, 0.001]
    assert "--optim.lr" in quire("runs", "compare", "runs/one", "runs/two").out.splitlines()[0]


def test_a_damaged_run_does_not_hide_the_others(quire: Quire) -> None:
    shutil.copytree("runs/one", "some/good")
    shutil.copytree("runs/one", "some/bad")
    Path("some/bad/config.toml").write_text("format = ")
    answer = quire("runs", "--folder", "some", "--json")
    assert answer.code == 0
    assert [row["name"] for row in json.loads(answer.out)] == ["good"]
    assert answer.error.startswith("left out: some/bad/config.toml")


def test_no_runs_yet(quire: Quire, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert quire("runs").out == "no runs in runs; quire train mlp makes one\n"
    assert json.loads(quire("runs", "--json").out) == []


def test_the_report_is_written_again(quire: Quire) -> None:
    shutil.copytree("runs/one", "runs/reported")
    Path("runs/reported/report.html").unlink()
    assert quire("report", "runs/reported").out == "report: runs/reported/report.html\n"
    assert "<svg" in Path("runs/reported/report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
def test_export(quire: Quire, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"model{ending}"
    answer = quire("export", "runs/one", str(path), "--json")
    assert answer.code == 0, answer.error
    assert answer.error == ""
    summary = json.loads(answer.out)
    assert (summary["path"], summary["inputs"]) == (str(path), ["a", "b"])
    assert summary["largest_difference"] < 1e-4
    assert files(tmp_path) == {path.name}
    again = quire("export", "runs/one", str(path))
    assert again.code == 2
    assert "exists already" in again.error


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
def test_an_export_without_room_leaves_what_was_there(quire: Quire, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"model{ending}"
    path.write_text("before")
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, allowed[1]))
    try:
        answer = quire("export", "runs/one", str(path), "--overwrite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert answer.code == 1
    assert answer.error.startswith(f"error: {path} cannot be written: File too large; it got to 4096 bytes")
    assert path.read_text() == "before"
    assert files(tmp_path) == {path.name}
