"""K-means from sums over rows.

N rows, B rows of a batch, D features, K clusters, R starts at once, M rows that empty clusters want.

    J = Σ_n w_n min_k ‖x_n − c_k‖²,    c_k ← Σ w x / Σ w over the rows nearest to c_k

A sweep gives each start the sums and counts of its clusters. Where a cluster came out empty, the start keeps
its centres for one more sweep, which finds the rows farthest from their centres; each empty cluster then
takes one of these. As sums must add up, each batch puts its candidates into places of its own.

The field "weight" (B,) weighs rows; without it each counts once. Centres are float64 whatever the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar, final, get_args

import torch
from torch import Tensor

from quire.data.batch import Batch, Data, in_order
from quire.errors import InputError, unknown_name
from quire.functional.clusters import (
    Farthest,
    centre_update,
    farthest_rows,
    inertia,
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
    Tally,
    cluster_sums,
    nearest_centres,
    pieces,
    running_sums,
    takes_kernels,
)
from quire.functional.threads import one_thread, share_rows
from quire.train.statistics import StatisticsTask, Swept, as_rows
from quire.train.task import TASKS, Weight

if TYPE_CHECKING:
    from quire.kernels.grouped import RunningSums

T = TypeVar("T")
Start = Literal["k-means++", "random"]
WEIGHT = "weight"
SAMPLE_ROWS = 2**17
ROWS_PER_CLUSTER = 2**7
"""First centres are chosen among so many rows, or so many for each cluster if that is more."""
SHARE_ROWS = 2**12
"""Rows below which a thread is not worth starting."""
EXACT = 8 * torch.finfo(torch.float64).eps
"""Centres that move by no more than this part of them have not moved."""


class _Control(NamedTuple):
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
        for name, value, least in (
            ("features", features, 1), ("clusters", clusters, 1), ("starts", starts, 1), ("tol", tol, 0),
            ("max_iter", max_iter, 1),
        ):  # fmt: skip
            if not value >= least:
                raise InputError(f"{name} {value}", expected=f"{name} >= {least}")
        self.features, self.clusters, self.starts, self.init = features, clusters, starts, init
        self.tol, self.max_iter, self.backend = tol, max_iter, backend

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
        self._known: _Control | None = None
        self._tallies: dict[int, Tally | RunningSums] = {}

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
    """A point amid the rows, (D,), which the next four are about."""
    variance: Tensor
    """Mean variance of a feature, each row counted once."""
    squares: Tensor
    """Σ w‖x − shift‖²."""
    radius: Tensor
    """max ‖x − shift‖."""
    mass: Tensor
    """Σ w."""

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
        x, weights = as_rows(sample.inputs), sample.fields.get(WEIGHT)
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
        self._survey(data)
        self.centres.copy_(centres)
        self.inertia.fill_(torch.inf)
        self.active.fill_(True)
        for buffer in (self.iterations, self.wanted, self.best, self.layout):
            buffer.zero_()
        self.trace = []
        self._known = None
        self._tallies = {}

    def load_state_dict(self, *given: Any, **options: Any) -> Any:
        self._known = None
        return super().load_state_dict(*given, **options)

    def _control(self) -> _Control:
        """What the course of things depends on, as numbers. A GPU is waited for once a sweep."""
        if self._known is None:
            self._know(self._numbers().tolist())
        assert self._known is not None
        return self._known

    def _numbers(self) -> Tensor:
        parts = (self.radius, self.mass, self.layout, self.active, self.wanted, self.inertia)
        return torch.cat([part.reshape(-1).double() for part in parts])

    def _know(self, numbers: list[float]) -> None:
        radius, mass, rows, batches, *rest = numbers
        active, wanted, heights = (rest[i * self.starts : (i + 1) * self.starts] for i in range(3))
        self._known = _Control(radius, mass, int(rows), int(batches), active, wanted, heights)

    def course(self, batch: Batch) -> Hashable:
        """Which starts go on. Empty clusters are filled with the rows that are found then."""
        now = self._control()
        free = not any(now.wanted) and batch.inputs.dtype == torch.float32
        if free and takes_kernels(as_rows(batch.inputs), self.centres[0], self.backend):
            return tuple(now.active)
        return None

    def _survey(self, data: Data) -> None:
        """What does not change from sweep to sweep, in one pass about a provisional mean."""
        sums = self.shift.new_zeros(2 * self.features + 2)
        largest = torch.zeros_like(self.radius)
        for number, batch in enumerate(in_order(data)):
            batch = batch.to(self.shift.device)
            rows, weights = as_rows(batch.inputs), batch.fields.get(WEIGHT)
            if number == 0:
                # Rounded to the rows' own type, so that taking it off them means the same everywhere.
                with one_thread():
                    self.shift.copy_(rows[next(pieces(rows))].double().mean(0).to(rows.dtype))
            for part, distance in self._shared(partial(self._surveyed, rows, weights), rows):
                sums, largest = sums + part, torch.maximum(largest, distance)
        first, second = sums[: 2 * self.features].view(2, -1) / len(data)
        self.squares.copy_(sums[-2])
        self.mass.copy_(sums[-1])
        self.radius.copy_(largest.sqrt())
        self.variance.copy_((second - first.square()).clamp_min(0).mean())

    def _surveyed(self, rows: Tensor, weights: Tensor | None, span: slice) -> tuple[Tensor, Tensor]:
        """Σ x, Σ x², Σ w‖x‖² and Σ w of rows less the shift, (2D + 2,), and the largest ‖x‖²."""
        largest, sums = torch.zeros_like(self.radius), self.shift.new_zeros(2 * self.features + 2)
        for part in pieces(rows[span]):
            x = rows[span][part].double() - self.shift
            first = x.sum(0)
            second, squared = x.square_().sum(0), x @ torch.ones_like(self.shift)
            weight = torch.ones_like(squared) if weights is None else weights[span][part].double()
            sums += torch.cat([first, second, (weight @ squared)[None], weight.sum()[None]])
            largest = torch.maximum(largest, squared.max())
        return sums, largest

    @torch.no_grad()
    def statistics(self, batch: Batch) -> dict[str, Tensor]:
        """Sums and counts of each active start, and candidates for the empty clusters of those that wait."""
        x, weights = as_rows(batch.inputs), batch.fields.get(WEIGHT)
        sums, counts, now = [], [], self._control()
        most = int(max(now.wanted))
        far = self.centres.new_zeros(self.starts, max(now.batches, 1), most, self.features + 4)
        for r in range(self.starts):
            if not now.active[r]:
                sums.append(torch.zeros_like(self.centres[r]))
                counts.append(torch.zeros_like(self.centres[r, :, 0]))
                continue
            tally = self._tally(r, batch) if weights is None else None
            found = self._searched(r, x, weights, tally)
            sums.append(found.sums)
            counts.append(found.counts)
            if now.wanted[r]:
                some = farthest_rows(x, self.centres[r], found.labels, int(now.wanted[r]), weights=weights)
                place = int(batch.rows[0]) * now.batches // now.rows
                columns = (torch.ones_like(some.squared), some.squared, some.labels, some.weights)
                far[r, place, : len(some.squared)] = torch.cat([torch.stack(columns, 1), some.rows], 1)
        layout = torch.ones_like(self.layout)
        layout[:1].fill_(len(x))
        totals = {"sums": _stacked(sums), "counts": _stacked(counts), "layout": layout}
        return totals | ({"far": far} if most else {})

    def _searched(
        self, start: int, x: Tensor, weights: Tensor | None, tally: Tally | RunningSums | None
    ) -> ClusterSums:
        """Labels, sums and counts of rows under the centres of a start."""
        return cluster_sums(
            x, self.centres[start], weights=weights, shift=self.shift, radius=self._control().radius,
            tally=tally, backend=self.backend,
        )  # fmt: skip

    def _inertia(self, x: Tensor, centres: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        def work(span: slice) -> Tensor:
            weight = None if weights is None else weights[span]
            return inertia(x[span], centres, labels[span], weights=weight)

        return sum(self._shared(work, x), torch.zeros_like(self.mass))

    def _shared(self, work: Callable[[slice], T], rows: Tensor) -> list[T]:
        """`work` of all rows, on the CPU divided among threads."""
        if rows.device.type != "cpu":
            return [work(slice(0, len(rows)))]
        return share_rows(work, len(rows), least=SHARE_ROWS)

    def _tally(self, start: int, batch: Batch) -> Tally | RunningSums | None:
        """The sums of the last sweep, where all rows lie in memory as they are."""
        rows = as_rows(batch.inputs)
        place = rows.data_ptr()
        if len(rows) != self._control().rows or place != batch.inputs.data_ptr():
            return None
        kernels = rows.is_cuda and takes_kernels(rows, self.centres[start], self.backend)
        if rows.device.type != "cpu" and not kernels:
            return None
        kept = self._tallies.get(start)
        if kept is None or kept.rows.data_ptr() != place:
            make = running_sums if kernels else Tally
            with one_thread():
                kept = make(rows, self.clusters, self.shift, self._control().radius)
            if kept is not None:
                self._tallies[start] = kept
        return kept

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
    def advance(self, totals: Mapping[str, Tensor]) -> Tensor:
        """c_k ← S_k / n_k of the active starts."""
        sums, counts = totals["sums"], totals["counts"]
        self.layout.copy_(totals["layout"])
        free = self.centres.is_cuda and "far" not in totals
        if free and (numbers := self._advance_at_once(sums, counts)) is not None:
            return numbers
        found = inertia_from_sums(
            self.centres - self.shift, sums - counts[..., None] * self.shift, counts, self.squares
        )
        self.inertia.copy_(torch.where(self.active, found, self.inertia))
        empty = (counts == 0).sum(1)
        waits = self.active & (empty > 0) & (self.wanted == 0)
        if "far" in totals:
            sums, counts = sums.clone(), counts.clone()
            for r in self.wanted.nonzero()[:, 0].tolist():
                far = _farthest(totals["far"][r], int(self.wanted[r]))
                sums[r], counts[r] = relocate_empty(sums[r], counts[r], far)
        goes = self.active & ~waits
        new = torch.where(goes[:, None, None], centre_update(sums, counts), self.centres)
        moved = (new - self.centres).square().sum((1, 2))
        limit = torch.maximum(self.tol * self.variance, EXACT**2 * self.centres.square().sum((1, 2)))
        self.centres.copy_(new)
        # By name in place: to assign to a module's buffer takes longer than to add to it.
        self.iterations.add_(goes)
        self.active.logical_and_(~(goes & ((moved <= limit) | (self.iterations >= self.max_iter))))
        self.wanted.copy_(torch.where(waits, empty, 0))
        self.best.copy_(self.inertia.argmin())
        return self._numbers()

    def swept(self, numbers: list[float]) -> Swept:
        """Done when no centre moves."""
        self._know(numbers)
        now = self._control()
        self.trace.append(list(now.inertia))
        return Swept(min(now.inertia) / now.mass, not any(now.active))

    @torch.no_grad()
    def finish(self, data: Data, validation: Data | None) -> None:
        """J of each start's last centres, and which start is the best."""
        totals = torch.zeros_like(self.inertia)
        for batch in in_order(data):
            batch = batch.to(self.shift.device)
            x, weights = as_rows(batch.inputs), batch.fields.get(WEIGHT)
            for r, centres in enumerate(self.centres):
                if weights is None and (tally := self._tally(r, batch)) is not None:
                    labels = self._searched(r, x, weights, tally).labels
                else:
                    labels = nearest_centres(x, centres, shift=self.shift, backend=self.backend)
                totals[r] += self._inertia(x, centres, labels, weights)
        self._tallies = {}
        self.inertia.copy_(totals)
        self.best.copy_(totals.argmin())

    # -- Judging and predicting ----------------------------------------------------------------

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        weights = batch.fields.get(WEIGHT)
        return {"inertia": float(len(batch)) if weights is None else weights.sum()}

    @torch.no_grad()
    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        squared, weights = self._nearest(as_rows(batch.inputs))[1], batch.fields.get(WEIGHT)
        return {"inertia": squared.sum() if weights is None else (squared * weights).sum()}

    @torch.no_grad()
    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        return {"inertia": self._nearest(as_rows(batch.inputs))[1]}

    def _nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Label and squared distance of each row under the best start."""
        if x.shape[1] != self.features:
            raise InputError(f"rows of {x.shape[1]} features", expected=f"{self.features} features")
        centres = self.centres[self.best]
        if torch.compiler.is_exporting():  # as a formula, for any number of rows
            nearest = (x[:, None] - centres).square().sum(2).min(1)
            return nearest.indices, nearest.values
        labels = nearest_centres(x, centres, shift=self.shift, backend=self.backend)
        return labels, squared_distances(x, centres, labels)

    @torch.no_grad()
    def predict(self, inputs: Tensor, mode: str = "mode", **options: Any) -> dict[str, Tensor]:
        """The nearest centre of each row (B,), and the distance to it (B,)."""
        if mode != "mode":
            raise unknown_name("mode", mode, ["mode"])
        x = as_rows(inputs)
        labels, squared = self._nearest(x)
        return {"cluster": labels, "distance": squared.sqrt().to(x.dtype)}

    # -- Saving --------------------------------------------------------------------------------

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


def _stacked(parts: list[Tensor]) -> Tensor:
    """One after the other; a single one as it is."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def _farthest(places: Tensor, count: int) -> Farthest:
    """The `count` farthest of all batches' candidates (…, M, D + 4): present, ‖x − c‖², label, weight, x."""
    candidates = places.flatten(0, 1)
    candidates = candidates[candidates[:, 0] > 0]
    order = candidates[:, 1].sort(descending=True, stable=True).indices[:count]
    _, squared, label, weight = candidates[order, :4].unbind(1)
    return Farthest(squared, label.long(), weight, candidates[order, 4:])
