"""K-means beside scikit-learn's Lloyd, from the same centres: an iteration over rows without structure, where
bounds help least, and whole fits of rows that lie in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from quire.bench.case import GROWTHS, SUBJECTS, Bar, Case, Contestant, Growth, Kind, Place, Turns, Work, peer
from quire.data.batch import TensorData
from quire.functional.clusters import inertia
from quire.functional.nearest import nearest_centres
from quire.tasks.kmeans import KMeansTask
from quire.train.statistics import fit_statistics

MOST, TOLERANCE = 300, 1e-4
FEW_ROWS = 100_000
SHAPES = [(200_000, 32, 64), *((100_000, d, k) for d in (2, 32, 256) for k in (8, 64, 1024))]


@SUBJECTS.register("kmeans")
def kmeans(place: Place) -> Iterator[Case]:
    """K-means, beside scikit-learn's Lloyd on a CPU and the plain formula on a GPU."""
    if place.small:
        yield case(place, 500, 4, 3, torch.float64)
        yield fit(place, 500, 4, 3, torch.float64)
    elif place.on_gpu:
        bars = (Bar("time", at_most=0.6e-3, machine="H200"), Bar("error", at_most=1e-6))
        yield case(place, 1_000_000, 64, 1024, torch.float32, bars, turns=(10, 60))
        bars = (Bar("time", at_most=0.1e-3, machine="H200"), Bar("error", at_most=1e-6))
        yield case(place, 10_000, 32, 64, torch.float32, bars, turns=(6, 36))
    else:
        for shape in SHAPES:
            for dtype in (torch.float32, torch.float64):
                bars = (Bar("time", at_most=1.0, rival="scikit-learn"), Bar("error", at_most=1e-6))
                yield case(place, *shape, dtype, bars)
                yield fit(place, *shape, dtype, bars[:1])


@GROWTHS.register("kmeans")
def growth(place: Place) -> Iterator[Growth]:
    """An iteration against the number of rows."""
    # A GPU does few rows in less time than the start of a fit varies by, so it is given many turns.
    least, most = (16_000, 6) if place.on_gpu else (1000, 5)
    sizes = tuple(least * 4**power for power in range(most)) if not place.small else (100, 400)
    features, clusters = (64, 256) if place.on_gpu else (32, 64)
    few, many = (18, 303) if not place.on_gpu else (60, 600)
    yield Growth(
        f"K-means iteration, {features} features, {clusters} clusters", "rows N", sizes,
        lambda rows: case(
            place, rows, features, clusters, torch.float32, turns=(3, few if rows > FEW_ROWS else many)
        ),
        order=1, memory_order=1,
    )  # fmt: skip


def case(
    place: Place,
    rows: int,
    features: int,
    clusters: int,
    dtype: torch.dtype,
    bars: tuple[Bar, ...] = (),
    turns: tuple[int, int] = (3, 18),
) -> Case:
    generator = torch.Generator(place.device).manual_seed(0)
    x = torch.randn(rows, features, generator=generator, device=place.device, dtype=dtype)
    start = x[:clusters].double()

    contestants: dict[str, Contestant] = {"quire": Turns(quire_run(x, start, whole=place.small), *turns)}
    if place.on_gpu:
        contestants["compiled formula"] = Turns(formula_run(x, start), *turns)
    else:
        contestants["scikit-learn"] = peer("sklearn", Turns(peer_run(x, clusters), *turns))
    kind: Kind = "float64" if dtype == torch.float64 else "bfloat16" if place.on_gpu else "float32"
    return Case(
        f"K-means iteration, {rows:,} × {features}, {clusters:,} clusters, "
        f"{str(dtype).removeprefix('torch.')}",
        contestants,
        work=Work(moved=x.nbytes, operations={kind: 2.0 * rows * features * clusters}),
        unit="iteration",
        error=partial(inertia_error, x),
        bars=bars,
    )


def fit(
    place: Place, rows: int, features: int, clusters: int, dtype: torch.dtype, bars: tuple[Bar, ...] = ()
) -> Case:
    """From the first rows until centres rest, of as many groups as clusters, four deviations apart."""
    generator = torch.Generator().manual_seed(0)
    middles = 4 * torch.randn(clusters, features, generator=generator, dtype=dtype)
    x = middles[torch.randint(clusters, (rows,), generator=generator)]
    x += torch.randn(rows, features, generator=generator, dtype=dtype)
    mine = quire_run(x, x[:clusters].double(), TOLERANCE, whole=True)
    peers = peer_run(x, clusters, TOLERANCE)
    return Case(
        f"K-means fit, {rows:,} × {features} in groups, {clusters:,} clusters, "
        f"{str(dtype).removeprefix('torch.')}",
        {"quire": lambda: mine(MOST), "scikit-learn": peer("sklearn", lambda: peers(MOST))},
        unit="fit",
        error=partial(inertia_error, x),
        bars=bars,
        whole=True,
    )


def inertia_error(x: Tensor, found: tuple[object, float]) -> float:
    """Of the inertia, against labels from float64."""
    centres = torch.as_tensor(found[0], device=x.device, dtype=torch.float64)
    labels = nearest_centres(x.double(), centres, backend="torch")
    return abs(found[1] / float(inertia(x, centres, labels)) - 1)


def quire_run(
    x: Tensor, start: Tensor, tol: float = 0.0, *, whole: bool = False
) -> Callable[[int], tuple[object, float]]:
    """So many iterations, from the start again where centres come to rest; of a `whole` fit until they do."""
    data = TensorData({"inputs": x})

    def run(iterations: int) -> tuple[object, float]:
        left = iterations
        while left > 0:
            task = KMeansTask(x.shape[1], len(start), tol=tol, max_iter=left).to(x.device)
            task.begin(data, start)
            taken = fit_statistics(task, data, sweeps=2 * left, device=x.device, started=True).steps
            left = 0 if whole else left - taken
        return task.centres[0], task.inertia.item()

    return run


def peer_run(x: Tensor, clusters: int, tol: float = 0.0) -> Callable[[int], tuple[object, float]]:
    array = x.numpy()

    def run(iterations: int) -> tuple[object, float]:
        from sklearn.cluster import KMeans

        found = KMeans(
            clusters, init=array[:clusters], n_init=1, max_iter=iterations, tol=tol, algorithm="lloyd"
        ).fit(array)
        return found.cluster_centers_, found.inertia_

    return run


def formula_run(x: Tensor, start: Tensor) -> Callable[[int], object]:
    """argmin ‖c‖² − 2x·c and means by index_add, through torch.compile, in TF32 where it is allowed."""

    def iterate(centres: Tensor) -> tuple[Tensor, Tensor]:
        score = centres.square().sum(1) - 2 * (x @ centres.mT)
        least, labels = score.min(1)
        sums = torch.zeros_like(centres).index_add_(0, labels, x)
        counts = torch.zeros(len(centres), device=x.device).index_add_(0, labels, torch.ones_like(least))
        kept = counts[:, None] > 0
        return torch.where(kept, sums / counts.clamp(min=1)[:, None], centres), least

    compiled = torch.compile(iterate)

    def run(iterations: int) -> object:
        centres = start.float()
        for _ in range(iterations):
            before = centres
            centres, least = compiled(centres)
        return before, float((least + x.square().sum(1)).double().sum())

    return run
