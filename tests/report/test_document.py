from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quire.report
from quire.errors import CheckpointError
from quire.report.style import INK, figure, to_svg
from tests.report import folders
from tests.report.checking import Page, read_page

pytestmark = pytest.mark.slow

SCRIPT = "<script>alert('x')</script>"


def report(folder: Path) -> Page:
    path = quire.report.write(folder)
    assert path == folder / "report.html"
    assert "report.html" in os.listdir(folder)
    assert not [name for name in os.listdir(folder) if name.startswith(".")], "no temporary file is left"
    return read_page(path)


def test_classifier(tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "mlp-1", warnings=["two columns are constant"])
    page = report(folder)
    assert page.of("b") == ["0.9778"]
    assert "test accuracy" in page.of("span")
    assert "✓ as expected: test accuracy ≥ 0.97" in page.of("span")
    assert page.of("li") == ["two columns are constant"]
    order = ["Measures", "Curves", "Predictions", "Model", "Time and memory", "Data", "Configuration"]
    assert page.of("h2") == [*order, "Repeat this run"]
    for measured in ("0.0123", "0.9992", "0.0811", "0.9741", "0.0905"):
        assert measured in page.of("td")
    for expected in ("layers.0", "Linear", "8,320", "1,290", "9,610"):
        assert expected in page.of("td")
    for expected in ("3.22 s", "312 MiB", "cpu", "251,234.5", "360", "cosine", "128, 64", "2.13.0", "true"):
        assert expected in page.of("dd")
    assert "optim.schedule.warmup" in page.of("dt")
    assert page.of("code") == ["quire train mlp --optim.lr 0.001 --seed 0"]
    assert "Source: built-in digits (1,797 images of 8 × 8 pixels)" in page.of("p")
    assert "1,257" in page.of("td")
    assert "64 features" in page.of("summary")
    for title in ("Loss", "Accuracy", "Learning rate", "Gradient norm", "Confusion matrix: digit"):
        assert title in page.of("text")
    assert "best step 360 (0.978)" in page.of("text")
    assert "loss (log scale)" in page.of("text")


def test_largest_mistakes_of_a_classifier(tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "run")
    columns = {
        "row": [11, 22, 33, 44],
        "truth": ["0", "1", "2", "3"],
        "prediction": ["0", "7", "8", "3"],
        "loss": [5.0, 2.5, 3.75, 0.1],
        "probability": [0.9, 0.625, 0.875, 0.9],
        "truth_probability": [0.9, 0.25, 0.125, 0.9],
    }
    folders.predictions(folder, columns)
    page = report(folder)
    cells = page.of("td")
    first = cells.index("33")
    assert cells[first : first + 6] == ["33", "2", "8", "0.8750", "0.1250", "3.750"]
    assert cells[first + 6 : first + 12] == ["22", "1", "7", "0.6250", "0.2500", "2.500"]
    assert "11" not in cells, "a right answer is no mistake, whatever its loss"
    assert "2 of 4 test rows right: 50.0 % (95 % interval 15.0 to 85.0 %)." in page.of("p")


def test_regressor_with_intervals(tmp_path: Path) -> None:
    page = report(folders.regressor(tmp_path / "run"))
    columns = folders.value_columns(300)
    inside = int(((columns["low"] <= columns["truth"]) & (columns["truth"] <= columns["high"])).sum())
    caption = next(text for text in page.of("figcaption") if "truths lie within" in text)
    assert f"{inside} of 300 truths lie within their interval: {inside / 3:.1f} %" in caption
    assert "nominal 90.0 %" in caption
    assert "truth within its 90 % interval" in page.of("text")
    assert "nominal 90 %" in page.of("text")
    assert page.of("b") == ["0.9033"]
    error = columns["prediction"] - columns["truth"]
    worst = int(np.argmax(np.abs(error)))
    cells = page.of("td")
    assert cells[cells.index(str(columns["row"][worst])) + 1] == f"{columns['truth'][worst]:#.4g}"
    assert f"{abs(error[worst]):#.4g}" in cells[cells.index(str(columns["row"][worst])) + 3]


def test_regressor_without_intervals(tmp_path: Path) -> None:
    page = report(folders.regressor(tmp_path / "run", level=None))
    assert "Residuals" in page.of("text")
    assert not any("truths lie within" in text for text in page.of("figcaption"))
    assert "low" not in page.of("th")


def test_each_target_has_a_section(tmp_path: Path) -> None:
    page = report(folders.several(tmp_path / "run"))
    assert page.of("h2")[2:4] == ["Target: kind", "Target: price"]
    assert page.of("b") == ["0.9321", "0.8123"]
    assert {"test kind: accuracy", "test price: R²"} <= set(page.of("span"))
    assert "Confusion matrix: kind" in page.of("text")
    assert "prediction − truth (price)" in page.of("text")


def test_unfinished(tmp_path: Path) -> None:
    folder = folders.config(tmp_path / "run")
    page = report(folder)
    assert "It has recorded no measures either" in page.text
    assert page.of("h2") == ["Configuration", "Repeat this run"]
    folders.metrics(folder, [*folders.learning()[:8], '{"format":1,"st'])
    page = report(folder)
    assert "This run is unfinished" in page.text
    assert "up to step 80 (epoch 4)" in page.text
    assert "The last line of metrics.jsonl was cut off and is left out." in page.of("li")
    assert page.of("h2") == ["Measures", "Curves", "Configuration", "Repeat this run"]
    assert page.of("b") == ["0.7691"], "validation accuracy 0.98 − 0.8·exp(−80/60)"


def test_results_that_are_not_as_expected(tmp_path: Path) -> None:
    missed = {"text": "test accuracy ≥ 0.99", "met": False}
    page = report(folders.classifier(tmp_path / "run", expected=missed, stopped="interrupted"))
    assert "✗ not as expected: test accuracy ≥ 0.99" in page.of("span")
    assert any("was interrupted" in text for text in page.of("li"))
    unknown = {"text": "test accuracy ≥ 0.99", "met": None}
    page = report(folders.classifier(tmp_path / "other", expected=unknown))
    assert "expected on the built-in data: test accuracy ≥ 0.99" in page.of("span")


def test_hostile_names_are_text(tmp_path: Path) -> None:
    classes = [SCRIPT, '" onmouseover="alert(1)', "a $\\frac{1}{$ b", "]]> --> &amp; \u202e\ud800"]
    folder = folders.classifier(
        tmp_path / "run",
        classes=[*classes[:3], "plain"],
        warnings=[SCRIPT, classes[3]],
        summary=SCRIPT,
        features=[SCRIPT, "</details>"],
        data=SCRIPT,
        device=SCRIPT,
        layers=[{"name": SCRIPT, "kind": "</table>", "output_shape": [SCRIPT], "parameters": 1}],
        targets=[{"name": SCRIPT, "kind": "classification", "classes": classes, "prefix": ""}],
        measures={"test": {SCRIPT: 0.5, "</svg><img src=x>": 0.25}},
    )
    folders.metrics(folder, [folders.line(step, "train", **{SCRIPT: 1.0, "$x": 2.0}) for step in (1, 2)])
    config = (folder / "config.toml").read_text(encoding="utf-8")
    config = config.replace("[options]", f'[options]\n"</dl>" = "{SCRIPT}"')
    (folder / "config.toml").write_text(config, encoding="utf-8")
    page = report(folder)
    assert page.tags["img"] == 0
    assert SCRIPT in page.of("td")
    assert SCRIPT in page.of("dd")
    assert SCRIPT in page.of("li")
    assert '" onmouseover="alert(1)' in page.of("td")
    assert "a $\\frac{1}{$ b" in page.of("text"), "a label is shown as it is written"


def test_a_hundred_classes(tmp_path: Path) -> None:
    names = [f"species {i:03d}" for i in range(100)]
    page = report(folders.classifier(tmp_path / "run", classes=names, samples=2000))
    assert any("most confused of 100 classes" in text for text in page.of("figcaption"))
    assert "others" in page.of("text")
    assert sum(text.startswith("species") for text in page.of("text")) <= 2 * 15


@pytest.mark.parametrize(("rows", "value"), [(1, 0.0), (2, 7.25), (7, -1e-12), (1, 1e12)])
def test_constant_predictions_of_few_rows(tmp_path: Path, rows: int, value: float) -> None:
    folder = folders.regressor(tmp_path / "run")
    same = [value] * rows
    columns = {"row": range(1, rows + 1), "truth": same, "prediction": same, "loss": [0.0] * rows}
    columns = {name: list(column) for name, column in columns.items()}
    folders.predictions(folder, {**columns, "low": same, "high": same}, b"0.9")
    page = report(folder)
    assert any(f"{rows} of {rows} truths lie within" in text for text in page.of("figcaption"))


def test_errors_that_differ_by_rounding_alone(tmp_path: Path) -> None:
    folder = folders.regressor(tmp_path / "run")
    columns = {"row": [1, 2, 3], "truth": [0.0] * 3, "prediction": [5.0, 5.0, float(np.nextafter(5.0, 6.0))]}
    folders.predictions(folder, columns)
    assert "Mean 5, standard deviation" in report(folder).text


def test_constant_class_and_one_row(tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "run")
    one = {"row": [5], "truth": ["3"], "prediction": ["3"], "loss": [0.5], "probability": [0.6]}
    folders.predictions(folder, {**one, "truth_probability": [0.6]})
    page = report(folder)
    assert "1 of 1 test rows right" in page.text
    assert "Least sure answers" in page.of("h3")
    many = {"row": list(range(9)), "truth": [str(i) for i in range(9)], "prediction": ["4"] * 9}
    folders.predictions(folder, many)
    assert "1 of 9 test rows right" in report(folder).text
    folders.predictions(folder, {"row": [1], "truth": [None], "prediction": ["4"]})
    assert "No row of the test split has both a truth and a prediction." in report(folder).text


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    folder = folders.config(tmp_path / "run")
    losses = [1.0, 0.5, math.nan, math.inf, 1e305]
    lines = [folders.line(i, "train", loss=loss, lr=math.nan) for i, loss in enumerate(losses)]
    folders.metrics(folder, lines)
    page = report(folder)
    assert "loss: Not finite and left out: 3 of 5 train values (first at step 2)." in page.of("li")
    assert "Loss" in page.of("text")
    assert "Learning rate" not in page.of("text"), "a curve without any value is not drawn"
    assert page.of("b") == ["not a number"]
    folder = folders.regressor(tmp_path / "other")
    columns = folders.value_columns(30)
    for name in ("loss", "low", "high", "prediction"):
        columns[name][[3, 4]] = math.nan, math.inf
    folders.predictions(folder, columns, b"0.9")
    said = "2 rows without a truth or with a prediction that is no number are left out."
    assert said in report(folder).of("p")


def test_pictures_of_a_recipe(tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "run")
    assert "Pictures" not in report(folder).of("h2")
    (folder / "figures").mkdir()
    fig = figure()
    axes = fig.subplots()
    axes.plot([1, 2], [3, 4], "o-")
    axes.set_title(SCRIPT)
    (folder / "figures" / "bias_by-degree.svg").write_text(to_svg(fig), encoding="utf-8")
    captions = {"bias_by-degree.svg": {"title": "Bias <b>", "caption": "Five folds."}}
    (folder / "figures" / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    page = report(folder)
    assert "Bias <b>. Five folds." in page.of("figcaption")
    assert SCRIPT in page.of("text")
    assert page.tags["img"] == 0
    (folder / "figures" / "captions.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"captions\.json is damaged"):
        quire.report.write(folder)


SVG = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">%s</svg>'


@pytest.mark.parametrize(
    "content",
    [
        "<script>alert(1)</script>",
        '<g onload="alert(1)"/>',
        '<image href="https://example.org/x.png"/>',
        '<image xlink:href="javascript:alert(1)"/>',
        '<use href="other.svg#a"/>',
        '<rect style="fill: url(https://example.org/x)"/>',
        '<rect style="fill: ur\\6c(https://example.org/x)"/>',
        "<style>@import 'https://example.org/x'</style>",
        "<foreignObject><p>x</p></foreignObject>",
        '<x:script xmlns:x="http://www.w3.org/1999/xhtml">alert(1)</x:script>',
        "<a><text>x</text></a>",
        "not closed <g>",
    ],
)
def test_a_picture_that_could_do_more_than_be_seen_is_an_image(tmp_path: Path, content: str) -> None:
    folder = folders.config(tmp_path / "run")
    (folder / "figures").mkdir()
    drawn = f'<path d="M 0 0 L 1 1" style="stroke: {INK}"/>'
    (folder / "figures" / "one.svg").write_text(SVG % (drawn + content), encoding="utf-8")
    page = report(folder)
    assert (page.tags["img"], page.tags["svg"]) == (1, 0)
    (folder / "figures" / "one.svg").write_text(SVG % drawn, encoding="utf-8")
    page = report(folder)
    assert (page.tags["img"], page.tags["svg"]) == (0, 1)


def test_the_same_folder_gives_the_same_report(tmp_path: Path) -> None:
    folder = folders.several(tmp_path / "run")
    first = quire.report.write(folder).read_bytes()
    assert quire.report.write(folder).read_bytes() == first


def test_a_failure_leaves_the_old_report(tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "run")
    before = quire.report.write(folder).read_bytes()
    (folder / "predictions.parquet").write_bytes(b"PAR1")
    with pytest.raises(CheckpointError):
        quire.report.write(folder)
    assert (folder / "report.html").read_bytes() == before
    with pytest.raises(CheckpointError, match="is no run folder"):
        quire.report.write(tmp_path)
    assert os.listdir(tmp_path) == ["run"]


def test_a_report_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.classifier(tmp_path / "run")
    before = quire.report.write(folder).read_bytes()
    folders.result(folder, parameters=1)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        quire.report.write(folder)
    assert (folder / "report.html").read_bytes() == before
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_a_validation_report_where_there_is_no_test_split(tmp_path: Path) -> None:
    folder = folders.classifier(
        tmp_path / "run",
        measures={"train": {"accuracy": 0.99}, "validation": {"accuracy": 0.9512}},
        rows={"train": 100, "validation": 30, "test": 0},
        expected={},
    )
    page = report(folder)
    assert page.of("b") == ["0.9512"]
    assert "validation rows right" in page.text
    assert not any("expected" in text for text in page.of("span"))


def test_long_model_tables_are_folded(tmp_path: Path) -> None:
    layer = {"kind": "Linear", "output_shape": [8, 8], "parameters": 4}
    layers = [{**layer, "name": f"block.{i}"} for i in range(90)]
    page = report(folders.classifier(tmp_path / "run", layers=layers, parameters=360))
    assert "90 layers, 360 parameters" in page.of("summary")
    assert "8 × 8" in page.of("td")


def test_no_tensor_library_is_loaded(tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "run")
    program = (
        "import sys, quire.report\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"quire.report.write({str(folder)!r})\n"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
