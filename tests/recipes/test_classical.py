"""PCA, K-means and mixtures on files of one's own: any number of columns, in memory and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score

import quire.recipes  # noqa: F401
from quire.errors import InputError
from quire.options import Rows
from quire.recipes.base import RECIPES
from quire.recipes.execute import Outcome, execute
from quire.runs import load

pytestmark = pytest.mark.slow

GIVEN: dict[str, dict[str, Any]] = {
    "pca": {"components": 1},
    "kmeans": {"clusters": 3},
    "gmm": {"clusters": 3, "starts": 2},
}


def blobs(columns: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    random = np.random.default_rng(0)
    centres = 20 * np.eye(3, columns) + 7
    return centres.repeat(60, 0) + random.normal(size=(180, columns))


def write(rows: np.ndarray[Any, Any], path: Path) -> Path:
    names = ",".join(f"column{i}" for i in range(rows.shape[1]))
    path.write_text(names + "\n" + "\n".join(",".join(f"{v:.6f}" for v in row) for row in rows) + "\n")
    return path


def run(name: str, data: Path, out: Path, **given: Any) -> Outcome:
    recipe = RECIPES[name]
    return execute(recipe, recipe.options(data=data, out=out, quiet=True, **GIVEN[name], **given))


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("name", sorted(GIVEN))
def test_any_number_of_columns(name: str, columns: int, tmp_path: Path) -> None:
    data = write(blobs(columns), tmp_path / "points.csv")
    run(name, data, tmp_path / "run")
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "column0" in report
    assert len(load(tmp_path / "run").predict(data)) > 0


def test_scores_lie_along_scikit_learns_first_component(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    rows = np.outer(random.normal(size=180), [1, 2, 3, 2, 1]) + 0.3 * random.normal(size=(180, 5))
    run("pca", write(rows, tmp_path / "points.csv"), tmp_path / "run")
    ours = load(tmp_path / "run").predict(tmp_path / "points.csv").column(0).to_numpy()
    centred = (rows - rows.mean(0)) / rows.std(0)
    other = PCA(1).fit_transform(centred)[:, 0]
    assert abs(np.corrcoef(ours, other)[0, 1]) > 0.999


def test_streamed_rows_give_the_same_clusters(tmp_path: Path) -> None:
    np.save(tmp_path / "points.npy", blobs(4).astype(np.float32))
    data = tmp_path / "points.npy"
    whole = run("kmeans", data, tmp_path / "whole")
    streamed = run("kmeans", data, tmp_path / "streamed", table=Rows(memory=1e-9))
    assert streamed.measures["test"]["loss"] == pytest.approx(whole.measures["test"]["loss"], rel=0.3)
    labels = KMeans(3, n_init=5, random_state=0).fit_predict(blobs(4))
    for name in ("whole", "streamed"):
        ours = load(tmp_path / name).predict(data)["cluster"].to_numpy()
        assert adjusted_rand_score(labels, ours) == 1.0


def test_more_clusters_than_rows_are_refused(tmp_path: Path) -> None:
    data = write(blobs(2)[:4], tmp_path / "points.csv")
    recipe = RECIPES["kmeans"]
    with pytest.raises(InputError, match="clusters"):
        execute(recipe, recipe.options(data=data, out=tmp_path / "run", quiet=True, clusters=50))
    assert not (tmp_path / "run").exists()
