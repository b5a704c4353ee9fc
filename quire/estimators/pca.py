"""Principal component analysis with scikit-learn's interface.

N rows, D features, K components.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from quire.data.batch import TensorData
from quire.errors import DataError, InputError, unknown_name
from quire.estimators.base import Array, in_form_of, read_features, to_numpy, to_tensor
from quire.estimators.network import RandomState, is_number
from quire.functional.components import explained_variance_ratio, moved, project, reconstruct
from quire.options import check
from quire.tasks.components import PrincipalComponents, Solver
from quire.train.statistics import fit_statistics

SOLVERS: dict[str, Solver] = {
    "auto": "auto",
    "full": "exact",
    "covariance_eigh": "exact",
    "randomized": "randomised",
}
SWEEPS = 100
"""More than are ever taken: an exact solution needs one to four, a randomised one its power iterations."""


class PCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Principal component analysis: the K directions in which the rows vary most.

    n_components: their number, a share of the variance between 0 and 1 that they have to exceed, or None for
        min(N, D).
    whiten: whether `transform` divides each score by its standard deviation.
    svd_solver: "full" and "covariance_eigh" are the same here: the scatter in one pass, and further passes
        only where it hides what was asked for. "randomized" is subspace iteration from a random start; "auto"
        takes it where scikit-learn would. With the same `random_state`, both start alike.
    iterated_power, n_oversamples: of the randomised solver.

    X may be an array, a data frame or a tensor on any device; what comes of a tensor is a tensor there.

    Attributes: `components_` (K, D), `explained_variance_` (K,), `explained_variance_ratio_` (K,),
    `singular_values_` (K,), `mean_` (D,), `noise_variance_`, `n_components_`, `n_samples_`,
    `n_features_in_`, `feature_names_in_`.
    """

    components_: Array
    explained_variance_: Array
    explained_variance_ratio_: Array
    singular_values_: Array
    mean_: Array
    noise_variance_: float
    n_components_: int
    n_samples_: int

    def __init__(
        self,
        n_components: int | float | None = None,
        *,
        whiten: bool = False,
        svd_solver: Literal["auto", "full", "covariance_eigh", "randomized"] = "auto",
        iterated_power: int | Literal["auto"] = "auto",
        n_oversamples: int = 10,
        random_state: RandomState = None,
    ) -> None:
        self.n_components = n_components
        self.whiten = whiten
        self.svd_solver = svd_solver
        self.iterated_power = iterated_power
        self.n_oversamples = n_oversamples
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    # -- Learning ------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn the directions of X (N, D); y is ignored."""
        if self.svd_solver not in SOLVERS:
            raise unknown_name("svd_solver", self.svd_solver, SOLVERS)
        good = is_number(self.n_oversamples, 0, np.inf, whole=True)
        check(good, "n_oversamples", self.n_oversamples, "an integer >= 0")
        power = None if isinstance(self.iterated_power, str) else self.iterated_power
        good = is_number(power, 0, np.inf, whole=True) if power is not None else self.iterated_power == "auto"
        check(good, "iterated_power", self.iterated_power, '"auto" or an integer >= 0')
        # Whether X is finite is left to its sums: to look at each number would take a tenth of the time.
        inputs = read_features(self, X, reset=True, finite=False)
        rows, features = inputs.shape
        if rows < 2:
            raise InputError(
                f"PCA was given n_samples = {rows}",
                expected="at least 2",
                fix="add rows: a single one does not vary",
            )
        with inputs.device:
            task = PrincipalComponents(
                features,
                self._wanted(rows, features),
                solver=SOLVERS[self.svd_solver],
                oversamples=self.n_oversamples,
                power_iterations=power,
            )
        random = check_random_state(self.random_state)
        data = TensorData({"inputs": inputs})
        with torch.no_grad():
            task.begin(data, lambda height, width: torch.from_numpy(random.normal(size=(height, width))))
        try:
            fit_statistics(task, data, sweeps=SWEEPS, device=inputs.device, started=True)
        except DataError:
            read_features(self, X, reset=True)  # says what is wrong as all estimators do
            raise
        self._take_over(task, rows, inputs.dtype)
        return self

    def _wanted(self, rows: int, features: int) -> int | float | None:
        wanted, most = self.n_components, min(rows, features)
        if wanted is None:
            return most if self.svd_solver == "randomized" else None
        real = isinstance(wanted, float | np.floating)
        whole = isinstance(wanted, int | np.integer) and not isinstance(wanted, bool)
        good = 0 < wanted < 1 if real else whole and 1 <= wanted <= most
        expected = f"a number from 1 to min(n_samples, n_features) = {most}"
        if self.svd_solver == "randomized":
            good = good and whole
        else:
            expected += ", a share between 0 and 1, or None"
        check(bool(good), "n_components", wanted, expected)
        return float(wanted) if real else int(wanted)

    def _take_over(self, task: PrincipalComponents, rows: int, dtype: torch.dtype) -> None:
        names = ("mean", "components", "variances", "total_variance", "noise_variance")
        found = moved(torch.device("cpu"), **{name: getattr(task, name) for name in names})

        def array(values: Tensor) -> Array:
            numbers: Array = to_numpy(values.to(dtype))
            return numbers

        variances = found["variances"]
        self.mean_, self.components_ = array(found["mean"]), array(found["components"])
        self.explained_variance_ = array(variances)
        self.explained_variance_ratio_ = array(explained_variance_ratio(variances, found["total_variance"]))
        self.singular_values_ = array((variances * (rows - 1)).sqrt())
        self.noise_variance_ = float(found["noise_variance"])
        self.n_components_, self.n_samples_ = len(self.components_), rows

    # -- Using ---------------------------------------------------------------------------------

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _plane(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return to_tensor(self.mean_).to(device), to_tensor(self.components_).to(device)

    def _deviations(self, like: Tensor) -> Tensor:
        """Standard deviations of the scores; those that are zero would divide by nothing."""
        deviations = to_tensor(self.explained_variance_).to(like).sqrt()
        return deviations.clamp_min(torch.finfo(like.dtype).eps)

    def transform(self, X: Any) -> Any:
        """Scores V(x − μ) of each row, (N, K)."""
        inputs = read_features(self, X)
        scores = project(inputs, *self._plane(inputs.device))
        return in_form_of(X, scores / self._deviations(scores) if self.whiten else scores)

    def inverse_transform(self, X: Any) -> Any:
        """The point Vᵀ(scores) + μ of the plane for each row of scores X, (N, D)."""
        check_is_fitted(self)
        scores = X.detach() if isinstance(X, Tensor) else to_tensor(np.asarray(X))
        if not scores.is_floating_point():
            scores = scores.double()
        if scores.dim() != 2 or scores.shape[1] != self.n_components_:
            raise InputError(
                f"scores of shape {tuple(scores.shape)}",
                expected=f"(samples, {self.n_components_}), as transform gives them",
            )
        if self.whiten:
            scores = scores * self._deviations(scores)
        return in_form_of(X, reconstruct(scores, *self._plane(scores.device)))

    # -- The density that goes with it ---------------------------------------------------------

    def get_covariance(self) -> Array:
        """Vᵀ diag(λ − σ²) V + σ² 1, σ² the noise variance: what rows of this model vary by, (D, D)."""
        check_is_fitted(self)
        axes, excess = self.components_, np.maximum(self.explained_variance_ - self.noise_variance_, 0)
        covariance: Array = (axes.T * excess) @ axes
        covariance.flat[:: len(covariance) + 1] += self.noise_variance_
        return covariance

    def score_samples(self, X: Any) -> Any:
        """ln p(x) of each row under N(μ, covariance), probabilistic PCA (Tipping and Bishop, 1999)."""
        rows = read_features(self, X).double()
        left_out, noise = rows.shape[1] - self.n_components_, self.noise_variance_
        variances = to_tensor(self.explained_variance_).to(rows)
        if not bool((variances > 0).all()) or (left_out and not noise > 0):
            raise InputError(
                "a density of rows that do not vary in some direction",
                expected="a variance above 0 in each of them",
                fix="ask for fewer components, so that the rest is noise",
            )
        mean, axes = (part.to(rows) for part in self._plane(rows.device))
        centred = rows - mean
        scores = centred @ axes.mT
        distance = (scores.square() / variances).sum(1)
        logarithm = float(variances.log().sum())
        if left_out:
            distance += (centred - scores @ axes).square().sum(1) / noise
            logarithm += left_out * math.log(noise)
        constant = rows.shape[1] * math.log(2 * math.pi) + logarithm
        return in_form_of(X, -0.5 * (distance + constant))

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of ln p(x) over the rows; y is ignored."""
        return float(self.score_samples(X).mean())
