"""Gaussian mixtures as a scikit-learn estimator.

N rows, D features, K components, R starts.

    parameters   as in scikit-learn's GaussianMixture. `n_init` starts go through the rows together.
                 `init_params` chooses K centres; the rows nearest to each give its first weight, mean and
                 covariance ("random" draws responsibilities instead)

    attributes   weights_, means_, covariances_, precisions_, precisions_cholesky_ (float64, in scikit-learn's
                 shapes), converged_, n_iter_, lower_bound_, lower_bounds_, n_features_in_, feature_names_in_

Everything is computed in float64, but for full covariances of float32 tensors on a GPU, which are computed to
the last digits of float32 with sums in float64. Tensors stay on their device.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, Self, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from quire.data.batch import TensorData
from quire.errors import InputError, unknown_name
from quire.estimators.base import Array, in_form_of, read_features, to_numpy
from quire.estimators.network import RandomState, draw_seed, is_number
from quire.functional.mixtures import (
    COVARIANCE_TYPES,
    Mixture,
    akaike_information,
    bayesian_information,
    covariance_shape,
    make_mixture,
    mixture_parameter_count,
)
from quire.options import check
from quire.tasks.mixture import MixtureTask
from quire.tasks.mixture_start import Start
from quire.train.statistics import fit_statistics


class GaussianMixture(DensityMixin, BaseEstimator):
    """p(x) = Σ_k π_k N(x; μ_k, Σ_k), fitted by expectation-maximisation: the log-likelihood never falls."""

    weights_: Array
    means_: Array
    covariances_: Array
    precisions_: Array
    precisions_cholesky_: Array
    converged_: bool
    n_iter_: int
    lower_bound_: float
    lower_bounds_: list[float]

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: str = "full",
        tol: float = 1e-3,
        reg_covar: float = 1e-6,
        max_iter: int = 100,
        n_init: int = 1,
        init_params: str = "kmeans",
        weights_init: Any = None,
        means_init: Any = None,
        precisions_init: Any = None,
        random_state: RandomState = None,
        warm_start: bool = False,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.tol = tol
        self.reg_covar = reg_covar
        self.max_iter = max_iter
        self.n_init = n_init
        self.init_params = init_params
        self.weights_init = weights_init
        self.means_init = means_init
        self.precisions_init = precisions_init
        self.random_state = random_state
        self.warm_start = warm_start

    # -- Fitting -------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the mixture to the rows of X; y is ignored."""
        goes_on = bool(self.warm_start) and hasattr(self, "converged_")
        self._check_parameters()
        x = read_features(self, X, reset=True)
        if len(x) < max(2, self.n_components):
            raise InputError(
                f"{len(x)} samples for n_components={self.n_components} (n_samples = {len(x)})",
                expected="n_samples >= n_components, and at least 2 samples, not 1 sample",
                fix="give more rows, or ask for fewer components",
            )
        given = self._given(x)
        seed = draw_seed(self.random_state)
        task = MixtureTask(
            x.shape[1],
            int(self.n_components),
            covariance_type=self.covariance_type,
            starts=1 if goes_on else int(self.n_init),
            init=self.init_params,
            tol=float(self.tol),
            reg_covar=float(self.reg_covar),
        ).to(x.device)
        data = TensorData({"inputs": x})
        if goes_on:
            self._go_on(task, data)
        else:
            _start(task, data, given, seed)
        fit_statistics(task, data, sweeps=int(self.max_iter), seed=seed, device=x.device, started=True)
        self._keep(task)
        return self

    def fit_predict(self, X: Any, y: Any = None) -> Any:
        """Fit the mixture, and give the most probable component of each row of X."""
        return self.fit(X).predict(X)

    def _check_parameters(self) -> None:
        for name, low in (("n_components", 1), ("max_iter", 0), ("n_init", 1)):
            value = getattr(self, name)
            check(is_number(value, low, np.inf, whole=True), name, value, f"an integer >= {low}")
        for name in ("tol", "reg_covar"):
            value = getattr(self, name)
            check(is_number(value, 0, np.inf), name, value, "a number >= 0")
        if self.covariance_type not in COVARIANCE_TYPES:
            raise unknown_name("covariance_type", str(self.covariance_type), COVARIANCE_TYPES)
        if self.init_params not in get_args(Start):
            raise unknown_name("init_params", str(self.init_params), get_args(Start))

    def _given(self, x: Tensor) -> dict[str, Tensor]:
        """The parameters that the user wants to start from, as those of `make_mixture`."""
        components, features = int(self.n_components), x.shape[1]
        kind = self.covariance_type
        own = covariance_shape(kind, components, features)
        shapes = {
            "weights": (components,),
            "means": (components, features),
            "precisions": {"tied": own[1:], "spherical": own[:1]}.get(kind, own),
        }
        found = {}
        for name, shape in shapes.items():
            value = getattr(self, f"{name}_init")
            if value is None:
                continue
            tensor = torch.as_tensor(np.asarray(to_numpy(value), dtype=np.float64), device=x.device)
            if tuple(tensor.shape) != shape or not bool(tensor.isfinite().all()):
                raise InputError(
                    f"{name}_init of shape {tuple(tensor.shape)}", expected=f"finite numbers of shape {shape}"
                )
            found[name] = tensor
        weights = found.get("weights")
        if weights is not None and not (bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) < 1e-6):
            raise InputError(
                f"weights_init that sum to {float(weights.sum()):g}",
                expected="numbers of at least 0 that sum to 1",
                fix="divide them by their sum",
            )
        if "precisions" in found:
            found["covariances"] = _inverse(found.pop("precisions"), kind).reshape(own)
        return found

    def _go_on(self, task: MixtureTask, data: TensorData) -> None:
        before = self._task
        if (before.features, before.components, before.covariance_type) != (
            task.features, task.components, task.covariance_type,
        ):  # fmt: skip
            raise InputError(
                f"warm_start from {before.components} {before.covariance_type} components of "
                f"{before.features} features",
                expected=f"{task.components} {task.covariance_type} components of {task.features} features",
                fix="set warm_start=False to begin anew",
            )
        task.fit_frame(data)
        mixture = before.mixture().map(lambda tensor: tensor.to(task.shift.device))
        task.begin(task.frame.put(mixture).map(lambda tensor: tensor[None]))
        task.bounds.fill_(self.lower_bound_)

    def _keep(self, task: MixtureTask) -> None:
        self._task = task
        best = int(task.best)
        mixture = task.mixture()
        factors = mixture.factors
        precisions = factors @ factors.mT if mixture.matrices else factors.square()
        self.weights_, self.means_ = to_numpy(mixture.weights), to_numpy(mixture.means)
        self.covariances_ = self._shaped(mixture.covariances)
        self.precisions_, self.precisions_cholesky_ = self._shaped(precisions), self._shaped(factors)
        self.n_iter_ = int(task.sweeps[best])
        self.converged_ = self.n_iter_ > 0 and not bool(task.active[best])
        self.lower_bound_ = float(task.bounds[best])
        self.lower_bounds_ = [bounds[best] for bounds in task.trace[: self.n_iter_]]
        if not self.converged_ and self.n_iter_:
            warnings.warn(
                f"the best of {task.starts} starts did not converge in {self.n_iter_} iterations: "
                "raise max_iter or tol, or try other init_params",
                ConvergenceWarning,
                stacklevel=3,
            )

    def _shaped(self, values: Tensor) -> Any:
        """Covariances in scikit-learn's shape: (K, D, D), (D, D), (K, D) or (K,)."""
        if self.covariance_type == "tied":
            return to_numpy(values[0])
        return to_numpy(values[:, 0] if self.covariance_type == "spherical" else values)

    # -- Using ---------------------------------------------------------------------------------

    def _log_densities(self, X: Any) -> Tensor:
        x = read_features(self, X)
        task = self._task if self._task.shift.device == x.device else copy.deepcopy(self._task).to(x.device)
        return task.log_densities(x)

    def predict(self, X: Any) -> Any:
        """The most probable component of each row, (N,)."""
        return in_form_of(X, self._log_densities(X).argmax(-1))

    def predict_proba(self, X: Any) -> Any:
        """The responsibility of each component for each row, (N, K)."""
        return in_form_of(X, self._log_densities(X).softmax(-1))

    def score_samples(self, X: Any) -> Any:
        """ln p(x) of each row, (N,)."""
        return in_form_of(X, self._log_densities(X).logsumexp(-1))

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of ln p(x)."""
        return float(self._log_densities(X).logsumexp(-1).double().mean())

    def bic(self, X: Any) -> float:
        """p·ln N − 2·ln L of the rows of X, with p free parameters; the smaller, the better."""
        return bayesian_information(self.score(X) * len(X), self._parameters(), len(X))

    def aic(self, X: Any) -> float:
        """2p − 2·ln L of the rows of X, with p free parameters; the smaller, the better."""
        return akaike_information(self.score(X) * len(X), self._parameters())

    def _parameters(self) -> int:
        task = self._task
        return mixture_parameter_count(task.covariance_type, task.components, task.features)

    def sample(self, n_samples: int = 1) -> tuple[Array, Array]:
        """`n_samples` draws (N, D), and the component (N,) that each came from."""
        if not hasattr(self, "converged_"):
            read_features(self, np.zeros((1, 1)))  # says that the model is not fitted
        check(is_number(n_samples, 1, np.inf, whole=True), "n_samples", n_samples, "an integer >= 1")
        task = copy.deepcopy(self._task).cpu()
        generator = torch.Generator().manual_seed(draw_seed(self.random_state))
        rows, components = task.draw(int(n_samples), generator)
        return to_numpy(rows), to_numpy(components)


def _start(task: MixtureTask, data: TensorData, given: dict[str, Tensor], seed: int) -> None:
    """Begin where the user says, and for what is not said, where `init_params` says."""
    if len(given) == 3:
        task.fit_frame(data)
        parts = {}
    else:
        task.start(data, torch.Generator(data.device).manual_seed(seed))
        if not given:
            return
        parts = task.frame.take(Mixture(task.weights, task.means, task.covariances, task.factors))._asdict()
        parts.pop("factors")
    starts = {name: value.expand(task.starts, *value.shape) for name, value in given.items()}
    task.begin(task.frame.put(make_mixture(**{**parts, **starts})))


def _inverse(precisions: Tensor, kind: str) -> Tensor:
    matrices = kind in ("full", "tied")
    if matrices:
        lower, failed = torch.linalg.cholesky_ex(precisions)
        good = not bool(failed.any()) and torch.allclose(precisions, precisions.mT)
    else:
        good = bool((precisions > 0).all())
    if not good:
        raise InputError(
            "precisions_init that are not positive" + (" definite" if matrices else ""),
            expected="symmetric, positive definite matrices" if matrices else "positive numbers",
        )
    return torch.cholesky_inverse(lower) if matrices else 1 / precisions
