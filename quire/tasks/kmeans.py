"""K-means from sums over rows.

N rows, B rows of a batch, D features, K clusters, R starts at once, M rows that empty clusters want.

    J = Σ_n w_n min_k ‖x_n − c_k‖²,    c_k ← Σ w x / Σ w over the rows nearest to c_k

A sweep gives each start the sums and counts of its clusters. Where a cluster came out empty, the start keeps
its centres for one more sweep, which finds the rows farthest from their centres; each empty cluster then
takes one of these. As sums must add up, each batch puts its candidates into places of its own.

The field "weight" (B,) weighs rows; without it each counts once. Centres are float64 whatever the rows are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, final, get_args

import numpy as np
import torch
from torch import Tensor

from quire.data.batch import Batch, Data, TensorData, in_order
from quire.errors import InputError, unknown_name
from quire.functional.clusters import (
    centre_update,
    inertia_from_sums,
    kmeans_plusplus,
    random_rows,
    relocate_empty,
    squared_distances,
    step_at_once,
)
from quire.functional.nearest import (
    Backend,
    ClusterSums,
    cluster_sums,
    nearest_centres,
    takes_kernels,
)
from quire.functional.tally import Tally
from quire.functional.threads import one_thread
from quire.options import check_range
from quire.tasks.common import require_features
from quire.tasks.kmeans_rows import (
    Tallies,
    candidates,
    farthest,
    shared_farthest,
    shared_inertia,
    survey,
    weighted_rows,
)
from quire.tasks.on_host import OnHost, gathered
from quire.train.statistics import StatisticsTask, Swept, as_rows
from quire.train.task import TASKS, Weight

if TYPE_CHECKING:
    from quire.kernels.grouped import RunningSums

Start = Literal["k-means++", "random"]
SAMPLE_ROWS = 2**17
ROWS_PER_CLUSTER = 2**7
"""First centres are chosen among so many rows, or so many for each cluster if that is more."""
EXACT = 8 * torch.finfo(torch.float64).eps
"""Centres that move by no more than this part of them have not moved."""
SURE = 0.01
"""Of Σ w‖x − shift‖², the part above which J keeps 13 digits where it is what sums leave of that."""


class Control(NamedTuple):
    """The buffers of the same names, as numbers; the last three for each start."""

    radius: float
    mass: float
    rows: int
    batches: int
    active: list[float]
    wanted: list[float]
    inertia: list[float]


@final
@TASKS.register("kmeans")
class KMeansTask(StatisticsTask):
    """The K centres with the smallest J, from R starts at once; the best of them answers."""

    rests = steady = True

    def __init__(
        self,
        features: int,
        clusters: int,
        *,
        init: str = "k-means++",
        starts: int = 1,
        tol: float = 1e-4,
        max_iter: int = 300,
        backend: Backend = "auto",
    ) -> None:
        """A start is done when Σ ‖c_new − c‖² is at most `tol` times the mean variance of a feature, which it
        is at the latest when no row changes its cluster, or after `max_iter` updates."""
        super().__init__()
        if init not in get_args(Start):
            raise unknown_name("start", init, get_args(Start))
        self.features, self.clusters, self.starts, self.init = features, clusters, starts, init
        self.tol, self.max_iter, self.backend = tol, max_iter, backend
        check_range(self, "", features=">= 1", clusters=">= 1", starts=">= 1", tol=">= 0", max_iter=">= 1")

        def add(name: str, *shape: int, value: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
            self.register_buffer(name, torch.full(shape, value, dtype=dtype))

        add("centres", starts, clusters, features)
        add("inertia", starts, value=torch.inf)
        add("active", starts, value=True, dtype=torch.bool)
        add("iterations", starts, value=0, dtype=torch.int64)
        add("wanted", starts, value=0, dtype=torch.int64)
        add("best", value=0, dtype=torch.int64)
        add("layout", 2, value=0, dtype=torch.int64)
        add("shift", features)
        add("variance")
        add("squares")
        add("radius")
        add("mass")
        self.trace: list[list[float]] = []
        """J of all starts, sweep by sweep; infinite before a start's first."""
        self._control = OnHost(self._gather, self._read)
        self._tallies = Tallies(clusters, backend)

    centres: Tensor
    """(R, K, D)"""
    inertia: Tensor
    """J of each start before its last update, or of its last centres once training is finished, (R,)."""
    active: Tensor
    """Which starts go on, (R,)."""
    iterations: Tensor
    """How often the centres of each start were moved, (R,)."""
    wanted: Tensor
    """Rows that the empty clusters of each start wait for, (R,)."""
    best: Tensor
    """The start with the smallest J."""
    layout: Tensor
    """Rows and batches of a sweep."""
    shift: Tensor
    variance: Tensor
    squares: Tensor
    radius: Tensor
    mass: Tensor
    """What `kmeans_rows.Survey` says of the rows."""

    @property
    def learned(self) -> int:
        return self.clusters * self.features

    # -- Learning ------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, data: Data, generator: torch.Generator) -> None:
        """Survey the rows, and choose the first centres of each start among them."""
        if len(data) < self.clusters:
            raise InputError(
                f"{len(data)} rows for {self.clusters} clusters",
                expected=f"at least {self.clusters} rows",
                fix="ask for fewer clusters",
            )
        most, rows = max(SAMPLE_ROWS, ROWS_PER_CLUSTER * self.clusters), torch.arange(len(data))
        if len(data) > most:
            drawn = torch.randint(len(data), (most,), generator=generator, device=generator.device)
            rows = drawn.unique().cpu()
        sample = data.take(rows).to(self.shift.device)
        x, weights = weighted_rows(sample)
        if self.init == "random":
            chosen = random_rows(
                len(x), self.clusters, generator, weights=weights, starts=self.starts, device=x.device
            )
        else:
            chosen = kmeans_plusplus(x, self.clusters, generator, weights=weights, starts=self.starts)
        self.begin(data, x[chosen].double())

    @torch.no_grad()
    def begin(self, data: Data, centres: Tensor) -> None:
        """Stand at these centres, (R, K, D) or (K, D) for all, as when a run on `data` begins."""
        found = survey(data, self.shift.device)
        require_features(len(found.shift), self.features)
        for name, value in found._asdict().items():
            getattr(self, name).copy_(value)
        self.centres.copy_(centres)
        self.inertia.fill_(torch.inf)
        self.active.fill_(True)
        for buffer in (self.iterations, self.wanted, self.best, self.layout):
            buffer.zero_()
        if self.layout.is_cpu and isinstance(data, TensorData):  # known before the first sweep has counted
            self.layout.copy_(torch.tensor([len(data), 1]))
        self.trace = []
        self._control.forget()
        self._tallies.forget()

    def _gather(self) -> Tensor:
        return gathered(self.radius, self.mass, self.layout, self.active, self.wanted, self.inertia)

    def _read(self, numbers: list[float]) -> Control:
        radius, mass, rows, batches, *rest = numbers
        active, wanted, heights = (rest[i * self.starts : (i + 1) * self.starts] for i in range(3))
        return Control(radius, mass, int(rows), int(batches), active, wanted, heights)

    def course(self, batch: Batch) -> Hashable:
        """Which starts go on. Empty clusters are filled with the rows that are found then."""
        now = self._control()
        free = not any(now.wanted) and batch.inputs.dtype == torch.float32
        if free and takes_kernels(as_rows(batch.inputs), self.centres[0], self.backend):
            return tuple(now.active)
        return None

    @torch.no_grad()
    def statistics(self, batch: Batch) -> dict[str, Tensor]:
        """Sums and counts of each active start, and candidates for the empty clusters of those that wait."""
        x, weights = weighted_rows(batch)
        sums, counts, now = [], [], self._control()
        far: Tensor | None = None
        if most := int(max(now.wanted)):
            far = self.centres.new_zeros(self.starts, max(now.batches, 1), most, self.features + 4)
        for r in range(self.starts):
            if not now.active[r]:
                sums.append(torch.zeros_like(self.centres[r]))
                counts.append(torch.zeros_like(self.centres[r, :, 0]))
                continue
            found = self._searched(r, x, weights, self._tally(r, batch))
            sums.append(found.sums)
            counts.append(found.counts)
            if far is not None and now.wanted[r]:
                some = shared_farthest(x, self.centres[r], found.labels, int(now.wanted[r]), weights)
                place = int(batch.rows[0]) * now.batches // now.rows
                far[r, place, : len(some.squared)] = candidates(some)
        layout = torch.tensor([len(x), 1]) if x.is_cpu else torch.ones_like(self.layout)
        if not x.is_cpu:  # without waiting
            layout[:1].fill_(len(x))
        totals = {"sums": _stacked(sums), "counts": _stacked(counts), "layout": layout}
        return totals if far is None else totals | {"far": far}

    def _searched(
        self, start: int, x: Tensor, weights: Tensor | None, tally: Tally | RunningSums | None
    ) -> ClusterSums:
        """Labels, sums and counts of rows under the centres of a start."""
        return cluster_sums(
            x, self.centres[start], weights=weights, shift=self.shift, tally=tally, backend=self.backend,
        )  # fmt: skip

    def _tally(self, start: int, batch: Batch) -> Tally | RunningSums | None:
        """The sums of the start's last sweep, where that was over these rows and nothing else."""
        now = self._control()
        if len(batch) != now.rows:
            return None
        return self._tallies.find(start, batch, self.centres[start], shift=self.shift, radius=now.radius)

    def _advance_at_once(self, sums: Tensor, counts: Tensor) -> Tensor | None:
        """What `advance` does where no start waits for rows, in two kernels; None where these cannot run."""
        numbers = step_at_once(
            sums, counts, backend=self.backend, centres=self.centres, shift=self.shift, squares=self.squares,
            limit=self.tol * self.variance, exact=EXACT**2, most=self.max_iter, inertia=self.inertia,
            active=self.active, iterations=self.iterations, wanted=self.wanted, radius=self.radius,
            mass=self.mass, layout=self.layout,
        )  # fmt: skip
        if numbers is not None and self.starts > 1:
            self.best.copy_(self.inertia.argmin())
        return numbers

    @torch.no_grad()
    @one_thread()
    @np.errstate(all="ignore")
    def advance(self, totals: Mapping[str, Tensor]) -> Tensor:
        """c_k ← S_k / n_k of the active starts."""
        sums, counts = totals["sums"], totals["counts"]
        self.layout.copy_(totals["layout"])
        free = self.centres.is_cuda and "far" not in totals
        if free and (numbers := self._advance_at_once(sums, counts)) is not None:
            return numbers
        return torch.tensor(self._advance_on_host(sums, counts, totals), dtype=torch.float64)

    def _advance_on_host(self, sums: Tensor, counts: Tensor, totals: Mapping[str, Tensor]) -> list[float]:
        """What `advance` does, decided start by start where numbers are known: of short operations, those
        that are not asked for are the fastest, and NumPy's come next."""
        now, shift, squares = self._control(), self.shift.cpu().numpy(), float(self.squares)
        buffers = self.centres, self.inertia, self.iterations, self.active, self.wanted
        centres, inertia, iterations, active, wanted = (buffer.cpu().numpy() for buffer in buffers)
        wanted[:] = 0
        for r, (total, count) in enumerate(zip(sums.cpu().numpy(), counts.cpu().numpy(), strict=True)):
            if not now.active[r]:
                continue
            old, mass = centres[r], count[:, None]
            # J = Σ w‖x‖² − Σ_k c_k·(2S_k − n_k c_k), about the shift
            inertia[r] = max(squares - _dot(old - shift, 2 * total - mass * (old + shift)), 0.0)
            if now.wanted[r]:
                far = farthest(totals["far"][r], int(now.wanted[r]))
                new = centre_update(*relocate_empty(sums[r], counts[r], far)).cpu().numpy()
            elif empty := count.tolist().count(0):
                wanted[r] = empty
                continue
            else:
                new = total / mass
            path, most = new - old, max(self.tol * float(self.variance), EXACT**2 * _dot(old, old))
            iterations[r] += 1
            active[r] = not _dot(path, path) <= most and iterations[r] < self.max_iter
            old[:] = new
        if not self.centres.is_cpu:  # otherwise the arrays are the buffers
            for buffer, array in zip(buffers, (centres, inertia, iterations, active, wanted), strict=True):
                buffer.copy_(torch.from_numpy(array))
        if self.starts > 1:
            self.best.fill_(int(inertia.argmin()))
        told = (totals["layout"].tolist(), active.tolist(), wanted.tolist(), inertia.tolist())
        return [now.radius, now.mass, *(number for numbers in told for number in numbers)]

    def swept(self, numbers: list[float]) -> Swept:
        """Done when no centre moves."""
        now = self._control.tell(numbers)
        self.trace.append(list(now.inertia))
        return Swept(min(now.inertia) / now.mass, not any(now.active))

    @torch.no_grad()
    def finish(self, data: Data, validation: Data | None) -> None:
        """J of each start's last centres, and which start is the best."""
        totals = torch.zeros_like(self.inertia)
        for batch in in_order(data):
            batch = batch.to(self.shift.device)
            x, weights = weighted_rows(batch)
            for r, centres in enumerate(self.centres):
                if (tally := self._tally(r, batch)) is not None:
                    labels, sums, counts = self._searched(r, x, weights, tally)
                    near = centres - self.shift
                    about = sums - counts[:, None] * self.shift
                    height = inertia_from_sums(near, about, counts, self.squares)
                    if float(height) > SURE * float(self.squares):
                        totals[r] = height
                        continue
                else:
                    labels = nearest_centres(x, centres, shift=self.shift, backend=self.backend)
                totals[r] += shared_inertia(x, centres, labels, weights)
        self.inertia.copy_(totals)
        self.best.copy_(totals.argmin())
        self._control.forget()
        self._tallies.forget()

    # -- Judging and predicting ----------------------------------------------------------------

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        weights = weighted_rows(batch)[1]
        return {"inertia": float(len(batch)) if weights is None else weights.sum()}

    @torch.no_grad()
    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        rows, weights = weighted_rows(batch)
        squared = self._nearest(rows)[1]
        return {"inertia": squared.sum() if weights is None else (squared * weights).sum()}

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        return {"inertia": self._nearest(as_rows(batch.inputs))[1]}

    def _nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Label and squared distance of each row under the best start."""
        require_features(x.shape[1], self.features)
        centres = self.centres[self.best]
        if torch.compiler.is_exporting():  # as a formula, for any number of rows
            nearest = (x[:, None] - centres).square().sum(2).min(1)
            return nearest.indices, nearest.values
        labels = nearest_centres(x, centres, shift=self.shift, backend=self.backend)
        return labels, squared_distances(x, centres, labels)

    @torch.no_grad()
    def predict(self, inputs: Tensor, mode: str = "mode") -> dict[str, Tensor]:
        """The nearest centre of each row (B,), and the distance to it (B,)."""
        if mode != "mode":
            raise unknown_name("mode", mode, ["mode"])
        x = as_rows(inputs)
        labels, squared = self._nearest(x)
        return {"cluster": labels, "distance": squared.sqrt().to(x.dtype)}

    # -- Saving --------------------------------------------------------------------------------

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self._control.forget()

    def spec(self) -> dict[str, Any]:
        return {
            "task": "kmeans",
            "features": self.features,
            "clusters": self.clusters,
            "init": self.init,
            "starts": self.starts,
            "tol": self.tol,
            "max_iter": self.max_iter,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        return cls(**{name: value for name, value in spec.items() if name != "task"})


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Σ a b, in one thread."""
    return float(np.einsum("kd,kd->", a, b))


def _stacked(parts: list[Tensor]) -> Tensor:
    """One after the other; a single one as it is."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)
