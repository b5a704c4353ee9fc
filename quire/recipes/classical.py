"""Recipes that learn by statistics, without a target: pca, kmeans, gmm. Rows of any table, or images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from quire.errors import InputError
from quire.options import check_range
from quire.recipes.base import Expectation, recipe
from quire.recipes.unlabelled import UnlabelledSweeps

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from quire.recipes.plan import Picture, Plan
    from quire.recipes.unlabelled import Unlabelled
    from quire.train import StatisticsTask

SHOWN = 2000
"""Rows of which pictures are drawn."""
UNBOUNDED = 10**9
"""Iterations of K-means itself; the trainer counts sweeps."""
FEW = 10
"""Images that are shown with what is left of them."""


@dataclass(frozen=True, kw_only=True)
class PCAOptions(UnlabelledSweeps):
    components: int = 16
    """How many directions are kept; fewer where the data has fewer."""
    share: float | None = None
    """Keep as many as explain this share of the variance, instead."""
    solver: Literal["auto", "exact", "randomised"] = "auto"
    """randomised is faster where many columns are reduced to few components."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", components=">= 1", share="(0, 1)")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(UnlabelledSweeps):
    clusters: int | None = None
    """How many; without it as many as the data has classes, or 8."""
    starts: int = 10
    """Beginnings that are tried side by side; the best is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", clusters=">= 1", starts=">= 1")


@dataclass(frozen=True, kw_only=True)
class KMeansOptions(ClusterOptions):
    init: Literal["k-means++", "random"] = "k-means++"
    tolerance: float = 1e-4
    """Stop when centres move by less than this share of the mean variance of a feature."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", tolerance=">= 0")


@dataclass(frozen=True, kw_only=True)
class MixtureOptions(ClusterOptions):
    starts: int = 5
    covariance: Literal["full", "tied", "diag", "spherical"] = "full"
    """Of a component: any, the same for all, without correlations, or round."""
    floor: float = 1e-3
    """Added to every variance, so that no component shrinks to a point."""
    tolerance: float = 1e-4
    """Stop when the mean log-likelihood of a row rises by less."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "--", floor=">= 0", tolerance=">= 0")


@recipe(
    "pca",
    summary="Principal components: the plane nearest to the rows, what it explains and what it leaves",
    expected=Expectation("explained_share", at_least=0.8),
    targets="rows",
    options=PCAOptions,
)
def pca(options: PCAOptions) -> Plan:
    from quire.recipes.plan import Plan
    from quire.recipes.unlabelled import load_unlabelled
    from quire.tasks.components import PrincipalComponents

    found = load_unlabelled(options, "digits")
    wanted: int | float = options.share or min(options.components, found.numbers, len(found.data.train))
    task = PrincipalComponents(found.numbers, wanted, solver=options.solver)
    return Plan(task, found.data, options, pictures=lambda: pca_pictures(task, found))


@recipe(
    "kmeans",
    summary="K-means: centres of clusters, from several starts at once",
    expected=Expectation("agreement", at_least=0.7),
    targets="rows",
    options=KMeansOptions,
)
def kmeans(options: KMeansOptions) -> Plan:
    from quire.recipes.unlabelled import load_unlabelled
    from quire.tasks.kmeans import KMeansTask

    found = load_unlabelled(options, "wine")
    task = KMeansTask(
        found.numbers, cluster_count(options, found), init=options.init, starts=options.starts,
        tol=options.tolerance, max_iter=UNBOUNDED,
    )  # fmt: skip
    return cluster_plan(options, found, task, "cluster", lambda: (task.centres[int(task.best)], None))


@recipe(
    "gmm",
    summary="Gaussian mixture by expectation and maximisation: clusters with their shapes and densities",
    expected=Expectation("agreement", at_least=0.7),
    targets="rows",
    options=MixtureOptions,
)
def gmm(options: MixtureOptions) -> Plan:
    from quire.recipes.unlabelled import load_unlabelled
    from quire.tasks.mixture import MixtureTask

    found = load_unlabelled(options, "wine")
    task = MixtureTask(
        found.numbers, cluster_count(options, found), covariance_type=options.covariance,
        starts=options.starts, tol=options.tolerance, reg_covar=options.floor,
    )  # fmt: skip

    def shapes() -> tuple[Tensor, Tensor]:
        mixture = task.mixture()
        return mixture.means, full_covariances(mixture.covariances, options.covariance, mixture.means)

    return cluster_plan(options, found, task, "component", shapes)


def cluster_count(options: ClusterOptions, found: Unlabelled) -> int:
    count = options.clusters or len(found.classes) or 8
    if count > len(found.data.train):
        raise InputError(
            f"--clusters {count} for {len(found.data.train)} training rows",
            expected="at most as many clusters as rows",
        )
    return count


def cluster_plan(
    options: ClusterOptions,
    found: Unlabelled,
    task: StatisticsTask,
    column: str,
    shapes: Callable[[], tuple[Tensor, Tensor | None]],
) -> Plan:
    """A plan whose measures compare clusters with classes, where the data has them."""
    import torch

    from quire.recipes.plan import Plan

    @torch.no_grad()
    def agreement() -> dict[str, float]:
        from sklearn.metrics import adjusted_rand_score

        if not found.classes:
            return {}
        _, clusters, labels = shown_rows(task, found, column, most=None)
        return {"agreement": float(adjusted_rand_score(labels, clusters))}

    def pictures() -> list[Picture]:
        return cluster_pictures(task, found, column, shapes())

    return Plan(task, found.data, options, pictures=pictures, extra_measures=agreement)


def full_covariances(covariances: Tensor, kind: str, means: Tensor) -> Tensor:
    """Any kind of covariances as matrices (K, D, D)."""
    import torch

    count, size = means.shape
    if kind == "full":
        return covariances
    if kind == "tied":
        return covariances.expand(count, size, size)
    if kind == "diag":
        return torch.diag_embed(covariances)
    return covariances[:, None, None] * torch.eye(size, dtype=means.dtype, device=means.device)


# Pictures ---------------------------------------------------------------------------------------


def shown_rows(
    task: Any, found: Unlabelled, column: str, most: int | None = SHOWN
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the shown part, what the task says of them, and their classes (−1 where there are none)."""
    import numpy as np
    import torch

    from quire.train.statistics import as_rows

    part = found.shown
    count = len(part) if most is None else min(len(part), most)
    rows, said, labels = [], [], []
    for batch in part.batches(torch.linspace(0, len(part) - 1, count).round().long(), 4096):
        batch = batch.to(task.device)
        rows.append(as_rows(batch.inputs).cpu().double().numpy())
        said.append(task.predict(batch.inputs)[column].cpu().numpy())
        target = batch.fields.get("target") if found.classes else None
        labels.append(np.full(len(batch), -1) if target is None else target.cpu().numpy())
    return np.concatenate(rows), np.concatenate(said), np.concatenate(labels)


def own_units(found: Unlabelled) -> tuple[np.ndarray, np.ndarray]:
    """Shift and factor that bring features back to a table's own units: where there are so few of them that
    they are drawn themselves."""
    import numpy as np

    from quire.data.preparation import Preparation

    preparation, size = found.data.preparation, found.numbers
    if isinstance(preparation, Preparation) and size <= 2:
        columns = preparation.inputs
        if len(columns) == size and all(column.kind == "number" for column in columns):
            return np.array([c.center for c in columns]), np.array([c.scale for c in columns])
    return np.zeros(size), np.ones(size)


def cluster_pictures(
    task: Any, found: Unlabelled, column: str, shapes: tuple[Tensor, Tensor | None]
) -> list[Picture]:
    import numpy as np

    from quire.recipes.plan import Picture
    from quire.report.classical import clusters_figure
    from quire.report.latent import samples_grid_figure
    from quire.report.reconstructions import latent_figure

    rows, clusters, labels = shown_rows(task, found, column)
    centres, covariances = shapes
    middle = centres.detach().cpu().double().numpy()
    shift, unit = own_units(found)
    spread = None if covariances is None else covariances.detach().cpu().numpy() * np.outer(unit, unit)
    drawn = clusters_figure(
        rows * unit + shift, clusters, middle * unit + shift, spread,
        features=found.data.preparation.feature_names,
    )  # fmt: skip
    pictures = [Picture("clusters", "Clusters", "Rows of the test part by the cluster they are in.", drawn)]
    if found.classes:
        by_class = latent_figure(rows, labels, found.classes, "The same rows by class")
        pictures.append(Picture("classes", "Classes", "Classes, which clustering did not know.", by_class))
    if found.images:
        grid = samples_grid_figure(255 * middle.reshape(-1, *found.shape).clip(0, 1))
        pictures.append(Picture("centres", "Centres", "The centre of each cluster as an image.", grid))
    return pictures


def pca_pictures(task: Any, found: Unlabelled) -> list[Picture]:
    import torch

    from quire.recipes.plan import Picture
    from quire.report.classical import scree_figure
    from quire.report.reconstructions import latent_figure, reconstruction_figure
    from quire.train.statistics import as_rows

    _, scores, labels = shown_rows(task, found, "scores")
    scree = scree_figure(task.explained_ratio.cpu().numpy())
    plane = latent_figure(
        scores[:, :2], labels if found.classes else None, found.classes, "Rows on the first two components"
    )
    part = found.shown
    some = part.take(torch.linspace(0, len(part) - 1, min(FEW, len(part))).round().long()).inputs
    kept = task.predict(some.to(task.device))["reconstruction"].cpu()
    scale = 255 if found.images else 1
    seen = as_rows(some).reshape(-1, *found.shape) * scale
    pair = reconstruction_figure(
        seen.numpy(), (kept.reshape(-1, *found.shape) * scale).numpy(),
        features=found.data.preparation.feature_names,
    )  # fmt: skip
    return [
        Picture("scree", "Explained variance", "What each component explains of the training rows.", scree),
        Picture("plane", "The first plane", "Test rows by their first two scores.", plane),
        Picture("kept", "What is kept", "Test rows, and their projections onto the components.", pair),
    ]
