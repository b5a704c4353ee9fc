"""The recipe `nadaraya-watson`: how its width is found, what it refuses, and its pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import quire.recipes  # noqa: F401
from quire.data.load import TableData
from quire.errors import InputError
from quire.options import LoRA, Table, Tune
from quire.recipes import pooling, pooling_pictures
from quire.recipes.base import RECIPES
from quire.recipes.execute import execute
from quire.recipes.plan import Plan
from quire.report.style import to_svg
from quire.runs import load
from quire.tasks.kernel import LeaveOneOut
from tests.recipes.examples import write_csv

pytestmark = pytest.mark.slow

RECIPE = RECIPES["nadaraya-watson"]


def write_numbers(path: Path, rows: int = 80, classes: int = 0, seed: int = 0) -> Path:
    """y depends on b and d of four numbers; as a number, or as one of some classes."""
    generator = np.random.default_rng(seed)
    x = generator.normal(10, 3, (rows, 4))
    y = np.sin((x[:, 1] - 10) / 3) + ((x[:, 3] - 10) / 3) ** 2 + generator.normal(0, 0.1, rows)
    last: Any = y
    if classes:
        ranks = np.argsort(np.argsort(y))
        last = [f"class {rank * classes // rows}" for rank in ranks]
    lines = [
        "a,b,c,d,y",
        *(",".join([*(f"{v:.5f}" for v in row), str(t)]) for row, t in zip(x, last, strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def options(data: Path | None, **model: Any) -> Any:
    return pooling.KernelOptions(data=data, quiet=True, model=pooling.KernelWidth(**model))


def built(data: Path, **model: Any) -> tuple[Plan, LeaveOneOut]:
    plan = RECIPE.build(options(data, **model))
    assert isinstance(plan.task, LeaveOneOut)
    return plan, plan.task


def boxcar_loss(x: np.ndarray, y: np.ndarray, width: float) -> float:
    """½(ŷ − y)² of each row from the others within reach, or from the nearest; all pairs at once."""
    distances = np.linalg.norm(x[:, None] - x[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    inside = (distances <= width).astype(float)
    alone = inside.sum(1) == 0
    inside[alone, distances[alone].argmin(1)] = 1
    return float(0.5 * np.mean((inside @ y / inside.sum(1) - y) ** 2))


# The width ------------------------------------------------------------------------------------


def test_a_gaussian_begins_at_the_rule_of_thumb(tmp_path: Path) -> None:
    plan, task = built(write_numbers(tmp_path / "mine.csv"))
    assert task.model.width.item() == pytest.approx(len(plan.data.train) ** (-1 / 8))
    assert plan.before is None
    assert plan.notes == []
    assert built(tmp_path / "mine.csv", width=0.25)[1].model.width.item() == pytest.approx(0.25)


@pytest.mark.usefixtures("unseen")
def test_a_boxcar_takes_the_best_of_the_candidates_and_keeps_it(tmp_path: Path) -> None:
    data = write_numbers(tmp_path / "mine.csv")
    outcome = execute(RECIPE, dataclasses.replace(options(data, kernel="boxcar"), out=tmp_path / "run"))
    plan, _ = built(data, kernel="boxcar")
    x = plan.data.train.inputs.double().numpy()  # type: ignore[attr-defined]
    y = plan.data.train.target.double().numpy()  # type: ignore[attr-defined]
    y = (y - y.mean()) / y.std()
    widths = pooling.candidate_widths(pooling.rule_of_thumb(*x.shape))
    assert len(widths) == 25
    assert widths[-1] / widths[0] == pytest.approx(256)
    losses = [boxcar_loss(x, y, width) for width in widths]
    found = load(outcome.run).task
    assert isinstance(found, LeaveOneOut)
    assert found.model.width.item() == pytest.approx(widths[int(np.argmin(losses))], rel=1e-6)
    assert outcome.measures["train"]["loss"] == pytest.approx(min(losses), rel=1e-4)
    assert "best of 25 widths in leave-one-out" in plan.notes[0]
    assert "a boxcar has no gradient" in plan.notes[1]
    assert set(plan.notes) <= set(outcome.warnings)


@pytest.mark.usefixtures("unseen")
def test_a_boxcar_keeps_the_width_that_it_is_given(tmp_path: Path) -> None:
    chosen = options(write_numbers(tmp_path / "mine.csv"), kernel="boxcar", width=0.7)
    outcome = execute(RECIPE, dataclasses.replace(chosen, out=tmp_path / "run", epochs=3))
    found = load(outcome.run).task
    assert isinstance(found, LeaveOneOut)
    assert found.model.width.item() == pytest.approx(0.7, rel=1e-6)


@pytest.mark.usefixtures("unseen")
def test_an_epanechnikov_goes_on_from_the_best_candidate(tmp_path: Path) -> None:
    """One step from there; a resumed run goes on from its checkpoint, not from the candidates again."""
    data = write_numbers(tmp_path / "mine.csv")
    chosen = dataclasses.replace(options(data, kernel="epanechnikov", per_feature=True), epochs=1)
    plan, task = built(data, kernel="epanechnikov", per_feature=True)
    assert plan.before is not None
    plan.before(torch.device("cpu"), None)  # type: ignore[arg-type]
    start = task.model.log_width.detach().clone()
    assert len(set(start.tolist())) == 1

    def widths(run: Path) -> torch.Tensor:
        found = load(run).task
        assert isinstance(found, LeaveOneOut)
        return found.model.log_width.detach()

    execute(RECIPE, dataclasses.replace(chosen, out=tmp_path / "run"))
    first = widths(tmp_path / "run") - start
    torch.testing.assert_close(first.abs(), torch.full((4,), 0.05), rtol=1e-3, atol=0)  # Adam's first step
    execute(RECIPE, dataclasses.replace(chosen, out=tmp_path / "longer", epochs=4))
    execute(RECIPE, dataclasses.replace(chosen, resume=tmp_path / "run", epochs=4))
    assert torch.equal(widths(tmp_path / "run"), widths(tmp_path / "longer"))


@pytest.mark.usefixtures("unseen")
def test_widths_of_features_tell_what_matters(tmp_path: Path) -> None:
    data = write_numbers(tmp_path / "mine.csv", rows=300)
    outcome = execute(RECIPE, dataclasses.replace(options(data, per_feature=True), out=tmp_path / "run"))
    found = load(outcome.run).task
    assert isinstance(found, LeaveOneOut)
    a, b, c, d = found.model.width.tolist()
    assert max(b, d) < 0.5 * min(a, c)
    one = execute(RECIPE, dataclasses.replace(options(data), out=tmp_path / "one"))
    assert outcome.measures["test"]["r2"] > one.measures["test"]["r2"] + 0.05


@pytest.mark.usefixtures("unseen")
def test_predictions_are_sums_over_the_training_rows(tmp_path: Path) -> None:
    data = write_numbers(tmp_path / "mine.csv")
    outcome = execute(RECIPE, dataclasses.replace(options(data, width=0.5), out=tmp_path / "run", epochs=1))
    plan, _ = built(data)
    run = load(outcome.run)
    assert isinstance(run.task, LeaveOneOut)
    width = run.task.model.width.item()
    lines = data.read_text().splitlines()[1:]
    table = np.array([[float(cell) for cell in line.split(",")] for line in lines])
    rows = [line - 2 for line in plan.data.lines("train").tolist()]
    mean, spread = table[rows, :4].mean(0), table[rows, :4].std(0)
    x = (table[:, :4] - mean) / spread
    squared = np.square(x[:, None] - x[rows][None]).sum(-1)
    weights = np.exp(-0.5 * squared / width**2)
    wanted = weights @ table[rows, 4] / weights.sum(1)
    np.testing.assert_allclose(run.predict(data)["prediction"].to_numpy(), wanted, rtol=1e-3, atol=1e-4)


# What is refused ------------------------------------------------------------------------------


def test_what_cannot_be_learned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--model\.per_feature with --model\.kernel boxcar"):
        pooling.KernelWidth(kernel="boxcar", per_feature=True)
    with pytest.raises(InputError, match=r"--model\.width is -1"):
        pooling.KernelWidth(width=-1)
    with pytest.raises(InputError, match="--tune with nadaraya-watson"):
        pooling.KernelOptions(tune=Tune(lora=LoRA(rank=4)))
    (tmp_path / "few.csv").write_text("a,b\n1,2.5\n3,4.1\n5,7.7\n")
    with pytest.raises(InputError, match="1 training row"):
        RECIPE.build(options(tmp_path / "few.csv"))


# Pictures -------------------------------------------------------------------------------------


def pictures(data: Path, **model: Any) -> tuple[dict[str, Any], LeaveOneOut, Plan]:
    plan, task = built(data, **model)
    assert plan.pictures is not None
    found = {picture.name: picture for picture in plan.pictures()}
    for picture in found.values():
        assert to_svg(picture.figure).startswith("<svg")
    return found, task, plan


def axes_of(fig: Figure) -> list[Any]:
    return [axes for axes in fig.axes if axes.get_label() != "<colorbar>"]


def test_the_two_features_that_matter_are_drawn_in_their_own_units(tmp_path: Path) -> None:
    data = write_numbers(tmp_path / "mine.csv")
    found, task, plan = pictures(data, width=0.5)
    left, right = axes_of(found["fit"].figure)
    names = {left.get_xlabel(), left.get_ylabel()}
    assert names == {right.get_xlabel(), right.get_ylabel()} == {"b", "d"}
    table = np.loadtxt(data, delimiter=",", skiprows=1)
    rows = [line - 2 for line in plan.data.lines("train").tolist()]
    column = {"b": 1, "d": 3}
    edges = [table[rows, column[name]] for name in (left.get_xlabel(), left.get_ylabel())]
    wanted = [edge(values) for values in edges for edge in (np.min, np.max)]
    np.testing.assert_allclose(left.images[0].get_extent(), wanted, rtol=1e-5)
    # The fit at the lower right corner, others at their medians, by the model itself.
    inputs = plan.data.train.inputs  # type: ignore[attr-defined]
    query, across, up = inputs.median(0).values.clone(), column[left.get_xlabel()], column[left.get_ylabel()]
    query[across], query[up] = inputs[:, across].max(), inputs[:, up].min()
    corner = task.predict(query[None])["value"].item()
    assert left.images[0].get_array()[0, -1] == pytest.approx(corner, rel=1e-5)
    assert right.collections[0].get_array().sum() == pytest.approx(1)
    assert "The other 2 features" in found["fit"].caption


def test_one_feature_is_drawn_as_a_line_with_all_weights(tmp_path: Path) -> None:
    x = np.linspace(0, 5, 60)
    lines = [f"{a:.4f},{np.sin(a):.4f}" for a in x]
    (tmp_path / "mine.csv").write_text("\n".join(["x,y", *lines]) + "\n")
    for kernel in ("gaussian", "boxcar", "epanechnikov"):
        found, task, plan = pictures(tmp_path / "mine.csv", kernel=kernel, width=0.3)
        left, right = axes_of(found["fit"].figure)
        weights = right.images[0].get_array()
        assert weights.shape == (200, len(plan.data.train))
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
        line = next(line for line in left.lines if line.get_label() == "fit")
        order = task.model.keys[:, 0].argsort()
        answers = weights @ task.model.values[order, 0].numpy()
        target = plan.data.train.target.numpy()  # type: ignore[attr-defined]
        np.testing.assert_allclose(
            line.get_ydata(), answers * target.std() + target.mean(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("classes", [2, 3, 8])
def test_classes_are_drawn_whatever_their_number(classes: int, tmp_path: Path) -> None:
    found, _, _ = pictures(write_numbers(tmp_path / "mine.csv", 160, classes), width=0.5)
    left, _ = axes_of(found["fit"].figure)
    legend = left.get_legend()
    shown = [] if legend is None else [text.get_text() for text in legend.get_texts()]
    assert shown == ([f"class {c}" for c in range(classes)] if classes <= 6 else [])


def test_tables_of_categories_constants_and_dates_have_pictures(tmp_path: Path) -> None:
    rows = [
        f"{'red' if i % 2 else 'blue'},{'x' if i % 3 else 'y'},{i % 2 + 0.1 * (i % 3)}" for i in range(40)
    ]
    (tmp_path / "words.csv").write_text("\n".join(["colour,mark,y", *rows]) + "\n")
    found, _, _ = pictures(tmp_path / "words.csv")
    assert axes_of(found["fit"].figure)[0].get_xlabel() in ("colour=blue", "colour=red", "mark=x", "mark=y")
    (tmp_path / "same.csv").write_text("\n".join(["a,y", *(f"1,{i % 5}.5" for i in range(40))]) + "\n")
    pictures(tmp_path / "same.csv")
    mine = write_csv(tmp_path / "mine.csv")
    plan = RECIPE.build(
        dataclasses.replace(options(mine), target="value", table=Table(drop=("size", "kind")))
    )
    assert plan.pictures is not None
    axes = axes_of(plan.pictures()[0].figure)[0]
    assert "day (in deviations)" in (axes.get_xlabel(), axes.get_ylabel())


def test_the_curve_of_widths_holds_the_run_s_own(tmp_path: Path) -> None:
    found, task, plan = pictures(write_numbers(tmp_path / "mine.csv"), kernel="boxcar", width=0.9)
    (axes,) = axes_of(found["width"].figure)
    curve, own = axes.lines
    x = plan.data.train.inputs.double().numpy()  # type: ignore[attr-defined]
    y = plan.data.train.target.double().numpy()  # type: ignore[attr-defined]
    y = (y - y.mean()) / y.std()
    losses = [boxcar_loss(x, y, width) for width in curve.get_xdata()]
    np.testing.assert_allclose(curve.get_ydata(), losses, rtol=1e-4)
    assert own.get_xdata()[0] == pytest.approx(0.9)
    assert own.get_ydata()[0] == pytest.approx(boxcar_loss(x, y, 0.9), rel=1e-4)
    assert isinstance(plan.data, TableData)
    pooling.leave_one_out_losses(task, plan.data.train, [0.1, 7.0], seed=0)
    assert task.model.width.item() == pytest.approx(0.9)  # what was tried is put back
    found, task, _ = pictures(tmp_path / "mine.csv", per_feature=True)
    (axes,) = axes_of(found["width"].figure)
    assert sorted(label.get_text() for label in axes.get_yticklabels()) == ["a", "b", "c", "d"]


def test_sensitivity_is_the_change_from_half_a_deviation_below_to_half_above(tmp_path: Path) -> None:
    _, task = built(write_numbers(tmp_path / "mine.csv"), width=0.5)
    inputs = task.model.keys[:7]
    found = pooling_pictures.sensitivity(task.model, inputs)
    for d in range(4):
        step = 0.5 * torch.eye(4)[d]
        change = [task.model((x + step)[None]) - task.model((x - step)[None]) for x in inputs]
        wanted = torch.stack(change).square().mean().sqrt()
        assert found[d].item() == pytest.approx(wanted.item(), rel=1e-4)
