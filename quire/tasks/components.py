"""Principal component analysis, learned from sums over the rows: one sweep in most cases.

B rows of a batch, N rows of a data set, D features, K components, L rows of a basis.

Exact: one sweep takes the scatter of the features (D × D); where components are wanted whose variance is lost
in its rounding, further sweeps look closer. With fewer rows than features, the scatter is taken in a basis of
the rows instead (N × N). Randomised: sweeps of subspace iteration find a basis of K + oversamples directions.
Everything a sweep begins with lies in buffers, so a run can stop and go on between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self, final

import torch
from torch import Tensor, nn

from quire.data.batch import Batch, Data, TensorData, in_order
from quire.errors import unknown_name
from quire.functional.components import (
    ACCURACY,
    align_signs,
    centred_image,
    check_components,
    components_for_share,
    explained_variance_ratio,
    leading_eigenpairs,
    moved,
    nystrom,
    orthonormal_rows,
    project,
    reconstruct,
    rounding,
    sharper_view,
    spectrum,
)
from quire.functional.scatter import HEAD_ROWS, View, first_view, moments, power_sums
from quire.functional.threads import one_thread
from quire.options import check
from quire.tasks.common import require_features
from quire.tasks.on_host import OnHost, gathered
from quire.train.statistics import StatisticsTask, Swept, as_rows
from quire.train.task import TASKS, Weight

Solver = Literal["auto", "exact", "randomised"]
SOLVERS = ("auto", "exact", "randomised")
Draw = Callable[[int, int], Tensor]
"""Standard normal numbers of the given shape, in float64."""

SCATTER = -1
"""The stage of a sweep that takes a scatter; other stages count the power iterations that are left."""


def choose_solver(rows: int, features: int, components: int | float | None) -> Solver:
    """Randomised where that is much less work: for some components of many features, unless the rows are so
    many more that the scatter of the features is small beside them."""
    tall = features <= 1000 and rows >= 10 * features
    few = isinstance(components, int) and components < 0.8 * min(rows, features)
    return "randomised" if few and not tall and max(rows, features) > 500 else "exact"


class Control(NamedTuple):
    """What the next sweep depends on beside tensors."""

    stage: int
    single: bool
    rows: int


@final
@TASKS.register("pca")
class PrincipalComponents(StatisticsTask):
    """The plane of K dimensions that is nearest to the rows: x̂ = Vᵀ V (x − μ) + μ.

    components: their number, the share of the variance that they explain, or None for all. Inputs of more
    than one dimension are taken as one row of numbers each.
    """

    higher_is_better = frozenset({"explained_share"})

    shift: Tensor
    basis: Tensor
    scale: Tensor
    stage: Tensor
    single: Tensor
    count: Tensor
    mean: Tensor
    components: Tensor
    """(K, D)"""
    variances: Tensor
    """(K,), falling."""
    total_variance: Tensor
    noise_variance: Tensor
    """Mean variance of the directions that are left out."""

    def __init__(
        self,
        features: int,
        components: int | float | None = None,
        *,
        solver: Solver = "auto",
        oversamples: int = 10,
        power_iterations: int | None = None,
    ) -> None:
        super().__init__()
        whole = isinstance(components, int) and not isinstance(components, bool) and components >= 1
        share = isinstance(components, float) and 0 < components < 1
        expected = "a number >= 1, a share between 0 and 1, or None for all"
        check(components is None or whole or share, "components", components, expected)
        if solver not in SOLVERS:
            raise unknown_name("solver", solver, SOLVERS)
        check(solver != "randomised" or whole, "components", components, "a number for the randomised solver")
        check(oversamples >= 0, "oversamples", oversamples, "a number >= 0")
        least = power_iterations is None or power_iterations >= 0
        check(least, "power_iterations", power_iterations, "a number >= 0, or None to choose one")
        self.features, self.wanted, self.solver = features, components, solver
        self.oversamples, self.power_iterations = oversamples, power_iterations
        self._control = OnHost(self._gather, self._read)
        self._control.known = Control(SCATTER, single=False, rows=0)
        none, zero = torch.zeros(0, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for name in ("shift", "mean"):
            self.register_buffer(name, none.new_zeros(features))
        for name in ("basis", "components"):
            self.register_buffer(name, none.new_zeros(0, features))
        for name in ("scale", "variances"):
            self.register_buffer(name, none.clone())
        for name in ("count", "total_variance", "noise_variance"):
            self.register_buffer(name, zero.clone())
        self.register_buffer("stage", torch.full((), SCATTER))
        self.register_buffer("single", torch.zeros((), dtype=torch.bool))

    @property
    def explained_ratio(self) -> Tensor:
        """λ_k / Σ_d λ_d of each component, for a scree plot."""
        return explained_variance_ratio(self.variances, self.total_variance)

    # -- Learning ------------------------------------------------------------------------------

    def start(self, data: Data, generator: torch.Generator) -> None:
        def draw(rows: int, columns: int) -> Tensor:
            numbers = torch.empty(rows, columns, dtype=torch.float64, device=generator.device)
            return numbers.normal_(generator=generator)

        self.begin(data, draw)

    @one_thread()
    def begin(self, data: Data, draw: Draw) -> None:
        """Choose the first sweep's coordinates; `draw` is asked for the random directions, if any."""
        rows, features = len(data), self.features
        head = as_rows(first_rows(data).inputs)
        require_features(head.shape[1], features)
        if isinstance(self.wanted, int):
            check_components(self.wanted, (rows, features))
        solver = self.solver
        if solver == "auto":
            solver = choose_solver(rows, features, self.wanted)
        view = first_view(head)
        if solver == "randomised":
            assert isinstance(self.wanted, int)
            self._begin_randomised(data, view, draw, min(self.wanted + self.oversamples, rows, features))
        elif rows < features:
            # Less room than the scatter of the features. Differences to one of the rows span what centred
            # rows do; that one's own is zero and stands last, where the basis is filled up.
            every = torch.cat([as_rows(batch.inputs).double() for batch in in_order(data)])
            spread = every - every[:1]
            basis = orthonormal_rows(spread.roll(-1, 0))
            self._look(View(every[0] + spread.mean(0), basis), SCATTER)
        else:
            self._look(view, SCATTER)

    def _begin_randomised(self, data: Data, view: View, draw: Draw, size: int) -> None:
        rows, features = len(data), self.features
        iterations = self.power_iterations
        if iterations is None:
            assert isinstance(self.wanted, int)
            iterations = 7 if self.wanted < 0.1 * min(rows, features) else 4
        directions = draw(min(rows, features), size).to(self.device)
        if rows < features:
            # Random mixtures of the centred rows, which lie in the plane that the rows span.
            mixed = directions.new_zeros(size, features)
            total, place = directions.new_zeros(features), 0
            for batch in in_order(data):
                z = as_rows(batch.inputs).to(self.device) - view.shift.to(self.device)
                mixed += directions[place : place + len(z)].mT @ z
                total += z.sum(0)
                place += len(z)
            directions = mixed.mT - torch.outer(total / rows, directions.sum(0))
        self._look(View(view.shift, orthonormal_rows(directions.mT), None, view.precision), iterations)

    def _gather(self) -> Tensor:
        return gathered(self.stage, self.single, self.count)

    @staticmethod
    def _read(numbers: list[float]) -> Control:
        stage, single, count = numbers
        return Control(int(stage), bool(single), int(count))

    def _view(self) -> View:
        basis = self.basis if len(self.basis) else None
        scale = self.scale if len(self.scale) else None
        return View(self.shift, basis, scale, torch.float32 if self._control().single else torch.float64)

    def _look(self, view: View, stage: int) -> None:
        empty = self.shift.new_zeros(0, self.features)
        self.shift = view.shift.to(self.shift)
        self.basis = empty if view.basis is None else view.basis.to(self.shift).contiguous()
        self.scale = empty[:, 0] if view.scale is None else view.scale.to(self.shift)
        single = view.precision != torch.float64
        self.stage.fill_(stage)
        self.single.fill_(single)
        self._control.known = self._control()._replace(stage=stage, single=single)

    def statistics(self, batch: Batch) -> dict[str, Tensor]:
        inputs = as_rows(batch.inputs)
        return (moments if self._control().stage == SCATTER else power_sums)(inputs, self._view())

    @one_thread()
    def update(self, totals: Mapping[str, Tensor]) -> Swept:
        self.count.copy_(totals["count"])
        if self._control().stage != SCATTER:
            self._counted(totals["count"])
            return self._update_basis(totals) if bool(totals["square"].isfinite()) else self._not_finite()
        view = self._view()
        found = spectrum(totals, view, self.wanted if isinstance(self.wanted, int) else None)
        self._counted(found.facts.rows)
        # A random basis holds the wanted directions alone; the whole variance is known from before.
        partial = view.basis is not None and len(view.basis) < self._rank()
        if not bool(found.square.isfinite()):
            return self._not_finite()
        square = self.total_variance.to(found.square) * self._freedom() if partial else found.square
        kept = self._keep(found.mean, found.axes, found.singular_values, square)
        closer = sharper_view(totals, view, found, kept, rest=not partial)
        if closer is not None:
            self._look(closer, SCATTER)
        return Swept(self._loss(), closer is None)

    def _not_finite(self) -> Swept:
        if not self._control().single:
            return Swept(float("nan"), True)
        self._look(self._view()._replace(precision=torch.float64), self._control().stage)
        return Swept(0.0, False)  # numbers whose squares are too large for float32; nothing is known yet

    def _update_basis(self, totals: Mapping[str, Tensor]) -> Swept:
        view, left = self._view(), self._control().stage
        assert view.basis is not None
        image, square = centred_image(totals, view.basis)
        if self._control().rows < self.features:
            # The basis lies among the rows already: its own directions are taken as they are.
            values, turn = leading_eigenpairs((image @ view.basis.mT + view.basis @ image.mT) / 2)
            values, axes = values.clamp_min(0).sqrt(), turn @ view.basis
        else:
            values, axes = nystrom(view.basis, image)
        mean = view.shift + totals["total"] / self.count
        kept = self._keep(mean, axes, values, square)
        if left:
            self._look(View(view.shift, orthonormal_rows(image), None, view.precision), left - 1)
            return Swept(self._loss(), False)
        drift = totals["total"].square().sum() / self.count
        floor = rounding(view.precision) * (values[0].square() + drift) / ACCURACY[view.precision]
        done = not bool(values[: min(kept, self._control().rows - 1)].square().amin() < floor)
        if not done:
            self._look(View(mean, orthonormal_rows(image)), SCATTER)
        return Swept(self._loss(), done)

    def _counted(self, count: Tensor | float) -> None:
        self._control.known = self._control()._replace(rows=int(count))

    def _rank(self) -> int:
        return min(self._control().rows, self.features)

    def _freedom(self) -> int:
        return max(self._control().rows - 1, 1)

    def _keep(self, mean: Tensor, axes: Tensor, singular_values: Tensor, square: Tensor) -> int:
        """Take over the leading components, and say how many there are."""
        squares, rank = singular_values.square(), self._rank()
        if isinstance(self.wanted, float):
            kept = components_for_share(squares[:rank], square, self.wanted)
        else:
            kept = rank if self.wanted is None else self.wanted
        rest = squares[kept:].sum() if len(squares) >= rank else square - squares[:kept].sum()
        rest = rest.clamp_min(0)
        found = moved(
            self.mean.device, mean=mean, components=align_signs(axes[:kept]),
            variances=squares[:kept] / self._freedom(), total_variance=square / self._freedom(),
            noise_variance=rest / self._freedom() / max(rank - kept, 1),
        )  # fmt: skip
        for name, value in found.items():
            # What is saved has memory of its own, laid out as it will be once it is read again: products of
            # it then round alike.
            setattr(self, name, value.to(self.mean.dtype).clone(memory_format=torch.contiguous_format))
        self._left_out = float(rest) if kept < rank else 0.0
        return kept

    def _loss(self) -> float:
        """The mean squared distance of a row to the plane."""
        return self._left_out / self._control().rows

    def finish(self, data: Data, validation: Data | None) -> None:
        """Nothing that sweeps needed stays."""
        self._look(View(self.mean), SCATTER)

    @property
    def learned(self) -> int:
        return self.components.numel() + self.features

    # -- Judging and predicting ----------------------------------------------------------------

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        return {"reconstruction": float(len(batch))}

    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return {"reconstruction": self.loss_each(batch)["reconstruction"].sum(dtype=torch.float64)}

    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        """‖x − x̂‖² of each row."""
        rows = as_rows(batch.inputs)
        nearest = reconstruct(project(rows, self.mean, self.components), self.mean, self.components)
        return {"reconstruction": (rows - nearest).square().sum(1)}

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        terms = self.terms(batch)
        rows = as_rows(batch.inputs)
        tallies = {
            "numbers": torch.tensor(float(rows.numel()), dtype=torch.float64),
            "error": terms["reconstruction"],
            "spread": (rows - self.mean).square().sum(dtype=torch.float64),
        }
        return terms, tallies

    def tally(self, batch: Batch) -> dict[str, Tensor]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        """explained_share: 1 − Σ‖x − x̂‖² / Σ‖x − μ‖². reconstruction_error: the mean of (x − x̂)² over all
        numbers."""
        error, spread = float(tallies["error"]), float(tallies["spread"])
        share = 1 - error / spread if spread > 0 else 1.0
        return {"explained_share": share, "reconstruction_error": error / float(tallies["numbers"])}

    @torch.no_grad()
    def predict(self, inputs: Tensor, mode: str = "mode") -> dict[str, Tensor]:
        """ "scores" (B, K), the coordinates in the plane, and "reconstruction", shaped like the inputs."""
        if mode not in ("mode", "mean"):
            raise unknown_name("prediction mode", mode, ("mode", "mean"))
        scores = project(as_rows(inputs), self.mean, self.components)
        nearest = reconstruct(scores, self.mean, self.components)
        return {"scores": scores, "reconstruction": nearest.view(inputs.shape)}

    # -- Saving --------------------------------------------------------------------------------

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        adopt_lengths(self, state, prefix)
        super()._load_from_state_dict(state, prefix, *rest)
        self._control.forget()

    def spec(self) -> dict[str, Any]:
        return {
            "task": "pca",
            "features": self.features,
            "components": self.wanted,
            "solver": self.solver,
            "oversamples": self.oversamples,
            "power_iterations": self.power_iterations,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        names = ("components", "solver", "oversamples", "power_iterations")
        return cls(spec["features"], **{name: spec[name] for name in names})


def first_rows(data: Data) -> Batch:
    """A few rows to begin with, without a copy where they lie in memory."""
    rows = torch.arange(min(len(data), HEAD_ROWS))
    if isinstance(data, TensorData):
        return Batch({name: value[: len(rows)] for name, value in data.fields.items()}, rows)
    return data.take(rows)


def adopt_lengths(module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    """Give buffers the length that they had when they were saved: how many components there are, or whether
    there is a basis, is found out in training."""
    for name, buffer in module.named_buffers(recurse=False):
        saved = state.get(prefix + name)
        if saved is not None and saved.dim() == buffer.dim() > 0 and saved.shape[1:] == buffer.shape[1:]:
            setattr(module, name, buffer.new_zeros(saved.shape))
