"""Gaussian mixtures by expectation-maximisation, from sums over rows.

N rows, B rows of a batch, D features, K components, R starts at once.

A sweep computes the responsibilities of all rows under the present parameters and adds up what the next
parameters are made of; several starts go through the rows together and each stops when its likelihood no
longer rises. The parameters are kept in float64 and in the coordinates of a `Frame` in which all rows
together have mean 0 and covariance 1; `mixture()` gives them in the rows' own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor

from quire.data.batch import Batch, Data, in_order
from quire.errors import DataError, InputError, unknown_name
from quire.functional.clusters import centre_update, kmeans_plusplus, random_rows
from quire.functional.mixture_sweeps import (
    Backend,
    Frame,
    cancellation,
    frame_of,
    mixture_sweep,
    product_moments,
    takes_kernels,
)
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
from quire.functional.nearest import cluster_sums, nearest_centres
from quire.functional.threads import one_thread
from quire.models.conditional import Labels, asked_classes
from quire.tasks.generating import check_asked
from quire.train.statistics import StatisticsTask, Swept, as_rows
from quire.train.sums import add_to
from quire.train.task import TASKS, Weight

Start = Literal["kmeans", "k-means++", "random", "random_from_data"]
SAMPLE_ROWS = 2**17
"""Rows that centres are chosen from."""
ROUNDS, SETTLED = 100, 1e-4
"""K-means ends after so many rounds, or when the centres move by less than this part of the variance."""
CHUNK_NUMBERS = 2**22
"""Differences x − μ that are held at once; more on a GPU, which they should keep busy."""


class _Control(NamedTuple):
    """What the course of things depends on, as numbers."""

    positive: bool
    """Whether all covariances are positive definite."""
    cancels: float
    active: list[bool]
    bounds: list[float]
    which: Tensor | slice
    """The starts that go on, or all if none does."""


class _Fixed(NamedTuple):
    state: tuple[int, int]
    """Of the frame that it follows from."""
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
        for name, value, least in (
            ("features", features, 1), ("components", components, 1), ("starts", starts, 1),
            ("tol", tol, 0), ("reg_covar", reg_covar, 0),
        ):  # fmt: skip
            if not value >= least:
                raise InputError(f"{name} {value}", expected=f"{name} >= {least}")
        self.features, self.components, self.starts = features, components, starts
        self.covariance_type, self.init = covariance_type, init
        self.tol, self.reg_covar, self.backend = tol, reg_covar, backend
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
        self._known: _Control | None = None
        self._of_frame: _Fixed | None = None

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
        device = self.shift.device
        about = torch.zeros_like(self.means)
        centres: Tensor | None = None
        if self.init != "random":
            rows = torch.randperm(len(data), generator=generator, device=generator.device)[:SAMPLE_ROWS]
            sample = as_rows(data.take(rows.sort().values.cpu()).inputs).to(device)
            centres = choose_centres(sample, self.components, self.starts, self.init, generator)
            about = self.frame.enter(centres)
        totals: dict[str, Tensor] = {}
        like = self._state()
        for batch in in_order(data):
            for x in as_rows(batch.inputs).to(device).split(max(1, CHUNK_NUMBERS // self.features**2)):
                if centres is None:
                    moments = product_moments(
                        self.frame.enter(x.double()), self._draw(len(x), generator), like
                    )
                else:
                    moments = self._nearest_moments(x, centres, about)
                add_to(totals, moments._asdict())
        self.begin(mixture_update(Moments(**totals), like, about, self._floor()))

    def _draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random responsibilities (R, B, K)."""
        shape = (self.starts, rows, self.components)
        drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
        return drawn / drawn.sum(-1, keepdim=True)

    def _nearest_moments(self, x: Tensor, centres: Tensor, about: Tensor) -> Moments:
        """Moments of rows that belong to the nearest centre alone, about these (R, K, D): exact however small
        clusters are beside their distances."""
        found = []
        inside = self.frame.enter(x.double())
        for r in range(self.starts):
            nearest = nearest_centres(x, centres[r])
            share = torch.nn.functional.one_hot(nearest, self.components).double()
            like = Mixture(*(tensor[r] for tensor in self._state()))
            found.append(product_moments(inside - about[r][nearest], share, like))
        return Moments(*(torch.stack(parts) for parts in zip(*found, strict=True)))

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
        self._known = None

    @torch.no_grad()
    def fit_frame(self, data: Data) -> None:
        """Take the coordinates in which all rows together have mean 0 and covariance 1."""
        provisional: Tensor | None = None
        totals: dict[str, Tensor] = {}
        for batch in in_order(data):
            for part in (
                as_rows(batch.inputs).to(self.shift.device).split(max(1, CHUNK_NUMBERS // self.features))
            ):
                x = part.double()
                provisional = x.mean(0) if provisional is None else provisional
                x = x - provisional
                add_to(totals, {"first": x.sum(0), "second": x.mT @ x})
        assert provisional is not None
        mean = totals["first"] / len(data)
        covariance = totals["second"] / len(data) - mean[:, None] * mean
        if not bool(covariance.isfinite().all()):
            raise DataError(
                "rows with values that are not finite numbers, or too large to be squared",
                expected="finite numbers below 1e150",
                fix="remove those rows, or fill in their missing values",
            )
        frame = frame_of(mean + provisional, covariance, self.covariance_type, self.reg_covar)
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
        mixture = mixture_update(moments, like, shift, self._floor())
        bounds = totals["log_likelihood"] / totals["rows"] + self._fixed().log_determinant
        self.active[which] = (bounds - self.bounds[which]).abs() >= self.tol
        for name, value in mixture._asdict().items():
            getattr(self, name)[which] = value
        self.bounds[which] = bounds
        self.sweeps[which] += 1
        self.best.copy_(self.bounds.argmax())
        self.cancels.copy_(cancellation(mixture))
        return self._numbers()

    def swept(self, numbers: list[float]) -> Swept:
        """Done when the likelihood of no start changes by `tol`."""
        self._know(numbers)
        now = self._control()
        self._require_positive(now.positive)
        self.trace.append(now.bounds)
        return Swept(-max(now.bounds), not any(now.active))

    def course(self, batch: Batch) -> Hashable:
        now = self._control()
        self._fixed()  # not while it is recorded: it would be part of the record
        x, mixture = as_rows(batch.inputs), self._state()
        if batch.inputs.dtype == torch.float32 and takes_kernels(x, mixture, now.cancels, self.backend):
            return tuple(now.active)
        return None

    def _control(self) -> _Control:
        """What the course of things depends on. A GPU is waited for once a sweep."""
        if self._known is None:
            self._know(self._numbers().tolist())
        assert self._known is not None
        return self._known

    def _numbers(self) -> Tensor:
        # What is not positive definite has factors that are not finite, and these are in ‖μ_k C_k‖².
        parts = (self.cancels.isfinite(), self.cancels, self.active, self.bounds)
        return torch.cat([part.reshape(-1).double() for part in parts])

    def _know(self, numbers: list[float]) -> None:
        positive, cancels, *rest = numbers
        active, bounds = [bool(goes) for goes in rest[: self.starts]], rest[self.starts :]
        before = self._known
        which: Tensor | slice = slice(None)
        if before is not None and before.active == active:
            which = before.which
        elif any(active) and not all(active):
            which = torch.tensor(active, device=self.device).nonzero()[:, 0]
        self._known = _Control(bool(positive), cancels, active, bounds, which)

    def load_state_dict(self, *given: Any, **options: Any) -> Any:
        self._known = None
        return super().load_state_dict(*given, **options)

    def _floor(self) -> Tensor:
        return self._fixed().floor

    def _fixed(self) -> _Fixed:
        """What follows from the frame alone, computed once and not in every sweep."""
        state = self.scale.data_ptr(), self.scale._version
        if self._of_frame is None or self._of_frame.state != state:
            self._of_frame = _Fixed(state, self.frame.floor(self.reg_covar), self.frame.log_determinant())
        return self._of_frame

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
        if x.shape[-1] != self.features:
            raise InputError(f"rows of {x.shape[-1]} features", expected=f"{self.features} features")
        mixture, frame = self._best(), self.frame
        rows = (8 if x.is_cuda else 1) * CHUNK_NUMBERS // (self.components * self.features)
        # What is exported takes any number of rows, so no number of chunks.
        parts = (x,) if torch.compiler.is_exporting() else x.split(max(1, rows))
        logs = [mixture_log_densities(frame.enter(part.double()), mixture) for part in parts]
        return (torch.cat(logs) + frame.log_determinant()).to(x.dtype)

    @torch.no_grad()
    def predict(self, inputs: Tensor, mode: str = "mode", **options: Any) -> dict[str, Tensor]:
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


def choose_centres(x: Tensor, components: int, starts: int, init: str, generator: torch.Generator) -> Tensor:
    """K centres among rows (N, D) for each of R starts, (R, K, D), in float64.

    "random_from_data" takes different rows, "k-means++" rows that are far apart, and "kmeans" moves those
    until K-means has all but settled.
    """
    if init == "random_from_data":
        return x[random_rows(len(x), components, generator, starts=starts, device=x.device)].double()
    chosen = x[kmeans_plusplus(x, components, generator, starts=starts)].double()
    if init == "k-means++":
        return chosen
    settled = SETTLED * float(x.double().var(0, correction=0).mean())
    refined = []
    for centres in chosen:
        for _ in range(ROUNDS):
            sums = cluster_sums(x, centres)
            centres, before = centre_update(sums.sums, sums.counts), centres
            if float((centres - before).square().sum()) <= settled:
                break
        refined.append(centres)
    return torch.stack(refined)
