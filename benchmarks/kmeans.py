"""An iteration of K-means, side by side with scikit-learn's Lloyd, in one run.

Both start from the same centres, and the time of an iteration is the difference between a long and a short
fit divided by the iterations between them, so that reading, surveying and labelling at the end do not count.
They take turns; medians are compared. Centres and inertia after the long fit stand beside the times.

    python -m benchmarks.kmeans                          200,000 × 32, 64 clusters, float32 and float64
    python -m benchmarks.kmeans --all                    D 2, 32, 256 by K 8, 64, 1,024
    python -m benchmarks.kmeans --device cuda            1,000,000 × 64, 1,024 clusters, Quire alone
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from sklearn.cluster import KMeans as Peer

from benchmarks.machine import describe, machine
from quire.data.batch import TensorData
from quire.functional.clusters import inertia
from quire.functional.nearest import nearest_centres
from quire.tasks.kmeans import KMeansTask
from quire.train.statistics import fit_statistics

SHORT, LONG = 3, 18
BAR_CPU = 1.0
BAR_GPU = 1.0


def timed(run: Callable[[int], object], iterations: int) -> float:
    start = time.perf_counter()
    run(iterations)
    return time.perf_counter() - start


def per_iteration(runs: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Seconds of one iteration of each contestant, the median of rounds in which they take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(SHORT)
    for _ in range(rounds):
        for name, run in runs.items():
            short = timed(run, SHORT)
            times[name].append((timed(run, LONG) - short) / (LONG - SHORT))
    return {name: statistics.median(values) for name, values in times.items()}


def quire_run(x: torch.Tensor, start: torch.Tensor) -> Callable[[int], KMeansTask]:
    data = TensorData({"inputs": x})

    def run(iterations: int) -> KMeansTask:
        task = KMeansTask(x.shape[1], len(start), tol=0.0, max_iter=iterations).to(x.device)
        task.begin(data, start)
        fit_statistics(task, data, sweeps=2 * iterations, device=x.device, started=True)
        return task

    return run


def on_cpu(rows: int, features: int, clusters: int, dtype: torch.dtype, rounds: int) -> float:
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(0), dtype=dtype)
    start, array = x[:clusters].double(), x.numpy()

    def peer_run(iterations: int) -> Peer:
        return Peer(
            clusters, init=array[:clusters], n_init=1, max_iter=iterations, tol=0.0, algorithm="lloyd"
        ).fit(array)

    mine = quire_run(x, start)
    times = per_iteration({"quire": mine, "scikit-learn": peer_run}, rounds)
    task, peer = mine(LONG), peer_run(LONG)
    ratio = times["quire"] / times["scikit-learn"]
    apart = float(np.abs(task.centres[0].numpy() - peer.cluster_centers_).max())
    print(
        f"{rows:>9,} × {features:<4} K {clusters:<5} {str(dtype).removeprefix('torch.'):8} "
        f"quire {times['quire'] * 1e3:8.2f} ms   scikit-learn {times['scikit-learn'] * 1e3:8.2f} ms   "
        f"ratio {ratio:5.2f}   centres differ by {apart:.0e}, inertia by "
        f"{abs(task.inertia.item() / peer.inertia_ - 1):.0e}",
        flush=True,
    )
    return ratio


def on_gpu(rows: int, features: int, clusters: int, rounds: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, features, generator=generator, device="cuda")
    run = quire_run(x, x[:clusters].double())
    seconds = per_iteration({"quire": run}, rounds)["quire"]
    task = run(LONG)
    centres = task.centres[0]
    labels = nearest_centres(x.double(), centres, backend="torch")
    exact = float(inertia(x, centres, labels))
    print(
        f"{rows:,} × {features}, K {clusters}: {seconds * 1e3:.3f} ms an iteration (bar: {BAR_GPU:g} ms), "
        f"inertia differs from float64's by {abs(task.inertia.item() / exact - 1):.0e}, "
        f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB with the rows"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(describe(machine(("scikit-learn", "numpy"))))
    if options.device == "cuda":
        on_gpu(1_000_000, 64, 1024, options.rounds)
        return
    shapes = [(200_000, 32, 64)]
    if options.all:
        shapes += [(100_000, d, k) for d in (2, 32, 256) for k in (8, 64, 1024)]
    for shape in shapes:
        for dtype in (torch.float32, torch.float64):
            on_cpu(*shape, dtype, options.rounds)
    print(f"ratio quire / scikit-learn (bar: at most {BAR_CPU:g})")


if __name__ == "__main__":
    main()
