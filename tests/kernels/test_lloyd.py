"""The step of K-means in two kernels against the task's own formulas."""

from __future__ import annotations

import copy

import pytest
import torch

from quire.data.batch import TensorData
from quire.tasks.kmeans import EXACT, KMeansTask
from tests.kernels.pooling import device

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize(("starts", "clusters", "features"), [(1, 5, 3), (3, 40, 70), (2, 17, 5)])
@pytest.mark.parametrize("case", ["goes on", "empty", "rests", "last", "not active", "not a number"])
def test_buffers_and_numbers(starts: int, clusters: int, features: int, case: str) -> None:
    where = device()
    from quire.kernels.lloyd import advance

    generator = torch.Generator().manual_seed(clusters)
    x = torch.randn(300, features, generator=generator) + 5
    rows = torch.stack([x[torch.randperm(300, generator=generator)[:clusters]] for _ in range(starts)])
    plain = KMeansTask(features, clusters, starts=starts, max_iter=7)
    plain.begin(TensorData({"inputs": x}), rows.double())
    counts = torch.randint(1, 9, (starts, clusters), generator=generator).double()
    sums = torch.randn(starts, clusters, features, generator=generator, dtype=torch.float64)
    plain.inertia.fill_(3.0)
    if case == "empty":
        counts[0, :2], sums[0, :2] = 0, 0
    elif case == "rests":
        sums[0] = plain.centres[0] * counts[0][:, None]
    elif case == "last":
        plain.iterations[0] = 6
    elif case == "not active":
        plain.active[0] = False
    elif case == "not a number":
        sums[0, 0, 0] = torch.nan
    task = copy.deepcopy(plain).to(where)
    layout = torch.tensor([300, 1])
    numbers = plain.advance({"sums": sums, "counts": counts, "layout": layout})
    task.layout.copy_(layout)
    found = advance(
        sums.to(where), counts.to(where), centres=task.centres, shift=task.shift, squares=task.squares,
        limit=task.tol * task.variance, exact=EXACT**2, most=task.max_iter, inertia=task.inertia,
        active=task.active, iterations=task.iterations, wanted=task.wanted, radius=task.radius,
        mass=task.mass, layout=task.layout,
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), numbers, rtol=1e-12, atol=1e-9, equal_nan=True)
    assert plain.active[0] == (case not in ("rests", "last", "not active"))
    assert plain.wanted[0] == (2 if case == "empty" else 0)
    for name in ("centres", "inertia", "active", "iterations", "wanted"):
        mine, theirs = getattr(task, name).cpu(), getattr(plain, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-9, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [1, 3])
def test_fits_are_those_of_the_formulas(starts: int) -> None:
    """Recorded and replayed, with sums that are kept from sweep to sweep, also where a cluster is empty."""
    from quire.train.statistics import fit_statistics

    x = torch.randn(20_000, 10, generator=torch.Generator("cuda").manual_seed(0), device="cuda") + 3
    first = x[: 70 * starts].view(starts, 70, 10).double()
    first[0, 5] = 1e4
    data, found = TensorData({"inputs": x}), {}
    for backend in ("auto", "torch"):
        task = KMeansTask(10, 70, starts=starts, tol=0.0, max_iter=30, backend=backend).cuda()  # type: ignore[arg-type]
        task.begin(data, first)
        fit = fit_statistics(task, data, sweeps=100, device="cuda", started=True)
        found[backend] = (task, fit.steps)
    ours, plain = found["auto"], found["torch"]
    assert ours[1] == plain[1]
    torch.testing.assert_close(ours[0].centres, plain[0].centres, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[0].inertia, plain[0].inertia, rtol=1e-9, atol=0)
    assert torch.equal(ours[0].iterations, plain[0].iterations)
