"""Gaussian mixtures by expectation-maximisation, from sums over rows.

N rows, B rows of a batch, D features, K components, R starts at once.

A sweep computes the responsibilities of all rows under the present parameters and adds up what the next
parameters are made of; several starts go through the rows together and each stops when its likelihood no
longer rises. The parameters are kept in float64 and in the coordinates of a `Frame` in which all rows
together have mean 0 and covariance 1; `mixture()` gives them in the rows' own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, final, get_args

import torch
from torch import Tensor

from quire.data.batch import Batch, Data
from quire.errors import InputError, unknown_name
from quire.functional.mixture_sweeps import Backend, Frame, cancellation, mixture_sweep, takes_kernels
from quire.functional.mixtures import (
    Mixture,
    Moments,
    akaike_information,
    bayesian_information,
    covariance_shape,
    mixture_log_densities,
    mixture_parameter_count,
    mixture_update,
    sample_mixture,
)
from quire.functional.threads import one_thread
from quire.models.conditional import Labels, asked_classes
from quire.options import check_range
from quire.tasks.common import require_features
from quire.tasks.generating import check_asked
from quire.tasks.mixture_start import Start, first_mixtures, whitening_frame
from quire.tasks.on_host import OnHost, gathered
from quire.train.statistics import StatisticsTask, Swept, as_rows
from quire.train.task import TASKS, Weight

CHUNK_NUMBERS = 2**22
"""Differences x − μ that are held at once; more on a GPU, which they should keep busy."""


class Control(NamedTuple):
    """What the course of things depends on, as numbers."""

    positive: bool
    """Whether all covariances are positive definite."""
    cancels: float
    active: list[bool]
    bounds: list[float]
    which: Tensor | slice
    """The starts that go on, or all if none does."""


class OfFrame(NamedTuple):
    """What follows from the frame alone."""

    state: tuple[int, int]
    """Of the frame's memory when this was computed."""
    floor: Tensor
    """What `reg_covar` adds to the covariances in the frame."""
    log_determinant: Tensor


@final
@TASKS.register("mixture")
class MixtureTask(StatisticsTask):
    """p(x) = Σ_k π_k N(x; μ_k, Σ_k), fitted by EM from R starts at once; the best of them answers."""

    def __init__(
        self,
        features: int,
        components: int,
        *,
        covariance_type: str = "full",
        starts: int = 1,
        init: str = "kmeans",
        tol: float = 1e-3,
        reg_covar: float = 1e-6,
        backend: Backend = "auto",
    ) -> None:
        """A start is done when the mean log-likelihood of a row changes by less than `tol`. `reg_covar` is
        added to all variances. `init` chooses centres, whose nearest rows give the first parameters ("random"
        draws responsibilities instead)."""
        super().__init__()
        if init not in get_args(Start):
            raise unknown_name("start", init, get_args(Start))
        self.features, self.components, self.starts = features, components, starts
        self.covariance_type, self.init = covariance_type, init
        self.tol, self.reg_covar, self.backend = tol, reg_covar, backend
        check_range(self, "", features=">= 1", components=">= 1", starts=">= 1", tol=">= 0", reg_covar=">= 0")
        shape = covariance_shape(covariance_type, components, features)
        scale = shape[1:] if covariance_type != "tied" else (features, features)

        def add(name: str, *shape: int, value: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
            self.register_buffer(name, torch.full(shape, value, dtype=dtype))

        add("weights", starts, components, value=1 / components)
        add("means", starts, components, features)
        add("covariances", starts, *shape, value=1.0)
        add("factors", starts, *shape, value=1.0)
        add("shift", features)
        add("scale", *scale, value=1.0)
        add("back", *scale, value=1.0)
        add("bounds", starts, value=-torch.inf)
        add("active", starts, value=True, dtype=torch.bool)
        add("sweeps", starts, value=0, dtype=torch.int64)
        add("best", value=0, dtype=torch.int64)
        add("cancels")
        self.trace: list[list[float]] = []
        """The mean log-likelihoods of all starts, sweep by sweep; −∞ before a start's first."""
        self._control = OnHost(self._gather, self._read)
        self._known_of_frame: OfFrame | None = None

    weights: Tensor
    means: Tensor
    covariances: Tensor
    factors: Tensor
    """Parameters of each start in the frame: (R, K), (R, K, D), and R of the shapes of `covariance_shape`."""
    shift: Tensor
    scale: Tensor
    back: Tensor
    bounds: Tensor
    """Mean log-likelihood of a row under each start before its last update, (R,)."""
    active: Tensor
    """Which starts go on, (R,)."""
    sweeps: Tensor
    """How often each start was updated, (R,)."""
    best: Tensor
    """The start with the largest likelihood."""
    cancels: Tensor
    """How small and far apart components are: `cancellation`."""

    @property
    def frame(self) -> Frame:
        return Frame(self.shift, self.scale, self.back)

    def _state(self) -> Mixture:
        return Mixture(self.weights, self.means, self.covariances, self.factors)

    def _best(self) -> Mixture:
        """The best start, in the frame."""
        return self._state().map(lambda tensor: tensor[self.best])

    def mixture(self) -> Mixture:
        """The best start's parameters, in the coordinates of the rows; float64."""
        return self.frame.take(self._best())

    def warnings(self, history: Sequence[Mapping[str, Any]]) -> list[str]:
        """Whether likelihoods are high for want of variance. A component's rises without bound where its rows
        are all alike, as they are in the columns of a category that it has to itself."""
        flat = self._flat_directions()
        if not flat.any():
            return []
        some, most = int((flat > 0).sum()), int(flat.max())
        return [
            f"{some} of {self.components} components are flat: in up to {most} of {self.features} directions "
            f"they have no more variance than the floor of {self.reg_covar:g}, where all rows together have "
            "more, so that their densities say more of the floor than of the rows; drop columns, or take a "
            "simpler shape or fewer components"
        ]

    @torch.no_grad()
    def _flat_directions(self) -> Tensor:
        """(K,): in how many directions the rows of each component have less variance than is added to it, not
        counting those in which all rows have as little."""
        mixture = self.mixture()
        away = mixture.means - mixture.weights @ mixture.means
        between = torch.einsum("k,ki,kj->ij", mixture.weights, away, away)
        if mixture.matrices:
            within = mixture.covariances.expand(self.components, -1, -1)
            own = torch.linalg.eigvalsh(within)
            all_rows = torch.linalg.eigvalsh(torch.einsum("k,kij->ij", mixture.weights, within) + between)
        else:
            own = mixture.covariances.reshape(self.components, -1).expand(-1, self.features)
            all_rows = mixture.weights @ own + between.diag()
        least = 2 * self.reg_covar
        return ((own < least).sum(1) - (all_rows < least).sum()).clamp(min=0)

    # -- Learning ------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, data: Data, generator: torch.Generator) -> None:
        """Choose the frame from the mean and covariance of all rows, and R first mixtures."""
        if len(data) < self.components:
            raise InputError(
                f"{len(data)} rows for {self.components} components",
                expected=f"at least {self.components} rows",
                fix="ask for fewer components",
            )
        self.fit_frame(data)
        floor = self._of_frame().floor
        self.begin(first_mixtures(data, self.frame, self._state(), self.init, generator, floor))

    def begin(self, mixture: Mixture) -> None:
        """Stand at these parameters, (R, …) in the frame, as at the beginning of a run."""
        for name, value in mixture._asdict().items():
            getattr(self, name).copy_(value)
        self._require_positive(bool(self.factors.isfinite().all()))
        self.bounds.fill_(-torch.inf)
        self.active.fill_(True)
        self.sweeps.zero_()
        self.best.zero_()
        self.cancels.copy_(cancellation(mixture))
        self.trace = []
        self._control.forget()

    @torch.no_grad()
    def fit_frame(self, data: Data) -> None:
        """Take the coordinates in which all rows together have mean 0 and covariance 1."""
        frame = whitening_frame(data, self.covariance_type, self.reg_covar, self.shift.device)
        require_features(len(frame.shift), self.features)
        for name, value in frame._asdict().items():
            getattr(self, name).copy_(value)

    @torch.no_grad()
    def statistics(self, batch: Batch) -> dict[str, Tensor]:
        """N, Σ ln p and the moments of each active start."""
        now = self._control()
        mixture = self._state().map(lambda tensor: tensor[now.which])
        x = as_rows(batch.inputs)
        found = mixture_sweep(x, mixture, self.frame, now.cancels, backend=self.backend)
        rows = found.log_likelihood.new_full((), len(x))
        centred = rows if found.centred else torch.zeros_like(rows)
        sums = {"rows": rows, "centred": centred, "log_likelihood": found.log_likelihood}
        return sums | found.moments._asdict()

    @torch.no_grad()
    @one_thread()
    def advance(self, totals: Mapping[str, Tensor]) -> Tensor:
        """μ_k, Σ_k and π_k of the active starts."""
        which = self._control().which
        like = self._state().map(lambda tensor: tensor[which])
        moments = Moments(totals["counts"], totals["first"], totals["second"])
        shift = torch.where(totals["centred"] > 0, like.means, 0.0)
        mixture = mixture_update(moments, like, shift, self._of_frame().floor)
        bounds = totals["log_likelihood"] / totals["rows"] + self._of_frame().log_determinant
        self.active[which] = (bounds - self.bounds[which]).abs() >= self.tol
        for name, value in mixture._asdict().items():
            getattr(self, name)[which] = value
        self.bounds[which] = bounds
        self.sweeps[which] += 1
        self.best.copy_(self.bounds.argmax())
        self.cancels.copy_(cancellation(mixture))
        return self._gather()

    def swept(self, numbers: list[float]) -> Swept:
        """Done when the likelihood of no start changes by `tol`."""
        now = self._control.tell(numbers)
        self._require_positive(now.positive)
        self.trace.append(now.bounds)
        return Swept(-max(now.bounds), not any(now.active))

    def course(self, batch: Batch) -> Hashable:
        now = self._control()
        self._of_frame()  # not while it is recorded: it would be part of the record
        x, mixture = as_rows(batch.inputs), self._state()
        if batch.inputs.dtype == torch.float32 and takes_kernels(x, mixture, now.cancels, self.backend):
            return tuple(now.active)
        return None

    def _gather(self) -> Tensor:
        # What is not positive definite has factors that are not finite, and these are in ‖μ_k C_k‖².
        return gathered(self.cancels.isfinite(), self.cancels, self.active, self.bounds)

    def _read(self, numbers: list[float]) -> Control:
        positive, cancels, *rest = numbers
        active, bounds = [bool(goes) for goes in rest[: self.starts]], rest[self.starts :]
        before = self._control.known
        which: Tensor | slice = slice(None)
        if before is not None and before.active == active:
            which = before.which  # the same memory: what was recorded looks there
        elif any(active) and not all(active):
            which = torch.tensor(active, device=self.device).nonzero()[:, 0]
        return Control(bool(positive), cancels, active, bounds, which)

    def _of_frame(self) -> OfFrame:
        """Computed once and not in every sweep."""
        state, known = (self.scale.data_ptr(), self.scale._version), self._known_of_frame
        if known is None or known.state != state:
            known = OfFrame(state, self.frame.floor(self.reg_covar), self.frame.log_determinant())
            self._known_of_frame = known
        return known

    def _require_positive(self, positive: bool) -> None:
        if not positive:
            raise InputError(
                "a component has collapsed: its covariance is not positive definite",
                expected="more rows in each component than features, none of them constant or dependent",
                fix=f"ask for fewer components, or raise reg_covar ({self.reg_covar:g})",
            )

    @property
    def learned(self) -> int:
        return mixture_parameter_count(self.covariance_type, self.components, self.features)

    # -- Judging and predicting ----------------------------------------------------------------

    def weigh(self, batch: Batch) -> dict[str, Weight]:
        return {"negative_log_likelihood": float(len(batch))}

    @torch.no_grad()
    def terms(self, batch: Batch, player: str = "model") -> dict[str, Tensor]:
        return {
            "negative_log_likelihood": -self.log_densities(as_rows(batch.inputs)).logsumexp(-1).double().sum()
        }

    @torch.no_grad()
    def judge(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
        terms = self.terms(batch)
        (loss,) = terms.values()
        return terms, {"rows": loss.new_full((), len(batch)), "log_likelihood": -loss}

    @torch.no_grad()
    def tally(self, batch: Batch) -> dict[str, Any]:
        return self.judge(batch)[1]

    def measures(self, tallies: Mapping[str, Any]) -> dict[str, float]:
        parameters = mixture_parameter_count(self.covariance_type, self.components, self.features)
        likelihood, rows = float(tallies["log_likelihood"]), int(tallies["rows"])
        return {
            "bic": bayesian_information(likelihood, parameters, rows),
            "aic": akaike_information(likelihood, parameters),
        }

    def loss_each(self, batch: Batch) -> dict[str, Tensor]:
        return {"negative_log_likelihood": -self.log_densities(as_rows(batch.inputs)).logsumexp(-1)}

    @torch.no_grad()
    def log_densities(self, x: Tensor) -> Tensor:
        """ln π_k N(x_n; μ_k, Σ_k) of rows (N, D) under the best start, (N, K), computed in float64."""
        require_features(x.shape[-1], self.features)
        mixture, frame = self._best(), self.frame
        rows = (8 if x.is_cuda else 1) * CHUNK_NUMBERS // (self.components * self.features)
        # What is exported takes any number of rows, so no number of chunks.
        parts = (x,) if torch.compiler.is_exporting() else x.split(max(1, rows))
        logs = [mixture_log_densities(frame.enter(part.double()), mixture) for part in parts]
        return (torch.cat(logs) + frame.log_determinant()).to(x.dtype)

    @torch.no_grad()
    def predict(self, inputs: Tensor, mode: str = "mode") -> dict[str, Tensor]:
        """The most probable component (B,), the responsibilities of all (B, K), and ln p(x) (B,)."""
        if mode != "mode":
            raise unknown_name("mode", mode, ["mode"])
        logs = self.log_densities(as_rows(inputs))
        return {
            "component": logs.argmax(-1),
            "responsibility": logs.softmax(-1),
            "log_density": logs.logsumexp(-1),
        }

    @torch.no_grad()
    def draw(self, rows: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """`rows` draws (N, D), and the component (N,) that each came from."""
        return sample_mixture(self.mixture(), rows, generator)

    @torch.no_grad()
    def sample(self, count: int, label: Labels = None, temperature: float = 1.0, seed: int = 0) -> Tensor:
        """`count` draws (N, D), with `temperature` times the deviation of each component; the same for the
        same seed. There are no classes to ask for."""
        check_asked(count, temperature)
        asked_classes(0, count, label)
        mixture = self.mixture().map(lambda tensor: tensor.cpu())
        rows, component = sample_mixture(mixture, count, torch.Generator().manual_seed(seed))
        return mixture.means[component].lerp(rows, temperature).to(self.device)

    # -- Saving --------------------------------------------------------------------------------

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self._control.forget()

    def spec(self) -> dict[str, Any]:
        return {
            "task": "mixture",
            "features": self.features,
            "components": self.components,
            "covariance_type": self.covariance_type,
            "starts": self.starts,
            "init": self.init,
            "tol": self.tol,
            "reg_covar": self.reg_covar,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> MixtureTask:
        return cls(**{name: value for name, value in spec.items() if name != "task"})
